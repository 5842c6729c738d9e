// check_kvcache: the checks of a call of flash_attn_with_kvcache.
#include <algorithm>
#include <utility>
#include <vector>

#include "api/check_tensors.h"
#include "api/checks.h"
#include "api/latent_cache.h"
#include "common/message.h"
#include "flash.h"

namespace flash {
namespace {

using Optional = std::optional<at::Tensor>;

// "the cache, 128" or "block_table, 4 pages of 32": what limits the length of a sequence.
std::string capacity_text(const KvCacheArgs &args) {
    return args.block_table.has_value()
               ? message("the keys of block_table, ", args.capacity(), " (", args.block_table->size(1), " pages of ",
                         args.k_cache.size(1), " keys)")
               : message("the capacity of the cache, ", args.capacity());
}

void check_shapes(const KvCacheArgs &args, const std::string &backend) {
    const Named q{"q", args.q}, k_cache{"k_cache", args.k_cache}, v_cache{"v_cache", args.v_cache};
    const bool is_paged = args.block_table.has_value();
    check_dtype(q, backend);
    check_rank(q, 4, "[batch, seqlen_q, nheads, headdim]");
    for (const Named &x : {k_cache, v_cache}) {
        check_same_kind(x, args.q);
        check_rank(
            x, 4,
            is_paged ? "[num_pages, page_size, nheads_k, headdim]" : "[batch_cache, capacity, nheads_k, headdim]");
    }
    const bool is_latent = backend == "cuda" && has_latent_head_dims(args);
    if (is_latent) {
        const std::string reason = reason_against_latent(args);
        FLASH_CHECK_NOT_IMPLEMENTED(reason.empty(), "q has headdim ", args.q.size(3), " and v_cache ",
                                    args.v_cache.size(3), "; the cuda backend does not take this call: ", reason,
                                    "; available: the triton backend");
    }
    check_heads(q, k_cache, v_cache, is_latent ? "" : backend, kMaxHeadDimOfCache);
    FLASH_CHECK_NOT_IMPLEMENTED(is_latent || backend != "cuda" || args.v_cache.size(3) == args.q.size(3),
                                "v_cache has headdim ", args.v_cache.size(3), " (shape ", args.v_cache.sizes(),
                                "); allowed on the cuda backend: the headdim of q, ", args.q.size(3),
                                "; available: the triton backend");
    check_same_size(v_cache, k_cache, 0, is_paged ? "num_pages" : "batch_cache");
    check_same_size(v_cache, k_cache, 1, is_paged ? "page_size" : "capacity");
    check_at_most(q, 0, kMaxInt, "batch");
    check_at_most(q, 1, kMaxRows, "seqlen_q");
    check_at_most(k_cache, 0, kMaxInt, is_paged ? "num_pages" : "batch_cache");
    check_at_most(k_cache, 1, kMaxRows, is_paged ? "page_size" : "capacity");
    for (const Named &x : {q, k_cache, v_cache}) {
        check_last_dim_contiguous(x);
    }
    for (const Named &x : {k_cache, v_cache}) {
        FLASH_CHECK_VALUE(!x.tensor.requires_grad(), x.name,
                          " requires a gradient; allowed: a KV cache that requires none, for example ", x.name,
                          ".detach()");
        FLASH_CHECK_VALUE(!x.tensor.is_neg(), x.name,
                          " is a lazily negated view; allowed: a KV cache in memory as it is, for example ", x.name,
                          ".resolve_neg()");
    }
}

// int32 [batch], contiguous.
void check_per_sequence(const Named &x, const KvCacheArgs &args) {
    check_index(x, args.q);
    FLASH_CHECK_VALUE(x.tensor.dim() == 1 && x.tensor.size(0) == args.batch(), x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: [batch] with batch ", args.batch());
    FLASH_CHECK_VALUE(x.tensor.is_contiguous(), x.name, " has strides ", x.tensor.strides(), "; allowed: contiguous");
}

void check_rows(const KvCacheArgs &args) {
    if (args.block_table.has_value()) {
        FLASH_CHECK_VALUE(!args.cache_batch_idx.has_value(),
                          "cache_batch_idx and block_table are both given; allowed: one of the two");
        check_block_table({"block_table", *args.block_table}, {"k_cache", args.k_cache}, args.q, args.batch());
    } else if (args.cache_batch_idx.has_value()) {
        check_per_sequence({"cache_batch_idx", *args.cache_batch_idx}, args);
    } else {
        FLASH_CHECK_VALUE(args.k_cache.size(0) >= args.batch(), "k_cache has batch_cache ", args.k_cache.size(0),
                          " (shape ", args.k_cache.sizes(),
                          "); allowed without cache_batch_idx: at least the batch of q, ", args.batch());
    }
}

void check_lengths(const KvCacheArgs &args) {
    const int64_t seqlen_new = args.seqlen_new(), capacity = args.capacity();
    if (args.cache_leftpad.has_value()) {
        check_per_sequence({"cache_leftpad", *args.cache_leftpad}, args);
    }
    if (args.cache_seqlens.has_value()) {
        check_per_sequence({"cache_seqlens", *args.cache_seqlens}, args);
        FLASH_CHECK_VALUE(args.cache_seqlen == -1, "cache_seqlens is given as a tensor and as the number ",
                          args.cache_seqlen, "; allowed: one of the two");
    }
    const bool is_given = args.cache_seqlens.has_value() || args.cache_seqlen != -1;
    FLASH_CHECK_VALUE(is_given || !args.k.has_value(),
                      "cache_seqlens is None and k is given; allowed with k: the keys in the cache before the call");
    FLASH_CHECK_VALUE(args.cache_seqlen >= -1 && args.cache_seqlen <= capacity, "cache_seqlens is ", args.cache_seqlen,
                      "; allowed: 0 to ", capacity_text(args));
    const int64_t least = std::max<int64_t>(args.cache_seqlen, 0);
    FLASH_CHECK_VALUE(seqlen_new <= capacity - least, "k has ", seqlen_new, " new keys after ", least,
                      " in the cache; allowed: together at most ", capacity_text(args));
}

void check_new_keys(const KvCacheArgs &args) {
    FLASH_CHECK_VALUE(args.k.has_value() == args.v.has_value(), args.k.has_value() ? "v" : "k", " is None and ",
                      args.k.has_value() ? "k" : "v", " is given; allowed: both or neither");
    if (!args.k.has_value()) {
        return;
    }
    const Named q{"q", args.q}, k{"k", *args.k}, v{"v", *args.v};
    const Named k_cache{"k_cache", args.k_cache}, v_cache{"v_cache", args.v_cache};
    for (const auto &[x, cache] : {std::pair{k, k_cache}, std::pair{v, v_cache}}) {
        check_same_kind(x, args.q);
        check_rank(x, 4, "[batch, seqlen_new, nheads_k, headdim]");
        check_same_size(x, q, 0, "batch");
        check_same_size(x, cache, 2, "heads");
        check_same_size(x, cache, 3, "headdim");
        check_last_dim_contiguous(x);
    }
    check_same_size(v, k, 1, "seqlen_new");
}

// With a mask each query has a rotary position of its own. The last one lies past the keys if there are more queries
// than new keys.
void check_positions(const KvCacheArgs &args, int64_t length, int64_t bidb) {
    const int64_t seqlen_q = args.q.size(1);
    if (!args.rotary_cos.has_value() || seqlen_q == 0) {
        return;
    }
    const bool is_stepwise =
        args.options.causal || args.options.window_size_left >= 0 || args.options.window_size_right >= 0;
    const int64_t position = length + (is_stepwise ? seqlen_q - 1 : 0), positions = args.rotary_cos->size(0);
    FLASH_CHECK_VALUE(position < positions, "rotary_cos has ", positions, " positions; allowed: at least ",
                      position + 1, " for the queries of sequence ", bidb);
}

void check_rotary(const KvCacheArgs &args) {
    FLASH_CHECK_VALUE(args.rotary_cos.has_value() == args.rotary_sin.has_value(),
                      args.rotary_cos.has_value() ? "rotary_sin" : "rotary_cos", " is None and ",
                      args.rotary_cos.has_value() ? "rotary_cos" : "rotary_sin", " is given; allowed: both or neither");
    if (!args.rotary_cos.has_value()) {
        return;
    }
    FLASH_CHECK_VALUE(args.k.has_value(), "rotary_cos is given and k is None; allowed: rotary_cos together with k");
    const Named cos{"rotary_cos", *args.rotary_cos}, sin{"rotary_sin", *args.rotary_sin};
    for (const Named &x : {cos, sin}) {
        check_same_kind(x, args.q);
        check_rank(x, 2, "[positions, rotary_dim / 2]");
        FLASH_CHECK_VALUE(x.tensor.is_contiguous(), x.name, " has strides ", x.tensor.strides(),
                          "; allowed: contiguous");
        check_at_most(x, 0, kMaxRows, "positions");
    }
    check_same_shape(sin, cos);
    const int64_t rotary_dim = 2 * cos.tensor.size(1), headdim = args.q.size(3);
    FLASH_CHECK_VALUE(rotary_dim % 16 == 0 && rotary_dim >= 16 && rotary_dim <= headdim, "rotary_cos has shape ",
                      cos.tensor.sizes(), ", so rotary_dim is ", rotary_dim,
                      "; allowed: a multiple of 16, from 16 to headdim, ", headdim);
    FLASH_CHECK_VALUE(cos.tensor.size(0) >= args.capacity(), "rotary_cos has ", cos.tensor.size(0),
                      " positions; allowed: at least ", capacity_text(args));
    if (args.cache_seqlen != -1 && args.batch() > 0) {
        check_positions(args, args.cache_seqlen, /*bidb=*/0);  // the same for all sequences
    }
}

void check_splits(const KvCacheArgs &args) {
    FLASH_CHECK_VALUE(args.num_splits >= 0 && args.num_splits <= kMaxInt, "num_splits is ", args.num_splits,
                      "; allowed: 0 (chosen) to ", kMaxInt);
    FLASH_CHECK_VALUE(args.split_keys >= 0 && args.split_keys <= kMaxInt, "split_keys is ", args.split_keys,
                      "; allowed: 0 (chosen) to ", kMaxInt);
    FLASH_CHECK_VALUE(args.num_splits == 0 || args.split_keys == 0, "num_splits is ", args.num_splits,
                      " and split_keys is ", args.split_keys, "; allowed: one of the two, the other 0");
}

// ---- memory that a call writes --------------------------------------------------------------------------------------

void check_memory(const KvCacheArgs &args) {
    const bool appends = args.seqlen_new() > 0;
    if (!args.out.has_value() && !appends) {
        return;
    }
    const Named q{"q", args.q}, k_cache{"k_cache", args.k_cache}, v_cache{"v_cache", args.v_cache};
    NamedList read{q};
    const auto add = [&](const char *name, const Optional &x) { add_given(read, name, x); };
    for_each_tensor(static_cast<const KvCacheOptions &>(args), add);
    for_each_tensor(args.options, add);
    if (args.out.has_value()) {
        const Named out{"out", *args.out};
        check_shape_of_out(out, q, v_cache);
        check_written(out, args.q);
        check_no_overlap(out, read);
        check_no_overlap(out, {k_cache, v_cache});
    }
    if (appends) {
        for (const Named &cache : {k_cache, v_cache}) {
            check_written(cache, args.q);
            check_no_overlap(cache, read);
        }
        check_no_overlap(k_cache, {v_cache});
    }
}

// ---- values in tensors ----------------------------------------------------------------------------------------------

// An int32 tensor on the host; `otherwise` where the tensor is not given.
class Values {
public:
    Values(const Optional &given, int64_t otherwise) : otherwise_(otherwise) {
        if (given.has_value()) {
            values_ = given->cpu();
        }
    }
    int64_t operator[](int64_t bidb) const {
        return values_.defined() ? values_.const_data_ptr<int>()[bidb] : otherwise_;
    }

private:
    const int64_t otherwise_;
    at::Tensor values_;
};

// Keys of one sequence, counted from the start of its cache row.
struct Keys {
    int64_t begin;   // left padding
    int64_t before;  // keys before the call
    int64_t end;     // new keys included
};

std::vector<Keys> check_length_values(const KvCacheArgs &args) {
    const int64_t capacity = args.capacity(), seqlen_new = args.seqlen_new();
    const Values lengths(args.cache_seqlens, args.cache_seqlen == -1 ? capacity : args.cache_seqlen);
    const Values leftpads(args.cache_leftpad, 0);
    std::vector<Keys> keys;
    for (int64_t bidb = 0; bidb < args.batch(); ++bidb) {
        const int64_t length = lengths[bidb], leftpad = leftpads[bidb], end = length + seqlen_new;
        FLASH_CHECK_VALUE(length >= 0 && end <= capacity, "cache_seqlens is ", length, " for sequence ", bidb, " with ",
                          seqlen_new, " new keys; allowed: at least 0, and with the new keys at most ",
                          capacity_text(args));
        FLASH_CHECK_VALUE(leftpad >= 0 && leftpad <= end, "cache_leftpad is ", leftpad, " for sequence ", bidb,
                          "; allowed: 0 to its length in the cache, ", end);
        check_positions(args, length, bidb);
        keys.push_back({leftpad, length, end});
    }
    return keys;
}

void check_batch_idx_values(const KvCacheArgs &args) {
    const Values indices(args.cache_batch_idx, 0);
    const int64_t batch_cache = args.k_cache.size(0);
    std::vector<std::pair<int64_t, int64_t>> rows;  // cache row, sequence
    for (int64_t bidb = 0; bidb < args.batch(); ++bidb) {
        FLASH_CHECK_VALUE(indices[bidb] >= 0 && indices[bidb] < batch_cache, "cache_batch_idx is ", indices[bidb],
                          " for sequence ", bidb, "; allowed: 0 to ", batch_cache - 1);
        rows.emplace_back(indices[bidb], bidb);
    }
    if (args.seqlen_new() == 0) {
        return;
    }
    std::sort(rows.begin(), rows.end());
    for (size_t i = 1; i < rows.size(); ++i) {
        FLASH_CHECK_VALUE(rows[i].first != rows[i - 1].first, "cache_batch_idx is ", rows[i].first, " for sequences ",
                          rows[i - 1].second, " and ", rows[i].second,
                          "; allowed with k: a cache row of its own for each sequence");
    }
}

// Every page with a key that is read or written is in the pool, and no two sequences write the same place of a page.
void check_page_values(const KvCacheArgs &args, const std::vector<Keys> &keys) {
    struct Written {
        int page;
        int64_t begin, end;  // keys of the page
        int64_t bidb;
    };
    const at::Tensor on_cpu = args.block_table->cpu();
    const auto table = on_cpu.accessor<int, 2>();
    const int64_t num_pages = args.k_cache.size(0), page_size = args.k_cache.size(1);
    std::vector<Written> written;
    for (int64_t bidb = 0; bidb < args.batch(); ++bidb) {
        const auto [leftpad, before, end] = keys[size_t(bidb)];
        const int64_t first = args.seqlen_new() > 0 ? std::min(leftpad, before) : leftpad;
        for (int64_t column = first / page_size; column * page_size < end; ++column) {
            const int page = table[bidb][column];
            FLASH_CHECK_VALUE(page >= 0 && page < num_pages, "block_table has page ", page, " at [", bidb, ", ", column,
                              "]; allowed: ", pages_text(num_pages));
            const int64_t begin_in_page = std::max<int64_t>(before - column * page_size, 0);
            const int64_t end_in_page = std::min(end - column * page_size, page_size);
            if (begin_in_page < end_in_page && args.seqlen_new() > 0) {
                written.push_back({page, begin_in_page, end_in_page, bidb});
            }
        }
    }
    std::sort(written.begin(), written.end(), [](const Written &a, const Written &b) {
        return a.page != b.page ? a.page < b.page : a.begin < b.begin;
    });
    for (size_t i = 1; i < written.size(); ++i) {
        const Written &a = written[i - 1], &b = written[i];
        FLASH_CHECK_VALUE(a.page != b.page || a.end <= b.begin, "block_table has page ", a.page,
                          " for the new keys of ", "sequences ", a.bidb, " and ", b.bidb,
                          "; allowed: a place of its own for each new key");
    }
}

}  // namespace

void check_kvcache(const KvCacheArgs &args, const std::string &backend) {
    check_shapes(args, backend);
    check_rows(args);
    check_new_keys(args);
    check_lengths(args);
    check_rotary(args);
    check_splits(args);
    check_options(args.options, args.q, args.batch());
    FLASH_CHECK_NOT_IMPLEMENTED(!args.options.key_ranges.has_value(),
                                "flash_attn_mini: key_ranges is not supported with a KV cache; available: "
                                "flash_attn_func, or causal, window_size and cache_leftpad");
    FLASH_CHECK_NOT_IMPLEMENTED(!args.options.attn_bias.has_value(),
                                "flash_attn_mini: attn_bias is not supported with a KV cache; available: "
                                "flash_attn_func, or causal, window_size, alibi_slopes and cache_leftpad");
    FLASH_CHECK_NOT_IMPLEMENTED(!args.options.return_max_logits,
                                "flash_attn_mini: no backend implements return_max_logits with a KV cache; backends "
                                "that have it: none. Available: flash_attn_func");
    check_memory(args);
    if (may_read(args.q)) {
        const std::vector<Keys> keys = check_length_values(args);
        if (args.block_table.has_value()) {
            check_page_values(args, keys);
        } else if (args.cache_batch_idx.has_value()) {
            check_batch_idx_values(args);
        }
    }
}

}  // namespace flash
