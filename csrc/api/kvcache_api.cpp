// mha_fwd_kvcache (flash_api.h). The caches are never copied: kernels read and write them as they are.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <string>
#include <tuple>

#include "api/allocation.h"
#include "api/checks.h"
#include "api/flash_api.h"
#include "api/kernel_inputs.h"
#include "api/set_params.h"
#include "common/trace.h"
#include "dispatch/run_mha.h"

#ifdef FLASH_WITH_CUDA
#include "kvcache/splitkv.h"
#endif

namespace flash {
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
    const at::Tensor out = args.out.has_value() ? *args.out : empty_contiguous_last(q);
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

}  // namespace flash
