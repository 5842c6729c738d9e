// The functions of latent_cache.h.
#include "api/latent_cache.h"

#include <c10/core/DeviceGuard.h>

#include "api/set_params.h"
#include "dispatch/run_mha.h"
#include "sm90/decode/flash_fwd_latent.h"

namespace flash {
namespace {

// True if the params of a call can be written. Other calls are refused by the checks.
bool has_params(const KvCacheArgs &args) {
    const auto is_absent_or_int = [](const Optional &x, int64_t dims) {
        return !x.has_value() || (x->scalar_type() == at::kInt && x->dim() == dims);
    };
    const at::ScalarType dtype = args.q.scalar_type();
    const bool has_dtype = (dtype == at::kHalf || dtype == at::kBFloat16) && args.k_cache.scalar_type() == dtype &&
                           args.v_cache.scalar_type() == dtype;
    return has_dtype && args.k_cache.size(2) > 0 && is_absent_or_int(args.block_table, 2) &&
           is_absent_or_int(args.cache_seqlens, 1) && is_absent_or_int(args.cache_leftpad, 1) &&
           is_absent_or_int(args.cache_batch_idx, 1) && (!args.out.has_value() || args.out->dim() == 4) &&
           (!args.k.has_value() || args.k->dim() == 4);
}

}  // namespace

bool has_latent_head_dims(const KvCacheArgs &args) {
    return args.q.is_cuda() && args.q.dim() == 4 && args.k_cache.dim() == 4 && args.v_cache.dim() == 4 &&
           args.q.size(3) == kHeadDimLatentCache && args.k_cache.size(3) == kHeadDimLatentCache &&
           args.v_cache.size(3) == kHeadDimVLatentCache && has_params(args);
}

std::string reason_against_latent(const KvCacheArgs &args) {
    if (args.k.has_value()) {
        return "k is given: it does not write new keys";
    }
    const c10::DeviceGuard guard(args.q.device());
    Flash_fwd_params params = params_of_cache(args);
    if (args.out.has_value()) {
        params.o = tensor_ref(*args.out);
    }
    if (args.options.alibi_slopes.has_value()) {
        params.alibi_slopes = static_cast<const float *>(args.options.alibi_slopes->data_ptr());  // not read
    }
    return reason_against_latent(params);
}

}  // namespace flash
