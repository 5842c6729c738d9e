// return_max_logits without other options, in the softmax of Hopper, most of whose steps take no row maximum. The sum
// of some probabilities bounds each of them. Only where a sum exceeds the probability of the largest logit known so far
// does the warp compare probabilities. The warps of a work tile share the largest logit in shared memory; the scheduler
// warp puts there what other work tiles of the head have found.
#pragma once

#include <cute/tensor.hpp>

#include "common/max_logits.h"
#include "common/softmax.h"

namespace flash::sm90 {

using namespace cute;

// A logit in shared memory, as an integer of the same order.
class SharedLogit {
    int &bits;

    __device__ __forceinline__ static int flip(int bits) { return bits ^ (bits < 0 ? 0x7fffffff : 0); }

public:
    __device__ __forceinline__ explicit SharedLogit(int &bits) : bits(bits) {}

    // By one thread, before others read it. from: the value of the head in global memory, which others may raise.
    __device__ __forceinline__ void load(const float *from) {
        float value;
        asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
        bits = flip(__float_as_int(value));
    }
    __device__ __forceinline__ float value() const {
        int value;
        asm volatile("ld.relaxed.cta.shared.s32 %0, [%1];"
                     : "=r"(value)
                     : "r"(cast_smem_ptr_to_uint(&bits))
                     : "memory");
        return __int_as_float(flip(value));
    }
    // Raises it, and the value in global memory, to `logit`, which is the same in all lanes. Returns the larger one.
    __device__ __forceinline__ float raise(float logit, float *in_global_memory) {
        float before = 0.0f;
        if (threadIdx.x % 32 == 0) {
            before = __int_as_float(flip(atomicMax(&bits, flip(__float_as_int(logit)))));
            if (logit > before) {
                MaxLogit::store(in_global_memory, logit);
            }
        }
        return fmaxf(logit, __shfl_sync(0xffffffffu, before, 0));
    }
};

// Of one warp, in one work tile. Called by whole warps. References are those of the softmax, in base 2: a probability
// is 2^(logit * log2(e) - reference(row)). head has known() and raise(logit), those of the SharedLogit; is_query(row),
// false past the last query; and compares_scores(), true if every step compares its scores. kParts: sums of a row in a
// thread.
template <int kNRows, int kParts_>
class LargestLogit {
    float limit[kNRows];  // a step whose sums are at most this has no larger logit

    // The limit is 2^-margin of the probability of the known logit, because both are rounded. A larger logit is then
    // always found, and the result does not depend on the order of warps and thread blocks.
    static constexpr float kMargin = 0x1p-12f, kMarginOfReference = 0x1p-20f;
    static constexpr float kLn2 = float(1.0 / kLog2e);

public:
    static constexpr bool kIsTracked = true;
    static constexpr int kParts = kParts_;

    // True if one of the sums of a step exceeds its limit. A sum that is NaN does: other probabilities count.
    template <bool kIsFirst, typename Reference, typename Head>
    __device__ __forceinline__ bool may_be_exceeded(const float (&sums)[kNRows][kParts], const Reference &reference,
                                                    const Head &head) {
        if (head.compares_scores()) {
            return false;
        }
        if (kIsFirst) {
            set_limits(reference, head.known());
        }
        bool result = false;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            CUTE_UNROLL
            for (int i = 0; i < kParts; ++i) {
                result |= !(sums[row][i] <= limit[row]);
            }
        }
        return result;
    }

