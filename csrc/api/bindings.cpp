// The extension flash_attn_mini._C: functions with the names and argument order of the official flash_attn_2_cuda. The
// forwards enter the ops (ops.cpp), which record the graph; a backward writes to the tensors that the caller gives.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/backend_choice.h"
#include "api/check_tensors.h"
#include "api/checks.h"
#include "api/flash_api.h"
#include "api/ops.h"
#include "api/sdpa.h"
#include "common/message.h"
#include "common/trace.h"
#include "dispatch/built.h"
#include "dispatch/reserved_sms.h"
#include "dispatch/run_mha.h"

#ifdef FLASH_WITH_CUDA
#include "dispatch/device.h"
#endif

namespace flash {
namespace {

namespace py = pybind11;
using ops::Tensor;
using Generator = std::optional<at::Generator>;

// Options that the official functions do not have: as the last parameters of a function, as the last fields of an
// Options, as keywords of pybind11. Each expands to a list that begins with a comma.
#define FLASH_PARAMETER(schema, type, name) , ops::Passed<type> name
#define FLASH_KEYWORD(schema, type, name) , arg(#name) = py::none()
#define OWN_PARAMETERS FLASH_OWN_OPTIONS(FLASH_PARAMETER)
#define OWN_VALUES FLASH_OWN_OPTIONS(FLASH_REFERENCE)
#define OWN_KEYWORDS FLASH_OWN_OPTIONS(FLASH_KEYWORD)

double scale_of(const std::optional<double> &softmax_scale, const Tensor &q) {
    return softmax_scale.has_value() ? *softmax_scale
           : q.dim() == 0            ? 1.0
                                     : 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(q.size(-1), 1)));
}

// Errors for tensors that the dispatcher would send elsewhere: other layouts, where the Python functions then name the
// argument, and other devices than that of q.
void check_strided(std::initializer_list<Named> tensors) {
    const at::Device device = tensors.begin()->tensor.device();
    for (const Named &x : tensors) {
        FLASH_CHECK_TYPE(x.tensor.layout() == at::kStrided && !x.tensor.is_nested(), x.name,
                         " is a sparse or nested tensor; allowed: torch.strided");
        FLASH_CHECK_VALUE(x.tensor.device() == device, x.name, " is on ", x.tensor.device(),
                          "; allowed: the device of q, ", device);
    }
}

void check_strided_options(const Options &options) {
    for_each_tensor(options, [](const char *name, const Optional &x) {
        if (x.has_value()) {
            check_strided({{name, *x}});
        }
    });
}

// Gives up Python's lock during a long call on the CPU. A short call keeps it: to get it back from a busy thread takes
// up to Python's switch interval, 5 ms.
class LongCallWithoutGil {
public:
    LongCallWithoutGil(const Tensor &q, const Tensor &k) {
        constexpr int64_t kLongWork = 1 << 21;  // products of elements of q and k: about 0.1 ms
        if (q.is_cpu() && k.dim() > 2 && q.numel() > 0 && q.numel() * k.size(-3) >= kLongWork) {
            released_.emplace();
        }
    }

private:
    std::optional<py::gil_scoped_release> released_;
};

// ---- forward --------------------------------------------------------------------------------------------------------

