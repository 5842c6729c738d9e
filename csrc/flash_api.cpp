// The extension flash_attn_mini._C: pybind11 names for mha_fwd, mha_bwd, mha_varlen_fwd, mha_varlen_bwd and
// mha_fwd_kvcache (kvcache_api.cpp). Each checks, allocates, sets the params and runs the kernel, for CPU and CUDA
// tensors.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "api_parts.h"
#include "checks.h"
#include "kernel_memory.h"
#include "kvcache_api.h"
#include "message.h"
#include "minimal_api.h"
#include "python_backends.h"
#include "rng_state.h"
#include "run_mha.h"
#include "s_dmask.h"
#include "set_params.h"
#include "static_switch.h"
#include "trace.h"

#ifdef FLASH_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace flash {
namespace {

using Optional = std::optional<at::Tensor>;

void trace_entry(const char *link, const FwdArgs &args, const std::string &backend) {
    if (!trace_enabled()) {
        return;
    }
    const auto rows = [&](const at::Tensor &x) { return x.dim() > 2 ? long(x.size(-3)) : -1L; };
    const char *format =
        args.varlen == nullptr ? "backend=%s seqlen_q=%ld seqlen_k=%ld" : "backend=%s rows_q=%ld rows_k=%ld";
    trace(link, format, backend.c_str(), rows(args.q), rows(args.k));
}

void check_headdim_of_kernel(const at::Tensor &q) {
    FLASH_CHECK_VALUE(q.is_cpu() || q.size(-1) % 8 == 0, "q has headdim ", q.size(-1),
                      "; allowed: a multiple of 8 (flash_attn_func pads other sizes)");
}

// Returns out, softmax_lse, S_dmask and rng_state.
std::vector<at::Tensor> forward(const FwdArgs &args, std::optional<at::Generator> generator, bool zero_tensors) {
    const at::Tensor &q = args.q, &k = args.k;
    const Options &options = args.options;
    const std::string backend = backend_of(q);
    trace_entry(args.varlen == nullptr ? "mha_fwd" : "mha_varlen_fwd", args, backend);
    check_fwd(args, backend);
    check_headdim_of_kernel(q);

    const c10::OptionalDeviceGuard device_guard(q.device());
    const Sizes sizes(args);
    const bool is_dropping = options.p_dropout > 0.0;
    const at::Tensor out = args.out.has_value() ? *args.out : empty_contiguous_last(q);
    const at::TensorOptions lse_options = q.options().dtype(lse_dtype(q));
    const at::Tensor softmax_lse = args.varlen == nullptr
                                       ? at::empty({sizes.batch, sizes.nheads, sizes.rows_q}, lse_options)
                                       : at::empty({sizes.nheads, sizes.rows_q}, lse_options);
    const at::Tensor rng_state =
        is_dropping ? draw_rng_state(q, std::move(generator)) : at::empty({0}, q.options().dtype(at::kLong));
    if (!sizes.has_keys || zero_tensors) {
        out.zero_();
        softmax_lse.fill_(-std::numeric_limits<double>::infinity());
    }
    if (sizes.has_keys && q.numel() > 0) {
        const bool writes_in_place = is_writable_by_kernel(out);
        const at::Tensor kernel_out = writes_in_place ? out : at::empty(out.sizes(), out.options());
        const ScaledQuery scaled = with_positive_scale(without_neg(q), options.softmax_scale);
        const at::Tensor kernel_q = readable_by_kernel(scaled.q, "q"), kernel_k = readable_by_kernel(k, "k"),
                         kernel_v = readable_by_kernel(args.v, "v"), slopes = readable_slopes(options);
        Flash_fwd_params params = set_params_fprop(
            {kernel_q, kernel_k, kernel_v, kernel_out, softmax_lse, slopes, rng_state}, args, scaled.softmax_scale);
        run_mha_fwd(params, q.device());
        if (!writes_in_place) {
            out.copy_(kernel_out);
        }
    }
    const at::Tensor S_dmask =
        options.return_softmax && is_dropping ? s_dmask(args, rng_state) : at::empty({0}, q.options());
    return {out, softmax_lse, S_dmask, rng_state};
}

// Returns dq, dk, dv and softmax_d = delta (empty_softmax_d). A gradient that output_mask leaves out is an empty
// tensor.
std::vector<at::Tensor> backward(const BwdArgs &args, std::array<bool, 3> output_mask, bool zero_tensors) {
    const FwdArgs &forward = args.forward;
    const Options &options = forward.options;
    const at::Tensor &q = forward.q, &k = forward.k, &v = forward.v;
    const std::string backend = backend_of(q);
    trace_entry(forward.varlen == nullptr ? "mha_bwd" : "mha_varlen_bwd", forward, backend);
    check_bwd(args, backend);
    check_headdim_of_kernel(q);

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
        const ScaledQuery scaled = with_nonzero_scale(q, options.softmax_scale);
        const at::Tensor kernel_q = readable_by_kernel(scaled.q, "q"), kernel_k = readable_by_kernel(k, "k"),
                         kernel_v = readable_by_kernel(v, "v"), kernel_out = readable_by_kernel(*forward.out, "out"),
                         kernel_dout = readable_by_kernel(args.dout, "dout"), lse = statistic(args.softmax_lse),
                         dlse = statistic(args.dsoftmax_lse), slopes = readable_slopes(options),
                         rng_state = statistic(args.rng_state);
        Flash_bwd_params params = set_params_dgrad(
            set_params_fprop({kernel_q, kernel_k, kernel_v, kernel_out, lse, slopes, rng_state}, forward,
                             scaled.softmax_scale),
            {kernel_dout, dlse, dq.written, dk.written, dv.written, softmax_d}, heads_per_dkv, options);
        const std::optional<CudaScratch> scratch =
            q.is_cuda() ? std::optional<CudaScratch>(std::in_place, params, softmax_d, forward.varlen) : std::nullopt;
        run_mha_bwd(params, q.device());
    }
    dq.store();
    dk.store();
    dv.store();
    return {dq.returned(q), dk.returned(q), dv.returned(q), softmax_d};
}

