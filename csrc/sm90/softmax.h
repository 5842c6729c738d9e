// The online softmax of common/softmax.h, with two changes. It is cut in two, so that O, which the tensor cores still
// add to, follows later. And a step does not look for its scores' maximum: probabilities are taken relative to the
// reference that earlier steps left, and only when their sum shows that it does not serve is it moved afterwards.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "../common/softmax.h"

namespace flash::sm90 {

using namespace cute;

template <typename Element, int kNRows>
struct Softmax : flash::Softmax<kNRows> {
    using Base = flash::Softmax<kNRows>;
    using Base::is_large, Base::row_max, Base::row_sum, Base::scale_log2;

    // A thread's share of a row's probabilities of one step may sum up to this, and all of a row's in the first step
    // must sum up to that: what the type of P holds in full precision. bfloat16 has float32's exponents, and so a
    // reference of 0 serves any usual scores; float16 needs one near the largest.
    static constexpr bool kHasWideRange = std::is_same_v<Element, cutlass::bfloat16_t>;
    static constexpr float kLargestSum = kHasWideRange ? 0x1p60f : 0x1p13f, kSmallestSum = 0x1p-60f;
    // Beyond these, probabilities may be infinite or 0, and the factors that undo it too.
    static constexpr float kOverflow = 0x1p100f, kUnderflow = 0x1p-80f;

    // A step has to begin with the maximum: some row has no reference yet, or needs one near its largest score. The
    // same in every lane of the warp.
    bool needs_maximum = true;

    __device__ explicit Softmax(float scale_log2) : Base(scale_log2) {}

    // What O has to be multiplied by.
    struct Rescale {
        float factor[kNRows];
        bool is_needed;  // the same in every lane of the warp
    };

    // One step over a key block: scores (row, col) become probabilities relative to row_max. kIsFirst: of a tile.
    // takes_maximum: begin with it, as in a tile's first step where rows may see few keys in all: a row that sees one
    // key has the probability 1, and no rounded one. recompute(scores) brings the scores back.
    template <bool kIsFirst, typename TensorS, typename Recompute>
    __device__ __forceinline__ Rescale step(TensorS &scores, bool takes_maximum, const Recompute &recompute) {
        Rescale rescale;
        rescale.is_needed = false;
        if (!takes_maximum && (kIsFirst ? kHasWideRange : !needs_maximum)) {
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = 0.0f;
                }
            }
            float sums[kNRows];
            exponentiate(scores, row_max, sums);
            bool misses = false, is_lost = false;  // the range; beyond repair
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                misses |= sums[row] > kLargestSum;
                is_lost |= sums[row] > kOverflow;
                if (kIsFirst) {
                    const float total = quad_allreduce(sums[row], [](float a, float b) { return a + b; });
                    misses |= total < kSmallestSum;
                    is_lost |= total < kUnderflow;
                }
            }
            if (!__any_sync(0xffffffffu, misses)) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_sum[row] += sums[row];
                }
                needs_maximum = false;
                return rescale;
            }
            if (!__any_sync(0xffffffffu, is_lost)) {
                return move_reference<kIsFirst>(scores, sums);
            }
            recompute(scores);
            if (kIsFirst) {
                CUTE_UNROLL
                for (int row = 0; row < kNRows; ++row) {
                    row_max[row] = -INFINITY;
                }
            }
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

    // After the last step: each row's log-sum-exp (natural log), and what its output has to be multiplied by, of which
    // out_factor is a part.
    __device__ __forceinline__ void finalize(float softmax_scale, float out_factor, float (&lse)[kNRows],
                                             float (&factor)[kNRows]) const {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float total = quad_allreduce(row_sum[row], [](float a, float b) { return a + b; });
            factor[row] = total == 0.0f ? 0.0f : __fdividef(out_factor, total);
            lse[row] = total == 0.0f ? -INFINITY : __fmul_rn(row_max[row], softmax_scale) + __logf(total);
        }
    }

private:
    template <typename TensorS>
    __device__ __forceinline__ Rescale step_with_maximum(TensorS &scores) {
        Rescale rescale;
        float new_max[kNRows];
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_max[row] = fmaxf(row_max[row], maximum_of(scores, row));
            must_rescale |= (new_max[row] - row_max[row]) * scale_log2 > Base::kRescaleThreshold;
        }
        rescale.is_needed = __any_sync(0xffffffffu, must_rescale);
        if (rescale.is_needed) {
            bool large = false, unseen = false;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
                rescale.factor[row] =
                    new_max[row] == -INFINITY ? 1.0f : exp2_approx((row_max[row] - new_max[row]) * scale_log2);
                row_max[row] = new_max[row];
                row_sum[row] *= rescale.factor[row];
                unseen |= new_max[row] == -INFINITY;
                large |= fabsf(new_max[row] * scale_log2) > kLargeExponent && new_max[row] != -INFINITY;
            }
            is_large = __any_sync(0xffffffffu, large);
            needs_maximum = __any_sync(0xffffffffu, large || unseen);
        }
        float reference[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            reference[row] = row_max[row] == -INFINITY ? 0.0f : row_max[row];
        }
        if (is_large) {  // score * scale_log2 would be rounded too much
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

    // Several chains, so that few instructions wait for each other.
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
            large |= fabsf(reference) > kLargeExponent;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) *= rescale.factor[row];
            }
        }
        rescale.is_needed = true;
        is_large = __any_sync(0xffffffffu, large);
        needs_maximum = is_large;
        return rescale;
    }
};

}  // namespace flash::sm90
