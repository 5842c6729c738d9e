// The online softmax of Hopper's consumers, in base 2. It differs from common/softmax.h in two ways. The rescaling of O
// is separate, because the tensor cores still add to O while a step runs. And most steps take no row maximum:
// probabilities are relative to the reference that earlier steps left, and only their sum tells whether the reference
// has to move.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "../common/softmax.h"

namespace flash::sm90 {

using namespace cute;

template <typename Element, int kNRows>
struct Softmax {
    // bfloat16 has the exponents of float32, so a reference of 0 serves usual scores. float16 needs one near the
    // maximum.
    static constexpr bool kHasWideRange = std::is_same_v<Element, cutlass::bfloat16_t>;
    // The reference moves when a thread's share of a row's sum of one step is larger, or in the first step the row's
    // sum is smaller: Element holds probabilities in between with full precision.
    static constexpr float kLargestSum = kHasWideRange ? 0x1p60f : 0x1p13f, kSmallestSum = 0x1p-60f;
    // Beyond these sums, probabilities may be infinite or 0, and the scores have to be computed again.
    static constexpr float kOverflow = 0x1p120f, kUnderflow = 0x1p-80f;
    // A first step without a row maximum needs scores below this magnitude (powers of 2) in a sample of its columns.
    static constexpr float kLargestSample = 8.0f;
    // A key whose probability outweighs all others by this factor nearly decides the output alone, so that its rounding
    // shows there. A thread's share of a row's sum of one step up to kUsualSum holds none that matters.
    static constexpr float kDominance = kHasWideRange ? 0x1p5f : 0x1p8f, kUsualSum = 0x1p8f;
    // The reference may lag behind the true maximum by this much (powers of 2) before O is rescaled.
    static constexpr float kRescaleThreshold = 8.0f;
    static constexpr unsigned kAllLanes = 0xffffffffu;

    float scale_log2;
    float row_max[kNRows];  // reference of each row, unscaled; -inf before the first key
    float row_sum[kNRows];  // this thread's share of each row's sum, relative to the reference
    // By how much rounding to Element changed the probabilities of dominant keys, which row_sum holds unrounded.
    cutlass::Array<cutlass::bfloat16_t, kNRows> rounding;
    bool is_large = false;      // the reference is so large that score * scale_log2 would be rounded too much
    bool needs_maximum = true;  // a step has to take the row maximum: a row has no reference yet, or is_large

    __device__ explicit Softmax(float scale_log2) : scale_log2(scale_log2) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_max[row] = -INFINITY;
            row_sum[row] = 0.0f;
            rounding[row] = cutlass::bfloat16_t(0.0f);
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
            Rescale rescale;
            rescale.is_needed = false;
            float sums[kNRows];
            exponentiate(scores, row_max, sums);
            if (__builtin_expect(__any_sync(kAllLanes, is_unusual<kIsFirst>(sums)), false)) {
                return repair<kIsFirst>(scores, sums, recompute);
            }
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                row_sum[row] += sums[row];
            }
            needs_maximum = false;
            return rescale;
        }
        return step_with_maximum(scores);
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
    // includes out_factor; 0 for a row without a key. The sum that divides the output holds the dominant probability
    // as rounded, so that its rounding cancels; the log-sum-exp holds it exactly.
    __device__ __forceinline__ void finalize(float softmax_scale, float out_factor, float (&lse)[kNRows],
                                             float (&factor)[kNRows]) const {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float total = quad_sum(row_sum[row]), rounded_total = total + quad_sum(float(rounding[row]));
            factor[row] = total == 0.0f ? 0.0f : __fdividef(out_factor, rounded_total);
            lse[row] = total == 0.0f ? -INFINITY : __fmul_rn(row_max[row], softmax_scale) + __logf(total);
        }
    }

