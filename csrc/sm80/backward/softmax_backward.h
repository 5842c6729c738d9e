// The backward of the softmax on the registers of one thread: P = exp(S - lse) and dS = P (dP - delta). Tiles are
// transposed: rows are keys, columns are queries. Derived in docs/algorithm.md.
//
// Tensors have shape (row, col); coords has the same shape and holds (row, col) in the tile. lse and delta are in
// shared memory, one value per query of the tile. Columns 2 i and 2 i + 1 of a thread are neighbouring queries.
#pragma once

#include <cute/tensor.hpp>

#include "common/dropout.h"
#include "common/key_ranges.h"
#include "common/softmax.h"

namespace flash::sm80 {

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

// The keys [begin, end) of a tile.
struct KeySpan {
    int begin, end;

    __device__ __forceinline__ bool contains(int key) const { return key >= begin && key < end; }
};

// The keys of a tile that begins at first_key, by key_ranges.
struct KeysOfTile {
    VisibleKeys keys;  // of the sequence
    int first_key;

    __device__ __forceinline__ bool contains(int key) const { return keys.contains(first_key + key); }
};

// The same with a mask, and for scores so large that a float32 is coarser than 1: the product of score and scale is
// rounded as in the forward, so that the difference to lse is right. keys_of(i): the keys of the tile that query i of
// the tile sees, a KeySpan or KeysOfTile. kHasBias: the scores are logits (common/attn_bias.h).
template <bool kHasBias = false, typename TensorS, typename TensorC, typename KeysOf>
__device__ __forceinline__ void to_exponents_with_care(TensorS &scores, const TensorC &coords, const float *lse,
                                                       float scale, const KeysOf &keys_of) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
        const int query = get<1>(coords(0, col));
        const float lse_query = lse[query];
        const auto keys = keys_of(query);
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            const int key = get<0>(coords(row, col));
            const float exponent = __fmul_rn(scores(row, col), scale) - lse_query;
            const float factor = kHasBias ? exponent_factor(lse_query) : float(kLog2e);
            scores(row, col) = keys.contains(key) ? exponent * factor : -INFINITY;
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

// Dropped probabilities get a negative sign (0 becomes -0). p: (row=(2, MMA_N), col=(2, MMA_M)); two consecutive MMA_M
// are 16 consecutive queries. coords: the same layout.
//
// A thread holds one key of a pair (k, k + 1) and both queries (q, q + 1). The bits of these four pairs come from two
// calls of Philox. The lane with the other key needs the same two calls, so each lane makes one and they exchange
// halves.
template <typename TensorP, typename TensorC>
__device__ __forceinline__ void mark_dropped(TensorP &p, const TensorC &coords, const DropoutStream &stream,
                                             unsigned threshold, int first_query, int first_key) {
    static_assert(decltype(size<1, 1>(p))::value % 2 == 0);
    // The parity of the key is the same in every row, because tiles begin at even keys.
    const bool is_odd = get<0>(coords(0, 0)) % 2 != 0;
    CUTE_UNROLL
    for (int m = 0; m < size<0, 1>(p); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < size<1, 1>(p); n += 2) {
            const auto first = coords(make_coord(0, m), make_coord(0, n));
            const Random4 bits = stream.bits(first_query + get<1>(first) + is_odd, first_key + get<0>(first) - is_odd);
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {  // keys 8 apart
                const uint32_t mine = is_odd ? bits.x[2 + i] : bits.x[i];
                const uint32_t theirs = is_odd ? bits.x[i] : bits.x[2 + i];
                const uint32_t other = __shfl_xor_sync(0xffffffffu, theirs, 4);
                const uint32_t of_query[2] = {is_odd ? other : mine, is_odd ? mine : other};
                CUTE_UNROLL
                for (int j = 0; j < 2; ++j) {  // neighbouring queries
                    CUTE_UNROLL
                    for (int e = 0; e < 2; ++e) {  // queries 8 apart
                        float &x = p(make_coord(i, m), make_coord(j, n + e));
                        x = is_below(of_query[j], e == 1, threshold) ? -x : x;
                    }
                }
            }
        }
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

// x, or 0 where x is negative. A NaN stays one, which fmaxf would replace by 0.
__device__ __forceinline__ float positive_part(float x) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(0.0f));
    return result;
}

// The same with dropout: dP becomes dS, and dropped probabilities, which mark_dropped made negative, become
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
            p(row, col) = positive_part(marked);
        }
    }
}

}  // namespace flash::sm80
