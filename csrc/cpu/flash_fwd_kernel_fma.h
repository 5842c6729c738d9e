// compute_attn_1rowblock with multiply-add: every dtype on every CPU. 16-bit types are converted to float when loaded.
// Included by isa_baseline.cpp, isa_avx2.cpp and isa_avx512.cpp.
#pragma once

#include "flash_decode_kernel_fma.h"
#include "products_fma.h"
#include "row_block_forward.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

template <typename Element>
class FmaForward
    : public RowBlockForward<FmaForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN> {
    using Base = RowBlockForward<FmaForward<Element>, Element, kFmaPanel<typename AccOf<Element>::type>, kFmaBlockN>;
    friend Base;
    using Base::d_, Base::d_v_, Base::params_, Base::panels_, Base::kConvert;
    using typename Base::Acc;
    using typename Base::Panel;
    static constexpr int kPanel = kFmaPanel<Acc>;
    static constexpr int kBlockN = kFmaBlockN;
    static constexpr int kKeyStep = 1;  // a step may begin and end at any key

public:
    FmaForward(const Flash_fwd_params &params, const RowBlock &block, char *scratch)
        : Base(params, block, scratch),
          d_v_padded_(round_up(params.d_v, kTile)),
          copies_k_(kConvert || params.block_table != nullptr) {
        this->scratch_.take(s_, kBlockN * kPanel);
        this->scratch_.take(v_, int64_t(kBlockN) * d_v_padded_);
        this->scratch_.take(rows_,
                            copies_k_ ? std::max(int64_t(kBlockN) * d_, int64_t(kPanel) * std::max(d_, d_v_)) : 0);
        this->scratch_.take(q_, int64_t(panels_) * kPanel * d_);
        this->scratch_.take(o_, int64_t(panels_) * kPanel * d_v_padded_);
    }

private:
    Acc *out(const Panel &p) const { return o_ + p.row * d_v_padded_; }
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
        rows_to_panel<Acc, kPanel>(rows, p.rows, d_, q_ + p.row * d_);
        std::fill_n(out(p), size_t(d_v_padded_) * kPanel, Acc(0));
    }

    void load_kv(int n_begin, int n_end) {
        typename Strip<Acc>::Vec check{};
        for (int n = n_begin; n < n_end; ++n) {
            Acc *strips = v_ + (n - n_begin) * kTile;
            if constexpr (kConvert) {
                convert_row(this->key_ptr(params_.k, n), rows_ + (n - n_begin) * d_, d_);
                Acc row[kMaxHeadDim];
                convert_row(this->key_ptr(params_.v, n), row, d_v_);
                row_to_strips<Acc>(row, d_v_, kBlockN * kTile, strips, check);
            } else {
                if (copies_k_)
                    std::memcpy(rows_ + (n - n_begin) * d_, this->key_ptr(params_.k, n), sizeof(Acc) * size_t(d_));
                row_to_strips<Acc>(this->key_ptr(params_.v, n), d_v_, kBlockN * kTile, strips, check);
            }
        }
        v_special_ = false;
        for (int i = 0; i < kTile; ++i) v_special_ |= check[i] != 0;
    }

    void step_vecs(const Panel &p, int used_vecs, int n_begin, int n_first, int n_last, bool masked) {
        switch (used_vecs) {
            case 1:
                return step<1>(p, n_begin, n_first, n_last, masked);
            case 2:
                return step<2>(p, n_begin, n_first, n_last, masked);
            default:
                return step<3>(p, n_begin, n_first, n_last, masked);
        }
    }

    template <int kUsedVecs>
    void step(const Panel &p, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first;
        Vec<Acc> row_max[kUsedVecs], safe_m[kUsedVecs], alpha[kUsedVecs], sum[kUsedVecs];
        for (int j = 0; j < kUsedVecs; ++j) row_max[j] = broadcast<Acc>(-std::numeric_limits<Acc>::infinity());
        scores<kUsedVecs>(p, 0, n_begin, n_first, 0, keys, row_max);
        const bool changed = this->make_logits(p, s_, kUsedVecs, n_first, keys);
        if (masked)
            mask_scores<Acc, kPanel, kUsedVecs>(s_, n_first, keys, p.keys, row_max);
        else if (changed)
            find_max<Acc, kPanel, kUsedVecs>(s_, keys, row_max);
        update_max<Acc, kUsedVecs>(row_max, this->scale_log2_, p.state, safe_m, alpha);
        exponentiate<Acc, kPanel, kUsedVecs>(s_, keys, this->scale_log2_, safe_m, sum);
        update_sum<Acc, kUsedVecs>(sum, alpha, p.state);
        if (this->dropout_.is_on) drop_probabilities<kUsedVecs>(p, n_first, keys);
        if (masked && v_special_)
            output<kUsedVecs, true>(p, 0, n_begin, n_first, keys, alpha);
        else
            output<kUsedVecs, false>(p, 0, n_begin, n_first, keys, alpha);
    }

    template <int kUsedVecs>
    void drop_probabilities(const Panel &p, int n_first, int keys) {
        this->dropout_.draw(this->group_, this->block_.row_begin + p.row, p.rows, n_first, keys);
        drop<Acc, kPanel, kPanel>(s_, Acc(1), this->dropout_.keep(0), keys, kUsedVecs);
    }

    // How many of the step's keys the queries of a vector see, if those of the vectors before it see no more. Under a
    // causal mask the first vectors see fewer keys, so both products leave them out for the remaining keys.
    int seen_keys(const Panel &p, int vec, int n_first, int keys) const {
        return std::min(keys, int(p.end_key[(vec + 1) * kLanes<Acc> - 1]) - n_first);
    }

    // First product, for the vectors from `vec` on and the keys from `done` on. Scores that no query of a vector sees
    // stay unset: mask_scores overwrites them.
    template <int kUsedVecs>
    void scores(const Panel &p, int vec, int n_begin, int n_first, int done, int keys, Vec<Acc> *row_max) {
        const Acc *k = rows_ + (n_first - n_begin) * d_;
        int64_t k_stride = d_;
        if constexpr (!kConvert) {
            if (!copies_k_) k = this->key_ptr(params_.k, n_first), k_stride = params_.k.row_stride;
        }
        for (const int end = seen_keys(p, vec, n_first, keys); done < end; done += kTile) {
            this->prefetch_next_keys(n_begin, done, keys, kTile);
            scores_tile<Acc, kUsedVecs>(k + done * k_stride, k_stride, keys - done, q_ + p.row * d_ + vec * kLanes<Acc>,
                                        d_, s_ + done * kPanel + vec * kLanes<Acc>, row_max);
        }
        if constexpr (kUsedVecs > 1) {
            if (done < keys) scores<kUsedVecs - 1>(p, vec + 1, n_begin, n_first, done, keys, row_max + 1);
        }
    }

    // Second product, for the vectors from `vec` on.
    template <int kUsedVecs, bool kSkipZeros>
    void output(const Panel &p, int vec, int n_begin, int n_first, int keys, const Vec<Acc> *alpha) {
        int64_t seen[kUsedVecs];
        for (int j = 0; j < kUsedVecs; ++j) seen[j] = seen_keys(p, vec + j, n_first, keys);
        if constexpr (kUsedVecs > 1) {
            if (seen[0] <= 0) return output<kUsedVecs - 1, kSkipZeros>(p, vec + 1, n_begin, n_first, keys, alpha + 1);
        }
        const Acc *v = v_ + (n_first - n_begin) * kTile;
        Acc *o = out(p) + vec * kLanes<Acc>;
        for (int c = 0; c < d_v_; c += kTile) {
            output_tile<Acc, kUsedVecs, kSkipZeros>(s_ + vec * kLanes<Acc>, v + c * kBlockN, seen, alpha,
                                                    o + c * kPanel);
        }
    }

    const int d_v_padded_;
    const bool copies_k_;     // the products read K from rows_, not from the tensor
    bool v_special_ = false;  // V of the current keys holds an infinity or a NaN
    Acc *s_ = nullptr;        // [kBlockN][kPanel]: scores, then probabilities, of one panel
    Acc *v_ = nullptr;        // [d_v_padded / kTile][kBlockN][kTile]: V of the current keys
    Acc *rows_ = nullptr;     // [kBlockN][d]: K of the current keys; or [kPanel][d or d_v]: converted rows of q or o
    Acc *q_ = nullptr;        // [panels][d][kPanel]
    Acc *o_ = nullptr;        // [panels][d_v_padded][kPanel]
};

