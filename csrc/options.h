// The arguments of a call as the host code passes them on. Options is spelled out only where pybind prescribes the
// order of arguments (flash_api.cpp, python_backends.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

namespace flash {

// Every option of a call, in the order of the official extension.
struct Options {
    std::optional<at::Tensor> alibi_slopes;  // float32 [nheads] or [batch, nheads]
    double p_dropout;
    double softmax_scale;
    bool is_causal;
    int64_t window_size_left;   // keys, -1 = unbounded
    int64_t window_size_right;  // keys, -1 = unbounded
    double softcap;             // 0 = off
    bool return_softmax = false;
    bool deterministic = false;
};

// The sequences of a variable-length (varlen) call.
struct VarlenArgs {
    const at::Tensor &cu_seqlens_q;         // int32 [batch + 1]
    const at::Tensor &cu_seqlens_k;         // int32 [batch + 1]
    std::optional<at::Tensor> block_table;  // int32 [batch, max_pages]
    int64_t max_seqlen_q;
    int64_t max_seqlen_k;
};

// The arguments of a forward. Varlen: q and out are [total_q, nheads, headdim]; k and v are [total_k, nheads_k,
// headdim] or, paged, [num_pages, page_size, nheads_k, headdim].
struct FwdArgs {
    const at::Tensor &q;            // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &k;            // [batch, seqlen_k, nheads_k, headdim]
    const at::Tensor &v;            // like k
    std::optional<at::Tensor> out;  // like q
    Options options;
    const VarlenArgs *varlen = nullptr;  // null: equal lengths

    bool is_paged() const { return varlen != nullptr && varlen->block_table.has_value(); }
};

// The arguments of a call of flash_attn_with_kvcache. Lengths count from the start of a cache row, its left padding
// included.
struct KvCacheArgs {
    using Optional = std::optional<at::Tensor>;

    const at::Tensor &q;        // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &k_cache;  // [batch_cache, capacity, nheads_k, headdim]; paged [num_pages, page_size, nheads_k,
                                // headdim]
    const at::Tensor &v_cache;  // like k_cache
    const Optional &k;          // [batch, seqlen_new, nheads_k, headdim]; none: nothing is appended
    const Optional &v;          // like k
    const Optional &cache_seqlens;    // int32 [batch]: keys before the call
    const Optional &rotary_cos;       // [positions, rotary_dim / 2]
    const Optional &rotary_sin;       // like rotary_cos
    const Optional &cache_batch_idx;  // int32 [batch]: the cache row of each sequence
    const Optional &cache_leftpad;    // int32 [batch]: the first valid key
    const Optional &block_table;      // int32 [batch, max_pages]
    const Optional &out;              // like q
    Options options;
    bool is_rotary_interleaved;
    int64_t num_splits;    // most splits of a sequence; 0: chosen
    int64_t split_keys;    // keys of every split but the last; 0: chosen
    int64_t cache_seqlen;  // without cache_seqlens: keys before the call, the same for every sequence; -1: the capacity

    // For tensors with the right number of dimensions.
    int64_t batch() const { return q.size(0); }
    int64_t seqlen_new() const { return k.has_value() ? k->size(1) : 0; }
    int64_t capacity() const {
        return block_table.has_value() ? block_table->size(1) * k_cache.size(1) : k_cache.size(1);
    }
    bool has_keys() const { return capacity() > 0 && k_cache.numel() > 0; }
};

// The arguments of a backward. forward.out is the result of the forward.
struct BwdArgs {
    FwdArgs forward;
    const at::Tensor &dout;                         // like q
    const at::Tensor &softmax_lse;                  // [batch, nheads, seqlen_q], varlen [nheads, total_q]
    const std::optional<at::Tensor> &dsoftmax_lse;  // like softmax_lse
    const std::optional<at::Tensor> &dq;            // like q
    const std::optional<at::Tensor> &dk;            // like k
    const std::optional<at::Tensor> &dv;            // like v
    const std::optional<at::Tensor> &rng_state;     // int64 [2], with dropout
};

// The sizes of a call whose tensors have the right number of dimensions.
struct Sizes {
    int64_t batch;  // sequences
    int64_t nheads, nheads_k, headdim;
    int64_t rows_q, rows_k;  // equal lengths: of one sequence; varlen: of the tensor; paged: keys in max_pages pages
    int64_t seqlen_q, seqlen_k;  // of the longest sequence
    bool has_keys;

    explicit Sizes(const FwdArgs &args)
        : nheads(args.q.size(-2)), nheads_k(args.k.size(-2)), headdim(args.q.size(-1)), rows_q(args.q.size(-3)) {
        const VarlenArgs *varlen = args.varlen;
        batch = varlen == nullptr ? args.q.size(0) : varlen->cu_seqlens_q.size(0) - 1;
        rows_k = args.is_paged() ? varlen->block_table->size(1) * args.k.size(1) : args.k.size(-3);
        seqlen_q = varlen == nullptr ? rows_q : std::min(varlen->max_seqlen_q, rows_q);
        seqlen_k = varlen == nullptr ? rows_k : std::min(varlen->max_seqlen_k, rows_k);
        has_keys = batch > 0 && rows_k > 0 && args.k.numel() > 0;
    }
};

}  // namespace flash
