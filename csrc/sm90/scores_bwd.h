// P and dS of a consumer warpgroup, in the registers of wgmma's accumulators: keys are rows, queries are columns. The
// arithmetic is common/softmax_backward.h.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "../common/dropout.h"
#include "../common/score_mod.h"
#include "../common/softmax_backward.h"
#include "kernel_traits_bwd.h"
#include "layout.h"
#include "steps_bwd.h"

namespace flash::sm90 {

template <typename Traits, Kind kKind>
class ScoresBwd {
    using Element = typename Traits::Element;
    static constexpr bool kIsGeneral = is_general(kKind);

public:
    // first_key: of the consumer, in the sequence.
    __device__ ScoresBwd(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block, int first_key)
        : params(params), block(block), first_key(first_key) {}

    // True if a row of the step has a large log-sum-exp. Loads from global memory.
    __device__ __forceinline__ bool is_large(const Step &step) const {
        constexpr int kFlagRows = Flash_bwd_params::kRowsPerFlag;
        const int *flags = params.large_rows + step.padded_row(params, block) / kFlagRows;
        int flag = flags[0];
        if constexpr (Traits::kBlockM > kFlagRows) {
            flag |= flags[1];
        }
        return flag != 0;
    }

    // S^T becomes P^T = exp(S^T - lse); with dropout, dropped probabilities are negative. `stash` receives the
    // derivative of the softcap, for multiply_by_stash.
    template <typename TensorP>
    __device__ __forceinline__ void recompute_p(const Step &step, bool is_large, TensorP &acc_p, const float *lse,
                                                uint32_t *stash) const {
        Tensor scores = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));  // (key, query)
        const auto coords = coords_of_scores(threadIdx.x % 128);
        const int first_query = step.m_block * Traits::kBlockM;
        if (kIsGeneral && ScoreMod::is_on(params)) {
            apply_score_mod(step, scores, coords, first_query, stash);
        }
        if (is_large || needs_mask(first_query)) {
            to_exponents_with_care(
                scores, coords, lse, params.scale_softmax,
                [&](int query) { return is_local(kKind) ? block.begin_key(first_query + query) - first_key : 0; },
                [&](int query) { return block.end_key(first_query + query) - first_key; });
        } else {
            to_exponents(scores, coords, lse, params.scale_softmax_log2);
        }
        exponentiate(acc_p);
        if (has_dropout()) {
            const DropoutStream stream(params.rng_state, block.bidb, params.h, block.bidh + step.head);
            mark_dropped_transposed(scores, coords, stream, params.dropout_threshold, first_query, first_key);
        }
    }

    // dP^T becomes dS^T = P^T (dP^T - delta). Marks of dropped probabilities become 0 in P^T.
    template <typename TensorP, typename TensorD>
    __device__ __forceinline__ void form_ds(TensorP &acc_p, TensorD &acc_ds, const float *delta) const {
        Tensor p = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));     // (key, query)
        Tensor ds = make_tensor(acc_ds.data(), rowcol_layout(acc_ds.layout()));  // (key, query)
        const auto coords = coords_of_scores(threadIdx.x % 128);
        if (has_dropout()) {
            to_ds_with_dropout(p, ds, coords, delta, params.rp_dropout);
        } else {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(ds); col += 2) {
                const float2 of_pair = *reinterpret_cast<const float2 *>(&delta[get<1>(coords(0, col))]);
                CUTE_UNROLL
                for (int row = 0; row < size<0>(ds); ++row) {
                    ds(row, col) = p(row, col) * (ds(row, col) - of_pair.x);
                    ds(row, col + 1) = p(row, col + 1) * (ds(row, col + 1) - of_pair.y);
                }
            }
        }
    }

    // The same for rounded probabilities, which another consumer sent.
    template <typename TensorP, typename TensorD>
    __device__ __forceinline__ void form_ds_from(const TensorP &rP, TensorD &acc_ds, const float *delta) const {
        Tensor acc_p = make_tensor<float>(acc_ds.layout());
        CUTE_UNROLL
        for (int i = 0; i < size(acc_p); ++i) {
            acc_p(i) = float(rP(i));
        }
        form_ds(acc_p, acc_ds, delta);
    }

    __device__ __forceinline__ bool has_softcap() const { return kIsGeneral && params.softcap_scale != 0.0f; }
    __device__ __forceinline__ bool has_dropout() const { return kIsGeneral && params.rng_state != nullptr; }

    // acc times what recompute_p left in `stash`.
    template <typename TensorAcc>
    __device__ __forceinline__ void multiply_by_stash(TensorAcc &acc, const uint32_t *stash) const {
        CUTE_UNROLL
        for (int i = 0; i < size(acc) / 2; ++i) {
            const auto pair = load_pair(stash, i);
            acc(2 * i) *= float(pair[0]);
            acc(2 * i + 1) *= float(pair[1]);
        }
    }

    // Words of two values in shared memory, where every thread of a warpgroup has its own.
    using Pair = cutlass::Array<Element, 2>;
    __device__ __forceinline__ static Pair rounded(float x, float y) {
        return cutlass::NumericArrayConverter<Element, float, 2>::convert({x, y});
    }
    __device__ __forceinline__ static Pair load_pair(const uint32_t *words, int i) {
        const uint32_t word = words[i * 128 + threadIdx.x % 128];
        return reinterpret_cast<const Pair &>(word);
    }
    __device__ __forceinline__ static void store_pair(uint32_t *words, int i, const Pair &pair) {
        words[i * 128 + threadIdx.x % 128] = reinterpret_cast<const uint32_t &>(pair);
    }

