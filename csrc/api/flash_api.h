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
    at::Tensor rng_state;   // int64 [2]; undefined without dropout
    at::Tensor max_logits;  // [batch, nheads], varlen [nheads], dtype of softmax_lse; undefined unless wanted
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

// ---- the random state of a call with dropout: drawn from a torch generator, read by common/philox.h

// int64 [2] on the device of `like`: the seed and offset of a DropoutStream, drawn from `generator` or, if there is
// none, from the default generator of the device. torch.manual_seed repeats them, and every draw advances the
// generator. A torch operator draws them (on a GPU 4 steps of the Philox stream), so the host never waits, and a
// captured CUDA graph draws new numbers at every replay.
at::Tensor draw_rng_state(const at::Tensor &like, std::optional<at::Generator> generator);

// A copy of `given`, or a new one if `given` is none or has no elements.
at::Tensor rng_state_of_call(const at::Tensor &like, const std::optional<at::Tensor> &given,
                             std::optional<at::Generator> generator = {});

}  // namespace flash
