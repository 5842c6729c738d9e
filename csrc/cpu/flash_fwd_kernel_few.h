// compute_attn_1rowblock for blocks of few rows, as in decoding: each step streams K and V once. The results have the
// bits of flash_fwd_kernel_fma.h.
//
// There the rows are in the lanes of the vectors, so one row uses one lane. Here the keys are in the lanes for the
// first product, and the head dims for the second. Every sum has the same terms in the same order.
#pragma once

#include "products_fma.h"
#include "row_block_forward.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

template <typename Element>
class FewRowsForward
    : public RowBlockForward<FewRowsForward<Element>, Element, kLanes<typename AccOf<Element>::type>, kFmaBlockN> {
    using Base = RowBlockForward<FewRowsForward<Element>, Element, kLanes<typename AccOf<Element>::type>, kFmaBlockN>;
    friend Base;
    using Base::d_, Base::params_, Base::kConvert;
    using typename Base::Acc;
    using typename Base::Panel;
    using AccVec = Vec<Acc>;
    static constexpr int kPanel = kLanes<Acc>;
    static constexpr int kBlockN = kFmaBlockN;
    static constexpr int kKeyStep = 1;
    static constexpr int kKeyTile = kPanel;  // keys that the first product handles together
    static constexpr int kRowTile = 4;       // rows of a register tile of either product
    static constexpr int kAhead = 32;        // rows from a prefetch to the use; K and V of a step are one stream
    // Sums in registers in the second product: half of the registers.
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
    static constexpr int kSums = 16;
#else
    static constexpr int kSums = 8;
#endif
    static_assert(kDotSteps % kPanel == 0, "partial sums of scores end with a square of keys");

    // Memory that the heads of a block use in turn.
    struct Shared {
        Acc *s = nullptr;                  // [kBlockN][kPanel]: scores, then probabilities
        Acc *o = nullptr;                  // [kMaxRows][d_padded]: o, or rows of o in the element type
        Acc *panel = nullptr;              // [d][kPanel]
        const Element **keys = nullptr;    // [kBlockN]: rows of K
        const Element **values = nullptr;  // [kBlockN]: rows of V

        Shared(Scratch &memory, int d) {
            memory.take(s, kBlockN * kPanel);
            memory.take(o, int64_t(kMaxRows) * round_up(d, kPanel));
            memory.take(panel, int64_t(d) * kPanel);
            memory.take(keys, kBlockN);
            memory.take(values, kBlockN);
            if (memory.is_counting()) return;
            std::fill_n(s, kBlockN * kPanel, Acc(0));  // unused lanes stay finite
        }
    };

public:
    static constexpr int kMaxRows = kPanel;  // with more rows, full lanes make flash_fwd_kernel_fma.h as fast

    // For all heads of the largest block.
    static size_t scratch_bytes(const Flash_fwd_params &params) {
        Scratch memory(nullptr);
        const Shared shared(memory, params.d);
        FewRowsForward *heads = nullptr;
        memory.take(heads, params.h_k);
        const FewRowsForward one(params, {0, 0, 0, kMaxRows}, nullptr, shared, 0);
        return memory.bytes() + one.scratch_.bytes() * size_t(params.h_k);
    }

    // The heads take turns key block by key block: their rows of one key are neighbours in a cache [batch, seqlen,
    // heads, headdim].
    static void run(const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        Scratch memory(static_cast<char *>(scratch));
        const Shared shared(memory, params.d);
        FewRowsForward *heads = nullptr;
        memory.take(heads, block.heads);
        char *own = static_cast<char *>(scratch) + memory.bytes();
        for (int64_t i = 0; i < block.heads; ++i) {
            const int64_t next = i + 1 < block.heads ? 1 : 1 - block.heads;
            new (heads + i) FewRowsForward(params, block_of_head(params, block, i), own, shared, next);
            own += heads[i].scratch_.bytes();
            heads[i].begin();
        }
        for (int n_begin = heads->n_min_; n_begin < heads->n_max_; n_begin += kBlockN) {
            for (int64_t i = 0; i < block.heads; ++i) heads[i].visit(n_begin);
        }
        for (int64_t i = 0; i < block.heads; ++i) heads[i].end();
        std::destroy_n(heads, block.heads);
    }

private:
    // next_head: distance to the head that computes after this one.
    FewRowsForward(const Flash_fwd_params &params, const RowBlock &block, char *scratch, const Shared &shared,
                   int64_t next_head)
        : Base(params, block, scratch),
          d_padded_(round_up(params.d, kPanel)),
          next_head_(next_head),
          s_(shared.s),
          out_rows_(shared.o),
          panel_(shared.panel),
          keys_(shared.keys),
          values_(shared.values) {
        this->scratch_.take(q_, int64_t(kMaxRows) * d_);
        this->scratch_.take(o_, int64_t(kMaxRows) * d_padded_);
        if (!this->scratch_.is_counting()) std::fill_n(o_, int64_t(kMaxRows) * d_padded_, Acc(0));
    }

    Acc *out_rows() const { return out_rows_; }

    // o as the epilogue reads it: [d][kPanel].
    Acc *out(const Panel &p) const {
        const Acc *rows[kMaxRows];
        for (int i = 0; i < p.rows; ++i) rows[i] = o_ + i * d_padded_;
        rows_to_panel<Acc, kPanel>(rows, p.rows, d_, panel_);
        return panel_;
    }

    void load_q(const Panel &p) {
        for (int i = 0; i < p.rows; ++i) {
            const Element *const row = this->row_ptr(params_.q, p.row + i);
            if constexpr (kConvert)
                convert_row(row, q_ + i * d_, d_);
            else
                std::memcpy(q_ + i * d_, row, sizeof(Acc) * size_t(d_));
        }
    }

    void load_kv(int n_begin, int n_end) {
        for (int n = n_begin; n < n_end; ++n) {
            keys_[n - n_begin] = this->key_ptr(params_.k, n);
            values_[n - n_begin] = this->key_ptr(params_.v, n);
        }
    }

    void prefetch(const Element *row) const {
        for (size_t i = 0; i < sizeof(Element) * size_t(d_); i += 64) {
            __builtin_prefetch(reinterpret_cast<const char *>(row) + i, 0, 3);
        }
    }

    void step_vecs(const Panel &p, int, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first, from = n_first - n_begin;
        AccVec row_max[1], safe_m[1], alpha[1], sum[1];
        for (int done = 0; done < keys; done += kKeyTile) {
            const Element *ahead[kKeyTile];
            for (int i = 0; i < kKeyTile; ++i) {
                const int n = std::min(done + kAhead + i, 2 * keys - 1);
                ahead[i] = n < keys ? keys_[from + n] : values_[from + n - keys];
            }
            scores(p.rows, keys_ + from + done, ahead, std::min(kKeyTile, keys - done), s_ + done * kPanel);
        }
        this->make_logits(p, s_, 1, n_first, keys);
        if (masked)
            mask_scores<Acc, kPanel, 1>(s_, n_first, keys, p.lo, p.hi, row_max);
        else
            find_max<Acc, kPanel, 1>(s_, keys, row_max);
        update_max<Acc, 1>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        exponentiate<Acc, kPanel, 1>(s_, keys, this->scale_log2_, safe_m, sum);
        update_sum<Acc, 1>(sum, alpha, p.state);
        Acc factor[kPanel];
        std::memcpy(factor, alpha, sizeof(factor));
        for (int row = 0; row < p.rows;) {
            const int rows = masked ? 1 : tile_rows(p.rows - row);
            output(rows, factor, row, n_first, from, keys, masked);
            row += rows;
        }
    }

    static constexpr int tile_rows(int rows) { return rows >= kRowTile ? kRowTile : rows >= 2 ? 2 : 1; }

    // s[key][row] = k . q for at most kKeyTile keys.
    void scores(int rows, const Element *const *k, const Element *const *ahead, int keys, Acc *s) const {
        const Element *k_of_lane[kKeyTile];
        for (int n = 0; n < kKeyTile; ++n) k_of_lane[n] = k[std::min(n, keys - 1)];
        AccVec by_row[kKeyTile] = {};  // [row]: the keys in the lanes
        for (int row = 0; row < rows;) {
            switch (tile_rows(rows - row)) {
                case kRowTile:
                    scores_of_rows<kRowTile>(k_of_lane, ahead, row, by_row + row), row += kRowTile;
                    break;
                case 2:
                    scores_of_rows<2>(k_of_lane, ahead, row, by_row + row), row += 2;
                    break;
                default:
                    scores_of_rows<1>(k_of_lane, ahead, row, by_row + row), row += 1;
            }
        }
        if (rows == 1) {
            for (int n = 0; n < keys; ++n) s[n * kPanel] = by_row[0][n];
        } else {
            transpose_square<Acc>(by_row);
            for (int n = 0; n < keys; ++n) store<Acc>(s + n * kPanel, by_row[n]);
        }
    }

    // Scores of the rows [row, row + kRows) with kKeyTile keys. A score has the partial sums of scores_tile().
    template <int kRows>
    FLASH_NOINLINE void scores_of_rows(const Element *const *k, const Element *const *ahead, int row,
                                       AccVec *by_row) const {
        const Acc *const q = q_ + row * d_;
        AccVec total[kRows] = {}, acc[kRows];
        for (int begin = 0; begin < d_; begin += kDotSteps) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[r] = AccVec{};
            const int end = std::min(begin + kDotSteps, d_);
            for (int c = begin; c < end; c += kPanel) {
                AccVec x[kPanel];
                if (row == 0 && c * sizeof(Element) % 64 == 0) {
                    for (int n = 0; n < kPanel; ++n) __builtin_prefetch(ahead[n] + c, 0, 3);
                }
                if (end - c >= kPanel) {
#pragma GCC unroll 16
                    for (int n = 0; n < kPanel; ++n) x[n] = load_elements(k[n] + c);
                    transpose_square<Acc>(x);
#pragma GCC unroll 16
                    for (int i = 0; i < kPanel; ++i) add_column<kRows>(q + c + i, x[i], acc);
                } else {
                    for (int n = 0; n < kPanel; ++n) x[n] = load_some_elements(k[n] + c, end - c);
                    transpose_square<Acc>(x);
                    for (int i = 0; i < end - c; ++i) add_column<kRows>(q + c + i, x[i], acc);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) total[r] = begin == 0 ? acc[r] : acc[r] + total[r];
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) by_row[r] = total[r];
    }

    template <int kRows>
    FLASH_INLINE void add_column(const Acc *q, AccVec x, AccVec *acc) const {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r] = fma<Acc>(broadcast<Acc>(q[r * d_]), x, acc[r]);
    }

    // o = alpha * o + sum over keys of p * v, for the rows [row, row + rows).
    void output(int rows, const Acc *alpha, int row, int n_first, int from, int keys, bool masked) const {
        if (masked)
            output_of_rows<1, true>(alpha, row, n_first, from, keys);
        else if (rows == kRowTile)
            output_of_rows<kRowTile, false>(alpha, row, n_first, from, keys);
        else if (rows == 2)
            output_of_rows<2, false>(alpha, row, n_first, from, keys);
        else
            output_of_rows<1, false>(alpha, row, n_first, from, keys);
    }

    template <int kRows, bool kSkipZeros>
    void output_of_rows(const Acc *alpha, int row, int n_first, int from, int keys) const {
        constexpr int kVecs = std::min(kSums / kRows, 8);
        const bool is_first = row == 0;
        int c = 0;
        for (; c + kVecs * kPanel <= d_; c += kVecs * kPanel) {
            add_values<kRows, kVecs, kSkipZeros>(alpha, row, c, kPanel, n_first, from, keys, is_first && c == 0);
        }
        for (; c < d_; c += kPanel) {
            add_values<kRows, 1, kSkipZeros>(alpha, row, c, std::min(d_ - c, kPanel), n_first, from, keys,
                                             is_first && c == 0);
        }
    }

    // The same for kVecs vectors of columns from c on; the last one has `width` columns. kSkipZeros: keys that the row
    // does not see add nothing, even if their v is infinite or NaN.
    template <int kRows, int kVecs, bool kSkipZeros>
    FLASH_NOINLINE void add_values(const Acc *alpha, int row, int c, int width, int n_first, int from, int keys,
                                   bool prefetches) const {
        AccVec acc[kRows][kVecs];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) acc[r][j] = AccVec{};
        }
        for (int n = 0; n < keys; ++n) {
            if (prefetches) prefetch_after_value(n + kAhead, n_first, from, keys);
            const Acc *const p = s_ + n * kPanel + row;
            if (kSkipZeros && p[0] == 0) continue;
            const Element *const v = values_[from + n] + c;
            AccVec x[kVecs];
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) {
                x[j] = kVecs == 1 && width < kPanel ? load_some_elements(v, width) : load_elements(v + j * kPanel);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const AccVec p_r = broadcast<Acc>(p[r]);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) acc[r][j] = fma<Acc>(x[j], p_r, acc[r][j]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) {
                Acc *const o = o_ + (row + r) * d_padded_ + c + j * kPanel;
                store<Acc>(o, fma<Acc>(broadcast<Acc>(alpha[row + r]), load<Acc>(o), acc[r][j]));
            }
        }
    }

    // Prefetches what is used after the n-th value of a step: values, then keys of the next head or key block.
    FLASH_INLINE void prefetch_after_value(int n, int n_first, int from, int keys) const {
        if (n < keys) {
            prefetch(values_[from + n]);
        } else if (next_head_ > 0) {
            const int key = std::min(n_first + n - keys, this->n_max_ - 1);
            prefetch(this->key_ptr(params_.k, key) + next_head_ * params_.k.head_stride);
        } else if (n_first + n < this->n_max_) {
            prefetch(this->key_ptr(params_.k, n_first + n) + next_head_ * params_.k.head_stride);
        }
    }

    const int d_padded_;
    const int64_t next_head_;
    Acc *const s_, *const out_rows_, *const panel_;
    const Element **const keys_, **const values_;  // rows of K and V of the current keys
    Acc *q_ = nullptr;                             // [kMaxRows][d]
    Acc *o_ = nullptr;                             // [kMaxRows][d_padded]
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
