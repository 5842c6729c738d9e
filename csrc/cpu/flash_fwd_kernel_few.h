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
    : public RowBlockForward<FewRowsForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN> {
    using Base =
        RowBlockForward<FewRowsForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN>;
    friend Base;
    using Base::d_, Base::params_, Base::kConvert;
    using typename Base::Acc;
    using typename Base::Panel;
    static constexpr int kPanel = kFmaPanel<Acc>;
    static constexpr int kBlockN = kFmaBlockN;
    static constexpr int kKeyStep = 1;
    static constexpr int kKeyTile = kPanel;  // keys that the first product handles together
    static constexpr int kSumTile = 8;       // keys that the second product handles together
    static constexpr int kAhead = 24;        // rows from a prefetch to the use; K and V of a step are one stream

    // Memory that the heads of a block use in turn.
    struct Shared {
        Acc *s = nullptr;            // [kBlockN][kPanel]: scores, then probabilities
        Acc *tile_scores = nullptr;  // [kTile][kKeyTile]
        Acc *keys = nullptr;         // [d][kKeyTile]: keys of a tile
        Acc *rows = nullptr;    // [kKeyTile][d_padded]: rows of k, v or o in the type of the arithmetic; 0 behind d
        Acc *zeros = nullptr;   // [d_padded]
        Acc *step_o = nullptr;  // [kMaxRows][d_padded]: sums of one step
        Acc *panel = nullptr;   // [d][kPanel]

        Shared(Scratch &memory, int d) {
            const int d_padded = round_up(d, kLanes<Acc>);
            memory.take(s, kBlockN * kPanel);
            memory.take(tile_scores, kTile * kKeyTile);
            memory.take(keys, int64_t(kKeyTile) * d);
            memory.take(rows, int64_t(kKeyTile) * d_padded);
            memory.take(zeros, d_padded);
            memory.take(step_o, int64_t(kMaxRows) * d_padded);
            memory.take(panel, int64_t(d) * kPanel);
            if (memory.is_counting()) return;
            std::fill_n(s, kBlockN * kPanel, Acc(0));  // unused lanes stay finite
            std::fill_n(rows, int64_t(kKeyTile) * d_padded, Acc(0));
            std::fill_n(zeros, d_padded, Acc(0));
        }
    };

public:
    static constexpr int kMaxRows = kLanes<Acc>;  // with more rows, full lanes make flash_fwd_kernel_fma.h as fast

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
          d_padded_(round_up(params.d, kLanes<Acc>)),
          next_head_(next_head),
          s_(shared.s),
          tile_scores_(shared.tile_scores),
          keys_(shared.keys),
          rows_(shared.rows),
          zeros_(shared.zeros),
          step_o_(shared.step_o),
          panel_(shared.panel) {
        this->scratch_.take(q_, int64_t(kMaxRows) * d_);
        this->scratch_.take(o_, int64_t(kMaxRows) * d_padded_);
        if (!this->scratch_.is_counting()) std::fill_n(o_, int64_t(kMaxRows) * d_padded_, Acc(0));
    }

    Acc *out_rows() const { return rows_; }

    // o as the epilogue reads it: [d][kPanel].
    Acc *out(const Panel &p) const {
        const Acc *rows[kMaxRows];
        for (int i = 0; i < p.rows; ++i) rows[i] = o_ + i * d_padded_;
        rows_to_panel<Acc, kPanel>(rows, p.rows, d_, panel_);
        return panel_;
    }

    void load_q(const Panel &p) {
        for (int i = 0; i < p.rows; ++i) copy_row(this->row_ptr(params_.q, p.row + i), q_ + i * d_);
    }

    void load_kv(int, int) {}

    void copy_row(const Element *src, Acc *dst) const {
        if constexpr (kConvert)
            convert_row(src, dst, d_);
        else
            std::memcpy(dst, src, sizeof(Acc) * size_t(d_));
    }

    // A row of k or v in the type of the arithmetic: in place, or a copy in `copy`.
    const Acc *key_row(const TensorRef &t, int key, Acc *copy, bool in_place) const {
        if constexpr (!kConvert) {
            if (in_place) return this->key_ptr(t, key);
        }
        copy_row(this->key_ptr(t, key), copy);
        return copy;
    }

    // head: counted from this one.
    void prefetch(const TensorRef &t, int key, int64_t head = 0) const {
        const auto *row = reinterpret_cast<const char *>(this->key_ptr(t, key) + head * t.head_stride);
        for (size_t i = 0; i < sizeof(Element) * size_t(d_); i += 64) __builtin_prefetch(row + i, 0, 2);
    }

    void step_vecs(const Panel &p, int, int, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first;
        Vec<Acc> row_max[1], safe_m[1], alpha[1], sum[1];
        for (int done = 0; done < keys; done += kKeyTile) {
            for (int n = done + kAhead; n < std::min(done + kAhead + kKeyTile, 2 * keys); ++n) {
                n < keys ? prefetch(params_.k, n_first + n) : prefetch(params_.v, n_first + n - keys);
            }
            scores(p, n_first + done, std::min(kKeyTile, keys - done), s_ + done * kPanel);
        }
        this->make_logits(p, s_, 1, n_first, keys);
        if (masked)
            mask_scores<Acc, kPanel, 1>(s_, n_first, keys, p.lo, p.hi, row_max);
        else
            find_max<Acc, kPanel, 1>(s_, keys, row_max);
        update_max<Acc, 1>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        exponentiate<Acc, kPanel, 1>(s_, keys, this->scale_log2_, safe_m, sum);
        update_sum<Acc, 1>(sum, alpha, p.state);
        Acc factor[kLanes<Acc>];
        std::memcpy(factor, alpha, sizeof(factor));
        output(p, factor, n_first, keys, masked);
    }

    // s[key][row] = k . q for at most kKeyTile keys.
    void scores(const Panel &p, int n_first, int keys, Acc *s) {
        const Acc *rows[kKeyTile];
        for (int n = 0; n < keys; ++n) {
            rows[n] = key_row(params_.k, n_first + n, rows_ + n * d_padded_, true);
        }
        rows_to_panel<Acc, kPanel>(rows, keys, d_, keys_);
        for (int i = 0; i < p.rows; i += kTile) {
            const int tile_rows = std::min(kTile, p.rows - i), vecs = (keys + kLanes<Acc> - 1) / kLanes<Acc>;
            vecs == 1 ? tile_of<1>(i, tile_rows) : vecs == 2 ? tile_of<2>(i, tile_rows) : tile_of<3>(i, tile_rows);
            for (int n = 0; n < keys; ++n) {
                for (int r = 0; r < tile_rows; ++r) s[n * kPanel + i + r] = tile_scores_[r * kKeyTile + n];
            }
        }
    }

    // Rows [row, row + rows) of q times the first kUsedVecs vectors of keys.
    template <int kUsedVecs>
    void tile_of(int row, int rows) {
        Vec<Acc> unused[kUsedVecs] = {};
        const Acc *const q = q_ + row * d_;
        if (rows == 1)
            scores_tile<Acc, kUsedVecs, 1>(q, d_, 1, keys_, d_, tile_scores_, unused);
        else if (rows == 2)
            scores_tile<Acc, kUsedVecs, 2>(q, d_, 2, keys_, d_, tile_scores_, unused);
        else
            scores_tile<Acc, kUsedVecs, kTile>(q, d_, rows, keys_, d_, tile_scores_, unused);
    }

    // o = alpha * o + sum over keys of p * v, for every row.
    void output(const Panel &p, const Acc *alpha, int n_first, int keys, bool masked) {
        std::fill_n(step_o_, int64_t(p.rows) * d_padded_, Acc(0));
        for (int done = 0; done < keys; done += kSumTile) {
            const Acc *v[kSumTile];
            for (int n = 0; n < kSumTile; ++n) {
                v[n] = done + n < keys ? key_row(params_.v, n_first + done + n, rows_ + n * d_padded_, d_ == d_padded_)
                                       : zeros_;
            }
            for (int n = done + kAhead; n < done + kAhead + kSumTile; ++n) {
                if (n < keys)
                    prefetch(params_.v, n_first + n);
                else if (next_head_ > 0)
                    prefetch(params_.k, std::min(n_first + n - keys, this->n_max_ - 1), next_head_);
                else if (n_first + n < this->n_max_)
                    prefetch(params_.k, n_first + n, next_head_);
            }
            for (int i = 0; i < p.rows; ++i) add_values(v, done, std::min(kSumTile, keys - done), i, masked);
        }
        for (int i = 0; i < p.rows; ++i) {
            Acc *const o = o_ + i * d_padded_;
            for (int c = 0; c < d_padded_; c += kLanes<Acc>) {
                const Vec<Acc> sum = load<Acc>(step_o_ + i * d_padded_ + c);
                store<Acc>(o + c, fma<Acc>(broadcast<Acc>(alpha[i]), load<Acc>(o + c), sum));
            }
        }
    }

    // Adds kSumTile keys, from `done` on, to step_o of one row. Keys that the row does not see add nothing, even if
    // their v is infinite or NaN.
    FLASH_NOINLINE void add_values(const Acc *const *rows, int done, int keys, int row, bool masked) {
        const Acc *v[kSumTile];
        Acc p[kSumTile];
        for (int n = 0; n < kSumTile; ++n) {
            p[n] = n < keys ? s_[(done + n) * kPanel + row] : Acc(0);
            v[n] = masked && p[n] == 0 ? zeros_ : rows[n];
        }
        Acc *const o = step_o_ + row * d_padded_;
        for (int c = 0; c < d_padded_; c += kLanes<Acc>) {
            Vec<Acc> acc = load<Acc>(o + c);
#pragma GCC unroll 8
            for (int n = 0; n < kSumTile; ++n) acc = fma<Acc>(load_unaligned(v[n] + c), broadcast<Acc>(p[n]), acc);
            store<Acc>(o + c, acc);
        }
    }

    static Vec<Acc> load_unaligned(const Acc *x) {
        typedef Acc Unaligned __attribute__((vector_size(kVecBytes), may_alias, aligned(sizeof(Acc))));
        return *reinterpret_cast<const Unaligned *>(x);
    }

    const int d_padded_;
    const int64_t next_head_;
    Acc *const s_, *const tile_scores_, *const keys_, *const rows_, *const zeros_, *const step_o_, *const panel_;
    Acc *q_ = nullptr;  // [kMaxRows][d]
    Acc *o_ = nullptr;  // [kMaxRows][d_padded]
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
