// Host side of the option key_ranges: checks and params. The kernels' side: common/key_ranges.h, cpu/visible_keys.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/options.h"
#include "flash.h"

namespace flash {

// args: with checked q, k, v and sequences.
void check_key_ranges(const FwdArgs &args);

// Returns key_ranges, copied if the pairs of a query are not contiguous.
at::Tensor readable_key_ranges(const at::Tensor &key_ranges);

// args: with readable options.
void set_key_ranges(Flash_fwd_params &params, const FwdArgs &args);

// Scratch memory of the CUDA kernels for params.key_ranges, if the call has them. It must live until they are launched.
at::Tensor key_ranges_scratch(Flash_fwd_params &params, const at::Tensor &q, bool is_backward,
                              bool is_deterministic = false);

}  // namespace flash
