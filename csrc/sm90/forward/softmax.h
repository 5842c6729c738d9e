// The online softmax of Hopper's consumers, in base 2. It differs from common/softmax.h in two ways. The rescaling of O
// is separate, because the tensor cores still add to O while a step runs. And most steps take no row maximum:
// probabilities are relative to the reference that earlier steps left, and only their sum tells whether the reference
// has to move.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "common/softmax.h"

namespace flash::sm90 {

using namespace cute;

// kHasRoom: the reference may lie above the row maximum. Results of several parts of a row's keys, whose weights are
// relative to their references, need one that does not.
template <typename Element, int kNRows, bool kHasRoom = true>
struct Softmax {
    // bfloat16 has the exponents of float32, so a reference of 0 serves usual scores. float16 needs one near the
    // maximum.
    static constexpr bool kHasWideRange = std::is_same_v<Element, cutlass::bfloat16_t>;
    static constexpr bool kReferenceIsAboveMaximum = kHasWideRange && kHasRoom;
    // Probabilities carry the factor 2^-kHeadroom, which the quotient of output and sum removes. It leaves room for
    // scores far above the reference.
    static constexpr float kHeadroom = kHasWideRange ? 40.0f : 0.0f, kOne = kHasWideRange ? 0x1p-40f : 1.0f;
    // The reference moves when a thread's share of a row's sum of one step is larger, or in the first step the row's
    // sum is smaller: Element holds probabilities in between with full precision.
    static constexpr float kLargestSum = kHasWideRange ? 0x1p60f : 0x1p13f, kSmallestSum = 0x1p-60f;
    // The reference also moves when a step outweighs all keys before by the factor `dominance`. One key may then decide
    // the output alone, and its probability has to be kOne, not a rounded one. All keys before count as at least this.
    static constexpr float kLeastWeight = 0x1p7f * kOne;
    // Beyond these sums, probabilities may be infinite or 0, and the scores have to be computed again.
    static constexpr float kOverflow = 0x1p120f, kUnderflow = 0x1p-80f;
    // A first step without a row maximum needs scores below this magnitude (powers of 2) in a sample of its columns.
    static constexpr float kLargestSample = 8.0f;
    // The spread of the first step in which a warp sees keys is how far a sample of the visible scores reaches below
    // the row maximum, in powers of 2. The wider the scores, the more often one key outweighs all before by chance:
    // from kUsualSpread on, dominance is 2^(kDominanceInSpread * spread), infinite for very wide scores. Later scores
    // may also exceed the maximum by more. So the reference lies above it, by
    // kRoomInDominance * log2(dominance) - kUsualRoom, at most kLargestRoom.
    static constexpr float kUsualSpread = 32.0f, kDominanceInSpread = 0.35f, kLeastDominance = 0x1p5f;
    static constexpr float kRoomInDominance = 0.7f, kUsualRoom = 8.0f, kLargestRoom = 56.0f;
    // From kWide on the second step takes the maximum too, from kWideMasked on where a sampled score is hidden. From
    // kHuge on, and after kMostLost losses in later steps, all steps do: then nothing is lost.
    static constexpr float kWideMasked = 120.0f, kWide = 250.0f, kHuge = 800.0f;
    static constexpr int kMostLost = kHasWideRange ? 2 : 1;
    static constexpr float kLargestRise = 125.0f;  // 2^-kLargestRise is still a normal number
    // The reference may lag behind the true maximum by this much (powers of 2) before O is rescaled.
    static constexpr float kRescaleThreshold = 8.0f;
    static constexpr unsigned kAllLanes = 0xffffffffu;

    float scale_log2;
    float row_max[kNRows];              // reference of each row, unscaled; -inf before the first key
    float row_sum[kNRows];              // this thread's share of each row's sum, relative to the reference
    bool is_large = false;              // the reference is so large that score * scale_log2 would be rounded too much
    int n_lost = 0;                     // losses of scores in later steps; kMostLost from kHuge on
    bool needs_maximum = true;          // the next step has to take the row maximum
    float dominance = kLeastDominance;  // the factor by which a step has to outweigh all before to move the reference

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
    // sees one key needs the probability 1, not a rounded one. recompute(scores) restores the scores.
    template <bool kIsFirst, typename TensorS, typename Recompute>
    __device__ __forceinline__ Rescale step(TensorS &scores, bool takes_maximum, const Recompute &recompute) {
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
            float sums[kNRows];
            exponentiate(scores, row_max, sums);
            bool is_unusual = false;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                float others = row_sum[row];
                if (kIsFirst) {
                    const float total = quad_allreduce(sums[row], [](float a, float b) { return a + b; });
                    is_unusual |= total < kSmallestSum;
                    others = total - sums[row];
                }
                is_unusual |= sums[row] > largest_usual_sum(others);
            }
            if (!__any_sync(kAllLanes, is_unusual)) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_sum[row] += sums[row];
                }
                needs_maximum = false;
                Rescale rescale;
                rescale.is_needed = false;
                return rescale;
            }
            if (!is_lost<kIsFirst>(sums)) {
                return move_reference<kIsFirst>(scores, sums);
            }
            recompute(scores);
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = -INFINITY;
                }
            } else {
                ++n_lost;
                dominance = INFINITY;
            }
        }
        return step_with_maximum<kIsFirst>(scores);
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
    // row_mod_of(row): the RowMod of a row's head.
    template <typename RowModOf>
    __device__ __forceinline__ void finalize(const Flash_fwd_params &params, float out_factor,
                                             const RowModOf &row_mod_of, float (&lse)[kNRows],
                                             float (&factor)[kNRows]) const {
        float total[kNRows], reference[kNRows], weight[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            total[row] = quad_allreduce(row_sum[row], [](float a, float b) { return a + b; });
            reference[row] = __fmul_rn(row_max[row], params.scale_softmax);
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
            lse[row] = total[row] == 0.0f ? -INFINITY : reference[row] + __logf(total[row] / kOne);
        }
    }