std::vector<at::Tensor> mha_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Optional &out,
                                const Optional &alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                                int64_t window_size_left, int64_t window_size_right, double softcap,
                                bool return_softmax, std::optional<at::Generator> generator) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       return_softmax};
    return forward({q, k, v, out, options}, std::move(generator), /*zero_tensors=*/false);
}

std::vector<at::Tensor> mha_varlen_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                       const Optional &out, const at::Tensor &cu_seqlens_q,
                                       const at::Tensor &cu_seqlens_k, const Optional &seqused_k,
                                       const Optional &leftpad_k, const Optional &block_table,
                                       const Optional &alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                       double p_dropout, double softmax_scale, bool zero_tensors, bool is_causal,
                                       int64_t window_size_left, int64_t window_size_right, double softcap,
                                       bool return_softmax, std::optional<at::Generator> generator) {
    const auto lacks = [](const Optional &given, const char *name) {
        FLASH_CHECK_NOT_IMPLEMENTED(!given.has_value(), name, " is not implemented in this version; allowed: None");
    };
    lacks(seqused_k, "seqused_k");
    lacks(leftpad_k, "leftpad_k");
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       return_softmax};
    const VarlenArgs varlen{cu_seqlens_q, cu_seqlens_k, block_table, max_seqlen_q, max_seqlen_k};
    return forward({q, k, v, out, options, &varlen}, std::move(generator), zero_tensors);
}

// dsoftmax_lse and output_mask come last: the official bwd does not have them.
std::vector<at::Tensor> mha_bwd(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                const at::Tensor &out, const at::Tensor &softmax_lse, const Optional &dq,
                                const Optional &dk, const Optional &dv, const Optional &alibi_slopes, double p_dropout,
                                double softmax_scale, bool is_causal, int64_t window_size_left,
                                int64_t window_size_right, double softcap, bool deterministic,
                                std::optional<at::Generator> /*generator*/, const Optional &rng_state,
                                const Optional &dsoftmax_lse, std::array<bool, 3> output_mask) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       /*return_softmax=*/false,
                          deterministic};
    return backward({{q, k, v, out, options}, dout, softmax_lse, dsoftmax_lse, dq, dk, dv, rng_state}, output_mask,
                    /*zero_tensors=*/false);
}

