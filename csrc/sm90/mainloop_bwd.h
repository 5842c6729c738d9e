// The consumers' side of the backward: S, dP, dV and dK of one key block, over all steps. Two ways to share the work,
// one for each BwdSplit.
#pragma once

#include "consumer_bwd.h"

namespace flash::sm90 {

// BwdSplit::keys. The consumer computes all four products for its own 64 keys. The tensor cores find the next product
// in the queue while the consumer computes: dP beside the exponentials, dV and dK beside the loads of the next step, S
// of the next step behind them.
template <typename Traits, Kind kKind>
class KeyConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using typename Base::Element, typename Base::TiledMmaSdP;
    using Base::params, Base::shared, Base::scores, Base::step, Base::steps_left, Base::state, Base::ds_state;
    using Accumulator = decltype(partition_fragment_C(TiledMmaSdP{}, typename Traits::TileS{}));

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
        Accumulator acc_p, acc_ds;  // (MMA, MMA_M, MMA_N)
        bool is_large = scores.is_large(step);
        this->wait_for_KV(shared.k_barrier, shared.k);
        issue_S(acc_p);
        this->wait_for_KV(shared.v_barrier, shared.v);
        issue_dP(acc_ds);
        form_p(is_large, acc_p, acc_ds);
        // Nothing is under way where an iteration begins: ptxas follows products within an iteration only.
        for (bool accumulates = false;; accumulates = true) {
            form_ds(acc_p, acc_ds);
            Tensor rP = make_tensor<Element>(operand_A_layout(acc_p.layout()));    // (MMA, MMA_M, MMA_K)
            Tensor rdS = make_tensor<Element>(operand_A_layout(acc_ds.layout()));  // (MMA, MMA_M, MMA_K)
            round_to_operand(acc_p, rP);
            this->issue_dkv(accumulates, rP, shared.dout, state.stage, acc_dv);
            round_to_operand(acc_ds, rdS);
            send_ds(rdS);
            this->issue_dkv(accumulates, rdS, shared.q, state.stage, acc_dk);
            if (--steps_left == 0) {
                break;
            }
            const auto finished = state;
            state.advance();
            step.advance(this->block);
            is_large = scores.is_large(step);
            wait_for<1>(acc_dv);  // the registers of P are free for S, and below those of dS for dP
            finished.release(shared.dout_barriers);
            Accumulator next_p, next_ds;  // of their own: wgmma would keep the old values until it overwrites them
            issue_S(next_p);
            wait_for<1>(acc_dk);
            finished.release(shared.q_barriers);
            issue_dP(next_ds);
            form_p(is_large, next_p, next_ds);
            copy(next_p, acc_p);
            copy(next_ds, acc_ds);
        }
        wait_for<0>(acc_dk);
        warpgroup_fence_operand(acc_dv);
    }

private:
    template <typename TensorS>
    __device__ __forceinline__ void issue_S(TensorS &acc_p) {
        this->wait_for_Q();
        this->issue_scores(shared.k, shared.q, state.stage, acc_p);
    }
    template <typename TensorS>
    __device__ __forceinline__ void issue_dP(TensorS &acc_ds) {
        this->wait_for_dO();
        this->issue_scores(shared.v, shared.dout, state.stage, acc_ds);
    }

    // S becomes P while dP is multiplied. Both are complete on return.
    template <typename TensorS>
    __device__ __forceinline__ void form_p(bool is_large, TensorS &acc_p, TensorS &acc_ds) {
        if (scores.has_softcap()) {
            ds_state.acquire(shared.ds_barriers);
        }
        wait_for<1>(acc_p);
        scores.recompute_p(step, is_large, acc_p, shared.lse[state.stage], this->ds_words());
        wait_for<0>(acc_ds);
    }

    template <typename TensorS>
    __device__ __forceinline__ void form_ds(TensorS &acc_p, TensorS &acc_ds) {
        scores.form_ds(acc_p, acc_ds, shared.delta[state.stage]);
        if (scores.has_softcap()) {
            scores.multiply_by_stash(acc_ds, this->ds_words());
            sync(Barrier::warpgroup, this->warpgroup, 128);  // every thread has read its words
        }
    }

    template <typename TensorA>
    __device__ __forceinline__ void send_ds(const TensorA &rdS) {
        ds_state.acquire(shared.ds_barriers);
        this->store_ds(rdS);
        if (cute::elect_one_sync()) {
            shared.ds_barriers.full[ds_state.stage].arrive();
        }
        ds_state.advance();
    }
};

