// bind_for_python_backends and the functions that it binds. Their arguments are those of the entries of flash_api.cpp.
#include "python_backends.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>

#include <optional>
#include <string>
#include <utility>

#include "checks.h"
#include "message.h"
#include "reserved_sms.h"
#include "rng_state.h"
#include "s_dmask.h"

namespace flash {
namespace {

using Optional = std::optional<at::Tensor>;

void check_fwd_for(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Optional &alibi_slopes,
                   double p_dropout, double softmax_scale, bool is_causal, int64_t window_size_left,
                   int64_t window_size_right, double softcap, bool return_softmax, const std::string &backend) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       return_softmax};
    check_fwd({q, k, v, std::nullopt, options}, backend);
}

void check_varlen_fwd_for(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const at::Tensor &cu_seqlens_q,
                          const at::Tensor &cu_seqlens_k, const Optional &block_table, const Optional &alibi_slopes,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout, double softmax_scale,
                          bool is_causal, int64_t window_size_left, int64_t window_size_right, double softcap,
                          bool return_softmax, const std::string &backend) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       return_softmax};
    const VarlenArgs varlen{cu_seqlens_q, cu_seqlens_k, block_table, max_seqlen_q, max_seqlen_k};
    check_fwd({q, k, v, std::nullopt, options, &varlen}, backend);
}

void check_bwd_for(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                   const at::Tensor &out, const at::Tensor &softmax_lse, const Optional &alibi_slopes, double p_dropout,
                   double softmax_scale, bool is_causal, int64_t window_size_left, int64_t window_size_right,
                   double softcap, const Optional &dsoftmax_lse, const std::string &backend, const Optional &dq,
                   const Optional &dk, const Optional &dv, const Optional &rng_state) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap};
    check_bwd({{q, k, v, out, options}, dout, softmax_lse, dsoftmax_lse, dq, dk, dv, rng_state}, backend);
}

void check_varlen_bwd_for(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                          const at::Tensor &out, const at::Tensor &softmax_lse, const at::Tensor &cu_seqlens_q,
                          const at::Tensor &cu_seqlens_k, const Optional &alibi_slopes, int64_t max_seqlen_q,
                          int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool is_causal,
                          int64_t window_size_left, int64_t window_size_right, double softcap,
                          const Optional &dsoftmax_lse, const std::string &backend, const Optional &dq,
                          const Optional &dk, const Optional &dv, const Optional &rng_state) {
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap};
    const VarlenArgs varlen{cu_seqlens_q, cu_seqlens_k, std::nullopt, max_seqlen_q, max_seqlen_k};
    check_bwd({{q, k, v, out, options, &varlen}, dout, softmax_lse, dsoftmax_lse, dq, dk, dv, rng_state}, backend);
}

void check_kvcache_for(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Optional &k,
                       const Optional &v, const Optional &cache_seqlens, const Optional &rotary_cos,
                       const Optional &rotary_sin, const Optional &cache_batch_idx, const Optional &cache_leftpad,
                       const Optional &block_table, const Optional &alibi_slopes, const Optional &out,
                       double softmax_scale, bool is_causal, int64_t window_size_left, int64_t window_size_right,
                       double softcap, bool is_rotary_interleaved, int64_t num_splits, int64_t split_keys,
                       int64_t cache_seqlen, const std::string &backend) {
    const Options options{alibi_slopes,     /*p_dropout=*/0.0, softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap};
    check_kvcache({q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad,
                   block_table, out, options, is_rotary_interleaved, num_splits, split_keys, cache_seqlen},
                  backend);
}

// cu_seqlens None: equal lengths.
at::Tensor s_dmask_for(const at::Tensor &q, const at::Tensor &k, const Optional &rng_state,
                       const Optional &cu_seqlens_q, const Optional &cu_seqlens_k, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, const Optional &alibi_slopes, double p_dropout, double softmax_scale,
                       bool is_causal, int64_t window_size_left, int64_t window_size_right, double softcap,
                       const Optional &block_table) {
    FLASH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                      "one of cu_seqlens_q and cu_seqlens_k is None; allowed: both or neither");
    const bool is_varlen = cu_seqlens_q.has_value();
    const VarlenArgs varlen{is_varlen ? *cu_seqlens_q : q, is_varlen ? *cu_seqlens_k : k, block_table, max_seqlen_q,
                            max_seqlen_k};
    const Options options{alibi_slopes,     p_dropout,         softmax_scale, is_causal,
                          window_size_left, window_size_right, softcap,       /*return_softmax=*/true};
    const FwdArgs args{q, k, /*v=*/k, std::nullopt, options, is_varlen ? &varlen : nullptr};
    check_s_dmask(args, rng_state);
    const c10::OptionalDeviceGuard device_guard(q.device());
    return s_dmask(args, rng_state.value_or(at::Tensor()));
}

}  // namespace

void bind_for_python_backends(pybind11::module_ &module) {
    namespace py = pybind11;
    module.def("check_fwd", torch::wrap_pybind_function(check_fwd_for), "Only the argument checks of fwd");
    module.def("check_bwd", torch::wrap_pybind_function(check_bwd_for), "Only the argument checks of bwd");
    module.def("check_varlen_fwd", torch::wrap_pybind_function(check_varlen_fwd_for),
               "Only the argument checks of varlen_fwd");
    module.def("check_varlen_bwd", torch::wrap_pybind_function(check_varlen_bwd_for),
               "Only the argument checks of varlen_bwd");
    module.def("check_kvcache", torch::wrap_pybind_function(check_kvcache_for),
               "Only the argument checks of fwd_kvcache");
    module.def(
        "reserve_sms", [](int count) { return std::exchange(reserved_sms(), count); }, py::arg("count"),
        "Leaves SMs to kernels of other streams in the Hopper forwards of this thread; returns their number before");
    module.def("draw_rng_state", torch::wrap_pybind_function_no_gil(draw_rng_state),
               "Seed and offset for the dropout of one call, int64 [2]", py::arg("like"),
               py::arg("generator") = py::none());
    module.def("s_dmask", torch::wrap_pybind_function_no_gil(s_dmask_for),
               "exp(logit - largest logit of the row), negative where dropped; cu_seqlens None: equal lengths",
               py::arg("q"), py::arg("k"), py::arg("rng_state"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
               py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("alibi_slopes"), py::arg("p_dropout"),
               py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
               py::arg("window_size_right"), py::arg("softcap"), py::arg("block_table") = py::none());
}

}  // namespace flash
