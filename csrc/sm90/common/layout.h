// Views of a wgmma accumulator: rows and columns for the softmax, the A operand of the next product.
#pragma once

#include <cute/tensor.hpp>

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

}  // namespace flash::sm90
