// Every check of the arguments of a forward or backward call, dense or varlen, for every backend: each failure names
// the argument, what was given and what is allowed. Called by mha_fwd, mha_bwd and their varlen twins, and through
// _C.check_fwd and its kin before the Triton backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>

#include "flash.h"

namespace flash {

// Where the sequences of a varlen call lie.
struct VarlenArgs {
    const at::Tensor &cu_seqlens_q;                // int32 [batch + 1]
    const at::Tensor &cu_seqlens_k;                // int32 [batch + 1]
    const std::optional<at::Tensor> &block_table;  // int32 [batch, pages of the longest]
    int64_t max_seqlen_q;
    int64_t max_seqlen_k;
};

// The arguments of fwd in the official order, less the generator. Varlen: q and out [total_q, nheads, headdim], k and v
// [total_k, nheads_k, headdim] or, paged, [num_pages, page_size, nheads_k, headdim].
struct FwdArgs {
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
    const VarlenArgs *varlen = nullptr;  // null: dense

    bool is_paged() const { return varlen != nullptr && varlen->block_table.has_value(); }
};

// What bwd takes beside the arguments of the forward, whose `out` is here the forward's result.
struct BwdArgs {
    const FwdArgs &forward;
    const at::Tensor &dout;                         // like q
    const at::Tensor &softmax_lse;                  // [batch, nheads, seqlen_q], varlen [nheads, total_q]
    const std::optional<at::Tensor> &dsoftmax_lse;  // like softmax_lse
    const std::optional<at::Tensor> &dq;            // like q
    const std::optional<at::Tensor> &dk;            // like k
    const std::optional<at::Tensor> &dv;            // like v
};

// The sizes of a call whose tensors have the right rank.
struct Sizes {
    int64_t batch;  // sequences
    int64_t nheads, nheads_k, headdim;
    int64_t rows_q, rows_k;      // of one sequence at most: its own, varlen: all there are
    int64_t seqlen_q, seqlen_k;  // of the longest sequence

    explicit Sizes(const FwdArgs &args)
        : nheads(args.q.size(-2)), nheads_k(args.k.size(-2)), headdim(args.q.size(-1)), rows_q(args.q.size(-3)) {
        const VarlenArgs *varlen = args.varlen;
        batch = varlen == nullptr ? args.q.size(0) : varlen->cu_seqlens_q.size(0) - 1;
        rows_k = args.is_paged() ? varlen->block_table->size(1) * args.k.size(1) : args.k.size(-3);
        seqlen_q = varlen == nullptr ? rows_q : std::min(varlen->max_seqlen_q, rows_q);
        seqlen_k = varlen == nullptr ? rows_k : std::min(varlen->max_seqlen_k, rows_k);
    }
};

// The dtype of softmax_lse for inputs like q: float32, and float64 for float64, as precise as the sums that it holds.
at::ScalarType lse_dtype(const at::Tensor &q);

// ValueError, TypeError or NotImplementedError when `args` is not a call that `backend` can answer. The contents of
// cu_seqlens and block_table are read where they are on the CPU; on a GPU under FLASH_ATTN_MINI_CHECK=1 alone, as that
// waits for the GPU.
void check_fwd(const FwdArgs &args, const std::string &backend);

// The same for the backward.
void check_bwd(const BwdArgs &args, const std::string &backend);

// The rng_state that a backward or s_dmask with dropout reads: int64 [2] where q is (rng_state.h).
void check_rng_state(const std::optional<at::Tensor> &rng_state, double p_dropout, const at::Tensor &q);

// What s_dmask takes beside the arguments of the forward.
void check_s_dmask(const FwdArgs &args, const std::optional<at::Tensor> &rng_state);

}  // namespace flash
