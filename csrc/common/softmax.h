// The online softmax over the rows that one thread holds, in base 2: p = 2^(score * scale_log2 - row_max * scale_log2).
// docs/algorithm.md derives it. Hopper's own is in sm90/forward/softmax.h.
#pragma once

#include <cute/tensor.hpp>

#include "attn_bias.h"
#include "row_mod.h"

namespace flash {

using namespace cute;

__device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Reduces over the 4 lanes that hold one row of an m16n8 accumulator.
template <typename Operator>
__device__ __forceinline__ float quad_allreduce(float x, Operator op) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// From this magnitude of score * scale_log2 on, its rounding shows in the probability, and row_max is subtracted before
// the scaling.
constexpr float kLargeExponent = 4096.0f;

template <int kNRows>
struct Softmax {
    // row_max may lag behind the true maximum by this much (powers of 2). A probability is then at most 2^8, which
    // float32 sums and 16-bit operands hold, and O is rescaled in few steps.
    static constexpr float kRescaleThreshold = 8.0f;

    float scale_log2;
    float row_max[kNRows];  // reference maximum of each row, unscaled; -inf before the first key
    float row_sum[kNRows];  // this thread's share of each row's sum
    bool is_large = false;  // the same in every lane of the warp

    __device__ explicit Softmax(float scale_log2) : scale_log2(scale_log2) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            row_max[row] = -INFINITY;
            row_sum[row] = 0.0f;
        }
    }

    struct NoOp {
        __device__ void operator()(int, float) const {}
    };

    // One step over a key block: scores (row, col) become probabilities relative to row_max; acc_o (row, col) and
    // row_sum follow when row_max moves. on_maximum(row, largest score of the row so far), unscaled.
    template <typename TensorS, typename TensorO, typename OnMaximum = NoOp>
    __device__ __forceinline__ void step(TensorS &scores, TensorO &acc_o, const OnMaximum &on_maximum = {}) {
        static_assert(decltype(size<0>(scores))::value == kNRows);
        float new_max[kNRows];
        bool must_rescale = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            new_max[row] = fmaxf(row_max[row], maximum_of(scores, row));
            on_maximum(row, new_max[row]);
            must_rescale |= (new_max[row] - row_max[row]) * scale_log2 > kRescaleThreshold;
        }
        if (__any_sync(0xffffffffu, must_rescale)) {
            rescale(new_max, acc_o);
        }
        if (is_large) {
            exponentiate</*kSubtractFirst=*/true>(scores);
        } else {
            exponentiate</*kSubtractFirst=*/false>(scores);
        }
        sum(scores);
    }

    // After the last step: acc_o becomes the output times out_factor, and lse the log-sum-exp of each row (natural
    // log). A row without a key gets output 0, even if V holds NaN or infinity. The product of score and scale is
    // rounded as in the backward, so that the probability of a very large score is exactly 1 there. kHasBias: scores
    // are logits (attn_bias.h).
    template <bool kHasBias = false, typename TensorO>
    __device__ __forceinline__ void finalize(TensorO &acc_o, float softmax_scale, float out_factor,
                                             const RowMod<float> &row_mod, float (&lse)[kNRows]) {
        float factor[kNRows], total[kNRows], reference[kNRows], weight[kNRows];  // factor: 0 for a row without a key
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            total[row] = quad_allreduce(row_sum[row], [](float a, float b) { return a + b; });
            reference[row] = __fmul_rn(row_max[row], softmax_scale);
            weight[row] = 1.0f;
        }
        if (row_mod.logit() != -INFINITY) {
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                weight[row] = row_mod.join(reference[row], total[row]);
            }
        }
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            factor[row] = total[row] == 0.0f ? 0.0f : out_factor / total[row] * weight[row];
            if constexpr (kHasBias) {
                lse[row] = total[row] == 0.0f ? -INFINITY : lse_with_bias(reference[row], total[row]);
            } else {
                lse[row] = total[row] == 0.0f ? -INFINITY : reference[row] + logf(total[row]);
            }
        }
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(acc_o); ++col) {
                acc_o(row, col) = factor[row] == 0.0f ? 0.0f : acc_o(row, col) * factor[row];
            }
        }
    }

private:
    template <typename TensorS>
    __device__ __forceinline__ float maximum_of(const TensorS &scores, int row) {
        float maximum = scores(row, 0);
        CUTE_UNROLL
        for (int col = 1; col < size<1>(scores); ++col) {
            maximum = fmaxf(maximum, scores(row, col));
        }
        return quad_allreduce(maximum, [](float a, float b) { return fmaxf(a, b); });
    }

    template <typename TensorO>
    __device__ __forceinline__ void rescale(const float (&new_max)[kNRows], TensorO &acc_o) {
        bool large = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            // -inf - -inf would be NaN: a row that has seen no key keeps factor 1 (its sum and output are 0).
            const float factor =
                new_max[row] == -INFINITY ? 1.0f : exp2_approx((row_max[row] - new_max[row]) * scale_log2);
            row_max[row] = new_max[row];
            large |= fabsf(new_max[row] * scale_log2) > kLargeExponent && new_max[row] != -INFINITY;
            row_sum[row] *= factor;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(acc_o); ++col) {
                acc_o(row, col) *= factor;
            }
        }
        is_large = __any_sync(0xffffffffu, large);
    }

    template <bool kSubtractFirst, typename TensorS>
    __device__ __forceinline__ void exponentiate(TensorS &scores) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float reference = row_max[row] == -INFINITY ? 0.0f : row_max[row];
            const float reference_scaled = reference * scale_log2;
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                scores(row, col) = exp2_approx(kSubtractFirst ? (scores(row, col) - reference) * scale_log2
                                                              : scores(row, col) * scale_log2 - reference_scaled);
            }
        }
    }

    template <typename TensorS>
    __device__ __forceinline__ void sum(const TensorS &scores) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            CUTE_UNROLL
            for (int col = 0; col < size<1>(scores); ++col) {
                row_sum[row] += scores(row, col);
            }
        }
    }
};

}  // namespace flash
