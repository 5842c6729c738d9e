// set_params_fprop, set_params_kvcache and set_params_dgrad. In the call chain: after the checks and allocations of
// mha_fwd and mha_bwd, before run_mha_fwd and run_mha_bwd choose the kernel.
#include "api/set_params.h"

#include <optional>

#include "api/attn_bias.h"
#include "api/key_ranges.h"
#include "api/score_mod.h"
#include "common/message.h"
#include "common/philox.h"
#include "common/trace.h"
#include "dispatch/reserved_sms.h"

namespace flash {

namespace {

// Strides of a tensor [batch, nheads, rows], or [nheads, rows] with batch stride 0.
struct RowStrides {
    int64_t batch, head;

    explicit RowStrides(const at::Tensor &x) : batch(x.dim() == 3 ? x.stride(0) : 0), head(x.stride(-2)) {}
};

// keys_and_queries: at least as many as the longest sequence has together.
void set_options(Flash_fwd_params &params, const Options &options, double softmax_scale, int64_t keys_and_queries) {
    set_score_mod(params, options, softmax_scale);

    // A window that reaches past every key is unbounded: a larger one could overflow index arithmetic.
    const auto window = [&](int64_t size) { return size >= keys_and_queries ? -1 : static_cast<int>(size); };
    params.is_causal = options.causal;
    params.window_size_left = window(options.window_size_left);
    params.window_size_right = options.causal ? 0 : window(options.window_size_right);
    params.reserved_sms = reserved_sms();
}

void set_heads(Flash_fwd_params &params, int64_t nheads, int64_t nheads_k, int64_t headdim, int64_t headdim_v) {
    params.h = static_cast<int>(nheads);
    params.h_k = static_cast<int>(nheads_k);
    params.h_h_k_ratio = params.h / params.h_k;
    params.d = static_cast<int>(headdim);
    params.d_v = static_cast<int>(headdim_v);
}

// table: [batch, max_pages]; pages: [num_pages, page_size, ...].
void set_pages(Flash_fwd_params &params, const at::Tensor &table, const at::Tensor &pages) {
    params.block_table = table.data_ptr<int>();
    params.block_table_batch_stride = table.stride(0);
    params.max_pages = static_cast<int>(table.size(1));
    params.num_pages = static_cast<int>(pages.size(0));
    params.page_size = static_cast<int>(pages.size(1));
}

void set_lse(Flash_fwd_params &params, const at::Tensor &softmax_lse) {
    const RowStrides lse(softmax_lse);
    params.softmax_lse = softmax_lse.data_ptr();
    params.lse_batch_stride = lse.batch;
    params.lse_head_stride = lse.head;
}

const int *ints_of(const std::optional<at::Tensor> &x) {
    return x.has_value() ? x->data_ptr<int>() : nullptr;
}

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
    set_lse(params, tensors.softmax_lse);
    params.dtype = dtype_of(tensors.q);
    params.b = static_cast<int>(sizes.batch);
    set_heads(params, sizes.nheads, sizes.nheads_k, sizes.headdim, sizes.headdim_v);
    params.seqlen_q = static_cast<int>(sizes.seqlen_q);
    params.seqlen_k = static_cast<int>(sizes.seqlen_k);

    if (args.is_varlen()) {
        params.cu_seqlens_q = args.sequences.cu_seqlens_q->data_ptr<int>();
        params.cu_seqlens_k = args.sequences.cu_seqlens_k->data_ptr<int>();
        params.total_q = sizes.rows_q;
        params.total_k = sizes.rows_k;
    }
    if (args.is_paged()) {
        set_pages(params, *args.sequences.block_table, tensors.k);
    }

