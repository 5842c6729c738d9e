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

// The head dim that q, k and v of a call on CUDA get, 0 if they have it: most kernels need one head dim
// (takes_own_headdim_v of dispatch/run_mha.h), a multiple of 8, because they move 16 bytes at a time. `padded` appends
// zeros, which change no score; they are sliced off the results.
int64_t padded_headdim(const at::Tensor &q, const at::Tensor &v);
at::Tensor padded(const at::Tensor &x, int64_t headdim);

}  // namespace flash
