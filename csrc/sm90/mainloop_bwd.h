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
        Base::kv_state, Base::warpgroup;
    using typename Base::Element, typename Base::Scores;
    using DsState = PipelineState<Traits::kStagesdS>;
    using QState = PipelineState<Traits::kStagesQ>;
    static constexpr bool kComputesDq = Traits::kConsumersComputeDq;
    // dQ is sent before P of the next step is formed, where both do not fit the registers.
    static constexpr bool kSendsDqFirst = is_general(kKind) && Traits::kHeadDim > 64;
    PipelineState<1> dq_state;

public:
    __device__ KeyConsumer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                           const ColumnBlock<Traits, kKind> &block, const ConsumerStates<Traits> &states, int warpgroup)
        : Base(params, shared, block, states, warpgroup), dq_state(uniform(states.dq)) {}

    // acc_dk, acc_dv (MMA, MMA_M, MMA_N) get the sums over all steps. dK lacks the factor softmax_scale.
    template <typename TensorKV>
    __device__ __forceinline__ void run(TensorKV &acc_dk, TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dk);
            clear(acc_dv);
            this->wait_for_KV(shared.k_barriers, shared.k);
            this->wait_for_KV(shared.v_barriers, shared.v);
            release_KV();
            return;
        }
        bool is_large = scores.is_large(step);
        this->wait_for_KV(shared.k_barriers, shared.k);
        this->wait_for_Q();
        Scores first_s;
        this->issue_scores(shared.k, shared.q, q_state, first_s);
        this->wait_for_KV(shared.v_barriers, shared.v);
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
            const auto ds = this->send_ds(rdS);
            if constexpr (kComputesDq) {  // the next products need the registers of rP
                wait_for<0>(acc_dv);
            }
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
                if constexpr (!kSendsDqFirst) {
                    rP = form_p(is_large, next_s);
                }
                wait_for<0>(acc_dq);
                warpgroup_fence_operand(acc_dk);
                q.release(shared.q_barriers);
                send_dq(acc_dq);
                if constexpr (kSendsDqFirst) {
                    rP = form_p(is_large, next_s);
                }
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
        dout_state.release(shared.dout_barriers);
        q_state.release(shared.q_barriers);
        release_KV();
        this->advance_step();
    }

    // After run().
    __device__ __forceinline__ ConsumerStates<Traits> states() const {
        return {this->next_kv(), dq_state, q_state, dout_state, ds_state, {}};
    }

