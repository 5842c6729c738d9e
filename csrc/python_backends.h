// Functions of the extension for backends that are written in Python (Triton): argument checks, the random state of
// dropout, and S_dmask. For context parallel: the SMs that forwards leave to messages.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash {

void bind_for_python_backends(pybind11::module_ &module);

}  // namespace flash
