// The loop over blocks of query rows for one block of keys: five products a step. dK and dV are summed in registers, dQ
// is added to a float32 accumulator in global memory. Called by compute_dq_dk_dv_1colblock.
//
// S^T = K Q^T and dP^T = V dO^T have keys as rows, the layout that dV = P^T dO and dK = dS^T Q need.
#pragma once

#include "common/attn_bias.h"
#include "common/block_info.h"
#include "common/dropout.h"
#include "common/key_ranges.h"
#include "common/preprocess_rows.h"
#include "common/score_mod.h"
#include "kernel_traits_bwd.h"
#include "reduce_dq.h"
#include "sm80/accumulator.h"
#include "sm80/copy.h"
#include "softmax_backward.h"

namespace flash::sm80 {

template <typename Traits, Kind kKind, BwdMode kMode>
class MainloopBwd {
    using Element = typename Traits::Element;
    using SharedStorage = typename Traits::SharedStorage;
    using Info = std::conditional_t<has_ranges(kKind), RangedColumnBlockInfo<Traits::kBlockM, Traits::kBlockN>,
                                    ColumnBlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>>;
    using TiledMmaSdP = typename Traits::TiledMmaSdP;
    using TiledMmadKV = typename Traits::TiledMmadKV;
    using TiledMmadQ = typename Traits::TiledMmadQ;
    using LdMatrix = typename Traits::SmemCopyAtom;
    using LdMatrixTransposed = typename Traits::SmemCopyAtomTransposed;

    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    static constexpr int kSliceM = Traits::kSliceM, kSlices = Traits::TileSize::kSlices, kStages = Traits::kStages;
    static constexpr bool kRecomputesAddresses = Traits::TileSize::kRecomputesAddresses;
    static constexpr bool kIsGeneral = is_general(kKind);
    static constexpr bool kDecidesAtRunTime = kMode == BwdMode::general;
    static constexpr int kPerPass = has_ranges(kKind) ? 1 : kRowBlocksPerPass;
    static constexpr bool kDVFirst = Traits::TileSize::kDVFirst && Traits::kStagedDQ && !Traits::kPInRegisters;

    using TileQ = Shape<Int<kBlockM>, Int<kHeadDim>>;
    using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileS = Shape<Int<kBlockN>, Int<kSliceM>>;

    using AccumulatorQ = decltype(partition_fragment_C(TiledMmadQ{}, TileQ{}));  // (MMA, MMA_M, MMA_K)
    static constexpr int kVectors = decltype(size(AccumulatorQ{}))::value / 4;
    using Reduction = DqReduction<kVectors, Traits::kStagedDQ>;

    struct Step {
        int head;     // counted from bidh
        int m_block;  // row block
        int stage;    // buffer of its Q and dO
        bool is_large;
    };

public:
    // is_in_order: dQ is summed key block by key block.
    __device__ MainloopBwd(const Flash_bwd_params &params, const Info &info, SharedStorage &shared, int bidb, int bidh,
                           bool is_in_order)
        : params(params), info(info), shared(shared), bidb(bidb), bidh(bidh) {
        if (kDecidesAtRunTime && threadIdx.x == 0) {
            shared.is_in_order = is_in_order;  // run() synchronises before it is read
        }
        padded_row = static_cast<int>(bidb * params.padded_batch_stride + bidh * params.padded_head_stride +
                                      padded_begin<may_be_varlen(kKind)>(params, bidb));
        Tensor coords = thread_copy(threadIdx.x).partition_D(make_identity_tensor(TileKV{}));
        CUTE_UNROLL
        for (int col = 0; col < size(column_in_range); ++col) {
            column_in_range(col) = get<1>(coords(0, 0, col)) < params.d;
        }
        next_m_block = info.m_block_min;
    }

