// The two matrix products of a step with multiply-add (float, double; 16-bit types after conversion). Queries are in
// the lanes of the vectors: a row of registers is a panel of kFmaPanel queries. Numbers of K (first product) or V
// (second) are broadcast one at a time. So neither K nor V is transposed, and the softmax needs no sum across lanes.
#pragma once

#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Register tile: kTile x kVecs accumulators. 24 of the 32 registers of AVX-512 and NEON, 12 of the 16 of AVX2 and SSE2.
constexpr int kVecs = 3;
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
constexpr int kTile = 8;
#else
constexpr int kTile = 4;
#endif

template <typename T>
constexpr int kFmaPanel = kVecs * kLanes<T>;  // queries

// Scores [kFmaBlockN][kFmaPanel] (18 KB with AVX-512) stay in the first-level cache between the products.
constexpr int kFmaBlockN = 96;

// A score is the sum of partial sums over kDotSteps head dims. At d = 240 this halves the error of gradients through a
// peaked softmax. Partial sums of 64 would cost the forward 2 % at d = 96. The backward uses the same partial sums,
// because its scores must have the bits that the forward's lse was computed from.
constexpr int kDotSteps = 128;

// s[key][query] = k . q for kKeys keys, and row_max[query] = max(row_max, s). If fewer than kKeys keys are left, the
// last one is repeated: that changes no maximum, and its extra rows of s are not read.
template <typename T, int kUsedVecs, int kKeys = kTile>
FLASH_NOINLINE void scores_tile(const T *k_row, int64_t k_stride, int keys, const T *q /* [d][kFmaPanel] */, int d,
                                T *s /* [kKeys][kFmaPanel] */, Vec<T> *row_max) {
    const T *k[kKeys];
    Vec<T> acc[kKeys][kUsedVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) k[i] = k_row + (i < keys ? i : keys - 1) * k_stride;
    int begin = 0;
    do {  // d is at least 1
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < kUsedVecs; ++j) acc[i][j] = Vec<T>{};
        }
        for (int c = begin; c < std::min(begin + kDotSteps, d); ++c) {
            Vec<T> x[kUsedVecs];
#pragma GCC unroll 4
            for (int j = 0; j < kUsedVecs; ++j) x[j] = load<T>(q + c * kFmaPanel<T> + j * kLanes<T>);
#pragma GCC unroll 8
            for (int i = 0; i < kKeys; ++i) {
                const Vec<T> y = broadcast<T>(k[i][c]);
#pragma GCC unroll 4
                for (int j = 0; j < kUsedVecs; ++j) acc[i][j] = fma<T>(y, x[j], acc[i][j]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < kUsedVecs; ++j) {
                T *target = s + i * kFmaPanel<T> + j * kLanes<T>;
                if (begin > 0) acc[i][j] += load<T>(target);
                store<T>(target, acc[i][j]);
            }
        }
        begin += kDotSteps;
    } while (begin < d);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) row_max[j] = max<T>(acc[i][j], row_max[j]);
    }
}

template <typename T>
struct Strip {
    typedef T Vec __attribute__((vector_size(kTile * sizeof(T)), may_alias, aligned(sizeof(T))));
};

// Writes the row of one key in the layout of V in output_tile: strips[column / kTile][key][column % kTile] =
// row[column]. Columns past d are 0. check becomes NaN if the row holds an infinity or a NaN.
template <typename T>
FLASH_INLINE void row_to_strips(const T *row, int d, int64_t strip_stride, T *strips, typename Strip<T>::Vec &check) {
    using StripVec = typename Strip<T>::Vec;
    for (; d > 0; d -= kTile, row += kTile, strips += strip_stride) {
        StripVec x{};
        if (d >= kTile)
            x = *reinterpret_cast<const StripVec *>(row);
        else
            std::memcpy(&x, row, sizeof(T) * size_t(d));
        *reinterpret_cast<StripVec *>(strips) = x;
        check += x * T(0);
    }
}

