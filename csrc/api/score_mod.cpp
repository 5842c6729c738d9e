// The functions of score_mod.h.
#include "api/score_mod.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "api/allocation.h"
#include "api/check_tensors.h"
#include "api/key_ranges.h"
#include "api/set_params.h"
#include "common/message.h"
#include "common/trace.h"

#ifdef FLASH_WITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "dispatch/run_mha.h"
#endif

namespace flash {
namespace {

// ---- checks ---------------------------------------------------------------------------------------------------------

// These ranges keep every factor that a kernel derives from the two, and its products with q.k of float16 inputs,
// inside float32. float64 without a softcap multiplies only by softmax_scale.
void check_scale_and_softcap(const Options &options, at::ScalarType dtype) {
    constexpr double kMin = 1e-20, kMax = 1e20;
    const auto is_within = [](double x, double min, double max) {
        return x == 0.0 || (std::abs(x) >= min && std::abs(x) <= max);  // false for NaN
    };
    const double scale = options.softmax_scale, softcap = options.softcap;
    const bool is_wide = dtype == at::kDouble && softcap == 0.0;
    const double min = is_wide ? 1e-300 : kMin, max = is_wide ? 1e300 : kMax;
    FLASH_CHECK_VALUE(is_within(scale, min, max), "softmax_scale is ", scale,
                      "; allowed: 0, a finite number of magnitude ", min, " to ", max, ", or None for 1/sqrt(headdim)");
    FLASH_CHECK_VALUE(softcap >= 0.0 && is_within(softcap, kMin, kMax), "softcap is ", softcap,
                      "; allowed: 0 (off) or a positive number from ", kMin, " to ", kMax);
    FLASH_CHECK_VALUE(softcap == 0.0 || is_within(scale / softcap, kMin, kMax), "softmax_scale is ", scale,
                      " and softcap is ", softcap,
                      "; allowed: a quotient softmax_scale / softcap of 0 or of magnitude ", kMin, " to ", kMax);
    FLASH_CHECK_VALUE(options.softcap == 0.0 || options.dropout_p == 0.0, "softcap is ", options.softcap,
                      " and dropout_p is ", options.dropout_p, "; allowed: one of the two, not both");
}

void check_alibi_slopes(const at::Tensor &slopes, const at::Tensor &q, int64_t batch) {
    FLASH_CHECK_TYPE(slopes.scalar_type() == at::kFloat, "alibi_slopes has dtype ", slopes.scalar_type(),
                     "; allowed: float32");
    check_same_device({"alibi_slopes", slopes}, q);
    const int64_t nheads = q.size(-2);
    const std::vector<int64_t> per_head{nheads}, per_batch{batch, nheads};
    FLASH_CHECK_VALUE(slopes.sizes() == per_head || slopes.sizes() == per_batch, "alibi_slopes has shape ",
                      slopes.sizes(), "; allowed: [nheads] = ", list_of(per_head),
                      " or [batch, nheads] = ", list_of(per_batch));
    check_last_dim_contiguous({"alibi_slopes", slopes});
}

void check_learnable_sink(const at::Tensor &sink, const at::Tensor &q, int64_t batch) {
    FLASH_CHECK_TYPE(sink.scalar_type() == at::kFloat || sink.scalar_type() == q.scalar_type(),
                     "learnable_sink has dtype ", sink.scalar_type(), "; allowed: float32 or that of q, ",
                     q.scalar_type());
    check_same_device({"learnable_sink", sink}, q);
    const int64_t nheads = q.size(-2);
    const std::vector<int64_t> per_head{nheads}, per_batch{batch, nheads};
    const bool is_varlen = q.dim() == 3;
    FLASH_CHECK_VALUE(sink.sizes() == per_head || (!is_varlen && sink.sizes() == per_batch),
                      "learnable_sink has shape ", sink.sizes(), "; allowed: [nheads] = ", list_of(per_head),
                      is_varlen ? std::string() : " or [batch, nheads] = " + list_of(per_batch));
}

// The stride from one sequence to the next of a tensor [nheads] or [batch, nheads].
int64_t batch_stride_of(const at::Tensor &x) {
    return x.dim() == 2 ? x.stride(0) : 0;
}

// ---- gradients ------------------------------------------------------------------------------------------------------

// The elements of softmax_d, which begins each sequence at a multiple of kRowsRounded rows, in the order of the rows of
// q: [nheads, total_q]. Rows of no sequence get 0.
at::Tensor rows_of_sequences(const at::Tensor &softmax_d, const at::Tensor &cu_seqlens_q, const c10::SymInt &total_q) {
    constexpr int kRows = Flash_bwd_params::kRowsRounded;
    const c10::SymInt batch = cu_seqlens_q.sym_size(0) - 1;
    const at::Tensor begins = cu_seqlens_q.narrow_symint(0, 0, batch), ends = cu_seqlens_q.narrow_symint(0, 1, batch);
    const at::Tensor rows = at::arange(at::Scalar(total_q), cu_seqlens_q.options());
    const at::Tensor sequence = at::searchsorted(ends.contiguous(), rows, /*out_int32=*/false, /*right=*/true);
    const at::Tensor known = sequence.clamp_max(at::Scalar(batch - 1)), begin = begins.index_select(0, known);
    const at::Tensor padded = (begin.div(kRows, "floor") + known) * kRows + rows - begin;
    const at::Tensor of_rows = softmax_d.index_select(-1, padded.clamp(0, at::Scalar(softmax_d.sym_size(-1) - 1)));
    return of_rows.masked_fill(sequence.ne(known), 0.0);
}

// The sum of -exp(sink - lse) * softmax_d over the rows of a head.
at::Tensor sink_gradient(const at::Tensor &sink, const RowStatistics &rows) {
    const at::Tensor &lse = rows.softmax_lse;
    if (lse.sym_numel() == 0) {
        return at::zeros_like(sink);
    }
    const c10::SymInt count = lse.sym_size(-1);
    at::Tensor delta = rows.cu_seqlens_q.has_value() ? rows_of_sequences(rows.softmax_d, *rows.cu_seqlens_q, count)
                                                     : rows.softmax_d.narrow_symint(-1, 0, count);
    const at::Tensor logits = sink.to(lse.scalar_type()).unsqueeze(-1);
    const at::Tensor is_all = lse.eq(logits);  // as in a row without keys, whose lse is the sink, -inf too
    if (rows.dsoftmax_lse.has_value()) {       // softmax_d does not have it there
        delta = at::where(is_all, rows.dsoftmax_lse->neg(), delta);
    }
    at::Tensor products = logits.sub(lse).masked_fill(is_all, 0.0).exp().mul(delta);
    if (rows.cu_seqlens_q.has_value()) {  // a row of no sequence has an undefined log-sum-exp, and delta 0
        products = at::where(delta.eq(0.0), delta, products);
    }
    const bool is_of_batch = sink.dim() == 1 && products.dim() == 3;
    const at::Tensor sum = is_of_batch ? products.sum(at::IntArrayRef({0, 2})) : products.sum(-1);
    return sum.neg().to(sink.scalar_type());
}

#ifdef FLASH_WITH_CUDA
// The same by one kernel; undefined if this build has none for these tensors.
at::Tensor sink_gradient_by_kernel(const at::Tensor &given_sink, const RowStatistics &rows) {
    if (rows.softmax_lse.scalar_type() != at::kFloat || rows.softmax_lse.numel() == 0) {
        return {};
    }
    const c10::OptionalDeviceGuard device_guard(given_sink.device());
    const auto dense = [](const at::Tensor &x) { return without_neg(x.contiguous()); };
    const at::Tensor sink = dense(given_sink), lse = dense(rows.softmax_lse), softmax_d = dense(rows.softmax_d),
                     dlse = rows.dsoftmax_lse.has_value() ? dense(*rows.dsoftmax_lse) : at::Tensor(),
                     cu_seqlens = rows.cu_seqlens_q.has_value() ? rows.cu_seqlens_q->contiguous() : at::Tensor();
    Flash_bwd_params params;
    params.sink = sink.data_ptr();
    params.sink_dtype = dtype_of(sink);
    params.sink_batch_stride = batch_stride_of(sink);
    params.softmax_lse = lse.data_ptr();
    params.dsoftmax_lse = dlse.defined() ? dlse.data_ptr() : nullptr;
    params.dsoftmax_sum = softmax_d.data_ptr();
    params.h = static_cast<int>(lse.size(-2));
    params.lse_head_stride = lse.size(-1);
    params.padded_head_stride = softmax_d.size(-1);
    if (cu_seqlens.defined()) {
        params.b = static_cast<int>(cu_seqlens.size(0)) - 1;
        params.total_q = lse.size(-1);
        params.cu_seqlens_q = cu_seqlens.data_ptr<int>();
    } else {
        params.b = static_cast<int>(lse.size(0));
        params.seqlen_q = static_cast<int>(lse.size(-1));
        params.lse_batch_stride = params.h * params.lse_head_stride;
        params.padded_batch_stride = params.h * params.padded_head_stride;
    }
    const at::Tensor gradient = at::empty(sink.sizes(), sink.options());
    return run_row_mod_gradient(params, gradient.data_ptr()) ? gradient : at::Tensor();
}
#endif

}  // namespace

void check_score_mod(const Options &options, const at::Tensor &q, int64_t batch) {
    if (options.alibi_slopes.has_value()) {
        check_alibi_slopes(*options.alibi_slopes, q, batch);
    }
    if (options.learnable_sink.has_value()) {
        check_learnable_sink(*options.learnable_sink, q, batch);
    }
    check_scale_and_softcap(options, q.scalar_type());
}

Options readable(Options options, const at::Tensor &softmax_lse) {
    for_each_tensor(options, [](const char *, Optional &x) {
        if (x.has_value()) {
            x = without_neg(*x);
        }
    });
    if (options.key_ranges.has_value()) {
        options.key_ranges = readable_key_ranges(*options.key_ranges);
    }
    if (options.learnable_sink.has_value()) {
        const at::Tensor &sink = *options.learnable_sink;  // CUDA kernels read its own dtype
        options.learnable_sink = (sink.is_cuda() ? sink : sink.to(softmax_lse.scalar_type())).contiguous();
    }
    return options;
}

Options readable_by_backward(Options options, const at::Tensor &softmax_lse) {
    if (!options.attn_bias.has_value()) {  // with a bias, a row without a key is known by the sink (preprocess_rows.h)
        options.learnable_sink.reset();
    }
    return readable(std::move(options), softmax_lse);
}

void set_score_mod(Flash_fwd_params &params, const Options &options, double softmax_scale) {
    params.softmax_scale = softmax_scale;
    params.softcap = options.softcap;
    const bool has_softcap = options.softcap > 0.0;
    const double scale_softmax = has_softcap ? options.softcap : softmax_scale;
    params.qk_scale = static_cast<float>(softmax_scale);
    params.cap_scale = has_softcap ? static_cast<float>(softmax_scale / options.softcap) : 0.0f;
    params.scale_softmax = static_cast<float>(scale_softmax);
    params.scale_softmax_log2 = static_cast<float>(scale_softmax * kLog2e);
    if (options.alibi_slopes.has_value()) {
        params.alibi_slopes = options.alibi_slopes->data_ptr<float>();
        params.alibi_slopes_batch_stride = batch_stride_of(*options.alibi_slopes);
    }
    if (options.learnable_sink.has_value()) {
        params.sink = options.learnable_sink->data_ptr();
        params.sink_dtype = dtype_of(*options.learnable_sink);
        params.sink_batch_stride = batch_stride_of(*options.learnable_sink);
    }
}

std::string describe_score_mod(const Flash_fwd_params &params) {
    return message("scale=", params.softmax_scale, " softcap=", params.softcap,
                   " alibi=", name_of(params.alibi_slopes != nullptr), " sink=", name_of(params.sink != nullptr));
}

void fill_lse_without_keys(const at::Tensor &softmax_lse, const Options &options) {
    if (options.learnable_sink.has_value()) {
        softmax_lse.copy_(options.learnable_sink->unsqueeze(-1).expand(softmax_lse.sizes()));
    } else {
        softmax_lse.fill_(-std::numeric_limits<double>::infinity());
    }
}

bool has_gradient(const std::string &option) {
    return option == "learnable_sink";
}

at::Tensor option_gradient(const std::string &option, const at::Tensor &x, const RowStatistics &rows) {
    FLASH_CHECK(has_gradient(option), option, " has no gradient");
    return sink_gradient(x, rows);
}

at::Tensor option_gradient_cuda(const std::string &option, const at::Tensor &x, const RowStatistics &rows) {
#ifdef FLASH_WITH_CUDA
    const at::Tensor gradient = sink_gradient_by_kernel(x, rows);
    if (gradient.defined()) {
        return gradient;
    }
#endif
    return option_gradient(option, x, rows);
}

}  // namespace flash
