// Row modification: what joins the softmax of a row once all of its keys are summed. Kernels call it in their epilogue,
// before they normalise the output. ScoreMod (score_mod.h, cpu/score_mod.h) changes single scores.
//
// Attention sinks: a logit of each head that has no value. The row's sum of exponentials gains exp(sink).
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

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
        : logit_(is_on(params) ? load(params, bidb * params.sink_batch_stride + bidh) : -T(INFINITY)) {}

    FLASH_HOST_DEVICE static bool is_on(const Flash_fwd_params &params) { return params.sink != nullptr; }

    // Brings what the constructor reads into L1, while the keys are still summed.
    FLASH_HOST_DEVICE static void prefetch(const Flash_fwd_params &params, int64_t bidb, int64_t bidh) {
#ifdef __CUDA_ARCH__
        if (is_on(params)) {
            const int64_t index = bidb * params.sink_batch_stride + bidh;
            const bool is_float = params.sink_dtype == DType::float32;
            const void *address = is_float ? static_cast<const void *>(static_cast<const float *>(params.sink) + index)
                                           : static_cast<const uint16_t *>(params.sink) + index;
            asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
        }
#endif
    }

    // What joins each row; -inf: nothing. It is the log-sum-exp of a row without keys.
    FLASH_HOST_DEVICE T logit() const { return logit_; }

    // Joins the sums of a row. sum / one * exp(reference) is the row's sum of exponentials, and sum is 0 without keys;
    // both become those of the whole row. Returns the factor on sums with the same reference, such as O. The
    // exponential does not wait for `sum`.
    FLASH_HOST_DEVICE T join(T &reference, T &sum, T one = T(1)) const {
        const bool has_keys = sum != T(0), is_above = reference > logit_;
        const T ratio = exp_of(is_above ? logit_ - reference : reference - logit_);
        const T weight = is_above ? T(1) : ratio, of_logit = is_above ? ratio : T(1);
        reference = has_keys && is_above ? reference : logit_;
        sum = has_keys ? sum * weight + of_logit * one : logit_ == -T(INFINITY) ? T(0) : one;
        return has_keys ? weight : T(0);
    }

private:
    // On a GPU in the caller's dtype, so that no kernel has to convert it.
    FLASH_HOST_DEVICE static T load(const Flash_fwd_params &params, int64_t index) {
#ifdef __CUDA_ARCH__
        if (params.sink_dtype != DType::float32) {
            const uint16_t bits = static_cast<const uint16_t *>(params.sink)[index];
            return params.sink_dtype == DType::float16 ? __half2float(__ushort_as_half(bits))
                                                       : __uint_as_float(uint32_t{bits} << 16);
        }
#endif
        return static_cast<const T *>(params.sink)[index];
    }

    T logit_;
};

}  // namespace flash
