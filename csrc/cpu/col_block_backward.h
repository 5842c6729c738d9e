// The backward of one key block: the loop over panels of rows, the order in which key blocks add to dq, the row
// statistics. flash_bwd_kernel_fma.h and flash_bwd_kernel_amx.h derive from it and supply the arithmetic: load_kv,
// load_rows, step, store_dq and store_dk_dv. Their sums of dq have a multiple of kDqRows rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/row_mod.h"
#include "dropout.h"
#include "kernels.h"
#include "rows.h"
#include "score_mod.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// ---- P and dS

template <typename T>
struct RowState {    // of a panel's rows
    const T *lse;    // natural log; +inf where there is no row or no key
    const T *delta;  // rowsum(dO * O) - dLSE
    KeysOfRows<T> keys;
};

// exp(scale * s - lse). The product is rounded before lse is subtracted, as in the forward. Otherwise, where scores are
// so large that lse is the largest of them, the P of that score would not be 1.
template <typename T, int kTerms>
FLASH_INLINE Vec<T> probability(Vec<T> s, Vec<T> scale, Vec<T> lse, const T (&exp2_terms)[kTerms]) {
    return exp2_nonpositive<T>((rounded(s * scale) - lse) * broadcast<T>(T(kLog2e)), exp2_terms);
}

// Which pairs of a step are masked: none, keys outside of a row's [lo, hi), or these and keys in its gap.
enum class Mask { none, outside, outside_and_gap };

template <typename T, Mask kMask>
FLASH_INLINE Vec<T> visible_or_zero(Vec<T> x, typename Simd<T>::Int key, const RowState<T> &rows, int lane) {
    if constexpr (kMask == Mask::none) return x;
    return KeysOfLanes<T, kMask == Mask::outside_and_gap>(rows.keys, lane).see(key) ? x : Vec<T>{};
}

enum class DsOutput { none, plain, capped };

// For keys [n_begin, n_begin + keys): replaces s = q.k by P = exp(scale * s - lse), and dp = dO.v by dS = P * (dp -
// delta) (capped: times the derivative of the cap), in `vecs` vectors of lanes from `lane` on. Both are 0 where
// kMask masks.
template <typename T, int kPanel, Mask kMask, DsOutput kDs>
FLASH_NOINLINE void softmax_backward(T *s, T *dp, const T *derivative, int n_begin, int keys, T scale,
                                     const RowState<T> &rows, int lane, int vecs) {
    const Vec<T> scale_vec = broadcast<T>(scale);
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 3
        for (int j = 0; j < vecs; ++j) {
            const int at = lane + j * kLanes<T>;
            T *s_n = s + n * kPanel + at;
            Vec<T> p = probability<T>(load<T>(s_n), scale_vec, load<T>(rows.lse + at), exp2_terms(T()));
            p = visible_or_zero<T, kMask>(p, n_begin + n, rows, at);
            store<T>(s_n, p);
            if (kDs != DsOutput::none) {
                T *dp_n = dp + n * kPanel + at;
                Vec<T> ds = p * (load<T>(dp_n) - load<T>(rows.delta + at));
                if (kDs == DsOutput::capped) ds *= load<T>(derivative + n * kPanel + at);
                ds = visible_or_zero<T, kMask>(ds, n_begin + n, rows, at);
                store<T>(dp_n, ds);
            }
        }
    }
}

// ---- the loop

// Self: the derived class. The products handle kPanel rows and kStep keys at a time. Every sum runs over panels and
// steps in the same order, wherever a key block begins, so the size of key blocks changes no result.
template <typename Self, typename Element, int kPanel, int kStep>
class ColBlockBackward {
protected:
    using Acc = typename AccOf<Element>::type;
    using Int = typename Simd<Acc>::Int;

public:
    void compute() {
        find_keys_seen();
        self().load_kv();
        for (int64_t row = 0; row < group_.rows(); row += kPanel) {
            const Panel p = panel(row);
            if (!p.keys.meets(block_.n_begin, n_end_)) continue;
            set_rows(p);
            self().load_rows(p);
            if (want_dq_) begin_dq(p);
            for (int n = block_.n_begin; n < n_end_; n += kStep) {
                const int keys = std::min(kStep, n_end_ - n);
                if (p.keys.meets(n, n + keys)) self().step(p, n, keys);
            }
            if (want_dq_) end_dq(p);
        }
        self().store_dk_dv();
    }

