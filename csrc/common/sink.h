// Attention sinks: a logit of each head that joins the softmax of every row and has no value. The row's sum of
// exponentials gains exp(sink). Kernels add it once, when all keys of a row are summed.
#pragma once

#include <cmath>

#include "sequence.h"

namespace flash {

// The sink of a head; null without sinks. T: the type of softmax_lse.
template <typename T>
FLASH_HOST_DEVICE const T *sink_of(const Flash_fwd_params &params, int64_t bidb, int64_t bidh) {
    return params.sink == nullptr ? nullptr
                                  : static_cast<const T *>(params.sink) + bidb * params.sink_batch_stride + bidh;
}

// The log-sum-exp of a row without keys.
template <typename T>
FLASH_HOST_DEVICE T lse_without_keys(const T *sink) {
    return sink == nullptr ? -T(INFINITY) : *sink;
}

// exp(x) and log(1 + x) for the weight of a sink. On a GPU the error is about 2^-21.
template <typename T>
FLASH_HOST_DEVICE T exp_of(T x) {
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return std::exp(x);
#endif
}
template <typename T>
FLASH_HOST_DEVICE T log_of_1_plus(T x) {
#ifdef __CUDA_ARCH__
    return __logf(1.0f + x);
#else
    return std::log1p(x);
#endif
}

// Adds a sink to a row. lse: the log-sum-exp of the row's keys, -inf without keys; becomes that with the sink. Returns
// the factor on the row's output.
template <typename T>
FLASH_HOST_DEVICE T join_sink(T sink, T &lse) {
    const T of_keys = lse;
    if (sink == -T(INFINITY)) {
        return T(1);
    }
    if (of_keys == -T(INFINITY)) {
        lse = sink;
        return T(0);
    }
    const T difference = sink - of_keys, weight = exp_of(-std::abs(difference));
    lse = (difference > T(0) ? sink : of_keys) + log_of_1_plus(weight);
    return (difference > T(0) ? weight : T(1)) / (T(1) + weight);
}

}  // namespace flash
