// The random numbers of a call with dropout: where torch's generators and common/philox.h meet.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace flash {

// int64 [2] where `like` is: a seed and an offset for DropoutStream, drawn from `generator`, or else from the default
// one of the device. torch.manual_seed repeats them, and every draw moves the generator on. An operator of torch draws
// them, on a GPU from its Philox stream (4 steps of it), so nothing waits, and a captured CUDA graph draws new ones at
// every replay.
at::Tensor draw_rng_state(const at::Tensor &like, std::optional<at::Generator> generator);

}  // namespace flash
