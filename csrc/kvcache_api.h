// mha_fwd_kvcache: the entry of flash_attn_with_kvcache, in the argument order of the official extension.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace flash {

// Returns out and softmax_lse. split_keys and cache_seqlen come last: the official fwd_kvcache does not have them.
// cache_seqlen: seqlens_k as one number for all sequences, -1: none.
std::vector<at::Tensor> mha_fwd_kvcache(
    const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const std::optional<at::Tensor> &k,
    const std::optional<at::Tensor> &v, const std::optional<at::Tensor> &cache_seqlens,
    const std::optional<at::Tensor> &rotary_cos, const std::optional<at::Tensor> &rotary_sin,
    const std::optional<at::Tensor> &cache_batch_idx, const std::optional<at::Tensor> &cache_leftpad,
    const std::optional<at::Tensor> &block_table, const std::optional<at::Tensor> &alibi_slopes,
    const std::optional<at::Tensor> &out, double softmax_scale, bool is_causal, int64_t window_size_left,
    int64_t window_size_right, double softcap, bool is_rotary_interleaved, int64_t num_splits, int64_t split_keys,
    int64_t cache_seqlen);

}  // namespace flash