// BwdSplit::products. Consumer 0 computes S, P and dV. Consumer 1 gets P from it through shared memory, and computes dP,
// dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using typename Base::Element, typename Base::TiledMmaSdP;
    using Base::params, Base::shared, Base::scores, Base::step, Base::steps_left, Base::state, Base::ds_state;
    PipelineState<Traits::kDsStages> p_state;

public:
    using Base::Base;

    template <typename TensorKV>
    __device__ __forceinline__ void run_dv(TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dv);
        }
        Tensor acc_p = partition_fragment_C(TiledMmaSdP{}, typename Traits::TileS{});  // (MMA, MMA_M, MMA_N)
        Tensor rP = make_tensor<Element>(operand_A_layout(acc_p.layout()));            // (MMA, MMA_M, MMA_K)
        this->wait_for_KV(shared.k_barrier, shared.k);
        for (bool accumulates = false; steps_left > 0; --steps_left, accumulates = true) {
            const bool is_large = scores.is_large(step);
            this->wait_for_Q();
            this->issue_scores(shared.k, shared.q, state.stage, acc_p);
            p_state.acquire(shared.p_barriers);
            uint32_t *words = this->shared.p + p_state.stage * Traits::kWordsOfScores;
            wait_for<0>(acc_p);
            scores.recompute_p(step, is_large, acc_p, shared.lse[state.stage], words);
            state.release(shared.q_barriers);
            send_p(acc_p, rP, words);
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
        Tensor acc_ds = partition_fragment_C(TiledMmaSdP{}, typename Traits::TileS{});  // (MMA, MMA_M, MMA_N)
        Tensor rdS = make_tensor<Element>(operand_A_layout(acc_ds.layout()));           // (MMA, MMA_M, MMA_K)
        this->wait_for_KV(shared.v_barrier, shared.v);
        for (bool accumulates = false; steps_left > 0; --steps_left, accumulates = true) {
            this->wait_for_dO();
            this->issue_scores(shared.v, shared.dout, state.stage, acc_ds);
            p_state.wait(shared.p_barriers);
            Tensor rP = make_fragment_like(rdS);
            uint32_t *words = this->shared.p + p_state.stage * Traits::kWordsOfScores;
            CUTE_UNROLL
            for (int i = 0; i < size(rP) / 2; ++i) {
                reinterpret_cast<uint32_t *>(rP.data())[i] = words[i * 128 + threadIdx.x % 128];
            }
            release_p();
            wait_for<0>(acc_ds);
            scores.form_ds_from(rP, acc_ds, shared.delta[state.stage]);
            state.release(shared.dout_barriers);
            round_to_operand(acc_ds, rdS);
            ds_state.acquire(shared.ds_barriers);
            this->store_ds(rdS);
            if (cute::elect_one_sync()) {
                shared.ds_barriers.full[ds_state.stage].arrive();
            }
            ds_state.advance();
            this->wait_for_Q();
            this->issue_dkv(accumulates, rdS, shared.q, state.stage, acc_dk);
            wait_for<0>(acc_dk);
            state.release(shared.q_barriers);
            state.advance();
            step.advance(this->block);
        }
    }

private:
    // P in registers for dV, and in shared memory for consumer 1: there with the marks of dropped probabilities, and
    // times the derivative of the softcap.
    template <typename TensorP, typename TensorA>
    __device__ __forceinline__ void send_p(TensorP &acc_p, TensorA &rP, uint32_t *words) {
        using Pair = typename ScoresBwd<Traits, kKind>::Pair;
        CUTE_UNROLL
        for (int i = 0; i < size(acc_p) / 2; ++i) {
            float p[2] = {acc_p(2 * i), acc_p(2 * i + 1)};
            reinterpret_cast<Pair *>(rP.data())[i] = scores.rounded(without_mark(p[0]), without_mark(p[1]));
            if (scores.has_softcap()) {
                const Pair derivative = scores.load_pair(words, i);
                p[0] *= float(derivative[0]);
                p[1] *= float(derivative[1]);
            }
            scores.store_pair(words, i, scores.rounded(p[0], p[1]));
        }
        __syncwarp();
        if (cute::elect_one_sync()) {
            shared.p_barriers.full[p_state.stage].arrive();
        }
        p_state.advance();
    }
    __device__ __forceinline__ float without_mark(float p) const { return scores.has_dropout() ? fmaxf(p, 0.0f) : p; }

    __device__ __forceinline__ void release_p() {
        __syncwarp();
        p_state.release(shared.p_barriers);
        p_state.advance();
    }
};

}  // namespace flash::sm90
