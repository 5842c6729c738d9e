// compute_dbias_1tile with multiply-add: the gradient of attn_bias for one tile of queries and keys, the sum of dS over
// the pairs of a sequence and a head that share the tile. Every dtype on every CPU; 16-bit types are converted to float
// when loaded. Included by isa_baseline.cpp, isa_avx2.cpp and isa_avx512.cpp.
#pragma once

#include "flash_bwd_kernel_fma.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

template <typename Element>
class FmaBiasBackward {
    using Acc = typename AccOf<Element>::type;
    static constexpr int kPanel = kFmaBackwardPanel<Acc>, kSubpanel = kFmaPanel<Acc>, kStep = kFmaBackwardStep;

public:
    static BiasBackwardKernel kernel() {
        return {kPanel, kStep,
                [](const Flash_bias_bwd_params &p) { return FmaBiasBackward(p, BiasTile(), nullptr).scratch_.bytes(); },
                [](const Flash_bias_bwd_params &p, const BiasTile &tile, void *scratch) {
                    FmaBiasBackward(p, tile, static_cast<char *>(scratch)).compute();
                }};
    }

private:
    FmaBiasBackward(const Flash_bias_bwd_params &params, const BiasTile &tile, char *scratch)
        : params_(params),
          tile_(tile),
          d_(params.d),
          d_v_(params.d_v),
          d_padded_(round_up(params.d, kLanes<Acc>)),
          d_v_padded_(round_up(params.d_v, kLanes<Acc>)),
          keys_(std::min(kStep, params.seqlen_k - tile.n_begin)),
          score_mod_(params),
          dropout_(params),
          scratch_(scratch) {
        for (Acc **x : {&s_, &dp_, &sums_}) scratch_.take(*x, kStep * kPanel);
        scratch_.take(q_panel_, kPanel * d_padded_);
        scratch_.take(dout_panel_, kPanel * d_v_padded_);
        scratch_.take(rows_, kPanel * std::max(d_padded_, d_v_padded_));
        scratch_.take(k_, kStep * d_padded_);
        scratch_.take(v_, kStep * d_v_padded_);
        for (Acc **x : {&lse_, &delta_}) scratch_.take(*x, kPanel);
        keys_of_rows_.take(scratch_, params, kPanel);
        score_mod_.take(scratch_, kPanel);
        dropout_.take(scratch_, kStep);
    }

    void compute() {
        std::fill_n(sums_, kStep * kPanel, Acc(0));
        const int heads = params_.h / params_.bias_heads;  // that share the bias
        for (int64_t pair = tile_.pair_begin; pair < tile_.pair_end; ++pair)
            add_pair(int(tile_.bias_batch + pair / heads), int(tile_.bias_head + pair % heads));
        store_dbias();
    }

    // One head as a group of its own, so that consecutive rows are consecutive queries.
    Flash_fwd_params params_of_head(int64_t bidh) const {
        Flash_fwd_params params = params_;
        for (TensorRef *x : {&params.k, &params.v}) {
            x->ptr = static_cast<Element *>(x->ptr) + bidh / params_.h_h_k_ratio * x->head_stride;
            x->head_stride = 0;
        }
        params.h_k = params.h;
        params.h_h_k_ratio = 1;
        return params;
    }

    void add_pair(int bidb, int bidh) {
        const Flash_fwd_params params = params_of_head(bidh);
        const Group<Element> group{params, bidb, bidh};
        bool is_loaded = false;
        for (int row = tile_.row_begin; row < tile_.row_end; row += kPanel) {
            const int rows = std::min(kPanel, tile_.row_end - row);
            if (!set_rows(group, row, rows)) continue;
            if (!is_loaded) load_kv(group);
            is_loaded = true;
            load_rows(group, params.q, d_, row, rows, q_panel_);
            load_rows(group, params_.dout, d_v_, row, rows, dout_panel_);
            if (dropout_.is_on) dropout_.draw(group, row, rows, tile_.n_begin, keys_);
            for (int lane = 0; lane < rows; lane += kSubpanel)
                add_ds(lane, std::min(kVecs, (rows - lane + kLanes<Acc> - 1) / kLanes<Acc>));
        }
    }

