// The online softmax of Hopper's consumers, in base 2. It differs from common/softmax.h in two ways. The rescaling of O
// is separate, because the tensor cores still add to O while a step runs. Most steps take no row maximum: probabilities
// are relative to the reference that earlier steps left, and only their sum tells whether the reference has to move.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "common/softmax.h"
#include "largest_logit.h"

namespace flash::sm90 {

using namespace cute;

// kMayOffset: the reference may be the row maximum plus an offset. Split keys need the maximum itself, because the
// combine kernel weighs the parts of a row by their references.
template <typename Element, int kNRows, bool kMayOffset = true>
struct Softmax {
    // bfloat16 has the exponents of float32, so a reference of 0 is enough for most scores. float16 needs one near the
    // maximum.
    static constexpr bool kHasWideRange = std::is_same_v<Element, cutlass::bfloat16_t>;
    static constexpr bool kReferenceIsAboveMaximum = kHasWideRange && kMayOffset;
    // Probabilities carry the factor 2^-kHeadroom, which the quotient of output and sum removes. It allows
    // scores far above the reference.
    static constexpr float kHeadroom = kHasWideRange ? 40.0f : 0.0f, kOne = kHasWideRange ? 0x1p-40f : 1.0f;
    // The reference moves when a thread's share of a row's sum of one step is larger, or in the first step the row's
    // sum is smaller: Element holds probabilities in between with full precision.
    static constexpr float kMaxSum = kHasWideRange ? 0x1p60f : 0x1p15f, kMinSum = 0x1p-60f;
    // The reference also moves when a step's sum exceeds `dominance` times the running sum. One key may then determine
    // the output, and its probability has to be kOne, not a rounded one. The running sum counts as at least this.
    static constexpr float kMinWeight = 0x1p7f * kOne;
    // Beyond these sums, probabilities may be infinite or 0, and the scores have to be computed again.
    static constexpr float kOverflow = 0x1p120f, kUnderflow = 0x1p-80f;
    // A first step without a row maximum needs scores below this magnitude (powers of 2) in a sample of its columns.
    static constexpr float kMaxSample = 8.0f;
    // The spread is how far a sample of the visible scores reaches below the row maximum, in powers of 2, in the first
    // step in which a warp sees keys. The wider the scores, the more often one key outweighs all before by chance:
    // above kNarrowSpread, dominance is 2^(kDominancePerSpread * spread), infinite for very wide scores. Later scores
    // may also exceed the maximum by more. So the reference is the maximum plus an offset of kOffsetPerDominance *
    // log2(dominance) - kOffsetBias, at most kMaxOffset.
    static constexpr float kNarrowSpread = 32.0f, kDominancePerSpread = 0.35f, kMinDominance = 0x1p5f;
    static constexpr float kOffsetPerDominance = 0.7f, kOffsetBias = 8.0f, kMaxOffset = 56.0f;
    // From kWideSpread on the second step takes the maximum too; from kWideSpreadMasked on where a sampled score is
    // hidden. From kHugeSpread on, and after kMaxRetries recomputations in later steps, all steps take it.
    static constexpr float kWideSpreadMasked = 120.0f, kWideSpread = 250.0f, kHugeSpread = 800.0f;
    static constexpr int kMaxRetries = kHasWideRange ? 2 : 1;
    static constexpr float kMaxRise = 125.0f;  // 2^-kMaxRise is still a normal number
    // The reference may lag behind the true maximum by this much (powers of 2) before O is rescaled.
    static constexpr float kRescaleThreshold = 8.0f;
    static constexpr unsigned kAllLanes = 0xffffffffu;

    float scale_log2;
    float row_max[kNRows];            // reference of each row, unscaled; -inf before the first key
    float row_sum[kNRows];            // this thread's share of each row's sum, relative to the reference
    bool is_large = false;            // the reference is so large that score * scale_log2 would be rounded too much
    int n_retries = 0;                // recomputations in later steps; kMaxRetries from kHugeSpread on
    bool needs_maximum = true;        // the next step has to take the row maximum
    float dominance = kMinDominance;  // the factor by which a step has to outweigh all before to move the reference

