// Tensors and scalars of a checked call become the params struct that every kernel reads.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "flash.h"

namespace flash {

// x: [batch, seqlen, heads, headdim], or [total, heads, headdim], whose batch stride is 0.
TensorRef tensor_ref(const at::Tensor &x);

DType dtype_of(const at::Tensor &x);

// The tensors of a forward call as the kernels read and write them; args says the rest.
struct FpropTensors {
    const at::Tensor &q;
    const at::Tensor &k;
    const at::Tensor &v;
    const at::Tensor &out;           // like q
    const at::Tensor &softmax_lse;   // [batch, nheads, seqlen_q], varlen [nheads, total_q]; contiguous
    const at::Tensor &alibi_slopes;  // undefined: off
    const at::Tensor &rng_state;     // int64 [2], contiguous; read with dropout alone
};

Flash_fwd_params set_params_fprop(const FpropTensors &tensors, const FwdArgs &args, double softmax_scale);

// The tensors of a backward call. dq, dk, dv undefined: not wanted. dk, dv: like k, of nheads / heads_per_dkv heads;
// softmax_d: [batch, nheads, seqlen_q_rounded], varlen [nheads, total_q_rounded].
struct DgradTensors {
    const at::Tensor &dout;
    const at::Tensor &dsoftmax_lse;  // undefined: zeros
    const at::Tensor &dq;
    const at::Tensor &dk;
    const at::Tensor &dv;
    const at::Tensor &softmax_d;
};

Flash_bwd_params set_params_dgrad(const Flash_fwd_params &forward, const DgradTensors &tensors, int heads_per_dkv,
                                  bool deterministic);

}  // namespace flash
