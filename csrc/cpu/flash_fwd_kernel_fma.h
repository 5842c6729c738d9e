// compute_attn_1rowblock by multiply-add: every dtype on every CPU, 16-bit types converted to float as they are loaded.
// Included by isa_baseline.cpp, isa_avx2.cpp and isa_avx512.cpp.
#pragma once

#include "products_fma.h"
#include "row_block_forward.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Scores [kFmaBlockN][kFmaPanel] (18 KB with AVX-512) stay in the first-level cache between the products.
constexpr int kFmaBlockN = 96;

template <typename Element>
class FmaForward : public RowBlockForward<FmaForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN> {
    using Base = RowBlockForward<FmaForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN>;
    friend Base;
    using typename Base::Acc;
    using typename Base::Panel;
    using Base::d_, Base::params_, Base::panels_, Base::kConvert;
    static constexpr int kPanel = kFmaPanel<Acc>;
    static constexpr int kBlockN = kFmaBlockN;
    static constexpr int kKeyStep = 1;  // a step may begin at any key

  public:
    FmaForward(const Flash_fwd_params &params, const RowBlock &block, char *scratch)
        : Base(params, block, scratch), d_padded_(round_up(params.d, kTile)) {
        const int64_t keys = std::min(kBlockN, round_up(params.seqlen_k, kTile));
        this->take(s_, keys * kPanel);
        this->take(v_, int64_t(kBlockN) * d_padded_);
        this->take(rows_, kConvert ? std::max<int64_t>(keys, kPanel) * d_ : 0);
        this->take(q_, int64_t(panels_) * kPanel * d_);
        this->take(o_, int64_t(panels_) * kPanel * d_padded_);
    }

  private:
    Acc *out(const Panel &p) const { return o_ + p.row * d_padded_; }
    Acc *out_rows() const { return rows_; }

    void load_q(const Panel &p) {
        const Acc *rows[kPanel];
        for (int i = 0; i < p.rows; ++i) {
            const Element *row = this->row_ptr(params_.q, p.row + i);
            if constexpr (kConvert) {
                convert_row(row, rows_ + i * d_, d_);
                rows[i] = rows_ + i * d_;
            } else {
                rows[i] = row;
            }
        }
        Acc *q = q_ + p.row * d_;
        rows_to_panel<Acc, kPanel>(rows, p.rows, d_, q);
        if (this->sign_ != 1) std::transform(q, q + d_ * kPanel, q, [this](Acc x) { return x * Acc(this->sign_); });
        std::fill_n(out(p), size_t(d_padded_) * kPanel, Acc(0));
    }

    void load_kv(int n_begin, int n_end) {
        for (int n = n_begin; n < n_end; ++n) {
            Acc *strips = v_ + (n - n_begin) * kTile;
            if constexpr (kConvert) {
                convert_row(this->key_ptr(params_.k, n), rows_ + (n - n_begin) * d_, d_);
                Acc row[256];
                convert_row(this->key_ptr(params_.v, n), row, d_);
                row_to_strips<Acc>(row, d_, kBlockN * kTile, strips);
            } else {
                row_to_strips<Acc>(this->key_ptr(params_.v, n), d_, kBlockN * kTile, strips);
            }
        }
    }

    void step_vecs(const Panel &p, int used_vecs, int n_begin, int n_first, int n_last, bool masked) {
        switch (used_vecs) {
            case 1: return step<1>(p, n_begin, n_first, n_last, masked);
            case 2: return step<2>(p, n_begin, n_first, n_last, masked);
            default: return step<3>(p, n_begin, n_first, n_last, masked);
        }
    }

    template <int kUsedVecs>
    void step(const Panel &p, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first;
        Vec<Acc> row_max[kUsedVecs], safe_m[kUsedVecs], alpha[kUsedVecs], sum[kUsedVecs];
        for (int j = 0; j < kUsedVecs; ++j) row_max[j] = broadcast<Acc>(-std::numeric_limits<Acc>::infinity());
        for (int n = 0; n < keys; n += kTile) {
            const Acc *k[kTile];
            for (int i = 0; i < kTile; ++i) {  // past the end the last key is repeated, and never looked at
                const int key = n_first + std::min(n + i, keys - 1);
                if constexpr (kConvert) k[i] = rows_ + (key - n_begin) * d_;
                else k[i] = this->key_ptr(params_.k, key);
            }
            scores_tile<Acc, kUsedVecs>(k, q_ + p.row * d_, d_, s_ + n * kPanel, row_max);
        }
        if (masked) mask_scores<Acc, kPanel, kUsedVecs>(s_, n_first, keys, p.lo, p.hi, row_max);
        update_max<Acc, kUsedVecs>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        exponentiate<Acc, kPanel, kUsedVecs>(s_, keys, this->scale_log2_, safe_m, sum);
        update_sum<Acc, kUsedVecs>(sum, alpha, p.state);
        for (int c = 0; c < d_; c += kTile) {
            const Acc *v = v_ + c * kBlockN + (n_first - n_begin) * kTile;
            if (masked) output_tile<Acc, kUsedVecs, true>(s_, v, keys, alpha, out(p) + c * kPanel);
            else output_tile<Acc, kUsedVecs, false>(s_, v, keys, alpha, out(p) + c * kPanel);
        }
    }

    const int d_padded_;
    Acc *s_ = nullptr;     // [keys][kPanel]: scores, then probabilities, of one panel
    Acc *v_ = nullptr;     // [d_padded / kTile][kBlockN][kTile]: V of the current keys
    Acc *rows_ = nullptr;  // [keys or kPanel][d]: K of the current keys, or rows of q and o, where converted
    Acc *q_ = nullptr;     // [panels][d][kPanel]
    Acc *o_ = nullptr;     // [panels][d_padded][kPanel]
};

inline Kernel select_kernel(const Flash_fwd_params &params) {
    switch (params.dtype) {
        case DType::float16: return FmaForward<Half>::kernel(kFmaPanel<float> * (params.d <= 64 ? 8 : 4));
        case DType::bfloat16: return FmaForward<BFloat16>::kernel(kFmaPanel<float> * (params.d <= 64 ? 8 : 4));
        case DType::float32: return FmaForward<float>::kernel(kFmaPanel<float> * (params.d <= 64 ? 8 : 4));
        default: return FmaForward<double>::kernel(kFmaPanel<double> * (params.d <= 64 ? 8 : 4));
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
