// flash_attn_with_kvcache on CUDA, on any architecture: append the new keys, attend with the keys split over the SMs,
// combine the partial results. Host interface; no CUDA here.
#pragma once

#include <cstdint>

#include "../flash.h"

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

// How one call is cut, computed from shapes alone. Lengths lie in GPU memory; the kernels read them
// (splitkv_schedule.h).
struct SplitkvPlan {
    int tile_rows;    // rows of a tile: the queries of all heads that share a key/value head, query after query
    int row_tiles;    // tiles that cover the rows of one key/value head of one sequence
    int pieces;       // CTAs for each row tile
    int max_splits;   // slots for the splits of a sequence and head; 0: the kernel cuts all keys into equal pieces
    bool is_aligned;  // K and V can be loaded 16 bytes at a time

    constexpr int64_t slots(const Flash_fwd_params &params) const {  // of partial results, for each row tile
        return max_splits == 0 ? int64_t{2} * pieces : int64_t{params.b} * params.h_k * max_splits;
    }
};

// Floats of KvCache::scratch.
template <DType kDType, int kHeadDim>
int64_t splitkv_scratch_floats(const Flash_fwd_params &params);

// Writes k_new and v_new to the cache, and the rotated q to Flash_fwd_params::q.
template <DType kDType>
void run_append_kv(const Flash_fwd_params &params, cudaStream_t stream);

// Attention with the keys split. follows_append: run_append_kv is the call before it in the stream.
template <DType kDType, int kHeadDim>
void run_flash_fwd_splitkv(const Flash_fwd_params &params, bool follows_append, cudaStream_t stream);

}  // namespace flash
