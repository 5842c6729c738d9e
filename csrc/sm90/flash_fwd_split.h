// Attention over a cache on Hopper, for many queries: the query heads of a group share the rows of a tile, and the keys
// are split over the CTAs. Host interface, instantiated in flash_fwd_split_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../flash.h"

namespace flash::sm90 {

// Floats of KvCache::scratch.
template <DType kDType, int kHeadDim>
int64_t split_scratch_floats(const Flash_fwd_params &params);

template <DType kDType, int kHeadDim>
void run_flash_fwd_split(const Flash_fwd_params &params, cudaStream_t stream);

}  // namespace flash::sm90
