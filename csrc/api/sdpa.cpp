// The functions of sdpa.h.
//
// An op has our kernel for the dispatch key BackendSelect, which stands above the keys of the devices and below
// autograd. PyTorch's kernels stay registered; ours passes on the calls that it cannot do by redispatching them. It
// stays registered after restore() and passes on all calls: the dispatcher does not allow to remove a kernel while
// another thread calls the op.
//
// The choice depends on the arguments of one call, not on what ran before: each forward returns what the fake
// implementation of the op promises, so a backward may run on our kernel or on PyTorch's, whichever ran the forward.
// Dropout is the exception, because its mask depends on the kernel: PyTorch runs both passes of such calls.
#include "api/sdpa.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "api/attn_bias.h"
#include "api/backend_choice.h"
#include "api/flash_api.h"
#include "api/ops.h"
#include "common/message.h"
#include "dispatch/built.h"
#include "flash.h"

#ifdef FLASH_WITH_CUDA
#include "dispatch/device.h"
#include "dispatch/run_mha.h"
#endif

namespace flash::sdpa {
namespace {

using at::Tensor;
using c10::IValue;
using Results = std::optional<std::vector<IValue>>;  // none: PyTorch's kernel must run the call

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Forwards with at most this many queries run the kernels of a KV cache on a GPU, which split the keys.
constexpr int64_t kMaxQueriesOfDecoding = 16;

Promises promises;
std::atomic<bool> active{false};

// ---- which calls are ours -------------------------------------------------------------------------------------------

// The arguments of one call, by their position in the schema.
using Arguments = c10::ArrayRef<IValue>;

bool is_given(const IValue &x) {
    return x.isTensor() && x.toTensor().defined();
}

std::optional<double> scale_at(const IValue &x) {
    return x.isNone() ? std::nullopt : std::optional<double>(x.toDouble());
}

// True if this build has compiled kernels for the device of x and its dtype, and FLASH_ATTN_MINI_BACKEND allows them.
bool has_kernels(const Tensor &x) {
    const at::ScalarType dtype = x.scalar_type();
    if (x.is_cpu()) {
        const bool is_known =
            dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
        return is_known && backend_asked_for(std::nullopt).value_or("cpu") == "cpu";
    }
#ifdef FLASH_WITH_CUDA
    if (x.is_cuda()) {
        const bool is_known =
            (dtype == at::kHalf && is_built(DType::float16)) || (dtype == at::kBFloat16 && is_built(DType::bfloat16));
        const DeviceProperties &device = device_properties(x.get_device());
        return is_known && runs_on(device.major, device.minor) &&
               backend_asked_for(std::nullopt).value_or("cuda") == "cuda";
    }
#endif
    return false;
}

int64_t max_headdim(const Tensor &q) {
    int64_t largest = q.is_cpu() ? kMaxHeadDim : 0;
    if (!q.is_cpu()) {
        for (int built : kBuiltHeadDims) {
            largest = std::max<int64_t>(largest, built);
        }
    }
    return largest;
}

// True if our kernels can do a call, as far as the order of the dimensions and the masks do not matter.
bool are_ours(const Tensor &q, const Tensor &k, const Tensor &v, int64_t dim, double dropout_p,
              const std::optional<double> &scale) {
    const auto is_like = [&](const Tensor &x) {
        return x.scalar_type() == q.scalar_type() && x.device() == q.device() && x.layout() == at::kStrided &&
               !x.is_nested() && x.dim() == dim;
    };
    return is_like(q) && is_like(k) && is_like(v) && has_kernels(q) && dropout_p == 0.0 && k.sizes() == v.sizes() &&
           q.size(-1) > 0 && q.size(-1) == k.size(-1) && q.size(-1) <= max_headdim(q) &&
           (!scale.has_value() || std::isfinite(*scale));
}

Options options_of(const Tensor &q, const std::optional<double> &scale, bool causal, int64_t left, int64_t right) {
    Options options{};
    options.softmax_scale = scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
    options.causal = causal;
    options.window_size_left = left;
    options.window_size_right = right;
    return options;
}

// How our kernels do a call with tensors [batch, nheads, seqlen, headdim].
struct Plan {
    Options options;
    int64_t seqlen_k;     // the keys that they read: no query sees those after
    bool has_empty_rows;  // a row may have no key
};

enum class Diagonal { top_left, bottom_right };  // where PyTorch's causal mask is aligned to; ours to the bottom right

std::optional<Plan> plan_of(const Tensor &q, const Tensor &k, const Tensor &v, double dropout_p, bool is_causal,
                            const std::optional<double> &scale, Diagonal diagonal) {
    if (!are_ours(q, k, v, 4, dropout_p, scale) || q.size(0) != k.size(0) || k.size(1) == 0 || q.size(1) == 0 ||
        q.size(1) % k.size(1) != 0) {
        return std::nullopt;
    }
    const int64_t seqlen_q = q.size(2), seqlen_k = k.size(2);
    if (!is_causal) {
        return Plan{options_of(q, scale, false, -1, -1), seqlen_k, seqlen_k == 0};
    }
    if (diagonal == Diagonal::bottom_right) {
        return Plan{options_of(q, scale, true, -1, 0), seqlen_k, seqlen_q > seqlen_k};
    }
    if (seqlen_q > seqlen_k) {  // PyTorch's diagonal is this much higher than ours
        return Plan{options_of(q, scale, false, -1, seqlen_q - seqlen_k), seqlen_k, seqlen_k == 0};
    }
    return Plan{options_of(q, scale, true, -1, 0), seqlen_q, false};
}

// The attn_mask of an op, broadcastable to [batch, nheads, seqlen_q, seqlen_k], as the option attn_bias: a view. None
// if our kernels cannot read it.
Optional attn_bias_of(const Tensor &mask, const Tensor &q, const Tensor &k) {
    const at::ScalarType dtype = mask.scalar_type();
    const bool is_known =
        dtype == at::kBool || dtype == q.scalar_type() || (dtype == at::kFloat && q.scalar_type() != at::kDouble);
    if (!is_known || mask.layout() != at::kStrided || mask.is_nested() || mask.device() != q.device() ||
        mask.dim() > 4) {
        return std::nullopt;
    }
    Tensor bias = mask;
    while (bias.dim() < 4) {
        bias = bias.unsqueeze(0);
    }
    const std::array<int64_t, 4> sizes{q.size(0), q.size(1), q.size(2), k.size(2)};
    for (int64_t dim = 0; dim < 4; ++dim) {
        if (bias.size(dim) != 1 && bias.size(dim) != sizes[dim]) {
            return std::nullopt;
        }
    }
    return bias.expand({-1, -1, -1, k.size(2)});
}

// The plan with the op's mask, if one is given.
std::optional<Plan> with_mask(std::optional<Plan> plan, const IValue &mask, const Tensor &q, const Tensor &k) {
    if (!is_given(mask) || !plan.has_value()) {
        return plan;
    }
    const Optional bias = attn_bias_of(mask.toTensor(), q, k);
    if (!bias.has_value() || plan->seqlen_k == 0) {
        return std::nullopt;
    }
    plan->options.attn_bias = bias->narrow(3, 0, plan->seqlen_k);
    return plan;
}

// ---- layouts --------------------------------------------------------------------------------------------------------

Tensor with_contiguous_last(const Tensor &x) {
    return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

// The first keys of k or v, or all queries, as the kernels read them: [batch, seqlen, nheads, headdim].
Tensor rows_first(const Tensor &x, int64_t seqlen) {
    return with_contiguous_last(x.size(2) == seqlen ? x : x.narrow(2, 0, seqlen)).transpose(1, 2);
}

Tensor empty_rows_first(const Tensor &x) {
    return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options());
}

// `result` with the strides of empty_like(x). It has others if x is expanded or its rows were copied.
Tensor like(const Tensor &x, const Tensor &result) {
    if (result.strides() == x.strides()) {
        return result;
    }
    const Tensor promised = at::empty_like(x);
    return result.strides() == promised.strides() ? result : promised.copy_(result);
}

// The same for tensors [batch, nheads, seqlen, headdim], with the strides of empty_like(x.transpose(1, 2)).
Tensor rows_first_like(const Tensor &x, const Tensor &result) {
    return like(x.transpose(1, 2), result.transpose(1, 2)).transpose(1, 2);
}

// Our log-sum-exp of a row without a key is -inf, that of PyTorch's flash kernels inf.
Tensor with_pytorchs_empty_rows(const Tensor &lse) {
    return lse.masked_fill(lse.eq(-kInfinity), kInfinity);
}
Tensor with_our_empty_rows(const Tensor &lse) {
    return lse.masked_fill(lse.eq(kInfinity), -kInfinity);
}

// That of a row from which a mask hides all keys is 0 in PyTorch's efficient and CPU kernels, whose result is 0 too.
// Our backward takes either: the scores of such a row are -inf.
Tensor with_pytorchs_hidden_rows(const Tensor &lse) {
    return lse.masked_fill(lse.eq(-kInfinity), 0.0);
}

// Where the results of an op with tensors [batch, nheads, seqlen, headdim] are rows first: their strides are those of a
// contiguous [batch, seqlen, nheads, ...]. Else out has the strides of empty_like(query) and the log-sum-exp is
// contiguous.
enum class Strides { like_inputs, rows_first };

// ---- our kernels ----------------------------------------------------------------------------------------------------

struct Forward {
    Tensor out, lse;
};

Forward forward(const Plan &plan, const Tensor &q, const Tensor &k, const Tensor &v,
                Strides strides = Strides::like_inputs) {
    const Tensor kernel_q = rows_first(q, q.size(2)), kernel_k = rows_first(k, plan.seqlen_k),
                 kernel_v = rows_first(v, plan.seqlen_k);
    const Optional given = strides == Strides::rows_first ? Optional(empty_rows_first(q)) : std::nullopt;
    Tensor out, lse;
    const bool has_mask = plan.options.attn_bias.has_value();
    if (q.is_cuda() && q.size(2) <= kMaxQueriesOfDecoding && q.numel() > 0 && plan.seqlen_k > 0 && !has_mask) {
        KvCacheOptions whole{};
        whole.cache_seqlen = -1;
        std::tie(out, lse) = mha_fwd_kvcache({whole, kernel_q, kernel_k, kernel_v, given, plan.options});
    } else {
        FwdResults results = mha_fwd({kernel_q, kernel_k, kernel_v, given, {}, plan.options});
        out = std::move(results.out);
        lse = std::move(results.softmax_lse);
    }
    return {strides == Strides::rows_first ? out.transpose(1, 2) : like(q, out.transpose(1, 2)),
            has_mask              ? with_pytorchs_hidden_rows(lse)
            : plan.has_empty_rows ? with_pytorchs_empty_rows(lse)
                                  : lse};
}

bool fits(const Tensor &grad_out, const Tensor &q, const Tensor &out) {
    return grad_out.sizes() == q.sizes() && out.sizes() == q.sizes() && grad_out.scalar_type() == q.scalar_type();
}

struct Gradients {
    Tensor dq, dk, dv;
    Tensor dbias;  // undefined where it is not wanted
};

Gradients backward(const Plan &plan, const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &v,
                   const Tensor &out, const Tensor &lse, Strides strides = Strides::like_inputs,
                   bool wants_dbias = false) {
    const bool is_rows_first = strides == Strides::rows_first;
    const Tensor kernel_q = rows_first(q, q.size(2)), kernel_k = rows_first(k, plan.seqlen_k),
                 kernel_v = rows_first(v, plan.seqlen_k);
    const auto new_gradient = [&](const Tensor &x) {
        return is_rows_first ? Optional(at::empty(x.sizes(), x.options())) : std::nullopt;
    };
    const auto [dq, dk, dv, softmax_d] =
        ops::backward({grad_out.transpose(1, 2),
                       {kernel_q, kernel_k, kernel_v},
                       out.transpose(1, 2),
                       plan.has_empty_rows ? with_our_empty_rows(lse) : lse,
                       std::nullopt,
                       {},
                       plan.options,
                       std::nullopt,
                       {true, true, true}},
                      new_gradient(kernel_q), new_gradient(kernel_k), new_gradient(kernel_v));
    const auto finished = [&](const Tensor &x, const Tensor &gradient) {
        if (gradient.size(1) == x.size(2)) {
            return is_rows_first ? gradient.transpose(1, 2) : like(x, gradient.transpose(1, 2));
        }
        const Tensor whole = is_rows_first ? empty_rows_first(x).transpose(1, 2) : at::empty_like(x);
        whole.narrow(2, 0, plan.seqlen_k).copy_(gradient.transpose(1, 2));
        whole.narrow(2, plan.seqlen_k, x.size(2) - plan.seqlen_k).zero_();  // no query sees these keys
        return whole;
    };
    Tensor dbias;
    if (wants_dbias) {
        dbias = mha_attn_bias_bwd({{kernel_q, kernel_k, kernel_v, std::nullopt, {}, plan.options},
                                   grad_out.transpose(1, 2),
                                   lse,
                                   softmax_d,
                                   std::nullopt});
    }
    return {finished(q, dq), finished(k, dk), finished(v, dv), dbias};
}

// A call with flash-attn's layout and masks, dense or varlen.
struct FlashCall {
    Tensor q, k, v;
    Sequences sequences;
    Options options;
    bool has_empty_rows;
};

// lengths: cum_seq_q, cum_seq_k, max_q and max_k. window: window_size_left and window_size_right.
std::optional<FlashCall> flash_call_of(const Tensor &q, const Tensor &k, const Tensor &v, Arguments lengths,
                                       double dropout_p, bool is_causal, const IValue &scale_value, Arguments window) {
    const std::optional<double> scale = scale_at(scale_value);
    const int64_t left = window[0].isNone() ? -1 : window[0].toInt();
    const int64_t right = is_causal ? 0 : window[1].isNone() ? -1 : window[1].toInt();
    const bool is_varlen = is_given(lengths[0]);
    if (is_varlen != is_given(lengths[1]) || !are_ours(q, k, v, is_varlen ? 3 : 4, dropout_p, scale) ||
        k.size(-2) == 0 || q.size(-2) == 0 || q.size(-2) % k.size(-2) != 0 || left < -1 || right < -1) {
        return std::nullopt;
    }
    FlashCall call{with_contiguous_last(q),
                   with_contiguous_last(k),
                   with_contiguous_last(v),
                   {},
                   options_of(q, scale, is_causal, left, right),
                   true};
    if (!is_varlen) {
        call.has_empty_rows = k.size(1) == 0 || (right >= 0 && q.size(1) > k.size(1));
        return q.size(0) == k.size(0) ? std::optional<FlashCall>(call) : std::nullopt;
    }
    const Tensor &ends_q = lengths[0].toTensor(), &ends_k = lengths[1].toTensor();
    const auto is_list = [&](const Tensor &x) { return x.scalar_type() == at::kInt && x.device() == q.device(); };
    if (!promises.varlen_lse_is_packed || !is_list(ends_q) || !is_list(ends_k)) {
        return std::nullopt;
    }
    call.sequences = {ends_q.contiguous(), ends_k.contiguous(), lengths[2].toInt(), lengths[3].toInt(), std::nullopt};
    return call;
}

// ---- the ops: each function returns the results of one --------------------------------------------------------------

// The random state of a call without dropout, which no kernel reads.
std::pair<Tensor, Tensor> unused_random_state(const Tensor &q, bool as_rng_state) {
    const at::TensorOptions options = q.options().dtype(as_rng_state ? at::kUInt64 : at::kLong);
    return {as_rng_state ? at::empty({2}, options) : at::empty({}, options), at::empty({}, options)};
}

// (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask)
Results flash_forward(Arguments args) {
    const Tensor &q = args[0].toTensor(), &k = args[1].toTensor(), &v = args[2].toTensor();
    const bool returns_debug_mask = args[5].toBool();
    const auto plan = plan_of(q, k, v, args[3].toDouble(), args[4].toBool(), scale_at(args[6]), Diagonal::bottom_right);
    if (!plan.has_value() || returns_debug_mask) {
        return std::nullopt;
    }
    const auto [out, lse] = forward(*plan, q, k, v);
    const auto [seed, offset] = unused_random_state(q, promises.has_rng_state);
    return Results({promises.flash_out_is_rows_first ? rows_first_like(q, out) : out, lse, Tensor(), Tensor(),
                    q.size(2), k.size(2), seed, offset, at::empty({0}, q.options())});
}

// (grad_query, grad_key, grad_value)
Results flash_backward(Arguments args) {
    const Tensor &grad_out = args[0].toTensor(), &q = args[1].toTensor(), &k = args[2].toTensor(),
                 &v = args[3].toTensor(), &out = args[4].toTensor(), &lse = args[5].toTensor();
    const bool is_varlen = is_given(args[6]);
    const auto plan =
        plan_of(q, k, v, args[10].toDouble(), args[11].toBool(), scale_at(args[14]), Diagonal::bottom_right);
    if (is_varlen || !plan.has_value() || !fits(grad_out, q, out)) {
        return std::nullopt;
    }
    const auto [dq, dk, dv, _] = backward(*plan, grad_out, q, k, v, out, lse);
    if (promises.flash_out_is_rows_first) {
        return Results({rows_first_like(q, dq), rows_first_like(k, dk), rows_first_like(v, dv)});
    }
    return Results({dq, dk, dv});
}

// A bias with -inf for the values that hide a key. For cuDNN, SDPA of PyTorch 2.11 turns a bool mask into a bias of 0
// and -65504, rounded to the dtype. In a row that sees no key they are all equal, so the row would see all keys.
Tensor with_hidden_keys(const Tensor &bias) {
    constexpr double kHidden = -65504.0;
    Tensor values = bias;  // each once, where the bias is expanded
    for (int64_t dim = 0; dim < bias.dim(); ++dim) {
        if (bias.stride(dim) == 0 && bias.size(dim) > 1) {
            values = values.narrow(dim, 0, 1);
        }
    }
    return values.masked_fill(values <= kHidden, -kInfinity).expand_as(bias);
}

// The plan of the cuDNN op with its mask.
std::optional<Plan> with_mask_of_cudnn(std::optional<Plan> plan, const IValue &mask, const Tensor &q, const Tensor &k) {
    plan = with_mask(std::move(plan), mask, q, k);
    if (plan.has_value() && plan->options.attn_bias.has_value() && plan->options.attn_bias->is_floating_point()) {
        plan->options.attn_bias = with_hidden_keys(*plan->options.attn_bias);
    }
    return plan;
}

// As flash_forward, without its debug_attn_mask. The cuDNN op and the next ones align the causal mask to the top left.
Results cudnn_forward(Arguments args) {
    const Tensor &q = args[0].toTensor(), &k = args[1].toTensor(), &v = args[2].toTensor();
    const bool returns_debug_mask = args[7].toBool();
    const auto plan = with_mask_of_cudnn(
        plan_of(q, k, v, args[5].toDouble(), args[6].toBool(), scale_at(args[8]), Diagonal::top_left), args[3], q, k);
    if (!plan.has_value() || returns_debug_mask) {
        return std::nullopt;
    }
    const auto [out, lse] = forward(*plan, q, k, v);
    const auto [seed, offset] = unused_random_state(q, /*as_rng_state=*/false);
    return Results({promises.cudnn_out_is_like_query ? out : out.contiguous(),
                    promises.cudnn_lse_dim == 3 ? lse : lse.unsqueeze(-1), Tensor(), Tensor(), q.size(2), k.size(2),
                    seed, offset, Tensor()});
}

Results cudnn_backward(Arguments args) {
    const Tensor &grad_out = args[0].toTensor(), &q = args[1].toTensor(), &k = args[2].toTensor(),
                 &v = args[3].toTensor(), &out = args[4].toTensor(), &lse = args[5].toTensor();
    const bool is_varlen = is_given(args[9]);
    const auto plan = with_mask_of_cudnn(
        plan_of(q, k, v, args[13].toDouble(), args[14].toBool(), scale_at(args[15]), Diagonal::top_left), args[8], q,
        k);
    if (is_varlen || !plan.has_value() || !fits(grad_out, q, out)) {
        return std::nullopt;
    }
    const auto [dq, dk, dv, _] = backward(*plan, grad_out, q, k, v, out, lse.dim() == 3 ? lse : lse.squeeze(-1));
    return Results({dq, dk, dv});
}

// (output, log_sumexp, philox_seed, philox_offset). The log-sum-exp is padded with inf to a multiple of 32 rows.
Results efficient_forward(Arguments args) {
    constexpr int64_t kMultipleOfRows = 32;
    const Tensor &q = args[0].toTensor(), &k = args[1].toTensor(), &v = args[2].toTensor();
    const bool returns_lse = args[4].toBool();
    const auto plan = with_mask(
        plan_of(q, k, v, args[5].toDouble(), args[6].toBool(), scale_at(args[7]), Diagonal::top_left), args[3], q, k);
    if (!plan.has_value()) {
        return std::nullopt;
    }
    auto [out, lse] = forward(*plan, q, k, v, Strides::rows_first);
    const int64_t partial = q.size(2) % kMultipleOfRows;
    if (!returns_lse) {
        lse = at::empty({q.size(0), q.size(1), 0}, lse.options());
    } else if (partial != 0) {
        lse = at::constant_pad_nd(lse, {0, kMultipleOfRows - partial}, kInfinity);
    }
    const auto [seed, offset] = unused_random_state(q, /*as_rng_state=*/false);
    return Results({out, lse, seed, offset});
}

// The gradient of a bias in memory as the op promises: rows of a multiple of 16 numbers.
Tensor with_padded_rows(const Tensor &dbias) {
    constexpr int64_t kMultiple = 16;
    std::vector<int64_t> sizes = dbias.sizes().vec();
    const int64_t keys = sizes.back();
    if (keys % kMultiple == 0) {
        return dbias;
    }
    sizes.back() = (keys + kMultiple - 1) / kMultiple * kMultiple;
    return at::empty(sizes, dbias.options()).narrow(-1, 0, keys).copy_(dbias);
}

// (grad_query, grad_key, grad_value, grad_attn_bias)
Results efficient_backward(Arguments args) {
    if (!is_given(args[0])) {
        return std::nullopt;
    }
    const Tensor &grad_out = args[0].toTensor(), &q = args[1].toTensor(), &k = args[2].toTensor(),
                 &v = args[3].toTensor(), &out = args[5].toTensor(), &lse = args[6].toTensor();
    const auto plan = with_mask(
        plan_of(q, k, v, args[9].toDouble(), args[11].toBool(), scale_at(args[12]), Diagonal::top_left), args[4], q, k);
    if (!plan.has_value() || !fits(grad_out, q, out) || lse.size(-1) < q.size(2)) {
        return std::nullopt;
    }
    const bool wants_dbias = is_given(args[4]) && args[10].toBoolList().get(3);
    if (wants_dbias && plan->options.attn_bias->sizes() != args[4].toTensor().sizes()) {
        return std::nullopt;
    }
    const auto [dq, dk, dv, dbias] =
        backward(*plan, grad_out, q, k, v, out, lse.narrow(-1, 0, q.size(2)), Strides::rows_first, wants_dbias);
    return Results({dq, dk, dv, wants_dbias ? with_padded_rows(dbias) : dbias});
}

// (output, logsumexp)
Results cpu_forward(Arguments args) {
    const Tensor &q = args[0].toTensor(), &k = args[1].toTensor(), &v = args[2].toTensor();
    const auto plan = with_mask(
        plan_of(q, k, v, args[3].toDouble(), args[4].toBool(), scale_at(args[6]), Diagonal::top_left), args[5], q, k);
    if (!plan.has_value()) {
        return std::nullopt;
    }
    const auto [out, lse] = forward(*plan, q, k, v);
    return Results({out, lse.transpose(1, 2).contiguous().transpose(1, 2)});
}

Results cpu_backward(Arguments args) {
    const Tensor &grad_out = args[0].toTensor(), &q = args[1].toTensor(), &k = args[2].toTensor(),
                 &v = args[3].toTensor(), &out = args[4].toTensor(), &lse = args[5].toTensor();
    const auto plan = with_mask(
        plan_of(q, k, v, args[6].toDouble(), args[7].toBool(), scale_at(args[9]), Diagonal::top_left), args[8], q, k);
    if (!plan.has_value() || !fits(grad_out, q, out)) {
        return std::nullopt;
    }
    const auto [dq, dk, dv, _] = backward(*plan, grad_out, q, k, v, out, lse, Strides::rows_first);
    return Results({dq, dk, dv});
}

// (output, softmax_logsumexp, rng_state, unused, debug_attn_mask)
Results varlen_forward(Arguments args) {
    const Tensor &q = args[0].toTensor(), &k = args[1].toTensor(), &v = args[2].toTensor();
    const bool returns_debug_mask = args[9].toBool();
    for (const IValue &other : args.slice(13)) {  // seqused_k, alibi_slopes, in newer versions block_table, num_splits
        if (!other.isNone()) {
            return std::nullopt;
        }
    }
    const auto call =
        flash_call_of(q, k, v, args.slice(3, 4), args[7].toDouble(), args[8].toBool(), args[10], args.slice(11, 2));
    if (returns_debug_mask || !call.has_value()) {
        return std::nullopt;
    }
    const FwdResults results = mha_fwd({call->q, call->k, call->v, std::nullopt, call->sequences, call->options});
    const auto [seed, offset] = unused_random_state(q, promises.has_rng_state);
    const Tensor &lse = results.softmax_lse;
    return Results({like(q, results.out), call->has_empty_rows ? with_pytorchs_empty_rows(lse) : lse, seed, offset,
                    at::empty({0}, q.options())});
}

Results varlen_backward(Arguments args) {
    const Tensor &grad_out = args[0].toTensor(), &q = args[1].toTensor(), &k = args[2].toTensor(),
                 &v = args[3].toTensor(), &out = args[4].toTensor(), &lse = args[5].toTensor();
    const auto call =
        flash_call_of(q, k, v, args.slice(6, 4), args[10].toDouble(), args[11].toBool(), args[14], args.slice(15, 2));
    if (!call.has_value() || !fits(grad_out, q, out)) {
        return std::nullopt;
    }
    const auto [dq, dk, dv, softmax_d] = ops::backward({grad_out,
                                                        {call->q, call->k, call->v},
                                                        out,
                                                        call->has_empty_rows ? with_our_empty_rows(lse) : lse,
                                                        std::nullopt,
                                                        call->sequences,
                                                        call->options,
                                                        std::nullopt,
                                                        {true, true, true}},
                                                       std::nullopt, std::nullopt, std::nullopt);
    return Results({like(q, dq), like(k, dk), like(v, dv)});
}

// ---- registration ---------------------------------------------------------------------------------------------------

struct Op {
    const char *name;
    Results (*run)(Arguments);
    const char *arguments;  // the names that `run` reads by position, _ for others; newer versions may have more
    std::atomic<int64_t> ours{0}, pytorchs{0};

