// Tensors and scalars of a checked call become the params struct that every kernel reads.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash.h"

namespace flash {

TensorRef tensor_ref(const at::Tensor &x);  // x: [batch, seqlen, heads, headdim]

DType dtype_of(const at::Tensor &x);

struct Softmax_args {
    double softmax_scale;
    bool is_causal;
    int64_t window_size_left;   // keys, -1 = unbounded
    int64_t window_size_right;  // keys, -1 = unbounded
    double softcap;
};

// out: like q; softmax_lse: [batch, nheads, seqlen_q] contiguous.
Flash_fwd_params set_params_fprop(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const at::Tensor &out,
                                  const at::Tensor &softmax_lse, const Softmax_args &softmax);

// The tensors of a backward call. dq, dk, dv undefined: not wanted. dk, dv: [batch, seqlen_k, nheads / heads_per_dkv,
// headdim]; softmax_d: [batch, nheads, seqlen_q_rounded].
struct Dgrad_tensors {
    const at::Tensor &dout;
    const at::Tensor &dsoftmax_lse;  // undefined: zeros
    const at::Tensor &dq;
    const at::Tensor &dk;
    const at::Tensor &dv;
    const at::Tensor &softmax_d;
};

Flash_bwd_params set_params_dgrad(const Flash_fwd_params &forward, const Dgrad_tensors &tensors, int heads_per_dkv,
                                  bool deterministic);

}  // namespace flash