// The op, or mha_fwd without a graph if the caller gives `out`.
std::vector<Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v, const Optional &out,
                            const Sequences &sequences, const Options &options, bool return_softmax, bool zero_tensors,
                            Generator generator) {
    check_strided({{"q", q}, {"k", k}, {"v", v}});
    check_strided_options(options);
    const bool is_dropping = options.dropout_p > 0.0;
    std::vector<Tensor> results(5);  // out, softmax_lse, S_dmask, rng_state, max_logits
    {
        const LongCallWithoutGil guard(q, k);
        if (out.has_value() || zero_tensors) {
            const at::AutoDispatchBelowADInplaceOrView below_autograd;
            const FwdResults given =
                mha_fwd({q, k, v, out, sequences, options}, {}, std::move(generator), zero_tensors);
            results = {given.out, given.softmax_lse, Tensor(), given.rng_state, given.max_logits};
        } else {
            Optional rng_state;
            if (is_dropping && generator.has_value()) {
                rng_state = draw_rng_state(q, std::move(generator));
            }
            std::tie(results[0], results[1], results[3], results[4]) =
                ops::call<ops::Fwd, int64_t>({{q, k, v}, sequences, options, rng_state});
        }
    }
    if (return_softmax && is_dropping) {
        results[2] = py::module_::import("flash_attn_mini.s_dmask")
                         .attr("s_dmask_of_call")(q, k, results[3], sequences.tie(), options.tie())
                         .cast<Tensor>();
    }
    if (!options.return_max_logits) {
        results.pop_back();
    }
    return results;
}

std::vector<Tensor> fwd(const Tensor &q, const Tensor &k, const Tensor &v, const Optional &out,
                        const Optional &alibi_slopes, double p_dropout, std::optional<double> softmax_scale,
                        bool is_causal, int64_t window_size_left, int64_t window_size_right, double softcap,
                        bool return_softmax, Generator generator, bool deterministic OWN_PARAMETERS) {
    const Options options{p_dropout,        scale_of(softmax_scale, q), is_causal,
                          window_size_left, window_size_right,          softcap,
                          alibi_slopes,     deterministic OWN_VALUES};
    return forward(q, k, v, out, {}, options, return_softmax, /*zero_tensors=*/false, std::move(generator));
}

std::vector<Tensor> varlen_fwd(const Tensor &q, const Tensor &k, const Tensor &v, const Optional &out,
                               const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k, const Optional &seqused_k,
                               const Optional &leftpad_k, const Optional &block_table, const Optional &alibi_slopes,
                               int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout,
                               std::optional<double> softmax_scale, bool zero_tensors, bool is_causal,
                               int64_t window_size_left, int64_t window_size_right, double softcap, bool return_softmax,
                               Generator generator, bool deterministic OWN_PARAMETERS) {
    const auto lacks = [](const Optional &given, const char *name) {
        FLASH_CHECK_NOT_IMPLEMENTED(!given.has_value(), name, " is not implemented in this version; allowed: None");
    };
    lacks(seqused_k, "seqused_k");
    lacks(leftpad_k, "leftpad_k");
    const Options options{p_dropout,        scale_of(softmax_scale, q), is_causal,
                          window_size_left, window_size_right,          softcap,
                          alibi_slopes,     deterministic OWN_VALUES};
    return forward(q, k, v, out, {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table}, options,
                   return_softmax, zero_tensors, std::move(generator));
}

// ---- backward: what the official functions do not have comes last, from dsoftmax_lse on ----------------------------

std::vector<Tensor> backward(const ops::BwdCall<ops::SeparateInputs, int64_t> &call, const Optional &dq,
                             const Optional &dk, const Optional &dv, bool zero_tensors) {
    const LongCallWithoutGil guard(call.inputs.q, call.inputs.k);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [result_dq, result_dk, result_dv, softmax_d] = ops::backward(call, dq, dk, dv, zero_tensors);
    for (const Optional &written : {dq, dk, dv}) {
        if (written.has_value() && !written->is_inference()) {
            written->unsafeGetTensorImpl()->bump_version();
        }
    }
    return {result_dq, result_dk, result_dv, softmax_d};
}

std::vector<Tensor> bwd(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
                        const Tensor &softmax_lse, const Optional &dq, const Optional &dk, const Optional &dv,
                        const Optional &alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                        int64_t window_size_left, int64_t window_size_right, double softcap, bool deterministic,
                        Generator /*generator*/, const Optional &rng_state, const Optional &dsoftmax_lse,
                        std::array<bool, 3> output_mask OWN_PARAMETERS) {
    const Options options{p_dropout,         softmax_scale, is_causal,    window_size_left,
                          window_size_right, softcap,       alibi_slopes, deterministic OWN_VALUES};
    return backward({dout, {q, k, v}, out, softmax_lse, dsoftmax_lse, {}, options, rng_state, output_mask}, dq, dk, dv,
                    /*zero_tensors=*/false);
}