    Op(const char *name, Results (*run)(Arguments), const char *arguments)
        : name(name), run(run), arguments(arguments) {}
};

#define RESULTS_OF_FORWARD "grad_out query key value out logsumexp "
#define VARLEN "cum_seq_q cum_seq_k max_q max_k "
std::array<Op, 10> all_ops{{
    {"_scaled_dot_product_flash_attention", flash_forward,
     "query key value dropout_p is_causal return_debug_mask scale"},
    {"_scaled_dot_product_flash_attention_backward", flash_backward,
     RESULTS_OF_FORWARD VARLEN "dropout_p is_causal _ _ scale"},
    {"_scaled_dot_product_cudnn_attention", cudnn_forward,
     "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"},
    {"_scaled_dot_product_cudnn_attention_backward", cudnn_backward,
     RESULTS_OF_FORWARD "_ _ attn_bias " VARLEN "dropout_p is_causal scale"},
    {"_scaled_dot_product_efficient_attention", efficient_forward,
     "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"},
    {"_scaled_dot_product_efficient_attention_backward", efficient_backward,
     "grad_out_ query key value attn_bias out logsumexp _ _ dropout_p grad_input_mask is_causal "
     "scale"},
    {"_flash_attention_forward", varlen_forward,
     "query key value " VARLEN "dropout_p is_causal return_debug_mask scale window_size_left window_size_right"},
    {"_flash_attention_backward", varlen_backward,
     RESULTS_OF_FORWARD VARLEN "dropout_p is_causal _ _ scale window_size_left window_size_right"},
    {"_scaled_dot_product_flash_attention_for_cpu", cpu_forward, "query key value dropout_p is_causal attn_mask scale"},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward,
     RESULTS_OF_FORWARD "dropout_p is_causal attn_mask scale"},
}};

bool is_meta(const IValue &x) {
    return is_given(x) && x.toTensor().is_meta();
}

template <size_t kIndex>
void run(const c10::OperatorHandle &handle, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    Op &op = all_ops[kIndex];
    const size_t size = handle.schema().arguments().size();
    const Arguments args = torch::jit::last(*stack, size);
    if (active && !is_meta(args[0]) && !is_meta(args[1])) {  // torch.compile asks for shapes with meta tensors
        if (Results results = op.run(args)) {
            torch::jit::drop(*stack, size);
            for (IValue &result : *results) {
                stack->push_back(std::move(result));
            }
            ++op.ours;
            return;
        }
        ++op.pytorchs;
    }
    handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
                           stack);
}

