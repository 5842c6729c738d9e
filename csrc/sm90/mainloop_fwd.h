// What the two kinds of warpgroup do for one block of query rows: the producer has TMA load Q, K and V (load), the
// consumers multiply, and take the softmax of one key block while the tensor cores work on another (mma).
#pragma once

#include <cutlass/numeric_conversion.h>

#include "../common/block_info.h"
#include "../common/mask.h"
#include "kernel_traits.h"
#include "kind.h"
#include "layout.h"
#include "named_barriers.h"
#include "softmax.h"

namespace flash::sm90 {

template <typename Traits>
struct Rings {
    Ring<Traits::kConsumers> q;  // stage: the consumer warpgroup
    Ring<Traits::kStages> k, v;
};

// One thread of the producer: the loads of one block of query rows, in the order in which the consumers need them.
template <typename Traits, Kind kKind, typename Info>
__device__ __forceinline__ void load(const Flash_fwd_params &params, const typename Traits::Copies &copies,
                                     const Info &info, typename Traits::SharedStorage &shared, Rings<Traits> &rings,
                                     int bidb, int bidh, int m_block) {
    using TileQ = typename Traits::TileQ;
    using TileKV = typename Traits::TileKV;
    constexpr bool kVarlen = may_be_varlen(kKind);
    const int bidh_k = bidh / params.h_h_k_ratio;

    // Tensors: as TMA knows them (m), in tiles (g), in shared memory (s). Varlen: sequences are rows of one batch.
    const auto head_of = [&](const auto &copy, int rows, int heads, int bidh, int begin) {
        Tensor mX = copy.get_tma_tensor(make_shape(rows, params.d, heads, kVarlen ? 1 : params.b));
        return domain_offset(make_coord(begin, 0), mX(_, _, bidh, kVarlen ? 0 : bidb));  // (seqlen, d)
    };
    const int rows_q = kVarlen ? int(params.total_q) : params.seqlen_q;
    const int rows_k = kVarlen ? int(params.total_k) : params.seqlen_k;
    Tensor mQ = head_of(copies.q, rows_q, params.h, bidh, info.q_begin);
    Tensor mK = head_of(copies.k, rows_k, params.h_k, bidh_k, info.k_begin);
    Tensor mV = head_of(copies.v, rows_k, params.h_k, bidh_k, info.k_begin);
    Tensor gQ = local_tile(mQ, TileQ{}, make_coord(_, 0));                              // (64, HD, m)
    Tensor gK = local_tile(mK, TileKV{}, make_coord(_, 0));                             // (BLK_N, HD, n)
    Tensor gV = local_tile(mV, TileKV{}, make_coord(_, 0));                             // (BLK_N, HD, n)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});   // (64, HD, consumer)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});  // (BLK_N, HD, stage)
    const auto partition = [](const auto &copy, const auto &gX, const auto &sX) {       // pairs of (TMA, tile)
        return tma_partition(copy, _0{}, Layout<_1>{}, group_modes<0, 2>(sX), group_modes<0, 2>(gX));
    };
    const auto of_Q = partition(copies.q, gQ, sQ);
    const auto of_K = partition(copies.k, gK, sK);
    const auto of_V = partition(copies.v, gV, sV);

    const auto load_tile = [](const auto &tma, auto &ring, auto &barriers, int bytes, const auto &of_X, int tile) {
        uint64_t &full = ring.acquire(barriers, bytes);
        copy(tma.with(full), get<0>(of_X)(_, tile), get<1>(of_X)(_, ring.stage));
        ring.advance();
    };
    const auto load_Q = [&](int warpgroup) {
        load_tile(copies.q, rings.q, shared.q_barriers, Traits::kBytesQ, of_Q,
                  m_block * Traits::kConsumers + warpgroup);
    };
    const auto load_K = [&](int n_block) {
        load_tile(copies.k, rings.k, shared.k_barriers, Traits::kBytesKV, of_K, n_block);
    };
    const auto load_V = [&](int n_block) {
        load_tile(copies.v, rings.v, shared.v_barriers, Traits::kBytesKV, of_V, n_block);
    };

    int n_block = info.n_block_max - 1;
    load_Q(0);
    load_K(n_block);
    for (int warpgroup = 1; warpgroup < Traits::kConsumers; ++warpgroup) {
        load_Q(warpgroup);
    }
    for (; n_block > info.n_block_min; --n_block) {
        load_K(n_block - 1);
        load_V(n_block);
    }
    load_V(n_block);
}

// acc (+)= A B, issued and not waited for.
template <bool kAdds, typename TiledMma, typename TensorA, typename TensorB, typename TensorC>
__device__ __forceinline__ void gemm(const TensorA &A, const TensorB &B, TensorC &acc) {
    TiledMma tiled_mma;
    tiled_mma.accumulate_ = kAdds ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(A); ++k) {
        cute::gemm(tiled_mma, A(_, _, k), B(_, _, k), acc);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
}

// Waits until at most kIn_flight products are under way, among which `acc` is not.
template <int kIn_flight, typename TensorC>
__device__ __forceinline__ void wait_for(TensorC &acc) {
    warpgroup_wait<kIn_flight>();
    warpgroup_fence_operand(acc);
}

// Writes zeros over the rows of sV from `rows` on: those of another sequence, whose NaN or infinity times a probability
// of 0 would not be 0. Every consumer does it for itself, so that none waits for another.
template <typename Traits, typename TensorV>
__device__ __forceinline__ void clear_rows_from(int rows, TensorV &&sV, int warpgroup) {
    using Vector = cute::uint128_t;
    constexpr int kVector = Traits::kVector, kVectors = Traits::kHeadDim / kVector;
    for (int i = threadIdx.x % 128; i < (Traits::kBlockN - rows) * kVectors; i += 128) {
        *reinterpret_cast<Vector *>(&sV(rows + i / kVectors, i % kVectors * kVector)) = Vector{0, 0};
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads it
    sync(Barrier::warpgroup, warpgroup, 128);
}

// One consumer warpgroup: acc_o gets the unnormalised output of its 64 rows, softmax their statistics.
template <typename Traits, Kind kKind, typename Info, typename TensorO, typename SoftmaxState, typename TurnsState>
__device__ __forceinline__ void mma(const Info &info, typename Traits::SharedStorage &shared, Rings<Traits> &rings,
                                    int m_block, int warpgroup, TensorO &acc_o, SoftmaxState &softmax,
                                    const TurnsState &turns) {
    using Element = typename Traits::Element;
    using TiledMmaQK = typename Traits::TiledMmaQK;
    using TiledMmaPV = typename Traits::TiledMmaPV;
    constexpr int kBlockN = Traits::kBlockN, kRows = Traits::kRows;
    const int tidx = threadIdx.x % 128;

    // Shared memory, and what wgmma takes for it: descriptors.
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});    // (64, HD, consumer)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});   // (BLK_N, HD, stage)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});   // (BLK_N, HD, stage)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});  // (HD, BLK_N, stage)
    auto thr_qk = TiledMmaQK{}.get_slice(tidx);
    auto thr_pv = TiledMmaPV{}.get_slice(tidx);
    Tensor tSrQ = thr_qk.make_fragment_A(thr_qk.partition_A(sQ(_, _, warpgroup)));  // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thr_qk.make_fragment_B(thr_qk.partition_B(sK));                   // (MMA, MMA_N, MMA_K, stage)
    Tensor tOrVt = thr_pv.make_fragment_B(thr_pv.partition_B(sVt));                 // (MMA, MMA_N, MMA_K, stage)

