// The random state of a call with dropout: drawn from a torch generator, read by common/philox.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace flash {

// int64 [2] on the device of `like`: the seed and offset of a DropoutStream, drawn from `generator` or, if there is
// none, from the default generator of the device. torch.manual_seed repeats them, and every draw advances the
// generator. A torch operator draws them (on a GPU 4 steps of the Philox stream), so the host never waits, and a
// captured CUDA graph draws new numbers at every replay.
at::Tensor draw_rng_state(const at::Tensor &like, std::optional<at::Generator> generator);

// A copy of `given`, or a new one if `given` is none or has no elements.
at::Tensor rng_state_of_call(const at::Tensor &like, const std::optional<at::Tensor> &given,
                             std::optional<at::Generator> generator = {});

}  // namespace flash
