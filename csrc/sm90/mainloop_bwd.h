// The consumers' side of the backward: S, dP, dV and dK of one key block, over all steps. Two ways to share the work,
// one for each BwdSplit.
#pragma once

#include "consumer_bwd.h"
#include "dq_tile.h"

namespace flash::sm90 {

// BwdSplit::keys. The consumer computes S, dP, dV and dK for its own 64 keys; with DqBy::consumers, a tile of dQ too.
// While it computes, the tensor cores work for it: on dK and dQ beside the exponentials of the next step, on dV beside
// dS.
template <typename Traits, Kind kKind>
class KeyConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::q_state, Base::dout_state, Base::ds_state,
        Base::warpgroup;
    using typename Base::Element, typename Base::Scores;
    using DsState = PipelineState<Traits::kStagesdS>;
    using QState = PipelineState<Traits::kStagesQ>;
    static constexpr bool kComputesDq = Traits::kConsumersComputeDq;
    PipelineState<1> dq_state;

public:
    using Base::Base;

    // acc_dk, acc_dv (MMA, MMA_M, MMA_N) get the sums over all steps. dK lacks the factor softmax_scale.
    template <typename TensorKV>
    __device__ __forceinline__ void run(TensorKV &acc_dk, TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dk);
            clear(acc_dv);
            return;
        }
        bool is_large = scores.is_large(step);
        this->wait_for_KV(shared.k_barrier, shared.k);
        this->wait_for_Q();
        Scores first_s;
        this->issue_scores(shared.k, shared.q, q_state, first_s);
        this->wait_for_KV(shared.v_barrier, shared.v);
        wait_for<0>(first_s);
        auto rP = form_p(is_large, first_s);
        // Nothing is under way where an iteration begins: ptxas follows products within an iteration only. S, dP and dQ
        // are new variables in each: wgmma would keep the old values until it overwrites them.
        for (bool accumulates = false;; accumulates = true) {
            Scores acc_ds;
            this->wait_for_dO();
            this->issue_scores(shared.v, shared.dout, dout_state, acc_ds);
            this->issue_dkv(accumulates, rP, shared.dout, dout_state, acc_dv);
            wait_for<1>(acc_ds);
            auto rdS = form_ds(rP, acc_ds);
            if constexpr (kComputesDq) {  // before the products that need its registers
                wait_for<0>(acc_dv);
            }
            const auto ds = this->send_ds(rdS);
            const auto q = q_state;
            const auto dout = dout_state;
            if (--steps_left == 0) {
                issue_dk(accumulates, ds, q, rdS, acc_dk);
                if constexpr (kComputesDq) {
                    auto acc_dq = issue_dq(ds);
                    wait_for<0>(acc_dq);
                    send_dq(acc_dq);
                }
                break;
            }
            this->advance_step();
            is_large = scores.is_large(step);
            Scores next_s;
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, q_state, next_s);
            issue_dk(accumulates, ds, q, rdS, acc_dk);
            if constexpr (kComputesDq) {
                auto acc_dq = issue_dq(ds);
                wait_for<2>(next_s);
                dout.release(shared.dout_barriers);
                rP = form_p(is_large, next_s);
                wait_for<0>(acc_dq);
                warpgroup_fence_operand(acc_dk);
                q.release(shared.q_barriers);
                send_dq(acc_dq);
            } else {
                wait_for<1>(next_s);
                warpgroup_fence_operand(acc_dv);
                dout.release(shared.dout_barriers);
                rP = form_p(is_large, next_s);
                wait_for<0>(acc_dk);
                q.release(shared.q_barriers);
            }
        }
        wait_for<0>(acc_dk);
        warpgroup_fence_operand(acc_dv);
    }

