// Launch function of the tensor-core kernel without overlap (flash_attn_tensor_cores.cu). bindings.cpp
// calls it. No torch here.
#pragma once

#include <cuda_runtime_api.h>

namespace flash {

// As run_flash_attn_minimal, in float16 (the pointers are void, so that this header needs no CUTLASS). headdim is 64 or
// 128; the pointers are aligned to 16 bytes. GPUs of compute capability 8.0 and later.
// Throws std::invalid_argument for a bad size and std::runtime_error when the launch fails.
void run_flash_attn_tensor_cores(const void *q,  // [heads, seqlen_q, headdim]
                                 const void *k,  // [heads, seqlen_k, headdim]
                                 const void *v,  // [heads, seqlen_k, headdim]
                                 void *o,        // [heads, seqlen_q, headdim]
                                 int heads, int seqlen_q, int seqlen_k, int headdim, float softmax_scale, bool causal,
                                 cudaStream_t stream);

}  // namespace flash
