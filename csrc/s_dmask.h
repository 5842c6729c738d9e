// S_dmask: exp(score - largest of its row) with the dropout mask in the signs, for tests of dropout. As large as the
// scores, so ATen operators compute it, not a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace flash {

// [batch, nheads, seqlen_q rounded up to 128, seqlen_k rounded up to 128] (varlen: of the max_seqlens) in q's dtype:
// exp(logit - largest logit of the row), negated where dropped (-0.0 too), 0 where a query does not see a key and in
// the padding. The official package's is relative to the largest logit of the blocks of keys that its kernel has been
// through, which tests of it correct; here one block holds all keys (_get_block_size_n of the interface says so).
// rng_state: int64 [2], read with dropout alone. Never waits for the GPU.
at::Tensor s_dmask(const FwdArgs &args, const at::Tensor &rng_state);

}  // namespace flash
