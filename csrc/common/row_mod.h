// Row modification: what joins the softmax of a row once all of its keys are summed. Kernels call it in their epilogue,
// before they normalise the output. ScoreMod (score_mod.h, cpu/score_mod.h) changes single scores.
//
// Attention sinks: a logit of each head that has no value. The row's sum of exponentials gains exp(sink).
#pragma once

#include <cmath>

#include "sequence.h"

namespace flash {

// On a GPU the error is about 2^-21.
template <typename T>
FLASH_HOST_DEVICE T exp_of(T x) {
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return std::exp(x);
#endif
}

// T: the type of softmax_lse.
template <typename T>
class RowMod {
public:
    // For the rows of one head.
    FLASH_HOST_DEVICE RowMod(const Flash_fwd_params &params, int64_t bidb, int64_t bidh)
        : sink_(is_on(params) ? static_cast<const T *>(params.sink) + bidb * params.sink_batch_stride + bidh
                              : nullptr) {}

    FLASH_HOST_DEVICE static bool is_on(const Flash_fwd_params &params) { return params.sink != nullptr; }
    FLASH_HOST_DEVICE bool is_on() const { return sink_ != nullptr; }

    // Brings what join() reads into L1, while the keys are still summed.
    FLASH_HOST_DEVICE void prefetch() const {
#ifdef __CUDA_ARCH__
        if (is_on()) {
            asm volatile("prefetch.global.L1 [%0];" ::"l"(sink_));
        }
#endif
    }

    // The log-sum-exp of a row without keys.
    FLASH_HOST_DEVICE T lse_without_keys() const { return is_on() ? *sink_ : -T(INFINITY); }

    // Joins the sums of a row, if is_on(). sum / one * exp(reference) is the row's sum of exponentials, and sum is 0
    // without keys; both become those of the whole row. Returns the factor on sums with the same reference, such as O.
    FLASH_HOST_DEVICE T join(T &reference, T &sum, T one = T(1)) const {
        const T sink = *sink_, of_keys = sum == T(0) ? -T(INFINITY) : reference;
        if (sink == -T(INFINITY)) {
            return T(1);
        }
        reference = of_keys > sink ? of_keys : sink;
        const T weight = exp_of(of_keys - reference);
        sum = sum * weight + exp_of(sink - reference) * one;
        return weight;
    }

private:
    const T *sink_;  // null: none
};

}  // namespace flash
