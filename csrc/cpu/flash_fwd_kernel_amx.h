// compute_attn_1rowblock for bfloat16 on AMX: products in bfloat16 with float sums, softmax in float. Probabilities are
// rounded to bfloat16 for the second product, as in the GPU kernels. Included by isa_amx.cpp.
#pragma once

#include "flash_decode_kernel_amx.h"
#include "products_amx.h"
#include "row_block_forward.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Keys of a step: scores [kAmxBlockN][kAmxPanel] are 32 KB, probabilities 16 KB. Longer steps rescale the output less
// often.
constexpr int kAmxBlockN = 256;

// Like exponentiate(), but stores p as pairs of bfloat16, [key / 2][query][2]. Keys from `keys` up to the next multiple
// of kAmxBlock get 0.
template <int kUsedVecs>
FLASH_INLINE void exponentiate_to_pairs(const float *s, int keys, float scale_log2, const Vec<float> *safe_m,
                                        uint32_t *p, Vec<float> *sum) {
    const Vec<float> scale = broadcast(scale_log2);
#pragma GCC unroll 2
    for (int j = 0; j < kUsedVecs; ++j) sum[j] = Vec<float>{};
    for (int n = 0; n < round_up(keys, kAmxBlock); n += 2) {
#pragma GCC unroll 2
        for (int j = 0; j < kUsedVecs; ++j) {
            const float *s_n = s + n * kAmxPanel + j * kLanes<float>;
            Vec<float> even{}, odd{};
            if (n < keys) even = exp2_nonpositive<float>((load<float>(s_n) - safe_m[j]) * scale, kExp2BFloat16);
            if (n + 1 < keys)
                odd = exp2_nonpositive<float>((load<float>(s_n + kAmxPanel) - safe_m[j]) * scale, kExp2BFloat16);
            sum[j] += even + odd;
            _mm512_store_si512(p + n / 2 * kAmxPanel + j * kLanes<float>, round_to_pairs(even, odd));
        }
    }
}

class AmxForward : public RowBlockForward<AmxForward, BFloat16, kAmxPanel, kAmxBlockN> {
    using Base = RowBlockForward<AmxForward, BFloat16, kAmxPanel, kAmxBlockN>;
    friend Base;
    static constexpr int kPanel = kAmxPanel;
    static constexpr int kBlockN = kAmxBlockN;
    static constexpr int kKeyStep = kAmxBlock;  // a step begins and ends at a multiple of it within the key block

public:
    AmxForward(const Flash_fwd_params &params, const RowBlock &block, char *scratch)
        : Base(params, block, scratch),
          d_padded_(round_up(params.d, kAmxBlock)),
          d_v_padded_(round_up(params.d_v, kAmxBlock)) {
        scratch_.take(s_, kBlockN * kPanel);
        scratch_.take(p_, kBlockN * kPanel / 2);
        scratch_.take(k_, int64_t(kBlockN) * d_padded_);
        scratch_.take(v_, int64_t(kBlockN) * d_v_padded_);
        scratch_.take(rows_, int64_t(kPanel) * std::max(d_padded_, d_v_padded_));
        scratch_.take(q_, int64_t(panels_) * kPanel * d_padded_ / 2);
        scratch_.take(o_, int64_t(panels_) * kPanel * d_v_padded_);
        if (scratch_.is_counting()) return;
        const int keys = std::min(kBlockN, round_up(group_.seq.seqlen_k, kAmxBlock));
        std::memset(k_, 0, sizeof(BFloat16) * size_t(keys) * d_padded_);
    }

    void compute() {
        const TileConfig tiles;
        Base::compute();
    }

private:
    float *out(const Panel &p) const { return o_ + p.row * d_v_padded_; }
    float *out_rows() const { return rows_; }

    void load_q(const Panel &p) {
        auto *rows = reinterpret_cast<BFloat16 *>(rows_);  // [kPanel][d_padded]
        const float *pairs[kPanel];
        std::memset(rows, 0, sizeof(BFloat16) * size_t(kPanel) * d_padded_);
        for (int i = 0; i < p.rows; ++i) {
            const BFloat16 *row = row_ptr(params_.q, p.row + i);
            BFloat16 *to = rows + i * d_padded_;
            std::memcpy(to, row, sizeof(BFloat16) * size_t(d_));
            pairs[i] = reinterpret_cast<const float *>(to);
        }
        // A pair of bfloat16 is moved as one float.
        rows_to_panel<float, kPanel>(pairs, p.rows, d_padded_ / 2,
                                     reinterpret_cast<float *>(q_ + p.row * d_padded_ / 2));
        std::fill_n(out(p), size_t(d_v_padded_) * kPanel, 0.0f);
    }

    void load_kv(int n_begin, int n_end) {
        for (int n = n_begin; n < n_end; ++n) {
            std::memcpy(k_ + (n - n_begin) * d_padded_, key_ptr(params_.k, n), sizeof(BFloat16) * size_t(d_));
        }
        static constexpr BFloat16 kZeros[kMaxHeadDim] = {};
        v_special_ = false;
        for (int n = n_begin; n < n_end; n += kAmxBlock) {
            const BFloat16 *rows[kAmxBlock];
            for (int i = 0; i < kAmxBlock; ++i) rows[i] = n + i < n_end ? key_ptr(params_.v, n + i) : kZeros;
            for (int c = 0; c < d_v_padded_; c += kTileRows) {
                v_special_ |= transpose_values(rows, c, std::clamp(d_v_ - c, 0, kTileRows),
                                               v_ + c * kBlockN + n - n_begin, kBlockN);
            }
        }
    }

