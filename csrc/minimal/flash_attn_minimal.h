// Launch function of the minimal kernel (flash_attn_minimal.cu). It is not part of the call chain of flash_attn_func:
// _C.minimal_fwd and tests/test_minimal_cuda.py call it. No torch here.
#pragma once

#include <cuda_runtime_api.h>

namespace flash {

// o = softmax(softmax_scale * q kᵀ) v for a single head, on `stream`. All pointers are device memory, row-major and
// contiguous. headdim is 1 to 128. Causal is aligned to the bottom right: query i sees key j when
// j <= i + seqlen_k - seqlen_q. A query that sees no key gets a row of zeros.
// Throws std::invalid_argument for a bad size and std::runtime_error when the launch fails.
void run_flash_attn_minimal(const float *q,  // [seqlen_q, headdim]
                            const float *k,  // [seqlen_k, headdim]
                            const float *v,  // [seqlen_k, headdim]
                            float *o,        // [seqlen_q, headdim]
                            int seqlen_q, int seqlen_k, int headdim, float softmax_scale, bool causal,
                            cudaStream_t stream);

}  // namespace flash
