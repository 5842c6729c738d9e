// The loop over blocks of query rows for one block of keys: five products a step, dK and dV gathered in registers, dQ
// added to a float32 accumulator in global memory. Called by compute_dq_dk_dv_1colblock.
//
// Scores are computed transposed, S^T = K Q^T with keys as rows, as their products want them: dV = P^T dO, dK = dS^T Q.
#pragma once

#include "../common/block_info.h"
#include "../common/dropout.h"
#include "../common/score_mod.h"
#include "../common/softmax.h"
#include "copy.h"
#include "kernel_traits_bwd.h"
#include "layout.h"
#include "reduce_dq.h"

namespace flash::sm80 {

// The rounded accumulator of S^T or dP^T goes to shared memory as [keys, queries].
template <typename Traits, typename TensorR, typename TensorS>
__device__ __forceinline__ void store_probabilities(const TensorR &source, TensorS &&target, int thread) {
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, typename Traits::TiledMmaSdP{});
    auto thr_copy = smem_copy.get_thread_slice(thread);
    copy(smem_copy, thr_copy.retile_S(source), thr_copy.partition_D(target));
}

// acc times what this thread stored in `source` by store_probabilities.
template <typename Traits, typename TensorAcc, typename TensorS>
__device__ __forceinline__ void multiply_by_stored(TensorAcc &acc, TensorS &&source, int thread) {
    auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, typename Traits::TiledMmaSdP{});
    auto thr_copy = smem_copy.get_thread_slice(thread);
    Tensor factor = make_tensor<typename Traits::Element>(acc.layout());
    copy(smem_copy, thr_copy.partition_D(source), thr_copy.retile_S(factor));
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
        acc(i) *= float(factor(i));
    }
}

// scores (key, query) become logits. The derivative of softcap, 1 - tanh^2, waits in the room of dS^T, each thread's
// own elements: in registers it would have to last over a product.
template <typename Traits, typename Info, typename TensorS, typename TensorC, typename TensorD>
__device__ __forceinline__ void apply_score_mod(const Flash_bwd_params &params, const Info &info, int bidb, int bidh,
                                                TensorS &scores, const TensorC &coords, const TensorC &offsets,
                                                int first_query, TensorD &&room, int thread) {
    using TileS = Shape<Int<Traits::kBlockN>, Int<Traits::kSliceM>>;
    Tensor derivative = make_tensor<typename Traits::Element>(
        partition_fragment_C(typename Traits::TiledMmaSdP{}, TileS{}).layout());  // (MMA, MMA_N, MMA_M)
    Tensor derivative_rowcol = make_tensor(derivative.data(), rowcol_layout(derivative.layout()));
    const ScoreMod mod(params, bidb, bidh, info.seqlen_k - info.seqlen_q);
    mod.apply</*kTransposed=*/true>(
        scores, coords, offsets, first_query, info.n_block * Traits::kBlockN,
        [&](int row, int col, float t) { derivative_rowcol(row, col) = typename Traits::Element(1.0f - t * t); });
    if (params.softcap_scale != 0.0f) {
        store_probabilities<Traits>(derivative, room, thread);
    }
}

