// compute_attn_1rowblock for blocks of few rows, as in decoding: each step streams K and V once. The results have the
// bits of flash_fwd_kernel_fma.h.
//
// There the rows are in the lanes of the vectors, so one row uses one lane. Here the keys are in the lanes for the
// first product, and the head dims for the second. Every sum has the same terms in the same order.
#pragma once

#include "products_fma.h"
#include "row_block_decode.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

template <typename Element>
class FmaDecode : public RowBlockDecode<FmaDecode<Element>, Element, kFmaBlockN> {
    using Base = RowBlockDecode<FmaDecode<Element>, Element, kFmaBlockN>;
    friend Base;
    friend typename Base::RowBlockBase;
    using Base::d_, Base::d_v_, Base::d_v_padded_, Base::params_, Base::kAhead, Base::kConvert, Base::kPanel;
    using Base::o_, Base::stream_, Base::values_;
    using typename Base::Acc;
    using typename Base::Panel;
    using AccVec = Vec<Acc>;
    static constexpr int kBlockN = kFmaBlockN;
    static constexpr int kKeyStep = 1;
    static constexpr int kColumns = kPanel * kColumnsOfWord<Element>;  // of a square of words
    static constexpr int kRowTile = 4;                                 // rows of a register tile of either product
    // Sums in registers in the second product: half of the registers.
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
    static constexpr int kSums = 16;
#else
    static constexpr int kSums = 8;
#endif

    struct Shared : Base::Shared {
        Acc *s = nullptr;  // [kBlockN][kPanel] or [row][kBlockN]: scores, then probabilities

        Shared(Scratch &memory, const Flash_fwd_params &params) : Base::Shared(memory, params) {
            memory.take(s, kBlockN * kPanel);
        }
    };

public:
    using Base::kMaxRows;  // with more rows, full lanes make flash_fwd_kernel_fma.h as fast

private:
    // Probabilities of a step: p[row * row_stride + key * key_stride].
    struct Probabilities {
        const Acc *p;
        int row_stride, key_stride;
    };

