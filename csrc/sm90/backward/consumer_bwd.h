// The base of both mainloops of the backward: products, waits for and releases of pipeline stages, and the transfer of
// dS to shared memory.
#pragma once

#include "cta_pair_bwd.h"
#include "dispatch/kind.h"
#include "dq_tile.h"
#include "scores_bwd.h"
#include "sm90/common/mma.h"

namespace flash::sm90 {

// Keys past the end of the sequence belong to another one: they become zeros in K or V, because NaN times 0 is NaN.
// Each consumer clears its own keys. dQ reads all keys of K: after dS of them, and so after they are cleared. The copy
// of another CTA's keys is cleared by the warpgroup that multiplies it (PairProducer).
template <typename Tiles, typename Traits, Kind kKind>
__device__ __forceinline__ void clear_oob_keys(const ColumnBlock<Traits, kKind> &block, typename Traits::Element *smem,
                                               int key_offset, int warpgroup) {
    const int rows = block.seqlen_k - block.first_key() - key_offset;
    if (may_be_varlen(kKind) && rows < Traits::kKeys) {
        Tensor sK = make_tensor(make_smem_ptr(smem), take<0, 2>(typename Tiles::SmemLayoutKV{}));  // (keys, HD)
        Tensor sK_own = local_tile(sK, typename Tiles::TiledKV{}, make_coord(Traits::kSplitsKeys ? warpgroup : 0, 0));
        clear_rows_from(rows, sK_own, warpgroup);
    }
}

// What a consumer has done in its work tile before a key block. Its positions in the pipelines follow from that.
struct DoneBefore {
    int key_blocks, steps;
};

// A consumer warpgroup. It works on 64 of the CTA's keys.
template <typename Traits, Kind kKind>
class ConsumerBwd {
protected:
    using Element = typename Traits::Element;
    using TiledMmaSdP = typename Traits::TiledMmaSdP;
    using TilesQK = typename Traits::TilesQK;
    using TilesdOV = typename Traits::TilesdOV;
    using Scores = typename ScoresBwd<Traits, kKind>::Accumulator;  // (MMA, MMA_M, MMA_N)
    using Operand = typename ScoresBwd<Traits, kKind>::Operand;     // of 16 bits (MMA, MMA_M, MMA_K)
    using Probabilities = typename ScoresBwd<Traits, kKind>::Probabilities;
    static constexpr int kBlockM = Traits::kBlockM, kKeys = Traits::kKeys;

    const Flash_bwd_params &params;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;
    const int warpgroup;   // of the consumers
    const int key_offset;  // of the first of its keys in the key block
    const ScoresBwd<Traits, kKind> scores;
    Step step;
    int steps_left;
    PipelineState<1> kv_state;
    PipelineState<Traits::kStagesQ> q_state;
    PipelineState<Traits::kStagesdO> dout_state;
    PipelineState<Traits::kStagesdS> ds_state;

public:
    __device__ ConsumerBwd(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                           const ColumnBlock<Traits, kKind> &block, int warpgroup, const DoneBefore &done)
        : params(params),
          shared(shared),
          block(block),
          warpgroup(warpgroup),
          key_offset(first_key_of_consumer<Traits>(warpgroup)),
          scores(params, block, block.first_key() + key_offset, bias_of(shared)),
          step(block),
          steps_left(block.num_steps()),
          kv_state(position_after<1>(done.key_blocks)),
          q_state(position_after<Traits::kStagesQ>(done.steps)),
          dout_state(position_after<Traits::kStagesdO>(done.steps)),
          ds_state(position_after<Traits::kStagesdS>(done.steps)) {}

protected:
    __device__ __forceinline__ static Element *bias_of(typename Traits::SharedStorage &shared) {
        if constexpr (Traits::kStagesBias) {
            return shared.bias[0];
        } else {
            return nullptr;
        }
    }

    // The stages of Q or dO (BLK_M, HD, stage), and the same as (HD, BLK_M, stage).
    template <typename Tiles, int kStages>
    __device__ __forceinline__ static auto tiles(Element *smem) {
        return make_tensor(make_smem_ptr(smem), typename Tiles::template SmemLayoutQ<kStages>{});
    }
    template <typename Tiles, int kStages>
    __device__ __forceinline__ static auto transposed_tiles(Element *smem) {
        return make_tensor(make_smem_ptr(smem), typename Tiles::template SmemLayoutQt<kStages>{});
    }

    // The number of the consumer's 64 keys among those of the CTA.
    __device__ __forceinline__ int tile_in_cta() const { return Traits::kSplitsKeys ? warpgroup : 0; }

    __device__ __forceinline__ void advance_step() {
        q_state.advance();
        dout_state.advance();
        step.advance(block);
    }

