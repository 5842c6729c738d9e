// The teaching kernels of csrc/minimal as functions of the extension: minimal_fwd and tensor_cores_fwd. The ladder
// calls them; they are not part of the call chain of flash_attn_func.
#pragma once

#include <pybind11/pybind11.h>

namespace flash {

// Adds the functions to the module. Without CUDA in the build there are none.
void bind_minimal_kernels(pybind11::module_ &module);

}  // namespace flash
