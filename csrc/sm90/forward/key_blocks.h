// The key blocks that one consumer warpgroup visits in a work tile, and where it needs a mask. The scheduler warp
// computes them, because it has time to spare.
#pragma once

#include "common/block_info.h"
#include "common/score_mod.h"
#include "dispatch/kind.h"

namespace flash::sm90 {

// A consumer visits the key blocks [n_block_min, n_block_max) from the last to the first.
struct KeyBlocks {
    enum Flag : int {
        is_end = 1,       // there is no work tile any more
        skips_first = 2,  // the first block that is loaded: only rows of other consumers see it
        skips_last = 4,   // the last block that is loaded: only rows of other consumers see it
        may_see_few = 8,  // some row may see few keys in all, or none of the first visited block
        has_score_mod = 16,
        has_alibi = 32,  // the slope is not 0
        has_dropout = 64,
    };

    int n_block_min, n_block_max;
    int n_full_begin, n_full_end;  // every row sees all keys of the blocks in between
    int n_ragged;                  // general: the block in which the sequence's keys end, or the one after them
    int n_rising_begin;            // ALiBi: from this block on, the bias may exceed that of the blocks visited before
    int flags;

    __device__ __forceinline__ bool has(Flag flag) const { return (flags & flag) != 0; }
    __device__ __forceinline__ bool needs_mask(int n_block) const {
        return n_block >= n_full_end || n_block < n_full_begin;
    }

    // A copy in uniform registers. Fields that a kind does not use become constants.
    template <Kind kKind>
    __device__ __forceinline__ KeyBlocks to_registers() const {
        return {is_local(kKind) ? uniform(n_block_min) : 0,
                uniform(n_block_max),
                is_local(kKind) ? uniform(n_full_begin) : 0,
                uniform(n_full_end),
                is_general(kKind) ? uniform(n_ragged) : 0,
                is_general(kKind) ? uniform(n_rising_begin) : 0,
                uniform(flags)};
    }
};

// The query of a row of a tile. split: the rows are the query heads of a group, query by query.
template <Kind kKind>
__device__ __forceinline__ int query_of(const Flash_fwd_params &params, int row) {
    return kKind == Kind::split ? row / params.h_h_k_ratio : row;
}

// For rows [first_row, first_row + kRows) of a work tile whose loaded key blocks are [n_block_min, n_block_max), at
// least one. Rows that see none of them, or lie past the sequence's end, visit one block all the same.
template <Kind kKind, int kRows, int kBlockN>
__device__ __forceinline__ KeyBlocks key_blocks(const Flash_fwd_params &params, const Sequence &sequence, int first_row,
                                                int n_block_min, int n_block_max, const ScoreMod &score_mod) {
    const int first_query = query_of<kKind>(params, first_row),
              last_query = query_of<kKind>(params, first_row + kRows - 1);
    const BlockInfo<kRows, kBlockN, is_local(kKind)> info(params, sequence, first_query, last_query);
    KeyBlocks blocks;
    blocks.n_block_max = min(max(info.n_block_max, n_block_min + 1), n_block_max);
    blocks.n_block_min = max(min(info.n_block_min, blocks.n_block_max - 1), n_block_min);
    blocks.n_full_begin = info.n_full_begin;
    blocks.n_full_end = info.n_full_end;
    const int first = blocks.n_block_max - 1;
    const int left = params.window_size_left;
    const bool has_one = first == blocks.n_block_min, is_narrow = left >= 0 && left < kBlockN;
    const bool hides_from_first_row = info.end_key(first_query) <= first * kBlockN;
    blocks.flags = (blocks.n_block_max < n_block_max ? KeyBlocks::skips_first : 0) |
                   (blocks.n_block_min > n_block_min ? KeyBlocks::skips_last : 0) |
                   (has_one || is_narrow || hides_from_first_row ? KeyBlocks::may_see_few : 0);
    if (is_general(kKind)) {
        blocks.n_ragged = sequence.seqlen_k / kBlockN;
        const int nearest = max(first_query + sequence.seqlen_k - sequence.seqlen_q, 0);  // key of the first row
        const bool has_cap = score_mod.cap_scale != 0.0f, has_alibi = score_mod.slope != 0.0f;
        blocks.n_rising_begin = score_mod.slope < 0.0f ? 0 : nearest / kBlockN;
        blocks.flags |= (has_cap || has_alibi ? KeyBlocks::has_score_mod : 0) | (has_alibi ? KeyBlocks::has_alibi : 0) |
                        (params.rng_state != nullptr ? KeyBlocks::has_dropout : 0);
    }
    return blocks;
}

}  // namespace flash::sm90
