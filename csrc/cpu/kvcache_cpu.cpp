// run_mha_fwd_kvcache_cpu: append, attention split over keys, combine.
//
// The keys of a sequence are cut into splits, whose states are combined in their order. Where the cuts lie depends on
// the sequence and the call, neither on the rest of the batch nor on the number of threads.
#include "dispatch/run_flash.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "../common/row_mod.h"
#include "../common/sequence.h"
#include "common/trace.h"
#include "schedule.h"
#include "select_isa.h"

namespace flash {
namespace cpu {
namespace {

// ---- append: copies and rotations, in float (float64: double), rounded once

constexpr int64_t kRowsPerThread = 16;  // rows of all heads that are worth a thread

template <typename Element>
class Append {
    using Acc = std::conditional_t<std::is_same_v<Element, double>, double, float>;

public:
    explicit Append(const Flash_fwd_params &params) : params_(params), cache_(params.cache) {}

    void run() const {
        const bool has_rotary = cache_.rotary_cos != nullptr;
        each_token(cache_.seqlen_new, [&](int bidb, int64_t token) { append(bidb, token); });
        if (has_rotary) {
            each_token(params_.seqlen_q, [&](int bidb, int64_t query) { rotate_query(bidb, query); });
        }
    }

private:
    // Calls function(sequence, token) for every token of every sequence, on all threads.
    template <typename Function>
    void each_token(int64_t tokens, const Function &function) const {
        at::parallel_for(0, params_.b * tokens, kRowsPerThread, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) function(int(i / tokens), i % tokens);
        });
    }

    void append(int bidb, int64_t token) const {
        const int64_t place = cache_seqlen(cache_, bidb) + token;  // from the start of the cache row
        if (place >= cache_.capacity) return;
        int64_t row = sequence(params_, bidb).k_bidb, row_in_page = place;
        if (params_.block_table != nullptr) {
            row = params_.block_table[bidb * params_.block_table_batch_stride + place / params_.page_size];
            row_in_page = place % params_.page_size;
        }
        for (int head = 0; head < params_.h_k; ++head) {
            const Element *k_new = at(cache_.k_new, bidb, token, head), *v_new = at(cache_.v_new, bidb, token, head);
            Element *k = at(params_.k, row, row_in_page, head), *v = at(params_.v, row, row_in_page, head);
            cache_.rotary_cos != nullptr ? rotate(k_new, k, place) : copy_row(k_new, k, params_.d);
            copy_row(v_new, v, params_.d_v);
        }
    }

    void rotate_query(int bidb, int64_t query) const {
        const int64_t position = cache_seqlen(cache_, bidb) + (cache_.is_rotary_by_query ? query : 0);
        for (int head = 0; head < params_.h; ++head) {
            rotate(at(cache_.q_input, bidb, query, head), at(params_.q, bidb, query, head), position);
        }
    }

    static Element *at(const TensorRef &t, int64_t batch, int64_t row, int64_t head) {
        return static_cast<Element *>(t.ptr) + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
    }

    static void copy_row(const Element *src, Element *dst, int headdim) {
        std::memcpy(dst, src, sizeof(Element) * size_t(headdim));
    }

    // Pairs (a, b) become (a cos - b sin, a sin + b cos). A position past the table is not rotated.
    void rotate(const Element *src, Element *dst, int64_t position) const {
        copy_row(src, dst, params_.d);
        if (position >= cache_.rotary_seqlen) return;
        const int pairs = cache_.rotary_dim / 2;
        const auto *cos = static_cast<const Element *>(cache_.rotary_cos) + position * pairs;
        const auto *sin = static_cast<const Element *>(cache_.rotary_sin) + position * pairs;
        for (int i = 0; i < pairs; ++i) {
            const int first = cache_.is_rotary_interleaved ? 2 * i : i;
            const int second = cache_.is_rotary_interleaved ? 2 * i + 1 : i + pairs;
            const Acc a = Acc(src[first]), b = Acc(src[second]), c = Acc(cos[i]), s = Acc(sin[i]);
            dst[first] = Element(a * c - b * s);
            dst[second] = Element(a * s + b * c);
        }
    }

