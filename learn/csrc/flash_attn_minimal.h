// Launch function of the minimal kernel (flash_attn_minimal.cu). bindings.cpp calls it. No torch here.
#pragma once

#include <cuda_runtime_api.h>

namespace flash {

// o = softmax(softmax_scale * q kᵀ) v for each head of each batch entry, on `stream`. All pointers are device memory,
// row-major and contiguous. heads counts those of all batch entries, up to 65535; headdim is 1 to 128. Causal is
// aligned to the bottom right: query i sees key j when j <= i + seqlen_k - seqlen_q. A query that sees no key gets a
// row of zeros. padded: rows in shared memory are one float longer than headdim, which avoids bank conflicts. Throws
// std::invalid_argument for a bad size and std::runtime_error when the launch fails.
void run_flash_attn_minimal(const float *q,  // [heads, seqlen_q, headdim]
                            const float *k,  // [heads, seqlen_k, headdim]
                            const float *v,  // [heads, seqlen_k, headdim]
                            float *o,        // [heads, seqlen_q, headdim]
                            int heads, int seqlen_q, int seqlen_k, int headdim, float softmax_scale, bool causal,
                            bool padded, cudaStream_t stream);

}  // namespace flash