private:
    static constexpr int kSamples = 4;

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
            is_large |= fabsf(largest * scale_log2) > kLargestSample && largest != -INFINITY;
        }
        return is_large;
    }

    // The largest share of a step's sum that a thread lets pass, after a sum of `others`.
    __device__ __forceinline__ float largest_usual_sum(float others) const {
        return kHasWideRange ? fminf((others + kLeastWeight) * dominance, kLargestSum) : kLargestSum;
    }

    // How far the reference moves above a row maximum that exceeds the old reference by this (-inf where there is none)
    // and lies this far below that of other rows. An integer, so that Element holds the largest probability. The room
    // ends where the factor of an O that counts would vanish.
    __device__ __forceinline__ float room_above_maximum(float exceeds, float below = 0.0f) const {
        if (!kReferenceIsAboveMaximum) {
            return 0.0f;
        }
        const float room = fmaxf(kRoomInDominance * log2f(dominance) - kUsualRoom, 0.0f) + below;
        return floorf(fminf(room, fminf(kLargestRoom, fmaxf(kLargestRise - exceeds, 0.0f))));
    }

    // What the first step in which a warp sees keys says about the scores that follow.
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
            spread.is_wide |= spread_of_row > (is_masked ? kWideMasked : kWide);
            spread.is_masked |= is_masked;
            largest_spread = fmaxf(largest_spread, spread_of_row);
        }
        if (!__any_sync(kAllLanes, largest_spread > kUsualSpread)) {
            return {};
        }
        largest_spread = warp_max(largest_spread);
        n_lost = largest_spread > kHuge ? kMostLost : 0;
        dominance = fmaxf(exp2_approx(kDominanceInSpread * largest_spread), kLeastDominance);
        return {__any_sync(kAllLanes, spread.is_wide) != 0, __any_sync(kAllLanes, spread.is_masked) != 0};
    }

    // True if probabilities of a step may be infinite or 0.
    template <bool kIsFirst>
    __device__ __forceinline__ static bool is_lost(const float (&sums)[kNRows]) {
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

    template <bool kIsFirst, typename TensorS>
    __device__ __forceinline__ Rescale step_with_maximum(TensorS &scores) {
        Rescale rescale;
        float maximum[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            maximum[row] = maximum_of(scores, row);
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
        float room[kNRows] = {}, new_reference[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_reference[row] = maximum[row];
        }
        if (kReferenceIsAboveMaximum && dominance > kLeastDominance) {
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
                    room[row] = room_above_maximum(row_max[row] == -INFINITY ? -INFINITY : exceeds, below);
                    new_reference[row] += __fdividef(room[row], scale_log2);
                }
            }
        }
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_reference[row] = fmaxf(row_max[row], new_reference[row]);
            must_rescale |= (new_reference[row] - row_max[row]) * scale_log2 > kRescaleThreshold + 0.5f * room[row];
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
        needs_maximum = __any_sync(kAllLanes, unseen) || is_large || n_lost >= kMostLost || spread.is_wide;
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
        float sums[kNRows];
        exponentiate(scores, reference, sums);
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_sum[row] += sums[row];
        }
        return rescale;
    }

    // The largest of the lanes' values, compared as integers of the same order.
    __device__ __forceinline__ static float warp_max(float value) {
        const auto flip = [](int bits) { return bits ^ (bits < 0 ? 0x7fffffff : 0); };
        return __int_as_float(flip(__reduce_max_sync(kAllLanes, flip(__float_as_int(value)))));
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

    template <typename TensorS>
    __device__ __forceinline__ void exponentiate(TensorS &scores, const float (&reference)[kNRows],
                                                 float (&sums)[kNRows]) const {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            sums[row] = 0.0f;
        }
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                const float reference_scaled = __fmaf_rn(reference[row], scale_log2, kHeadroom);
                scores(row, col) = exp2_approx(__fmaf_rn(scores(row, col), scale_log2, -reference_scaled));
                sums[row] += scores(row, col);
            }
        }
    }

    // The probabilities of a step, out of range but not lost, become relative to a reference near the largest of them.
    template <bool kIsFirst, typename TensorS>
    __device__ __forceinline__ Rescale move_reference(TensorS &scores, const float (&sums)[kNRows]) {
        Rescale rescale;
        bool large = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float largest = maximum_of(scores, row);
            const float old_reference = __fmul_rn(row_max[row], scale_log2);
            const float exceeds = log2f(largest) + kHeadroom;
            const float rise = exceeds + (kIsFirst ? 0.0f : room_above_maximum(exceeds));
            if (kIsFirst || rise > 0.0f) {
                row_max[row] += __fdividef(rise, scale_log2);
            }
            const float reference = __fmul_rn(row_max[row], scale_log2);
            const float half = exp2_approx(0.5f * (old_reference - reference));  // the factor itself may vanish
            rescale.factor[row] = half * half;
            row_sum[row] = (row_sum[row] + sums[row]) * half * half;

            large |= fabsf(reference) > kLargeExponent;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) = scores(row, col) * half * half;
            }
        }
        rescale.is_needed = true;
        is_large = __any_sync(kAllLanes, large);
        needs_maximum = is_large;
        return rescale;
    }
};

}  // namespace flash::sm90
