// The loop over key blocks for one block of query rows: Q K^T on tensor cores, online softmax, P V, with K and V
// brought in by cp.async one product ahead. Called by compute_attn_1rowblock; leaves O in registers.
#pragma once

#include "../common/block_info.h"
#include "../common/dropout.h"
#include "layout.h"
#include "mask.h"
#include "../common/score_mod.h"
#include "../common/softmax.h"
#include "copy.h"
#include "kernel_traits.h"

namespace flash::sm80 {

// acc_o (MMA, MMA_M, MMA_K) gets the unnormalised output, softmax its row statistics. Softcap, ALiBi and dropout
// are decided at run time in the kinds that have them.
template <typename Traits, Kind kKind, typename Info, typename SharedStorage, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void mainloop_fwd(const Flash_fwd_params &params, const Info &info, SharedStorage &shared,
                                             int bidb, int bidh, int m_block, TensorO &acc_o, SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    constexpr bool kSparesRegisters = Traits::Tile::kSparesRegisters;
    constexpr int kQSteps = Traits::Tile::kQStepsInRegisters;
    const int tidx = threadIdx.x;
    const int bidh_k = bidh / params.h_h_k_ratio;

    // Tensors: global (g), shared (s).
    Tensor mQ = head_tensor<Element>(params.q, bidb, bidh, info.q_begin, info.seqlen_q, params.d);    // (seqlen_q, d)
    Tensor mK = head_tensor<Element>(params.k, bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);  // (seqlen_k, d)
    Tensor mV = head_tensor<Element>(params.v, bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);  // (seqlen_k, d)
    Tensor gQ = local_tile(mQ, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(m_block, 0));         // (BLK_M, HD)
    Tensor gK = local_tile(mK, Shape<Int<kBlockN>, Int<kHeadDim>>{}, make_coord(_, 0));               // (BLK_N, HD, n)
    Tensor gV = local_tile(mV, Shape<Int<kBlockN>, Int<kHeadDim>>{}, make_coord(_, 0));               // (BLK_N, HD, n)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});                 // (BLK_M, HD)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});                // (BLK_N, HD)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});                // (BLK_N, HD)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});               // (HD, BLK_N)

    // Copies from global to shared memory.
    typename Traits::GmemTiledCopyQKV gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(tidx);
    Tensor cQ = make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (BLK_M, HD) -> (row, column)
    Tensor cK = make_identity_tensor(Shape<Int<kBlockN>, Int<kHeadDim>>{});  // (BLK_N, HD) -> (key, column)
    Tensor tQcQ = thr_gmem_copy.partition_S(cQ);                             // (CPY, CPY_M, CPY_K)
    Tensor column_in_range = make_tensor<bool>(make_shape(size<2>(tQcQ)));   // (CPY_K)
    CUTE_UNROLL
    for (int col = 0; col < size(column_in_range); ++col) {
        column_in_range(col) = get<1>(tQcQ(0, 0, col)) < params.d;
    }

    // Products, and copies from shared memory to registers.
    typename Traits::TiledMma tiled_mma;
    auto thr_mma = tiled_mma.get_thread_slice(tidx);
    Tensor tSrQ = thr_mma.partition_fragment_A(sQ);    // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thr_mma.partition_fragment_B(sK);    // (MMA, MMA_N, MMA_K)
    Tensor tOrVt = thr_mma.partition_fragment_B(sVt);  // (MMA, MMA_K, MMA_N)
    auto smem_copy_Q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, tiled_mma);
    auto smem_copy_K = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, tiled_mma);
    auto smem_copy_V = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, tiled_mma);
    auto thr_copy_V = smem_copy_V.get_thread_slice(tidx);
    Tensor tOsVt = thr_copy_V.partition_S(sVt);  // (CPY, CPY_K, CPY_N)
    Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));

    // Starts the copy of one key block of K or V; keys past the end of the sequence arrive as zeros.
    auto load_KV = [&](const TensorRef &x, auto const &gX, auto const &sX, int n_block) {
        auto thr_copy = gmem_copy.get_thread_slice(thread_index<kSparesRegisters>());
        if (kKind == Kind::paged) {
            const Element *head = static_cast<const Element *>(x.ptr) + bidh_k * x.head_stride;
            const int *pages = params.block_table + bidb * params.block_table_batch_stride;
            copy_paged_tile_async(gmem_copy, x, head, pages, params.page_size, thr_copy.partition_D(sX),
                                  thr_copy.partition_S(cK), column_in_range, n_block * kBlockN, info.seqlen_k);
            cp_async_fence();
            return;
        }
        copy_tile_async(gmem_copy, thr_copy.partition_S(gX(_, _, n_block)), thr_copy.partition_D(sX),
                        thr_copy.partition_S(cK), column_in_range, info.seqlen_k - n_block * kBlockN);
        cp_async_fence();
    };

    auto coords_of_scores = [&](int thread) {                                   // (row, col) -> (row, key)
        Tensor cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});  // (BLK_M, BLK_N)
        Tensor tScS = tiled_mma.get_thread_slice(thread).partition_C(cS);       // (MMA, MMA_M, MMA_N)
        return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
    };

    // One key block. On entry K(n_block) is on its way and nobody reads V's room any more.
    auto step = [&](int n_block) {
        cp_async_wait<0>();
        __syncthreads();  // K has landed for all; all are done with the V of the step before
        load_KV(params.v, gV, sV, n_block);

        Tensor acc_s = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
        clear(acc_s);
        gemm<kQSteps>(acc_s, tSrQ, tSrK, sQ, sK, tiled_mma, smem_copy_Q, smem_copy_K,
                       thread_index<kSparesRegisters>());
        cp_async_wait<0>();
        __syncthreads();  // V has landed for all; all are done with K
        if (n_block > info.n_block_min) {
            load_KV(params.k, gK, sK, n_block - 1);
        }

        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        if (is_general(kKind) && ScoreMod::is_on(params)) {
            const ScoreMod mod(params, bidb, bidh, info.seqlen_k - info.seqlen_q);
            mod.apply</*kTransposed=*/false>(scores, coords_of_scores(thread_index<true>()), coords_of_scores(0),
                                             m_block * kBlockM, n_block * kBlockN, [](int, int, float) {});
        }
        if (info.needs_mask(n_block)) {
            apply_mask<kBlockM, kBlockN>(scores, coords_of_scores(thread_index<true>()), info, m_block, n_block);
        }
        softmax.step(scores, acc_o_rowcol);
        if (is_general(kKind) && params.rng_state != nullptr) {
            const DropoutStream stream(params.rng_state, bidb, params.h, bidh);
            drop(scores, coords_of_scores(thread_index<true>()), stream, params.dropout_threshold, m_block * kBlockM,
                 n_block * kBlockN);
        }

        Tensor rP = convert_type<Element>(acc_s);                             // (MMA, MMA_M, MMA_N)
        Tensor tOrP = make_tensor(rP.data(), operand_A_layout(rP.layout()));  // (MMA, MMA_M, MMA_K)
        gemm_rs(acc_o, tOrP, tOrVt, tOsVt, tiled_mma, smem_copy_V, thr_copy_V);
    };

    // Prologue: Q, then the last K.
    const int rows_left = info.seqlen_q - m_block * kBlockM;
    copy_tile_async(gmem_copy, thr_gmem_copy.partition_S(gQ), thr_gmem_copy.partition_D(sQ), tQcQ, column_in_range,
                    rows_left);
    cp_async_fence();
    int n_block = info.n_block_max - 1;
    load_KV(params.k, gK, sK, n_block);
    if constexpr (kQSteps > 0) {
        cp_async_wait<1>();
        __syncthreads();  // Q has landed for all
        auto thr_copy_Q = smem_copy_Q.get_thread_slice(tidx);
        Tensor tSsQ = thr_copy_Q.partition_S(sQ);      // (CPY, CPY_M, CPY_K)
        Tensor tSrQ_view = thr_copy_Q.retile_D(tSrQ);  // (CPY, CPY_M, CPY_K)
        CUTE_UNROLL
        for (int k = 0; k < kQSteps; ++k) {
            copy(smem_copy_Q, tSsQ(_, _, k), tSrQ_view(_, _, k));
        }
    }

    // Main loop, from the last key block down, so that the ragged and the causal edge come first.
    for (; n_block >= info.n_block_min; --n_block) {
        step(n_block);
    }
}

}  // namespace flash::sm80