    // acc_dk, acc_dv (MMA, MMA_N, MMA_K) get the sums over the query heads [bidh, bidh + params.heads_per_dkv), all of
    // one key/value head. dK lacks the factor softmax_scale.
    template <typename TensorKV>
    __device__ __forceinline__ void run(TensorKV &acc_dk, TensorKV &acc_dv) {
        load_kv(params.k, shared.k);
        load_kv(params.v, shared.v);
        load_step(0);
        int steps = params.heads_per_dkv * info.num_m_blocks();  // left to do
        for (int stage = 0; steps > 0; --steps) {
            const Step step{next_head, next_m_block, stage, next_is_large};
            advance();
            cp_async_wait<0>();
            __syncthreads();  // all threads: Q and dO have arrived, the step before is done
            if (kStages == 2 && steps > 1) {
                load_step(stage ^ 1);
            }
            CUTE_UNROLL
            for (int slice = 0; slice < kSlices; ++slice) {
                compute_ds(step, slice, acc_dk, acc_dv);
            }
            __syncthreads();  // dS and P are complete
            if (kStages == 1 && Traits::kPInRegisters && steps > 1) {
                load_step(0);  // all threads are done with Q and dO
            }
            compute_products(step, acc_dk, acc_dv);
            if (kStages == 1 && !Traits::kPInRegisters && steps > 1) {
                __syncthreads();  // all threads are done with Q and dO
                load_step(0);
            }
            if (!kPassesInNextStep<Traits, kMode>) {
                held.pass(params.dq_semaphore);
            }
            if (kStages == 2) {
                stage ^= 1;
            }
        }
        if (kPassesInNextStep<Traits, kMode>) {
            held.pass(params.dq_semaphore);
        }
#ifdef FLASH_HAS_BULK_REDUCE
        if (Traits::kStagedDQ && threadIdx.x % 32 == 0) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory outlives its readers
        }
#endif
    }

private:
    const Flash_bwd_params &params;
    const Info &info;
    SharedStorage &shared;
    const int bidb, bidh;                 // bidh: the first query head
    int padded_row;                       // first row of the sequence in head bidh, in the padded row statistics
    int next_head = 0, next_m_block;      // of the step that is loaded next
    bool next_is_large = false;           // whether one of its rows has a large log-sum-exp
    DqSemaphore<Traits::kStagedDQ> held;  // of the finished group of row blocks, until it is passed on
    decltype(make_tensor<bool>(Int<kHeadDim / Traits::SmemQ::kRow>{})) column_in_range;

    __device__ bool wants_dq() const { return !kDecidesAtRunTime || params.dq_accum != nullptr; }
    __device__ bool wants_dk() const { return !kDecidesAtRunTime || params.dk.ptr != nullptr; }
    __device__ bool wants_dv() const { return !kDecidesAtRunTime || params.dv.ptr != nullptr; }
    __device__ bool wants_ds() const { return wants_dq() || wants_dk(); }
    __device__ bool is_capped() const { return kIsGeneral && params.cap_scale != 0.0f; }
    __device__ bool has_dropout() const { return kIsGeneral && params.rng_state != nullptr; }

    // ---- Views of shared memory ----

    template <typename Layout>
    __device__ static auto smem_tensor(Element *data) {
        return make_tensor(make_smem_ptr(data), Layout{});
    }
    __device__ auto sdS() const { return smem_tensor<typename Traits::SmemdS::Layout>(shared.ds); }  // (BLK_N, BLK_M)
    __device__ auto sP() const { return smem_tensor<typename Traits::SmemdS::Layout>(shared.p); }    // (BLK_N, BLK_M)
    // A tile of Q or dO as (BLK_M, HD) and as (HD, BLK_M).
    __device__ static auto sQ(Element *data) { return smem_tensor<typename Traits::SmemQ::Layout>(data); }
    __device__ static auto sQt(Element *data) { return smem_tensor<typename Traits::SmemQ::Transposed>(data); }

    // The part of a slice of the query rows: of (BLK_M, ...), and of (..., BLK_M).
    template <typename TensorX>
    __device__ static auto slice_of_rows(const TensorX &x, int slice) {
        return local_tile(x, make_shape(Int<kSliceM>{}, size<1>(x)), make_coord(slice, 0));
    }
    template <typename TensorX>
    __device__ static auto slice_of_columns(const TensorX &x, int slice) {
        return local_tile(x, make_shape(size<0>(x), Int<kSliceM>{}), make_coord(0, slice));
    }

