// compute_dq_dk_dv_1colblock for bfloat16 on AMX: products in bfloat16 with float sums, softmax in float. P and dS are
// rounded to bfloat16 for the products, as in the GPU kernels. Included by isa_amx.cpp.
#pragma once

#include "col_block_backward.h"
#include "products_amx.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Rows (for dK and dV) and keys (for dQ) of one sum in tile registers, between a load and a store.
constexpr int kAmxBackwardPanel = 128;
constexpr int kAmxBackwardStep = 128;

class AmxBackward : public ColBlockBackward<AmxBackward, BFloat16, kAmxBackwardPanel, kAmxBackwardStep> {
    using Base = ColBlockBackward<AmxBackward, BFloat16, kAmxBackwardPanel, kAmxBackwardStep>;
    friend Base;
    static constexpr int kPanel = kAmxBackwardPanel, kStep = kAmxBackwardStep;
    static constexpr int kColumns = kAmxBlock, kDqRows = kAmxBlock;
    static constexpr int kBlockNumbers = 64 << 10;  // of each of K, V, K^T, dK and dV in a key block, on average

public:
    AmxBackward(const Flash_bwd_params &params, const ColBlock &block, char *scratch)
        : Base(params, block, scratch), keys_padded_(block.block_keys) {
        const int64_t k_numbers = int64_t(keys_padded_) * d_padded_, v_numbers = int64_t(keys_padded_) * d_v_padded_;
        for (float **x : {&s_, &dp_}) scratch_.take(*x, kAmxBlock * kAmxBlock);
        scratch_.take(derivative_, score_mod_.is_capped ? kAmxBlock * kAmxBlock : 0);
        for (BFloat16 **x : {&p_rows_, &ds_rows_}) scratch_.take(*x, kStep * kPanel);
        scratch_.take(ds_pairs_, kStep / 2 * kPanel);
        scratch_.take(rows_, kPanel * std::max(d_padded_, d_v_padded_));
        scratch_.take(out_rows_, kAmxBlock * d_padded_);
        for (uint32_t **x : {&q_panel_, &q_pairs_}) scratch_.take(*x, kPanel * d_padded_ / 2);
        for (uint32_t **x : {&dout_panel_, &dout_pairs_}) scratch_.take(*x, kPanel * d_v_padded_ / 2);
        for (BFloat16 **x : {&k_, &k_columns_}) scratch_.take(*x, k_numbers);
        scratch_.take(v_, v_numbers);
        scratch_.take(dk_, k_numbers);
        scratch_.take(dv_, v_numbers);
        if (scratch_.is_counting()) return;
        std::memset(k_, 0, sizeof(BFloat16) * size_t(k_numbers));
        std::memset(v_, 0, sizeof(BFloat16) * size_t(v_numbers));
        std::fill_n(dk_, k_numbers, 0.0f);
        std::fill_n(dv_, v_numbers, 0.0f);
    }

    void compute() {
        const TileConfig tiles;
        Base::compute();
    }

private:
    // Keys that no query sees stay 0.
    void load_kv() {
        for (int n = block_.n_begin; n < n_end_; ++n) {
            if (!is_seen(n)) continue;
            const int64_t from = n - block_.n_begin;
            BFloat16 *const k = k_ + from * d_padded_, *const v = v_ + from * d_v_padded_;
            const size_t k_bytes = sizeof(BFloat16) * size_t(d_), v_bytes = sizeof(BFloat16) * size_t(d_v_);
            std::memcpy(k, group_.key_ptr(params_.k, n), k_bytes);
            std::memcpy(v, group_.key_ptr(params_.v, n), v_bytes);
            if (is_hidden(n, k, v)) {
                std::memset(k, 0, k_bytes);
                std::memset(v, 0, v_bytes);
            }
        }
        if (!want_dq_) return;
        for (int n = 0; n < n_end_ - block_.n_begin; n += kAmxBlock) {
            const BFloat16 *rows[kAmxBlock];
            for (int i = 0; i < kAmxBlock; ++i) rows[i] = k_ + int64_t(n + i) * d_padded_;
            for (int c = 0; c < d_padded_; c += kTileRows) {
                transpose_values(rows, c, kTileRows, k_columns_ + int64_t(c) * keys_padded_ + n, keys_padded_);
            }
        }
    }

