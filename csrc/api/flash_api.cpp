// The functions of flash_api.h.
#include "api/flash_api.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/allocation.h"
#include "api/checks.h"
#include "api/kernel_inputs.h"
#include "api/key_ranges.h"
#include "api/options.h"
#include "api/score_mod.h"
#include "api/set_params.h"
#include "common/message.h"
#include "common/trace.h"
#include "dispatch/run_mha.h"

#ifdef FLASH_WITH_CUDA
#include "kvcache/splitkv.h"
#endif

namespace flash {
namespace {

// ---- forward and backward

void trace_entry(const char *link, const FwdArgs &args, const std::string &backend) {
    if (!trace_enabled()) {
        return;
    }
    const auto rows = [&](const at::Tensor &x) { return x.dim() > 2 ? long(x.size(-3)) : -1L; };
    const char *format = args.is_varlen() ? "backend=%s rows_q=%ld rows_k=%ld" : "backend=%s seqlen_q=%ld seqlen_k=%ld";
    trace(link, format, backend.c_str(), rows(args.q), rows(args.k));
}

// The head dim that q, k and v get before a kernel reads them; 0: they stay as they are.
int64_t padding_of(const FwdArgs &args) {
    const int64_t headdim = padded_headdim(args.q, args.v);
    if (headdim == 0 || args.is_paged()) {
        return headdim;
    }
    const c10::OptionalDeviceGuard device_guard(args.q.device());
    return takes_own_headdim_v(args.q.size(-1), args.v.size(-1)) ? 0 : headdim;
}

// ---- forward and backward of checked arguments ----------------------------------------------------------------------

FwdResults forward(const FwdArgs &args, const Optional &given_rng_state, std::optional<at::Generator> generator,
                   bool zero_tensors) {
    const at::Tensor &q = args.q, &k = args.k;
    const Options &options = args.options;
    if (const int64_t headdim = padding_of(args); headdim != 0) {
        const at::Tensor padded_q = padded(q, headdim), padded_k = padded(k, headdim),
                         padded_v = padded(args.v, headdim);
        FwdResults results = forward({padded_q, padded_k, padded_v, std::nullopt, args.sequences, options},
                                     given_rng_state, std::move(generator), zero_tensors);
        const at::Tensor out = args.out.has_value() ? *args.out : empty_out(q, args.v);
        results.out = out.copy_(results.out.narrow(-1, 0, out.size(-1)));
        return results;
    }
    const c10::OptionalDeviceGuard device_guard(q.device());
    const Sizes sizes(args);
    const at::Tensor out = args.out.has_value() ? *args.out : empty_out(q, args.v);
    const at::TensorOptions lse_options = q.options().dtype(lse_dtype(q));
    const at::Tensor softmax_lse = args.is_varlen() ? at::empty({sizes.nheads, sizes.rows_q}, lse_options)
                                                    : at::empty({sizes.batch, sizes.nheads, sizes.rows_q}, lse_options);
    const at::Tensor rng_state =
        options.dropout_p > 0.0 ? rng_state_of_call(q, given_rng_state, std::move(generator)) : at::Tensor();
    at::Tensor max_logits;
    if (options.return_max_logits) {
        const std::vector<int64_t> shape =
            args.is_varlen() ? std::vector<int64_t>{sizes.nheads} : std::vector<int64_t>{sizes.batch, sizes.nheads};
        max_logits = at::full(shape, -std::numeric_limits<double>::infinity(), lse_options);
    }
    if (!sizes.has_keys || zero_tensors) {
        out.zero_();
        fill_lse_without_keys(softmax_lse, options);
    }
    if (sizes.has_keys && q.numel() > 0) {
        const bool writes_in_place = is_writable_by_kernel(out);
        const at::Tensor kernel_out = writes_in_place ? out : at::empty(out.sizes(), out.options());
        const FwdArgs readable_args{q, k, args.v, args.out, args.sequences, readable(options, softmax_lse)};
        const ScaledQuery scaled = with_positive_scale(without_neg(q), options.softmax_scale);
        const at::Tensor kernel_q = readable_by_kernel(scaled.q, "q"), kernel_k = readable_by_kernel(k, "k"),
                         kernel_v = readable_by_kernel(args.v, "v");
        Flash_fwd_params params = set_params_fprop({kernel_q, kernel_k, kernel_v, kernel_out, softmax_lse, rng_state},
                                                   readable_args, scaled.softmax_scale);
        set_max_logits(params, max_logits);
        const at::Tensor ranges = q.is_cuda() ? key_ranges_scratch(params, q, /*is_backward=*/false) : at::Tensor();
        run_mha_fwd(params, q.device());
        if (!writes_in_place) {
            out.copy_(kernel_out);
        }
    }
    return {out, softmax_lse, rng_state, max_logits};
}

// On CUDA. Parts of the batch share the scratch.
void run_mha_bwd_in_parts(const Flash_bwd_params &params, const at::Tensor &q, const Sequences &sequences) {
    if (!needs_scratch(params)) {
        Flash_bwd_params whole = params;
        run_mha_bwd(whole, q.device());
        return;
    }
    const int at_once = sequences_at_once(params);
    for (int begin = 0; begin < params.b; begin += at_once) {
        Flash_bwd_params part = part_of_batch(params, begin, std::min(at_once, params.b - begin));
        const CudaScratch scratch(part, q, sequences);
        run_mha_bwd(part, q.device());
    }
}

BwdResults backward(const BwdArgs &args, std::array<bool, 3> output_mask, bool zero_tensors) {
    const FwdArgs &forward = args.forward;
    const Options &options = forward.options;
    const at::Tensor &q = forward.q, &k = forward.k, &v = forward.v;
    if (const int64_t headdim = padding_of(forward); headdim != 0) {
        const at::Tensor padded_q = padded(q, headdim), padded_k = padded(k, headdim), padded_v = padded(v, headdim),
                         padded_out = padded(*forward.out, headdim), padded_dout = padded(args.dout, headdim);
        const Optional none;
        const BwdResults results = backward({{padded_q, padded_k, padded_v, padded_out, forward.sequences, options},
                                             padded_dout,
                                             args.softmax_lse,
                                             args.dsoftmax_lse,
                                             none,
                                             none,
                                             none,
                                             args.rng_state},
                                            output_mask, zero_tensors);
        const auto stored = [&](const at::Tensor &x, const at::Tensor &like, const Optional &given) {
            if (!x.defined()) {
                return x;
            }
            const at::Tensor to = given.has_value() ? *given : empty_contiguous_last(like);
            return to.copy_(x.narrow(-1, 0, like.size(-1)));
        };
        return {stored(results.dq, q, args.dq), stored(results.dk, k, args.dk), stored(results.dv, v, args.dv),
                results.softmax_d};
    }
    const c10::OptionalDeviceGuard device_guard(q.device());
    const Sizes sizes(forward);
    const bool has_work = q.numel() > 0 && sizes.has_keys;
    const int heads_per_dkv =
        q.is_cpu() || !has_work ? static_cast<int>(sizes.nheads / sizes.nheads_k) : heads_per_cta(forward);
    Gradient dq(output_mask[0], args.dq, q, sizes.nheads), dk(output_mask[1], args.dk, k, sizes.nheads / heads_per_dkv),
        dv(output_mask[2], args.dv, v, sizes.nheads / heads_per_dkv);
    const at::Tensor softmax_d = empty_softmax_d(forward);
    if (!has_work || zero_tensors) {
        softmax_d.zero_();
        dq.zero();
        dk.zero();
        dv.zero();
    }
    if (has_work) {
        const auto statistic = [](const Optional &x) {
            return x.has_value() ? without_neg(x->contiguous()) : at::Tensor();
        };
        const FwdArgs readable_args{
            q, k, v, forward.out, forward.sequences, readable_by_backward(options, args.softmax_lse)};
        const ScaledQuery scaled = with_nonzero_scale(q, options.softmax_scale);
        const at::Tensor kernel_q = readable_by_kernel(scaled.q, "q"), kernel_k = readable_by_kernel(k, "k"),
                         kernel_v = readable_by_kernel(v, "v"), kernel_out = readable_by_kernel(*forward.out, "out"),
                         kernel_dout = readable_by_kernel(args.dout, "dout"), lse = statistic(args.softmax_lse),
                         dlse = statistic(args.dsoftmax_lse), rng_state = statistic(args.rng_state);
        Flash_bwd_params params = set_params_dgrad(
            set_params_fprop({kernel_q, kernel_k, kernel_v, kernel_out, lse, rng_state}, readable_args,
                             scaled.softmax_scale),
            {kernel_dout, dlse, dq.written, dk.written, dv.written, softmax_d}, heads_per_dkv, options);
        if (q.is_cuda()) {
            const at::Tensor ranges =
                key_ranges_scratch(params, q, /*is_backward=*/true, options.deterministic && dq.written.defined());
            run_mha_bwd_in_parts(params, q, forward.sequences);
        } else {
            run_mha_bwd(params, q.device());
        }
    }
    dq.store();
    dk.store();
    dv.store();
    return {dq.result, dk.result, dv.result, softmax_d};
}

}  // namespace

FwdResults mha_fwd(const FwdArgs &args, const Optional &rng_state, std::optional<at::Generator> generator,
                   bool zero_tensors) {
    const std::string backend = backend_of(args.q);
    trace_entry(args.is_varlen() ? "mha_varlen_fwd" : "mha_fwd", args, backend);
    check_fwd(args, backend);
    return forward(args, rng_state, std::move(generator), zero_tensors);
}

BwdResults mha_bwd(const BwdArgs &args, std::array<bool, 3> output_mask, bool zero_tensors) {
    const std::string backend = backend_of(args.forward.q);
    trace_entry(args.forward.is_varlen() ? "mha_varlen_bwd" : "mha_bwd", args.forward, backend);
    check_bwd(args, backend);
    return backward(args, output_mask, zero_tensors);
}

// ---- a KV cache. The caches are never copied: kernels read and write them as they are.

namespace {

void trace_entry(const KvCacheArgs &args, const std::string &backend) {
    if (!trace_enabled()) {
        return;
    }
    const auto size = [](const at::Tensor &x, int64_t dim) { return x.dim() == 4 ? long(x.size(dim)) : -1L; };
    trace("mha_fwd_kvcache",
          "backend=%s batch=%ld seqlen_q=%ld seqlen_new=%ld cache=[%ld, %ld] paged=%s num_splits=%ld "
          "split_keys=%ld",
          backend.c_str(), size(args.q, 0), size(args.q, 1), args.k.has_value() ? size(*args.k, 1) : 0L,
          size(args.k_cache, 0), size(args.k_cache, 1), name_of(args.block_table.has_value()), long(args.num_splits),
          long(args.split_keys));
}

// The tensor without a lazy negation, as kernels read it; undefined if not given.
at::Tensor readable(const Optional &x) {
    return x.has_value() ? without_neg(*x) : at::Tensor();
}

// Scratch memory of the CUDA kernels. It must live until they are launched; the caching allocator then keeps it for the
// stream.
at::Tensor splitkv_scratch([[maybe_unused]] Flash_fwd_params &params, [[maybe_unused]] const at::Tensor &q) {
#ifdef FLASH_WITH_CUDA
    if (q.is_cuda()) {
        const at::Tensor scratch = at::empty({splitkv_scratch_floats(params)}, q.options().dtype(at::kFloat));
        params.cache.scratch = scratch.data_ptr<float>();
        return scratch;
    }
#endif
    return {};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> mha_fwd_kvcache(const KvCacheArgs &args) {
    const at::Tensor &q = args.q;
    const std::string backend = backend_of(q);
    trace_entry(args, backend);
    check_kvcache(args, backend);

    const c10::OptionalDeviceGuard device_guard(q.device());
    const at::Tensor out = args.out.has_value() ? *args.out : empty_out(q, args.v_cache);
    const at::Tensor softmax_lse = at::empty({args.batch(), q.size(2), q.size(1)}, q.options().dtype(lse_dtype(q)));
    if (!args.has_keys()) {
        out.zero_();
        fill_lse_without_keys(softmax_lse, args.options);
        return {out, softmax_lse};
    }
    if (args.batch() == 0 || (q.size(1) == 0 && args.seqlen_new() == 0)) {
        return {out, softmax_lse};
    }
    const at::Tensor kernel_out = out.is_neg() ? at::empty(out.sizes(), out.options()) : out;
    const ScaledQuery scaled = with_positive_scale(without_neg(q), args.options.softmax_scale);
    const at::Tensor k = readable(args.k), v = readable(args.v), cos = readable(args.rotary_cos),
                     sin = readable(args.rotary_sin);
    const at::Tensor q_rotated = cos.defined() ? at::empty(q.sizes(), q.options()) : at::Tensor();
    KvCacheArgs readable_args = args;
    readable_args.options = readable(args.options, softmax_lse);
    Flash_fwd_params params = set_params_kvcache({scaled.q, q_rotated, k, v, kernel_out, softmax_lse, cos, sin},
                                                 readable_args, scaled.softmax_scale);
    const at::Tensor scratch = splitkv_scratch(params, q);
    run_mha_fwd_kvcache(params, q.device());
    if (!kernel_out.is_same(out)) {
        out.copy_(kernel_out);
    }
    return {out, softmax_lse};
}

// ---- the random state of dropout

at::Tensor draw_rng_state(const at::Tensor &like, std::optional<at::Generator> generator) {
    FLASH_CHECK_VALUE(!generator.has_value() || generator->device().type() == like.device().type(), "generator is for ",
                      generator.has_value() ? generator->device() : like.device(),
                      "; allowed: one for the device of q, ", like.device());
    const c10::OptionalDeviceGuard device_guard(like.device());
    at::Tensor state = at::empty({2}, like.options().dtype(at::kLong).layout(at::kStrided));
    return state.random_(std::numeric_limits<int64_t>::min(), std::nullopt, std::move(generator));  // all 64 bits
}

at::Tensor rng_state_of_call(const at::Tensor &like, const std::optional<at::Tensor> &given,
                             std::optional<at::Generator> generator) {
    if (!given.has_value() || given->numel() == 0) {
        return draw_rng_state(like, std::move(generator));
    }
    check_rng_state(given, /*dropout_p=*/1.0, like);
    return given->clone();
}

}  // namespace flash
