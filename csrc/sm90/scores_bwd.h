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
        : thread(Traits::kHeadDim <= 64 ? thread_of_warpgroup() : int(threadIdx.x % 128)),
          params(params),
          block(block),
          first_key(first_key) {}

    // The log-sum-exp or delta of the queries of a thread's scores. Element j belongs to the scores 4 j to 4 j + 3: the
    // first query to the even ones, the second to the odd ones.
    using QueryStatistics = cutlass::Array<float2, Traits::kBlockM / 8>;
    __device__ __forceinline__ QueryStatistics load_statistics(const float *smem) const {
        QueryStatistics statistics;
        CUTE_UNROLL
        for (int j = 0; j < Traits::kBlockM / 8; ++j) {
            statistics[j] = *reinterpret_cast<const float2 *>(&smem[thread % 4 * 2 + 8 * j]);
        }
        return statistics;
    }

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

    // S^T becomes P^T = exp(S^T - lse); with dropout, dropped probabilities are negative. `words` receives the
    // derivative of the softcap.
    template <typename TensorP>
    __device__ __forceinline__ void recompute_p(const Step &step, bool is_large, TensorP &acc_p, const float *lse,
                                                uint32_t *words) const {
        Tensor scores = make_tensor(acc_p.data(), rowcol_layout(acc_p.layout()));  // (key, query)
        const auto coords = coords_of_scores(threadIdx.x % 128);
        const int first_query = step.m_block * Traits::kBlockM;
        if (kIsGeneral && ScoreMod::is_on(params)) {
            apply_score_mod(step, scores, coords, first_query, words);
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

    // S^T becomes P^T, rounded to the A operand of dV. Four scores at a time, from the first to the last operation: of
    // the accumulator and of P, registers then hold one whole and the other in part.
    template <typename TensorS>
    __device__ __forceinline__ auto rounded_p(const Step &step, bool is_large, const TensorS &acc_s,
                                              const QueryStatistics &lse) const {
        Tensor rP = make_tensor<Element>(operand_A_layout(acc_s.layout()));  // (MMA, MMA_M, MMA_K)
        const int first_query = step.m_block * Traits::kBlockM;
        if (is_large || needs_mask(first_query)) {
            round_p</*kIsCareful=*/true>(first_query, acc_s, lse, rP);
        } else {
            round_p</*kIsCareful=*/false>(first_query, acc_s, lse, rP);
        }
        return rP;
    }

    // Rounds P^T to the A operand of dV, in which dropped probabilities are 0. What dS needs is the same, unless
    // needs_words(): then, or always, `words` receive it, with the marks of dropped probabilities and times the
    // derivative of the softcap.
    template <bool kAlwaysStores, typename TensorP>
    __device__ __forceinline__ auto split_p(const TensorP &acc_p, uint32_t *words) const {
        Tensor rP = make_tensor<Element>(operand_A_layout(acc_p.layout()));  // (MMA, MMA_M, MMA_K)
        CUTE_UNROLL
        for (int i = 0; i < size(acc_p) / 2; ++i) {
            const float x = acc_p(2 * i), y = acc_p(2 * i + 1);
            const bool drops = has_dropout();
            const Pair p = rounded(drops ? fmaxf(x, 0.0f) : x, drops ? fmaxf(y, 0.0f) : y);
            reinterpret_cast<Pair *>(rP.data())[i] = p;
            if (needs_words()) {
                Pair factor = rounded(1.0f, 1.0f);
                if (has_softcap()) {
                    factor = load_pair(words, i);
                }
                store_pair(words, i, rounded(x * float(factor[0]), y * float(factor[1])));
            } else if (kAlwaysStores) {
                store_pair(words, i, p);
            }
        }
        return rP;
    }
    __device__ __forceinline__ bool needs_words() const { return has_softcap() || has_dropout(); }
    __device__ __forceinline__ bool is_plain() const {
        return !kIsGeneral || !(ScoreMod::is_on(params) || has_dropout());
    }

    // dP^T becomes dS^T = P^T (dP^T - delta), rounded to the A operand of dK. pair_of(i): elements 2 i and 2 i + 1 of
    // P^T, as split_p leaves them.
    template <typename PairOf, typename TensorD>
    __device__ __forceinline__ auto rounded_ds(const PairOf &pair_of, const TensorD &acc_ds,
                                               const QueryStatistics &delta) const {
        Tensor rdS = make_tensor<Element>(operand_A_layout(acc_ds.layout()));  // (MMA, MMA_M, MMA_K)
        // Elements 4 j and 4 j + 1 are neighbouring queries of one key, 4 j + 2 and 4 j + 3 the same of the key 8 on.
        CUTE_UNROLL
        for (int j = 0; j < size(acc_ds) / 4; ++j) {
            const float2 of_pair = delta[j];
            CUTE_UNROLL
            for (int row = 0; row < 2; ++row) {
                const int i = 2 * j + row;
                const Pair p = pair_of(i);
                reinterpret_cast<Pair *>(rdS.data())[i] = rounded(ds_of(float(p[0]), acc_ds(2 * i), of_pair.x),
                                                                  ds_of(float(p[1]), acc_ds(2 * i + 1), of_pair.y));
            }
        }
        return rdS;
    }

    __device__ __forceinline__ bool has_softcap() const { return kIsGeneral && params.softcap_scale != 0.0f; }
    __device__ __forceinline__ bool has_dropout() const { return kIsGeneral && params.rng_state != nullptr; }

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

    template <typename TensorA>
    __device__ __forceinline__ static Pair pair_of(const TensorA &operand, int i) {
        return reinterpret_cast<const Pair *>(operand.data())[i];
    }

    const int thread;  // of the warpgroup

private:
    const Flash_bwd_params &params;
    const ColumnBlock<Traits, kKind> &block;
    const int first_key;

    template <bool kIsCareful, typename TensorS, typename TensorA>
    __device__ __forceinline__ void round_p(int first_query, const TensorS &acc_s, const QueryStatistics &lse,
                                            TensorA &rP) const {
        const int of_thread = threadIdx.x % 4 * 2, first_row = first_row_of_thread() + first_key;
        CUTE_UNROLL
        for (int j = 0; j < size(acc_s) / 4; ++j) {
            const int query = of_thread + 8 * j;
            const float2 of_pair = lse[j];
            float p[4];
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
                const float lse_query = c == 0 ? of_pair.x : of_pair.y;
                const int begin = kIsCareful && is_local(kKind) ? block.begin_key(first_query + query + c) : 0;
                const int end = kIsCareful ? block.end_key(first_query + query + c) : 0;
                CUTE_UNROLL
                for (int row = 0; row < 2; ++row) {
                    float &x = p[2 * row + c];
                    x = acc_s(4 * j + 2 * row + c);
                    if (kIsCareful) {  // the product is rounded as in the forward, for scores that are large
                        const int key = first_row + 8 * row;
                        const float exponent = (__fmul_rn(x, params.scale_softmax) - lse_query) * float(kLog2e);
                        x = exp2_approx(key >= begin && key < end ? exponent : -INFINITY);
                    } else {
                        x = exp2_approx(x * params.scale_softmax_log2 - lse_query * float(kLog2e));
                    }
                }
            }
            reinterpret_cast<Pair *>(rP.data())[2 * j] = rounded(p[0], p[1]);
            reinterpret_cast<Pair *>(rP.data())[2 * j + 1] = rounded(p[2], p[3]);
        }
    }

    // p is negative where it was dropped. delta belongs to all keys, dropped or not.
    __device__ __forceinline__ float ds_of(float p, float dp, float delta) const {
        if (has_dropout()) {
            return fabsf(p) * ((is_marked(p) ? 0.0f : dp * params.rp_dropout) - delta);
        }
        return p * (dp - delta);
    }

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
                                                    int first_query, uint32_t *words) const {
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
                store_pair(words, i, rounded(1.0f - t[0] * t[0], 1.0f - t[1] * t[1]));
            }
        }
        mod.cap_scale = 0.0f;  // it is applied already
        mod.template apply</*kTransposed=*/true>(scores, coords, coords_of_scores(0), first_query, first_key,
                                                 [](int, int, float) {});
    }
};

}  // namespace flash::sm90