private:
    // True if this thread's sample of the scores is far from 0: the reference 0 might lose them.
    template <typename TensorS>
    __device__ __forceinline__ bool has_large_sample(const TensorS &scores) const {
        constexpr int kSamples = 4, kStride = decltype(size<1>(scores))::value / kSamples;
        bool is_large = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            float largest = scores(row, 0);
            CUTE_UNROLL
            for (int i = 1; i < kSamples; ++i) {
                largest = fmaxf(largest, scores(row, i * kStride));
            }
            is_large |= fabsf(largest * scale_log2) > kLargestSample && largest != -INFINITY;
        }
        return is_large;
    }

    // True if a thread's sum of a step may hold a dominant key, or is out of range. others: the sum of other keys.
    __device__ __forceinline__ static bool exceeds(float sum, float others) {
        return sum > fminf(fmaxf(others * kDominance, kUsualSum), kLargestSum);
    }

    // A step without a row maximum looks at its sums alone. Few steps are unusual: the reference does not fit the
    // scores, or one key outweighs all others in a row.
    template <bool kIsFirst>
    __device__ __forceinline__ bool is_unusual(const float (&sums)[kNRows]) const {
        bool result = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            if (kIsFirst) {
                const float total = quad_sum(sums[row]), others = total - sums[row];
                result |= total < kSmallestSum || exceeds(sums[row], others);
            } else {
                result |= exceeds(sums[row], row_sum[row]);
            }
        }
        return result;
    }

    // Probabilities may be infinite or 0.
    template <bool kIsFirst>
    __device__ __forceinline__ static bool is_lost(const float (&sums)[kNRows]) {
        bool result = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            result |= sums[row] > kOverflow || (kIsFirst && quad_sum(sums[row]) < kUnderflow);
        }
        return result;
    }

    template <bool kIsFirst>
    __device__ __forceinline__ static bool is_out_of_range(const float (&sums)[kNRows]) {
        bool result = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            result |= sums[row] > kLargestSum || (kIsFirst && quad_sum(sums[row]) < kSmallestSum);
        }
        return result;
    }

    // An unusual step: begins again, moves the reference, or corrects for a dominant key.
    template <bool kIsFirst, typename TensorS, typename Recompute>
    __device__ __forceinline__ Rescale repair(TensorS &scores, const float (&sums)[kNRows],
                                              const Recompute &recompute) {
        if (__any_sync(kAllLanes, is_lost<kIsFirst>(sums))) {
            recompute(scores);
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = -INFINITY;
                }
            }
            return step_with_maximum(scores);
        }
        if (__any_sync(kAllLanes, is_out_of_range<kIsFirst>(sums))) {
            return move_reference<kIsFirst>(scores, sums);
        }
        correct_rounding(scores, sums);
        needs_maximum = false;
        Rescale rescale;
        rescale.is_needed = false;
        return rescale;
    }

    // Adds the sums of a step in which some key is dominant, and notes the rounding of its probability.
    template <typename TensorS>
    __device__ __forceinline__ void correct_rounding(const TensorS &scores, const float (&sums)[kNRows]) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float largest = maximum_in_thread(scores, row);
            if (sums[row] > row_sum[row] * kDominance) {
                rounding[row] = cutlass::bfloat16_t(float(Element(largest)) - largest);
            }
            row_sum[row] += sums[row];
        }
    }

    __device__ __forceinline__ static float quad_sum(float x) {
        return quad_allreduce(x, [](float a, float b) { return a + b; });
    }

    template <typename TensorS>
    __device__ __forceinline__ Rescale step_with_maximum(TensorS &scores) {
        Rescale rescale;
        float new_max[kNRows];
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_max[row] = fmaxf(row_max[row], maximum_of(scores, row));
            must_rescale |= (new_max[row] - row_max[row]) * scale_log2 > kRescaleThreshold;
        }
        rescale.is_needed = __any_sync(kAllLanes, must_rescale);
        if (rescale.is_needed) {
            bool large = false, unseen = false;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
                rescale.factor[row] =
                    new_max[row] == -INFINITY ? 1.0f : exp2_approx((row_max[row] - new_max[row]) * scale_log2);
                row_max[row] = new_max[row];
                row_sum[row] *= rescale.factor[row];
                rounding[row] = cutlass::bfloat16_t(float(rounding[row]) * rescale.factor[row]);
                unseen |= new_max[row] == -INFINITY;
                large |= fabsf(new_max[row] * scale_log2) > kLargeExponent && new_max[row] != -INFINITY;
            }
            is_large = __any_sync(kAllLanes, large);
            needs_maximum = __any_sync(kAllLanes, large || unseen);
        }
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

    // The largest of this thread's scores of a row, in four chains so that few instructions wait for each other.
    template <typename TensorS>
    __device__ __forceinline__ static float maximum_in_thread(const TensorS &scores, int row) {
        constexpr int kChains = 4;
        float maximum[kChains];
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
            maximum[col % kChains] = col < kChains ? scores(row, col) : fmaxf(maximum[col % kChains], scores(row, col));
        }
        return fmaxf(fmaxf(maximum[0], maximum[1]), fmaxf(maximum[2], maximum[3]));
    }

    template <typename TensorS>
    __device__ __forceinline__ static float maximum_of(const TensorS &scores, int row) {
        return quad_allreduce(maximum_in_thread(scores, row), [](float a, float b) { return fmaxf(a, b); });
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
                scores(row, col) =
                    exp2_approx(__fmaf_rn(scores(row, col), scale_log2, -__fmul_rn(reference[row], scale_log2)));
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
            if (kIsFirst || largest > 1.0f) {
                row_max[row] += __fdividef(log2f(largest), scale_log2);
            }
            const float reference = __fmul_rn(row_max[row], scale_log2);
            rescale.factor[row] = exp2_approx(old_reference - reference);
            row_sum[row] = (row_sum[row] + sums[row]) * rescale.factor[row];
            rounding[row] = cutlass::bfloat16_t(float(rounding[row]) * rescale.factor[row]);
            large |= fabsf(reference) > kLargeExponent;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) *= rescale.factor[row];
            }
        }
        rescale.is_needed = true;
        is_large = __any_sync(kAllLanes, large);
        needs_maximum = is_large;
        return rescale;
    }
};

}  // namespace flash::sm90