    void load_rows(const Panel &p) {
        load_rows(p, params_.q, d_, d_padded_, q_panel_, q_pairs_);
        load_rows(p, params_.dout, d_v_, d_v_padded_, dout_panel_, dout_pairs_);
    }
    void load_rows(const Panel &p, const TensorRef &t, int headdim, int headdim_padded, uint32_t *panel,
                   uint32_t *pairs) {
        const float *row_ptrs[kPanel];  // a pair of bfloat16 is moved as one float
        std::memset(rows_, 0, sizeof(BFloat16) * size_t(kPanel) * headdim_padded);
        for (int i = 0; i < p.rows; ++i) {
            BFloat16 *row = rows_ + i * headdim_padded;
            row_ptrs[i] = reinterpret_cast<const float *>(row);
            if (has_keys(i)) std::memcpy(row, group_.row_ptr(t, p.row + i), sizeof(BFloat16) * size_t(headdim));
        }
        for (int i = 0; i < p.rows; i += kAmxBlock)
            rows_to_panel<float, kAmxBlock>(row_ptrs + i, std::min(kAmxBlock, p.rows - i), headdim_padded / 2,
                                            reinterpret_cast<float *>(panel + i * headdim_padded / 2));
        for (int i = 0; i < round_up(p.rows, kAmxBlock); i += 2)
            pair_rows(rows_ + i * headdim_padded, headdim_padded, pairs + i / 2 * headdim_padded);
    }

    void step(const Panel &p, int n_begin, int keys) {
        const bool masked = is_masked(n_begin, keys);
        if (dropout_.is_on) dropout_.draw(group_, p.row, p.rows, n_begin, keys);
        for (int n = 0; n < keys; n += kAmxBlock) {
            const Range rows = rows_block(p, n_begin + n, masked);
            if (rows.is_empty()) continue;
            for (int i = rows.begin; i < rows.end; i += kAmxBlock) probabilities(n_begin, n, keys, i, masked);
            const int64_t from = n_begin - block_.n_begin + n;
            if (want_dv_) add_to_keys(n, rows, p_rows_, dout_pairs_, d_v_padded_, dv_ + from * d_v_padded_);
            if (want_dk_) add_to_keys(n, rows, ds_rows_, q_pairs_, d_padded_, dk_ + from * d_padded_);
        }
        if (want_dq_) add_to_rows(p, n_begin, keys, masked);
    }

    // out[key] += sum over rows of weights[key][row] * x[row] for kAmxBlock keys from n on: dV = P^T dO, dK = dS^T Q. x
    // and out have `columns` columns, d_padded or d_v_padded.
    void add_to_keys(int n, Range rows, const BFloat16 *weights, const uint32_t *x, int columns, float *out) const {
        for (int c = 0; c < columns; c += kAmxBlock)
            multiply_block<2, true>(weights + n * kPanel + rows.begin, kPanel, x + rows.begin / 2 * columns + c,
                                    columns, rows.end - rows.begin, out + c, columns);
    }

    // dq_accum[row] += sum over keys of dS[key][row] * K[key].
    void add_to_rows(const Panel &p, int n_begin, int keys, bool masked) const {
        const int at = n_begin - block_.n_begin;
        for (int i = 0; i < p.rows; i += kAmxBlock) {
            Range seen{0, round_up(keys, kAmxBlock)};
            if (masked) {
                seen = keys_seen(i, std::min(i + kAmxBlock, p.rows), n_begin, keys);
                if (seen.is_empty()) continue;
                seen = {seen.begin / kAmxBlock * kAmxBlock, round_up(seen.end, kAmxBlock)};
            }
            for (int c = 0; c < d_padded_; c += kAmxBlock)
                multiply_block<2, true>(k_columns_ + int64_t(c) * keys_padded_ + at + seen.begin, keys_padded_,
                                        ds_pairs_ + seen.begin / 2 * kPanel + i, kPanel, seen.end - seen.begin,
                                        dq_accum(p) + i * d_padded_ + c * kAmxBlock, kAmxBlock);
        }
    }

