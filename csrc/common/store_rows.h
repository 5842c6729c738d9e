// Rows of an accumulator of wgmma or mma.sync, from registers to global memory. A thread holds the columns 2 q and
// 2 q + 1 of every 8 columns of a row, where q is its lane in its quad.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include <cstdint>

namespace flash {

using namespace cute;

// Transposes a square matrix: each of kLanes neighbouring lanes holds a column before, and a row after.
template <int kLanes>
__device__ __forceinline__ void transpose_among_lanes(uint32_t (&words)[kLanes]) {
    CUTE_UNROLL
    for (int mask = 1; mask < kLanes; mask *= 2) {
        const bool is_upper = threadIdx.x & mask;
        CUTE_UNROLL
        for (int j = 0; j < kLanes; ++j) {
            if ((j & mask) == 0) {
                uint32_t &low = words[j], &high = words[j + mask];
                const uint32_t got = __shfl_xor_sync(0xffffffffu, is_upper ? low : high, mask);
                low = is_upper ? got : low;
                high = is_upper ? high : got;
            }
        }
    }
}

// Rounds row i of acc (row, col) times `factor` to Element, and passes it on as store(first column, vector). The
// transposition gives a lane the adjacent columns of a vector, 8 or 16 bytes.
template <typename Element, typename Vector, typename TensorX, typename Store>
__device__ __forceinline__ void store_row(const TensorX &acc, int i, float factor, const Store &store) {
    using Pair = cutlass::Array<Element, 2>;
    constexpr int kColumns = decltype(size<1>(acc))::value * 4;
    constexpr int kVector = sizeof(Vector) / sizeof(Element), kLanes = kVector / 2;
    const int quad = threadIdx.x % 4;
    const int of_lane = quad % kLanes * 8 + quad / kLanes * kVector;
    CUTE_UNROLL
    for (int col = 0; col < kColumns; col += 8 * kLanes) {
        uint32_t words[kLanes];
        CUTE_UNROLL
        for (int j = 0; j < kLanes; ++j) {
            const int at = col / 4 + 2 * j;
            const Pair pair = cutlass::NumericArrayConverter<Element, float, 2>::convert(
                {acc(i, at) * factor, acc(i, at + 1) * factor});
            words[j] = reinterpret_cast<const uint32_t &>(pair);
        }
        transpose_among_lanes(words);
        store(col + of_lane, reinterpret_cast<const Vector &>(words));
    }
}

}  // namespace flash
