// Whether the elements of tensors share memory, decided from addresses and strides on the host.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash {

// True if two elements of x share memory.
bool has_internal_overlap(const at::Tensor &x);

// True if an element of a and an element of b share memory. Tensors that alternate in memory share none.
bool have_overlap(const at::Tensor &a, const at::Tensor &b);

}  // namespace flash