std::vector<Tensor> varlen_bwd(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
                               const Tensor &softmax_lse, const Optional &dq, const Optional &dk, const Optional &dv,
                               const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k, const Optional &alibi_slopes,
                               int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout, double softmax_scale,
                               bool zero_tensors, bool is_causal, int64_t window_size_left, int64_t window_size_right,
                               double softcap, bool deterministic, Generator /*generator*/, const Optional &rng_state,
                               const Optional &dsoftmax_lse, std::array<bool, 3> output_mask OWN_PARAMETERS) {
    const Options options{p_dropout,         softmax_scale, is_causal,    window_size_left,
                          window_size_right, softcap,       alibi_slopes, deterministic OWN_VALUES};
    const Sequences sequences{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, std::nullopt};
    return backward({dout, {q, k, v}, out, softmax_lse, dsoftmax_lse, sequences, options, rng_state, output_mask}, dq,
                    dk, dv, zero_tensors);
}

// ---- KV cache: what the official function does not have comes last, from split_keys on ------------------------------

// cache_seqlen: seqlens_k as one number for all sequences, -1: none.
std::vector<Tensor> fwd_kvcache(const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, const Optional &k,
                                const Optional &v, const Optional &seqlens_k, const Optional &rotary_cos,
                                const Optional &rotary_sin, const Optional &cache_batch_idx, const Optional &leftpad_k,
                                const Optional &block_table, const Optional &alibi_slopes, const Optional &out,
                                std::optional<double> softmax_scale, bool is_causal, int64_t window_size_left,
                                int64_t window_size_right, double softcap, bool is_rotary_interleaved,
                                int64_t num_splits, int64_t split_keys, int64_t cache_seqlen OWN_PARAMETERS) {
    const KvCacheOptions cache{k,
                               v,
                               rotary_cos,
                               rotary_sin,
                               seqlens_k,
                               cache_seqlen,
                               cache_batch_idx,
                               leftpad_k,
                               block_table,
                               is_rotary_interleaved,
                               num_splits,
                               split_keys};
    const Options options{/*dropout_p=*/0.0, scale_of(softmax_scale, q),
                          is_causal,         window_size_left,
                          window_size_right, softcap,
                          alibi_slopes,      /*deterministic=*/false OWN_VALUES};
    check_strided({{"q", q}, {"k_cache", k_cache}, {"v_cache", v_cache}});
    check_strided_options(options);
    const LongCallWithoutGil guard(q, k_cache);
    Tensor result, softmax_lse;
    if (out.has_value()) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        std::tie(result, softmax_lse) = mha_fwd_kvcache({cache, q, k_cache, v_cache, out, options});
    } else {
        std::tie(result, softmax_lse) = ops::call<ops::KvCache, int64_t>({q, k_cache, v_cache, cache, options});
    }
    return {result, softmax_lse};
}

// ---- the op for packed inputs, in the order of its schema -----------------------------------------------------------

template <typename Op, typename = ops::Tie<Op, int64_t>>
struct Entry;
template <typename Op, typename... Fields>
struct Entry<Op, std::tuple<const Fields &...>> {
    static typename Op::Result run(ops::Passed<Fields>... fields) {
        const typename Op::template Call<int64_t> call{fields...};
        const LongCallWithoutGil guard(call.inputs.packed, call.inputs.packed);
        return ops::call<Op, int64_t>(call);
    }
};

