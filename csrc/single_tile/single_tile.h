// Attention over short sequences of equal lengths: a tile holds all queries and keys of a sequence and a head. Softmax
// and gradients then need no second block, no float32 sums in global memory and no other kernel, and several tiles fill
// a CTA. Runs on mma.sync, on any GPU. Host interface; no CUDA here.
#pragma once

#include <algorithm>

#include "flash.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

constexpr int kMaxSeqlenSingleTile = 64;  // queries, and keys

// The kernels that are compiled; build_tools/kernels.py reads kMaxHeadDimSingleTile.
constexpr int kMaxHeadDimSingleTile = 128;
constexpr bool has_single_tile(int headdim) {
    return headdim <= kMaxHeadDimSingleTile;
}

// True if the kernels of a head dim with has_single_tile take the call.
inline bool is_single_tile(const Flash_fwd_params &params) {
    const bool has_option = params.has_score_mod() || params.rng_state != nullptr || params.max_logits != nullptr ||
                            params.sink != nullptr || params.attn_bias.is_used() || params.key_ranges.is_used();
    const bool has_lengths = params.cu_seqlens_q != nullptr || params.block_table != nullptr || params.cache.is_used();
    return !has_option && !has_lengths && std::max(params.seqlen_q, params.seqlen_k) <= kMaxSeqlenSingleTile;
}

// Both throw std::runtime_error if the launch fails. The backward reads none of the scratch of Flash_bwd_params, and
// writes dsoftmax_sum.
template <DType kDType, int kHeadDim>
void run_flash_fwd_single_tile(const Flash_fwd_params &params, cudaStream_t stream);
template <DType kDType, int kHeadDim>
void run_flash_bwd_single_tile(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace flash
