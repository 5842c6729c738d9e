// The consumers' side of the backward: S, dP, dV and dK of one key block, over all steps, and dQ with DqBy::consumers.
// KeyConsumer and ProductConsumer are the two ways to share the work of a step (BwdSplit).
#pragma once

#include "consumer_bwd.h"
#include "dq_tile.h"

namespace flash::sm90 {

// BwdSplit::keys. The consumer computes S, dP, dV and dK for its own 64 keys; with DqBy::consumers, a tile of dQ too.
// Products overlap arithmetic: dK overlaps the exponentials of the next step, dV overlaps dS, and dQ overlaps one of
// these two.
template <typename Traits, Kind kKind>
class KeyConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::kv_state, Base::q_state, Base::dout_state,
        Base::ds_state, Base::warpgroup;
    using typename Base::Element, typename Base::Scores, typename Base::Operand, typename Base::Probabilities,
        typename Base::TilesQK, typename Base::TilesdOV;
    using DsState = PipelineState<Traits::kStagesdS>;
    using QState = PipelineState<Traits::kStagesQ>;
    // The schedule of a step. False: run_without_dq().
    static constexpr bool kComputesDq = Traits::kConsumersComputeDq;
    // run_with_dq(): dQ is multiplied together with dK of the same step; else together with dP of the next step.
    static constexpr bool kDqJoinsDk = Traits::kHeadDim <= 64;
    // run_with_dq_after_dp(): dropout needs two P operands, which leave too few registers for run_with_dq().
    static constexpr bool kDpComesFirst = Traits::kHeadDim > 64 && Traits::kMayDrop;
    // run_with_dq_in_turns(): there are more tiles of dQ than consumers.
    static constexpr bool kDqComesInTurns = kComputesDq && Traits::kTilesOfDq > Traits::kConsumers;
    // dP reads V of the consumer's keys from 16 registers, which saves traffic of shared memory. Kind general has no
    // registers to spare.
    static constexpr bool kHoldsV = Traits::kHeadDim == 64 && !is_general(kKind);
    static_assert(!(kHoldsV && Traits::kDpStartsAtDelta), "dP with V in registers starts at 0");
    PipelineState<1> dq_state;

public:
    __device__ KeyConsumer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                           const ColumnBlock<Traits, kKind> &block, int warpgroup, const DoneBefore &done)
        : Base(params, shared, block, warpgroup, done), dq_state(position_after<1>(done.steps)) {}

    // acc_dk, acc_dv (MMA, MMA_M, MMA_N) get the sums over all steps. dK lacks the factor softmax_scale.
    template <typename TensorK, typename TensorV>
    __device__ __forceinline__ void run(TensorK &acc_dk, TensorV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dk);
            clear(acc_dv);
            if constexpr (kHasNextBlock) {  // the loader has sent no bytes
                kv_state.wait(shared.k_barriers);
                kv_state.wait(shared.v_barriers);
                release_key_block(shared.k_barriers);
            }
            return;
        }
        scores.start_bias(step);
        this->wait_for_K();
        this->wait_for_Q();
        const auto inputs = scores.load_inputs(step);
        const auto lse = lse_of_step();
        const auto visible = this->visible_of_step();
        const auto dropout_bits = dropout_bits_of_step();
        Scores first_s;
        this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, first_s);
        this->wait_for_V();
        wait_for<0>(first_s);
        Probabilities p = scores.rounded_p(step, inputs, visible, dropout_bits, first_s, lse);
        if constexpr (!kComputesDq) {
            run_without_dq(p, acc_dk, acc_dv);
        } else if constexpr (kDqComesInTurns) {
            run_with_dq_in_turns(p, acc_dk, acc_dv);
        } else if constexpr (kDpComesFirst) {
            run_with_dq_after_dp(p, acc_dk, acc_dv);
        } else {
            run_with_dq(p, acc_dk, acc_dv);
        }
        wait_for<0>(acc_dk);
        if constexpr (kHasNextBlock) {
            Base::release(q_state, shared.q_barriers);
        }
    }

    // Call it after the key block's last access to V. K is released before.
    __device__ __forceinline__ void release_V() const { release_key_block(shared.v_barriers); }