    __device__ explicit Softmax(float scale_log2) : scale_log2(scale_log2) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_max[row] = -INFINITY;
            row_sum[row] = 0.0f;
        }
    }

    // The factors by which O follows a reference that moved.
    struct Rescale {
        float factor[kNRows];
        bool is_needed;  // the same in every lane of the warp
    };

    // One step over a key block: scores (row, col) become probabilities relative to row_max. kIsFirst: the first step
    // of a work tile. takes_maximum: take the row maximum, as in a first step whose rows may see few keys: a row that
    // sees one key needs the probability 1, not a rounded one. recompute(scores) restores the scores. logits: a
    // LargestLogit, which takes the scores of its `head`.
    template <bool kIsFirst, typename TensorS, typename Recompute, typename Logits, typename Head>
    __device__ __forceinline__ Rescale step(TensorS &scores, bool takes_maximum, const Recompute &recompute,
                                            Logits &logits, const Head &head) {
        if (kIsFirst && kHasWideRange && !takes_maximum) {
            takes_maximum = __any_sync(kAllLanes, has_large_sample(scores));
        }
        if (!takes_maximum && (kIsFirst ? kHasWideRange : !needs_maximum)) {
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = 0.0f;
                }
            }
            float parts[kNRows][Logits::kParts], sums[kNRows];
            exponentiate(scores, row_max, parts);
            bool is_out_of_range = false, may_be_largest = false;
            if constexpr (Logits::kIsTracked) {
                may_be_largest = logits.template may_be_exceeded<kIsFirst>(parts, references(), head);
            }
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                sums[row] = parts[row][0];
                CUTE_UNROLL
                for (int i = 1; i < Logits::kParts; ++i) {
                    sums[row] += parts[row][i];
                }
                float others = row_sum[row];
                if (kIsFirst) {
                    const float total = quad_allreduce(sums[row], [](float a, float b) { return a + b; });
                    is_out_of_range |= total < kMinSum;
                    others = total - sums[row];
                }
                is_out_of_range |= sums[row] > max_sum_in_range(others);
            }
            if (!__any_sync(kAllLanes, is_out_of_range || may_be_largest)) {
                return keep_reference(sums);
            }
            if (!needs_recomputation<kIsFirst>(sums)) {
                if constexpr (Logits::kIsTracked) {
                    logits.add_probabilities(scores, references(), kHeadroom, head);
                    if (!__any_sync(kAllLanes, is_out_of_range)) {
                        return keep_reference(sums);
                    }
                }
                const Rescale rescale = move_reference<kIsFirst>(scores, sums);
                if constexpr (Logits::kIsTracked) {
                    logits.set_references(references(), head);
                }
                return rescale;
            }
            recompute(scores);
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = -INFINITY;
                }
            } else {
                ++n_retries;
                dominance = INFINITY;
            }
        }
        const Rescale rescale = step_with_maximum<kIsFirst>(scores, logits, head);
        if constexpr (Logits::kIsTracked) {
            logits.set_references(references(), head);
        }
        return rescale;
    }

    // acc_o: (row, col).
    template <typename TensorO>
    __device__ __forceinline__ static void apply(const Rescale &rescale, TensorO &acc_o) {
        if (rescale.is_needed) {
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                CUTE_UNROLL
                for (int col = 0; col < size<1>(acc_o); ++col) {
                    acc_o(row, col) *= rescale.factor[row];
                }
            }
        }
    }

    // After the last step: the log-sum-exp of each row (natural log), and the factor that normalises its output and
    // includes out_factor; 0 for a row without a key.
    // scale: the factor of a score. row_mod_of(row): the RowMod of a row's head. kHasBias: the backward holds logits
    // (common/attn_bias.h).
    template <bool kHasBias = false, typename RowModOf>
    __device__ __forceinline__ void finalize(const Flash_fwd_params &params, float scale, float out_factor,
                                             const RowModOf &row_mod_of, float (&lse)[kNRows],
                                             float (&factor)[kNRows]) const {
        float total[kNRows], reference[kNRows], weight[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            total[row] = quad_allreduce(row_sum[row], [](float a, float b) { return a + b; });
            reference[row] = __fmul_rn(row_max[row], scale);
            weight[row] = 1.0f;
        }
        if (RowMod<float>::is_on(params)) {
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                weight[row] = row_mod_of(row).join(reference[row], total[row], kOne);
            }
        }
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            factor[row] = total[row] == 0.0f ? 0.0f : __fdividef(out_factor, total[row]) * weight[row];
            if constexpr (kHasBias) {
                lse[row] = total[row] == 0.0f ? -INFINITY : lse_with_bias(reference[row], total[row] / kOne);
            } else {
                lse[row] = total[row] == 0.0f ? -INFINITY : reference[row] + __logf(total[row] / kOne);
            }
        }
    }

