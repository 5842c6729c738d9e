// A wgmma accumulator: views of it as rows and columns for the softmax and as the A operand of the next product, and
// the mask.
#pragma once

#include <cute/tensor.hpp>

#include <cstdint>

namespace flash::sm90 {

using namespace cute;

// Each thread holds columns of two of a warpgroup's 64 rows: this one and the one 8 further on.
__device__ __forceinline__ int first_row_of_thread() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// ((2, 2, N / 8), MMA_M, MMA_N) -> (row=(2, MMA_M), col=(2, (N / 8, MMA_N))): like sm80's, with the n8 pieces as a
// mode.
template <typename Layout0>
CUTE_HOST_DEVICE auto rowcol_layout(Layout0 acc) {
    return make_layout(make_layout(get<0, 1>(acc), get<1>(acc)),
                       make_layout(get<0, 0>(acc), make_layout(get<0, 2>(acc), get<2>(acc))));
}

// ((2, 2, N / 8), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, (N / 16, MMA_N)): two n8 pieces side by side are one k16 operand.
template <typename Layout0>
CUTE_HOST_DEVICE auto operand_A_layout(Layout0 acc) {
    auto split = logical_divide(get<0, 2>(acc), Layout<_2>{});  // (2, N / 16)
    return make_layout(make_layout(get<0, 0>(acc), get<0, 1>(acc), get<0>(split)), get<1>(acc),
                       coalesce(make_layout(get<1>(split), get<2>(acc))));
}

// ---- the mask: scores become -inf. The columns that a thread holds of a row are the bits of a word: both ends of the
// row's keys cost two instructions, and each score one.

// The number of this thread's columns of a row that lie before `key` (counted from the tile's first key). A thread
// holds the columns 2 q and 2 q + 1 of every 8, where q is its lane in its quad.
__device__ __forceinline__ int columns_before(int key) {
    const int shifted = key - static_cast<int>(threadIdx.x % 4) * 2;
    return max((shifted >> 3) * 2 + min(shifted & 7, 2), 0);
}

// Bits [begin, end) of a word of 32 bits.
__device__ __forceinline__ uint32_t bits_between(int begin, int end) {
    uint32_t bits;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(max(end - begin, 0)));
    return bits;
}

// scores: (row, col); row i sees the keys [begin_key(i), end_key(i)), counted from the tile's first.
template <typename TensorS, typename Begin, typename End>
__device__ __forceinline__ void apply_mask(TensorS &scores, const Begin &begin_key, const End &end_key) {
    static_assert(decltype(size<1>(scores))::value <= 32, "one bit per column");
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
        const uint32_t visible = bits_between(columns_before(begin_key(row)), columns_before(end_key(row)));
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            scores(row, col) = visible & (1u << col) ? scores(row, col) : -INFINITY;
        }
    }
}

// The same for a tile that begins at first_key. keys_of(i): the VisibleKeys of row i.
template <typename TensorS, typename KeysOf>
__device__ __forceinline__ void apply_ranges(TensorS &scores, int first_key, const KeysOf &keys_of) {
    static_assert(decltype(size<1>(scores))::value <= 32, "one bit per column");
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
        const auto keys = keys_of(row);
        const uint32_t visible =
            bits_between(columns_before(keys.begin0 - first_key), columns_before(keys.end0 - first_key)) |
            bits_between(columns_before(keys.begin1 - first_key), columns_before(keys.end1 - first_key));
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            scores(row, col) = visible & (1u << col) ? scores(row, col) : -INFINITY;
        }
    }
}

}  // namespace flash::sm90