    // Returns false if no row sees a key of the tile. Lanes past the last row, and rows without a key, get an lse that
    // makes their P 0.
    bool set_rows(const Group<Element> &group, int row, int rows) {
        const auto *lse = static_cast<const Acc *>(params_.softmax_lse);
        const auto *delta = static_cast<const Acc *>(params_.dsoftmax_sum) + group.bidb * params_.padded_batch_stride +
                            group.bidh_k * params_.padded_head_stride;
        PanelKeys panel;
        CommonKeys common;
        RowKeys keys{};
        for (int i = 0; i < kPanel; ++i) {
            const int64_t query = row + std::min(i, rows - 1);
            if (i < rows) {
                keys = group.keys_seen(query);
                panel.add(keys);
                common.add(keys);
            }
            keys_of_rows_.set(i, keys);
            score_mod_.set_row(group, query, i);
            const Acc row_lse = lse[group.lse_index(query)];
            const bool has_lse = i < rows && row_lse != -std::numeric_limits<Acc>::infinity();
            lse_[i] = has_lse ? row_lse : std::numeric_limits<Acc>::infinity();
            delta_[i] = has_lse ? delta[query] : Acc(0);
        }
        const int n_end = tile_.n_begin + keys_;
        mask_ = common.contain(tile_.n_begin, n_end) ? Mask::none
                : keys_of_rows_.has_gaps()           ? Mask::outside_and_gap
                                                     : Mask::outside;
        return panel.meets(tile_.n_begin, n_end);
    }

    void load_kv(const Group<Element> &group) {
        for (int n = 0; n < round_up(keys_, kTile); ++n) {
            if (n < keys_) {
                load_row(group.key_ptr(group.params.k, tile_.n_begin + n), d_, k_ + n * d_padded_);
                load_row(group.key_ptr(group.params.v, tile_.n_begin + n), d_v_, v_ + n * d_v_padded_);
            } else {
                std::fill_n(k_ + n * d_padded_, d_padded_, Acc(0));
                std::fill_n(v_ + n * d_v_padded_, d_v_padded_, Acc(0));
            }
        }
    }

    void load_rows(const Group<Element> &group, const TensorRef &t, int headdim, int row, int rows, Acc *panel) {
        const int stride = std::max(d_padded_, d_v_padded_);
        const Acc *row_ptrs[kPanel];
        for (int i = 0; i < rows; ++i) {
            load_row(group.row_ptr(t, row + i), headdim, rows_ + i * stride);
            row_ptrs[i] = rows_ + i * stride;
        }
        for (int i = 0; i < rows; i += kSubpanel)
            rows_to_panel<Acc, kSubpanel>(row_ptrs + i, std::min(kSubpanel, rows - i), headdim, panel + i * headdim);
    }

    static void load_row(const Element *from, int headdim, Acc *to) {
        if constexpr (std::is_same_v<Element, Acc>)
            std::memcpy(to, from, sizeof(Acc) * size_t(headdim));
        else
            convert_row(from, to, headdim);
    }

    // Adds dS = P * (dP - delta) of `vecs` vectors of rows from `lane` on to the sums.
    void add_ds(int lane, int vecs) {
        scores(k_, d_, d_padded_, q_panel_ + lane * d_, lane, vecs, s_);
        scores(v_, d_v_, d_v_padded_, dout_panel_ + lane * d_v_, lane, vecs, dp_);
        score_mod_.template apply<kPanel>(s_, nullptr, tile_.n_begin, keys_, 0, lane, vecs);
        score_mod_.template clear_hidden_keys<kPanel>(s_, dp_, nullptr, keys_, lane, vecs);
        if (dropout_.is_on)
            drop<Acc, kPanel, kPanel>(dp_ + lane, Acc(dropout_.scale), dropout_.keep(0) + lane, keys_, vecs);
        softmax_function()(s_, dp_, nullptr, tile_.n_begin, keys_, score_mod_.scale_left(),
                           {lse_, delta_, keys_of_rows_}, lane, vecs);
        for (int n = 0; n < keys_; ++n) {
            const Acc *ds = dp_ + n * kPanel + lane;
            if (params_.bias_rows == 1) {
                Acc *sum = sums_ + n * kPanel;
                Vec<Acc> total = load<Acc>(ds);
                for (int j = 1; j < vecs; ++j) total += load<Acc>(ds + j * kLanes<Acc>);
                store<Acc>(sum, load<Acc>(sum) + total);
            } else {
                for (int j = 0; j < vecs; ++j) {
                    Acc *sum = sums_ + n * kPanel + lane + j * kLanes<Acc>;
                    store<Acc>(sum, load<Acc>(sum) + load<Acc>(ds + j * kLanes<Acc>));
                }
            }
        }
    }