    static BackwardKernel kernel() {
        return {kPanel,
                kStep,
                [](const Flash_bwd_params &p) {
                    return round_up(std::max(2 * Self::kBlockNumbers / (d_padded(p) + d_v_padded(p)), 1), kStep);
                },
                [](const Flash_bwd_params &p, int64_t rows) {
                    return sizeof(Acc) * size_t(dq_rows(rows)) * size_t(d_padded(p));
                },
                [](const Flash_bwd_params &p, int block_keys) {
                    ColBlock block;
                    block.block_keys = block_keys;
                    return Self(p, block, nullptr).scratch_.bytes();
                },
                panel_keys,
                compute_dot_do_o,
                [](const Flash_bwd_params &p, const ColBlock &block, void *scratch) {
                    Self(p, block, static_cast<char *>(scratch)).compute();
                }};
    }

protected:
    struct Panel {
        int64_t index;
        int64_t row;     // first row
        int rows;        // at most kPanel
        PanelKeys keys;  // that any of its rows sees
    };

    ColBlockBackward(const Flash_bwd_params &params, const ColBlock &block, char *scratch)
        : params_(params),
          block_(block),
          group_{params, block.bidb, block.bidh_k},
          d_(params.d),
          d_v_(params.d_v),
          d_padded_(d_padded(params)),
          d_v_padded_(d_v_padded(params)),
          n_end_(int(std::min<int64_t>(int64_t(block.n_begin) + block.block_keys, group_.seq.seqlen_k))),
          scale_(Acc(params.softmax_scale)),
          score_mod_(params),
          dropout_(params),
          want_dq_(params.dq.ptr != nullptr),
          want_dk_(params.dk.ptr != nullptr),
          want_dv_(params.dv.ptr != nullptr),
          scratch_(scratch) {
        scratch_.take(lse_, kPanel);
        scratch_.take(delta_, kPanel);
        keys_.take(scratch_, params, kPanel);
        rising_lo_ = keys_.lo;  // rise with the row
        rising_hi_ = keys_.hi;
        if (params.key_ranges.is_used()) {
            scratch_.take(rising_lo_, kPanel);
            scratch_.take(rising_hi_, kPanel);
            scratch_.take(is_seen_, block.block_keys);
        }
        scratch_.take(own_dq_, want_dq_ ? int64_t(kPanel) * d_padded_ : 0);
        score_mod_.take(scratch_, kPanel);
        dropout_.take(scratch_, kStep);
    }

    static int d_padded(const Flash_bwd_params &params) { return round_up(params.d, Self::kColumns); }
    static int d_v_padded(const Flash_bwd_params &params) { return round_up(params.d_v, Self::kColumns); }
    static int64_t dq_rows(int64_t rows) { return (rows + Self::kDqRows - 1) / Self::kDqRows * Self::kDqRows; }
    Acc *dq_accum(const Panel &p) const {
        if (block_.blocks_done == nullptr) return own_dq_;
        return reinterpret_cast<Acc *>(block_.dq_accum) + size_t(p.row) * d_padded_;
    }

    bool want_ds() const { return want_dq_ || want_dk_; }

    Panel panel(int64_t row) const {
        const int rows = int(std::min<int64_t>(group_.rows() - row, kPanel));
        PanelKeys keys;
        if (params_.key_ranges.is_used())
            keys = block_.panel_keys[row / kPanel];
        else
            keys.first = {int(group_.keys_seen(row).lo), int(group_.keys_seen(row + rows - 1).hi)};
        return {row / kPanel, row, rows, keys};
    }

    // Waits until all key blocks before this one have added to the panel's dq. The first one clears the sums.
    void begin_dq(const Panel &p) {
        const int blocks_before = p.keys.blocks_met(block_.n_begin / block_.block_keys, block_.block_keys);
        if (block_.blocks_done != nullptr) wait_until_done(block_.blocks_done[p.index], blocks_before);
        if (blocks_before == 0) std::fill_n(dq_accum(p), size_t(dq_rows(p.rows)) * d_padded_, Acc(0));
    }
    // The last key block stores dq.
    void end_dq(const Panel &p) {
        if (p.keys.hi() <= n_end_) self().store_dq(p);
        if (block_.blocks_done != nullptr) add_done(block_.blocks_done[p.index]);
    }

    // Lanes past the last row get the keys of that row, and an lse that makes their P 0. Rows without a key get that
    // lse too, and delta 0.
    void set_rows(const Panel &p) {
        const auto *lse = static_cast<const Acc *>(params_.softmax_lse);
        common_keys_ = {};
        RowKeys keys{};
        for (int i = 0; i < kPanel; ++i) {
            const int64_t row = p.row + std::min(i, p.rows - 1);
            if (i < p.rows) {
                keys = group_.keys_seen(row);
                common_keys_.add(keys);
            }
            keys_.set(i, keys);
            score_mod_.set_row(group_, row, i);
            const Acc row_lse = lse[group_.lse_index(row)];
            const bool has_lse = i < p.rows && row_lse != -std::numeric_limits<Acc>::infinity() &&
                                 !bias_hides_all_keys(params_, group_, row);
            lse_[i] = has_lse ? row_lse : std::numeric_limits<Acc>::infinity();
            delta_[i] = has_lse ? sums_of_head(params_, group_.bidb, group_.head(row))[group_.query(row)] : Acc(0);
        }
        if (!params_.key_ranges.is_used()) return;
        for (int i = 0; i < kPanel; ++i) rising_hi_[i] = std::max(keys_.hi[i], i == 0 ? Int(0) : rising_hi_[i - 1]);
        for (int i = kPanel - 1; i >= 0; --i)
            rising_lo_[i] = std::min(keys_.lo[i], i == kPanel - 1 ? keys_.lo[i] : rising_lo_[i + 1]);
    }
    RowState<Acc> row_state() const { return {lse_, delta_, keys_}; }

