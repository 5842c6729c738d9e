// Every check of the arguments of a call, for every backend. A failed check names the argument, what was
// given and what is allowed. mha_fwd and the others call them for their backend, the ops (api/ops.cpp) for the Triton
// backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "api/options.h"

namespace flash {

// The dtype of softmax_lse: float64 if q is float64, else float32.
at::ScalarType lse_dtype(const at::Tensor &q);

// ValueError, TypeError or NotImplementedError unless `backend` can run the call. The contents of cu_seqlens and
// block_table are checked if they are on the CPU; on a GPU only with FLASH_ATTN_MINI_CHECK=1, as reading them waits for
// the GPU.
void check_fwd(const FwdArgs &args, const std::string &backend);
void check_bwd(const BwdArgs &args, const std::string &backend);

// The same for a call of flash_attn_with_kvcache. Lengths, left paddings, batch indices and page numbers are checked
// where the contents of cu_seqlens would be.
void check_kvcache(const KvCacheArgs &args, const std::string &backend);

// With dropout, a backward reads rng_state: int64 [2] on the device of q (flash_api.h).
void check_rng_state(const std::optional<at::Tensor> &rng_state, double dropout_p, const at::Tensor &q);

}  // namespace flash
