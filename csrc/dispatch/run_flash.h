// The functions of the architectures that run_mha.cpp calls. The CUDA ones are instantiated for each dtype, head dim
// and kind, in the files named instantiation. It includes no CUDA headers. kvcache/splitkv.h has the functions of a KV
// cache.
#pragma once

#include <cstdint>

#include "flash.h"
#include "kind.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

// Computes params.o and params.softmax_lse on the calling thread's at::parallel_for pool. Throws
// std::bad_alloc for lack of memory.
void run_mha_fwd_cpu(const Flash_fwd_params &params);

// Computes params.dq, dk, dv (those that are not null) and dsoftmax_sum on the calling thread's at::parallel_for pool,
// bitwise the same for every number of threads. Throws std::bad_alloc for lack of memory.
void run_mha_bwd_cpu(const Flash_bwd_params &params);

// Computes params.dbias on the calling thread's at::parallel_for pool, bitwise the same for every number of threads.
// Throws std::bad_alloc for lack of memory.
void run_mha_bias_bwd_cpu(const Flash_bias_bwd_params &params);

// Appends the new keys to the cache, rotates them and the queries, then computes params.o and params.softmax_lse. Runs
// on the calling thread's at::parallel_for pool. Throws std::bad_alloc for lack of memory.
void run_mha_fwd_kvcache_cpu(const Flash_fwd_params &params);

// Writes the gradient of what joins each row (common/row_mod.h), contiguous and in its dtype, from the row statistics
// of params. Throws std::runtime_error if the launch fails.
void run_row_mod_gradient(const Flash_bwd_params &params, void *gradient, cudaStream_t stream);

// Writes the scratch of params.key_ranges (common/key_ranges.h). Throws std::runtime_error if the launch fails.
void run_prepare_key_ranges(const Flash_fwd_params &params, cudaStream_t stream);

namespace sm80 {

// Throws std::runtime_error if the launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream);

// Both throw std::runtime_error if a launch fails. The general one takes any call; the others pass it the rare ones.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream);
template <DType kDType, int kHeadDim>
void run_flash_bwd_general(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace sm80

namespace sm90 {

// tile_counter: with variable lengths or key_ranges a zero in GPU memory, from which CTAs take the number of their next
// work tile; else null. Throws std::runtime_error if the launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream);

// Attention over a cache, for many queries: the query heads of a group share the rows of a tile, and the keys are split
// over the CTAs.

// Floats of KvCache::scratch.
template <DType kDType, int kHeadDim>
int64_t split_scratch_floats(const Flash_fwd_params &params);

template <DType kDType, int kHeadDim>
void run_flash_fwd_split(const Flash_fwd_params &params, cudaStream_t stream);

// Throws std::runtime_error when a launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace sm90
}  // namespace flash
