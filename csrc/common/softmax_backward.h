// The backward of the softmax on the registers of one thread: P = exp(S - lse) and dS = P (dP - delta). Tiles are
// transposed: rows are keys, columns are queries. Derived in docs/algorithm.md.
//
// Tensors have shape (row, col); coords has the same shape and holds (row, col) in the tile. lse and delta are in
// shared memory, one value per query of the tile. Columns 2 i and 2 i + 1 of a thread are neighbouring queries.
#pragma once

#include <cute/tensor.hpp>

#include "dropout.h"
#include "softmax.h"

namespace flash {

using namespace cute;

// Scores become the exponents of P in base 2.
template <typename TensorS, typename TensorC>
__device__ __forceinline__ void to_exponents(TensorS &scores, const TensorC &coords, const float *lse,
                                             float scale_log2) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); col += 2) {
        const float2 lse_pair = *reinterpret_cast<const float2 *>(&lse[get<1>(coords(0, col))]);
        const float lse_log2[2] = {lse_pair.x * float(kLog2e), lse_pair.y * float(kLog2e)};
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            scores(row, col) = scores(row, col) * scale_log2 - lse_log2[0];
            scores(row, col + 1) = scores(row, col + 1) * scale_log2 - lse_log2[1];
        }
    }
}

// The same with a mask, and for scores so large that a float32 is coarser than 1: the product of score and scale is
// rounded as in the forward, so that the difference to lse is right. Query i of the tile sees the keys
// [begin_key(i), end_key(i)) of the tile.
template <typename TensorS, typename TensorC, typename BeginKey, typename EndKey>
__device__ __forceinline__ void to_exponents_with_care(TensorS &scores, const TensorC &coords, const float *lse,
                                                       float scale, const BeginKey &begin_key, const EndKey &end_key) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
        const int query = get<1>(coords(0, col));
        const float lse_query = lse[query];
        const int begin = begin_key(query), end = end_key(query);
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            const int key = get<0>(coords(row, col));
            const float exponent = __fmul_rn(scores(row, col), scale) - lse_query;
            scores(row, col) = key >= begin && key < end ? exponent * float(kLog2e) : -INFINITY;
        }
    }
}

// Exponents become P. Any shape.
template <typename TensorS>
__device__ __forceinline__ void exponentiate(TensorS &scores) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
        scores(i) = exp2_approx(scores(i));
    }
}

// dP starts at -delta, so that the product V dO^T makes it dP - delta. With dropout it starts at 0.
template <typename TensorD, typename TensorC>
__device__ __forceinline__ void start_dp(TensorD &dp, const TensorC &coords, const float *delta, bool has_dropout) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(dp); col += 2) {
        const float2 delta_pair = *reinterpret_cast<const float2 *>(&delta[get<1>(coords(0, col))]);
        CUTE_UNROLL
        for (int row = 0; row < size<0>(dp); ++row) {
            dp(row, col) = has_dropout ? 0.0f : -delta_pair.x;
            dp(row, col + 1) = has_dropout ? 0.0f : -delta_pair.y;
        }
    }
}

// dP - delta becomes dS. Any shape.
template <typename TensorP, typename TensorD>
__device__ __forceinline__ void to_ds(const TensorP &p, TensorD &dp) {
    CUTE_UNROLL
    for (int i = 0; i < size(p); ++i) {
        dp(i) *= p(i);
    }
}

// The same with dropout: dP becomes dS, and dropped probabilities, which mark_dropped_transposed made negative, become
// 0. delta belongs to all keys, dropped or not.
template <typename TensorP, typename TensorD, typename TensorC>
__device__ __forceinline__ void to_ds_with_dropout(TensorP &p, TensorD &dp, const TensorC &coords, const float *delta,
                                                   float rp_dropout) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(dp); ++col) {
        const float delta_query = delta[get<1>(coords(0, col))];
        CUTE_UNROLL
        for (int row = 0; row < size<0>(dp); ++row) {
            const float marked = p(row, col);
            const float dp_kept = is_marked(marked) ? 0.0f : dp(row, col) * rp_dropout;
            dp(row, col) = fabsf(marked) * (dp_kept - delta_query);
            p(row, col) = fmaxf(marked, 0.0f);
        }
    }
}

}  // namespace flash
