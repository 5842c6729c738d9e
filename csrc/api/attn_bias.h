// Host side of the option attn_bias: checks, params and its gradient. The kernels' side: common/attn_bias.h,
// cpu/attn_bias.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "api/options.h"
#include "flash.h"

namespace flash {

// args: with checked q, k, v and sequences.
void check_attn_bias(const FwdArgs &args);

// args: with readable options.
void set_attn_bias(Flash_fwd_params &params, const FwdArgs &args);

// The arguments of the gradient of attn_bias. forward.out is none.
struct BiasBwdArgs {
    FwdArgs forward;
    const at::Tensor &dout;         // like out
    const at::Tensor &softmax_lse;  // [batch, nheads, seqlen_q]
    const at::Tensor &softmax_d;    // [batch, nheads, seqlen_q rounded up], as the backward returned it
    const Optional &rng_state;      // int64 [2]: as the forward returned it; read only with dropout
};

void check_attn_bias_bwd(const BiasBwdArgs &args, const std::string &backend);

// The gradient of attn_bias, contiguous, in its shape and dtype. CPU and CUDA tensors.
at::Tensor mha_attn_bias_bwd(const BiasBwdArgs &args);

}  // namespace flash
