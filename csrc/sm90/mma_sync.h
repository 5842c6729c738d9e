// A product of one warp on the tensor cores by mma.sync, which needs no other warp of the warpgroup.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/tensor.hpp>

#include <type_traits>

#include "layout.h"

namespace flash::sm90 {

using namespace cute;

// acc = A B^T for this warp's 16 of the 64 rows, where A (64, HD) and B (N, HD) lie in shared memory. acc: a wgmma
// accumulator of (64, N); its registers are those of mma.m16n8k16, 8 columns after 8 columns.
template <typename Element, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void multiply_by_mma_sync(const TensorA &sA, const TensorB &sB, TensorC &acc) {
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
    constexpr int kColumns = decltype(size<0>(sB))::value, kHeadDim = decltype(size<1>(sB))::value;
    const int row = first_row_of_thread(), column = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const auto load = [](const auto &sX, int row, int col) {
        return *reinterpret_cast<const uint32_t *>(&sX(row, col));
    };
    clear(acc);
    CUTE_NO_UNROLL
    for (int k = pair; k < kHeadDim; k += 16) {
        const uint32_t a[4] = {load(sA, row, k), load(sA, row + 8, k), load(sA, row, k + 8), load(sA, row + 8, k + 8)};
        CUTE_UNROLL
        for (int n = 0; n < kColumns / 8; ++n) {
            const uint32_t b[2] = {load(sB, n * 8 + column, k), load(sB, n * 8 + column, k + 8)};
            float &c0 = acc(4 * n), &c1 = acc(4 * n + 1), &c2 = acc(4 * n + 2), &c3 = acc(4 * n + 3);
            Mma::fma(c0, c1, c2, c3, a[0], a[1], a[2], a[3], b[0], b[1], c0, c1, c2, c3);
        }
    }
}

}  // namespace flash::sm90
