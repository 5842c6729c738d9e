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

// Writes zeros to the rows of sX (rows, headdim) from `rows` on, which belong to another sequence. Every consumer
// writes them for itself, so that none waits for another.
template <typename Traits, typename TensorX>
__device__ __forceinline__ void clear_rows_from(int rows, TensorX &&sX, int warpgroup) {
    using Vector = cute::uint128_t;
    constexpr int kRows = decltype(size<0>(sX))::value;
    constexpr int kVector = sizeof(Vector) / sizeof(typename Traits::Element), kVectors = Traits::kHeadDim / kVector;
    rows = max(rows, 0);
    for (int i = threadIdx.x % 128; i < (kRows - rows) * kVectors; i += 128) {
        *reinterpret_cast<Vector *>(&sX(rows + i / kVectors, i % kVectors * kVector)) = Vector{0, 0};
    }
    cutlass::arch::fence_view_async_shared();  // before wgmma reads them
    sync(Barrier::warpgroup, warpgroup, 128);
}

}  // namespace flash::sm90
