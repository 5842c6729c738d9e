// flash_attn_with_kvcache on CUDA, on any architecture: append the new keys, attend with the keys split over the SMs,
// combine the partial results. Host interface; no CUDA here.
#pragma once

#include <cstdint>

#include "../flash.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

// True if the kernels can read rows of x, 2 bytes an element, 16 bytes at a time.
inline bool is_aligned(const TensorRef &x, int headdim) {
    return reinterpret_cast<uintptr_t>(x.ptr) % 16 == 0 &&
           (x.batch_stride | x.row_stride | x.head_stride | headdim) % 8 == 0;
}

namespace kvcache {
struct SplitkvPlan;
}

// Combines the partial results of the heads that several CTAs worked on.
template <DType kDType, int kHeadDim>
void run_combine_splits(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan, cudaStream_t stream);

// Floats of KvCache::scratch. max_smem: bytes of shared memory that a CTA may have.
template <DType kDType, int kHeadDim>
int64_t splitkv_scratch_floats(const Flash_fwd_params &params, int max_smem);

// Writes k_new and v_new to the cache, and the rotated q to Flash_fwd_params::q.
template <DType kDType>
void run_append_kv(const Flash_fwd_params &params, cudaStream_t stream);

// Attention with the keys split. follows_append: run_append_kv is the call before it in the stream.
template <DType kDType, int kHeadDim>
void run_flash_fwd_splitkv(const Flash_fwd_params &params, int max_smem, bool follows_append, cudaStream_t stream);

}  // namespace flash
