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

// Backward: a dropped probability has a negative sign (0 becomes -0).
__device__ __forceinline__ bool is_marked(float p) {
    return __float_as_int(p) < 0;
}

}  // namespace flash
