// Every check of the arguments of a forward call, for every backend: each failure names the argument, what was given
// and what is allowed. Called by mha_fwd, and through _C.check_fwd before the Triton backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace flash {

// The arguments of fwd in the official order, less the generator.
struct Fwd_args {
    const at::Tensor &q;                            // [batch, seqlen_q, nheads, headdim]
    const at::Tensor &k;                            // [batch, seqlen_k, nheads_k, headdim]
    const at::Tensor &v;                            // [batch, seqlen_k, nheads_k, headdim]
    const std::optional<at::Tensor> &out;           // like q
    const std::optional<at::Tensor> &alibi_slopes;  // float32 [nheads] or [batch, nheads]
    double p_dropout;
    double softmax_scale;
    bool is_causal;
    int64_t window_size_left;   // keys, -1 = unbounded
    int64_t window_size_right;  // keys, -1 = unbounded
    double softcap;
    bool return_softmax;
};

constexpr int kMaxHeadDim = 256;

// ValueError, TypeError or NotImplementedError when `args` is not a call that `backend` can answer.
void check_fwd(const Fwd_args &args, const std::string &backend);

}  // namespace flash
