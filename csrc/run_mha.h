// run_mha_fwd: from a filled params struct to the kernel for this device, dtype, head dim and mask.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "flash.h"

namespace flash {

// Runs on `device`; on CUDA, on the current stream.
void run_mha_fwd(Flash_fwd_params &params, c10::Device device);

// Why no compiled kernel runs on a GPU of compute capability major.minor, with the command that would build one; empty
// when one does.
std::string cuda_unavailable_reason(int major, int minor);

}  // namespace flash
