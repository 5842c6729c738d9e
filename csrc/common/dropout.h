// Dropout of the probabilities in an mma accumulator, with the random bits of philox.h.
#pragma once

#include <cute/tensor.hpp>

#include "philox.h"

namespace flash {

using namespace cute;

// A word holds two 16-bit numbers: whether the upper or the lower one is below the threshold.
__device__ __forceinline__ bool is_below(uint32_t both, bool upper, unsigned threshold) {
    return (upper ? both : both << 16) < threshold << 16;
}

// Forward: dropped probabilities become 0. p: (row=(2, MMA_M), col=(2, MMA_N)), the layout of rowcol_layout. Rows are
// queries, columns are keys; two consecutive MMA_N are 16 consecutive keys. coords: the same layout, holding (row, col)
// in a tile that begins at first_query and first_key.
template <typename TensorP, typename TensorC>
__device__ __forceinline__ void drop(TensorP &p, const TensorC &coords, const DropoutStream &stream, unsigned threshold,
                                     int first_query, int first_key) {
    static_assert(decltype(size<1, 1>(p))::value % 2 == 0);
    CUTE_UNROLL
    for (int m = 0; m < size<0, 1>(p); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < size<1, 1>(p); n += 2) {
            const auto first = coords(make_coord(0, m), make_coord(0, n));
            const Random4 bits = stream.bits(first_query + get<0>(first), first_key + get<1>(first));
            CUTE_UNROLL
            for (int word = 0; word < 4; ++word) {
                CUTE_UNROLL
                for (int i = 0; i < 2; ++i) {  // queries 8 apart
                    float &x = p(make_coord(i, m), make_coord(word / 2, n + word % 2));
                    x = is_below(bits.x[word], i == 1, threshold) ? 0.0f : x;
                }
            }
        }
    }
}

// Backward: dropped probabilities get a negative sign (0 becomes -0). p: (row=(2, MMA_N), col=(2, MMA_M)). Rows are
// keys, columns are queries; two consecutive MMA_M are 16 consecutive queries. coords: the same layout, holding (row,
// col).
//
// A thread holds one key of a pair (k, k + 1) and both queries (q, q + 1). The bits of these four pairs come from two
// calls of Philox. The lane with the other key needs the same two calls, so each lane makes one and they exchange
// halves.
template <typename TensorP, typename TensorC>
__device__ __forceinline__ void mark_dropped_transposed(TensorP &p, const TensorC &coords, const DropoutStream &stream,
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

__device__ __forceinline__ bool is_marked(float p) {
    return __float_as_int(p) < 0;
}

}  // namespace flash