std::vector<at::Tensor> mha_varlen_bwd(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k,
                                       const at::Tensor &v, const at::Tensor &out, const at::Tensor &softmax_lse,
                                       const Optional &dq, const Optional &dk, const Optional &dv,
                                       const at::Tensor &cu_seqlens_q, const at::Tensor &cu_seqlens_k,
                                       const Optional &alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                       double p_dropout, double softmax_scale, bool zero_tensors, bool is_causal,
                                       int64_t window_size_left, int64_t window_size_right, double softcap,
                                       bool deterministic, std::optional<at::Generator> /*generator*/,
                                       const Optional &rng_state, const Optional &dsoftmax_lse,
                                       std::array<bool, 3> output_mask) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       /*return_softmax=*/false,
                          deterministic};
    const VarlenArgs varlen{cu_seqlens_q, cu_seqlens_k, std::nullopt, max_seqlen_q, max_seqlen_k};
    return backward({{q, k, v, out, options, &varlen}, dout, softmax_lse, dsoftmax_lse, dq, dk, dv, rng_state},
                    output_mask, zero_tensors);
}

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
    info["cuda"] = CUDART_VERSION;
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
    module.doc() = "flash_attn_mini: names and argument order of the official flash_attn_2_cuda";
    module.def("fwd", torch::wrap_pybind_function_no_gil(flash::mha_fwd),
               "Forward: returns [out, softmax_lse, S_dmask, rng_state]", py::arg("q"), py::arg("k"), py::arg("v"),
               py::arg("out"), py::arg("alibi_slopes"), py::arg("p_dropout"), py::arg("softmax_scale"),
               py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"),
               py::arg("return_softmax"), py::arg("generator"));
    module.def("bwd", torch::wrap_pybind_function_no_gil(flash::mha_bwd), "Backward: returns [dq, dk, dv, softmax_d]",
               py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("softmax_lse"),
               py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("alibi_slopes"), py::arg("p_dropout"),
               py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
               py::arg("window_size_right"), py::arg("softcap"), py::arg("deterministic"), py::arg("generator"),
               py::arg("rng_state"), py::arg("dsoftmax_lse") = py::none(),
               py::arg("output_mask") = std::array<bool, 3>{true, true, true});
    module.def("varlen_fwd", torch::wrap_pybind_function_no_gil(flash::mha_varlen_fwd),
               "Forward of packed sequences: returns [out, softmax_lse, S_dmask, rng_state]", py::arg("q"),
               py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
               py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("block_table"), py::arg("alibi_slopes"),
               py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
               py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
               py::arg("softcap"), py::arg("return_softmax"), py::arg("generator"));
    module.def("varlen_bwd", torch::wrap_pybind_function_no_gil(flash::mha_varlen_bwd),
               "Backward of packed sequences: returns [dq, dk, dv, softmax_d]", py::arg("dout"), py::arg("q"),
               py::arg("k"), py::arg("v"), py::arg("out"), py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"),
               py::arg("dv"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("alibi_slopes"),
               py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
               py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
               py::arg("softcap"), py::arg("deterministic"), py::arg("generator"), py::arg("rng_state"),
               py::arg("dsoftmax_lse") = py::none(), py::arg("output_mask") = std::array<bool, 3>{true, true, true});
    flash::bind_kvcache(module);
    flash::bind_for_python_backends(module);
    module.def("cuda_unavailable_reason", &flash::cuda_unavailable_reason, py::arg("major"), py::arg("minor"));
    module.def("sm80_unavailable_reason", &flash::sm80_unavailable_reason, py::arg("major"), py::arg("minor"));
    module.def("build_info", &flash::build_info, "What this extension was built with");
    flash::bind_minimal_kernels(module);
}
