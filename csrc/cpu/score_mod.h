// Softcap, ALiBi and attn_bias: turn scores q . k into the logits of the softmax. Forward and backward use the same
// arithmetic on the same scores. Layout as in softmax.h: [key][row], each lane a row.
#pragma once

#include "attn_bias.h"
#include "rows.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// tanh(y) and its derivative 1 - tanh(y)^2, each with a relative error of a few units in the last place for every y.
template <typename T>
struct Tanh {
    Vec<T> value, derivative;
};

// tanh of y = s * factor / (2 log2(e)); the factor may be negative. With e = exp(-2 |y|) = 2^n 2^r, and u = e - 1
// computed without cancellation: tanh(|y|) = -u / (2 + u), its derivative is 4 e / (2 + u)^2.
template <typename T, int kTerms>
FLASH_INLINE Tanh<T> tanh_of(Vec<T> s, Vec<T> factor, const T (&exp2_terms)[kTerms]) {
    const IntVec<T> sign_bit = (IntVec<T>)broadcast<T>(T(-0.0));
    const IntVec<T> scaled = (IntVec<T>)(s * factor), sign = scaled & sign_bit;
    constexpr T kMin = sizeof(T) == 8 ? -1000 : -100;
    const Vec<T> x = max<T>(broadcast<T>(kMin), (Vec<T>)(scaled | sign_bit));  // -|s * factor|; NaN stays NaN
    const auto [r, pow2n] = split_exponent<T>(x);
    Vec<T> p = broadcast<T>(exp2_terms[0]);
#pragma GCC unroll 16
    for (int i = 1; i < kTerms - 1; ++i) p = fma<T>(p, r, broadcast<T>(exp2_terms[i]));
    const Vec<T> pow2r_1 = p * r;  // 2^r - 1: the last term is 1
    const Vec<T> u = fma<T>(pow2r_1, pow2n, pow2n - broadcast<T>(1));
    const Vec<T> e = fma<T>(pow2r_1, pow2n, pow2n);
    const Vec<T> inverse = broadcast<T>(1) / (broadcast<T>(2) + u);
    return {(Vec<T>)((IntVec<T>)(-u * inverse) | sign), broadcast<T>(4) * e * inverse * inverse};
}

// s = cap * tanh(s * scale / cap). kWithDerivative: stores the derivative of tanh in `derivative`, laid out like s.
template <typename T, int kStride, bool kWithDerivative>
FLASH_NOINLINE void cap_scores(T *s, T *derivative, int keys, T cap, T tanh_factor, int lane, int vecs) {
    for (int n = 0; n < keys; ++n) {
        for (int j = 0; j < vecs; ++j) {
            const int at = n * kStride + lane + j * kLanes<T>;
            const Tanh<T> tanh = tanh_of<T>(load<T>(s + at), broadcast<T>(tanh_factor), exp2_terms(T()));
            store<T>(s + at, broadcast<T>(cap) * tanh.value);
            if (kWithDerivative) store<T>(derivative + at, tanh.derivative);
        }
    }
}

// s = s * scale - slope * |position - key|, for keys from n_begin on. Positions are counted from n_begin, so that small
// distances are exact in sequences of any length.
template <typename T, int kStride>
FLASH_NOINLINE void add_alibi(T *s, int n_begin, int keys, T scale, const T *slope,
                              const typename Simd<T>::Int *position, int lane, int vecs) {
    for (int j = 0; j < vecs; ++j) {
        const int at = lane + j * kLanes<T>;
        const auto position_j = *reinterpret_cast<const IntVec<T> *>(position + at);
        const Vec<T> from_begin =
            __builtin_convertvector(position_j - (IntVec<T>{} + typename Simd<T>::Int(n_begin)), Vec<T>);
        const Vec<T> minus_slope = -load<T>(slope + at), scale_vec = broadcast<T>(scale);
        for (int n = 0; n < keys; ++n) {
            const Vec<T> difference = from_begin - broadcast<T>(T(n));
            const Vec<T> distance = max<T>(difference, -difference);
            T *s_n = s + n * kStride + at;
            store<T>(s_n, fma<T>(minus_slope, distance, rounded(load<T>(s_n) * scale_vec)));
        }
    }
}