// acc[column][query] += sum of v[key][column] * p[key][query] over the keys from n on, for the vectors of queries from
// kFirstVec on. kSkipZeros: a key whose p is 0 adds nothing even if its v is infinite or NaN.
template <typename T, int kUsedVecs, bool kSkipZeros, int kFirstVec = 0>
FLASH_INLINE void add_seen_values(const T *p, const T *v, int64_t n, const int64_t *keys,
                                  Vec<T> (&acc)[kTile][kUsedVecs]) {
    for (const int64_t end = keys[kFirstVec]; n < end; ++n) {
        Vec<T> x[kUsedVecs];
#pragma GCC unroll 4
        for (int j = kFirstVec; j < kUsedVecs; ++j) x[j] = load<T>(p + n * kFmaPanel<T> + j * kLanes<T>);
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
            const Vec<T> y = broadcast<T>(v[n * kTile + i]);
#pragma GCC unroll 4
            for (int j = kFirstVec; j < kUsedVecs; ++j) {
                const Vec<T> sum = fma<T>(y, x[j], acc[i][j]);
                acc[i][j] = kSkipZeros ? (x[j] == Vec<T>{} ? acc[i][j] : sum) : sum;
            }
        }
    }
    if constexpr (kFirstVec + 1 < kUsedVecs)
        add_seen_values<T, kUsedVecs, kSkipZeros, kFirstVec + 1>(p, v, n, keys, acc);
}

// o[column][query] = alpha[query] * o + sum over keys of v[key][column] * p[key][query], for kTile columns. keys: for
// each vector of queries; they rise. Every query has one sum over its keys, so its bits do not depend on the keys of
// other queries.
template <typename T, int kUsedVecs, bool kSkipZeros>
FLASH_NOINLINE void output_tile(const T *p /* [keys][kFmaPanel] */, const T *v /* [keys][kTile] */, const int64_t *keys,
                                const Vec<T> *alpha, T *o /* [kTile][kFmaPanel] */) {
    Vec<T> acc[kTile][kUsedVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j)
            acc[i][j] = Vec<T>{};  // not o: a separate sum for each step keeps rounding errors small
    }
    add_seen_values<T, kUsedVecs, kSkipZeros>(p, v, 0, keys, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) {
            T *target = o + i * kFmaPanel<T> + j * kLanes<T>;
            store<T>(target, fma<T>(alpha[j], load<T>(target), acc[i][j]));
        }
    }
}

// The products of the backward, all of one form: out[i][column] (+)= sum over n of a(i, n) * x[n][column], columns in
// the lanes.

// Register tile of products whose columns are head dims: as many accumulators as kTile x kVecs.
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
constexpr int kWideVecs = 4;
#else
constexpr int kWideVecs = 2;
#endif
constexpr int kWideTile = kTile * kVecs / kWideVecs;  // 6

template <typename T>
struct BroadcastOperand {  // a(i, n) = ptr[i * row_stride + n * step_stride]
    const T *ptr;
    int64_t row_stride, step_stride;
};

template <typename T>
struct VectorRows {  // [n][column], every row aligned to kVecBytes
    T *ptr;
    int64_t stride;
};

template <typename T, int kRows, int kUsedVecs, bool kAdd>
FLASH_NOINLINE void product_tile(BroadcastOperand<T> a, VectorRows<const T> x, int steps, VectorRows<T> out) {
    const T *a_row[kRows];
    Vec<T> acc[kRows][kUsedVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
        a_row[i] = a.ptr + i * a.row_stride;
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) {
            acc[i][j] = Vec<T>{};  // not out: a separate sum for each step keeps rounding errors small
            if (kAdd) __builtin_prefetch(out.ptr + i * out.stride + j * kLanes<T>, 1);
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < steps; ++n) {
        Vec<T> x_n[kUsedVecs];
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) x_n[j] = load<T>(x.ptr + n * x.stride + j * kLanes<T>);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const Vec<T> a_in = broadcast<T>(a_row[i][n * a.step_stride]);
#pragma GCC unroll 4
            for (int j = 0; j < kUsedVecs; ++j) acc[i][j] = fma<T>(a_in, x_n[j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kUsedVecs; ++j) {
            T *target = out.ptr + i * out.stride + j * kLanes<T>;
            store<T>(target, kAdd ? load<T>(target) + acc[i][j] : acc[i][j]);
        }
    }
}

// The first `vecs` vectors of columns, at most kMaxVecs.
template <typename T, int kRows, int kMaxVecs, bool kAdd>
FLASH_INLINE void product_columns(int vecs, BroadcastOperand<T> a, VectorRows<const T> x, int steps,
                                  VectorRows<T> out) {
    if constexpr (kMaxVecs > 1) {
        if (vecs < kMaxVecs) return product_columns<T, kRows, kMaxVecs - 1, kAdd>(vecs, a, x, steps, out);
    }
    product_tile<T, kRows, kMaxVecs, kAdd>(a, x, steps, out);
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