    // Registers.
    Tensor acc_s = partition_fragment_C(TiledMmaQK{}, typename Traits::TileS{});       // (MMA, MMA_M, MMA_N)
    Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));          // (row, col)
    Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));    // (row, col)
    Tensor tOrP = make_tensor<Element>(operand_A_layout(acc_s.layout()));              // (MMA, MMA_M, MMA_K)
    Tensor tScS = thr_qk.partition_C(make_identity_tensor(typename Traits::TileS{}));  // (MMA, MMA_M, MMA_N)
    Tensor coords = make_tensor(tScS.data(), rowcol_layout(tScS.layout()));            // (row, col) -> (row, key)

    const auto issue_S = [&] { gemm</*kAdds=*/false, TiledMmaQK>(tSrQ, tSrK(_, _, _, rings.k.stage), acc_s); };
    const auto issue_O = [&](int n_block) {
        rings.v.wait(shared.v_barriers);
        if (may_be_varlen(kKind) && info.seqlen_k < (n_block + 1) * kBlockN) {
            clear_rows_from<Traits>(info.seqlen_k - n_block * kBlockN, sV(_, _, rings.v.stage), warpgroup);
        }
        gemm</*kAdds=*/true, TiledMmaPV>(tOrP, tOrVt(_, _, _, rings.v.stage), acc_o);
    };
    const auto release_K = [&] {
        rings.k.release(shared.k_barriers);
        rings.k.advance();
    };
    const auto release_V = [&] {
        rings.v.release(shared.v_barriers);
        rings.v.advance();
    };
    const auto softmax_step = [&](int n_block) {
        if (info.needs_mask(n_block)) {
            apply_mask<kRows, kBlockN>(scores, coords, info, m_block * Traits::kConsumers + warpgroup, n_block);
        }
        return softmax.step(scores);
    };
    const auto round_P = [&] {  // the registers of S in their order are those of the operand
        constexpr int kCount = decltype(size(acc_s))::value;
        using Rounded = cutlass::Array<Element, kCount>;
        *reinterpret_cast<Rounded *>(tOrP.data()) = cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc_s.data()));
    };

    // The first key block has no product of another beside it.
    int n_block = info.n_block_max - 1;
    Ring<Traits::kConsumers> own_q = rings.q;
    own_q.stage = warpgroup;
    own_q.wait(shared.q_barriers);
    rings.k.wait(shared.k_barriers);
    turns.await();
    issue_S();
    turns.pass();
    wait_for<0>(acc_s);
    release_K();
    softmax_step(n_block);
    round_P();

    // Per step: S of the next block and O of this one are issued together; the softmax runs beside the second.
    for (; n_block > info.n_block_min; --n_block) {
        rings.k.wait(shared.k_barriers);
        turns.await();
        issue_S();
        issue_O(n_block);
        turns.pass();
        wait_for<1>(acc_s);
        release_K();
        const auto rescale = softmax_step(n_block - 1);
        wait_for<0>(acc_o);
        release_V();
        softmax.apply(rescale, acc_o_rowcol);
        round_P();
    }
    issue_O(n_block);
    wait_for<0>(acc_o);
    release_V();
}

}  // namespace flash::sm90
