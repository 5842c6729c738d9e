// What run_mha.cpp calls: one launch function per (dtype, head dim, mask), instantiated in flash_bwd_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../flash.h"

namespace flash::sm80 {

// Throws std::runtime_error when a launch fails.
template <DType kDType, int kHeadDim, bool Is_causal>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace flash::sm80
