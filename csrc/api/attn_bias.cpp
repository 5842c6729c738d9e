// The functions of attn_bias.h.
#include "api/attn_bias.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <string>
#include <vector>

#include "api/allocation.h"
#include "api/check_tensors.h"
#include "api/checks.h"
#include "api/kernel_inputs.h"
#include "api/score_mod.h"
#include "api/set_params.h"
#include "common/message.h"
#include "common/trace.h"
#include "dispatch/run_mha.h"

#ifdef FLASH_WITH_CUDA
#include "dispatch/device.h"
#endif

namespace flash {
namespace {

// Tiles of dbias that keep the device busy. On the CPU the number is fixed, as the sums depend on it.
int64_t tiles_wanted([[maybe_unused]] c10::Device device) {
#ifdef FLASH_WITH_CUDA
    if (device.is_cuda()) {
        constexpr int64_t kCtasPerSm = 2;
        return kCtasPerSm * device_properties().sm_count;
    }
#endif
    return 64;
}

// Parts into which the pairs of a sequence and a head that share a bias are divided.
int parts_of(const Flash_bias_bwd_params &params, c10::Device device) {
    constexpr int64_t kRowsPerTile = 128, kKeysPerTile = 128;
    const int64_t tiles = (params.bias_rows + kRowsPerTile - 1) / kRowsPerTile *
                          ((params.seqlen_k + kKeysPerTile - 1) / kKeysPerTile) * params.bias_batch * params.bias_heads,
                  pairs = int64_t(params.b / params.bias_batch) * (params.h / params.bias_heads);
    return static_cast<int>(std::clamp<int64_t>(tiles_wanted(device) / tiles, 1, pairs));
}

// The sum over the first dimension. On the CPU its order does not depend on the number of threads.
at::Tensor sum_of_parts(const at::Tensor &parts) {
    if (!parts.is_cpu()) {
        return at::sum(parts, 0);
    }
    at::Tensor sum = parts[0];
    for (int64_t i = 1; i < parts.size(0); ++i) {
        sum.add_(parts[i]);
    }
    return sum.clone();
}

}  // namespace

void check_attn_bias(const FwdArgs &args) {
    if (!args.options.attn_bias.has_value()) {
        return;
    }
    const at::Tensor &bias = *args.options.attn_bias, &q = args.q;
    FLASH_CHECK_NOT_IMPLEMENTED(
        !args.is_varlen(),
        "flash_attn_mini: attn_bias is not supported with sequences of different lengths "
        "(cu_seqlens); available: flash_attn_func with padded sequences, or key_ranges, causal, "
        "window_size and alibi_slopes");
    const bool is_wide = q.scalar_type() == at::kDouble;
    FLASH_CHECK_TYPE(bias.scalar_type() == at::kBool || bias.scalar_type() == q.scalar_type() ||
                         (!is_wide && bias.scalar_type() == at::kFloat),
                     "attn_bias has dtype ", bias.scalar_type(), "; allowed: bool, ", is_wide ? "" : "float32, ",
                     "or that of q, ", q.scalar_type());
    check_same_device({"attn_bias", bias}, q);
    const Sizes sizes(args);
    const auto is_one_or = [&](int64_t dim, int64_t size) { return bias.size(dim) == 1 || bias.size(dim) == size; };
    FLASH_CHECK_VALUE(bias.dim() == 4 && is_one_or(0, sizes.batch) && is_one_or(1, sizes.nheads) &&
                          is_one_or(2, sizes.rows_q) && bias.size(3) == sizes.rows_k,
                      "attn_bias has shape ", bias.sizes(),
                      "; allowed: [1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k] with batch ", sizes.batch,
                      ", nheads ", sizes.nheads, ", seqlen_q ", sizes.rows_q, ", seqlen_k ", sizes.rows_k);
}

void set_attn_bias(Flash_fwd_params &params, const FwdArgs &args) {
    if (!args.options.attn_bias.has_value()) {
        return;
    }
    const at::Tensor &bias = *args.options.attn_bias;
    const auto stride = [&](int64_t dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
    params.attn_bias.ptr = bias.data_ptr();
    params.attn_bias.batch_stride = stride(0);
    params.attn_bias.head_stride = stride(1);
    params.attn_bias.row_stride = stride(2);
    params.attn_bias.key_stride = stride(3);
    params.attn_bias.type = bias.scalar_type() == at::kBool              ? AttnBias::Type::boolean
                            : bias.scalar_type() == args.q.scalar_type() ? AttnBias::Type::dtype_of_q
                                                                         : AttnBias::Type::float32;
}

void check_attn_bias_bwd(const BiasBwdArgs &args, const std::string &backend) {
    const FwdArgs &forward = args.forward;
    const at::Tensor &q = forward.q;
    check_fwd(forward, backend);
    FLASH_CHECK_VALUE(forward.options.attn_bias.has_value(), "attn_bias is None; allowed: a tensor");
    const Named bias{"attn_bias", *forward.options.attn_bias};
    FLASH_CHECK_TYPE(bias.tensor.is_floating_point(), "attn_bias has dtype ", bias.tensor.scalar_type(),
                     "; allowed where its gradient is wanted: a floating dtype");
    check_same_kind({"dout", args.dout}, q);
    check_shape_of_out({"dout", args.dout}, {"q", q}, {"v", forward.v});
    constexpr int64_t kRows = Flash_bwd_params::kRowsRounded;
    const int64_t rows = q.size(1);
    const auto check_statistic = [&](const Named &x, int64_t size) {
        FLASH_CHECK_TYPE(x.tensor.scalar_type() == lse_dtype(q), x.name, " has dtype ", x.tensor.scalar_type(),
                         "; allowed: ", lse_dtype(q), " for inputs of ", q.scalar_type());
        check_same_device(x, q);
        const std::vector<int64_t> shape{q.size(0), q.size(2), size};
        FLASH_CHECK_VALUE(x.tensor.sizes() == shape, x.name, " has shape ", x.tensor.sizes(),
                          "; allowed: ", list_of(shape));
    };
    check_statistic({"softmax_lse", args.softmax_lse}, rows);
    check_statistic({"softmax_d", args.softmax_d}, (rows + kRows - 1) / kRows * kRows);
    check_rng_state(args.rng_state, forward.options.dropout_p, q);
}

at::Tensor mha_attn_bias_bwd(const BiasBwdArgs &args) {
    const FwdArgs &forward = args.forward;
    const at::Tensor &q = forward.q;
    check_attn_bias_bwd(args, backend_of(q));
    if (const int64_t headdim = padded_headdim(q, forward.v); headdim != 0) {
        const at::Tensor padded_q = padded(q, headdim), padded_k = padded(forward.k, headdim),
                         padded_v = padded(forward.v, headdim), padded_dout = padded(args.dout, headdim);
        return mha_attn_bias_bwd({{padded_q, padded_k, padded_v, std::nullopt, {}, forward.options},
                                  padded_dout,
                                  args.softmax_lse,
                                  args.softmax_d,
                                  args.rng_state});
    }
    const c10::OptionalDeviceGuard device_guard(q.device());
    const at::Tensor &bias = *forward.options.attn_bias;
    if (q.numel() == 0 || bias.numel() == 0) {
        return at::zeros(bias.sizes(), bias.options());
    }
    const auto statistic = [](const at::Tensor &x) { return without_neg(x.contiguous()); };
    const FwdArgs readable_args{
        q, forward.k, forward.v, std::nullopt, {}, readable_by_backward(forward.options, args.softmax_lse)};
    const ScaledQuery scaled = with_nonzero_scale(q, forward.options.softmax_scale);
    const at::Tensor kernel_q = readable_by_kernel(scaled.q, "q"), kernel_k = readable_by_kernel(forward.k, "k"),
                     kernel_v = readable_by_kernel(forward.v, "v"), kernel_dout = readable_by_kernel(args.dout, "dout"),
                     lse = statistic(args.softmax_lse), softmax_d = statistic(args.softmax_d),
                     rng_state = args.rng_state.has_value() ? statistic(*args.rng_state) : at::Tensor();
    const at::Tensor none;
    Flash_bias_bwd_params params;
    static_cast<Flash_bwd_params &>(params) =
        set_params_dgrad(set_params_fprop({kernel_q, kernel_k, kernel_v, /*out=*/kernel_dout, lse, rng_state},
                                          readable_args, scaled.softmax_scale),
                         {kernel_dout, none, none, none, none, softmax_d}, /*heads_per_dkv=*/1, forward.options);
    params.bias_batch = static_cast<int>(bias.size(0));
    params.bias_heads = static_cast<int>(bias.size(1));
    params.bias_rows = static_cast<int>(bias.size(2));
    params.parts = parts_of(params, q.device());
    const bool has_parts = params.parts > 1 && bias.scalar_type() != at::kDouble;
    const at::ScalarType dtype = has_parts ? at::kFloat : bias.scalar_type();
    params.is_float32 = dtype == at::kFloat;
    std::vector<int64_t> sizes = bias.sizes().vec();
    sizes.insert(sizes.begin(), params.parts);
    const at::Tensor dbias = at::empty(sizes, bias.options().dtype(dtype));
    params.dbias = dbias.data_ptr();
    if (trace_enabled()) {
        trace("mha_attn_bias_bwd", "parts=%d bias=[%d,%d,%d,%d]", params.parts, params.bias_batch, params.bias_heads,
              params.bias_rows, params.seqlen_k);
    }
    run_mha_bias_bwd(params, q.device());
    return params.parts == 1 ? dbias.squeeze(0) : sum_of_parts(dbias).to(bias.scalar_type());
}

}  // namespace flash
