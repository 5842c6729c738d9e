// The functions of kernel_inputs.h.
#include "api/kernel_inputs.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "api/allocation.h"
#include "common/message.h"

namespace flash {
namespace {

constexpr int64_t kHeadDimMultiple = 8;

}  // namespace

std::string backend_of(const at::Tensor &q) {
    FLASH_CHECK_NOT_IMPLEMENTED(q.is_cpu() || q.is_cuda(), "q is on ", q.device(), "; allowed: cpu and cuda devices");
    return q.is_cpu() ? "cpu" : "cuda";
}

ScaledQuery with_nonzero_scale(const at::Tensor &q, double softmax_scale) {
    return softmax_scale == 0.0 ? ScaledQuery{at::zeros(q.sizes(), q.options()), 1.0} : ScaledQuery{q, softmax_scale};
}

ScaledQuery with_positive_scale(const at::Tensor &q, double softmax_scale) {
    if (softmax_scale >= 0.0) {
        return with_nonzero_scale(q, softmax_scale);
    }
    at::Tensor negative = empty_contiguous_last(q);
    return {at::neg_out(negative, q), -softmax_scale};
}

int64_t padded_headdim(const at::Tensor &q, const at::Tensor &v) {
    const int64_t largest = std::max(q.size(-1), v.size(-1));
    const int64_t headdim = (largest + kHeadDimMultiple - 1) / kHeadDimMultiple * kHeadDimMultiple;
    return q.is_cuda() && (q.size(-1) != headdim || v.size(-1) != headdim) ? headdim : 0;
}

at::Tensor padded(const at::Tensor &x, int64_t headdim) {
    return x.size(-1) == headdim ? x : at::constant_pad_nd(x, {0, headdim - x.size(-1)});
}

}  // namespace flash