    // True if some of the panel's rows do not see all of these keys.
    bool is_masked(int n_begin, int keys) const { return !common_keys_.contain(n_begin, n_begin + keys); }
    Mask mask(bool masked) const {
        return !masked ? Mask::none : keys_.has_gaps() ? Mask::outside_and_gap : Mask::outside;
    }

    // True if the panel's row i sees at least one key of the sequence. load_rows puts zeros in the place of the others,
    // because 0 * NaN would carry a NaN or an infinity of theirs into dk and dv. store_dq leaves out the others,
    // because compute_dot_do_o stores their dq.
    bool has_keys(int i) const {
        return keys_.lo[i] < keys_.hi[i] &&
               !(score_mod_.hides_keys() && lse_[i] == std::numeric_limits<Acc>::infinity());
    }

    // Marks the keys of the block that a row sees. load_kv puts zeros in the place of the others, because 0 * NaN would
    // carry a NaN or an infinity of theirs into dq.
    void find_keys_seen() {
        if (!params_.key_ranges.is_used()) return;
        std::fill_n(is_seen_, block_.block_keys, uint8_t(0));
        const auto mark = [&](int64_t begin, int64_t end) {
            begin = std::max<int64_t>(begin, block_.n_begin);
            end = std::min<int64_t>(end, n_end_);
            if (begin < end) std::fill(is_seen_ + begin - block_.n_begin, is_seen_ + end - block_.n_begin, uint8_t(1));
        };
        for (int64_t row = 0; row < group_.rows(); row += kPanel) {
            if (!block_.panel_keys[row / kPanel].meets(block_.n_begin, n_end_)) continue;
            for (int64_t i = row; i < std::min(row + kPanel, group_.rows()); ++i) {
                const RowKeys keys = group_.keys_seen(i);
                mark(keys.lo, keys.gap_lo);
                mark(keys.gap_hi, keys.hi);
            }
        }
    }
    bool is_seen(int key) const {
        if (is_seen_ != nullptr) return is_seen_[key - block_.n_begin] != 0;
        return QueryRange(params_, group_.seq, key, key + 1).size() > 0;
    }
    // True if a loaded key must be zeros: it has an infinity or a NaN, and attn_bias hides it from every row.
    template <typename Number>
    bool is_hidden(int key, const Number *k, const Number *v) const {
        return score_mod_.hides_keys() && (has_special(k, d_) || has_special(v, d_v_)) &&
               score_mod_.is_hidden(group_, key);
    }

    struct Range {  // [begin, end)
        int begin, end;
        bool is_empty() const { return begin >= end; }
    };

    // No row of the panel outside of this range sees any of the keys [n_begin, n_end).
    Range rows_seeing(const Panel &p, int n_begin, int n_end) const {
        const Int *const lo = rising_lo_, *const hi = rising_hi_;
        return {int(std::partition_point(hi, hi + p.rows, [=](Int hi) { return hi <= n_begin; }) - hi),
                int(std::partition_point(lo, lo + p.rows, [=](Int lo) { return lo < n_end; }) - lo)};
    }

    // No row of the panel's rows [row_begin, row_end) sees any of the keys outside of this range, counted from n_begin.
    Range keys_seen(int row_begin, int row_end, int n_begin, int keys) const {
        Int lo = keys_.lo[row_begin], hi = keys_.hi[row_end - 1];
        if (params_.key_ranges.is_used()) {
            lo = *std::min_element(keys_.lo + row_begin, keys_.lo + row_end);
            hi = *std::max_element(keys_.hi + row_begin, keys_.hi + row_end);
        }
        return {std::max(int(lo) - n_begin, 0), std::min(int(hi) - n_begin, keys)};
    }

    // to[0 .. headdim) = factor * from.
    static void store_row(const Acc *from, Acc factor, Element *to, int headdim) {
        if constexpr (std::is_same_v<Element, Acc>) {
            for (int c = 0; c < headdim; ++c) to[c] = factor * from[c];
        } else {
            Acc row[kMaxHeadDim];
            for (int c = 0; c < headdim; ++c) row[c] = factor * from[c];
            convert_row(row, to, headdim);
        }
    }

