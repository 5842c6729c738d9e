// Launch functions of the sm90 kernels, called by run_mha.cpp: one for each dtype, head dim and kind, instantiated in
// flash_fwd_instantiation.cu, flash_fwd_split_instantiation.cu and flash_bwd_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../flash.h"
#include "dispatch/kind.h"

namespace flash::sm90 {

// tile_counter: varlen, a zero in GPU memory; CTAs take the number of their next work tile from it. Else null. Throws
// std::runtime_error when the launch fails.
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

}  // namespace flash::sm90