// The checks of the op fwd for the backend that the options name, and nothing more.
template <typename Tie = ops::Tie<ops::Fwd, int64_t>>
struct CheckEntry;
template <typename... Fields>
struct CheckEntry<std::tuple<const Fields &...>> {
    static void run(ops::Passed<Fields>... fields) {
        const ops::Fwd::Call<int64_t> call{fields...};
        const auto &[q, k, v] = call.inputs;
        check_fwd({q, k, v, std::nullopt, call.sequences, call.options}, std::string(*call.options.backend));
    }
};

pybind11::dict build_info() {
    pybind11::dict info;
    info["torch"] = FLASH_TORCH_VERSION;
    info["arch_names"] = built_arch_names();
#ifdef FLASH_WITH_CUDA
    info["archs"] = std::vector<int>(std::begin(kBuiltArchs), std::end(kBuiltArchs));
    info["archs_exact"] = std::vector<int>(std::begin(kExactArchs), std::end(kExactArchs));
    info["hdims"] = std::vector<int>(std::begin(kBuiltHeadDims), std::end(kBuiltHeadDims));
    std::vector<std::string> dtypes;
    for (DType dtype : kBuiltDTypes) {
        dtypes.emplace_back(dtype == DType::float16 ? "fp16" : "bf16");
    }
    info["dtypes"] = dtypes;
    info["cuda"] = cuda_version();
#else
    info["archs"] = std::vector<int>{};
    info["archs_exact"] = std::vector<int>{};
    info["hdims"] = std::vector<int>{};
    info["dtypes"] = std::vector<std::string>{};
    info["cuda"] = pybind11::none();
#endif
    return info;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    namespace py = pybind11;
    using py::arg;
    flash::ops::register_library();
    module.doc() = "flash_attn_mini: names and argument order of the official flash_attn_2_cuda";
    module.def("fwd", torch::wrap_pybind_function(flash::fwd),
               "Forward: returns out, softmax_lse, S_dmask, rng_state, max_logits", arg("q"), arg("k"), arg("v"),
               arg("out"), arg("alibi_slopes"), arg("p_dropout"), arg("softmax_scale"), arg("is_causal"),
               arg("window_size_left"), arg("window_size_right"), arg("softcap"), arg("return_softmax"),
               arg("generator"), arg("deterministic") = false OWN_KEYWORDS);
    module.def("bwd", torch::wrap_pybind_function(flash::bwd), "Backward: returns [dq, dk, dv, softmax_d]", arg("dout"),
               arg("q"), arg("k"), arg("v"), arg("out"), arg("softmax_lse"), arg("dq"), arg("dk"), arg("dv"),
               arg("alibi_slopes"), arg("p_dropout"), arg("softmax_scale"), arg("is_causal"), arg("window_size_left"),
               arg("window_size_right"), arg("softcap"), arg("deterministic"), arg("generator"), arg("rng_state"),
               arg("dsoftmax_lse") = py::none(),
               arg("output_mask") = std::array<bool, 3>{true, true, true} OWN_KEYWORDS);
    module.def("varlen_fwd", torch::wrap_pybind_function(flash::varlen_fwd),
               "Forward of packed sequences: returns [out, softmax_lse, S_dmask, rng_state], and max_logits if wanted",
               arg("q"), arg("k"), arg("v"), arg("out"), arg("cu_seqlens_q"), arg("cu_seqlens_k"), arg("seqused_k"),
               arg("leftpad_k"), arg("block_table"), arg("alibi_slopes"), arg("max_seqlen_q"), arg("max_seqlen_k"),
               arg("p_dropout"), arg("softmax_scale"), arg("zero_tensors"), arg("is_causal"), arg("window_size_left"),
               arg("window_size_right"), arg("softcap"), arg("return_softmax"), arg("generator"),
               arg("deterministic") = false OWN_KEYWORDS);
    module.def("varlen_bwd", torch::wrap_pybind_function(flash::varlen_bwd),
               "Backward of packed sequences: returns [dq, dk, dv, softmax_d]", arg("dout"), arg("q"), arg("k"),
               arg("v"), arg("out"), arg("softmax_lse"), arg("dq"), arg("dk"), arg("dv"), arg("cu_seqlens_q"),
               arg("cu_seqlens_k"), arg("alibi_slopes"), arg("max_seqlen_q"), arg("max_seqlen_k"), arg("p_dropout"),
               arg("softmax_scale"), arg("zero_tensors"), arg("is_causal"), arg("window_size_left"),
               arg("window_size_right"), arg("softcap"), arg("deterministic"), arg("generator"), arg("rng_state"),
               arg("dsoftmax_lse") = py::none(),
               arg("output_mask") = std::array<bool, 3>{true, true, true} OWN_KEYWORDS);
    module.def("fwd_kvcache", torch::wrap_pybind_function(flash::fwd_kvcache),
               "Append and forward with a KV cache: returns [out, softmax_lse]", arg("q"), arg("kcache"), arg("vcache"),
               arg("k"), arg("v"), arg("seqlens_k"), arg("rotary_cos"), arg("rotary_sin"), arg("cache_batch_idx"),
               arg("leftpad_k"), arg("block_table"), arg("alibi_slopes"), arg("out"), arg("softmax_scale"),
               arg("is_causal"), arg("window_size_left"), arg("window_size_right"), arg("softcap"),
               arg("is_rotary_interleaved"), arg("num_splits"), arg("split_keys") = 0,
               arg("cache_seqlen") = -1 OWN_KEYWORDS);
    module.def("packed_fwd", torch::wrap_pybind_function(flash::Entry<flash::ops::PackedFwd>::run),
               "The op packed_fwd: returns out, softmax_lse, rng_state and max_logits");
    module.def("check_fwd", torch::wrap_pybind_function(flash::CheckEntry<>::run),
               "The checks of the op fwd for the backend that its options name");
    module.def(
        "reserve_sms", [](int count) { return std::exchange(flash::reserved_sms(), count); }, arg("count"),
        "Leaves SMs to kernels of other streams in the Hopper forwards of this thread; returns their number before");
    module.def(
        "is_transformed",
        [] { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode); },
        "Whether a transform of torch.func is active");
    module.def(
        "has_modes", [] { return c10::impl::TorchDispatchModeTLS::any_modes_set(); },
        "Whether a TorchDispatchMode is active");
    module.def(
        "is_batched", [](const at::Tensor &x) { return x.key_set().has(c10::DispatchKey::Batched); }, arg("x"),
        "Whether x is a batch of gradients (is_grads_batched)");
    module.def(
        "sdpa_activate",
        [](int64_t cudnn_lse_dim, bool cudnn_out_is_like_query, bool flash_out_is_rows_first, bool varlen_lse_is_packed,
           bool has_rng_state) {
            flash::sdpa::activate(
                {cudnn_lse_dim, cudnn_out_is_like_query, flash_out_is_rows_first, varlen_lse_is_packed, has_rng_state});
        },
        arg("cudnn_lse_dim"), arg("cudnn_out_is_like_query"), arg("flash_out_is_rows_first"),
        arg("varlen_lse_is_packed"), arg("has_rng_state"), "Runs our kernels in the attention ops of aten");
    module.def("sdpa_restore", &flash::sdpa::restore, "Runs PyTorch's again");
    module.def("sdpa_is_active", &flash::sdpa::is_active, "Whether the ops run ours");
    module.def("sdpa_counts", &flash::sdpa::counts, "For each op its name, the calls on our kernels and on PyTorch's");
    module.def("trace_enabled", &flash::trace_enabled, "Whether FLASH_ATTN_MINI_TRACE is on");
    module.def("cuda_unavailable_reason", &flash::cuda_unavailable_reason, arg("major"), arg("minor"));
    module.def("sm80_unavailable_reason", &flash::sm80_unavailable_reason, arg("major"), arg("minor"));
    module.def("build_info", &flash::build_info, "What this extension was built with");
}
