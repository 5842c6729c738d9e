// Every check of the arguments of a forward or backward call, for every backend: each failure names the argument, what
// was given and what is allowed. Called by mha_fwd and mha_bwd, and through _C.check_fwd and _C.check_bwd before the
// Triton backend.
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

// What bwd takes beside the arguments of the forward, whose `out` is here the forward's result.
struct Bwd_args {
    const Fwd_args &forward;
    const at::Tensor &dout;                         // like q
    const at::Tensor &softmax_lse;                  // [batch, nheads, seqlen_q]
    const std::optional<at::Tensor> &dsoftmax_lse;  // like softmax_lse
    const std::optional<at::Tensor> &dq;            // like q
    const std::optional<at::Tensor> &dk;            // like k
    const std::optional<at::Tensor> &dv;            // like v
};

constexpr int kMaxHeadDim = 256;

// The dtype of softmax_lse for inputs like q: float32, and float64 for float64, as precise as the sums that it holds.
at::ScalarType lse_dtype(const at::Tensor &q);

// ValueError, TypeError or NotImplementedError when `args` is not a call that `backend` can answer.
void check_fwd(const Fwd_args &args, const std::string &backend);

// The same for the backward.
void check_bwd(const Bwd_args &args, const std::string &backend);

}  // namespace flash
