// What backends that are written in Python, as the Triton one is, take from the extension: the checks of its entries
// alone, the state of dropout and its mask.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash {

void bind_for_python_backends(pybind11::module_ &module);

}  // namespace flash