    // The panel's rows, in blocks of kAmxBlock, that see any of the kAmxBlock keys from n on.
    Range rows_block(const Panel &p, int n, bool masked) const {
        if (!masked) return {0, round_up(p.rows, kAmxBlock)};
        const Range rows = rows_seeing(p, n, n + kAmxBlock);
        return {rows.begin / kAmxBlock * kAmxBlock, round_up(rows.end, kAmxBlock)};
    }

    // P (0 where dropped) and dS of the kAmxBlock keys from n_begin + n on and the kAmxBlock rows from `row` on. Both
    // are 0 in keys past n_begin + keys.
    void probabilities(int n_begin, int n, int keys, int row, bool masked) {
        const int64_t from = n_begin - block_.n_begin + n;
        multiply_block<2, false>(k_ + from * d_padded_, d_padded_, q_panel_ + row * d_padded_ / 2, kAmxBlock, d_padded_,
                                 s_, kAmxBlock);
        if (want_ds())
            multiply_block<2, false>(v_ + from * d_v_padded_, d_v_padded_, dout_panel_ + row * d_v_padded_ / 2,
                                     kAmxBlock, d_v_padded_, dp_, kAmxBlock);
        const int used_keys = std::min(kAmxBlock, keys - n), target = n * kPanel + row;
        constexpr int kVecsOfBlock = kAmxBlock / kLanes<float>;
        if (score_mod_.is_on()) {
            score_mod_.apply<kAmxBlock>(s_, derivative_, n_begin + n, kAmxBlock, row, 0, kVecsOfBlock);
            score_mod_.clear_hidden_keys<kAmxBlock>(s_, dp_, derivative_, kAmxBlock, 0, kVecsOfBlock);
        }
        if (dropout_.is_on && want_ds())
            drop<float, kAmxBlock, kPanel>(dp_, float(dropout_.scale), dropout_.keep(n) + row, used_keys, kVecsOfBlock);
        const bool is_capped = score_mod_.is_capped;
        switch (mask(masked || used_keys < kAmxBlock || is_capped)) {
            case Mask::none:
                softmax<Mask::none, false>(n_begin + n, used_keys, target, row);
                break;
            case Mask::outside:
                is_capped ? softmax<Mask::outside, true>(n_begin + n, used_keys, target, row)
                          : softmax<Mask::outside, false>(n_begin + n, used_keys, target, row);
                break;
            case Mask::outside_and_gap:
                is_capped ? softmax<Mask::outside_and_gap, true>(n_begin + n, used_keys, target, row)
                          : softmax<Mask::outside_and_gap, false>(n_begin + n, used_keys, target, row);
                break;
        }
        if (dropout_.is_on) drop_rows(p_rows_ + target, dropout_.keep(n) + row, used_keys);
    }

    // P = 0 where it is dropped.
    static void drop_rows(BFloat16 *p, const uint16_t *keep, int keys) {
        for (int n = 0; n < keys; ++n) {
            auto *row = reinterpret_cast<__m512i *>(p + n * kPanel);  // kAmxBlock numbers
            *row = _mm512_and_si512(*row, *reinterpret_cast<const __m512i *>(keep + n * kPanel));
        }
    }