private:
    __device__ __forceinline__ void release_KV() const {
        kv_state.release(shared.k_barriers);
        kv_state.release(shared.v_barriers);
    }

    // dK += dS^T Q.
    template <typename TensorA, typename TensorKV>
    __device__ __forceinline__ void issue_dk(bool accumulates, const DsState &ds, const QState &q, TensorA &rdS,
                                             TensorKV &acc_dk) const {
        if constexpr (Traits::TileSize::kDsIn == DsIn::registers) {
            this->issue_dkv(accumulates, rdS, shared.q, q, acc_dk);
        } else {
            sync(Barrier::warpgroup, warpgroup, 128);  // its part of dS is complete
            Base::issue_dk(accumulates, this->stage_of(ds), q, acc_dk);
        }
    }

    // This consumer's tile of dQ, when both have sent dS.
    __device__ __forceinline__ auto issue_dq(const DsState &ds) const {
        auto acc = DqTile<Traits>::accumulator();
        ds.wait(shared.ds_barriers);
        DqTile<Traits>::issue(shared, this->stage_of(ds), warpgroup, acc);
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
// dP, dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold. The tensor cores work on
// dV or dK beside the arithmetic of the next step.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::q_state, Base::dout_state, Base::ds_state,
        Base::kv_state;
    using typename Base::Element, typename Base::Scores;
    PipelineState<Traits::kStagesdS> p_state;

public:
    __device__ ProductConsumer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                               const ColumnBlock<Traits, kKind> &block, const ConsumerStates<Traits> &states,
                               int warpgroup)
        : Base(params, shared, block, states, warpgroup), p_state(uniform(states.p)) {}

    template <typename TensorKV>
    __device__ __forceinline__ void run_dv(TensorKV &acc_dv) {
        this->wait_for_KV(shared.k_barriers, shared.k);
        if (steps_left == 0) {
            clear(acc_dv);
            kv_state.release(shared.k_barriers);
            return;
        }
        bool is_large = scores.is_large(step);
        this->wait_for_Q();
        Scores first_s;
        this->issue_scores(shared.k, shared.q, q_state, first_s);
        wait_for<0>(first_s);
        auto rP = send_p(is_large, first_s);
        for (bool accumulates = false;; accumulates = true) {
            this->wait_for_dO();
            this->issue_dkv(accumulates, rP, shared.dout, dout_state, acc_dv);
            if (--steps_left == 0) {
                break;
            }
            q_state.advance();
            step.advance(this->block);
            is_large = scores.is_large(step);
            Scores next_s;
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, q_state, next_s);
            wait_for<0>(next_s);
            warpgroup_fence_operand(acc_dv);
            dout_state.release(shared.dout_barriers);
            dout_state.advance();
            rP = send_p(is_large, next_s);
        }
        wait_for<0>(acc_dv);
        dout_state.release(shared.dout_barriers);
        kv_state.release(shared.k_barriers);
        this->advance_step();
    }

    template <typename TensorKV>
    __device__ __forceinline__ void run_dk(TensorKV &acc_dk) {
        this->wait_for_KV(shared.v_barriers, shared.v);
        if (steps_left == 0) {
            clear(acc_dk);
            kv_state.release(shared.v_barriers);
            return;
        }
        this->wait_for_dO();
        Scores first_ds;
        this->issue_scores(shared.v, shared.dout, dout_state, first_ds);
        wait_for<0>(first_ds);
        auto rdS = send_ds(first_ds);
        for (bool accumulates = false;; accumulates = true) {
            this->wait_for_Q();
            this->issue_dkv(accumulates, rdS, shared.q, q_state, acc_dk);
            if (--steps_left == 0) {
                break;
            }
            dout_state.advance();
            step.advance(this->block);
            Scores next_ds;
            this->wait_for_dO();
            this->issue_scores(shared.v, shared.dout, dout_state, next_ds);
            wait_for<0>(next_ds);
            warpgroup_fence_operand(acc_dk);
            q_state.release(shared.q_barriers);
            q_state.advance();
            rdS = send_ds(next_ds);
        }
        wait_for<0>(acc_dk);
        q_state.release(shared.q_barriers);
        kv_state.release(shared.v_barriers);
        this->advance_step();
    }

    // After run_dv() or run_dk().
    __device__ __forceinline__ ConsumerStates<Traits> states() const {
        return {this->next_kv(), {}, q_state, dout_state, ds_state, p_state};
    }

private:
    __device__ __forceinline__ uint32_t *p_words() const { return shared.p + p_state.stage * Traits::kWordsOfScores; }

    // S becomes P, the A operand of dV. Consumer 1 finds in shared memory what dS needs of it. Q is not read any more.
    __device__ __forceinline__ auto send_p(bool is_large, Scores &acc_s) {
        p_state.acquire(shared.p_barriers);
        auto rP = form_p(is_large, acc_s);
        __syncwarp();  // every lane has read lse and written its words
        q_state.release(shared.q_barriers);
        if (cute::elect_one_sync()) {
            shared.p_barriers.full[p_state.stage].arrive();
        }
        p_state.advance();
        return rP;
    }
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

    // dP becomes dS, the A operand of dK, and goes to the dQ warpgroup. dO is not read any more.
    __device__ __forceinline__ auto send_ds(const Scores &acc_ds) {
        p_state.wait(shared.p_barriers);
        const uint32_t *words = p_words();
        auto rdS = scores.rounded_ds([&](int i) { return scores.load_pair(words, i); }, acc_ds,
                                     shared.delta[dout_state.stage]);
        __syncwarp();
        p_state.release(shared.p_barriers);
        p_state.advance();
        dout_state.release(shared.dout_barriers);
        Base::send_ds(rdS);
        return rdS;
    }
};

}  // namespace flash::sm90
