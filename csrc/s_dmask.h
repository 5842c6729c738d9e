// S_dmask: exp(logit - largest logit of the row) with the dropout mask in the signs, for tests of dropout. It is as
// large as the scores, so ATen operators compute it instead of a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "options.h"

namespace flash {

// [batch, nheads, seqlen_q rounded up to 128, seqlen_k rounded up to 128] (varlen: the max_seqlens) in the dtype of q:
// exp(logit - largest logit of the row), negated where dropped (-0.0 too), and 0 in the padding and where a query does
// not see a key. The official package subtracts the largest logit of the key blocks that its kernel has processed so
// far, and its tests correct for this; here one block holds all keys (_get_block_size_n of the interface).
// rng_state: int64 [2], read only with dropout. Never waits for the GPU.
at::Tensor s_dmask(const FwdArgs &args, const at::Tensor &rng_state);

}  // namespace flash