    FmaDecode(const Flash_fwd_params &params, const RowBlock &block, char *scratch, const Shared &shared,
              int64_t next_head)
        : Base(params, block, scratch, shared, next_head, round_up(params.d_v, kPanel)), s_(shared.s) {
        this->scratch_.take(q_, int64_t(kMaxRows) * d_);
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

    void step_vecs(const Panel &p, int, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first, from = n_first - n_begin;
        const bool has_keys_in_lanes = !masked && !this->score_mod_.is_on() && p.rows <= kRowTile;
        for (int done = 0; done < keys; done += kPanel) {
            scores(p.rows, stream_ + from + done, std::min(kPanel, keys - done), done, has_keys_in_lanes);
        }
        Acc factor[kPanel];
        has_keys_in_lanes ? softmax_of_keys_in_lanes(p, keys, factor)
                          : softmax_of_rows(p, n_first, keys, masked, factor);
        const Probabilities probabilities =
            has_keys_in_lanes ? Probabilities{s_, kBlockN, 1} : Probabilities{s_, 1, kPanel};
        for (int row = 0; row < p.rows;) {
            const int rows = masked ? 1 : tile_rows(p.rows - row);
            output(rows, probabilities, factor, row, n_first, from, keys, masked);
            row += rows;
        }
    }

    // Scores [key][row] become probabilities. factor: what rescales the sums of each row so far.
    void softmax_of_rows(const Panel &p, int n_first, int keys, bool masked, Acc *factor) {
        AccVec row_max[1], safe_m[1], alpha[1], sum[1];
        this->make_logits(p, s_, 1, n_first, keys);
        if (masked)
            mask_scores<Acc, kPanel, 1>(s_, n_first, keys, p.keys, row_max);
        else
            find_max<Acc, kPanel, 1>(s_, keys, row_max);
        update_max<Acc, 1>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        exponentiate<Acc, kPanel, 1>(s_, keys, this->scale_log2_, safe_m, sum);
        update_sum<Acc, 1>(sum, alpha, p.state);
        std::memcpy(factor, alpha, sizeof(alpha));
    }

    // The same for scores [row][kBlockN] of few rows, which would leave most lanes empty above.
    FLASH_NOINLINE void softmax_of_keys_in_lanes(const Panel &p, int keys, Acc *factor) {
        const AccVec minus_inf = broadcast<Acc>(-std::numeric_limits<Acc>::infinity());
        AccVec row_max[1] = {minus_inf}, safe_m[1], alpha[1], sum[1] = {};
        for (int row = 0; row < p.rows; ++row) {
            AccVec largest = minus_inf;
            for (int n = 0; n < keys; n += kPanel) largest = max<Acc>(load<Acc>(s_ + row * kBlockN + n), largest);
            Acc x = largest[0];
            for (int lane = 1; lane < kPanel; ++lane) x = std::max(x, Acc(largest[lane]));
            row_max[0][row] = x;
        }
        update_max<Acc, 1>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        const AccVec scale = broadcast<Acc>(this->scale_log2_);
        for (int row = 0; row < p.rows; ++row) {
            Acc *const s = s_ + row * kBlockN;
            const AccVec m = broadcast<Acc>(safe_m[0][row]);
            for (int n = 0; n < keys; n += kPanel) store<Acc>(s + n, exp2_nonpositive((load<Acc>(s + n) - m) * scale));
            Acc total = 0;
            for (int n = 0; n < keys; ++n) total += s[n];  // in the order of exponentiate()
            sum[0][row] = total;
        }
        update_sum<Acc, 1>(sum, alpha, p.state);
        std::memcpy(factor, alpha, sizeof(alpha));
    }

    static constexpr int tile_rows(int rows) { return rows >= kRowTile ? kRowTile : rows >= 2 ? 2 : 1; }

    // Scores of at most kPanel keys, those of the step from `done` on; `k` points to the first one in stream_.
    void scores(int rows, const Element *const *k, int keys, int done, bool has_keys_in_lanes) {
        const Element *const *const ahead = k + kAhead, *k_of_lane[kPanel];
        for (int n = 0; n < kPanel; ++n) k_of_lane[n] = k[std::min(n, keys - 1)];
        AccVec by_row[kPanel] = {};  // [row]: the keys in the lanes
        for (int row = 0; row < rows;) {
            const int tile = tile_rows(rows - row);
            if (tile == kRowTile)
                scores_of_rows<kRowTile>(k_of_lane, ahead, row, by_row);
            else if (tile == 2)
                scores_of_rows<2>(k_of_lane, ahead, row, by_row);
            else
                scores_of_rows<1>(k_of_lane, ahead, row, by_row);
            row += tile;
        }
        if (has_keys_in_lanes) {
            for (int row = 0; row < rows; ++row) store<Acc>(s_ + row * kBlockN + done, by_row[row]);
        } else {
            transpose_square<Acc>(by_row);
            for (int n = 0; n < keys; ++n) store<Acc>(s_ + (done + n) * kPanel, by_row[n]);
        }
    }

    // Scores of the rows [row, row + kRows) with kPanel keys. A score has the partial sums of scores_tile().
    template <int kRows>
    FLASH_NOINLINE void scores_of_rows(const Element *const *k, const Element *const *ahead, int row,
                                       AccVec *by_row) const {
        static_assert(kDotSteps % kColumns == 0, "partial sums end where words do");
        const Acc *const q = q_ + row * d_;
        AccVec total[kRows] = {}, acc[kRows], words[kPanel];
        for (int begin = 0; begin < d_; begin += kDotSteps) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[r] = AccVec{};
            const int end = std::min(begin + kDotSteps, d_), end_of_whole = end - (end - begin) % kColumns;
            for (int c = begin; c < end_of_whole; c += kColumns) {
                if (row == 0 && c * sizeof(Element) % 64 == 0) this->prefetch_lines(ahead, c);
                load_words(k, c, words);
#pragma GCC unroll 16
                for (int i = 0; i < kPanel; ++i) add_word<kRows>(q + c + i * kColumnsOfWord<Element>, words[i], acc);
            }
            if (end_of_whole < end) add_last_columns<kRows>(k, q, end_of_whole, end - end_of_whole, acc);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) total[r] = begin == 0 ? acc[r] : acc[r] + total[r];
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) by_row[row + r] = total[r];
    }

    // The same for fewer columns than load_words() loads.
    template <int kRows>
    FLASH_NOINLINE void add_last_columns(const Element *const *k, const Acc *q, int c, int columns, AccVec *acc) const {
        Element copies[kPanel][kColumns] = {};
        const Element *rows[kPanel];
        AccVec words[kPanel];
        for (int n = 0; n < kPanel; ++n) {
            std::memcpy(copies[n], k[n] + c, sizeof(Element) * size_t(columns));
            rows[n] = copies[n];
        }
        load_words(rows, 0, words);
        for (int i = 0; i < columns; ++i) {
            const AccVec word = words[i / kColumnsOfWord<Element>];
            const bool is_first = i % kColumnsOfWord<Element> == 0;
            add_column<kRows>(q + c + i, is_first ? column_of<Element, 0>(word) : column_of<Element, 1>(word), acc);
        }
    }

    template <int kRows>
    FLASH_INLINE void add_word(const Acc *q, AccVec word, AccVec *acc) const {
        add_column<kRows>(q, column_of<Element, 0>(word), acc);
        if constexpr (kColumnsOfWord<Element> == 2) add_column<kRows>(q + 1, column_of<Element, 1>(word), acc);
    }

    template <int kRows>
    FLASH_INLINE void add_column(const Acc *q, AccVec x, AccVec *acc) const {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r] = fma<Acc>(broadcast<Acc>(q[r * d_]), x, acc[r]);
    }

    // o = alpha * o + sum over keys of p * v, for the rows [row, row + rows).
    void output(int rows, const Probabilities &p, const Acc *alpha, int row, int n_first, int from, int keys,
                bool masked) const {
        if (masked)
            output_of_rows<1, true>(p, alpha, row, n_first, from, keys);
        else if (rows == kRowTile)
            output_of_rows<kRowTile, false>(p, alpha, row, n_first, from, keys);
        else if (rows == 2)
            output_of_rows<2, false>(p, alpha, row, n_first, from, keys);
        else
            output_of_rows<1, false>(p, alpha, row, n_first, from, keys);
    }

    template <int kRows, bool kSkipZeros>
    void output_of_rows(const Probabilities &p, const Acc *alpha, int row, int n_first, int from, int keys) const {
        constexpr int kMaxVectors = std::min(kSums / kRows, 8), kHalfVectors = std::max(kMaxVectors / 2, 1);  // vectors
        int c = 0;
        const auto add = [&](auto vecs, int width) {
            add_values<kRows, decltype(vecs)::value, kSkipZeros>(p, alpha, row, c, width, n_first, from, keys);
            c += decltype(vecs)::value * kPanel;
        };
        while (c + kMaxVectors * kPanel <= d_v_) add(std::integral_constant<int, kMaxVectors>(), kPanel);
        while (c + kHalfVectors * kPanel <= d_v_) add(std::integral_constant<int, kHalfVectors>(), kPanel);
        while (c < d_v_) add(std::integral_constant<int, 1>(), std::min(d_v_ - c, kPanel));
    }

    // The same for kVecs vectors of columns from c on; the last one has `width` columns. kSkipZeros: keys that the row
    // does not see add nothing, even if their v is infinite or NaN.
    template <int kRows, int kVecs, bool kSkipZeros>
    FLASH_NOINLINE void add_values(const Probabilities &probabilities, const Acc *alpha, int row, int c, int width,
                                   int n_first, int from, int keys) const {
        const bool prefetches = row == 0 && c == 0;
        const Acc *p = probabilities.p + row * probabilities.row_stride;
        AccVec acc[kRows][kVecs];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) acc[r][j] = AccVec{};
        }
        for (int n = 0; n < keys; ++n, p += probabilities.key_stride) {
            if (prefetches) this->prefetch_after_value(n + kAhead, n_first, from, keys);
            if (kSkipZeros && p[0] == 0) continue;
            const Element *const v = values_[from + n] + c;
            AccVec x[kVecs];
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) {
                x[j] = kVecs == 1 && width < kPanel ? load_some_elements(v, width) : load_elements(v + j * kPanel);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const AccVec p_r = broadcast<Acc>(p[r * probabilities.row_stride]);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) acc[r][j] = fma<Acc>(x[j], p_r, acc[r][j]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) {
                Acc *const o = o_ + (row + r) * d_v_padded_ + c + j * kPanel;
                store<Acc>(o, fma<Acc>(broadcast<Acc>(alpha[row + r]), load<Acc>(o), acc[r][j]));
            }
        }
    }

    Acc *const s_;
    Acc *q_ = nullptr;  // [kMaxRows][d]
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