    // (key, query of the slice) of each score of a thread.
    __device__ static auto coords_of_scores(int thread) {
        Tensor coords = TiledMmaSdP{}.get_thread_slice(thread).partition_C(make_identity_tensor(TileS{}));
        return make_tensor(coords.data(), rowcol_layout(coords.layout()));
    }

    // ---- Loads ----

    __device__ static auto thread_copy(int thread) {
        return typename Traits::GmemTiledCopyAsync{}.get_thread_slice(thread);
    }

    template <typename TileShape, typename Layout, typename Rows>
    __device__ __forceinline__ void load_tile(const TensorRef &x, int head, int first_row, int seqlen, int block,
                                              const Rows &rows, Element *target, int thread) {
        Tensor mX = head_tensor<Element>(x, bidb, head, first_row, seqlen, params.d);
        Tensor gX = local_tile(mX, TileShape{}, make_coord(block, 0));
        copy_tile_async(typename Traits::GmemTiledCopyAsync{}, thread_copy(thread).partition_S(gX),
                        thread_copy(thread).partition_D(smem_tensor<Layout>(target)),
                        thread_copy(threadIdx.x).partition_D(make_identity_tensor(TileShape{})), column_in_range, rows);
    }

    __device__ __forceinline__ void load_kv(const TensorRef &x, Element *target) {
        const RowRange<false> rows{0, info.seqlen_k - info.n_block * kBlockN};
        load_tile<TileKV, typename Traits::SmemKV::Layout>(x, bidh / params.h_h_k_ratio, info.k_begin, info.seqlen_k,
                                                           info.n_block, rows, target, threadIdx.x);
    }

    // Starts the loads of the next step. Rows without a key are zeros, so that NaN in them stays there.
    __device__ __forceinline__ void load_step(int stage) {
        const int thread = thread_index<kRecomputesAddresses>();
        const auto rows = [&] {
            if constexpr (has_ranges(kKind)) {
                return RowsWithKeys{RangesOfHead(params, bidb, bidh + next_head), next_m_block * kBlockM,
                                    info.seqlen_q};
            } else if constexpr (has_bias(kKind)) {
                return RowsByLse{params.lse_padded + padded_row + next_head * int(params.padded_head_stride) +
                                 next_m_block * kBlockM};
            } else {
                return rows_with_key(info, next_m_block * kBlockM);
            }
        }();
        const auto load = [&](const TensorRef &x, Element *target) {
            load_tile<TileQ, typename Traits::SmemQ::Layout>(x, bidh + next_head, info.q_begin, info.seqlen_q,
                                                             next_m_block, rows, target, thread);
        };
        load(params.q, shared.q[stage]);
        load(params.dout, shared.dout[stage]);
        load_statistics(stage);
        cp_async_fence();
    }

