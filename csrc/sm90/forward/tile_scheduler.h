// Work tiles: which ones a persistent CTA computes in which order, the key blocks of each, and how they reach its
// warps.
#pragma once

#include <cutlass/fast_math.h>
#include <cute/arch/cluster_sm90.hpp>

#include <algorithm>

#include "common/block_info.h"
#include "common/key_ranges.h"
#include "common/philox.h"
#include "common/score_mod.h"
#include "dispatch/kind.h"
#include "sm90/common/find_block.h"
#include "sm90/common/pipeline.h"

namespace flash::sm90 {

// ---- the work tiles of a persistent CTA and their order. The scheduler warp computes them

// A block of query rows of one head, with the key blocks that it visits.
struct WorkTile {
    RowBlocks::Place place;
    Sequence sequence;
    int n_block_min, n_block_max;
    bool is_end;  // there is no work tile any more
    int slot;     // split: of the partial result; -1: the tile has all keys of its rows

    __device__ bool has_keys() const { return n_block_max > n_block_min; }
};

// The order of the blocks of query rows, computed on the host because divisions are slow on the GPU.
// Full: head by head, so that CTAs share K and V in L2.
// Local: pairs of a long and a short block, which together take equal time, for as many whole heads as fill rounds of
// the SMs; then the blocks of the remaining heads from long to short, so that the last round ends early. Varlen and
// key_ranges: head by head; a counter in GPU memory hands out the work tiles. The same with attn_bias and a mask.
struct WorkTileOrder {
    bool is_head_by_head;       // else pairs, then block by block
    int per_head;               // blocks
    int paired_heads = 0;       // heads of all sequences that are worked on in pairs; 0 if there are few blocks
    int pairs, middles, units;  // pairs, blocks between them, and all units of work; a CTA takes a unit at a time
    cutlass::FastDivmod by_blocks, by_pairs, by_heads, by_heads_left;  // per head, per head, per sequence, in all
    int *counter;         // varlen, key_ranges: work tiles taken so far; else null
    bool ends_by_length;  // varlen: the blocks of the last head go from long to short

    WorkTileOrder(const RowBlocks &blocks, bool is_local, int sms, int *counter)
        : is_head_by_head(counter != nullptr || !is_local),
          per_head(std::max(blocks.per_head, 1)),
          by_blocks(per_head),
          by_heads(blocks.heads),
          counter(counter),
          ends_by_length(counter != nullptr && is_local && blocks.b <= kMaxSortedSequences) {
        const int heads = static_cast<int>(blocks.count() / per_head), per_head_in_pairs = per_head / 2;
        if (!is_head_by_head && blocks.count() >= 6 * int64_t(sms) && per_head_in_pairs > 0) {
            const int rounds = heads * per_head_in_pairs / sms;
            paired_heads = rounds * sms / per_head_in_pairs;
        }
        pairs = paired_heads * per_head_in_pairs;
        middles = paired_heads * (per_head % 2);
        units = pairs + middles + (heads - paired_heads) * per_head;
        by_pairs = cutlass::FastDivmod(std::max(per_head_in_pairs, 1));
        by_heads_left = cutlass::FastDivmod(std::max(heads - paired_heads, 1));
    }

    // Head by head: a block of all `batch` sequences, then the next one, because they read the same attn_bias.
    void share_among_sequences(int batch) { by_heads = cutlass::FastDivmod(batch); }
};

// The work tiles of one CTA. Equal lengths: a static snake schedule, in which CTA i of n takes unit i in even rounds
// and unit n - 1 - i in odd rounds, so that no CTA always gets the longest tile. Varlen and key_ranges: the host does
// not know the work of a tile, so a CTA takes the next one from the counter when it has an empty stage for it.
template <Kind kKind, int kBlockM, int kBlockN>
class TileScheduler {
public:
    __device__ TileScheduler(const Flash_fwd_params &params, const WorkTileOrder &order)
        : params(params), order(order) {}

    // The next work tile. Called by a whole warp.
    __device__ WorkTile next() {
        for (;;) {
            const Unit unit = is_general(kKind) && order.counter != nullptr ? next_from_counter() : next_from_snake();
            WorkTile tile{};
            if (unit.is_end) {
                tile.is_end = true;
                return tile;
            }
            if (unit.index >= order.units) {
                continue;
            }
            tile.place = place(unit);
            tile.sequence = sequence<is_general(kKind)>(params, tile.place.bidb);
            if (tile.place.block * kBlockM >= tile.sequence.seqlen_q) {
                continue;
            }
            const auto set_key_blocks = [&](const auto &info) {
                tile.n_block_min = info.n_block_min;
                tile.n_block_max = info.n_block_max;
            };
            if constexpr (has_ranges(kKind)) {
                set_key_blocks(RangedBlockInfo<kBlockM, kBlockN>(params, tile.sequence, tile.place.bidb,
                                                                 tile.place.bidh, tile.place.block));
            } else {
                set_key_blocks(BlockInfo<kBlockM, kBlockN, is_local(kKind)>(params, tile.sequence, tile.place.block));
            }
            return tile;
        }
    }

private:
    const Flash_fwd_params &params;
    const WorkTileOrder &order;
    int round = 0;
    bool is_second_of_pair = false;

