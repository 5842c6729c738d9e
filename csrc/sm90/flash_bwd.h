// What run_mha.cpp calls: one launch function per (dtype, head dim, kind of call), instantiated in
// flash_bwd_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../flash.h"
#include "dispatch/kind.h"

namespace flash::sm90 {

// Throws std::runtime_error when a launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace flash::sm90