    // out[key][row] = keys . panel, with the partial sums of the forward. The rows of the keys are key_stride apart.
    void scores(const Acc *key_rows, int headdim, int key_stride, const Acc *panel, int lane, int vecs,
                Acc *out) const {
        for (int n = 0; n < keys_; n += kTile) {
            const BroadcastOperand<Acc> a{key_rows + n * key_stride, key_stride, 1};
            const VectorRows<Acc> sums{out + n * kPanel + lane, kPanel};
            product_columns<Acc, kTile, kVecs, false>(vecs, a, {panel, kSubpanel}, std::min(headdim, kDotSteps), sums);
            for (int c = kDotSteps; c < headdim; c += kDotSteps)
                product_columns<Acc, kTile, kVecs, true>(vecs, {a.ptr + c, a.row_stride, a.step_stride},
                                                         {panel + c * kSubpanel, kSubpanel},
                                                         std::min(headdim - c, kDotSteps), sums);
        }
    }

    auto softmax_function() const {
        switch (mask_) {
            case Mask::none:
                return softmax_backward<Acc, kPanel, Mask::none, DsOutput::plain>;
            case Mask::outside:
                return softmax_backward<Acc, kPanel, Mask::outside, DsOutput::plain>;
            default:
                return softmax_backward<Acc, kPanel, Mask::outside_and_gap, DsOutput::plain>;
        }
    }

    void store_dbias() {
        const int rows = params_.bias_rows == 1 ? 1 : tile_.row_end - tile_.row_begin;
        if (params_.bias_rows == 1) {
            for (int n = 0; n < keys_; ++n) {
                Acc sum = 0;
                for (int j = 0; j < kLanes<Acc>; ++j) sum += sums_[n * kPanel + j];
                sums_[n * kPanel] = sum;
            }
        }
        Acc factor[kPanel], *row_ptrs[kPanel];
        std::fill_n(factor, kPanel, Acc(1));
        for (int i = 0; i < rows; ++i) row_ptrs[i] = s_ + i * kStep;
        panel_to_rows<Acc, kPanel>(sums_, factor, rows, keys_, row_ptrs);
        for (int i = 0; i < rows; ++i) {
            const int64_t row = params_.bias_rows == 1 ? 0 : tile_.row_begin + i,
                          at = (((int64_t(tile_.part) * params_.bias_batch + tile_.bias_batch) * params_.bias_heads +
                                 tile_.bias_head) *
                                    params_.bias_rows +
                                row) *
                                   params_.seqlen_k +
                               tile_.n_begin;
            if (std::is_same_v<Element, Acc> || params_.is_float32)
                std::memcpy(static_cast<Acc *>(params_.dbias) + at, row_ptrs[i], sizeof(Acc) * size_t(keys_));
            else if constexpr (!std::is_same_v<Element, Acc>)
                convert_row(row_ptrs[i], static_cast<Element *>(params_.dbias) + at, keys_);
        }
    }

    const Flash_bias_bwd_params &params_;
    const BiasTile tile_;
    const int d_, d_v_, d_padded_, d_v_padded_;
    const int keys_;  // of the tile
    ScoreMod<Acc> score_mod_;
    Dropout<kPanel> dropout_;
    Mask mask_ = Mask::none;
    Scratch scratch_;
    KeysOfRows<Acc> keys_of_rows_;                    // [kPanel]
    Acc *s_ = nullptr, *dp_ = nullptr;                // [kStep][kPanel]: scores, then P; dP, then dS
    Acc *sums_ = nullptr;                             // [kStep][kPanel]: of dS; with one row of bias, of its lanes
    Acc *q_panel_ = nullptr, *dout_panel_ = nullptr;  // [kPanel / kSubpanel][d or d_v][kSubpanel]
    Acc *rows_ = nullptr;                    // [kPanel][the larger of d_padded and d_v_padded]: rows of q or dout
    Acc *k_ = nullptr, *v_ = nullptr;        // [kStep][d_padded], [kStep][d_v_padded]
    Acc *lse_ = nullptr, *delta_ = nullptr;  // [kPanel]
};

BiasBackwardKernel bias_backward_kernel(DType dtype) {
    switch (dtype) {
        case DType::float16:
            return FmaBiasBackward<Half>::kernel();
        case DType::bfloat16:
            return FmaBiasBackward<BFloat16>::kernel();
        case DType::float32:
            return FmaBiasBackward<float>::kernel();
        default:
            return FmaBiasBackward<double>::kernel();
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