    // S^T = K Q^T, or dP^T = V dO^T. With TiledMmaMinusdP the product is subtracted from acc.
    template <typename Tiles, typename TiledMma = TiledMmaSdP, int kStages, typename TensorS>
    __device__ __forceinline__ void issue_scores(Element *smem_k, Element *smem_q, const PipelineState<kStages> &state,
                                                 TensorS &acc) const {
        constexpr bool kAccumulates = !std::is_same_v<TiledMma, TiledMmaSdP>;
        if constexpr (computes_descriptors_in_step<Traits, kKind>()) {
            smem_k = unhoisted(smem_k);
        }
        Tensor sK = make_tensor(make_smem_ptr(smem_k), take<0, 2>(typename Tiles::SmemLayoutKV{}));  // (keys, HD)
        Tensor sQ = tiles<Tiles, kStages>(smem_q);
        Tensor sK_own = local_tile(sK, typename Tiles::TiledKV{}, make_coord(tile_in_cta(), 0));  // (64, HD)
        auto thr_mma = TiledMma{}.get_slice(int(threadIdx.x % 128));
        Tensor tSrK = thr_mma.make_fragment_A(thr_mma.partition_A(sK_own));                    // (MMA, MMA_M, MMA_K)
        Tensor tSrQ = thr_mma.make_fragment_B(thr_mma.partition_B(sQ))(_, _, _, state.stage);  // (MMA, MMA_N, MMA_K)
        issue<TiledMma>(kAccumulates, tSrK, tSrQ, acc);
    }

    // dP^T = V dO^T, or delta - dP^T with kDpStartsAtDelta. There no other product may be in flight, or ptxas
    // serializes all products.
    template <typename TensorS>
    __device__ __forceinline__ void issue_dp(TensorS &acc) const {
        if constexpr (Traits::kDpStartsAtDelta) {
            scores.start_at_delta(shared.delta[dout_state.stage], acc);
            issue_scores<TilesdOV, typename Traits::TiledMmaMinusdP>(shared.v, shared.dout, dout_state, acc);
        } else {
            issue_scores<TilesdOV>(shared.v, shared.dout, dout_state, acc);
        }
    }

    // V of the consumer's keys, the A operand of dP in registers (MMA, MMA_M, MMA_K).
    __device__ __forceinline__ auto load_V() const {
        using TiledMma = typename Traits::TiledMmadP;
        Tensor sV = as_position_independent_swizzle_tensor(
            make_tensor(make_smem_ptr(shared.v), take<0, 2>(typename TilesdOV::SmemLayoutKV{})));    // (keys, HD)
        Tensor sV_own = local_tile(sV, typename TilesdOV::TiledKV{}, make_coord(tile_in_cta(), 0));  // (64, HD)
        auto rV = TiledMma{}.get_slice(scores.thread).partition_fragment_A(sV_own);
        auto copies = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, TiledMma{});
        auto of_thread = copies.get_slice(scores.thread);
        copy(copies, of_thread.partition_S(sV_own), of_thread.retile_D(rV));
        return rV;
    }

    // dP^T = V dO^T with V from load_V().
    template <typename TensorV, typename TensorS>
    __device__ __forceinline__ void issue_dp(const TensorV &rV, TensorS &acc) const {
        Tensor sdO = tiles<TilesdOV, Traits::kStagesdO>(shared.dout);
        auto thr_mma = typename Traits::TiledMmadP{}.get_slice(int(threadIdx.x % 128));
        Tensor tdPrdO =
            thr_mma.make_fragment_B(thr_mma.partition_B(sdO))(_, _, _, dout_state.stage);  // (MMA, MMA_N, MMA_K)
        issue<typename Traits::TiledMmadP>(/*accumulates=*/false, rV, tdPrdO, acc);
    }

    // dV = P^T dO, with P^T in registers, or dV += P^T dO if `accumulates`; or dK and dS^T Q.
    template <typename Tiles, int kStages, typename TensorP, typename TensorKV>
    __device__ __forceinline__ void issue_dkv(bool accumulates, TensorP &rP, Element *smem_dout,
                                              const PipelineState<kStages> &state, TensorKV &acc) const {
        using TiledMmadKV = typename Tiles::TiledMmadKV;
        Tensor sdOt = transposed_tiles<Tiles, kStages>(smem_dout);
        auto thr_mma = TiledMmadKV{}.get_slice(int(threadIdx.x % 128));
        Tensor tdVrdOt =
            thr_mma.make_fragment_B(thr_mma.partition_B(sdOt))(_, _, _, state.stage);  // (MMA, MMA_N, MMA_K)
        warpgroup_fence_operand(rP);
        issue<TiledMmadKV>(accumulates, rP, tdVrdOt, acc);
    }

