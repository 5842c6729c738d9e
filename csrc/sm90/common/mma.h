// Products of tiles in shared memory: by wgmma, and of a single warp by mma.sync.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>
#include <cute/arch/mma_sm80.hpp>
#include <cute/tensor.hpp>

#include <type_traits>

#include "pipeline.h"

namespace flash::sm90 {

// ---- products of a warpgroup by wgmma: issue, wait, and clear rows of an operand in shared memory

using namespace cute;

// Issues acc = A B, or acc += A B if `accumulates`, without waiting for it.
template <typename TiledMma, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void issue(bool accumulates, const TensorA &A, const TensorB &B, TensorC &acc) {
    // Without CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, CuTe has few wgmma widths and cuts other tiles into narrow pieces.
    static_assert(decltype(size<1>(B))::value == 1, "one wgmma has all columns of the tile");
    TiledMma tiled_mma;
    tiled_mma.accumulate_ = accumulates ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(A); ++k) {
        cute::gemm(tiled_mma, A(_, _, k), B(_, _, k), acc);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
}

// Waits until at most kInFlight products are in flight. The product into `acc` is then complete.
template <int kInFlight, typename TensorC>
__device__ __forceinline__ void wait_for(TensorC &acc) {
    warpgroup_wait<kInFlight>();
    warpgroup_fence_operand(acc);
}

// Writes zeros to the rows of sX (rows, headdim) before `begin` and from `end` on. Every warpgroup writes them for
// itself, so that none waits for another.
template <typename TensorX>
__device__ __forceinline__ void clear_rows_outside(int begin, int end, TensorX &&sX, int warpgroup) {
    constexpr int kRows = decltype(size<0>(sX))::value, kVectors = decltype(size<1>(sX))::value / 8;
    begin = min(max(begin, 0), kRows);
    end = max(end, begin);
    for (int i = threadIdx.x % 128; i < (begin + max(kRows - end, 0)) * kVectors; i += 128) {
        const int row = i / kVectors;
        *reinterpret_cast<uint4 *>(&sX(row < begin ? row : row - begin + end, i % kVectors * 8)) = {};
    }
    cutlass::arch::fence_view_async_shared();  // before wgmma reads them
    sync(Barrier::warpgroup, warpgroup, 128);
}

// The same for the rows from `rows` on, which belong to another sequence.
template <typename TensorX>
__device__ __forceinline__ void clear_rows_from(int rows, TensorX &&sX, int warpgroup) {
    clear_rows_outside(0, rows, sX, warpgroup);
}

// ---- a product of one warp by mma.sync. Unlike wgmma it needs no other warp, and may run while a wgmma is in flight

// acc = A B^T for this warp's 16 of the 64 rows. A (64, HD) and B (N, HD) lie in shared memory in the layouts of
// Traits. acc (row, col): a wgmma accumulator of (64, N). Its registers are those of m16n8k16, 8 columns after 8
// columns. Rare, and inside a loop that has no register left: the loop over the head dim stays rolled, and the thread's
// number is read here, so that the compiler computes no address ahead.
template <typename Traits, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void multiply_by_mma_sync(const TensorA &sA, const TensorB &sB, TensorC &acc) {
    using Element = typename Traits::Element;
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
    constexpr int kColumns = decltype(size<0>(sB))::value;
    constexpr int kSixteenRows = 16 * Traits::kSmemRow * sizeof(Element);  // bytes: the swizzle repeats every 8 rows
    static_assert(kColumns % 16 == 0);
    const auto load = [](uint32_t (&values)[4], uint32_t address) {  // four matrices of 8 x 8
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                     : "r"(address));
    };
    clear(acc);
    CUTE_NO_UNROLL
    for (int k = 0; k < Traits::kHeadDim; k += 16) {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int lane = thread % 32;
        uint32_t a[4], b[4];
        load(a, cast_smem_ptr_to_uint(&sA(thread % 128 / 32 * 16 + lane % 16, k + lane / 16 * 8)));
        const uint32_t keys = cast_smem_ptr_to_uint(&sB(lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
        CUTE_UNROLL
        for (int n = 0; n < kColumns / 16; ++n) {
            load(b, keys + n * kSixteenRows);
            CUTE_UNROLL
            for (int half = 0; half < 2; ++half) {
                const int col = 4 * n + 2 * half;
                Mma::fma(acc(0, col), acc(0, col + 1), acc(1, col), acc(1, col + 1), a[0], a[1], a[2], a[3],
                         b[2 * half], b[2 * half + 1], acc(0, col), acc(0, col + 1), acc(1, col), acc(1, col + 1));
            }
        }
    }
}

}  // namespace flash::sm90
