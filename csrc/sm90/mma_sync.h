// A product of one warp on the tensor cores by mma.sync, which needs no other warp of the warpgroup.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/tensor.hpp>

#include <type_traits>

namespace flash::sm90 {

using namespace cute;

// acc = A B^T for this warp's 16 of the 64 rows, where A (64, HD) and B (N, HD) lie in shared memory, in the swizzled
// layouts of Traits. acc: a wgmma accumulator of (64, N); its registers are those of mma.m16n8k16, 8 columns after 8
// columns. It is called rarely and within register-bound loops, so it keeps no address alive outside of itself.
template <typename Traits, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void multiply_by_mma_sync(const TensorA &sA, const TensorB &sB, TensorC &acc) {
    using Element = typename Traits::Element;
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
    constexpr int kColumns = decltype(size<0>(sB))::value, kHeadDim = Traits::kHeadDim;
    constexpr int kEightRows = 8 * Traits::kSmemRow * sizeof(Element);  // bytes: the swizzle repeats every 8 rows
    const auto load = [](uint32_t address, int offset) {
        uint32_t both;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(address + offset));
        return both;
    };
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int row = thread % 128 / 32 * 16 + thread % 32 / 4, column = thread % 32 / 4, pair = thread % 4 * 2;
    clear(acc);
    CUTE_NO_UNROLL
    for (int k = pair; k < kHeadDim; k += 16) {
        const uint32_t a_low = cast_smem_ptr_to_uint(&sA(row, k)), a_high = cast_smem_ptr_to_uint(&sA(row, k + 8));
        const uint32_t b_low = cast_smem_ptr_to_uint(&sB(column, k)),
                       b_high = cast_smem_ptr_to_uint(&sB(column, k + 8));
        const uint32_t a[4] = {load(a_low, 0), load(a_low, kEightRows), load(a_high, 0), load(a_high, kEightRows)};
        CUTE_UNROLL
        for (int n = 0; n < kColumns / 8; ++n) {
            float &c0 = acc(4 * n), &c1 = acc(4 * n + 1), &c2 = acc(4 * n + 2), &c3 = acc(4 * n + 3);
            Mma::fma(c0, c1, c2, c3, a[0], a[1], a[2], a[3], load(b_low, n * kEightRows), load(b_high, n * kEightRows),
                     c0, c1, c2, c3);
        }
    }
}

}  // namespace flash::sm90