// Blocks of few rows run on FmaDecode, which has no dropout.
template <typename Element>
ForwardKernel forward_kernel_of() {
    using Decode = FmaDecode<Element>;
    constexpr int kMaxPanels = 16;  // share the loaded K and V; 3 to 10 % faster than 4 to 8 (Xeon, AVX-512)
    ForwardKernel kernel = FmaForward<Element>::kernel(kMaxPanels);
    kernel.decode_rows = Decode::kMaxRows;
    kernel.scratch_bytes = [](const Flash_fwd_params &params, int64_t rows) {
        return std::max(FmaForward<Element>::scratch_bytes(params, rows), Decode::scratch_bytes(params));
    };
    kernel.compute_attn_1rowblock = [](const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        const bool is_decode = block.rows <= Decode::kMaxRows && params.rng_state == nullptr;
        is_decode ? Decode::run(params, block, scratch) : FmaForward<Element>::run(params, block, scratch);
    };
    return kernel;
}

ForwardKernel forward_kernel(DType dtype) {
    switch (dtype) {
        case DType::float16:
            return forward_kernel_of<Half>();
        case DType::bfloat16:
            return forward_kernel_of<BFloat16>();
        case DType::float32:
            return forward_kernel_of<float>();
        default:
            return forward_kernel_of<double>();
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
