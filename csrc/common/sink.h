// Attention sinks: a logit of each head that joins the softmax of every row and has no value. The row's sum of
// exponentials gains exp(sink). Kernels add it once, when all keys of a row are summed.
#pragma once

#include <cmath>

#include "sequence.h"

namespace flash {

// The sink of a head; -inf without sinks. T: the type of softmax_lse.
template <typename T>
FLASH_HOST_DEVICE T sink_of(const Flash_fwd_params &params, int64_t bidb, int64_t bidh) {
    return params.sink == nullptr ? -T(INFINITY)
                                  : static_cast<const T *>(params.sink)[bidb * params.sink_batch_stride + bidh];
}

// Adds a sink to a row. lse: the log-sum-exp of the row's keys, -inf without keys; becomes that with the sink. Returns
// the factor on the row's output.
template <typename T>
FLASH_HOST_DEVICE T join_sink(T sink, T &lse) {
    if (sink == -T(INFINITY)) {
        return T(1);
    }
    const T of_keys = lse;
    if (of_keys == -T(INFINITY)) {
        lse = sink;
        return T(0);
    }
    const T difference = sink - of_keys, weight = std::exp(-std::abs(difference));
    lse = (difference > T(0) ? sink : of_keys) + std::log1p(weight);
    return (difference > T(0) ? weight : T(1)) / (T(1) + weight);
}

}  // namespace flash