// Throws if an op lacks arguments that our kernel reads.
void check_arguments(const Op &op) {
    const auto handle = c10::Dispatcher::singleton().findSchema({std::string("aten::") + op.name, ""});
    const std::string known = op.arguments;
    std::string found;
    size_t begin = 0;  // of a name in `known`
    bool is_known = true;
    if (handle.has_value()) {
        for (const auto &argument : handle->schema().arguments()) {
            found += (found.empty() ? "" : " ") + argument.name();
            if (begin < known.size()) {
                const size_t end = std::min(known.find(' ', begin), known.size());
                const std::string name = known.substr(begin, end - begin);
                is_known = is_known && (name == "_" || name == argument.name());
                begin = end + 1;
            }
        }
    }
    FLASH_CHECK(is_known && begin >= known.size(), "flash_attn_mini: sdpa does not know aten::", op.name, " of torch ",
                FLASH_TORCH_VERSION, ": its arguments are [", found, "]; known: [", known, "]");
}

std::unique_ptr<torch::Library> registered;  // none before the first activate()

template <size_t... kIndex>
void register_ops(std::index_sequence<kIndex...>) {
    (check_arguments(all_ops[kIndex]), ...);
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect,
                                                    __FILE__, __LINE__);
    (library->impl(all_ops[kIndex].name, torch::CppFunction::makeFromBoxedFunction<&run<kIndex>>()), ...);
    registered = std::move(library);
}

}  // namespace

void activate(const Promises &given) {
    if (registered == nullptr) {
        promises = given;
        register_ops(std::make_index_sequence<all_ops.size()>());
    }
    active = true;
}

void restore() {
    active = false;
}

bool is_active() {
    return active;
}

std::vector<std::tuple<std::string, int64_t, int64_t>> counts() {
    std::vector<std::tuple<std::string, int64_t, int64_t>> all;
    for (const Op &op : all_ops) {
        all.emplace_back(op.name, op.ours.load(), op.pytorchs.load());
    }
    return all;
}

}  // namespace flash::sdpa
