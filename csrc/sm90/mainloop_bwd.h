// The consumers' side of the backward: S, dP, dV and dK of one key block, over all steps. Two ways to share the work,
// one for each BwdSplit.
#pragma once

#include "consumer_bwd.h"

namespace flash::sm90 {

// BwdSplit::keys. The consumer computes all four products for its own 64 keys. While it computes, the tensor cores work
// for it too: on dK beside the exponentials of the next step, on dV beside dS.
template <typename Traits, Kind kKind>
class KeyConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::state, Base::ds_state;
    using typename Base::Element, typename Base::Scores;

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
        this->issue_scores(shared.k, shared.q, state.stage, first_s);
        this->wait_for_KV(shared.v_barrier, shared.v);
        wait_for<0>(first_s);
        auto rP = form_p(is_large, first_s);
        // Nothing is under way where an iteration begins: ptxas follows products within an iteration only. S and dP are
        // new variables in each: wgmma would keep the old values until it overwrites them.
        for (bool accumulates = false;; accumulates = true) {
            Scores acc_ds;
            this->wait_for_dO();
            this->issue_scores(shared.v, shared.dout, state.stage, acc_ds);
            this->issue_dkv(accumulates, rP, shared.dout, state.stage, acc_dv);
            wait_for<1>(acc_ds);
            const int ds_stage = ds_state.stage;
            this->send_ds(form_ds(rP, acc_ds));
            sync(Barrier::warpgroup, this->warpgroup, 128);  // its part of dS is complete
            if (--steps_left == 0) {
                this->issue_dk(accumulates, ds_stage, state.stage, acc_dk);
                break;
            }
            const auto finished = state;
            state.advance();
            step.advance(this->block);
            is_large = scores.is_large(step);
            Scores next_s;
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, state.stage, next_s);
            this->issue_dk(accumulates, ds_stage, finished.stage, acc_dk);
            wait_for<1>(next_s);
            warpgroup_fence_operand(acc_dv);
            finished.release(shared.dout_barriers);
            rP = form_p(is_large, next_s);
            wait_for<0>(acc_dk);
            finished.release(shared.q_barriers);
        }
        wait_for<0>(acc_dk);
        warpgroup_fence_operand(acc_dv);
    }

private:
    // S becomes P, the A operand of dV. With softcap or dropout, what dS needs of P waits in the place of dS.
    __device__ __forceinline__ auto form_p(bool is_large, Scores &acc_s) {
        if (scores.is_plain()) {
            return scores.rounded_p(step, is_large, acc_s, shared.lse[state.stage]);
        }
        if (scores.needs_words()) {
            ds_state.acquire(shared.ds_barriers);
        }
        scores.recompute_p(step, is_large, acc_s, shared.lse[state.stage], this->ds_words());
        return scores.template split_p</*kAlwaysStores=*/false>(acc_s, this->ds_words());
    }

    // dP becomes dS, the A operand of dK.
    template <typename TensorA>
    __device__ __forceinline__ auto form_ds(const TensorA &rP, const Scores &acc_ds) {
        const float *delta = shared.delta[state.stage];
        if (!scores.needs_words()) {
            return scores.rounded_ds([&](int i) { return scores.pair_of(rP, i); }, acc_ds, delta);
        }
        auto rdS = scores.rounded_ds([&](int i) { return scores.load_pair(this->ds_words(), i); }, acc_ds, delta);
        sync(Barrier::warpgroup, this->warpgroup, 128);  // every thread has read its words
        return rdS;
    }
};

// BwdSplit::products. Consumer 0 computes S, P and dV. Consumer 1 gets P from it through shared memory, and computes
// dP, dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::state, Base::ds_state;
    using typename Base::Element, typename Base::Scores;
    PipelineState<Traits::kDsStages> p_state;

    __device__ __forceinline__ uint32_t *p_words() const { return shared.p + p_state.stage * Traits::kWordsOfScores; }

    // S becomes P, the A operand of dV. Consumer 1 finds in shared memory what dS needs of it.
    __device__ __forceinline__ auto form_p(bool is_large, Scores &acc_s) const {
        const float *lse = shared.lse[state.stage];
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
            this->issue_scores(shared.k, shared.q, state.stage, acc_s);
            p_state.acquire(shared.p_barriers);
            wait_for<0>(acc_s);
            auto rP = form_p(is_large, acc_s);
            state.release(shared.q_barriers);
            __syncwarp();
            if (cute::elect_one_sync()) {
                shared.p_barriers.full[p_state.stage].arrive();
            }
            p_state.advance();
            this->wait_for_dO();
            this->issue_dkv(accumulates, rP, shared.dout, state.stage, acc_dv);
            wait_for<0>(acc_dv);
            state.release(shared.dout_barriers);
            state.advance();
            step.advance(this->block);
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
            this->issue_scores(shared.v, shared.dout, state.stage, acc_ds);
            p_state.wait(shared.p_barriers);
            wait_for<0>(acc_ds);
            const uint32_t *words = p_words();
            auto rdS =
                scores.rounded_ds([&](int i) { return scores.load_pair(words, i); }, acc_ds, shared.delta[state.stage]);
            __syncwarp();
            p_state.release(shared.p_barriers);
            p_state.advance();
            state.release(shared.dout_barriers);
            this->send_ds(rdS);
            this->wait_for_Q();
            this->issue_dkv(accumulates, rdS, shared.q, state.stage, acc_dk);
            wait_for<0>(acc_dk);
            state.release(shared.q_barriers);
            state.advance();
            step.advance(this->block);
        }
    }
};

}  // namespace flash::sm90
