// The softmax of one backward step, on scores laid out [key][row]; each lane is a row. P is recomputed from the
// forward's log-sum-exp, so the keys may come in any order and nothing is rescaled.
#pragma once

#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

template <typename T>
struct RowState {                     // of a panel's rows
    const T *lse;                     // natural log; +inf where there is no row or no key
    const T *delta;                   // rowsum(dO * O) - dLSE
    const typename Simd<T>::Int *lo;  // the row sees keys [lo, hi)
    const typename Simd<T>::Int *hi;
};

// exp(scale * s - lse). The product is rounded before lse is subtracted, as in the forward. Otherwise, where scores are
// so large that lse is the largest of them, the P of that score would not be 1.
template <typename T, int kTerms>
FLASH_INLINE Vec<T> probability(Vec<T> s, Vec<T> scale, Vec<T> lse, const T (&exp2_terms)[kTerms]) {
    return exp2_nonpositive<T>((rounded(s * scale) - lse) * broadcast<T>(T(kLog2e)), exp2_terms);
}

template <typename T>
FLASH_INLINE Vec<T> visible_or_zero(Vec<T> x, typename Simd<T>::Int key, const RowState<T> &rows, int lane) {
    const auto lo = *reinterpret_cast<const IntVec<T> *>(rows.lo + lane);
    const auto hi = *reinterpret_cast<const IntVec<T> *>(rows.hi + lane);
    const IntVec<T> key_vec = IntVec<T>{} + key;
    return ((key_vec >= lo) & (key_vec < hi)) ? x : Vec<T>{};
}

enum class DsOutput { none, plain, capped };

// For keys [n_begin, n_begin + keys): replaces s = q.k by P = exp(scale * s - lse), and dp = dO.v by dS = P * (dp -
// delta) (capped: times the derivative of the cap), in `vecs` vectors of lanes from `lane` on. kMasked: both are 0
// where a row does not see a key.
template <typename T, int kPanel, bool kMasked, DsOutput kDs>
FLASH_NOINLINE void softmax_backward(T *s, T *dp, const T *derivative, int n_begin, int keys, T scale,
                                     const RowState<T> &rows, int lane, int vecs) {
    const Vec<T> scale_vec = broadcast<T>(scale);
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 3
        for (int j = 0; j < vecs; ++j) {
            const int at = lane + j * kLanes<T>;
            T *s_n = s + n * kPanel + at;
            Vec<T> p = probability<T>(load<T>(s_n), scale_vec, load<T>(rows.lse + at), exp2_terms(T()));
            if (kMasked) p = visible_or_zero<T>(p, n_begin + n, rows, at);
            store<T>(s_n, p);
            if (kDs != DsOutput::none) {
                T *dp_n = dp + n * kPanel + at;
                Vec<T> ds = p * (load<T>(dp_n) - load<T>(rows.delta + at));
                if (kDs == DsOutput::capped) ds *= load<T>(derivative + n * kPanel + at);
                if (kMasked) ds = visible_or_zero<T>(ds, n_begin + n, rows, at);
                store<T>(dp_n, ds);
            }
        }
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