    const Flash_fwd_params &params_;
    const KvCache &cache_;
};

// Writes cache.k_new and cache.v_new behind the keys of each sequence. With rotary, rotates the new keys, and writes
// the rotated cache.q_input to params.q.
void append_kv(const Flash_fwd_params &params) {
    switch (params.dtype) {
        case DType::float16:
            return Append<c10::Half>(params).run();
        case DType::bfloat16:
            return Append<c10::BFloat16>(params).run();
        case DType::float32:
            return Append<float>(params).run();
        case DType::float64:
            return Append<double>(params).run();
    }
}

// ---- combine: the states of rows after each split over keys become one

// One row of d_v columns.
template <typename Acc>
struct PartialRow {
    Acc *o, *m, *l;

    explicit PartialRow(const PartialRows &rows)
        : o(static_cast<Acc *>(rows.o)), m(static_cast<Acc *>(rows.m)), l(static_cast<Acc *>(rows.l)) {}

    void clear(int d_v) const {
        std::fill_n(o, d_v, Acc(0));
        *m = -std::numeric_limits<Acc>::infinity();
        *l = 0;
    }

    // Adds the keys of `next`. scale: of m. The order of calls decides the last bits.
    void add(const PartialRow &next, int d_v, double scale) const {
        const Acc m_new = std::max(*m, *next.m), safe_m = std::isinf(m_new) && m_new < 0 ? Acc(0) : m_new;
        const Acc scale_log2 = Acc(scale * kLog2e);
        const Acc alpha = std::exp2((*m - safe_m) * scale_log2), beta = std::exp2((*next.m - safe_m) * scale_log2);
        *m = m_new;
        *l = alpha * *l + beta * *next.l;
        for (int c = 0; c < d_v; ++c) o[c] = alpha * o[c] + beta * next.o[c];
    }

    template <typename Element>
    void store(Element *out, Acc *lse, int d_v, double scale, const RowMod<Acc> &row_mod) const {
        Acc reference = *m * Acc(scale), sum = *l;
        const Acc weight =
            row_mod.logit() > -std::numeric_limits<Acc>::infinity() ? row_mod.join(reference, sum) : Acc(1);
        *lse = sum == 0 ? -std::numeric_limits<Acc>::infinity() : reference + std::log(sum);
        const Acc factor = sum == 0 ? Acc(0) : weight / sum;
        for (int c = 0; c < d_v; ++c) out[c] = Element(o[c] * factor);
    }
};

// ---- attention split over keys

constexpr int64_t kMinSplitKeys = 512;    // keys: shorter splits of one query take more time to start than to stream
constexpr int64_t kMaxSplits = 16;        // of a sequence, if they are chosen here: each costs about 1 us
constexpr int64_t kSplitStep = 16;        // chosen splits begin at its multiples, as tiles of keys in pages do
constexpr int64_t kMaxSplitQueries = 32;  // more queries give enough tasks without splits
constexpr size_t kMaxPartialBytes = size_t(64) << 20;

constexpr int64_t ceil_div(int64_t x, int64_t y) {
    return (x + y - 1) / y;
}

constexpr int64_t round_up(int64_t x, int64_t multiple) {
    return ceil_div(x, multiple) * multiple;
}

// The splits of one sequence: split i has the keys [origin + i * keys, origin + (i + 1) * keys).
struct Splits {
    int64_t origin = 0;
    int64_t keys = 1;
    int64_t begin = 0, end = 0;  // the splits with a visible key

    Splits(const Flash_fwd_params &params, const Sequence &seq) {
        if (seq.seqlen_q == 0) return;
        const int64_t lo = KeyRange(params, seq, 0).lo, hi = KeyRange(params, seq, seq.seqlen_q - 1).hi;
        const int64_t visible = std::max<int64_t>(hi - lo, 0);
        const KvCache &cache = params.cache;
        if (cache.split_keys > 0) {
            keys = cache.split_keys;
        } else {
            const bool is_chosen = cache.num_splits == 0;
            const int64_t chosen = seq.seqlen_q > kMaxSplitQueries ? 1 : std::min(kMaxSplits, visible / kMinSplitKeys);
            const int64_t count = std::max<int64_t>(is_chosen ? chosen : cache.num_splits, 1);
            const int64_t step = is_chosen ? kSplitStep : 1;
            origin = count == 1 ? 0 : lo / step * step;
            keys = std::max<int64_t>(count == 1 ? seq.seqlen_k : round_up(ceil_div(hi - origin, count), step), 1);
        }
        begin = (lo - origin) / keys;
        end = visible == 0 ? begin + 1 : ceil_div(hi - origin, keys);  // one task for rows without keys
    }
    int64_t count() const { return end - begin; }
};

struct Task {
    RowBlock block;  // of every key/value head
    int64_t split;   // 0 is the first with a visible key
    int64_t pairs;   // visible pairs of a query and a key: the work
};

// The rows of all groups and their partial states. Group (bidb, bidh_k) has the rows from first_row() on.
class Partials {
public:
    // slots: states of each row.
    Partials(const Flash_fwd_params &params, int64_t slots)
        : params_(params),
          acc_bytes_(params.dtype == DType::float64 ? 8 : 4),
          group_rows_(int64_t(params.seqlen_q) * params.h_h_k_ratio),
          rows_(group_rows_ * params.h_k * params.b),
          memory_(allocate_scratch(size_t(slots) * slot_bytes())) {}

