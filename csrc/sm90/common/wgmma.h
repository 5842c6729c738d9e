// Products of a warpgroup by wgmma: issue, wait, and clear rows of an operand in shared memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "named_barriers.h"

namespace flash::sm90 {

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

// Waits until at most kInFlight products are under way. The product into `acc` is then complete.
template <int kInFlight, typename TensorC>
__device__ __forceinline__ void wait_for(TensorC &acc) {
    warpgroup_wait<kInFlight>();
    warpgroup_fence_operand(acc);
}

// Writes zeros to the rows of sX (rows, headdim) before `begin` and from `end` on. Every warpgroup writes them for
// itself, so that none waits for another.
template <typename Traits, typename TensorX>
__device__ __forceinline__ void clear_rows_outside(int begin, int end, TensorX &&sX, int warpgroup) {
    constexpr int kRows = decltype(size<0>(sX))::value, kVectors = Traits::kHeadDim / 8;
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
template <typename Traits, typename TensorX>
__device__ __forceinline__ void clear_rows_from(int rows, TensorX &&sX, int warpgroup) {
    clear_rows_outside<Traits>(0, rows, sX, warpgroup);
}

}  // namespace flash::sm90
