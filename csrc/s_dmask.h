// S_dmask: the attention probabilities with the dropout mask in their signs, for tests of dropout. As large as the
// scores, so ATen operators compute it, not a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace flash {

// [batch, nheads, seqlen_q rounded up to 128, seqlen_k rounded up to 128] (varlen: of the max_seqlens) in q's dtype:
// exp(logit - softmax_lse), negated where dropped (-0.0 too), 0 where a query does not see a key and in the padding.
// softmax_lse as the forward returned it; rng_state: int64 [2], read with dropout alone. Never waits for the GPU.
at::Tensor s_dmask(const Fwd_args &args, const at::Tensor &softmax_lse, const at::Tensor &rng_state);

}  // namespace flash