    void step_vecs(const Panel &p, int used_vecs, int n_begin, int n_first, int n_last, bool masked) {
        if (used_vecs == 1)
            step<1>(p, n_begin, n_first, n_last, masked);
        else
            step<2>(p, n_begin, n_first, n_last, masked);
    }

    template <int kUsedVecs>
    void step(const Panel &p, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first, keys_padded = round_up(keys, kAmxBlock);
        Vec<float> row_max[kUsedVecs], safe_m[kUsedVecs], alpha[kUsedVecs], sum[kUsedVecs];
        for (int n = 0; n < keys_padded; n += kAmxBlock) {
            prefetch_next_keys(n_begin, n, keys, kAmxBlock);
            multiply_block<kUsedVecs, false>(k_ + (n_first - n_begin + n) * d_padded_, d_padded_,
                                             q_ + p.row * d_padded_ / 2, kPanel, d_padded_, s_ + n * kPanel, kPanel);
        }
        make_logits(p, s_, kUsedVecs, n_first, keys);
        if (masked)
            mask_scores<float, kPanel, kUsedVecs>(s_, n_first, keys, p.keys, row_max);
        else
            find_max<float, kPanel, kUsedVecs>(s_, keys, row_max);
        update_max<float, kUsedVecs>(row_max, scale_log2_, p.state, safe_m, alpha);
        exponentiate_to_pairs<kUsedVecs>(s_, keys, scale_log2_, safe_m, p_, sum);
        update_sum<float, kUsedVecs>(sum, alpha, p.state);
        if (dropout_.is_on) drop_probabilities(p, n_first, keys);
        rescale<kUsedVecs>(out(p), alpha);
        const bool has_unseen_keys = masked || keys < keys_padded;
        for (int c = 0; c < d_v_padded_; c += kAmxBlock) {
            const BFloat16 *v = v_ + c * kBlockN + n_first - n_begin;
            float *o = out(p) + c * kPanel;
            if (has_unseen_keys && v_special_)
                output_block_skip_zeros(v, kBlockN, p_, keys_padded, o);
            else
                multiply_block<kUsedVecs, true>(v, kBlockN, p_, kPanel, keys_padded, o, kPanel);
        }
    }

    FLASH_NOINLINE void drop_probabilities(const Panel &p, int n_first, int keys) {
        dropout_.draw(group_, block_.row_begin + p.row, p.rows, n_first, keys);
        for (int n = 0; n < keys; n += 2) {
            const auto *even = reinterpret_cast<const __m256i *>(dropout_.keep(n));
            const auto *odd = reinterpret_cast<const __m256i *>(dropout_.keep(n + 1));
            for (int j = 0; j < kPanel / kLanes<float>; ++j) {
                uint32_t *pair = p_ + n / 2 * kPanel + j * kLanes<float>;
                const __m512i kept = _mm512_or_si512(_mm512_cvtepu16_epi32(even[j]),
                                                     _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[j]), 16));
                _mm512_store_si512(pair, _mm512_and_si512(_mm512_load_si512(pair), kept));
            }
        }
    }

    // o *= alpha, if a maximum has grown.
    template <int kUsedVecs>
    void rescale(float *o, const Vec<float> *alpha) const {
        bool grown = false;
        for (int j = 0; j < kUsedVecs; ++j) grown |= _mm512_cmpneq_ps_mask(alpha[j], broadcast(1.0f)) != 0;
        if (!grown) return;
        for (int c = 0; c < d_v_padded_; ++c) {
            for (int j = 0; j < kUsedVecs; ++j) {
                float *o_j = o + c * kPanel + j * kLanes<float>;
                store<float>(o_j, load<float>(o_j) * alpha[j]);
            }
        }
    }

    const int d_padded_, d_v_padded_;
    bool v_special_ = false;  // V of the current keys holds an infinity or a NaN
    float *s_ = nullptr;      // [kBlockN][kPanel]: scores of one panel
    uint32_t *p_ = nullptr;   // [kBlockN / 2][kPanel] pairs: probabilities of one panel
    BFloat16 *k_ = nullptr;   // [kBlockN][d_padded]: K of the current keys
    BFloat16 *v_ = nullptr;   // [d_v_padded][kBlockN]: V of the current keys
    float *rows_ = nullptr;   // [kPanel][d_padded or d_v_padded]: rows of q or o
    uint32_t *q_ = nullptr;   // [panels][d_padded / 2][kPanel] pairs
    float *o_ = nullptr;      // [panels][d_v_padded][kPanel]
};

// Groups of few rows run on AmxDecode, which reads V in place, and K where its tiles lie evenly in memory.
ForwardKernel forward_kernel(DType) {
    constexpr int kMaxPanels = 16;
    ForwardKernel kernel = AmxForward::kernel(kMaxPanels);
    kernel.decode_rows = AmxDecode::kMaxGroupRows;
    kernel.scratch_bytes = [](const Flash_fwd_params &params, int64_t rows) {
        return std::max(AmxForward::scratch_bytes(params, rows), AmxDecode::scratch_bytes(params));
    };
    kernel.compute_attn_1rowblock = [](const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        AmxDecode::takes(params, block) ? AmxDecode::run(params, block, scratch)
                                        : AmxForward::run(params, block, scratch);
    };
    return kernel;
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
