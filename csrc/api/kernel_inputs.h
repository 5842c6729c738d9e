// What the entries of flash_api.cpp and attn_bias.cpp share: a q, a scale and head dims that kernels can take.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace flash {

// "cpu" or "cuda".
std::string backend_of(const at::Tensor &q);

// A q and a scale that give the same scores.
struct ScaledQuery {
    at::Tensor q;
    double softmax_scale;
};

// The kernels divide by the scale, so it must not be 0. A scale of 0 gives equal weights to all visible keys; so does
// q = 0.
ScaledQuery with_nonzero_scale(const at::Tensor &q, double softmax_scale);

// The forward kernels find the largest score before they scale it, so the scale must be positive. The sign moves into
// q.
ScaledQuery with_positive_scale(const at::Tensor &q, double softmax_scale);

// Head dims that are no multiple of 8, on CUDA: the kernels move 16 bytes at a time. `padded` appends zeros, which
// change no score; they are sliced off the results.
bool needs_padding(const at::Tensor &q);
at::Tensor padded(const at::Tensor &x);

}  // namespace flash