    set_options(params, options, softmax_scale, sizes.rows_q + sizes.rows_k);
    set_key_ranges(params, args);
    set_attn_bias(params, args);
    if (options.dropout_p > 0.0) {
        params.p_dropout = options.dropout_p;
        params.rp_dropout = static_cast<float>(1.0 / (1.0 - options.dropout_p));
        params.dropout_threshold = dropout_threshold(options.dropout_p);
        params.rng_state = tensors.rng_state.data_ptr<int64_t>();
    }
    if (trace_enabled()) {
        trace("set_params_fprop",
              "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d d_v=%d %s window=(%d,%d) key_ranges=%d attn_bias=%s "
              "p_dropout=%g varlen=%s page_size=%d",
              params.b, params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, params.d_v,
              describe_score_mod(params).c_str(), params.window_size_left, params.window_size_right,
              params.key_ranges.count, name_of(params.attn_bias.is_used()), params.p_dropout,
              name_of(params.cu_seqlens_q != nullptr), params.page_size);
    }
    return params;
}

void set_max_logits(Flash_fwd_params &params, const at::Tensor &max_logits) {
    if (max_logits.defined()) {
        params.max_logits = max_logits.data_ptr();
        params.max_logits_batch_stride = max_logits.dim() == 2 ? max_logits.size(1) : 0;
    }
}

Flash_fwd_params params_of_cache(const KvCacheArgs &args) {
    Flash_fwd_params params;
    const int64_t capacity = args.capacity();
    params.q = tensor_ref(args.q);
    params.k = tensor_ref(args.k_cache);
    params.v = tensor_ref(args.v_cache);
    params.dtype = dtype_of(args.q);
    params.b = static_cast<int>(args.batch());
    set_heads(params, args.q.size(2), args.k_cache.size(2), args.q.size(3), args.v_cache.size(3));
    params.seqlen_q = static_cast<int>(args.q.size(1));
    params.seqlen_k = static_cast<int>(capacity);
    if (args.block_table.has_value()) {
        set_pages(params, *args.block_table, args.k_cache);
    }
    KvCache &cache = params.cache;
    cache.capacity = static_cast<int>(capacity);
    cache.batch_cache = static_cast<int>(args.block_table.has_value() ? args.batch() : args.k_cache.size(0));
    cache.seqlens = ints_of(args.cache_seqlens);
    cache.seqlen = static_cast<int>(args.cache_seqlen < 0 ? capacity : args.cache_seqlen);
    cache.leftpad = ints_of(args.cache_leftpad);
    cache.batch_idx = ints_of(args.cache_batch_idx);
    cache.seqlen_new = static_cast<int>(args.seqlen_new());
    cache.num_splits = static_cast<int>(args.num_splits);
    cache.split_keys = static_cast<int>(args.split_keys);
    return params;
}

Flash_fwd_params set_params_kvcache(const KvCacheTensors &tensors, const KvCacheArgs &args, double softmax_scale) {
    Flash_fwd_params params = params_of_cache(args);
    const bool has_rotary = tensors.q_rotated.defined();
    params.q = tensor_ref(has_rotary ? tensors.q_rotated : tensors.q);
    params.o = tensor_ref(tensors.out);
    set_lse(params, tensors.softmax_lse);
    set_options(params, args.options, softmax_scale, args.q.size(1) + args.capacity());
    KvCache &cache = params.cache;
    if (cache.seqlen_new > 0) {
        cache.k_new = tensor_ref(tensors.k);
        cache.v_new = tensor_ref(tensors.v);
    }
    if (has_rotary) {
        cache.rotary_cos = tensors.rotary_cos.data_ptr();
        cache.rotary_sin = tensors.rotary_sin.data_ptr();
        cache.rotary_seqlen = static_cast<int>(tensors.rotary_cos.size(0));
        cache.rotary_dim = static_cast<int>(2 * tensors.rotary_cos.size(1));
        cache.is_rotary_interleaved = args.rotary_interleaved;
        // As the call says it: a window wider than the cache is none in params, and still gives each query its
        // position.
        cache.is_rotary_by_query =
            args.options.causal || args.options.window_size_left >= 0 || args.options.window_size_right >= 0;
        cache.q_input = tensor_ref(tensors.q);
    }
    if (trace_enabled()) {
        trace("set_params_kvcache",
              "b=%d seqlen_q=%d capacity=%d seqlen_new=%d h=%d h_k=%d d=%d d_v=%d %s window=(%d,%d) rotary_dim=%d "
              "page_size=%d num_splits=%d split_keys=%d",
              params.b, params.seqlen_q, cache.capacity, cache.seqlen_new, params.h, params.h_k, params.d, params.d_v,
              describe_score_mod(params).c_str(), params.window_size_left, params.window_size_right, cache.rotary_dim,
              params.page_size, cache.num_splits, cache.split_keys);
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
        trace("set_params_dgrad",
              "b=%d seqlen_q=%d seqlen_k=%d h=%d h_k=%d d=%d d_v=%d heads_per_dkv=%d deterministic=%s", params.b,
              params.seqlen_q, params.seqlen_k, params.h, params.h_k, params.d, params.d_v, heads_per_dkv,
              name_of(options.deterministic));
    }
    return params;
}

}  // namespace flash
