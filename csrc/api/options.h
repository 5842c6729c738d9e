// The arguments of a call as the host code passes them on. Each group is listed once, in the macros below: the structs,
// the schemas of the ops (api/ops.cpp), their autograd and autocast follow from the lists. flash_attn_mini/options.py
// has the same fields in the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>

namespace flash {

using Optional = std::optional<at::Tensor>;

// X(type in the schema, type in C++, name). Int is int64_t in kernels, c10::SymInt above them.

// The sequences of a variable-length (varlen) call. cu_seqlens_q is none for sequences of equal length.
#define FLASH_SEQUENCES(X)                                       \
    X("Tensor?", Optional, cu_seqlens_q) /* int32 [batch + 1] */ \
    X("Tensor?", Optional, cu_seqlens_k) /* int32 [batch + 1] */ \
    X("SymInt", Int, max_seqlen_q)                               \
    X("SymInt", Int, max_seqlen_k)                               \
    X("Tensor?", Optional, block_table) /* int32 [batch, max_pages] */

// Options that the official functions do not have. They come last in those of the extension (api/bindings.cpp), None by
// default, which is false for a bool.
#define FLASH_OWN_OPTIONS(X)                                                                                     \
    X("str?", std::optional<c10::string_view>, backend) /* none: the backend of the device */                    \
    X("Tensor?", Optional, learnable_sink)              /* [nheads], equal lengths also [batch, nheads] */       \
    X("Tensor?", Optional, key_ranges)                  /* int32 [1 or batch, 1 or nheads, seqlen_q, (2,) 2] */  \
    X("Tensor?", Optional, attn_bias)                   /* [1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k] */ \
    X("bool", bool, return_max_logits)                  /* only the forward reads it */

#define FLASH_OPTIONS(X)                                                           \
    X("float", double, dropout_p)                                                  \
    X("float", double, softmax_scale)                                              \
    X("bool", bool, causal)                                                        \
    X("SymInt", Int, window_size_left)   /* keys, -1 = unbounded */                \
    X("SymInt", Int, window_size_right)  /* keys, -1 = unbounded */                \
    X("float", double, softcap)          /* 0 = off */                             \
    X("Tensor?", Optional, alibi_slopes) /* float32 [nheads] or [batch, nheads] */ \
    X("bool", bool, deterministic)                                                 \
    FLASH_OWN_OPTIONS(X)

// flash_attn_with_kvcache. Lengths count from the start of a cache row, its left padding included.
#define FLASH_KV_CACHE(X)                                                                                           \
    X("Tensor?", Optional, k)               /* [batch, seqlen_new, nheads_k, headdim]; none: nothing is appended */ \
    X("Tensor?", Optional, v)               /* like k, with the columns of v_cache */                               \
    X("Tensor?", Optional, rotary_cos)      /* [positions, rotary_dim / 2] */                                       \
    X("Tensor?", Optional, rotary_sin)      /* like rotary_cos */                                                   \
    X("Tensor?", Optional, cache_seqlens)   /* int32 [batch]: keys before the call */                               \
    X("SymInt", Int, cache_seqlen)          /* without cache_seqlens: that number for all rows; -1: the capacity */ \
    X("Tensor?", Optional, cache_batch_idx) /* int32 [batch]: the cache row of each sequence */                     \
    X("Tensor?", Optional, cache_leftpad)   /* int32 [batch]: the first valid key */                                \
    X("Tensor?", Optional, block_table)     /* int32 [batch, max_pages] */                                          \
    X("bool", bool, rotary_interleaved)                                                                             \
    X("SymInt", Int, num_splits) /* most splits of a sequence; 0: chosen */                                         \
    X("SymInt", Int, split_keys) /* keys of every split but the last; 0: chosen */

#define FLASH_FIELD(schema, type, name) type name;
#define FLASH_REFERENCE(schema, type, name) , name
#define FLASH_SCHEMA(schema, type, name) ", " schema " " #name

// The references after the first argument as a tuple.
template <typename... Fields>
auto tie_after(int, const Fields &...fields) {
    return std::tie(fields...);
}

#define FLASH_VISIT(schema, type, name) visit(#name, name);

// A struct with the fields of a list; tie(): references to them; for_each(): visit(name, field) for each.
#define FLASH_STRUCT(Name, LIST)                                        \
    template <typename Int>                                             \
    struct Name {                                                       \
        LIST(FLASH_FIELD)                                               \
        auto tie() const { return tie_after(0 LIST(FLASH_REFERENCE)); } \
        template <typename Visitor>                                     \
        void for_each(Visitor visit) const {                            \
            LIST(FLASH_VISIT)                                           \
        }                                                               \
        template <typename Visitor>                                     \
        void for_each(Visitor visit) {                                  \
            LIST(FLASH_VISIT)                                           \
        }                                                               \
    };
FLASH_STRUCT(SequencesOf, FLASH_SEQUENCES)
FLASH_STRUCT(OptionsOf, FLASH_OPTIONS)
FLASH_STRUCT(KvCacheOptionsOf, FLASH_KV_CACHE)

// visit(name, tensor or none) for each tensor among the fields.
template <typename Fields, typename Visitor>
void for_each_tensor(Fields &fields, Visitor visit) {
    fields.for_each([&](const char *name, auto &field) {
        if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Optional>) {
            visit(name, field);
        }
    });
}