    // to[0 .. headdim) = from, then zeros up to headdim_padded.
    static void load_row(const Element *from, Acc *to, int headdim, int headdim_padded) {
        if constexpr (std::is_same_v<Element, Acc>)
            std::memcpy(to, from, sizeof(Acc) * size_t(headdim));
        else
            convert_row(from, to, headdim);
        std::fill(to + headdim, to + headdim_padded, Acc(0));
    }

    Self &self() { return static_cast<Self &>(*this); }

    const Flash_bwd_params &params_;
    const ColBlock block_;
    const Group<Element> group_;
    const int d_, d_v_, d_padded_, d_v_padded_;
    const int n_end_;  // of the block's keys
    const Acc scale_;
    ScoreMod<Acc> score_mod_;
    Dropout<kPanel> dropout_;
    const bool want_dq_, want_dk_, want_dv_;
    Scratch scratch_;
    KeysOfRows<Acc> keys_;  // [kPanel]

private:
    // dsoftmax_sum of a head of a sequence, indexed by query.
    static Acc *sums_of_head(const Flash_bwd_params &params, int64_t bidb, int64_t bidh) {
        return static_cast<Acc *>(params.dsoftmax_sum) + bidb * params.padded_batch_stride +
               bidh * params.padded_head_stride + padded_begin(params, int(bidb));
    }

    static PanelKeys panel_keys(const Flash_bwd_params &params, int bidb, int64_t bidh_k, int64_t row) {
        const Group<Element> group{params, bidb, bidh_k};
        PanelKeys keys;
        for (int64_t end = std::min(row + kPanel, group.rows()); row < end; ++row) keys.add(group.keys_seen(row));
        return keys;
    }

    // attn_bias: such a row has the log-sum-exp of a row without keys, -inf or the sink, and the output 0.
    static bool bias_hides_all_keys(const Flash_bwd_params &params, const Group<Element> &group, int64_t row) {
        if (!params.attn_bias.is_used()) return false;
        const Acc lse = static_cast<const Acc *>(params.softmax_lse)[group.lse_index(row)];
        if (lse != RowMod<Acc>(params, group.bidb, group.head(row)).logit()) return false;
        constexpr int kRowSize = round_up(kMaxHeadDim, kLanes<Acc>);
        alignas(64) Acc out[kRowSize];
        load_row(group.row_ptr(params.o, row), out, params.d_v, round_up(params.d_v, kLanes<Acc>));
        return std::all_of(out, out + params.d_v, [](Acc x) { return x == Acc(0); });
    }

    static void compute_dot_do_o(const Flash_bwd_params &params, int bidb, int bidh, int64_t begin, int64_t end) {
        constexpr int kRowSize = round_up(kMaxHeadDim, kLanes<Acc>);
        alignas(64) Acc dout[kRowSize], out[kRowSize];
        const int d_v = params.d_v, columns = round_up(d_v, kLanes<Acc>);
        const int64_t ratio = params.h_h_k_ratio;
        const Group<Element> group{params, bidb, bidh / ratio};
        Acc *const sums = sums_of_head(params, bidb, bidh);
        for (int64_t query = begin; query < end; ++query) {
            const int64_t row = query * ratio + bidh % ratio;
            if (group.keys_seen(row).is_empty() || bias_hides_all_keys(params, group, row)) {
                sums[query] = 0;
                if (params.dq.ptr != nullptr)
                    std::memset(group.row_ptr(params.dq, row), 0, sizeof(Element) * size_t(params.d));
                continue;
            }
            load_row(group.row_ptr(params.dout, row), dout, d_v, columns);
            load_row(group.row_ptr(params.o, row), out, d_v, columns);
            Vec<Acc> products{};
            for (int c = 0; c < columns; c += kLanes<Acc>)
                products = fma<Acc>(load<Acc>(dout + c), load<Acc>(out + c), products);
            Acc delta = 0;
            for (int j = 0; j < kLanes<Acc>; ++j) delta += products[j];
            if (params.dsoftmax_lse != nullptr)
                delta -= static_cast<const Acc *>(params.dsoftmax_lse)[group.lse_index(row)];
            sums[query] = delta;
        }
    }

    Acc *lse_ = nullptr, *delta_ = nullptr;  // [kPanel]
    Int *rising_lo_ = nullptr;               // [kPanel]: the smallest lo of the rows from i on
    Int *rising_hi_ = nullptr;               // [kPanel]: the largest hi of the rows up to i
    uint8_t *is_seen_ = nullptr;             // [block_keys]: 1 where a row sees the key; null without key_ranges
    Acc *own_dq_ = nullptr;                  // [kPanel][d_padded]: sums of dq, if this is the only block
    CommonKeys common_keys_;                 // of the panel
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
