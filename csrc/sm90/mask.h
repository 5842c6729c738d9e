// Scores that a row may not see become -inf. The keys of a row that a thread holds are the bits of a word, so that both
// ends of a row's keys cost two instructions, and each score one.
#pragma once

#include <cute/tensor.hpp>

#include <cstdint>

namespace flash::sm90 {

using namespace cute;

// How many of a row's scores that this thread holds belong to keys before `key`, which counts from the tile's first: of
// every 8 keys a thread has two, side by side, at twice its place in its quad.
__device__ __forceinline__ int columns_before(int key) {
    const int shifted = key - static_cast<int>(threadIdx.x % 4) * 2;
    return max((shifted >> 3) * 2 + min(shifted & 7, 2), 0);
}

// Bits [begin, end) of a word; what is past its 32 bits is left out.
__device__ __forceinline__ uint32_t bits_between(int begin, int end) {
    uint32_t bits;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(max(end - begin, 0)));
    return bits;
}

// scores: (row, col); row i sees the keys [begin_key(i), end_key(i)), counted from the tile's first.
template <typename TensorS, typename Begin, typename End>
__device__ __forceinline__ void apply_mask(TensorS &scores, const Begin &begin_key, const End &end_key) {
    static_assert(decltype(size<1>(scores))::value <= 32, "a bit for each");
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
        const uint32_t visible = bits_between(columns_before(begin_key(row)), columns_before(end_key(row)));
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            scores(row, col) = visible & (1u << col) ? scores(row, col) : -INFINITY;
        }
    }
}

}  // namespace flash::sm90
