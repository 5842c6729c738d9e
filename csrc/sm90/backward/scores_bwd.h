// P and dS of a consumer warpgroup, in the registers of wgmma's accumulators: keys are rows, queries are columns.
// P = exp(S - lse) and dS = P (dP - delta), derived in docs/algorithm.md.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <type_traits>

#include "common/attn_bias.h"
#include "common/score_mod.h"
#include "common/softmax.h"
#include "dropout_bwd.h"
#include "kernel_traits_bwd.h"
#include "sm90/common/accumulator.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// The thread's number in its warpgroup, in an ordinary register. Where a loop needs it, ptxas would read the special
// register again in every iteration, which takes 60 to 110 cycles.
__device__ __forceinline__ int thread_of_warpgroup() {
    return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x % 128, threadIdx.x % 32));
}

template <typename Traits, Kind kKind>
class ScoresBwd {
    using Element = typename Traits::Element;
    static constexpr bool kIsGeneral = is_general(kKind), kHasFactors = Traits::kHasFactors;
    static constexpr bool kMayHaveRanges = has_ranges(kKind) || has_bias(kKind);
    static_assert(kIsGeneral || !kHasFactors);
    static_assert(has_bias(kKind) == Traits::kHasBias);

public:
    using Accumulator = decltype(partition_fragment_C(typename Traits::TiledMmaSdP{}, typename Traits::TileS{}));
    using Operand = decltype(make_tensor<Element>(operand_A_layout(Accumulator{}.layout())));  // (MMA, MMA_M, MMA_K)

    // first_key: of the consumer, in the sequence. bias: kStagesBias: of the CTA's first warp of consumers.
    __device__ ScoresBwd(const Flash_bwd_params &params, const ColumnBlock<Traits, kKind> &block, int first_key,
                         Element *bias = nullptr)
        : thread(Traits::kHeadDim <= 64 ? thread_of_warpgroup() : int(threadIdx.x % 128)),
          params(params),
          block(block),
          first_key(first_key),
          bias_smem(bias) {
        if constexpr (is_local(kKind) && !has_ranges(kKind)) {
            constexpr int kBlockM = Traits::kBlockM;
            const int last_key = first_key + Traits::kKeys - 1, after_last_block = 1 << 30;
            unmasked_begin =
                last_key < block.seqlen_k ? max(last_key - block.end_shift + kBlockM, 0) / kBlockM : after_last_block;
            unmasked_end = max(first_key - block.begin_shift + 1, 0) / kBlockM;
        }
        if constexpr (has_bias(kKind)) {
            has_zero_bias = finds_zero_bias();
        }
    }

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