    template <Mask kMask, bool kCapped>
    FLASH_NOINLINE void softmax(int n_begin, int keys, int target, int row) {
        const RowState<float> rows = row_state();
        const Vec<float> scale = broadcast(score_mod_.scale_left());
        for (int j = row; j < row + kAmxBlock; j += kLanes<float>) {
            const Vec<float> lse = load<float>(rows.lse + j), delta = load<float>(rows.delta + j);
            for (int n = 0; n < kAmxBlock; n += 2) {
                Vec<float> p[2], ds[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const int from = (n + i) * kAmxBlock + j - row;
                    p[i] = probability<float>(load<float>(s_ + from), scale, lse, kExp2BFloat16);
                    ds[i] = p[i] * (load<float>(dp_ + from) - delta);
                    if (kCapped) ds[i] *= load<float>(derivative_ + from);
                    if (kMask != Mask::none) {
                        p[i] =
                            n + i < keys ? visible_or_zero<float, kMask>(p[i], n_begin + n + i, rows, j) : Vec<float>{};
                        ds[i] = n + i < keys ? visible_or_zero<float, kMask>(ds[i], n_begin + n + i, rows, j)
                                             : Vec<float>{};
                    }
                }
                const int to = target + n * kPanel + j - row;
                store_rows(round_to_pairs(p[0], p[1]), p_rows_ + to, p_rows_ + to + kPanel);
                const __m512i ds_pair = round_to_pairs(ds[0], ds[1]);
                store_rows(ds_pair, ds_rows_ + to, ds_rows_ + to + kPanel);
                _mm512_store_si512(ds_pairs_ + (target + n * kPanel - row) / kPanel / 2 * kPanel + j, ds_pair);
            }
        }
    }

    void store_dq(const Panel &p) const {
        float factor[kAmxBlock];
        float *rows[kAmxBlock];
        std::fill_n(factor, kAmxBlock, scale_);
        for (int i = 0; i < kAmxBlock; ++i) rows[i] = out_rows_ + i * d_padded_;
        for (int begin = 0; begin < p.rows; begin += kAmxBlock) {
            const int count = std::min(kAmxBlock, p.rows - begin);
            panel_to_rows<float, kAmxBlock>(dq_accum(p) + begin * d_padded_, factor, count, d_, rows);
            for (int i = 0; i < count; ++i) {
                if (has_keys(begin + i)) convert_row(rows[i], group_.row_ptr(params_.dq, p.row + begin + i), d_);
            }
        }
    }

    void store_dk_dv() const {
        for (int n = block_.n_begin; n < n_end_; ++n) {
            const int64_t from = n - block_.n_begin;
            if (want_dk_) store_row(dk_ + from * d_padded_, scale_, group_.key_ptr(params_.dk, n), d_);
            if (want_dv_)
                store_row(dv_ + from * d_v_padded_, float(dropout_.scale), group_.key_ptr(params_.dv, n), d_v_);
        }
    }

    const int keys_padded_;
    float *s_ = nullptr, *dp_ = nullptr;               // [kAmxBlock keys][kAmxBlock rows]
    float *derivative_ = nullptr;                      // [kAmxBlock keys][kAmxBlock rows]: of the score modifier
    BFloat16 *p_rows_ = nullptr, *ds_rows_ = nullptr;  // [kStep][kPanel]
    uint32_t *ds_pairs_ = nullptr;                     // [kStep / 2][kPanel] pairs of keys
    BFloat16 *rows_ = nullptr;                         // [kPanel][d_padded or d_v_padded]: rows of q or dout
    float *out_rows_ = nullptr;                        // [kAmxBlock][d_padded]
    uint32_t *q_panel_ = nullptr;                      // [kPanel / kAmxBlock][d_padded / 2][kAmxBlock] pairs
    uint32_t *dout_panel_ = nullptr;                   // the same with d_v_padded
    uint32_t *q_pairs_ = nullptr;                      // [kPanel / 2][d_padded] pairs of rows
    uint32_t *dout_pairs_ = nullptr;                   // the same with d_v_padded
    BFloat16 *k_ = nullptr, *v_ = nullptr;             // [keys_padded][d_padded], [keys_padded][d_v_padded]
    BFloat16 *k_columns_ = nullptr;                    // [d_padded][keys_padded]
    float *dk_ = nullptr, *dv_ = nullptr;              // like k_ and v_, before they are scaled
};

BackwardKernel backward_kernel(DType) {
    return AmxBackward::kernel();
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