    static size_t slot_bytes(const Flash_fwd_params &params) { return Partials(params, 0).slot_bytes(); }

    PartialRows at(int64_t slot, int64_t row) const {
        char *const o = static_cast<char *>(memory_.get()) + size_t(slot) * slot_bytes();
        char *const m = o + rows_ * params_.d_v * acc_bytes_, *const l = m + rows_ * acc_bytes_;
        return {o + row * params_.d_v * acc_bytes_, m + row * acc_bytes_, l + row * acc_bytes_};
    }
    int64_t first_row(int64_t bidb, int64_t bidh_k) const { return (bidb * params_.h_k + bidh_k) * group_rows_; }
    int64_t group_rows() const { return group_rows_; }
    int64_t rows() const { return rows_; }

private:
    size_t slot_bytes() const { return size_t(rows_) * (params_.d_v + 2) * acc_bytes_; }

    const Flash_fwd_params &params_;
    const int64_t acc_bytes_, group_rows_, rows_;
    const ScratchMemory memory_;
};

class SplitForward {
public:
    explicit SplitForward(const Flash_fwd_params &params)
        : params_(params),
          isa_(select_isa(params.dtype)),
          kernel_(kernels_of(isa_).forward(params.dtype)),
          threads_(at::get_num_threads()) {
        for (int bidb = 0; bidb < params.b; ++bidb) {
            splits_.emplace_back(params, sequence(params, bidb));
            most_splits_ = std::max(most_splits_, splits_.back().count());
        }
    }

    void run() {
        // Partial states of `wave` splits at a time: their memory is limited, whatever the number of splits.
        const int64_t wave = most_splits_ <= 1 ? 0 : splits_of_wave();
        const Partials partials(params_, wave == 0 ? 0 : wave + 1);  // the last slot: the state over all splits so far
        if (trace_enabled()) {
            trace("run_mha_fwd_kvcache_cpu", "isa=%s splits=%lld split_keys=%lld threads=%lld", name_of(isa_),
                  static_cast<long long>(most_splits_), static_cast<long long>(splits_[0].keys),
                  static_cast<long long>(threads_));
        }
        for (int64_t first = 0; first < most_splits_; first += std::max<int64_t>(wave, 1)) {
            compute(partials, first, wave);
            if (wave > 0) combine(partials, first, wave);
        }
    }

private:
    int64_t splits_of_wave() const {
        const size_t most = kMaxPartialBytes / std::max<size_t>(Partials::slot_bytes(params_), 1);
        return std::clamp<int64_t>(int64_t(most), 1, most_splits_);
    }