template <typename T>
class ScoreMod {
public:
    explicit ScoreMod(const Flash_fwd_params &params)
        : is_capped(params.softcap > 0),
          has_alibi(params.alibi_slopes != nullptr),
          scale_(T(params.softmax_scale)),
          cap_(T(params.softcap)),
          tanh_factor_(is_capped ? T(2 * kLog2e * params.softmax_scale / params.softcap) : T(0)),
          bias_(params) {}

    bool is_on() const { return is_capped || has_alibi || bias_.is_used; }

    // True if a key that the mask lets a row see may get a score of -inf.
    bool hides_keys() const { return bias_.is_used; }

    // The factor by which the softmax multiplies: 1 where the modifiers have scaled the scores.
    T scale_left() const { return is_on() ? T(1) : scale_; }

    void take(Scratch &scratch, int64_t rows) {
        scratch.take(slope_, has_alibi ? rows : 0);
        scratch.take(position_, has_alibi ? rows : 0);
        bias_.take(scratch, rows);
    }

    // Lane `i` holds row `row` of the group.
    template <typename Element>
    void set_row(const Group<Element> &group, int64_t row, int64_t i) {
        bias_.set_row(group, row, i);
        if (!has_alibi) return;
        const Flash_fwd_params &params = group.params;
        slope_[i] = T(params.alibi_slopes[group.bidb * params.alibi_slopes_batch_stride + group.head(row)]);
        position_[i] = typename Simd<T>::Int(group.query(row) + group.seq.seqlen_k - group.seq.seqlen_q);
    }

    // Turns the scores of keys [n_begin, n_begin + keys) into logits, in `vecs` vectors from `lane` on; `first` is the
    // row of lane 0. derivative, laid out like s, gets the softcap's derivative; null: not wanted.
    template <int kStride>
    void apply(T *s, T *derivative, int n_begin, int keys, int64_t first, int lane, int vecs) const {
        if (is_capped) {
            derivative == nullptr ? cap_scores<T, kStride, false>(s, nullptr, keys, cap_, tanh_factor_, lane, vecs)
                                  : cap_scores<T, kStride, true>(s, derivative, keys, cap_, tanh_factor_, lane, vecs);
        }
        if (has_alibi) {
            add_alibi<T, kStride>(s, n_begin, keys, is_capped ? T(1) : scale_, slope_ + first, position_ + first, lane,
                                  vecs);
        }
        if (bias_.is_used) {
            bias_.template add<kStride>(s, n_begin, keys, is_capped || has_alibi ? T(1) : scale_, first, lane, vecs);
        }
    }

    // After `apply` with the same derivative: dp = 0 for keys that attn_bias hides, and the softcap's derivative.
    template <int kStride>
    void clear_hidden_keys(const T *s, T *dp, T *derivative, int keys, int lane, int vecs) const {
        if (!hides_keys()) return;
        clear_hidden<T, kStride>(s, dp, keys, lane, vecs);
        if (is_capped && derivative != nullptr) clear_hidden<T, kStride>(s, derivative, keys, lane, vecs);
    }

    // True if attn_bias hides the key from every row of the group.
    template <typename Element>
    bool is_hidden(const Group<Element> &group, int64_t key) const {
        return bias_.is_used && bias_.hides_from_all(group, key);
    }

    const bool is_capped, has_alibi;

private:
    const T scale_, cap_, tanh_factor_;
    T *slope_ = nullptr;                         // of each row
    typename Simd<T>::Int *position_ = nullptr;  // of each row: the key at the query's own position
    BiasRows<T> bias_;
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
