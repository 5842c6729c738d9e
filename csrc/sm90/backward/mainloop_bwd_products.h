// The consumers' side of the backward for BwdSplit::products: one consumer has S, P and dV of a key block, the other
// dP, dS and dK.
#pragma once

#include "consumer_bwd.h"

namespace flash::sm90 {

// BwdSplit::products. Consumer 0 computes S, P and dV. Consumer 1 gets P from it through shared memory, and computes
// dP, dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold. The tensor cores work on
// dV or dK beside the arithmetic of the next step.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::q_state, Base::dout_state, Base::ds_state;
    using typename Base::Element, typename Base::Scores, typename Base::Operand, typename Base::Probabilities;
    using Inputs = typename ScoresBwd<Traits, kKind>::Inputs;
    PipelineState<Traits::kStagesdS> p_state;

public:
    __device__ ProductConsumer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                               const ColumnBlock<Traits, kKind> &block, int warpgroup)
        : Base(params, shared, block, warpgroup) {}

    template <typename TensorKV>
    __device__ __forceinline__ void run_dv(TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dv);
            return;
        }
        this->wait_for_KV(shared.k_barriers, shared.k);
        this->wait_for_Q();
        const auto rng_state = scores.load_rng_state();
        auto inputs = scores.load_inputs(step);
        Scores first_s;
        this->issue_scores(shared.k, shared.q, q_state, first_s);
        const auto first_draws = scores.draw(step, rng_state);
        wait_for<0>(first_s);
        auto rP = send_p(inputs, first_draws, first_s);
        for (bool accumulates = false;; accumulates = true) {
            this->wait_for_dO();
            this->issue_dkv(accumulates, rP, shared.dout, dout_state, acc_dv);
            if (--steps_left == 0) {
                break;
            }
            q_state.advance();
            step.advance(this->block);
            inputs = scores.load_inputs(step);
            Scores next_s;
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, q_state, next_s);
            const auto draws = scores.draw(step, rng_state);
            wait_for<0>(next_s);
            warpgroup_fence_operand(acc_dv);
            Base::release(dout_state, shared.dout_barriers);
            dout_state.advance();
            rP = send_p(inputs, draws, next_s);
        }
        wait_for<0>(acc_dv);
        Base::release(dout_state, shared.dout_barriers);
    }

    template <typename TensorKV>
    __device__ __forceinline__ void run_dk(TensorKV &acc_dk) {
        if (steps_left == 0) {
            clear(acc_dk);
            return;
        }
        this->wait_for_KV(shared.v_barriers, shared.v);
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
            Base::release(q_state, shared.q_barriers);
            q_state.advance();
            rdS = send_ds(next_ds);
        }
        wait_for<0>(acc_dk);
        Base::release(q_state, shared.q_barriers);
    }

private:
    __device__ __forceinline__ uint32_t *p_words() const { return shared.p + p_state.stage * Traits::kWordsOfScores; }

    // S becomes P, the A operand of dV. Consumer 1 finds in shared memory what dS needs of it. Q is not read any more.
    __device__ __forceinline__ Operand send_p(const Inputs &inputs, const Draws<Traits> &draws, Scores &acc_s) {
        p_state.acquire(shared.p_barriers);
        const auto lse = scores.load_statistics(shared.lse[q_state.stage]);
        const Probabilities p = scores.rounded_p(step, inputs, scores.exchanged(draws), acc_s, lse);
        CUTE_UNROLL
        for (int i = 0; i < size(p.for_ds()) / 2; ++i) {
            scores.store_pair(p_words(), i, scores.pair_of(p.for_ds(), i));
        }
        __syncwarp();  // every lane has written its words
        Base::release(q_state, shared.q_barriers);
        if (cute::elect_one_sync()) {
            shared.p_barriers.full[p_state.stage].arrive();
        }
        p_state.advance();
        return p.for_dv;
    }

    // dP becomes dS, the A operand of dK, and goes to the dQ warpgroup. dO is not read any more.
    __device__ __forceinline__ auto send_ds(const Scores &acc_ds) {
        p_state.wait(shared.p_barriers);
        const uint32_t *words = p_words();
        Operand rdS = scores.rounded_ds([&](int i) { return scores.load_pair(words, i); }, acc_ds,
                                        scores.load_statistics(shared.delta[dout_state.stage]));
        Base::release(p_state, shared.p_barriers);
        p_state.advance();
        Base::release(dout_state, shared.dout_barriers);
        Base::send_ds(rdS);
        return rdS;
    }
};

}  // namespace flash::sm90