    // lse and delta, 16 bytes for each of the first threads. They are padded, so they need no bounds.
    __device__ __forceinline__ void load_statistics(int stage) {
        const int first_row = padded_row + next_head * int(params.padded_head_stride) + next_m_block * kBlockM;
        constexpr int kFlagRows = Flash_bwd_params::kRowsPerFlag;
        next_is_large = params.large_rows[first_row / kFlagRows] != 0;
        if constexpr (kBlockM > kFlagRows) {
            next_is_large |= params.large_rows[first_row / kFlagRows + 1] != 0;
        }
        constexpr int kThreads = kBlockM / 4;  // for each of the two
        static_assert(2 * kThreads <= Traits::kNThreads);
        if (threadIdx.x < 2 * kThreads) {
            const bool is_lse = threadIdx.x < kThreads;
            const int row = (is_lse ? threadIdx.x : threadIdx.x - kThreads) * 4;
            const float *source = is_lse ? params.lse_padded : static_cast<const float *>(params.dsoftmax_sum);
            source += first_row + row;
            float *target = (is_lse ? shared.lse[stage] : shared.delta[stage]) + row;
            SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t *>(source),
                                                       *reinterpret_cast<uint128_t *>(target));
        }
    }

    __device__ __forceinline__ void advance() {
        if (++next_m_block == info.m_block_max) {
            next_m_block = info.m_block_min;
            ++next_head;
        }
    }

    // ---- Products ----

    // acc += A B^T for A and B in shared memory.
    template <typename CopyAtomA, typename CopyAtomB, typename TiledMma, typename TensorAcc, typename TensorA,
              typename TensorB, typename AfterStep = NoOp>
    __device__ __forceinline__ static void multiply(const TiledMma &mma, TensorAcc &acc, const TensorA &sA,
                                                    const TensorB &sB, const AfterStep &after_step = {}) {
        const int thread = thread_index<kRecomputesAddresses>();
        Tensor rA = mma.get_thread_slice(threadIdx.x).partition_fragment_A(sA);
        Tensor rB = mma.get_thread_slice(threadIdx.x).partition_fragment_B(sB);
        gemm<0>(acc, rA, rB, sA, sB, mma, make_tiled_copy_A(CopyAtomA{}, mma), make_tiled_copy_B(CopyAtomB{}, mma),
                thread, after_step);
    }

    // acc += A B for A, P^T or dS^T, in registers.
    template <typename TensorAcc, typename TensorP, typename TensorB>
    __device__ __forceinline__ static void multiply_rs(TensorAcc &acc, const TensorP &rP, const TensorB &sB) {
        TiledMmadKV mma;
        auto copy_B = make_tiled_copy_B(LdMatrixTransposed{}, mma);
        auto thr_copy_B = copy_B.get_thread_slice(thread_index<kRecomputesAddresses>());
        Tensor rA = make_tensor(rP.data(), operand_A_layout(rP.layout()));  // (MMA, MMA_N, MMA_M)
        Tensor rB = mma.get_thread_slice(threadIdx.x).partition_fragment_B(sB);
        gemm_rs(acc, rA, rB, thr_copy_B.partition_S(sB), mma, copy_B, thr_copy_B);
    }

    // ---- The algorithm ----

    // P^T and dS^T of a slice of the query rows. They stay in registers for dV and dK, or go to shared memory; dS^T
    // always does, for dQ.
    template <typename TensorKV>
    __device__ __forceinline__ void compute_ds(const Step &step, int slice, TensorKV &acc_dk, TensorKV &acc_dv) {
        Tensor acc_p = partition_fragment_C(TiledMmaSdP{}, TileS{});   // (MMA, MMA_N, MMA_M)
        Tensor acc_ds = partition_fragment_C(TiledMmaSdP{}, TileS{});  // (MMA, MMA_N, MMA_M)
        Tensor coords = coords_of_scores(thread_index<kRecomputesAddresses>());
        recompute_p(step, slice, acc_p, coords);
        form_ds(step, slice, acc_p, acc_ds, coords);

        const int thread = thread_index<kRecomputesAddresses>();
        Tensor rP = convert_type<Element>(acc_p);
        Tensor rdS = convert_type<Element>(acc_ds);
        if (wants_ds()) {
            store_scores(rdS, slice_of_columns(sdS(), slice), thread);
        }
        if constexpr (Traits::kPInRegisters) {
            if (wants_dv()) {
                multiply_rs(acc_dv, rP, slice_of_columns(sQt(shared.dout[step.stage]), slice));
            }
            if (wants_dk()) {
                multiply_rs(acc_dk, rdS, slice_of_columns(sQt(shared.q[step.stage]), slice));
            }
        } else {
            store_scores(rP, sP(), thread);
        }
    }

    // True if some query of the row block does not see some of the keys.
    __device__ __forceinline__ bool needs_mask(const Step &step) const {
        if constexpr (has_ranges(kKind)) {
            const VisibleBlock keys = RangesOfHead(params, bidb, bidh + step.head)
                                          .template block<kBlockM>(step.m_block * kBlockM, info.seqlen_q);
            return !keys.sees_all(info.n_block * kBlockN, (info.n_block + 1) * kBlockN);
        } else {
            return info.needs_mask(step.m_block);
        }
    }

    // P^T = exp(S^T - lse); with dropout, dropped probabilities are negative.
    template <typename TensorP, typename TensorC>
    __device__ __forceinline__ void recompute_p(const Step &step, int slice, TensorP &acc_p, const TensorC &coords) {
        Tensor scores = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));  // (key, query)
        clear(acc_p);
        multiply<LdMatrix, LdMatrix>(TiledMmaSdP{}, acc_p, smem_tensor<typename Traits::SmemKV::Layout>(shared.k),
                                     slice_of_rows(sQ(shared.q[step.stage]), slice));
        if (kPassesInNextStep<Traits, kMode> && slice == 0) {
            held.pass(params.dq_semaphore);
        }

        const float *lse = &shared.lse[step.stage][slice * kSliceM];
        const int first_query = step.m_block * kBlockM + slice * kSliceM, first_key = info.n_block * kBlockN;
        if (kIsGeneral && ScoreMod::is_on(params)) {
            apply_score_mod(step, slice, scores, coords, first_query);
        }
        if constexpr (has_bias(kKind)) {
            BiasOfHead<Element>(params, bidb, bidh + step.head)
                .template add_to</*kTransposed=*/true>(scores, coords, params.scale_softmax, first_query, first_key);
            if (step.is_large || params.key_ranges.is_used() || needs_mask(step)) {
                exponents_of_logits(step, scores, coords, lse, first_query, first_key);
            } else {
                to_exponents(scores, coords, lse, float(kLog2e));
            }
        } else if (step.is_large || needs_mask(step)) {
            to_exponents_with_care(scores, coords, lse, params.scale_softmax, [&](int query) {
                if constexpr (has_ranges(kKind)) {
                    const RangesOfHead ranges(params, bidb, bidh + step.head);
                    return KeysOfTile{ranges.row(first_query + query), first_key};
                } else {
                    return KeySpan{Info::Is_local ? info.begin_key(first_query + query) - first_key : 0,
                                   info.end_key(first_query + query) - first_key};
                }
            });
        } else {
            to_exponents(scores, coords, lse, params.scale_softmax_log2);
        }
        exponentiate(acc_p);  // overlaps the product of form_ds
        if (has_dropout()) {
            const DropoutStream stream(params.rng_state, bidb, params.h, bidh + step.head);
            mark_dropped(scores, coords, stream, params.dropout_threshold, first_query, first_key);
        }
    }

    // attn_bias: to_exponents_with_care.
    template <typename TensorS, typename TensorC>
    __device__ __forceinline__ void exponents_of_logits(const Step &step, TensorS &logits, const TensorC &coords,
                                                        const float *lse, int first_query, int first_key) const {
        if (params.key_ranges.is_used()) {
            const RangesOfHead ranges(params, bidb, bidh + step.head);
            to_exponents_with_care</*kHasBias=*/true>(logits, coords, lse, 1.0f, [&](int query) {
                return KeysOfTile{ranges.row(first_query + query), first_key};
            });
        } else {
            to_exponents_with_care</*kHasBias=*/true>(logits, coords, lse, 1.0f, [&](int query) {
                return KeySpan{info.begin_key(first_query + query) - first_key,
                               info.end_key(first_query + query) - first_key};
            });
        }
    }

    // dS^T = P^T (dP^T - delta), times the derivative of the cap. The marks of dropped probabilities become 0.
    template <typename TensorP, typename TensorC>
    __device__ __forceinline__ void form_ds(const Step &step, int slice, TensorP &acc_p, TensorP &acc_ds,
                                            const TensorC &coords) {
        Tensor p = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));     // (key, query)
        Tensor ds = make_tensor(acc_ds.data(), rowcol_layout(acc_ds.layout()));  // (key, query)
        const float *delta = &shared.delta[step.stage][slice * kSliceM];
        start_dp(ds, coords, delta, has_dropout());
        if (wants_ds()) {
            multiply<LdMatrix, LdMatrix>(TiledMmaSdP{}, acc_ds, smem_tensor<typename Traits::SmemKV::Layout>(shared.v),
                                         slice_of_rows(sQ(shared.dout[step.stage]), slice));
        }
        if (has_dropout()) {
            to_ds_with_dropout(p, ds, coords, delta, params.rp_dropout);
        } else {
            to_ds(acc_p, acc_ds);
        }
        if (is_capped()) {
            multiply_by_stored(acc_ds, slice_of_columns(sdS(), slice), thread_index<kRecomputesAddresses>());
        }
    }

    // dQ = dS K of a step; dV += P^T dO and dK += dS^T Q unless they came from registers.
    template <typename TensorKV>
    __device__ __forceinline__ void compute_products(const Step &step, TensorKV &acc_dk, TensorKV &acc_dv) {
        const Reduction reduction = reduction_of(step);
        if (kDVFirst && wants_dv()) {
            accumulate_dv(step, acc_dv);
        }
        AccumulatorQ acc_dq;
        if (wants_dq()) {
            clear(acc_dq);
            multiply<LdMatrixTransposed, LdMatrixTransposed>(
                TiledMmadQ{}, acc_dq, smem_tensor<typename Traits::SmemdS::Transposed>(shared.ds),
                smem_tensor<typename Traits::SmemKV::Transposed>(shared.k));
            start_reduction(reduction, acc_dq);
            if (ends_group(step.m_block)) {
                held = semaphore_of(step);
            }
        }
        if constexpr (!Traits::kPInRegisters) {
            // Reductions from registers are spread over the steps of the two products. This adds the share that follows
            // step k of product 0 or 1.
            const auto add_share = [&](int product, int k, int steps) {
                if (!Traits::kStagedDQ && wants_dq()) {
                    const int share = product * steps + k, shares = 2 * steps;
                    reduction.add(acc_dq, share * kVectors / shares, (share + 1) * kVectors / shares);
                }
            };
            if (!kDVFirst && wants_dv()) {
                accumulate_dv(step, acc_dv, [&](int k, int steps) { add_share(0, k, steps); });
            } else {
                add_share(0, 0, 1);
            }
            if (wants_dk()) {
                accumulate_dk(step, acc_dk, [&](int k, int steps) { add_share(1, k, steps); });
            } else {
                add_share(1, 0, 1);
            }
        }
    }

    template <typename TensorKV, typename AfterStep = NoOp>
    __device__ __forceinline__ void accumulate_dv(const Step &step, TensorKV &acc_dv,
                                                  const AfterStep &after_step = {}) {
        multiply<LdMatrix, LdMatrixTransposed>(TiledMmadKV{}, acc_dv, sP(), sQt(shared.dout[step.stage]), after_step);
    }

    template <typename TensorKV, typename AfterStep>
    __device__ __forceinline__ void accumulate_dk(const Step &step, TensorKV &acc_dk, const AfterStep &after_step) {
        multiply<LdMatrix, LdMatrixTransposed>(TiledMmadKV{}, acc_dk, sdS(), sQt(shared.q[step.stage]), after_step);
    }

    // ---- dQ ----

    __device__ __forceinline__ Reduction reduction_of(const Step &step) const {
        const int row_block = padded_row_block(step);
        DqSemaphore<Traits::kStagedDQ> semaphore;
        if (begins_group(step.m_block)) {
            semaphore = semaphore_of(step);
        }
        return Reduction(params.dq_accum + int64_t(row_block) * (kBlockM * kHeadDim), params.dq_semaphore, semaphore);
    }

    __device__ __forceinline__ int padded_row_block(const Step &step) const {
        return (padded_row + step.head * int(params.padded_head_stride)) / kBlockM + step.m_block;
    }

    // In order: the row blocks come in groups of kPerPass. Between its wait for the semaphore of a group and
    // the pass, a CTA adds to those row blocks of the group that see its keys.
    __device__ bool begins_group(int m_block) const { return m_block % kPerPass == 0 || m_block == info.m_block_min; }
    __device__ bool ends_group(int m_block) const {
        return m_block % kPerPass == kPerPass - 1 || m_block + 1 == info.m_block_max;
    }

    // This warp's, in the place of the group's first row block; none: any order.
    __device__ __forceinline__ DqSemaphore<Traits::kStagedDQ> semaphore_of(const Step &step) const {
        if (kMode == BwdMode::deterministic || (kDecidesAtRunTime && shared.is_in_order)) {
            const int row_block = padded_row_block(step) - step.m_block % kPerPass;
            const int index = row_block * Traits::kNWarps + int(threadIdx.x) / 32;
            if constexpr (has_ranges(kKind)) {
                const int order = info.order_in(params, bidb, bidh + step.head, step.m_block * kBlockM);
                return {order == Info::kDoesNotAdd ? DqSemaphore<Traits::kStagedDQ>::kNone : index, order};
            } else {
                // The last row block of the group sees the last keys, so its order counts all key blocks.
                return {index, info.order_in(step.m_block - step.m_block % kPerPass + kPerPass - 1)};
            }
        }
        return {};
    }

    // Waits for the semaphore; then adds everything, unless compute_products adds it in shares.
    __device__ __forceinline__ void start_reduction(const Reduction &reduction, const AccumulatorQ &acc_dq) {
        if constexpr (Traits::kStagedDQ) {
#ifdef FLASH_HAS_BULK_REDUCE
            reduction.add_staged(acc_dq, shared.dq);
#endif
        } else {
            reduction.wait();
            if constexpr (Traits::kPInRegisters) {
                reduction.add(acc_dq, 0, kVectors);
            }
        }
    }

    // ---- Score modifiers ----

    // scores (key, query) become logits. The derivative of the cap, 1 - tanh^2, waits in the buffer of dS^T, where
    // each thread uses its own elements: in registers it would have to last over a product.
    template <typename TensorS, typename TensorC>
    __device__ __forceinline__ void apply_score_mod(const Step &step, int slice, TensorS &scores, const TensorC &coords,
                                                    int first_query) {
        Tensor derivative =
            make_tensor<Element>(partition_fragment_C(TiledMmaSdP{}, TileS{}).layout());  // (MMA, MMA_N, MMA_M)
        Tensor derivative_rowcol = make_tensor(derivative.data(), rowcol_layout(derivative.layout()));
        const ScoreMod mod(params, bidb, bidh + step.head, info.seqlen_k - info.seqlen_q);
        mod.apply</*kTransposed=*/true>(
            scores, coords, coords_of_scores(0), first_query, info.n_block * kBlockN,
            [&](int row, int col, float t) { derivative_rowcol(row, col) = Element(1.0f - t * t); });
        if (is_capped()) {
            store_scores(derivative, slice_of_columns(sdS(), slice), thread_index<kRecomputesAddresses>());
        }
    }

    // Rounded values of the layout of S^T go to shared memory as [keys, queries].
    template <typename TensorR, typename TensorX>
    __device__ __forceinline__ static void store_scores(const TensorR &source, TensorX &&target, int thread) {
        auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, TiledMmaSdP{});
        auto thr_copy = smem_copy.get_thread_slice(thread);
        copy(smem_copy, thr_copy.retile_S(source), thr_copy.partition_D(target));
    }

    // acc times what this thread stored in `source` with store_scores.
    template <typename TensorAcc, typename TensorX>
    __device__ __forceinline__ static void multiply_by_stored(TensorAcc &acc, TensorX &&source, int thread) {
        auto smem_copy = make_tiled_copy_C(typename Traits::SmemCopyAtomStore{}, TiledMmaSdP{});
        auto thr_copy = smem_copy.get_thread_slice(thread);
        Tensor factor = make_tensor<Element>(acc.layout());
        copy(smem_copy, thr_copy.partition_D(source), thr_copy.retile_S(factor));
        CUTE_UNROLL
        for (int i = 0; i < size(acc); ++i) {
            acc(i) *= float(factor(i));
        }
    }
};

}  // namespace flash::sm80
