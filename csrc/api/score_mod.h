// Host side of the options that modify scores and rows: checks, params, results of rows without keys, gradients. The
// kernels' side: ScoreMod (common/score_mod.h, cpu/score_mod.h) and RowMod (common/row_mod.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "api/options.h"
#include "flash.h"

namespace flash {

void check_score_mod(const Options &options, const at::Tensor &q, int64_t batch);

// The options with tensors that kernels can read. They must live until the kernels are launched.
Options readable(Options options, const at::Tensor &softmax_lse);
// The same for the kernels of the backward. softmax_lse includes what joined the rows: only with attn_bias do they read
// the sink, to know the rows without a key.
Options readable_by_backward(Options options, const at::Tensor &softmax_lse);

// options: readable. softmax_scale: as for set_params_fprop.
void set_score_mod(Flash_fwd_params &params, const Options &options, double softmax_scale);

// For a trace.
std::string describe_score_mod(const Flash_fwd_params &params);

// The results of rows without keys: softmax_lse [batch, nheads, seqlen_q], varlen [nheads, total_q].
void fill_lse_without_keys(const at::Tensor &softmax_lse, const Options &options);

// Row statistics of a backward.
struct RowStatistics {
    const at::Tensor &softmax_lse;  // of the forward
    const at::Tensor &softmax_d;    // delta, padded: see Flash_bwd_params::dsoftmax_sum
    const Optional &dsoftmax_lse;   // none: zeros
    const Optional &cu_seqlens_q;
};

// Whether the option of this name has a gradient.
bool has_gradient(const std::string &option);
// The gradient of the option x, by ATen's operators: of any tensors, differentiable.
at::Tensor option_gradient(const std::string &option, const at::Tensor &x, const RowStatistics &rows);
// The same of CUDA tensors, by one kernel where this build has it.
at::Tensor option_gradient_cuda(const std::string &option, const at::Tensor &x, const RowStatistics &rows);

}  // namespace flash
