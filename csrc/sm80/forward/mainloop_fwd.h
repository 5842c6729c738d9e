// The loop over key blocks for one block of query rows: S = Q K^T on tensor cores, online softmax, O += P V. cp.async
// loads K and V one product ahead. Called by compute_attn_1rowblock; leaves O in registers.
#pragma once

#include "common/attn_bias.h"
#include "common/block_info.h"
#include "common/dropout.h"
#include "common/key_ranges.h"
#include "common/max_logits.h"
#include "common/score_mod.h"
#include "common/softmax.h"
#include "kernel_traits.h"
#include "sm80/accumulator.h"
#include "sm80/copy.h"

namespace flash::sm80 {

// (row, key) of each score of a thread, in the tile.
template <typename Traits>
__device__ __forceinline__ auto coords_of_scores(int thread) {
    Tensor cS = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});  // (BLK_M, BLK_N)
    Tensor tScS = typename Traits::TiledMma{}.get_thread_slice(thread).partition_C(cS);     // (MMA, MMA_M, MMA_N)
    return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
}

// Score modifiers and the mask. scores: (row, col).
template <typename Traits, Kind kKind, typename Info, typename TensorS>
__device__ __forceinline__ void modify_and_mask(const Flash_fwd_params &params, const Info &info, int bidb, int bidh,
                                                int m_block, int n_block, TensorS &scores) {
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    if (is_general(kKind) && ScoreMod::is_on(params)) {
        const ScoreMod mod(params, bidb, bidh, info.seqlen_k - info.seqlen_q);
        mod.apply</*kTransposed=*/false>(scores, coords_of_scores<Traits>(thread_index<true>()),
                                         coords_of_scores<Traits>(0), m_block * kBlockM, n_block * kBlockN, NoOp{});
    }
    if constexpr (has_bias(kKind)) {
        BiasOfHead<typename Traits::Element>(params, bidb, bidh)
            .template add_to</*kTransposed=*/false>(scores, coords_of_scores<Traits>(thread_index<true>()),
                                                    params.scale_softmax, m_block * kBlockM, n_block * kBlockN);
        if (params.key_ranges.is_used()) {
            apply_mask<kBlockM>(scores, coords_of_scores<Traits>(thread_index<true>()),
                                RangesOfHead(params, bidb, bidh), info.seqlen_q, m_block, n_block * kBlockN);
            return;
        }
    }
    if (info.needs_mask(n_block)) {
        apply_mask<kBlockM, kBlockN>(scores, coords_of_scores<Traits>(thread_index<true>()), info, m_block, n_block);
    }
}

// p: (row, col).
template <typename Traits, Kind kKind, typename TensorP>
__device__ __forceinline__ void drop_probabilities(const Flash_fwd_params &params, int bidb, int bidh, int m_block,
                                                   int n_block, TensorP &p) {
    if (is_general(kKind) && params.rng_state != nullptr) {
        const DropoutStream stream(params.rng_state, bidb, params.h, bidh);
        drop(p, coords_of_scores<Traits>(thread_index<true>()), stream, params.dropout_threshold,
             m_block * Traits::kBlockM, n_block * Traits::kBlockN);
    }
}

// Reads the first kSteps 16-wide slices of Q into registers, where they stay over the loop. Q is the load before the
// last one.
template <int kSteps, typename SmemCopy, typename TensorS, typename TensorR>
__device__ __forceinline__ void read_q(const SmemCopy &smem_copy, const TensorS &sQ, TensorR &rQ) {
    if constexpr (kSteps > 0) {
        cp_async_wait<1>();
        __syncthreads();  // Q has arrived for all threads
        auto thr_copy = smem_copy.get_thread_slice(threadIdx.x);
        Tensor source = thr_copy.partition_S(sQ);  // (CPY, CPY_M, CPY_K)
        Tensor target = thr_copy.retile_D(rQ);     // (CPY, CPY_M, CPY_K)
        CUTE_UNROLL
        for (int k = 0; k < kSteps; ++k) {
            copy(smem_copy, source(_, _, k), target(_, _, k));
        }
    }
}

// Starts the copy of one key block of K or V; keys past the end of the sequence become zeros. x: K or V. gX: (BLK_N,
// HD, n). sX, cK: (BLK_N, HD). column_in_range: (CPY_K).
template <typename Traits, Kind kKind, typename Info, typename TensorG, typename TensorS, typename TensorC,
          typename TensorB>
__device__ __forceinline__ void load_key_block(const Flash_fwd_params &params, const Info &info, int bidb, int bidh_k,
                                               int n_block, const TensorRef &x, const TensorG &gX, const TensorS &sX,
                                               const TensorC &cK, const TensorB &column_in_range) {
    using Element = typename Traits::Element;
    constexpr int kBlockN = Traits::kBlockN;
    typename Traits::GmemTiledCopyQKV gmem_copy;
    auto thr_copy = gmem_copy.get_thread_slice(thread_index<Traits::TileSize::kRecomputesAddresses>());
    if (kKind == Kind::paged) {
        const Element *head = static_cast<const Element *>(x.ptr) + bidh_k * x.head_stride;
        const int *page_table = params.block_table + bidb * params.block_table_batch_stride;
        copy_paged_tile_async(gmem_copy, x, head, page_table, params.num_pages, params.page_size,
                              thr_copy.partition_D(sX), thr_copy.partition_S(cK), column_in_range, n_block * kBlockN,
                              info.k_begin, info.seqlen_k);
    } else {
        copy_tile_async(gmem_copy, thr_copy.partition_S(gX(_, _, n_block)), thr_copy.partition_D(sX),
                        thr_copy.partition_S(cK), column_in_range,
                        RowRange<false>{0, info.seqlen_k - n_block * kBlockN});
    }
    cp_async_fence();
}

