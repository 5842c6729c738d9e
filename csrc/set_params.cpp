// set_params_fprop and set_params_dgrad. In the call chain: after the checks and allocations of mha_fwd and mha_bwd,
// before run_mha_fwd and run_mha_bwd choose the kernel.
#include "set_params.h"

#include <algorithm>
#include <cmath>

#include "common/philox.h"
#include "message.h"
#include "trace.h"

namespace flash {

namespace {

// Strides of a tensor [batch, nheads, rows], or [nheads, rows] with batch stride 0.
struct RowStrides {
    int64_t batch, head;

    explicit RowStrides(const at::Tensor &x) : batch(x.dim() == 3 ? x.stride(0) : 0), head(x.stride(-2)) {}
};

}  // namespace

TensorRef tensor_ref(const at::Tensor &x) {
    return {x.data_ptr(), x.dim() == 4 ? x.stride(0) : 0, x.stride(-3), x.stride(-2)};
}

DType dtype_of(const at::Tensor &x) {
    switch (x.scalar_type()) {
        case at::kHalf:
            return DType::float16;
        case at::kBFloat16:
            return DType::bfloat16;
        case at::kFloat:
            return DType::float32;
        case at::kDouble:
            return DType::float64;
        default:
            FLASH_CHECK_TYPE(false, "dtype ", x.scalar_type(), " has no kernel");
    }
}

Flash_fwd_params set_params_fprop(const FpropTensors &tensors, const FwdArgs &args, double softmax_scale) {
    const Sizes sizes(args);
    const Options &options = args.options;
    Flash_fwd_params params;
    params.q = tensor_ref(tensors.q);
    params.k = tensor_ref(tensors.k);
    params.v = tensor_ref(tensors.v);
    params.o = tensor_ref(tensors.out);
    params.softmax_lse = tensors.softmax_lse.data_ptr();
    const RowStrides lse(tensors.softmax_lse);
    params.lse_batch_stride = lse.batch;
    params.lse_head_stride = lse.head;

    params.dtype = dtype_of(tensors.q);
    params.b = static_cast<int>(sizes.batch);
    params.h = static_cast<int>(sizes.nheads);
    params.h_k = static_cast<int>(sizes.nheads_k);
    params.h_h_k_ratio = params.h / params.h_k;
    params.seqlen_q = static_cast<int>(sizes.seqlen_q);
    params.seqlen_k = static_cast<int>(sizes.seqlen_k);
    params.d = static_cast<int>(sizes.headdim);

    if (args.varlen != nullptr) {
        params.cu_seqlens_q = args.varlen->cu_seqlens_q.data_ptr<int>();
        params.cu_seqlens_k = args.varlen->cu_seqlens_k.data_ptr<int>();
        params.total_q = sizes.rows_q;
        params.total_k = sizes.rows_k;
    }
    if (args.is_paged()) {
        params.block_table = args.varlen->block_table->data_ptr<int>();
        params.block_table_batch_stride = args.varlen->block_table->stride(0);
        params.max_pages = static_cast<int>(args.varlen->block_table->size(1));
        params.num_pages = static_cast<int>(tensors.k.size(0));
        params.page_size = static_cast<int>(tensors.k.size(1));
    }

    params.softmax_scale = softmax_scale;
    params.softcap = options.softcap;
    const bool has_softcap = options.softcap > 0.0;
    const double scale_softmax = has_softcap ? options.softcap : softmax_scale;
    params.qk_scale = static_cast<float>(softmax_scale);
    params.softcap_scale = has_softcap ? static_cast<float>(softmax_scale / options.softcap) : 0.0f;
    params.scale_softmax = static_cast<float>(scale_softmax);
    params.scale_softmax_log2 = static_cast<float>(scale_softmax * kLog2e);

    if (tensors.alibi_slopes.defined()) {
        params.alibi_slopes = tensors.alibi_slopes.data_ptr<float>();
        params.alibi_slopes_batch_stride = tensors.alibi_slopes.dim() == 2 ? tensors.alibi_slopes.stride(0) : 0;
    }
    if (options.p_dropout > 0.0) {
        params.p_dropout = options.p_dropout;
        params.rp_dropout = static_cast<float>(1.0 / (1.0 - options.p_dropout));
        params.dropout_threshold = dropout_threshold(options.p_dropout);
        params.rng_state = tensors.rng_state.data_ptr<int64_t>();
    }

    // A window that reaches past every key is unbounded: a larger one could overflow index arithmetic.
    const int64_t all = sizes.rows_q + sizes.rows_k;
    const auto window = [all](int64_t size) { return size >= all ? -1 : static_cast<int>(size); };
    params.is_causal = options.is_causal;
    params.window_size_left = window(options.window_size_left);
    params.window_size_right = options.is_causal ? 0 : window(options.window_size_right);
    if (trace_enabled()) {
        trace("set_params_fprop",
              "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d scale=%g window=(%d,%d) softcap=%g alibi=%s p_dropout=%g "
              "varlen=%s page_size=%d",
              params.b, params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, params.softmax_scale,
              params.window_size_left, params.window_size_right, params.softcap,
              name_of(params.alibi_slopes != nullptr), params.p_dropout, name_of(params.cu_seqlens_q != nullptr),
              params.page_size);
    }
    return params;
}

Flash_bwd_params set_params_dgrad(const Flash_fwd_params &forward, const DgradTensors &tensors, int heads_per_dkv,
                                  const Options &options) {
    const auto wanted = [](const at::Tensor &x) { return x.defined() ? tensor_ref(x) : TensorRef{}; };
    Flash_bwd_params params;
    static_cast<Flash_fwd_params &>(params) = forward;
    params.dout = tensor_ref(tensors.dout);
    params.dsoftmax_lse = tensors.dsoftmax_lse.defined() ? tensors.dsoftmax_lse.data_ptr() : nullptr;
    params.dq = wanted(tensors.dq);
    params.dk = wanted(tensors.dk);
    params.dv = wanted(tensors.dv);
    params.dsoftmax_sum = tensors.softmax_d.data_ptr();
    const RowStrides padded(tensors.softmax_d);
    params.padded_batch_stride = padded.batch;
    params.padded_head_stride = padded.head;
    params.heads_per_dkv = heads_per_dkv;
    params.deterministic = options.deterministic;
    if (options.softmax_scale == 0.0) {  // dq and dk are 0
        params.softmax_scale = 0.0;
        params.qk_scale = 0.0f;
    }
    if (trace_enabled()) {
        trace("set_params_dgrad", "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d heads_per_dkv=%d deterministic=%s",
              params.b, params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, heads_per_dkv,
              name_of(options.deterministic));
    }
    return params;
}

}  // namespace flash