private:
    // dK += dS^T Q.
    template <typename TensorA, typename TensorKV>
    __device__ __forceinline__ void issue_dk(bool accumulates, const DsState &ds, const QState &q, TensorA &rdS,
                                             TensorKV &acc_dk) const {
        if constexpr (Traits::TileSize::kDsIn == DsIn::registers) {
            this->issue_dkv(accumulates, rdS, shared.q, q, acc_dk);
        } else {
            sync(Barrier::warpgroup, warpgroup, 128);  // its part of dS is complete
            Base::issue_dk(accumulates, ds.stage, q, acc_dk);
        }
    }

    // This consumer's tile of dQ, when both have sent dS.
    __device__ __forceinline__ auto issue_dq(const DsState &ds) const {
        auto acc = DqTile<Traits>::accumulator();
        ds.wait(shared.ds_barriers);
        DqTile<Traits>::issue(shared, ds.stage, warpgroup, acc);
        return acc;
    }

    // dQ goes to the warp that adds it.
    template <typename TensorDq>
    __device__ __forceinline__ void send_dq(const TensorDq &acc) {
        auto &barriers = shared.dq_barriers[warpgroup];
        dq_state.acquire(barriers);
        auto *target = reinterpret_cast<float4 *>(shared.dq[warpgroup]);
        CUTE_UNROLL
        for (int i = 0; i < DqTile<Traits>::kVectors; ++i) {
            target[DqTile<Traits>::place(i)] = DqTile<Traits>::vector(acc, i);
        }
        cutlass::arch::fence_view_async_shared();  // before the copy engine reads it
        __syncwarp();
        if (cute::elect_one_sync()) {
            barriers.full[0].arrive();
        }
        dq_state.advance();
    }

    // S becomes P, the A operand of dV. With softcap or dropout, what dS needs of P waits in the place of dS.
    __device__ __forceinline__ auto form_p(bool is_large, Scores &acc_s) {
        if (scores.is_plain()) {
            return scores.rounded_p(step, is_large, acc_s, shared.lse[q_state.stage]);
        }
        if (!kComputesDq && scores.needs_words()) {
            ds_state.acquire(shared.ds_barriers);
        }
        scores.recompute_p(step, is_large, acc_s, shared.lse[q_state.stage], this->ds_words());
        return scores.template split_p</*kAlwaysStores=*/false>(acc_s, this->ds_words());
    }

    // dP becomes dS, the A operand of dK.
    template <typename TensorA>
    __device__ __forceinline__ auto form_ds(const TensorA &rP, const Scores &acc_ds) {
        const float *delta = shared.delta[dout_state.stage];
        if (!scores.needs_words()) {
            return scores.rounded_ds([&](int i) { return scores.pair_of(rP, i); }, acc_ds, delta);
        }
        auto rdS = scores.rounded_ds([&](int i) { return scores.load_pair(this->ds_words(), i); }, acc_ds, delta);
        sync(Barrier::warpgroup, warpgroup, 128);  // every thread has read its words
        return rdS;
    }
};

// BwdSplit::products. Consumer 0 computes S, P and dV. Consumer 1 gets P from it through shared memory, and computes
// dP, dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::q_state, Base::dout_state, Base::ds_state;
    using typename Base::Element, typename Base::Scores;
    PipelineState<Traits::kStagesdS> p_state;

    __device__ __forceinline__ uint32_t *p_words() const { return shared.p + p_state.stage * Traits::kWordsOfScores; }

    // S becomes P, the A operand of dV. Consumer 1 finds in shared memory what dS needs of it.
    __device__ __forceinline__ auto form_p(bool is_large, Scores &acc_s) const {
        const float *lse = shared.lse[q_state.stage];
        if (scores.is_plain()) {
            auto rP = scores.rounded_p(step, is_large, acc_s, lse);
            CUTE_UNROLL
            for (int i = 0; i < size(rP) / 2; ++i) {
                scores.store_pair(p_words(), i, scores.pair_of(rP, i));
            }
            return rP;
        }
        scores.recompute_p(step, is_large, acc_s, lse, p_words());
        return scores.template split_p</*kAlwaysStores=*/true>(acc_s, p_words());
    }

public:
    using Base::Base;

    template <typename TensorKV>
    __device__ __forceinline__ void run_dv(TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dv);
        }
        this->wait_for_KV(shared.k_barrier, shared.k);
        for (bool accumulates = false; steps_left > 0; --steps_left, accumulates = true) {
            const bool is_large = scores.is_large(step);
            Scores acc_s;
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, q_state, acc_s);
            p_state.acquire(shared.p_barriers);
            wait_for<0>(acc_s);
            auto rP = form_p(is_large, acc_s);
            q_state.release(shared.q_barriers);
            __syncwarp();
            if (cute::elect_one_sync()) {
                shared.p_barriers.full[p_state.stage].arrive();
            }
            p_state.advance();
            this->wait_for_dO();
            this->issue_dkv(accumulates, rP, shared.dout, dout_state, acc_dv);
            wait_for<0>(acc_dv);
            dout_state.release(shared.dout_barriers);
            this->advance_step();
        }
    }

    template <typename TensorKV>
    __device__ __forceinline__ void run_dk(TensorKV &acc_dk) {
        if (steps_left == 0) {
            clear(acc_dk);
        }
        this->wait_for_KV(shared.v_barrier, shared.v);
        for (bool accumulates = false; steps_left > 0; --steps_left, accumulates = true) {
            Scores acc_ds;
            this->wait_for_dO();
            this->issue_scores(shared.v, shared.dout, dout_state, acc_ds);
            p_state.wait(shared.p_barriers);
            wait_for<0>(acc_ds);
            const uint32_t *words = p_words();
            auto rdS =
                scores.rounded_ds([&](int i) { return scores.load_pair(words, i); }, acc_ds, shared.delta[dout_state.stage]);
            __syncwarp();
            p_state.release(shared.p_barriers);
            p_state.advance();
            dout_state.release(shared.dout_barriers);
            this->send_ds(rdS);
            this->wait_for_Q();
            this->issue_dkv(accumulates, rdS, shared.q, q_state, acc_dk);
            wait_for<0>(acc_dk);
            q_state.release(shared.q_barriers);
            this->advance_step();
        }
    }
};

}  // namespace flash::sm90
