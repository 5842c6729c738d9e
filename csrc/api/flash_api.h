// mha_fwd, mha_bwd and mha_fwd_kvcache: each checks its arguments, allocates the results, sets the params and runs the
// kernels, for CPU and CUDA tensors. The ops (api/ops.cpp) and the official entries (api/bindings.cpp) call them.
#pragma once

#include <ATen/core/Generator.h>

#include <array>
#include <optional>
#include <tuple>

#include "api/options.h"

namespace flash {

struct FwdResults {
    at::Tensor out, softmax_lse;
    at::Tensor rng_state;  // int64 [2]; undefined without dropout
};

// rng_state: the seed and offset of dropout, or none: drawn from the generator, by default torch's of the device.
FwdResults mha_fwd(const FwdArgs &args, const Optional &rng_state = {}, std::optional<at::Generator> generator = {},
                   bool zero_tensors = false);

struct BwdResults {
    at::Tensor dq, dk, dv;  // undefined where output_mask has false
    at::Tensor softmax_d;   // delta, see empty_softmax_d
};

BwdResults mha_bwd(const BwdArgs &args, std::array<bool, 3> output_mask, bool zero_tensors = false);

// Returns out and softmax_lse. Writes the new keys and values to the caches.
std::tuple<at::Tensor, at::Tensor> mha_fwd_kvcache(const KvCacheArgs &args);

}  // namespace flash
