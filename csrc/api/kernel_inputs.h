// What the entries of the extension share (flash_api.cpp, kvcache_api.cpp): the backend's name, and the q, scale and
// slopes that kernels read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <string>

#include "api/allocation.h"
#include "api/options.h"
#include "common/message.h"

namespace flash {

// "cpu" or "cuda".
inline std::string backend_of(const at::Tensor &q) {
    FLASH_CHECK_NOT_IMPLEMENTED(q.is_cpu() || q.is_cuda(), "q is on ", q.device(), "; allowed: cpu and cuda devices");
    return q.is_cpu() ? "cpu" : "cuda";
}

// A q and a scale that give the same scores.
struct ScaledQuery {
    at::Tensor q;
    double softmax_scale;
};

// The kernels divide by the scale, so it must not be 0. A scale of 0 gives equal weights to all visible keys; so does
// q = 0.
inline ScaledQuery with_nonzero_scale(const at::Tensor &q, double softmax_scale) {
    return softmax_scale == 0.0 ? ScaledQuery{at::zeros(q.sizes(), q.options()), 1.0} : ScaledQuery{q, softmax_scale};
}

// The forward kernels find the largest score before they scale it, so the scale must be positive. The sign moves into
// q.
inline ScaledQuery with_positive_scale(const at::Tensor &q, double softmax_scale) {
    if (softmax_scale >= 0.0) {
        return with_nonzero_scale(q, softmax_scale);
    }
    at::Tensor negative = empty_contiguous_last(q);
    return {at::neg_out(negative, q), -softmax_scale};
}

// The log-sum-exp of rows without keys: -inf, or the sink.
inline void fill_lse_without_keys(const at::Tensor &softmax_lse, const Options &options) {
    if (options.learnable_sink.has_value()) {
        softmax_lse.copy_(options.learnable_sink->unsqueeze(-1).expand(softmax_lse.sizes()));
    } else {
        softmax_lse.fill_(-std::numeric_limits<double>::infinity());
    }
}

// The options with tensors that kernels can read. They must live until the kernels are launched.
inline Options readable(Options options, const at::Tensor &softmax_lse) {
    for_each_tensor(options, [](const char *, Optional &x) {
        if (x.has_value()) {
            x = without_neg(*x);
        }
    });
    if (options.learnable_sink.has_value()) {
        options.learnable_sink = options.learnable_sink->to(softmax_lse.scalar_type()).contiguous();
    }
    return options;
}

}  // namespace flash