    // Computes the splits [first, first + wave) of every sequence that has them. A sequence of one split needs no
    // partial state.
    void compute(const Partials &partials, int64_t first, int64_t wave) const {
        const TaskCount count(params_, threads_);
        const int64_t ratio = params_.h_h_k_ratio, rows = partials.group_rows();
        std::vector<Task> tasks;
        int64_t largest = 0;
        for (int bidb = 0; bidb < params_.b; ++bidb) {
            const Sequence seq = sequence(params_, bidb);
            const Splits &splits = splits_[size_t(bidb)];
            const int64_t block_rows = rows_of_block(kernel_, rows, ceil_div(count.of_sequence(bidb), splits.count()));
            largest = std::max(largest, std::min(block_rows, rows));
            for (int64_t split = first; split < std::min(first + std::max<int64_t>(wave, 1), splits.count()); ++split) {
                const int64_t key_begin = splits.origin + (splits.begin + split) * splits.keys;
                for (int64_t begin = 0; begin < rows; begin += block_rows) {
                    const int64_t end = std::min(begin + block_rows, rows);
                    Task task{{bidb, 0, begin, end - begin}, split, 0};
                    task.block.key_begin = std::min<int64_t>(key_begin, seq.seqlen_k);
                    task.block.key_end = std::min<int64_t>(key_begin + splits.keys, seq.seqlen_k);
                    task.pairs = visible_pairs(params_, bidb, begin / ratio, ceil_div(end, ratio)) / splits.count();
                    tasks.push_back(task);
                }
            }
        }
        if (tasks.empty()) return;
        std::stable_sort(tasks.begin(), tasks.end(), [](const Task &a, const Task &b) { return a.pairs > b.pairs; });
        const int64_t units = int64_t(tasks.size()) * params_.h_k;
        const int64_t heads = heads_of_call(kernel_, largest, params_.h_k, units, threads_);
        largest = ceil_div(largest, kernel_.panel_rows) * kernel_.panel_rows;
        run_tasks(tasks, ceil_div(params_.h_k, heads), threads_, kernel_.scratch_bytes(params_, largest),
                  [&](const Task &task, int64_t part, void *scratch) {
                      RowBlock block = task.block;
                      block.bidh_k = part * heads;
                      block.heads = std::min(heads, params_.h_k - block.bidh_k);
                      if (splits_[size_t(block.bidb)].count() > 1) {
                          const int64_t row = partials.first_row(block.bidb, block.bidh_k) + block.row_begin;
                          block.partial = partials.at(task.split - first, row);
                      }
                      kernel_.compute_attn_1rowblock(params_, block, scratch);
                  });
    }

    void combine(const Partials &partials, int64_t first, int64_t wave) const {
        switch (params_.dtype) {
            case DType::float16:
                return combine_rows<c10::Half, float>(partials, first, wave);
            case DType::bfloat16:
                return combine_rows<c10::BFloat16, float>(partials, first, wave);
            case DType::float32:
                return combine_rows<float, float>(partials, first, wave);
            case DType::float64:
                return combine_rows<double, double>(partials, first, wave);
        }
    }

    // Adds the splits of a wave to the state of each row, and stores the row after its last split.
    template <typename Element, typename Acc>
    void combine_rows(const Partials &partials, int64_t first, int64_t wave) const {
        constexpr int64_t kThreadWork = 1 << 17;  // elements that are worth a thread
        const double scale = params_.has_score_mod() ? 1.0 : params_.softmax_scale;
        const int d_v = params_.d_v, ratio = params_.h_h_k_ratio;
        const int64_t grain = std::max<int64_t>(kThreadWork / (d_v * wave), 1);
        at::parallel_for(0, partials.rows(), grain, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const int64_t group = row / partials.group_rows(), group_row = row % partials.group_rows();
                const int64_t bidb = group / params_.h_k, count = splits_[size_t(bidb)].count();
                if (count <= 1 || first >= count) continue;
                const PartialRow<Acc> state(partials.at(wave, row));
                if (first == 0) state.clear(d_v);
                const int64_t last = std::min(first + wave, count);
                for (int64_t split = first; split < last; ++split) {
                    state.add(PartialRow<Acc>(partials.at(split - first, row)), d_v, scale);
                }
                if (last < count) continue;
                const int64_t head = group % params_.h_k * ratio + group_row % ratio, query = group_row / ratio;
                const TensorRef &o = params_.o;
                state.store(
                    static_cast<Element *>(o.ptr) + bidb * o.batch_stride + query * o.row_stride + head * o.head_stride,
                    static_cast<Acc *>(params_.softmax_lse) + bidb * params_.lse_batch_stride +
                        head * params_.lse_head_stride + query,
                    d_v, scale, RowMod<Acc>(params_, bidb, head));
            }
        });
    }

    const Flash_fwd_params &params_;
    const Isa isa_;
    const ForwardKernel kernel_;
    const int64_t threads_;
    std::vector<Splits> splits_;  // of each sequence
    int64_t most_splits_ = 0;
};

}  // namespace
}  // namespace cpu

void run_mha_fwd_kvcache_cpu(const Flash_fwd_params &params) {
    cpu::append_kv(params);
    if (params.seqlen_q > 0) cpu::SplitForward(params).run();
}

}  // namespace flash
