// What run_mha.cpp calls: one launch function per (dtype, head dim, kind of call), instantiated in
// flash_fwd_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../flash.h"
#include "dispatch/kind.h"

namespace flash::sm90 {

// tile_counter: varlen, a zero in GPU memory; CTAs take the number of their next work tile from it. Else null. Throws
// std::runtime_error when the launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream);

}  // namespace flash::sm90
