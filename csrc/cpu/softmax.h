// The online softmax of one step, on scores laid out [key][query]: mask, exponentiate, sum; each lane is a query. A row
// of scores has kPanel queries; the first kUsedVecs vectors are in use.
#pragma once

#include "rows.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// The running state of a panel's queries over the keys visited: m is the largest score (unscaled), l the sum of
// 2^(scale_log2 * (score - m)).
template <typename T>
struct SoftmaxState {
    T *m;  // [kPanel], -inf before the first key
    T *l;  // [kPanel]
};

// Sets scores of keys that a row does not see to -inf and recomputes their maxima. Key n of s is key n_begin + n of K.
template <typename T, int kPanel, int kUsedVecs, bool kHasGaps>
FLASH_NOINLINE void mask_scores(T *s, int n_begin, int keys, const KeysOfRows<T> &rows, Vec<T> *row_max) {
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
#pragma GCC unroll 4
    for (int j = 0; j < kUsedVecs; ++j) {
        const KeysOfLanes<T, kHasGaps> seen(rows, j * kLanes<T>);
        row_max[j] = minus_inf;
        for (int n = 0; n < keys; ++n) {
            T *s_n = s + n * kPanel + j * kLanes<T>;
            const Vec<T> x = seen.see(typename Simd<T>::Int(n_begin + n)) ? load<T>(s_n) : minus_inf;
            store<T>(s_n, x);
            row_max[j] = max<T>(x, row_max[j]);
        }
    }
}

template <typename T, int kPanel, int kUsedVecs>
FLASH_INLINE void mask_scores(T *s, int n_begin, int keys, const KeysOfRows<T> &rows, Vec<T> *row_max) {
    rows.has_gaps() ? mask_scores<T, kPanel, kUsedVecs, true>(s, n_begin, keys, rows, row_max)
                    : mask_scores<T, kPanel, kUsedVecs, false>(s, n_begin, keys, rows, row_max);
}

template <typename T, int kPanel, int kUsedVecs>
FLASH_NOINLINE void find_max(const T *s, int keys, Vec<T> *row_max) {
#pragma GCC unroll 4
    for (int j = 0; j < kUsedVecs; ++j) row_max[j] = broadcast<T>(-std::numeric_limits<T>::infinity());
#pragma GCC unroll 2
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) row_max[j] = max<T>(load<T>(s + n * kPanel + j * kLanes<T>), row_max[j]);
    }
}

// Updates m with the maxima of a step. safe_m is m, or 0 before the first key, so that -inf - safe_m is -inf and not
// NaN. alpha is the factor that rescales the sums and outputs so far.
template <typename T, int kUsedVecs>
FLASH_INLINE void update_max(const Vec<T> *row_max, T scale_log2, SoftmaxState<T> state, Vec<T> *safe_m,
                             Vec<T> *alpha) {
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
#pragma GCC unroll 4
    for (int j = 0; j < kUsedVecs; ++j) {
        const Vec<T> m_old = load<T>(state.m + j * kLanes<T>);
        const Vec<T> m_new = max<T>(row_max[j], m_old);
        store<T>(state.m + j * kLanes<T>, m_new);
        safe_m[j] = m_new == minus_inf ? Vec<T>{} : m_new;
        alpha[j] = exp2_nonpositive((m_old - safe_m[j]) * broadcast<T>(scale_log2));
    }
}

template <typename T, int kUsedVecs>
FLASH_INLINE void update_sum(const Vec<T> *sum, const Vec<T> *alpha, SoftmaxState<T> state) {
#pragma GCC unroll 4
    for (int j = 0; j < kUsedVecs; ++j) {
        T *l = state.l + j * kLanes<T>;
        store<T>(l, fma<T>(load<T>(l), alpha[j], sum[j]));
    }
}

// s becomes p = 2^(scale_log2 * (s - m)); sum is its sum over the keys.
template <typename T, int kPanel, int kUsedVecs>
FLASH_NOINLINE void exponentiate(T *s, int keys, T scale_log2, const Vec<T> *safe_m, Vec<T> *sum) {
    const Vec<T> scale = broadcast<T>(scale_log2);
#pragma GCC unroll 4
    for (int j = 0; j < kUsedVecs; ++j) sum[j] = Vec<T>{};
#pragma GCC unroll 2
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) {
            T *s_n = s + n * kPanel + j * kLanes<T>;
            const Vec<T> p = exp2_nonpositive((load<T>(s_n) - safe_m[j]) * scale);
            store<T>(s_n, p);
            sum[j] += p;
        }
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