    // The accumulator of dP^T starts at delta. The product V dO^T is subtracted. The loads are volatile: the compiler
    // would load once and copy, where a load for each key goes straight into the accumulator.
    template <typename TensorD>
    __device__ __forceinline__ void start_at_delta(const float *smem_delta, TensorD &acc) const {
        const uint32_t address = cute::cast_smem_ptr_to_uint(&smem_delta[thread % 4 * 2]);
        CUTE_UNROLL
        for (int i = 0; i < size(acc) / 2; ++i) {  // pairs of queries; two keys have the same
            asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(acc(2 * i)), "=f"(acc(2 * i + 1))
                         : "r"(address + 32 * (i / 2))
                         : "memory");
        }
    }

    // The inputs of a step from global memory. They are loaded before the step's products are issued, because a warp's
    // loads wait for products that it has issued.
    struct Inputs {
        bool is_large;      // a row of the step has a large log-sum-exp
        float alibi_slope;  // kind general: of the head
    };
    __device__ __forceinline__ Inputs load_inputs(const Step &step) const {
        const int flags = params.large_rows[step.padded_row(params, block) / Traits::kBlockM];
        Inputs inputs{has_bias(kKind) ? flags % 2 != 0 : flags != 0, 0.0f};
        if (has_alibi()) {
            inputs.alibi_slope =
                params.alibi_slopes[block.bidb * params.alibi_slopes_batch_stride + block.bidh + step.head];
        }
        return inputs;
    }

    // Seed and offset of dropout, where consumers draw. They are loaded before products are issued, too.
    struct RngState {
        uint64_t seed, offset;
    };
    __device__ __forceinline__ RngState load_rng_state() const {
        if (!has_dropout()) {
            return {};
        }
        return {uint64_t(params.rng_state[0]), uint64_t(params.rng_state[1])};
    }

    // The bits that the consumer draws: draw() may overlap products, exchanged() runs when none is in flight. Without
    // dropout the bits are zeros.
    __device__ __forceinline__ DropoutBits<Traits> draw(const Step &step, const RngState &rng) const {
        if (!has_dropout()) {
            return {};
        }
        const DropoutStream stream(rng.seed, rng.offset, block.bidb, params.h, block.bidh + step.head);
        return sm90::draw<Traits>(stream, step.m_block * Traits::kBlockM, first_key, params.dropout_threshold);
    }
    __device__ __forceinline__ DropoutBits<Traits> exchanged(const DropoutBits<Traits> &dropout_bits) const {
        return has_dropout() ? sm90::exchanged<Traits>(dropout_bits) : dropout_bits;
    }

    // key_ranges: whether the step needs a mask, and a bit for each score of a thread: whether the query sees the key.
    // The words are not read if the step needs none. They are loaded before products are issued, too.
    struct VisibleScores {
        bool is_masked;
        uint32_t words[kMayHaveRanges ? Traits::kBlockM / 64 : 1];

        // Bits 8 j to 8 j + 3 of a word are the scores 4 j to 4 j + 3 of the first 32 queries, bits 8 j + 4 to 8 j + 7
        // those of the next 32.
        __device__ __forceinline__ bool has(int i) const {
            const int bit = i / 4 % 4 * 8 + i / 16 % 2 * 4 + i % 4;
            return (words[i / 32] >> bit & 1u) != 0;
        }
    };
    // is_masked: from the load warp. A warp has 16 keys: each lane finds which of them a query sees, and a ballot for
    // each key turns these words around.
    __device__ __forceinline__ VisibleScores load_visible(const Step &step, const int &is_masked) const {
        VisibleScores visible{};
        if constexpr (kMayHaveRanges) {
            visible.is_masked = has_ranges(kKind) ? uniform(is_masked) != 0 : params.key_ranges.is_used();
            if (visible.is_masked) {
                constexpr int kGroups = Traits::kBlockM / 32;  // of queries
                const RangesOfHead ranges(params, block.bidb, block.bidh + step.head);
                const int lane = threadIdx.x % 32;
                const int first_key_of_warp = first_key + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
                VisibleKeys keys[kGroups];
                CUTE_UNROLL
                for (int group = 0; group < kGroups; ++group) {
                    keys[group] = ranges.row(step.m_block * Traits::kBlockM + 32 * group + lane);
                }
                const auto bits_of = [&](int begin, int end) {
                    return bits_between(max(begin - first_key_of_warp, 0), max(end - first_key_of_warp, 0));
                };
                CUTE_UNROLL
                for (int group = 0; group < kGroups; ++group) {
                    const uint32_t of_query =
                        bits_of(keys[group].begin0, keys[group].end0) | bits_of(keys[group].begin1, keys[group].end1);
                    uint32_t of_key = 0, of_key_8_on = 0;  // of this thread: a bit for each query
                    CUTE_UNROLL
                    for (int key = 0; key < 8; ++key) {
                        const uint32_t queries = __ballot_sync(0xffffffffu, (of_query & (1u << key)) != 0);
                        const uint32_t queries_8_on = __ballot_sync(0xffffffffu, (of_query & (256u << key)) != 0);
                        of_key = lane / 4 == key ? queries : of_key;
                        of_key_8_on = lane / 4 == key ? queries_8_on : of_key_8_on;
                    }
                    constexpr uint32_t kPairs = 0x03030303u;  // of every 8 queries, a thread has two
                    const int shift = lane % 4 * 2;
                    const uint32_t word = (of_key >> shift & kPairs) | (of_key_8_on >> shift & kPairs) << 2;
                    visible.words[group / 2] |= word << (group % 2 * 4);
                }
            }
        }
        return visible;
    }

    // P^T of a thread in 16 bits. A cap on scores and dropout need it twice.
    struct ProbabilitiesOnce {
        Operand for_dv;  // the A operand of dV
        __device__ __forceinline__ const Operand &for_ds() const { return for_dv; }
    };
    struct ProbabilitiesTwice {
        Operand for_dv;   // dropped ones are 0
        Operand factors;  // of dS: dropped ones have a negative sign; times the derivative of the cap
        __device__ __forceinline__ const Operand &for_ds() const { return factors; }
    };
    using Probabilities = std::conditional_t<kHasFactors, ProbabilitiesTwice, ProbabilitiesOnce>;

    // S^T becomes P^T = exp(S^T - lse). Four scores at a time, from the first to the last operation: of the accumulator
    // and of P, registers then hold one whole and the other in part.
    template <typename TensorS>
    __device__ __forceinline__ Probabilities rounded_p(const Step &step, const Inputs &inputs,
                                                       const VisibleScores &visible,
                                                       const DropoutBits<Traits> &dropout_bits, TensorS &acc_s,
                                                       QueryStatistics lse) const {
        Probabilities p;
        const int first_query = step.m_block * Traits::kBlockM;
        const bool is_masked =
            has_ranges(kKind) ? visible.is_masked : (has_bias(kKind) && visible.is_masked) || needs_mask(step.m_block);
        if (Traits::kStagesBias && !has_zero_bias) {
            BiasTile::wait();
        }
        const bool use_exact_scaling = inputs.is_large || is_masked;
        const Scaling scaling = inputs.is_large ? natural_scaling() : stored_scaling();
        if constexpr (kIsGeneral) {
            const float slope = ScoreMod::slope_of(params, inputs.alibi_slope);
            if (has_bias(kKind) && has_zero_bias && !use_exact_scaling && !is_capped() && !has_alibi()) {
                round_p<false, /*kAddsBias=*/false>(step, acc_s, stored_scaling_of_scores(), lse, visible, slope,
                                                    false_type{}, false_type{}, p);
            } else if (use_exact_scaling || (is_capped() && has_alibi())) {
                round_p<true>(step, acc_s, scaling, lse, visible, slope, is_capped(), has_alibi(), p);
            } else if (is_capped()) {
                round_p<false>(step, acc_s, stored_scaling(), lse, visible, slope, true_type{}, false_type{}, p);
            } else if (has_alibi()) {
                round_p<false>(step, acc_s, stored_scaling(), lse, visible, slope, false_type{}, true_type{}, p);
            } else {
                round_p<false>(step, acc_s, stored_scaling(), lse, visible, slope, false_type{}, false_type{}, p);
            }
            if constexpr (Traits::kMayDrop) {
                mark_dropped(dropout_bits, p);
            }
        } else if constexpr (changes_scores_in_place<Traits, kKind>()) {
            const Scaling after_subtraction{1.0f, 1.0f, float(kLog2e)};
            const Scaling of_scores = inputs.is_large ? after_subtraction : stored_scaling();
            if (inputs.is_large) {
                subtract_natural(acc_s, lse);
            }
            if (is_masked) {
                mask(first_query, /*hidden=*/of_scores.product < 0.0f ? INFINITY : -INFINITY, acc_s);
            }
            round_p<false>(step, acc_s, of_scores, lse, visible, 0.0f, false_type{}, false_type{}, p);
        } else if (use_exact_scaling) {
            round_p<true>(step, acc_s, scaling, lse, visible, 0.0f, false_type{}, false_type{}, p);
        } else {
            round_p<false>(step, acc_s, stored_scaling(), lse, visible, 0.0f, false_type{}, false_type{}, p);
        }
        if (Traits::kStagesBias && !has_zero_bias) {
            __syncwarp();  // all lanes have read the bias
            start_bias(step.next(block));
        }
        return p;
    }

    // The warp starts to load the bias of a step, if there is such a step.
    __device__ __forceinline__ void start_bias(const Step &step) const {
        if constexpr (Traits::kStagesBias) {
            if (step.head < block.heads && !has_zero_bias) {
                bias_tile().start(bias_of(step), step.m_block * Traits::kBlockM, first_key_of_warp());
            }
        }
    }

    // dP^T becomes dS^T = P^T (dP^T - delta), rounded to the A operand of dK. pair_of(i): elements 2 i and 2 i + 1 of
    // Probabilities::for_ds(). With DeltaIsInDp, acc_ds holds delta - dP^T.
    struct DeltaIsInDp {};
    using Delta = std::conditional_t<Traits::kDpStartsAtDelta, DeltaIsInDp, QueryStatistics>;
    template <typename TensorD>
    __device__ __forceinline__ Operand rounded_ds(const Operand &p, const TensorD &acc_ds, const Delta &delta) const {
        return rounded_ds([&](int i) { return pair_of(p, i); }, acc_ds, delta);
    }
    template <typename PairOf, typename TensorD>
    __device__ __forceinline__ Operand rounded_ds(const PairOf &pair_of, const TensorD &acc_ds,
                                                  const Delta &delta) const {
        Operand rdS;
        if (has_dropout()) {
            round_ds</*kHasDropout=*/true>(pair_of, acc_ds, delta, rdS);
        } else {
            round_ds</*kHasDropout=*/false>(pair_of, acc_ds, delta, rdS);
        }
        return rdS;
    }

    // bool, or true_type or false_type where it is known when compiled. A call with dropout has no cap
    // (check_tensors.cpp).
    __device__ __forceinline__ auto is_capped() const {
        if constexpr (Traits::kFactors == Factors::cap_or_dropout || Traits::kFactors == Factors::bias_cap_or_dropout) {
            return params.cap_scale != 0.0f;
        } else {
            return bool_constant<Traits::kFactors == Factors::cap>{};
        }
    }
    __device__ __forceinline__ bool has_alibi() const { return kIsGeneral && params.alibi_slopes != nullptr; }
    __device__ __forceinline__ bool has_dropout() const {
        // Head dim 128 also has a kernel only for dropout, but spills more where the compiler knows it.
        constexpr bool kIsKnown = Traits::kHasDropoutWarpgroup && Traits::kHeadDim == 64;
        return kIsKnown || (Traits::kMayDrop && params.rng_state != nullptr);
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

    // The pairs with negative values replaced by 0. A NaN stays one.
    __device__ __forceinline__ static uint32_t positive_part(uint32_t pair) {
        uint32_t result;
        if constexpr (std::is_same_v<Element, cutlass::half_t>) {
            asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
        } else {
            asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
        }
        return result;
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
    Element *const bias_smem;
    int unmasked_begin, unmasked_end;  // except kind full: row blocks in which every query sees all of its keys
    bool has_zero_bias = false;  // the bias of the warp's keys is 0 for all queries and heads, as in a padding mask

    // P = 2^((S * scale - lse) * to_base_2), where lse is the stored one: times log2(e) or as it is (natural_scaling);
    // product = scale * to_base_2.
    struct Scaling {
        float scale, to_base_2, product;
    };
    __device__ __forceinline__ Scaling natural_scaling() const {
        if (has_bias(kKind)) {  // scores are logits
            return {1.0f, float(kLog2e), float(kLog2e)};
        }
        return {params.scale_softmax, float(kLog2e), params.scale_softmax_log2};
    }
    __device__ __forceinline__ Scaling stored_scaling() const {
        if (!has_bias(kKind)) {
            return stored_scaling_of_scores();
        }
        return stores_lse_in_base_2<Traits, kKind>() ? Scaling{float(kLog2e), 1.0f, float(kLog2e)} : natural_scaling();
    }
    __device__ __forceinline__ Scaling stored_scaling_of_scores() const {
        return stores_lse_in_base_2<Traits, kKind>()
                   ? Scaling{params.scale_softmax_log2, 1.0f, params.scale_softmax_log2}
                   : Scaling{params.scale_softmax, float(kLog2e), params.scale_softmax_log2};
    }

    // S^T becomes S^T * softmax_scale - lse, and lse 0. The product is rounded as in the forward.
    template <typename TensorS>
    __device__ __forceinline__ void subtract_natural(TensorS &acc_s, QueryStatistics &lse) const {
        CUTE_UNROLL
        for (int i = 0; i < size(acc_s); ++i) {
            const float2 of_pair = lse[i / 4];
            acc_s(i) = __fmul_rn(acc_s(i), params.scale_softmax) - (i % 2 == 0 ? of_pair.x : of_pair.y);
        }
        lse.fill({0.0f, 0.0f});
    }

    // S^T becomes `hidden` where a query does not see the key. Like apply_mask() of accumulator.h, which always writes
    // -inf: the score of a hidden key must be +inf if the scale is below 0.
    template <typename TensorS>
    __device__ __forceinline__ void mask(int first_query, float hidden, TensorS &acc_s) const {
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));  // (key, query)
        static_assert(decltype(size<1>(scores))::value <= 32, "one bit per query");
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) {
            const int key = first_key + first_row_of_thread() + 8 * row;
            const int begin = is_local(kKind) ? key - block.end_shift + 1 - first_query : 0;
            const int end = is_local(kKind) ? key - block.begin_shift + 1 - first_query : Traits::kBlockM;
            const int end_of_key = key < block.seqlen_k ? end : 0;
            const uint32_t visible = bits_between(columns_before(begin), columns_before(end_of_key));
            CUTE_UNROLL
            for (int query = 0; query < size<1>(scores); ++query) {
                scores(row, query) = visible & (1u << query) ? scores(row, query) : hidden;
            }
        }
    }

    // kExactScaling: with a mask, and for scores so large that a float32 is coarser than 1: the product is rounded as
    // in the forward. is_capped, has_alibi: bool, or true_type or false_type where it is known when compiled.
    template <bool kExactScaling, bool kAddsBias = has_bias(kKind), typename IsCapped, typename HasAlibi,
              typename TensorS>
    __device__ __forceinline__ void round_p(const Step &step, const TensorS &acc_s, const Scaling &scaling,
                                            const QueryStatistics &lse, const VisibleScores &visible, float slope,
                                            IsCapped is_capped, HasAlibi has_alibi, Probabilities &rounded_p) const {
        const int first_query = step.m_block * Traits::kBlockM;
        const int of_thread = threadIdx.x % 4 * 2, first_row = first_row_of_thread() + first_key;
        // Key minus query of the thread's first score, on the diagonal of ALiBi. float32 holds these integers exactly.
        const float first_distance =
            kIsGeneral ? float(first_row - of_thread - first_query - (block.seqlen_k - block.seqlen_q)) : 0.0f;
        [[maybe_unused]] BiasOfTwo bias;
        CUTE_UNROLL
        for (int j = 0; j < size(acc_s) / 4; ++j) {
            if (kAddsBias && j % 2 == 0) {
                bias = load_bias(step, j);
            }
            const int query = of_thread + 8 * j;
            const float2 of_pair = lse[j];
            float p[4], factors[4];
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
                const float lse_query = c == 0 ? of_pair.x : of_pair.y;
                const float to_base_2 = has_bias(kKind) && kExactScaling && scaling.scale == 1.0f
                                            ? exponent_factor(lse_query)
                                            : scaling.to_base_2;
                int begin = 0, end = 0;
                if constexpr (kExactScaling && !has_ranges(kKind)) {
                    begin = is_local(kKind) ? block.begin_key(first_query + query + c) : 0;
                    end = block.end_key(first_query + query + c);
                }
                CUTE_UNROLL
                for (int row = 0; row < 2; ++row) {
                    float &x = p[2 * row + c];
                    x = acc_s(4 * j + 2 * row + c);
                    if constexpr (kIsGeneral) {
                        float &factor = factors[2 * row + c];  // derivative of the cap
                        factor = 1.0f;
                        if (is_capped) {
                            x = tanh_approx(x * params.cap_scale);
                            factor = 1.0f - x * x;
                        }
                        if (has_alibi) {
                            x -= slope * fabsf(first_distance + float(8 * row - 8 * j - c));
                        }
                    }
                    if constexpr (kAddsBias) {
                        x = __fmaf_rn(x, params.scale_softmax, bias.values[j % 2][row][c]);
                    }
                    if (kExactScaling) {
                        const int key = first_row + 8 * row;
                        const float exponent = (__fmul_rn(x, scaling.scale) - lse_query) * to_base_2;
                        const bool is_visible =
                            has_ranges(kKind) ? !visible.is_masked || visible.has(4 * j + 2 * row + c)
                            : has_bias(kKind) && visible.is_masked ? visible.has(4 * j + 2 * row + c)
                                                                   : key >= begin && key < end;
                        x = exp2_approx(is_visible ? exponent : -INFINITY);
                    } else {
                        x = exp2_approx(x * scaling.product - lse_query * scaling.to_base_2);
                    }
                }
            }
            CUTE_UNROLL
            for (int row = 0; row < 2; ++row) {
                const int i = 2 * j + row;
                const Pair pair = rounded(p[2 * row], p[2 * row + 1]);
                reinterpret_cast<Pair *>(rounded_p.for_dv.data())[i] = pair;
                if constexpr (kHasFactors) {
                    auto *target = reinterpret_cast<Pair *>(rounded_p.factors.data());
                    target[i] = is_capped
                                    ? rounded(p[2 * row] * factors[2 * row], p[2 * row + 1] * factors[2 * row + 1])
                                    : pair;
                }
            }
        }
    }

    // ---- attn_bias

    using BiasTile = typename Traits::BiasTile;
    __device__ __forceinline__ BiasTile bias_tile() const {
        return {bias_smem + (threadIdx.x / 32 - 4) * BiasTile::kSize};  // without the producer's four warps
    }
    __device__ __forceinline__ BiasOfHead<Element> bias_of(const Step &step) const {
        return BiasOfHead<Element>(params, block.bidb, block.bidh + step.head);
    }
    __device__ __forceinline__ int first_key_of_warp() const { return first_key + threadIdx.x % 128 / 32 * 16; }

    // Called by a whole warp.
    __device__ __forceinline__ bool finds_zero_bias() const {
        const AttnBias &bias = params.attn_bias;
        if (bias.row_stride != 0 || bias.head_stride != 0) {
            return false;
        }
        const int key = first_key_of_warp() + threadIdx.x % 16;
        const float value = BiasOfHead<Element>(params, block.bidb, block.bidh).at(/*query=*/0, key);
        return __all_sync(0xffffffffu, key < block.seqlen_k && value == 0.0f) != 0;
    }

    // The bias of the scores 4 j to 4 j + 7 of a thread: [j % 2][key][query].
    struct BiasOfTwo {
        float values[2][2][2];
    };
    __device__ __forceinline__ BiasOfTwo load_bias(const Step &step, int j) const {
        BiasOfTwo result;
        if (has_zero_bias) {
            return {};
        }
        if (Traits::kStagesBias && params.attn_bias.type != AttnBias::Type::float32) {
            // Lane l has the address of query l % 8 of piece l / 8: two pieces along the keys, two along the queries.
            const int lane = threadIdx.x % 32, query = 8 * j + lane / 16 * 8 + lane % 8;
            uint32_t words[4];
            kvcache::ldmatrix_x4_transposed(words, cast_smem_ptr_to_uint(bias_tile().at(
                                                       params.attn_bias.row_stride == 0 ? 0 : query, lane / 8 % 2)));
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float2 pair = BiasOfHead<Element>::unpack(words[i]);
                result.values[i / 2][i % 2][0] = pair.x;
                result.values[i / 2][i % 2][1] = pair.y;
            }
        } else {
            BiasOfHead<Element> bias = bias_of(step);
            if constexpr (Traits::kStagesBias) {
                bias.type = AttnBias::Type::float32;
            }
            asm volatile("" : "+l"(bias.key_stride));  // else multiples of it would be kept over the loop
            const int first_query = step.m_block * Traits::kBlockM + threadIdx.x % 4 * 2 + 8 * j;
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                CUTE_UNROLL
                for (int row = 0; row < 2; ++row) {
                    result.values[i / 2][row][i % 2] =
                        bias.at(first_query + i / 2 * 8 + i % 2, first_key + first_row_of_thread() + 8 * row);
                }
            }
        }
        return result;
    }

    template <bool kHasDropout, typename PairOf, typename TensorD>
    __device__ __forceinline__ void round_ds(const PairOf &pair_of, const TensorD &acc_ds, const Delta &delta,
                                             Operand &rdS) const {
        // Elements 4 j and 4 j + 1 are neighbouring queries of one key, 4 j + 2 and 4 j + 3 the same of the key 8 on.
        CUTE_UNROLL
        for (int j = 0; j < size(acc_ds) / 4; ++j) {
            float2 of_pair{};
            if constexpr (!Traits::kDpStartsAtDelta) {
                of_pair = delta[j];
            }
            CUTE_UNROLL
            for (int row = 0; row < 2; ++row) {
                const int i = 2 * j + row;
                const Pair p = pair_of(i);
                reinterpret_cast<Pair *>(rdS.data())[i] =
                    rounded(ds_of<kHasDropout>(float(p[0]), acc_ds(2 * i), of_pair.x),
                            ds_of<kHasDropout>(float(p[1]), acc_ds(2 * i + 1), of_pair.y));
            }
        }
    }

    // delta belongs to all keys, dropped or not. kDpStartsAtDelta: dp is delta - dP.
    template <bool kHasDropout>
    __device__ __forceinline__ float ds_of(float p, float dp, float delta) const {
        if (Traits::kDpStartsAtDelta) {
            return p * -dp;
        }
        if (kHasDropout) {
            return fabsf(p) * (is_marked(p) ? -delta : dp * params.rp_dropout - delta);
        }
        return p * (dp - delta);
    }

    // Dropped probabilities become 0 for dV, and negative for dS.
    __device__ __forceinline__ void mark_dropped(const DropoutBits<Traits> &dropout_bits, Probabilities &p) const {
        if (!has_dropout()) {
            return;
        }
        auto *for_dv = reinterpret_cast<uint32_t *>(p.for_dv.data());
        auto *factors = reinterpret_cast<uint32_t *>(p.factors.data());
        CUTE_UNROLL
        for (int w = 0; w < Traits::kWordsOfDropoutBits; ++w) {
            const uint32_t dropped = dropout_bits.words[w];
            CUTE_UNROLL
            for (int i = 0; i < 16; ++i) {
                const uint32_t signs = dropped << (15 - i) & 0x80008000u;
                factors[16 * w + i] |= signs;
                for_dv[16 * w + i] = positive_part(for_dv[16 * w + i] | signs);
            }
        }
    }

    // True if some query of the row block does not see some of the consumer's keys.
    __device__ __forceinline__ bool needs_mask(int m_block) const {
        return is_local(kKind) ? m_block < unmasked_begin || m_block >= unmasked_end
                               : block.seqlen_k < first_key + Traits::kKeys;
    }
};

}  // namespace flash::sm90
