// mha_fwd_kvcache: checks, allocates, sets the params and runs the kernels, for CPU and CUDA tensors. The caches are
// never copied: kernels read and write them as they are.
#include "kvcache_api.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>

#include <limits>
#include <string>
#include <vector>

#include "api_parts.h"
#include "checks.h"
#include "kernel_memory.h"
#include "run_mha.h"
#include "set_params.h"
#include "trace.h"

#ifdef FLASH_WITH_CUDA
#include "kvcache/splitkv.h"
#endif

namespace flash {
namespace {

using Optional = std::optional<at::Tensor>;

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

std::vector<at::Tensor> forward(const KvCacheArgs &args) {
    const at::Tensor &q = args.q;
    const std::string backend = backend_of(q);
    trace_entry(args, backend);
    check_kvcache(args, backend);

    const c10::OptionalDeviceGuard device_guard(q.device());
    const at::Tensor out = args.out.has_value() ? *args.out : empty_contiguous_last(q);
    const at::Tensor softmax_lse = at::empty({args.batch(), q.size(2), q.size(1)}, q.options().dtype(lse_dtype(q)));
    if (!args.has_keys()) {
        out.zero_();
        softmax_lse.fill_(-std::numeric_limits<double>::infinity());
        return {out, softmax_lse};
    }
    if (args.batch() == 0 || (q.size(1) == 0 && args.seqlen_new() == 0)) {
        return {out, softmax_lse};
    }
    const at::Tensor kernel_out = out.is_neg() ? at::empty(out.sizes(), out.options()) : out;
    const ScaledQuery scaled = with_positive_scale(without_neg(q), args.options.softmax_scale);
    const at::Tensor k = readable(args.k), v = readable(args.v), cos = readable(args.rotary_cos),
                     sin = readable(args.rotary_sin), slopes = readable_slopes(args.options);
    const at::Tensor q_rotated = cos.defined() ? at::empty(q.sizes(), q.options()) : at::Tensor();
    Flash_fwd_params params = set_params_kvcache({scaled.q, q_rotated, k, v, kernel_out, softmax_lse, slopes, cos, sin},
                                                 args, scaled.softmax_scale);
    const at::Tensor scratch = splitkv_scratch(params, q);
    run_mha_fwd_kvcache(params, q.device());
    if (!kernel_out.is_same(out)) {
        out.copy_(kernel_out);
    }
    return {out, softmax_lse};
}

}  // namespace

// In the argument order of the official extension. Returns out and softmax_lse. split_keys and cache_seqlen come last:
// the official fwd_kvcache does not have them. cache_seqlen: seqlens_k as one number for all sequences, -1: none.
std::vector<at::Tensor> mha_fwd_kvcache(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache,
                                        const Optional &k, const Optional &v, const Optional &cache_seqlens,
                                        const Optional &rotary_cos, const Optional &rotary_sin,
                                        const Optional &cache_batch_idx, const Optional &cache_leftpad,
                                        const Optional &block_table, const Optional &alibi_slopes, const Optional &out,
                                        double softmax_scale, bool is_causal, int64_t window_size_left,
                                        int64_t window_size_right, double softcap, bool is_rotary_interleaved,
                                        int64_t num_splits, int64_t split_keys, int64_t cache_seqlen) {
    return forward({q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad,
                    block_table, out,
                    Options{alibi_slopes, /*p_dropout=*/0.0, softmax_scale, is_causal, window_size_left,
                            window_size_right, softcap},
                    is_rotary_interleaved, num_splits, split_keys, cache_seqlen});
}

void bind_kvcache(pybind11::module_ &module) {
    namespace py = pybind11;
    module.def("fwd_kvcache", torch::wrap_pybind_function_no_gil(mha_fwd_kvcache),
               "Append and forward with a KV cache: returns [out, softmax_lse]", py::arg("q"), py::arg("kcache"),
               py::arg("vcache"), py::arg("k"), py::arg("v"), py::arg("seqlens_k"), py::arg("rotary_cos"),
               py::arg("rotary_sin"), py::arg("cache_batch_idx"), py::arg("leftpad_k"), py::arg("block_table"),
               py::arg("alibi_slopes"), py::arg("out"), py::arg("softmax_scale"), py::arg("is_causal"),
               py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"),
               py::arg("is_rotary_interleaved"), py::arg("num_splits"), py::arg("split_keys") = 0,
               py::arg("cache_seqlen") = -1);
}

}  // namespace flash