    struct Unit {
        int index;
        bool is_second;  // the second block of a pair
        bool is_end;     // no unit is left
    };

    __device__ Unit next_from_snake() {
        const int first = round * gridDim.x;
        const int index = first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        const bool is_second = is_second_of_pair;
        is_second_of_pair = index < order.pairs && !is_second;
        round += is_second_of_pair ? 0 : 1;
        return {index, is_second, first >= order.units};
    }

    __device__ Unit next_from_counter() const {
        int index = 0;
        if (threadIdx.x % 32 == 0) {
            index = atomicAdd(order.counter, 1);
        }
        index = __shfl_sync(0xffffffffu, index, 0);
        return {index, false, index >= order.units};
    }

    __device__ RowBlocks::Place place(const Unit &unit) const {
        int head, block;
        if (has_bias(kKind) && params.attn_bias.batch_stride == 0) {
            int bidb;
            order.by_heads(block, bidb, unit.index);
            order.by_blocks(head, block, block);
            return {bidb, head, order.per_head - 1 - block};
        }
        if (order.is_head_by_head) {
            order.by_blocks(head, block, unit.index);
            block = order.per_head - 1 - block;  // varlen and causal: short blocks come last
        } else if (unit.index < order.pairs) {
            order.by_pairs(head, block, unit.index);
            block = unit.is_second ? block : order.per_head - 1 - block;
        } else if (unit.index < order.pairs + order.middles) {  // with an odd number of blocks, one is in no pair
            head = unit.index - order.pairs;
            block = order.per_head / 2;
        } else {
            order.by_heads_left(block, head, unit.index - order.pairs - order.middles);
            head += order.paired_heads;
            block = order.per_head - 1 - block;
        }
        if (is_general(kKind) && params.cu_seqlens_q != nullptr) {
            const bool is_by_length = order.ends_by_length && head == params.h - 1;
            const SequenceBlock found = is_by_length
                                            ? find_block_by_length<kBlockM>(params.cu_seqlens_q, params.b,
                                                                            params.total_q, order.per_head - 1 - block)
                                            : find_block(params.cu_seqlens_q, params.b, params.total_q, kBlockM, block);
            return {found.bidb, head, found.block};
        }
        int bidb, bidh;
        order.by_heads(bidb, bidh, head);
        return {bidb, bidh, block};
    }
};

// ---- the key blocks that one consumer warpgroup visits in a work tile, and where it needs a mask. The scheduler warp
// computes them, because it has time to spare

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

// key_ranges: the gap between the two hulls, and the fully visible blocks of the second range.
struct SecondRange {
    int gap_begin, gap_end;        // no row of the work tile sees the key blocks in between
    int n_full_begin, n_full_end;  // like those of KeyBlocks

    // A copy in uniform registers; constants where the kind has no ranges.
    template <Kind kKind>
    __device__ __forceinline__ SecondRange to_registers() const {
        if (!has_ranges(kKind)) {
            return {-1, -1, 0, 0};
        }
        return {uniform(gap_begin), uniform(gap_end), uniform(n_full_begin), uniform(n_full_end)};
    }
    // The key block that is visited after n_block.
    __device__ __forceinline__ int before(int n_block) const { return (n_block == gap_end ? gap_begin : n_block) - 1; }
    // The key block that is visited before n_block.
    __device__ __forceinline__ int after(int n_block) const { return n_block + 1 == gap_begin ? gap_end : n_block + 1; }
    __device__ __forceinline__ bool is_full(int n_block) const {
        return n_block >= n_full_begin && n_block < n_full_end;
    }
};

// The query of a row of a tile. split: the rows are the query heads of a group, query by query.
template <Kind kKind>
__device__ __forceinline__ int query_of(const Flash_fwd_params &params, int row) {
    return kKind == Kind::split ? row / params.h_h_k_ratio : row;
}

// The fields of kind general.
template <int kBlockN>
__device__ __forceinline__ void add_general(KeyBlocks &blocks, const Flash_fwd_params &params, const Sequence &sequence,
                                            int first_query, const ScoreMod &score_mod) {
    blocks.n_ragged = sequence.seqlen_k / kBlockN;
    const int nearest = max(first_query + sequence.seqlen_k - sequence.seqlen_q, 0);  // key of the first row
    const bool has_cap = score_mod.cap_scale != 0.0f, has_alibi = score_mod.slope != 0.0f;
    blocks.n_rising_begin = score_mod.slope < 0.0f ? 0 : nearest / kBlockN;
    blocks.flags |= (has_cap || has_alibi ? KeyBlocks::has_score_mod : 0) | (has_alibi ? KeyBlocks::has_alibi : 0) |
                    (params.rng_state != nullptr ? KeyBlocks::has_dropout : 0);
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
        add_general<kBlockN>(blocks, params, sequence, first_query, score_mod);
    }
    return blocks;
}