using Sequences = SequencesOf<int64_t>;
using Options = OptionsOf<int64_t>;
using KvCacheOptions = KvCacheOptionsOf<int64_t>;

// The arguments of a forward. Varlen: q is [total_q, nheads, headdim]; k is [total_k, nheads_k, headdim] or, paged,
// [num_pages, page_size, nheads_k, headdim]. v may have a head dim of its own, headdim_v.
struct FwdArgs {
    const at::Tensor &q;  // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &k;  // [batch, seqlen_k, nheads_k, headdim]
    const at::Tensor &v;  // like k, with headdim_v columns
    Optional out;         // like q, with headdim_v columns
    Sequences sequences;
    Options options;

    bool is_varlen() const { return sequences.cu_seqlens_q.has_value(); }
    bool is_paged() const { return sequences.block_table.has_value(); }
    int64_t batch() const { return is_varlen() ? sequences.cu_seqlens_q->size(0) - 1 : q.size(0); }
};

// The arguments of a call of flash_attn_with_kvcache.
struct KvCacheArgs : KvCacheOptions {
    const at::Tensor &q;        // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &k_cache;  // [batch_cache, capacity, nheads_k, headdim]; paged [num_pages, page_size, nheads_k,
                                // headdim]
    const at::Tensor &v_cache;  // like k_cache, with headdim_v columns
    const Optional &out;        // like q, with headdim_v columns
    Options options;

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
    const at::Tensor &dout;         // like out
    const at::Tensor &softmax_lse;  // [batch, nheads, seqlen_q], varlen [nheads, total_q]
    const Optional &dsoftmax_lse;   // like softmax_lse
    const Optional &dq;             // like q
    const Optional &dk;             // like k
    const Optional &dv;             // like v
    const Optional &rng_state;      // int64 [2]: as the forward returned it; read only with dropout
};

// The sizes of a call whose tensors have the right number of dimensions.
struct Sizes {
    int64_t batch;  // sequences
    int64_t nheads, nheads_k;
    int64_t headdim, headdim_v;  // of q and k; of v and out
    int64_t rows_q, rows_k;  // equal lengths: of one sequence; varlen: of the tensor; paged: keys in max_pages pages
    int64_t seqlen_q, seqlen_k;  // of the longest sequence
    bool has_keys;

    explicit Sizes(const FwdArgs &args)
        : nheads(args.q.size(-2)),
          nheads_k(args.k.size(-2)),
          headdim(args.q.size(-1)),
          headdim_v(args.v.size(-1)),
          rows_q(args.q.size(-3)) {
        const Sequences &sequences = args.sequences;
        batch = args.batch();
        rows_k = args.is_paged() ? sequences.block_table->size(1) * args.k.size(1) : args.k.size(-3);
        seqlen_q = args.is_varlen() ? std::min(sequences.max_seqlen_q, rows_q) : rows_q;
        seqlen_k = args.is_varlen() ? std::min(sequences.max_seqlen_k, rows_k) : rows_k;
        has_keys = batch > 0 && rows_k > 0 && args.k.numel() > 0;
    }
};

}  // namespace flash