    // p: (row, col), the probabilities of a step, of which 2^-headroom stands for the probability 1.
    template <typename TensorP, typename Reference, typename Head>
    __device__ __forceinline__ void add_probabilities(const TensorP &p, const Reference &reference, float headroom,
                                                      const Head &head) {
        if (head.compares_scores()) {
            return;
        }
        float largest[kNRows];
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            largest[row] = (head.is_query(row) ? largest_probability(p, row) : 0.0f) * exp2f(headroom);
        }
        const auto in_base_2 = [&](const auto &log2_of) {
            float logit = -INFINITY;
            CUTE_UNROLL
            for (int row = 0; row < kNRows; ++row) {
                logit = fmaxf(logit, log2_of(largest[row]) + (reference(row) - headroom));
            }
            return logit;
        };
        const float roughly = in_base_2([](float x) { return __log2f(x); }) * kLn2;
        float known = head.known();
        if (__any_sync(0xffffffffu, roughly > known - (kMargin + kMarginOfReference * fabsf(known)))) {
            const float logit = warp_max(in_base_2([](float x) { return log2f(x); }) * kLn2);
            known = logit > known ? head.raise(logit) : known;
        }
        set_limits(reference, known);
    }

    // scores: (row, col), -inf where hidden, before they become probabilities.
    template <typename TensorS, typename Head>
    __device__ __forceinline__ void add_step(const TensorS &scores, float scale_log2, const Head &head) const {
        if (!head.compares_scores()) {
            return;
        }
        const bool are_negatives_smaller = head.known() >= 0.0f;
        float score = -INFINITY;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            score = fmaxf(score, head.is_query(row) ? largest_score(scores, row, are_negatives_smaller) : -INFINITY);
        }
        add(score, scale_log2, head);
    }

    // maximum: the largest score of each row in a step.
    template <typename Head>
    __device__ __forceinline__ void add_maximum(const float (&maximum)[kNRows], float scale_log2, const Head &head) {
        if (head.compares_scores()) {
            return;
        }
        float score = -INFINITY;
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            score = fmaxf(score, head.is_query(row) ? maximum[row] : -INFINITY);
        }
        add(score, scale_log2, head);
    }

    // The references of the next step.
    template <typename Reference, typename Head>
    __device__ __forceinline__ void set_references(const Reference &reference, const Head &head) {
        set_limits(reference, head.known());
    }

private:
    template <typename Head>
    __device__ __forceinline__ static void add(float score, float scale_log2, const Head &head) {
        const float logit = warp_max(score * (scale_log2 * kLn2));
        if (logit > head.known()) {
            head.raise(logit);
        }
    }

    template <typename Reference>
    __device__ __forceinline__ void set_limits(const Reference &reference, float known) {
        CUTE_UNROLL
        for (int row = 0; row < kNRows; ++row) {
            const float margin = kMargin + kMarginOfReference * fabsf(reference(row));
            limit[row] = exp2_approx(known * float(kLog2e) - reference(row) - margin);
        }
    }

    // Compare floats as integers, because Hopper has a maximum of three integers (VIMNMX3, one for two floats) and only
    // of two floats. NaN is the largest, and the orders agree unless all floats are negative.
    template <typename TensorX>
    __device__ __forceinline__ static int largest_bits(const TensorX &x, int row) {
        int bits = 0x80000000;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(x); col += 2) {
            bits = max_of_bits(bits, x(row, col), x(row, col + 1));
        }
        return bits;
    }
    // Without those that are NaN.
    template <typename TensorX>
    __device__ __forceinline__ static float largest_float(const TensorX &x, int row) {
        float largest = -INFINITY;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(x); ++col) {
            largest = fmaxf(largest, x(row, col));
        }
        return largest;
    }
    template <typename TensorP>
    __device__ __forceinline__ static float largest_probability(const TensorP &p, int row) {
        const float largest = __int_as_float(largest_bits(p, row));
        return isnan(largest) ? fmaxf(largest_float(p, row), 0.0f) : largest;
    }
    // ignores_negatives: they need not be told from each other.
    template <typename TensorS>
    __device__ __forceinline__ static float largest_score(const TensorS &scores, int row, bool ignores_negatives) {
        constexpr int kInfinity = 0x7f800000;
        const int bits = largest_bits(scores, row);
        if (bits > kInfinity || (bits < 0 && !ignores_negatives)) {
            return largest_float(scores, row);
        }
        return bits < 0 ? -INFINITY : __int_as_float(bits);
    }
};

// Of the kernels without the option.
struct NoLargestLogit {
    static constexpr bool kIsTracked = false;
    static constexpr int kParts = 1;
};

}  // namespace flash::sm90
