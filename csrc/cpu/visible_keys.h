// Which keys a query sees by the mask (KeyRange), and by the mask and key_ranges (RowKeys); what a panel of rows sees
// (PanelKeys, CommonKeys).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "../common/sequence.h"
#include "../flash.h"

namespace flash::cpu {

// The keys [lo, hi) that a query sees by the causal mask or the window. lo and hi rise with the query.
struct KeyRange {
    int64_t lo, hi;

    KeyRange(const Flash_fwd_params &params, const Sequence &seq, int64_t query) {
        const int64_t diagonal = query + seq.seqlen_k - seq.seqlen_q, end = seq.seqlen_k;
        lo = params.window_size_left < 0 ? 0 : diagonal - params.window_size_left;
        hi = params.window_size_right < 0 ? end : diagonal + params.window_size_right + 1;
        lo = std::clamp<int64_t>(lo, 0, end);
        hi = std::clamp<int64_t>(hi, 0, end);
    }
    int64_t size() const { return hi - lo; }
};

// The queries [lo, hi) that see at least one of the keys [begin, end) by the causal mask or the window.
struct QueryRange {
    int64_t lo, hi;

    QueryRange(const Flash_fwd_params &params, const Sequence &seq, int64_t begin, int64_t end) {
        const int64_t shift = int64_t(seq.seqlen_q) - seq.seqlen_k, queries = begin < end ? seq.seqlen_q : 0;
        lo = params.window_size_right < 0 ? 0 : begin + shift - params.window_size_right;
        hi = params.window_size_left < 0 ? queries : end + shift + params.window_size_left;
        lo = std::clamp<int64_t>(lo, 0, queries);
        hi = std::clamp<int64_t>(hi, lo, queries);
    }
    int64_t size() const { return hi - lo; }
};

// The keys that a row sees: [lo, gap_lo) and [gap_hi, hi). Without a gap, gap_lo = gap_hi = hi. Without key_ranges lo
// and hi rise with the row.
struct RowKeys {
    int64_t lo, hi;
    int64_t gap_lo, gap_hi;

    bool is_empty() const { return lo >= hi; }
    int64_t size() const { return is_empty() ? 0 : hi - lo - (gap_hi - gap_lo); }
};

// The row's key_ranges, clamped to the keys of the mask, in rising order, with two that overlap or touch joined. A row
// without a key has lo = seqlen_k and hi = 0, so that it changes neither a smallest lo nor a largest hi.
inline RowKeys normalised_ranges(const Flash_fwd_params &params, const Sequence &seq, const KeyRange &mask,
                                 int64_t bidb, int64_t head, int64_t query) {
    struct Range {
        int64_t lo, hi;
        bool is_empty() const { return lo >= hi; }
    };
    const KeyRanges &ranges = params.key_ranges;
    const int *const bounds =
        ranges.ptr + bidb * ranges.batch_stride + head * ranges.head_stride + (seq.q_begin + query) * ranges.row_stride;
    const auto clamped = [&](int64_t bound) { return std::clamp(bound, mask.lo, mask.hi); };
    Range first{clamped(bounds[0]), clamped(bounds[1])}, second{0, 0};
    if (ranges.count == 2) second = {clamped(bounds[2]), clamped(bounds[3])};
    if (first.is_empty() || (!second.is_empty() && second.lo < first.lo)) std::swap(first, second);
    if (first.is_empty()) return {seq.seqlen_k, 0, 0, 0};
    if (second.is_empty()) return {first.lo, first.hi, first.hi, first.hi};
    const int64_t hi = std::max(first.hi, second.hi);
    if (second.lo <= first.hi) return {first.lo, hi, hi, hi};
    return {first.lo, hi, first.hi, second.lo};
}

// head: a function that returns the row's head, which only key_ranges need.
template <typename Head>
RowKeys keys_of_row(const Flash_fwd_params &params, const Sequence &seq, int64_t bidb, const Head &head,
                    int64_t query) {
    const KeyRange mask(params, seq, query);
    if (params.key_ranges.is_used()) return normalised_ranges(params, seq, mask, bidb, head(), query);
    return {mask.lo, mask.hi, mask.hi, mask.hi};
}

// The keys that any row of a panel sees lie in `first` or `second`: from the smallest begin to the largest end of the
// rows' ranges before their gaps, and of those after them.
struct PanelKeys {
    struct Hull {
        int lo = std::numeric_limits<int>::max(), hi = 0;

        void add(int64_t begin, int64_t end) {
            lo = std::min(lo, int(begin));
            hi = std::max(hi, int(end));
        }
        bool meets(int begin, int end) const { return begin < hi && end > lo; }
    };
    Hull first, second;

    void add(const RowKeys &row) {
        first.add(row.lo, row.gap_lo);
        if (row.gap_hi < row.hi) second.add(row.gap_hi, row.hi);
    }
    int hi() const { return std::max(first.hi, second.hi); }
    bool meets(int begin, int end) const { return first.meets(begin, end) || second.meets(begin, end); }

    // Where the panel's keys among [begin, end) begin and end; begin_in >= end_in if there are none.
    int begin_in(int begin) const { return std::max(begin, begin < first.hi ? first.lo : second.lo); }
    int end_in(int end) const { return std::min(end, end > second.lo ? hi() : first.hi); }

    // Of the first `blocks` blocks of block_keys keys, those that meet the panel's keys.
    int blocks_met(int blocks, int block_keys) const {
        const auto end_block = [=](const Hull &hull) {
            return std::min((hull.hi + block_keys - 1) / block_keys, blocks);
        };
        const int end = std::max(end_block(first), first.lo / block_keys);
        const int begin_second = std::max(second.lo / block_keys, end);
        return end - first.lo / block_keys + std::max(end_block(second) - begin_second, 0);
    }
};

// Keys that every row of a panel sees: those in `first` or in `second`.
struct CommonKeys {
    struct Range {
        int lo = 0, hi = std::numeric_limits<int>::max();

        void add(int64_t begin, int64_t end) {
            lo = std::max(lo, int(begin));
            hi = std::min(hi, int(end));
        }
        bool contains(int begin, int end) const { return begin >= lo && end <= hi; }
    };
    Range first, second;

    void add(const RowKeys &row) {
        first.add(row.lo, row.gap_lo);
        second.add(row.gap_hi, row.hi);
    }
    bool contain(int begin, int end) const { return first.contains(begin, end) || second.contains(begin, end); }
};

}  // namespace flash::cpu