// acc_dk, acc_dv (MMA, MMA_N, MMA_K) get the sums over the query heads [bidh, bidh + params.heads_per_dkv), all of one
// key/value head; dK lacks the factor softmax_scale.
template <typename Traits, Kind kKind, BwdMode kMode, typename Info, typename SharedStorage, typename TensorKV>
__device__ __forceinline__ void mainloop_bwd(const Flash_bwd_params &params, const Info &info, SharedStorage &shared,
                                             int bidb, int bidh, TensorKV &acc_dk, TensorKV &acc_dv) {
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    constexpr int kSliceM = Traits::kSliceM, kSlices = Traits::Tile::kSlices, kStages = Traits::kStages;
    constexpr bool kSparesRegisters = Traits::Tile::kSparesRegisters;
    const int tidx = threadIdx.x;
    const int n_block = info.n_block;
    const int bidh_k = bidh / params.h_h_k_ratio;

    // Global memory.
    using TileQ = Shape<Int<kBlockM>, Int<kHeadDim>>;
    using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
    typename Traits::GmemTiledCopyAsync gmem_copy;
    auto thr_gmem_copy = gmem_copy.get_thread_slice(tidx);
    Tensor tQcQ = thr_gmem_copy.partition_D(make_identity_tensor(TileQ{}));   // (copy, rows, columns)
    Tensor tKcK = thr_gmem_copy.partition_D(make_identity_tensor(TileKV{}));  // (copy, rows, columns)
    Tensor column_in_range = make_tensor<bool>(make_shape(size<2>(tKcK)));
    CUTE_UNROLL
    for (int col = 0; col < size(column_in_range); ++col) {
        column_in_range(col) = get<1>(tKcK(0, 0, col)) < params.d;
    }
    auto load_KV = [&](const TensorRef &x, Element *target) {
        Tensor mX = head_tensor<Element>(x, bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);
        Tensor gX = local_tile(mX, TileKV{}, make_coord(n_block, 0));
        Tensor sX = make_tensor(make_smem_ptr(target), typename Traits::SmemKV::Layout{});
        copy_tile_async(gmem_copy, thr_gmem_copy.partition_S(gX), thr_gmem_copy.partition_D(sX), tKcK, column_in_range,
                        info.seqlen_k - n_block * kBlockN);
    };

    constexpr bool kGeneral = kKind == Kind::general, kAsks = kMode == BwdMode::general;
    const bool wants_dq = !kAsks || params.dq_accum != nullptr;
    const bool wants_dk = !kAsks || params.dk.ptr != nullptr;
    const bool wants_dv = !kAsks || params.dv.ptr != nullptr;
    const bool wants_ds = wants_dq || wants_dk;
    const bool has_score_mod = kGeneral && ScoreMod::is_on(params);
    const bool has_dropout = kGeneral && params.rng_state != nullptr;

    // Of the statistics and of dQ's accumulator, the first padded row of the sequence's first head here.
    const int padded_row = static_cast<int>(bidb * params.padded_batch_stride + bidh * params.padded_head_stride +
                                            padded_begin<may_be_varlen(kKind)>(params, bidb));

    // The steps, flattened: the row blocks of each query head.
    int head = 0, m_block = info.m_block_min;                // of the next load
    int steps = params.heads_per_dkv * info.num_m_blocks();  // left to do
    const auto advance = [&] {
        if (++m_block == info.m_block_max) {
            m_block = info.m_block_min;
            ++head;
        }
    };
    bool next_is_large = false;
    auto load_step = [&](int stage) {
        auto thr_copy = gmem_copy.get_thread_slice(thread_index<kSparesRegisters>());
        const int rows_left = info.seqlen_q - m_block * kBlockM;
        auto load = [&](const TensorRef &x, Element *target) {
            Tensor mX = head_tensor<Element>(x, bidb, bidh + head, info.q_begin, info.seqlen_q, params.d);
            Tensor gX = local_tile(mX, TileQ{}, make_coord(m_block, 0));
            Tensor sX = make_tensor(make_smem_ptr(target), typename Traits::SmemQ::Layout{});
            copy_tile_async(gmem_copy, thr_copy.partition_S(gX), thr_copy.partition_D(sX), tQcQ, column_in_range,
                            rows_left);
        };
        load(params.q, shared.q[stage]);
        load(params.dout, shared.dout[stage]);
        const int first_row = padded_row + head * int(params.padded_head_stride) + m_block * kBlockM;
        constexpr int kFlagRows = Flash_bwd_params::kRowsPerFlag;
        next_is_large = params.large_rows[first_row / kFlagRows] != 0;
        if constexpr (kBlockM > kFlagRows) {
            next_is_large |= params.large_rows[first_row / kFlagRows + 1] != 0;
        }
        // lse and delta, which have kRowsRounded rows and need no bounds: 16 bytes for each of the first threads.
        constexpr int kThreads = kBlockM / 4;
        static_assert(2 * kThreads <= Traits::kNThreads);
        if (tidx < 2 * kThreads) {
            const bool is_lse = tidx < kThreads;
            const int row = (is_lse ? tidx : tidx - kThreads) * 4;
            const float *source = is_lse ? params.lse_padded : static_cast<const float *>(params.dsoftmax_sum);
            source += first_row + row;
            float *target = (is_lse ? shared.lse[stage] : shared.delta[stage]) + row;
            SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t *>(source),
                                                       *reinterpret_cast<uint128_t *>(target));
        }
        cp_async_fence();
    };

    // Shared memory.
    Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemKV::Layout{});         // (BLK_N, HD)
    Tensor sKt = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemKV::Transposed{});    // (HD, BLK_N)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemKV::Layout{});         // (BLK_N, HD)
    Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::SmemdS::Layout{});       // (BLK_N, BLK_M)
    Tensor sdSt = make_tensor(make_smem_ptr(shared.ds), typename Traits::SmemdS::Transposed{});  // (BLK_M, BLK_N)
    Tensor sP = make_tensor(make_smem_ptr(shared.p), typename Traits::SmemdS::Layout{});         // (BLK_N, BLK_M)

    // The products.
    typename Traits::TiledMmaSdP mma_sdp;
    typename Traits::TiledMmadKV mma_dkv;
    typename Traits::TiledMmadQ mma_dq;
    auto copy_sdp_A = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma_sdp);            // K, V
    auto copy_sdp_B = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma_sdp);            // Q, dO
    auto copy_dkv_A = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma_dkv);            // P^T, dS^T
    auto copy_dkv_B = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma_dkv);  // dO, Q
    auto copy_dq_A = make_tiled_copy_A(typename Traits::SmemCopyAtomTransposed{}, mma_dq);    // dS
    auto copy_dq_B = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma_dq);    // K

    // acc += A B^T for A and B in shared memory.
    auto multiply = [&](auto &acc, auto const &mma, auto const &copy_A, auto const &copy_B, auto const &sA,
                        auto const &sB, auto const &after_step) {
        const int thread = thread_index<kSparesRegisters>();
        Tensor rA = mma.get_thread_slice(tidx).partition_fragment_A(sA);
        Tensor rB = mma.get_thread_slice(tidx).partition_fragment_B(sB);
        gemm<0>(acc, rA, rB, sA, sB, mma, copy_A, copy_B, thread, after_step);
    };
    // The same with A, the transposed P or dS, still in registers.
    auto multiply_rs = [&](auto &acc, auto const &rP, auto const &sB) {
        auto thr_copy_B = copy_dkv_B.get_thread_slice(thread_index<kSparesRegisters>());
        Tensor rA = make_tensor(rP.data(), operand_A_layout(rP.layout()));  // (MMA, MMA_N, MMA_M)
        Tensor rB = mma_dkv.get_thread_slice(tidx).partition_fragment_B(sB);
        gemm_rs(acc, rA, rB, thr_copy_B.partition_S(sB), mma_dkv, copy_dkv_B, thr_copy_B);
    };

    DqSemaphore<Traits::kStagedDQ> held;  // of the last row block this warp added to; passed on later

    // S^T, P^T, dP^T and dS^T of one step; dV and dK too when P and dS stay in registers.
    auto step_scores = [&](int head, int m_block, int stage, bool is_large) {
        Tensor sQ = make_tensor(make_smem_ptr(shared.q[stage]), typename Traits::SmemQ::Layout{});       // (BLK_M, HD)
        Tensor sQt = make_tensor(make_smem_ptr(shared.q[stage]), typename Traits::SmemQ::Transposed{});  // (HD, BLK_M)
        Tensor sdO = make_tensor(make_smem_ptr(shared.dout[stage]), typename Traits::SmemQ::Layout{});   // (BLK_M, HD)
        Tensor sdOt =
            make_tensor(make_smem_ptr(shared.dout[stage]), typename Traits::SmemQ::Transposed{});  // (HD, BLK_M)
        const bool needs_care = is_large || info.needs_mask(m_block);

        CUTE_UNROLL
        for (int slice = 0; slice < kSlices; ++slice) {
            auto const slice_of = [&](auto const &x) {  // (BLK_M, ...)
                return local_tile(x, make_shape(Int<kSliceM>{}, size<1>(x)), make_coord(slice, 0));
            };
            auto const slice_of_t = [&](auto const &x) {  // (..., BLK_M)
                return local_tile(x, make_shape(size<0>(x), Int<kSliceM>{}), make_coord(0, slice));
            };
            using TileS = Shape<Int<kBlockN>, Int<kSliceM>>;
            Tensor acc_s = partition_fragment_C(mma_sdp, TileS{});                     // (MMA, MMA_N, MMA_M)
            Tensor acc_dp = partition_fragment_C(mma_sdp, TileS{});                    // (MMA, MMA_N, MMA_M)
            Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (key, query)
            Tensor dp = make_tensor(acc_dp.data(), rowcol_layout(acc_dp.layout()));    // (key, query)
            const auto coords_of = [&](int thread) {                                   // -> (key, query of the slice)
                Tensor tScS = mma_sdp.get_thread_slice(thread).partition_C(make_identity_tensor(TileS{}));
                return make_tensor(tScS.data(), rowcol_layout(tScS.layout()));
            };
            Tensor coords = coords_of(thread_index<kSparesRegisters>());

            clear(acc_s);
            multiply(acc_s, mma_sdp, copy_sdp_A, copy_sdp_B, sK, slice_of(sQ), Nothing{});
            if (kPassesInNextStep<Traits> && slice == 0) {
                held.pass();
            }
            // P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta); of P^T first the exponents. With care: scores that are
            // masked, or so large that a float32 is coarser than 1 and only rounding as the forward did leaves the
            // difference right.
            const float *lse = &shared.lse[stage][slice * kSliceM];
            const float *delta = &shared.delta[stage][slice * kSliceM];
            const int first_query = m_block * kBlockM + slice * kSliceM;
            const int thread = thread_index<kSparesRegisters>();
            if (has_score_mod) {  // from here on in units of params.scale_softmax
                apply_score_mod<Traits>(params, info, bidb, bidh + head, scores, coords, coords_of(0), first_query,
                                        slice_of_t(sdS), thread);
            }
            const float scale = params.scale_softmax, scale_log2 = params.scale_softmax_log2;
            if (needs_care) {
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    const int query = get<1>(coords(0, col));
                    const float lse_query = lse[query];
                    const int begin = info.begin_key(first_query + query) - n_block * kBlockN;
                    const int end = info.end_key(first_query + query) - n_block * kBlockN;
                    CUTE_UNROLL
                    for (int row = 0; row < size<0>(scores); ++row) {
                        const int key = get<0>(coords(row, col));
                        const float exponent = __fmul_rn(scores(row, col), scale) - lse_query;
                        const bool is_visible = key < end && (!Info::Is_local || key >= begin);
                        scores(row, col) = is_visible ? exponent * float(kLog2e) : -INFINITY;
                    }
                }
            } else {
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); col += 2) {
                    const float2 lse_pair = *reinterpret_cast<const float2 *>(&lse[get<1>(coords(0, col))]);
                    const float lse_log2[2] = {lse_pair.x * float(kLog2e), lse_pair.y * float(kLog2e)};
                    CUTE_UNROLL
                    for (int row = 0; row < size<0>(scores); ++row) {
                        scores(row, col) = scores(row, col) * scale_log2 - lse_log2[0];
                        scores(row, col + 1) = scores(row, col + 1) * scale_log2 - lse_log2[1];
                    }
                }
            }

            // The exponentials run beside the products of dP^T - delta.
            CUTE_UNROLL
            for (int i = 0; i < size(acc_s); ++i) {
                acc_s(i) = exp2_approx(acc_s(i));
            }
            if (has_dropout) {
                const DropoutStream stream(params.rng_state, bidb, params.h, bidh + head);
                mark_dropped_transposed(scores, coords, stream, params.dropout_threshold, first_query,
                                        n_block * kBlockN);
            }
            CUTE_UNROLL
            for (int col = 0; col < size<1>(dp); col += 2) {
                const float2 delta_pair = *reinterpret_cast<const float2 *>(&delta[get<1>(coords(0, col))]);
                CUTE_UNROLL
                for (int row = 0; row < size<0>(dp); ++row) {
                    dp(row, col) = has_dropout ? 0.0f : -delta_pair.x;
                    dp(row, col + 1) = has_dropout ? 0.0f : -delta_pair.y;
                }
            }
            if (wants_ds) {
                multiply(acc_dp, mma_sdp, copy_sdp_A, copy_sdp_B, sV, slice_of(sdO), Nothing{});
            }
            if (has_dropout) {  // dP and P lose what was dropped; delta belongs to all
                CUTE_UNROLL
                for (int col = 0; col < size<1>(dp); ++col) {
                    const float delta_query = delta[get<1>(coords(0, col))];
                    CUTE_UNROLL
                    for (int row = 0; row < size<0>(dp); ++row) {
                        const float p = scores(row, col);
                        const float dp_kept = is_marked(p) ? 0.0f : dp(row, col) * params.rp_dropout;
                        dp(row, col) = fabsf(p) * (dp_kept - delta_query);
                        scores(row, col) = fmaxf(p, 0.0f);
                    }
                }
            } else {
                CUTE_UNROLL
                for (int i = 0; i < size(acc_s); ++i) {
                    acc_dp(i) *= acc_s(i);
                }
            }
            if (kGeneral && params.softcap_scale != 0.0f) {
                multiply_by_stored<Traits>(acc_dp, slice_of_t(sdS), thread);
            }

            Tensor rP = convert_type<Element>(acc_s);    // (MMA, MMA_N, MMA_M)
            Tensor rdS = convert_type<Element>(acc_dp);  // (MMA, MMA_N, MMA_M)
            if (wants_ds) {
                store_probabilities<Traits>(rdS, slice_of_t(sdS), thread);
            }
            if constexpr (Traits::kPInRegisters) {
                if (wants_dv) {
                    multiply_rs(acc_dv, rP, slice_of_t(sdOt));
                }
                if (wants_dk) {
                    multiply_rs(acc_dk, rdS, slice_of_t(sQt));
                }
            } else {
                store_probabilities<Traits>(rP, sP, thread);
            }
        }
    };

    // dQ = dS K of one step; dV and dK too unless they came out of registers: what adds dQ up runs behind them.
    auto step_products = [&](int head, int m_block, int stage) {
        Tensor sQt = make_tensor(make_smem_ptr(shared.q[stage]), typename Traits::SmemQ::Transposed{});  // (HD, BLK_M)
        Tensor sdOt =
            make_tensor(make_smem_ptr(shared.dout[stage]), typename Traits::SmemQ::Transposed{});  // (HD, BLK_M)
        Tensor acc_dq = partition_fragment_C(mma_dq, TileQ{});  // (MMA, MMA_M, MMA_K)
        constexpr int kVectors = decltype(size(acc_dq))::value / 4;
        const int row_block = (padded_row + head * int(params.padded_head_stride)) / kBlockM + m_block;
        int *counts = nullptr;
        if (kMode == BwdMode::deterministic || (kAsks && params.dq_semaphore != nullptr)) {
            counts = params.dq_semaphore + int64_t(row_block) * Traits::kNWarps;
        }
        const DqReduction<kVectors, Traits::kStagedDQ> reduction(
            params.dq_accum + int64_t(row_block) * (kBlockM * kHeadDim), counts, info.order_in(m_block));
        constexpr bool kDVFirst = Traits::Tile::kDVFirst && Traits::kStagedDQ && !Traits::kPInRegisters;
        if (kDVFirst && wants_dv) {
            multiply(acc_dv, mma_dkv, copy_dkv_A, copy_dkv_B, sP, sdOt, Nothing{});
        }
        if (wants_dq) {
            clear(acc_dq);
            multiply(acc_dq, mma_dq, copy_dq_A, copy_dq_B, sdSt, sKt, Nothing{});
            if constexpr (Traits::kStagedDQ) {
#ifdef FLASH_HAS_BULK_REDUCE
                reduction.add_staged(acc_dq, shared.dq);
#endif
            } else {
                reduction.semaphore.wait(reduction.is_reached);
                if constexpr (Traits::kPInRegisters) {
                    reduction.add(acc_dq, 0, kVectors);
                }
            }
            held = reduction.semaphore;
        }
        if constexpr (!Traits::kPInRegisters) {
            // The share of the reductions from registers that belongs after step k of product 0 or 1.
            const auto add_share = [&](int product, int k, int steps) {
                if (!Traits::kStagedDQ && wants_dq) {
                    const int share = product * steps + k, shares = 2 * steps;
                    reduction.add(acc_dq, share * kVectors / shares, (share + 1) * kVectors / shares);
                }
            };
            if (!kDVFirst && wants_dv) {
                multiply(acc_dv, mma_dkv, copy_dkv_A, copy_dkv_B, sP, sdOt,
                         [&](int k, int steps) { add_share(0, k, steps); });
            } else {
                add_share(0, 0, 1);
            }
            if (wants_dk) {
                multiply(acc_dk, mma_dkv, copy_dkv_A, copy_dkv_B, sdS, sQt,
                         [&](int k, int steps) { add_share(1, k, steps); });
            } else {
                add_share(1, 0, 1);
            }
        }
    };

    // Prologue, then per step: wait for its Q and dO, start the next loads where there is room for them, compute.
    load_KV(params.k, shared.k);
    load_KV(params.v, shared.v);
    load_step(0);
    for (int stage = 0; steps > 0; --steps) {
        const int head_now = head, m_block_now = m_block;
        const bool is_large = next_is_large;
        advance();
        cp_async_wait<0>();
        __syncthreads();  // Q and dO have landed for all; all are done with the step before
        if (kStages == 2 && steps > 1) {
            load_step(stage ^ 1);
        }
        step_scores(head_now, m_block_now, stage, is_large);
        __syncthreads();  // dS and P are whole
        if (kStages == 1 && Traits::kPInRegisters && steps > 1) {
            load_step(0);  // all are done with Q and dO
        }
        step_products(head_now, m_block_now, stage);
        if (kStages == 1 && !Traits::kPInRegisters && steps > 1) {
            __syncthreads();  // all are done with Q and dO
            load_step(0);
        }
        if (!kPassesInNextStep<Traits>) {
            held.pass();
        }
        if (kStages == 2) {
            stage ^= 1;
        }
    }
    if (kPassesInNextStep<Traits>) {
        held.pass();
    }
#ifdef FLASH_HAS_BULK_REDUCE
    if (Traits::kStagedDQ && tidx % 32 == 0) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory outlives its readers
    }
#endif
}

}  // namespace flash::sm80