private:
    const Flash_bwd_params &params;
    const ColumnBlock<Traits, kKind> &block;
    const int first_key;

    // (key, query) of each score of a thread.
    __device__ __forceinline__ static auto coords_of_scores(int thread) {
        auto thr_mma = typename Traits::TiledMmaSdP{}.get_slice(thread);
        Tensor coords = thr_mma.partition_C(make_identity_tensor(typename Traits::TileS{}));  // (MMA, MMA_M, MMA_N)
        return make_tensor(coords.data(), rowcol_layout(coords.layout()));
    }

    // True if some query of the step does not see some of the consumer's keys.
    __device__ __forceinline__ bool needs_mask(int first_query) const {
        return block.end_key(first_query) < first_key + Traits::kKeys ||
               (is_local(kKind) && block.begin_key(first_query + Traits::kBlockM - 1) > first_key);
    }

    // scores (key, query) become logits.
    template <typename TensorS, typename TensorC>
    __device__ __forceinline__ void apply_score_mod(const Step &step, TensorS &scores, const TensorC &coords,
                                                    int first_query, uint32_t *stash) const {
        ScoreMod mod(params, block.bidb, block.bidh + step.head, block.seqlen_k - block.seqlen_q);
        if (has_softcap()) {
            CUTE_UNROLL
            for (int i = 0; i < size(scores) / 2; ++i) {
                float t[2];
                CUTE_UNROLL
                for (int j = 0; j < 2; ++j) {
                    float &score = scores.data()[2 * i + j];
                    t[j] = tanh_approx(score * mod.cap_scale);
                    score = t[j];
                }
                store_pair(stash, i, rounded(1.0f - t[0] * t[0], 1.0f - t[1] * t[1]));
            }
        }
        mod.cap_scale = 0.0f;  // it is applied already
        mod.template apply</*kTransposed=*/true>(scores, coords, coords_of_scores(0), first_query, first_key,
                                                 [](int, int, float) {});
    }
};

// Rounds an accumulator into the A operand of the next product: the registers in their order.
template <typename TensorAcc, typename TensorA>
__device__ __forceinline__ void round_to_operand(const TensorAcc &acc, TensorA &operand) {
    using Element = typename TensorA::value_type;
    constexpr int kCount = decltype(size(acc))::value;
    *reinterpret_cast<cutlass::Array<Element, kCount> *>(operand.data()) =
        cutlass::NumericArrayConverter<Element, float, kCount>::convert(
            *reinterpret_cast<const cutlass::Array<float, kCount> *>(acc.data()));
}

}  // namespace flash::sm90
