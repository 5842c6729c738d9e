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
    static constexpr int kColumns = kPanel * kColumnsOfWord<Element>;  // of a square of words
    static constexpr int kRowTile = 4;                                 // rows of a register tile of either product
    static constexpr int kAhead = 32;  // rows from a prefetch to the use; K and V of a step are one stream
    // Sums in registers in the second product: half of the registers.
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
    static constexpr int kSums = 16;
#else
    static constexpr int kSums = 8;
#endif

    // Memory that the heads of a block use in turn.
    struct Shared {
        Acc *s = nullptr;                  // [kBlockN][kPanel] or [row][kBlockN]: scores, then probabilities
        Acc *o = nullptr;                  // [kMaxRows][d_padded]: rows of o, for their conversion
        Acc *panel = nullptr;              // [d][kPanel]
        const Element **stream = nullptr;  // [2 * kBlockN + kAhead + kPanel]: rows of K, then of V

        Shared(Scratch &memory, int d) {
            memory.take(s, kBlockN * kPanel);
            memory.take(o, int64_t(kMaxRows) * round_up(d, kPanel));
            memory.take(panel, int64_t(d) * kPanel);
            memory.take(stream, 2 * kBlockN + kAhead + kPanel);
        }
    };

    // Probabilities of a step: p[row * row_stride + key * key_stride].
    struct Probabilities {
        const Acc *p;
        int row_stride, key_stride;
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
          stream_(shared.stream) {
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

    // The addresses of the rows of K, then of V. Prefetches may read a few addresses past the end.
    void load_kv(int n_begin, int n_end) {
        values_ = stream_ + (n_end - n_begin);
        set_addresses(params_.k, n_begin, n_end, stream_);
        set_addresses(params_.v, n_begin, n_end, values_);
        std::fill_n(values_ + (n_end - n_begin), kAhead + kPanel, values_[n_end - n_begin - 1]);
    }

    // The keys of a page are `row_stride` apart, and so are all keys without pages.
    void set_addresses(const TensorRef &t, int n_begin, int n_end, const Element **rows) const {
        for (int n = n_begin; n < n_end;) {
            const Element *row = this->key_ptr(t, n);
            const int64_t left = params_.block_table == nullptr
                                     ? n_end - n
                                     : params_.page_size - (this->group_.seq.k_begin + n) % params_.page_size;
            for (const int end = int(std::min<int64_t>(n + left, n_end)); n < end; ++n, row += t.row_stride)
                *rows++ = row;
        }
    }

    void prefetch(const Element *row) const {
        for (size_t i = 0; i < sizeof(Element) * size_t(d_); i += 64) {
            __builtin_prefetch(reinterpret_cast<const char *>(row) + i, 0, 3);
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
            mask_scores<Acc, kPanel, 1>(s_, n_first, keys, p.lo, p.hi, row_max);
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
                if (row == 0 && c * sizeof(Element) % 64 == 0) {
                    for (int n = 0; n < kPanel; ++n) __builtin_prefetch(ahead[n] + c, 0, 3);
                }
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
        constexpr int kMost = std::min(kSums / kRows, 8), kSome = std::max(kMost / 2, 1);  // vectors
        int c = 0;
        const auto add = [&](auto vecs, int width) {
            add_values<kRows, decltype(vecs)::value, kSkipZeros>(p, alpha, row, c, width, n_first, from, keys);
            c += decltype(vecs)::value * kPanel;
        };
        while (c + kMost * kPanel <= d_) add(std::integral_constant<int, kMost>(), kPanel);
        while (c + kSome * kPanel <= d_) add(std::integral_constant<int, kSome>(), kPanel);
        while (c < d_) add(std::integral_constant<int, 1>(), std::min(d_ - c, kPanel));
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
            if (prefetches) prefetch_after_value(n + kAhead, n_first, from, keys);
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
            prefetch(stream_[from + std::min(n - keys, keys - 1)] + next_head_ * params_.k.head_stride);
        } else if (n_first + n < this->n_max_) {
            prefetch(this->key_ptr(params_.k, n_first + n) + next_head_ * params_.k.head_stride);
        }
    }

    const int d_padded_;
    const int64_t next_head_;
    Acc *const s_, *const out_rows_, *const panel_;
    const Element **const stream_;      // rows of K of the current keys, then of V
    const Element **values_ = nullptr;  // those of V
    Acc *q_ = nullptr;                  // [kMaxRows][d]
    Acc *o_ = nullptr;                  // [kMaxRows][d_padded]
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
