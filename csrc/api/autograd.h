// The gradients of the ops: kernels for the dispatch key Autograd.
#pragma once

#include <torch/library.h>

namespace flash::ops {

void register_autograd(torch::Library &library);

}  // namespace flash::ops