private:
    static constexpr int kSamples = 4;

    // A probability is 2^(score * scale_log2 - this).
    __device__ __forceinline__ float scaled_reference(float reference) const {
        return __fmaf_rn(reference, scale_log2, kHeadroom);
    }

    __device__ __forceinline__ auto references() const {
        return [this](int row) { return scaled_reference(row_max[row]); };
    }

    __device__ __forceinline__ Rescale keep_reference(const float (&sums)[kNRows]) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_sum[row] += sums[row];
        }
        needs_maximum = false;
        Rescale rescale;
        rescale.is_needed = false;
        return rescale;
    }

    template <typename TensorS>
    __device__ __forceinline__ static constexpr int sample_stride(const TensorS &scores) {
        return decltype(size<1>(scores))::value / kSamples;
    }

    // True if this thread's sample of the scores is far from 0: the reference 0 might lose them.
    template <typename TensorS>
    __device__ __forceinline__ bool has_large_sample(const TensorS &scores) const {
        bool is_large = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            float largest = scores(row, 0);
            CUTE_UNROLL
            for (int i = 1; i < kSamples; ++i) {
                largest = fmaxf(largest, scores(row, i * sample_stride(scores)));
            }
            is_large |= fabsf(largest * scale_log2) > kMaxSample && largest != -INFINITY;
        }
        return is_large;
    }

    // The largest share of a step's sum with which the reference stays, after a sum of `others`.
    __device__ __forceinline__ float max_sum_in_range(float others) const {
        return kHasWideRange ? fminf((others + kMinWeight) * dominance, kMaxSum) : kMaxSum;
    }

    // The offset of a reference above its row maximum. exceeds: the maximum minus the old reference (-inf where there
    // is none). below: how far the maximum lies below that of other rows. The offset is an integer, so that Element
    // holds the largest probability, and is clamped so that the rescale factor of O does not underflow.
    __device__ __forceinline__ float offset_above_maximum(float exceeds, float below = 0.0f) const {
        if (!kReferenceIsAboveMaximum) {
            return 0.0f;
        }
        const float offset = fmaxf(kOffsetPerDominance * log2f(dominance) - kOffsetBias, 0.0f) + below;
        return floorf(fminf(offset, fminf(kMaxOffset, fmaxf(kMaxRise - exceeds, 0.0f))));
    }

    // Statistics of the first step in which a warp sees keys, which predict the scores that follow.
    struct Spread {
        bool is_wide = false;    // the second step has to take the maximum too
        bool is_masked = false;  // a sampled score is hidden: some rows may have seen few keys
    };

    template <typename TensorS>
    __device__ __forceinline__ Spread measure_spread(const TensorS &scores, const float (&maximum)[kNRows]) {
        float largest_spread = 0.0f;
        Spread spread;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            float smallest = INFINITY;
            bool is_masked = false;
            CUTE_UNROLL
            for (int i = 0; i < kSamples; ++i) {
                const float score = scores(row, i * sample_stride(scores));
                is_masked |= score == -INFINITY;
                smallest = fminf(smallest, score == -INFINITY ? INFINITY : score);
            }
            const float spread_of_row = (maximum[row] - smallest) * scale_log2;
            spread.is_wide |= spread_of_row > (is_masked ? kWideSpreadMasked : kWideSpread);
            spread.is_masked |= is_masked;
            largest_spread = fmaxf(largest_spread, spread_of_row);
        }
        if (!__any_sync(kAllLanes, largest_spread > kNarrowSpread)) {
            return {};
        }
        largest_spread = warp_max(largest_spread);
        n_retries = largest_spread > kHugeSpread ? kMaxRetries : 0;
        dominance = fmaxf(exp2_approx(kDominancePerSpread * largest_spread), kMinDominance);
        return {__any_sync(kAllLanes, spread.is_wide) != 0, __any_sync(kAllLanes, spread.is_masked) != 0};
    }

    // True if probabilities of a step may be infinite or 0.
    template <bool kIsFirst>
    __device__ __forceinline__ static bool needs_recomputation(const float (&sums)[kNRows]) {
        bool result = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            result |= sums[row] > kOverflow;
            if (kIsFirst) {
                result |= quad_allreduce(sums[row], [](float a, float b) { return a + b; }) < kUnderflow;
            }
        }
        return __any_sync(kAllLanes, result);
    }

    template <bool kIsFirst, typename TensorS, typename Logits, typename Head>
    __device__ __forceinline__ Rescale step_with_maximum(TensorS &scores, Logits &logits, const Head &head) {
        Rescale rescale;
        float maximum[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            maximum[row] = maximum_of(scores, row);
        }
        if constexpr (Logits::kIsTracked) {
            logits.add_maximum(maximum, scale_log2, head);
        }
        bool has_seen = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            has_seen |= row_max[row] != -INFINITY;
        }
        Spread spread;
        if (kHasWideRange && (kIsFirst || !__any_sync(kAllLanes, has_seen))) {
            spread = measure_spread(scores, maximum);
        }
        float offset[kNRows] = {}, new_reference[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_reference[row] = maximum[row];
        }
        if (kReferenceIsAboveMaximum && dominance > kMinDominance) {
            float largest = -INFINITY;
            if (spread.is_masked) {  // rows that saw few keys are likely to rise to where others are
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    largest = fmaxf(largest, maximum[row]);
                }
                largest = warp_max(largest);
            }
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                const float below = fmaxf((largest - maximum[row]) * scale_log2, 0.0f);
                if (fabsf(maximum[row] * scale_log2) < kLargeExponent) {  // else the sum would be rounded too much
                    const float exceeds = (maximum[row] - row_max[row]) * scale_log2;
                    offset[row] = offset_above_maximum(row_max[row] == -INFINITY ? -INFINITY : exceeds, below);
                    new_reference[row] += __fdividef(offset[row], scale_log2);
                }
            }
        }
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_reference[row] = fmaxf(row_max[row], new_reference[row]);
            must_rescale |= (new_reference[row] - row_max[row]) * scale_log2 > kRescaleThreshold + 0.5f * offset[row];
        }
        rescale.is_needed = __any_sync(kAllLanes, must_rescale);
        if (rescale.is_needed) {
            bool large = false;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
                rescale.factor[row] = new_reference[row] == -INFINITY
                                          ? 1.0f
                                          : exp2_approx((row_max[row] - new_reference[row]) * scale_log2);
                row_max[row] = new_reference[row];
                row_sum[row] *= rescale.factor[row];
                large |= fabsf(new_reference[row] * scale_log2) > kLargeExponent && new_reference[row] != -INFINITY;
            }
            is_large = __any_sync(kAllLanes, large);
        }
        bool unseen = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            unseen |= row_max[row] == -INFINITY;
        }
        needs_maximum = __any_sync(kAllLanes, unseen) || is_large || n_retries >= kMaxRetries || spread.is_wide;
        float reference[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            reference[row] = row_max[row] == -INFINITY ? 0.0f : row_max[row];
        }
        if (is_large) {  // subtract before scaling
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                CUTE_UNROLL
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) -= reference[row];
                }
                reference[row] = 0.0f;
            }
        }
        float sums[kNRows][1];
        exponentiate(scores, reference, sums);
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_sum[row] += sums[row][0];
        }
        return rescale;
    }

    // The largest score of a row, in four chains so that few instructions wait for each other.
    template <typename TensorS>
    __device__ __forceinline__ static float maximum_of(const TensorS &scores, int row) {
        constexpr int kChains = 4;
        float maximum[kChains];
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            maximum[col % kChains] = col < kChains ? scores(row, col) : fmaxf(maximum[col % kChains], scores(row, col));
        }
        return quad_allreduce(fmaxf(fmaxf(maximum[0], maximum[1]), fmaxf(maximum[2], maximum[3])),
                              [](float a, float b) { return fmaxf(a, b); });
    }

    // sums: of the columns whose number has the same remainder.
    template <int kParts, typename TensorS>
    __device__ __forceinline__ void exponentiate(TensorS &scores, const float (&reference)[kNRows],
                                                 float (&sums)[kNRows][kParts]) const {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            CUTE_UNROLL
            for (int i = 0; i < kParts; ++i) {
                sums[row][i] = 0.0f;
            }
        }
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                const float reference_scaled = scaled_reference(reference[row]);
                scores(row, col) = exp2_approx(__fmaf_rn(scores(row, col), scale_log2, -reference_scaled));
                sums[row][col % kParts] += scores(row, col);
            }
        }
    }

    // The probabilities of a step, out of range but finite, become relative to a reference near the largest of them.
    template <bool kIsFirst, typename TensorS>
    __device__ __forceinline__ Rescale move_reference(TensorS &scores, const float (&sums)[kNRows]) {
        Rescale rescale;
        bool large = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float largest = maximum_of(scores, row);
            const float old_reference = __fmul_rn(row_max[row], scale_log2);
            const float exceeds = log2f(largest) + kHeadroom;
            const float rise = exceeds + (kIsFirst ? 0.0f : offset_above_maximum(exceeds));
            if (kIsFirst || rise > 0.0f) {
                row_max[row] += __fdividef(rise, scale_log2);
            }
            const float reference = __fmul_rn(row_max[row], scale_log2);
            // The factor itself may vanish. Its parts are 1 and itself with float16, whose sums are below kOverflow.
            const float half = kHasWideRange ? exp2_approx(0.5f * (old_reference - reference)) : 1.0f;
            const float rest = kHasWideRange ? half : exp2_approx(old_reference - reference);
            rescale.factor[row] = half * rest;
            row_sum[row] = (row_sum[row] + sums[row]) * half * rest;

            large |= fabsf(reference) > kLargeExponent;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) = scores(row, col) * half * rest;
            }
        }
        rescale.is_needed = true;
        is_large = __any_sync(kAllLanes, large);
        needs_maximum = is_large;
        return rescale;
    }
};

}  // namespace flash::sm90
