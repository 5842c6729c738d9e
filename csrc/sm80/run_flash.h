// Launch functions of the sm80 kernels, called by run_mha.cpp: one for each dtype, head dim and kind, instantiated in
// flash_fwd_instantiation.cu and flash_bwd_instantiation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../flash.h"
#include "dispatch/kind.h"

namespace flash::sm80 {

// Throws std::runtime_error if the launch fails.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, cudaStream_t stream);

// Both throw std::runtime_error if a launch fails. The general one takes any call; the others pass it the rare ones.
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd(const Flash_bwd_params &params, cudaStream_t stream);
template <DType kDType, int kHeadDim>
void run_flash_bwd_general(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace flash::sm80