private:
    static constexpr bool kHasNextBlock = may_group_key_blocks<Traits, kKind>();

    // K or V of the next key block may be loaded: products have read this one's, and what threads have written there
    // is ordered before what TMA will write.
    __device__ __forceinline__ void release_key_block(PipelineBarriers<1> &barriers) const {
        if constexpr (kHasNextBlock) {
            cutlass::arch::fence_view_async_shared();
            Base::release(kv_state, barriers);
        }
    }

    // No product is in flight at the head of a loop, because ptxas follows products within an iteration only. S, dP and
    // dQ are new variables in each iteration: wgmma would keep the old values until it overwrites them.
    //
    // A warp's loads from shared memory wait behind the products that it has issued, and its next product waits for
    // those loads. So row statistics are loaded where other work hides them.

    // An iteration begins when dV of a step is complete and dS is sent. It computes dK and dQ of this step, and P, dV
    // and dS of the next. With kDqJoinsDk, dQ is multiplied together with dK, and stored while the tensor cores compute
    // dP of the next step: then all four accumulators hold values. Else dQ is multiplied together with dP of the next
    // step, so that no consumer waits for the dS that the other is still computing.
    template <typename TensorKV>
    __device__ __forceinline__ void run_with_dq(Probabilities &p, TensorKV &acc_dk, TensorKV &acc_dv) {
        const auto rV = held_V();
        this->wait_for_dO();
        const auto first_delta = delta_of_step();
        Scores first_ds;
        issue_dp(first_ds, rV);
        issue_dv(/*accumulates=*/false, p, acc_dv);
        wait_for<1>(first_ds);
        Operand rdS = scores.rounded_ds(p.for_ds(), first_ds, first_delta);
        auto ds = this->send_ds(rdS);
        wait_for<0>(acc_dv);
        Base::release(dout_state, shared.dout_barriers);
        bool accumulates = false;
        for (; steps_left > 1; --steps_left, accumulates = true) {
            Scores acc_ds, next_s;
            const auto q = q_state;
            this->advance_step();
            const auto inputs = scores.load_inputs(step);
            this->wait_for_Q();
            const auto lse = lse_of_step();
            const auto visible = this->visible_of_step();
            const auto dropout_bits = dropout_bits_of_step();
            this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, next_s);
            if constexpr (kDqJoinsDk) {
                auto acc_dq = issue_dq(ds);
                issue_dk(accumulates, ds, q, rdS, acc_dk);
                wait_for<2>(next_s);
                p = scores.rounded_p(step, inputs, visible, dropout_bits, next_s, lse);
                wait_for<0>(acc_dk);
                warpgroup_fence_operand(acc_dq);
                Base::release(q, shared.q_barriers);
                this->wait_for_dO();
                issue_dp(acc_ds, rV);
                issue_dv(/*accumulates=*/true, p, acc_dv);
                store_dq(acc_dq);
                const auto delta = delta_of_step();
                wait_for<1>(acc_ds);
                rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta);
            } else {
                issue_dk(accumulates, ds, q, rdS, acc_dk);
                wait_for<1>(next_s);
                p = scores.rounded_p(step, inputs, visible, dropout_bits, next_s, lse);
                this->wait_for_dO();
                const auto delta = delta_of_step();
                wait_for<0>(acc_dk);
                Base::release(q, shared.q_barriers);
                issue_dp(acc_ds, rV);
                auto acc_dq = issue_dq(ds);
                issue_dv(/*accumulates=*/true, p, acc_dv);
                wait_for<2>(acc_ds);
                rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta);
                wait_for<1>(acc_dq);  // it has read its stage of dS, which the other may overwrite when dS is sent
                store_dq(acc_dq);
            }
            ds = this->send_ds(rdS);
            send_dq();  // behind the fence of dS
            wait_for<0>(acc_dv);
            Base::release(dout_state, shared.dout_barriers);
        }
        compute_last_dk_and_dq(accumulates, ds, rdS, acc_dk);
    }

    // An iteration begins with dP and dV of a step. dQ is complete, and its registers are free, before the next dP
    // needs them.
    template <typename TensorKV>
    __device__ __forceinline__ void run_with_dq_after_dp(Probabilities &p, TensorKV &acc_dk, TensorKV &acc_dv) {
        this->wait_for_dO();
        auto delta = delta_of_step();
        bool accumulates = false;
        for (; steps_left > 1; --steps_left, accumulates = true) {
            Scores acc_ds, next_s;
            const auto q = q_state;
            const auto dout = dout_state;
            issue_dp(acc_ds);
            issue_dv(accumulates, p, acc_dv);
            this->advance_step();
            const auto inputs = scores.load_inputs(step);
            this->wait_for_Q();
            wait_for<1>(acc_ds);
            Operand rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta);
            const auto lse = lse_of_step();
            const auto visible = this->visible_of_step();
            const auto ds = this->send_ds(rdS);
            if (accumulates) {
                send_dq();  // of the step before, behind the fence of dS
            }
            wait_for<0>(acc_dv);  // the next products need the registers of P
            Base::release(dout, shared.dout_barriers);
            const auto dropout_bits = dropout_bits_of_step();
            this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, next_s);
            auto acc_dq = issue_dq(ds);
            issue_dk(accumulates, ds, q, rdS, acc_dk);
            wait_for<2>(next_s);
            p = scores.rounded_p(step, inputs, visible, dropout_bits, next_s, lse);
            this->wait_for_dO();
            delta = delta_of_step();
            wait_for<1>(acc_dq);
            store_dq(acc_dq);
            wait_for<0>(acc_dk);
            Base::release(q, shared.q_barriers);
        }
        Scores acc_ds;
        issue_dp(acc_ds);
        issue_dv(accumulates, p, acc_dv);
        wait_for<1>(acc_ds);
        Operand rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta);
        const auto ds = this->send_ds(rdS);
        if (accumulates) {
            send_dq();
        }
        wait_for<0>(acc_dv);
        Base::release(dout_state, shared.dout_barriers);
        compute_last_dk_and_dq(accumulates, ds, rdS, acc_dk);
    }

    // An iteration begins when dV of a step is complete and dS is sent. The registers hold dK and dV with one more
    // tile: S of the next step, which is multiplied together with dK, then tiles of dQ, then dP together with dV.
    template <typename TensorK, typename TensorV>
    __device__ __forceinline__ void run_with_dq_in_turns(Probabilities &p, TensorK &acc_dk, TensorV &acc_dv) {
        this->wait_for_dO();
        auto ds = send_ds_of_step(/*accumulates=*/false, p, acc_dv);
        bool accumulates = false;
        for (; steps_left > 1; --steps_left, accumulates = true) {
            const auto q = q_state;
            const bool has_turn = has_turn_in(step);
            this->advance_step();
            const auto inputs = scores.load_inputs(step);
            this->wait_for_Q();
            const auto visible = this->visible_of_step();
            Scores next_s;
            this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, next_s);
            Base::issue_dk(accumulates, ds.stage, q, acc_dk);
            wait_for<1>(next_s);
            p = scores.rounded_p(step, inputs, visible, {}, next_s, lse_of_step());
            multiply_dq(ds, has_turn);
            warpgroup_fence_operand(acc_dk);
            Base::release(q, shared.q_barriers);
            this->wait_for_dO();
            ds = send_ds_of_step(/*accumulates=*/true, p, acc_dv);
        }
        Base::issue_dk(accumulates, ds.stage, q_state, acc_dk);
        multiply_dq(ds, has_turn_in(step));
    }

    // dP, dV and dS of a step. Returns the stage of dS.
    template <typename TensorV>
    __device__ __forceinline__ DsState send_ds_of_step(bool accumulates, Probabilities &p, TensorV &acc_dv) {
        Scores acc_ds;
        issue_dp(acc_ds);
        issue_dv(accumulates, p, acc_dv);
        wait_for<1>(acc_ds);
        const Operand rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta_of_step());
        const auto ds = this->send_ds(rdS);
        wait_for<0>(acc_dv);
        Base::release(dout_state, shared.dout_barriers);
        return ds;
    }

    __device__ __forceinline__ bool has_turn_in(const Step &step) const {
        return DqTile<Traits>::consumer_in_turn(step) == warpgroup;
    }

    // This consumer's tile of dQ, when both have sent dS, and the last one in turn. All products are complete when this
    // returns.
    __device__ __forceinline__ void multiply_dq(const DsState &ds, bool has_turn) {
        auto acc_dq = issue_dq(ds);
        wait_for<0>(acc_dq);
        store_dq(acc_dq, warpgroup);
        complete_dq(warpgroup);
        if (has_turn) {
            auto last_dq = DqTile<Traits>::accumulator();
            DqTile<Traits>::issue(shared, ds.stage, Traits::kConsumers, last_dq);
            wait_for<0>(last_dq);
            store_dq(last_dq, Traits::kConsumers);
            complete_dq(Traits::kConsumers);
        }
        dq_state.advance();  // of both tiles
    }

    template <typename TensorKV>
    __device__ __forceinline__ void run_without_dq(Probabilities &p, TensorKV &acc_dk, TensorKV &acc_dv) {
        for (bool accumulates = false;; accumulates = true) {
            Scores acc_ds;
            this->wait_for_dO();
            const auto delta = delta_of_step();
            issue_dp(acc_ds);
            issue_dv(accumulates, p, acc_dv);
            wait_for<1>(acc_ds);
            Operand rdS = scores.rounded_ds(p.for_ds(), acc_ds, delta);
            const auto ds = this->send_ds(rdS);
            if (--steps_left == 0) {
                issue_dk(accumulates, ds, q_state, rdS, acc_dk);
                warpgroup_fence_operand(acc_dv);
                break;
            }
            const auto q = q_state;
            const auto dout = dout_state;
            this->advance_step();
            const auto inputs = scores.load_inputs(step);
            Scores next_s;
            this->wait_for_Q();
            const auto lse = lse_of_step();
            const auto visible = this->visible_of_step();
            const auto dropout_bits = dropout_bits_of_step();
            this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, next_s);
            issue_dk(accumulates, ds, q, rdS, acc_dk);
            wait_for<1>(next_s);
            warpgroup_fence_operand(acc_dv);
            Base::release(dout, shared.dout_barriers);
            p = scores.rounded_p(step, inputs, visible, dropout_bits, next_s, lse);
            wait_for<0>(acc_dk);
            Base::release(q, shared.q_barriers);
        }
        wait_for<0>(acc_dk);
        Base::release(dout_state, shared.dout_barriers);
    }

    // dK and dQ of the last step, after the loop. dK is in flight when this returns.
    template <typename TensorKV>
    __device__ __forceinline__ void compute_last_dk_and_dq(bool accumulates, const DsState &ds, Operand &rdS,
                                                           TensorKV &acc_dk) {
        auto acc_dq = issue_dq(ds);
        issue_dk(accumulates, ds, q_state, rdS, acc_dk);
        wait_for<1>(acc_dq);
        release_key_block(shared.k_barriers);
        store_dq(acc_dq);
        complete_dq();
    }

    // Called before products are issued, because the exchange between lanes would wait for them.
    __device__ __forceinline__ DropoutBits<Traits> dropout_bits_of_step() const {
        if constexpr (!Traits::kHasDropoutWarpgroup) {
            return scores.exchanged(scores.draw(step, scores.load_rng_state()));
        } else if (scores.has_dropout()) {
            shared.dropout_bits_full[q_state.stage].wait(q_state.phase);
            return load_dropout_bits<Traits>(shared.dropout_bits[q_state.stage], warpgroup);
        }
        return {};
    }
    __device__ __forceinline__ auto lse_of_step() const { return scores.load_statistics(shared.lse[q_state.stage]); }
    __device__ __forceinline__ auto delta_of_step() const {
        if constexpr (Traits::kDpStartsAtDelta) {
            return typename ScoresBwd<Traits, kKind>::DeltaIsInDp();
        } else {
            return scores.load_statistics(shared.delta[dout_state.stage]);
        }
    }

    // V in registers, or nothing where dP reads it from shared memory.
    struct InSharedMemory {};
    __device__ __forceinline__ auto held_V() const {
        if constexpr (kHoldsV) {
            return this->load_V();
        } else {
            return InSharedMemory();
        }
    }

    template <typename TensorV = InSharedMemory>
    __device__ __forceinline__ void issue_dp(Scores &acc_ds, const TensorV &rV = {}) const {
        if constexpr (std::is_same_v<TensorV, InSharedMemory>) {
            Base::issue_dp(acc_ds);
        } else {
            Base::issue_dp(rV, acc_ds);
        }
    }

    // dV += P^T dO.
    template <typename TensorKV>
    __device__ __forceinline__ void issue_dv(bool accumulates, Probabilities &p, TensorKV &acc_dv) const {
        this->template issue_dkv<TilesdOV>(accumulates, p.for_dv, shared.dout, dout_state, acc_dv);
    }

    // dK += dS^T Q.
    template <typename TensorA, typename TensorKV>
    __device__ __forceinline__ void issue_dk(bool accumulates, const DsState &ds, const QState &q, TensorA &rdS,
                                             TensorKV &acc_dk) const {
        if constexpr (Traits::kDsIn == DsIn::registers) {
            this->template issue_dkv<TilesQK>(accumulates, rdS, shared.q, q, acc_dk);
        } else {
            if constexpr (!kComputesDq) {  // else issue_dq has waited for all of dS
                sync(Barrier::warpgroup, warpgroup, 128);
            }
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

    // dQ goes to the warp that adds it: stored, then sent behind a fence.
    template <typename TensorDq>
    __device__ __forceinline__ void store_dq(const TensorDq &acc) const {
        store_dq(acc, warpgroup);
    }
    template <typename TensorDq>
    __device__ __forceinline__ void store_dq(const TensorDq &acc, int tile) const {
        dq_state.acquire(shared.dq_barriers[tile]);
        auto *target = reinterpret_cast<float4 *>(shared.dq[tile]);
        CUTE_UNROLL
        for (int i = 0; i < DqTile<Traits>::kVectors; ++i) {
            target[DqTile<Traits>::place(i, scores.thread)] = DqTile<Traits>::vector(acc, i);
        }
    }
    __device__ __forceinline__ void send_dq() {
        arrive_at_dq(warpgroup);
        dq_state.advance();
    }
    __device__ __forceinline__ void arrive_at_dq(int tile) const {
        if (cute::elect_one_sync()) {
            shared.dq_barriers[tile].full[0].arrive();
        }
    }
    __device__ __forceinline__ void complete_dq() {
        complete_dq(warpgroup);
        dq_state.advance();
    }
    __device__ __forceinline__ void complete_dq(int tile) const {
        cutlass::arch::fence_view_async_shared();  // before the copy engine reads it
        __syncwarp();
        arrive_at_dq(tile);
    }
};

// BwdSplit::products. Consumer 0 computes S, P and dV. Consumer 1 gets P from it through shared memory, and computes
// dP, dS and dK. Each accumulates one tile of 64 keys, which is all that its registers hold. Without a peer, dV and dK
// are multiplied together with S and dP of the next step.
template <typename Traits, Kind kKind>
class ProductConsumer : ConsumerBwd<Traits, kKind> {
    using Base = ConsumerBwd<Traits, kKind>;
    using Base::shared, Base::scores, Base::step, Base::steps_left, Base::q_state, Base::dout_state, Base::ds_state;
    using typename Base::Element, typename Base::Scores, typename Base::Operand, typename Base::Probabilities,
        typename Base::TilesQK, typename Base::TilesdOV;
    using Inputs = typename ScoresBwd<Traits, kKind>::Inputs;
    using VisibleScores = typename ScoresBwd<Traits, kKind>::VisibleScores;
    PipelineState<Traits::kStagesdS> p_state;

public:
    __device__ ProductConsumer(const Flash_bwd_params &params, typename Traits::SharedStorage &shared,
                               const ColumnBlock<Traits, kKind> &block, int warpgroup, const DoneBefore &done)
        : Base(params, shared, block, warpgroup, done) {}

    template <typename TensorKV>
    __device__ __forceinline__ void run_dv(TensorKV &acc_dv) {
        if (steps_left == 0) {
            clear(acc_dv);
            return;
        }
        scores.start_bias(step);
        this->wait_for_K();
        this->wait_for_Q();
        const auto rng_state = scores.load_rng_state();
        auto inputs = scores.load_inputs(step);
        auto visible = this->visible_of_step();
        Scores first_s;
        this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, first_s);
        const auto first_draws = scores.draw(step, rng_state);
        wait_for<0>(first_s);
        auto rP = send_p(inputs, visible, first_draws, first_s);
        for (bool accumulates = false;; accumulates = true) {
            this->wait_for_dO();
            this->template issue_dkv<TilesdOV>(accumulates, rP, shared.dout, dout_state, acc_dv);
            if (--steps_left == 0) {
                break;
            }
            q_state.advance();
            step.advance(this->block);
            inputs = scores.load_inputs(step);
            Scores next_s;
            this->wait_for_Q();
            visible = this->visible_of_step();
            if constexpr (!kScoresOverlap) {
                complete(acc_dv, dout_state, shared.dout_barriers);
            }
            this->template issue_scores<TilesQK>(shared.k, shared.q, q_state, next_s);
            const auto dropout_bits = scores.draw(step, rng_state);
            wait_for<0>(next_s);
            if constexpr (kScoresOverlap) {
                release_read(acc_dv, dout_state, shared.dout_barriers);
            }
            dout_state.advance();
            rP = send_p(inputs, visible, dropout_bits, next_s);
        }
        complete(acc_dv, dout_state, shared.dout_barriers);
    }

    template <typename TensorKV>
    __device__ __forceinline__ void run_dk(TensorKV &acc_dk) {
        if (steps_left == 0) {
            clear(acc_dk);
            return;
        }
        this->wait_for_V();
        this->wait_for_dO();
        Scores first_ds;
        this->template issue_scores<TilesdOV>(shared.v, shared.dout, dout_state, first_ds);
        wait_for<0>(first_ds);
        auto rdS = send_ds(first_ds);
        for (bool accumulates = false;; accumulates = true) {
            this->wait_for_Q();
            this->template issue_dkv<TilesQK>(accumulates, rdS, shared.q, q_state, acc_dk);
            if (--steps_left == 0) {
                break;
            }
            dout_state.advance();
            step.advance(this->block);
            Scores next_ds;
            this->wait_for_dO();
            if constexpr (!kScoresOverlap) {
                complete(acc_dk, q_state, shared.q_barriers);
            }
            this->template issue_scores<TilesdOV>(shared.v, shared.dout, dout_state, next_ds);
            wait_for<0>(next_ds);
            if constexpr (kScoresOverlap) {
                release_read(acc_dk, q_state, shared.q_barriers);
            }
            q_state.advance();
            rdS = send_ds(next_ds);
        }
        complete(acc_dk, q_state, shared.q_barriers);
    }

private:
    // S or dP of a step is multiplied together with dV or dK of the step before. A pair of CTAs has too few registers
    // for both: ptxas would serialize all products.
    static constexpr bool kScoresOverlap = Traits::kCtas == 1;

    // Waits for the product into dV or dK, which has then read its stage of dO or Q.
    template <typename TensorKV, int kStages>
    __device__ __forceinline__ static void complete(TensorKV &acc, const PipelineState<kStages> &state,
                                                    PipelineBarriers<kStages> &barriers) {
        warpgroup_wait<0>();
        release_read(acc, state, barriers);
    }
    // The same where no product is in flight.
    template <typename TensorKV, int kStages>
    __device__ __forceinline__ static void release_read(TensorKV &acc, const PipelineState<kStages> &state,
                                                        PipelineBarriers<kStages> &barriers) {
        warpgroup_fence_operand(acc);
        Base::release_rows(state, barriers);
    }

    // P lies where dS of the same keys will: each warp of consumer 1 reads the words that it overwrites. P may be
    // written when the stage of dS is empty.
    static constexpr bool kPIsInDs = Traits::kCtas > 1;

    __device__ __forceinline__ uint32_t *p_words() const { return shared.p + p_state.stage * Traits::kWordsOfScores; }

    // S becomes P, the A operand of dV. Consumer 1 finds in shared memory what dS needs of it. Q is not read any more.
    __device__ __forceinline__ Operand send_p(const Inputs &inputs, const VisibleScores &visible,
                                              const DropoutBits<Traits> &dropout_bits, Scores &acc_s) {
        if constexpr (!kPIsInDs) {
            p_state.acquire(shared.p_barriers);
        }
        const auto lse = scores.load_statistics(shared.lse[q_state.stage]);
        const Probabilities p = scores.rounded_p(step, inputs, visible, scores.exchanged(dropout_bits), acc_s, lse);
        if constexpr (kPIsInDs) {
            ds_state.acquire(shared.ds_barriers);
            Base::store_transposed(p.for_ds());
            ds_state.advance();
        } else {
            CUTE_UNROLL
            for (int i = 0; i < size(p.for_ds()) / 2; ++i) {
                scores.store_pair(p_words(), i, scores.pair_of(p.for_ds(), i));
            }
        }
        __syncwarp();  // every lane has written its words
        Base::release_rows(q_state, shared.q_barriers);
        if (cute::elect_one_sync()) {
            shared.p_barriers.full[p_state.stage].arrive();
        }
        p_state.advance();
        return p.for_dv;
    }

    // dP becomes dS, the A operand of dK, and goes to the dQ warpgroup. dO is not read any more.
    __device__ __forceinline__ auto send_ds(const Scores &acc_ds) {
        p_state.wait(shared.p_barriers);
        Operand rdS;
        if constexpr (kPIsInDs) {
            const Operand p = Base::load_transposed();
            rdS = scores.rounded_ds(p, acc_ds, scores.load_statistics(shared.delta[dout_state.stage]));
        } else {
            const uint32_t *words = p_words();
            rdS = scores.rounded_ds([&](int i) { return scores.load_pair(words, i); }, acc_ds,
                                    scores.load_statistics(shared.delta[dout_state.stage]));
            Base::release(p_state, shared.p_barriers);
        }
        p_state.advance();
        Base::release_rows(dout_state, shared.dout_barriers);
        Base::send_ds(rdS);
        return rdS;
    }
};

}  // namespace flash::sm90
