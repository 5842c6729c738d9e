// Which blocks of query rows a persistent thread block works on, and in which order.
#pragma once

#include "../common/sequence.h"
#include "kind.h"

namespace flash::sm90 {

// Thread block i takes the blocks i, i + gridDim.x, ... of Row_blocks: neighbours share K and V in L2, and when local
// the longest of a head come first. Producer and consumers each walk the same list.
template <Kind kKind, int kBlockM>
struct Tile_scheduler {
    const Row_blocks blocks;
    int64_t tile = blockIdx.x;

    __device__ explicit Tile_scheduler(const Flash_fwd_params &params)
        : blocks(row_blocks<may_be_varlen(kKind)>(params, kBlockM)) {}

    __device__ bool has_tile() const { return tile < blocks.count(); }
    __device__ Row_blocks::Place place() const { return blocks.place(static_cast<int>(tile), is_local(kKind)); }
    __device__ void next() { tile += gridDim.x; }
};

}  // namespace flash::sm90