    // The same for dK, with the consumer's part of dS in shared memory.
    template <typename TensorKV>
    __device__ __forceinline__ void issue_dk(bool accumulates, int ds_stage,
                                             const PipelineState<Traits::kStagesQ> &state, TensorKV &acc) const {
        using TiledMmadK = typename Traits::TiledMmadK;
        using TileDSt = Shape<Int<kKeys>, Int<kBlockM>>;
        Tensor sdSt = make_tensor(make_smem_ptr(shared.ds), typename Traits::SmemLayoutdSt{});  // (BLK_N, BLK_M, stage)
        Tensor sQt = transposed_tiles<TilesQK, Traits::kStagesQ>(shared.q);
        Tensor sdSt_own = local_tile(sdSt(_, _, ds_stage), TileDSt{}, make_coord(key_offset / kKeys, _0{}));
        auto thr_mma = TiledMmadK{}.get_slice(int(threadIdx.x % 128));
        Tensor tdKrdSt = thr_mma.make_fragment_A(thr_mma.partition_A(sdSt_own));                  // (MMA, MMA_M, MMA_K)
        Tensor tdKrQt = thr_mma.make_fragment_B(thr_mma.partition_B(sQt))(_, _, _, state.stage);  // (MMA, MMA_N, MMA_K)
        issue<TiledMmadK>(accumulates, tdKrdSt, tdKrQt, acc);
    }

    // Rounded P^T or dS^T goes to the stage of dS as [queries, keys], in pieces of 8 x 8 that stmatrix transposes. Lane
    // l holds the address of row l % 8 of piece l / 8. Two pieces lie along the keys, two along the queries.
    static constexpr int kSixteenQueries = 16 * 64;  // elements: the swizzle repeats after 8 rows
    __device__ __forceinline__ Element *place_of_lane() const {
        Tensor sdS = make_tensor(make_smem_ptr(shared.ds), typename Traits::SmemLayoutdS{});  // (BLK_M, BLK_N, stage)
        const int lane = scores.thread % 32, warp = scores.thread / 32;
        return &sdS(lane / 16 * 8 + lane % 8, key_offset + warp * 16 + lane / 8 % 2 * 8, ds_state.stage);
    }
    template <typename TensorD>
    __device__ __forceinline__ void store_transposed(const TensorD &rdS) const {
        const auto *words = reinterpret_cast<const uint32_t *>(rdS.data());
        Element *target = place_of_lane();
        CUTE_UNROLL
        for (int i = 0; i < kBlockM / 16; ++i) {
            SM90_U16x8_STSM_T::copy(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                                    *reinterpret_cast<uint128_t *>(target + i * kSixteenQueries));
        }
    }

    __device__ __forceinline__ Operand load_transposed() const {
        Operand result;
        auto *words = reinterpret_cast<uint32_t *>(result.data());
        const Element *source = place_of_lane();
        CUTE_UNROLL
        for (int i = 0; i < kBlockM / 16; ++i) {
            SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const uint128_t *>(source + i * kSixteenQueries), words[4 * i],
                                    words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
        return result;
    }

    // Rounded dS^T goes to shared memory. Returns its stage. Consumers that compute dQ need not wait for an empty
    // stage: each waits for the other's dS of the step before, and the other has sent that after it finished with the
    // stage that is written here. In a pair of CTAs, consumer 0 has waited before it wrote P there.
    template <typename TensorD>
    __device__ __forceinline__ auto send_ds(const TensorD &rdS) {
        static_assert(Traits::kStagesdS >= 2 || Traits::kCtas > 1);
        if constexpr (!Traits::kConsumersComputeDq && Traits::kCtas == 1) {
            ds_state.acquire(shared.ds_barriers);
        }
        store_transposed(rdS);
        cutlass::arch::fence_view_async_shared();  // before wgmma reads it
        __syncwarp();
        if (cute::elect_one_sync()) {
            shared.ds_barriers.full[ds_state.stage].arrive();
        }
        const auto sent = ds_state;
        ds_state.advance();
        return sent;
    }

    // Each warp releases a stage for itself, when all of its lanes have read the row statistics or words there.
    template <int kStages>
    __device__ __forceinline__ static void release(const PipelineState<kStages> &state,
                                                   PipelineBarriers<kStages> &barriers) {
        __syncwarp();
        state.release(barriers);
    }

    // The same for a stage of Q or dO.
    template <int kStages>
    __device__ __forceinline__ static void release_rows(const PipelineState<kStages> &state,
                                                        PipelineBarriers<kStages> &barriers) {
        release(state, barriers);
        if constexpr (multicasts<Traits, kKind>()) {  // the peer loads half of the next rows there
            if (cute::elect_one_sync()) {
                barriers.empty[state.stage].arrive(1 - rank_in_cluster<Traits>());
            }
        }
    }

    // Called when Q of the step has come.
    __device__ __forceinline__ auto visible_of_step() const {
        return scores.load_visible(step, shared.is_masked[q_state.stage][warpgroup]);
    }
    __device__ __forceinline__ void wait_for_Q() const { q_state.wait(shared.q_barriers); }
    __device__ __forceinline__ void wait_for_dO() const { dout_state.wait(shared.dout_barriers); }

    // Both are loaded once for each key block.
    __device__ __forceinline__ void wait_for_K() const {
        kv_state.wait(shared.k_barriers);
        clear_oob_keys<TilesQK>(block, shared.k, key_offset, warpgroup);
    }
    __device__ __forceinline__ void wait_for_V() const {
        kv_state.wait(shared.v_barriers);
        clear_oob_keys<TilesdOV>(block, shared.v, key_offset, warpgroup);
    }
};

}  // namespace flash::sm90