// The same with key_ranges: every consumer visits all key blocks of the work tile.
template <int kBlockM, int kRows, int kBlockN>
__device__ __forceinline__ KeyBlocks ranged_key_blocks(const Flash_fwd_params &params, const WorkTile &tile,
                                                       int first_row, const ScoreMod &score_mod, SecondRange &second) {
    const RangedBlockInfo<kBlockM, kBlockN> info(params, tile.sequence, tile.place.bidb, tile.place.bidh,
                                                 tile.place.block);
    const VisibleBlock keys = info.ranges.template block<kRows>(first_row, tile.sequence.seqlen_q);
    const auto first_block = [](int key) { return min(key, kNoKey - kBlockN) / kBlockN + (key % kBlockN != 0); };
    KeyBlocks blocks;
    blocks.n_block_max = tile.n_block_max;
    blocks.n_block_min = tile.n_block_min;
    blocks.n_full_begin = first_block(keys.full_begin0);
    blocks.n_full_end = keys.full_end0 / kBlockN;
    blocks.flags = KeyBlocks::may_see_few;
    add_general<kBlockN>(blocks, params, tile.sequence, first_row, score_mod);
    second = {info.gap_begin == info.gap_end ? -1 : info.gap_begin, info.gap_begin == info.gap_end ? -1 : info.gap_end,
              first_block(keys.full_begin1), keys.full_end1 / kBlockN};
    return blocks;
}

// ---- the pipeline of work tiles: the scheduler warp writes them, the load warps and the consumer warpgroups read them

template <int kConsumers>
struct WorkTileRing {
    static constexpr int kStages = 3;  // a consumer holds two at once; one more is ready
    struct SharedStorage {
        WorkTile tiles[kStages];
        KeyBlocks key_blocks[kStages][kConsumers];
        ScoreMod score_mods[kStages];     // general kernels
        DropoutStream dropouts[kStages];  // general kernels
        PipelineBarriers<kStages> barriers;
        SecondRange second_ranges[kStages][kConsumers];  // kernels with key_ranges
        int largest_logits[kStages];                     // kernels with return_max_logits: of SharedLogit
    };
    SharedStorage &shared;
    PipelineState<kStages> state = {};

    // Scheduler warp: waits for an empty stage.
    __device__ __forceinline__ void acquire() const { state.acquire(shared.barriers); }

    // Scheduler warp: writes a work tile. key_blocks_of(consumer, second_range) returns the key blocks of one consumer,
    // and writes its second range. start_logit(largest logit) is called by one lane.
    template <Kind kKind, typename KeyBlocksOf, typename StartLogit>
    __device__ __forceinline__ void push(const Flash_fwd_params &params, const WorkTile &tile,
                                         const ScoreMod &score_mod, const KeyBlocksOf &key_blocks_of,
                                         const StartLogit &start_logit) {
        const int lane = threadIdx.x % 32, stage = state.stage;
        if (lane == 0) {
            shared.tiles[stage] = tile;
            if (is_general(kKind)) {
                shared.score_mods[stage] = score_mod;
            }
            start_logit(shared.largest_logits[stage]);
        }
        if (is_general(kKind) && params.rng_state != nullptr) {
            const DropoutStream dropout(params.rng_state, tile.place.bidb, params.h, tile.place.bidh);
            if (lane == 0) {
                shared.dropouts[stage] = dropout;
            }
        }
        if (lane < kConsumers) {
            shared.key_blocks[stage][lane] = key_blocks_of(lane, shared.second_ranges[stage][lane]);
            shared.barriers.full[stage].arrive();  // each lane that wrote arrives, which releases its own writes
        }
        state.advance();
    }

    // Readers: wait for the next work tile. Returns its stage.
    __device__ __forceinline__ int take() {
        state.wait(shared.barriers);
        const int stage = state.stage;
        state.advance();
        return stage;
    }

    __device__ __forceinline__ const WorkTile &operator[](int stage) const { return shared.tiles[stage]; }
    __device__ __forceinline__ const KeyBlocks &key_blocks(int stage, int consumer) const {
        return shared.key_blocks[stage][consumer];
    }

    __device__ __forceinline__ const SecondRange &second_range(int stage, int consumer) const {
        return shared.second_ranges[stage][consumer];
    }
    __device__ __forceinline__ int &largest_logit(int stage) const { return shared.largest_logits[stage]; }
    __device__ __forceinline__ const ScoreMod &score_mod(int stage) const { return shared.score_mods[stage]; }
    __device__ __forceinline__ const DropoutStream &dropout(int stage) const { return shared.dropouts[stage]; }

    // Readers: each warp releases the stage for itself.
    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        PipelineState<kStages>{stage}.release(shared.barriers);
    }
};

}  // namespace flash::sm90
