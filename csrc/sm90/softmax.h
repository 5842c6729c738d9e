// The online softmax of common/softmax.h cut in two, so that O, which the tensor cores still add to, follows later.
#pragma once

#include "../common/softmax.h"

namespace flash::sm90 {

using namespace cute;

template <int kNRows>
struct Softmax : flash::Softmax<kNRows> {
    using Base = flash::Softmax<kNRows>;
    using Base::is_large, Base::row_max, Base::row_sum, Base::scale_log2;

    __device__ explicit Softmax(float scale_log2) : Base(scale_log2) {}

    // What O has to be multiplied by.
    struct Rescale {
        float factor[kNRows];
        bool is_needed;  // the same in every lane of the warp
    };

    // One step over a key block: scores (row, col) become probabilities relative to row_max.
    template <typename TensorS>
    __device__ __forceinline__ Rescale step(TensorS &scores) {
        Rescale rescale;
        float new_max[kNRows];
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_max[row] = fmaxf(row_max[row], this->maximum_of(scores, row));
            must_rescale |= (new_max[row] - row_max[row]) * scale_log2 > Base::kRescaleThreshold;
        }
        rescale.is_needed = __any_sync(0xffffffffu, must_rescale);
        if (rescale.is_needed) {
            bool large = false;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
                rescale.factor[row] =
                    new_max[row] == -INFINITY ? 1.0f : exp2_approx((row_max[row] - new_max[row]) * scale_log2);
                row_max[row] = new_max[row];
                row_sum[row] *= rescale.factor[row];
                large |= fabsf(new_max[row] * scale_log2) > kLargeExponent && new_max[row] != -INFINITY;
            }
            is_large = __any_sync(0xffffffffu, large);
        }
        if (is_large) {
            this->template exponentiate</*Subtract_first=*/true>(scores);
        } else {
            this->template exponentiate</*Subtract_first=*/false>(scores);
        }
        this->sum(scores);
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
};

}  // namespace flash::sm90