// acc_o (MMA, MMA_M, MMA_K) gets the unnormalised output, softmax its row statistics. There is at least one key block.
template <typename Traits, Kind kKind, typename Info, typename SharedStorage, typename TensorO, typename SoftmaxState>
__device__ __forceinline__ void mainloop_fwd(const Flash_fwd_params &params, const Info &info, SharedStorage &shared,
                                             int bidb, int bidh, int m_block, TensorO &acc_o, SoftmaxState &softmax) {
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    constexpr bool kRecomputesAddresses = Traits::TileSize::kRecomputesAddresses;
    constexpr int kQSteps = Traits::TileSize::kQStepsInRegisters;
    const int tidx = threadIdx.x;
    const int bidh_k = bidh / params.h_h_k_ratio;

    // Tensors: global (g), shared (s).
    Tensor mQ = head_tensor<Element>(params.q, bidb, bidh, info.q_begin, info.seqlen_q, params.d);  // (seqlen_q, d)
    Tensor mK =
        head_tensor<Element>(params.k, info.k_bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);  // (seqlen_k, d)
    Tensor mV =
        head_tensor<Element>(params.v, info.k_bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);  // (seqlen_k, d)
    Tensor gQ = local_tile(mQ, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(m_block, 0));        // (BLK_M, HD)
    Tensor gK = local_tile(mK, Shape<Int<kBlockN>, Int<kHeadDim>>{}, make_coord(_, 0));              // (BLK_N, HD, n)
    Tensor gV = local_tile(mV, Shape<Int<kBlockN>, Int<kHeadDim>>{}, make_coord(_, 0));              // (BLK_N, HD, n)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});                // (BLK_M, HD)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});               // (BLK_N, HD)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutKV{});               // (BLK_N, HD)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});              // (HD, BLK_N)

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

    auto load_KV = [&](const TensorRef &x, auto const &gX, auto const &sX, int n_block) {
        load_key_block<Traits, kKind>(params, info, bidb, bidh_k, n_block, x, gX, sX, cK, column_in_range);
    };

    const bool tracks_maximum = is_general(kKind) && MaxLogit::is_on(params);
    MaxLogit max_logit;

    // One key block. On entry K(n_block) is on its way and no thread reads the buffer of V any more.
    auto step = [&](int n_block) {
        cp_async_wait<0>();
        __syncthreads();  // all threads: K has arrived, the product with the V before is done
        load_KV(params.v, gV, sV, n_block);

        Tensor acc_s = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
        clear(acc_s);
        gemm<kQSteps>(acc_s, tSrQ, tSrK, sQ, sK, tiled_mma, smem_copy_Q, smem_copy_K,
                      thread_index<kRecomputesAddresses>());
        cp_async_wait<0>();
        __syncthreads();  // all threads: V has arrived, the product with K is done
        if (n_block > info.n_block_min) {
            load_KV(params.k, gK, sK, info.before(n_block));
        }

        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (row, col)
        modify_and_mask<Traits, kKind>(params, info, bidb, bidh, m_block, n_block, scores);
        const Tensor coords = coords_of_scores<Traits>(thread_index<true>());
        softmax.step(scores, acc_o_rowcol, [&](int row, float maximum) {
            if (tracks_maximum && get<0>(coords(row, 0)) < info.seqlen_q - m_block * kBlockM) {
                max_logit.add(maximum);
            }
        });
        drop_probabilities<Traits, kKind>(params, bidb, bidh, m_block, n_block, scores);

        Tensor rP = convert_type<Element>(acc_s);                             // (MMA, MMA_M, MMA_N)
        Tensor tOrP = make_tensor(rP.data(), operand_A_layout(rP.layout()));  // (MMA, MMA_M, MMA_K)
        gemm_rs(acc_o, tOrP, tOrVt, tOsVt, tiled_mma, smem_copy_V, thr_copy_V);
    };

    // Prologue: Q, then the last K.
    copy_tile_async(gmem_copy, thr_gmem_copy.partition_S(gQ), thr_gmem_copy.partition_D(sQ), tQcQ, column_in_range,
                    RowRange<false>{0, info.seqlen_q - m_block * kBlockM});
    cp_async_fence();
    int n_block = info.n_block_max - 1;
    load_KV(params.k, gK, sK, n_block);
    read_q<kQSteps>(smem_copy_Q, sQ, tSrQ);

    // Main loop, from the last key block down: the steps with a mask come first.
    for (; n_block >= info.n_block_min; n_block = info.before(n_block)) {
        step(n_block);
    }
    if (tracks_maximum) {
        max_logit.store(params, bidb, bidh, has_bias(kKind) ? 1.0f : params.scale_softmax);
    }
}

}  // namespace flash::sm80
