// compute_dq_dk_dv_1colblock with multiply-add: every dtype on every CPU. 16-bit types are converted to float when
// loaded. Included by isa_baseline.cpp, isa_avx2.cpp and isa_avx512.cpp.
#pragma once

#include "col_block_backward.h"
#include "products_fma.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// The first-level cache holds the vector operand of a product, 24 KB at d = 128. Scores and dP of one step, 36 KB each
// with AVX-512, stream through it. Both sizes are multiples of kTile and kWideTile.
template <typename T>
constexpr int kFmaBackwardPanel = 2 * kFmaPanel<T>;
constexpr int kFmaBackwardStep = 96;

template <typename Element>
class FmaBackward : public ColBlockBackward<FmaBackward<Element>, Element,
                                            kFmaBackwardPanel<typename AccOf<Element>::type>, kFmaBackwardStep> {
    using Base = ColBlockBackward<FmaBackward<Element>, Element, kFmaBackwardPanel<typename AccOf<Element>::type>,
                                  kFmaBackwardStep>;
    friend Base;
    using Base::d_, Base::d_v_, Base::d_padded_, Base::d_v_padded_, Base::block_, Base::group_, Base::params_,
        Base::scratch_;
    using typename Base::Acc;
    using typename Base::Panel;
    using typename Base::Range;
    static constexpr int kPanel = kFmaBackwardPanel<Acc>, kSubpanel = kFmaPanel<Acc>, kStep = kFmaBackwardStep;
    static_assert(kPanel % kWideTile == 0 && kStep % kWideTile == 0 && kStep % kTile == 0);
    static constexpr int kColumns = kLanes<Acc>, kDqRows = kWideTile;
    static constexpr int kBlockNumbers =
        (192 << 10) / sizeof(Acc);  // of each of K, V, dK and dV in a key block, on average

public:
    FmaBackward(const Flash_bwd_params &params, const ColBlock &block, char *scratch) : Base(params, block, scratch) {
        scratch_.take(s_, kStep * kPanel);
        scratch_.take(dp_, kStep * kPanel);
        scratch_.take(derivative_, this->score_mod_.is_capped ? kTile * kPanel : 0);
        scratch_.take(q_, kPanel * d_padded_);
        scratch_.take(dout_, kPanel * d_v_padded_);
        scratch_.take(q_panel_, kPanel * d_padded_);
        scratch_.take(dout_panel_, kPanel * d_v_padded_);
        const int64_t keys = block.block_keys;
        scratch_.take(k_, keys * d_padded_);
        scratch_.take(v_, keys * d_v_padded_);
        scratch_.take(dk_, keys * d_padded_);
        scratch_.take(dv_, keys * d_v_padded_);
        if (scratch_.is_counting()) return;
        for (Acc *x : {s_, dp_}) std::fill_n(x, kStep * kPanel, Acc(0));
        std::fill_n(dk_, keys * d_padded_, Acc(0));
        std::fill_n(dv_, keys * d_v_padded_, Acc(0));
    }

private:
    void load_kv() {
        const int keys = this->n_end_ - block_.n_begin;
        for (int n = 0; n < keys; ++n) {
            const int key = block_.n_begin + n;
            Acc *const k = k_ + n * d_padded_, *const v = v_ + n * d_v_padded_;
            if (!this->is_seen(key)) {
                clear_keys(n, 1);
                continue;
            }
            this->load_row(group_.key_ptr(params_.k, key), k, d_, d_padded_);
            this->load_row(group_.key_ptr(params_.v, key), v, d_v_, d_v_padded_);
            if (this->is_hidden(key, k, v)) clear_keys(n, 1);
        }
        clear_keys(keys, round_up(keys, kTile) - keys);
    }
    // Zeros for `count` keys of the block from its key n on.
    void clear_keys(int n, int count) const {
        std::fill_n(k_ + n * d_padded_, count * d_padded_, Acc(0));
        std::fill_n(v_ + n * d_v_padded_, count * d_v_padded_, Acc(0));
    }

    void load_rows(const Panel &p) {
        load_rows(p, params_.q, d_, d_padded_, q_, q_panel_);
        load_rows(p, params_.dout, d_v_, d_v_padded_, dout_, dout_panel_);
    }
    void load_rows(const Panel &p, const TensorRef &t, int headdim, int headdim_padded, Acc *rows, Acc *panel) const {
        const Acc *row_ptrs[kPanel];
        for (int i = 0; i < p.rows; ++i) {
            Acc *row = rows + i * headdim_padded;
            row_ptrs[i] = row;
            if (this->has_keys(i))
                this->load_row(group_.row_ptr(t, p.row + i), row, headdim, headdim_padded);
            else
                std::fill_n(row, headdim_padded, Acc(0));
        }
        for (int i = 0; i < p.rows; i += kSubpanel)
            rows_to_panel<Acc, kSubpanel>(row_ptrs + i, std::min(kSubpanel, p.rows - i), headdim, panel + i * headdim);
    }

    void step(const Panel &p, int n_begin, int keys) {
        const bool masked = this->is_masked(n_begin, keys);
        if (this->dropout_.is_on) this->dropout_.draw(group_, p.row, p.rows, n_begin, keys);
        probabilities(p, n_begin, keys, masked);
        const int64_t n = n_begin - block_.n_begin;
        if (this->want_dv_) add_to_keys(p, n_begin, keys, masked, s_, dout_, d_v_padded_, dv_ + n * d_v_padded_);
        if (this->want_dk_) add_to_keys(p, n_begin, keys, masked, dp_, q_, d_padded_, dk_ + n * d_padded_);
        if (this->want_dq_) add_to_rows(p, n_begin, keys, masked, k_ + n * d_padded_, this->dq_accum(p));
    }

    // s_ = P, 0 where dropped, and dp_ = dS. Both are 0 where a row does not see a key, and in the keys that round the
    // step up to a multiple of kWideTile.
    void probabilities(const Panel &p, int n_begin, int keys, bool masked) {
        const int64_t from = n_begin - block_.n_begin;
        const Acc *const k = k_ + from * d_padded_, *const v = v_ + from * d_v_padded_;
        for (int lane = 0; lane < p.rows; lane += kSubpanel) {
            scores(p, lane, n_begin, keys, masked, k, d_, d_padded_, q_panel_ + lane * d_, s_);
            if (this->want_ds())
                scores(p, lane, n_begin, keys, masked, v, d_v_, d_v_padded_, dout_panel_ + lane * d_v_, dp_);
            for (int n = 0; n < keys; n += kTile) {
                const Range used = used_lanes(p, lane, n_begin + n, masked);
                const int tile_keys = std::min(kTile, keys - n), vecs = (used.end - used.begin) / kLanes<Acc>;
                Acc *s = s_ + n * kPanel, *dp = dp_ + n * kPanel;
                if (masked) clear_unused(s, dp, tile_keys, lane, used);
                if (used.is_empty()) continue;
                if (this->score_mod_.is_on() || this->dropout_.is_on)
                    softmax_with_features(s, dp, n_begin, n, tile_keys, used.begin, vecs, masked);
                else
                    softmax(s, dp, n_begin + n, tile_keys, used.begin, vecs, masked);
            }
        }
        for (int n = keys; n % kWideTile != 0; ++n) {
            std::fill_n(s_ + n * kPanel, kPanel, Acc(0));
            std::fill_n(dp_ + n * kPanel, kPanel, Acc(0));
        }
    }

    // Lanes of the subpanel at `lane`, in whole vectors, that see any of the kTile keys from n on.
    Range used_lanes(const Panel &p, int lane, int n, bool masked) const {
        const int end = std::min(lane + kSubpanel, round_up(p.rows, kLanes<Acc>));
        if (!masked) return {lane, end};
        const Range rows = this->rows_seeing(p, n, n + kTile);
        const int begin = rows.begin / kLanes<Acc> * kLanes<Acc>;
        return {std::max(lane, begin), std::min(end, round_up(rows.end, kLanes<Acc>))};
    }

    void clear_unused(Acc *s, Acc *dp, int keys, int lane, Range used) const {
        if (used.is_empty()) used = {lane, lane};
        for (int n = 0; n < keys; ++n) {
            for (Acc *x : {s + n * kPanel, dp + n * kPanel}) {
                std::fill(x + lane, x + used.begin, Acc(0));
                std::fill(x + used.end, x + lane + kSubpanel, Acc(0));
            }
        }
    }

    // out[key][row] = keys . panel. The rows of the keys are key_stride apart.
    void scores(const Panel &p, int lane, int n_begin, int keys, bool masked, const Acc *key_rows, int headdim,
                int key_stride, const Acc *panel, Acc *out) const {
        for (int n = 0; n < keys; n += kTile) {
            const Range used = used_lanes(p, lane, n_begin + n, masked);
            if (used.is_empty()) continue;
            const int vecs = (used.end - used.begin) / kLanes<Acc>;
            const BroadcastOperand<Acc> a{key_rows + int64_t(n) * key_stride, key_stride, 1};
            const VectorRows<const Acc> x{panel + used.begin - lane, kSubpanel};
            const VectorRows<Acc> sums{out + n * kPanel + used.begin, kPanel};
            product_columns<Acc, kTile, kVecs, false>(vecs, a, x, std::min(headdim, kDotSteps), sums);
            for (int c = kDotSteps; c < headdim; c += kDotSteps)
                product_columns<Acc, kTile, kVecs, true>(vecs, {a.ptr + c, a.row_stride, a.step_stride},
                                                         {x.ptr + c * x.stride, x.stride},
                                                         std::min(headdim - c, kDotSteps), sums);
        }
    }

    void softmax(Acc *s, Acc *dp, int n_begin, int keys, int lane, int vecs, bool masked) const {
        const auto run = [&](auto function) {
            function(s, dp, derivative_, n_begin, keys, this->score_mod_.scale_left(), this->row_state(), lane, vecs);
        };
        switch (this->mask(masked || (this->score_mod_.is_capped && this->want_ds()))) {
            case Mask::none:
                return run(softmax_function<Mask::none>());
            case Mask::outside:
                return run(softmax_function<Mask::outside>());
            case Mask::outside_and_gap:
                return run(softmax_function<Mask::outside_and_gap>());
        }
    }

    template <Mask kMask>
    auto softmax_function() const {
        if (!this->want_ds()) return softmax_backward<Acc, kPanel, kMask, DsOutput::none>;
        return this->score_mod_.is_capped ? softmax_backward<Acc, kPanel, kMask, DsOutput::capped>
                                          : softmax_backward<Acc, kPanel, kMask, DsOutput::plain>;
    }

    // The softmax with score modifiers or dropout. The first key is key n of the step.
    void softmax_with_features(Acc *s, Acc *dp, int n_begin, int n, int keys, int lane, int vecs, bool masked) const {
        const auto drop_some = [&](Acc *x, double factor) {
            drop<Acc, kPanel, kPanel>(x + lane, Acc(factor), this->dropout_.keep(n) + lane, keys, vecs);
        };
        this->score_mod_.template apply<kPanel>(s, derivative_, n_begin + n, keys, 0, lane, vecs);
        this->score_mod_.template clear_hidden_keys<kPanel>(s, dp, derivative_, keys, lane, vecs);
        if (this->dropout_.is_on && this->want_ds()) drop_some(dp, this->dropout_.scale);
        softmax(s, dp, n_begin + n, keys, lane, vecs, masked);
        if (this->dropout_.is_on) drop_some(s, 1);
    }

    // Calls function(first column, vectors) for shares of the columns: at most kWideVecs vectors, of equal size but for
    // the last.
    template <typename Function>
    static void for_column_shares(int columns, Function &&function) {
        const int vecs = columns / kLanes<Acc>, shares = (vecs + kWideVecs - 1) / kWideVecs;
        const int share = (vecs + shares - 1) / shares;
        for (int j = 0; j < vecs; j += share) function(j * kLanes<Acc>, std::min(share, vecs - j));
    }

    // out[key] += sum over rows of weights[key][row] * x[row]: dV = P^T dO, dK = dS^T Q. x and out have `columns`
    // columns, d_padded or d_v_padded.
    void add_to_keys(const Panel &p, int n_begin, int keys, bool masked, const Acc *weights, const Acc *x, int columns,
                     Acc *out) const {
        for_column_shares(columns, [&](int c, int vecs) {
            for (int n = 0; n < keys; n += kWideTile) {
                const Range rows =
                    masked ? this->rows_seeing(p, n_begin + n, n_begin + n + kWideTile) : Range{0, p.rows};
                if (rows.is_empty()) continue;
                product_columns<Acc, kWideTile, kWideVecs, true>(
                    vecs, {weights + n * kPanel + rows.begin, kPanel, 1}, {x + rows.begin * columns + c, columns},
                    rows.end - rows.begin, {out + int64_t(n) * columns + c, columns});
            }
        });
    }

    // out[row] += sum over keys of dS[key][row] * K[key]: dQ = dS K.
    void add_to_rows(const Panel &p, int n_begin, int keys, bool masked, const Acc *key_rows, Acc *out) const {
        for_column_shares(d_padded_, [&](int c, int vecs) {
            for (int i = 0; i < p.rows; i += kWideTile) {
                const Range seen = masked ? this->keys_seen(i, i + kWideTile, n_begin, keys) : Range{0, keys};
                if (seen.is_empty()) continue;
                product_columns<Acc, kWideTile, kWideVecs, true>(
                    vecs, {dp_ + seen.begin * kPanel + i, 1, kPanel},
                    {key_rows + int64_t(seen.begin) * d_padded_ + c, d_padded_}, seen.end - seen.begin,
                    {out + i * d_padded_ + c, d_padded_});
            }
        });
    }

    void store_dq(const Panel &p) const {
        const Acc *rows = this->dq_accum(p);
        for (int i = 0; i < p.rows; ++i) {
            if (this->has_keys(i))
                this->store_row(rows + i * d_padded_, this->scale_, group_.row_ptr(params_.dq, p.row + i), d_);
        }
    }

    void store_dk_dv() const {
        for (int n = block_.n_begin; n < this->n_end_; ++n) {
            const int64_t from = n - block_.n_begin;
            if (this->want_dk_)
                this->store_row(dk_ + from * d_padded_, this->scale_, group_.key_ptr(params_.dk, n), d_);
            if (this->want_dv_)
                this->store_row(dv_ + from * d_v_padded_, Acc(this->dropout_.scale), group_.key_ptr(params_.dv, n),
                                d_v_);
        }
    }

    Acc *s_ = nullptr, *dp_ = nullptr;                // [kStep][kPanel]: scores, then P; dP, then dS
    Acc *derivative_ = nullptr;                       // [kTile][kPanel]: of the score modifier
    Acc *q_ = nullptr, *dout_ = nullptr;              // [kPanel][d_padded], [kPanel][d_v_padded]
    Acc *q_panel_ = nullptr, *dout_panel_ = nullptr;  // [kPanel / kSubpanel][d or d_v][kSubpanel]
    Acc *k_ = nullptr, *v_ = nullptr;                 // [block_keys][d_padded], [block_keys][d_v_padded]
    Acc *dk_ = nullptr, *dv_ = nullptr;               // like k_ and v_, before they are scaled
};

BackwardKernel backward_kernel(DType dtype) {
    switch (dtype) {
        case DType::float16:
            return FmaBackward<Half>::kernel();
        case DType::bfloat16:
            return FmaBackward<BFloat16>::kernel();
        case DType::float32:
            return FmaBackward<float>::kernel();
        default:
            return FmaBackward<double>::kernel();
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
