// Our kernels in the attention ops of aten, under torch.nn.functional.scaled_dot_product_attention.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace flash::sdpa {

// What the fake implementations of the ops promise, where it differs among the versions of PyTorch.
struct Promises {
    int64_t cudnn_lse_dim;         // of the cuDNN op: [batch, nheads, seqlen_q], in newer versions [..., 1]
    bool cudnn_out_is_like_query;  // strides of empty_like(query), else contiguous
    bool flash_out_is_rows_first;  // strides of empty_like(query.transpose(1, 2)): others if the query is expanded
    bool varlen_lse_is_packed;     // [nheads, total_q], else padded
    bool has_rng_state;            // the flash ops return rng_state, else philox_seed and philox_offset
};

// Our kernels run the calls of this process that they can do, until restore(). Any thread may call these functions
// while others call the ops. RuntimeError if an op has other arguments than are known.
void activate(const Promises &promises);
void restore();
bool is_active();

// For each op: its name, the calls that our kernels ran, and those that were passed on to PyTorch's kernel.
std::vector<std::tuple<std::string, int64_t, int64_t>> counts();

}  // namespace flash::sdpa
