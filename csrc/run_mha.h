// run_mha_fwd and run_mha_bwd: from a filled params struct to the kernel for this device, dtype, head dim and mask.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "flash.h"

namespace flash {

// Runs on `device`; on CUDA, on the current stream.
void run_mha_fwd(Flash_fwd_params &params, c10::Device device);
void run_mha_bwd(Flash_bwd_params &params, c10::Device device);

// Multiprocessors of the current GPU.
int multiprocessor_count();

// Why no compiled kernel runs on a GPU of compute capability major.minor, with the command that would build one; empty
// when one does.
std::string cuda_unavailable_reason(int major, int minor);

}  // namespace flash
