// Which tiles a persistent thread block works on, and in which order: the producer finds them, and tells the consumers.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>

#include "../common/block_info.h"
#include "kind.h"
#include "pipeline.h"

namespace flash::sm90 {

// A number that is the same in every lane of the warp, in a register of the warp's from here on.
__device__ __forceinline__ int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
}

// A block of query rows of one head, and which key blocks it visits.
struct Tile {
    enum State : int {
        has_keys,
        has_no_keys,  // the rows see none
        is_no_tile,   // the list has ended
    };

    State state;
    Row_blocks::Place place;
    Sequence sequence;
    int n_block_min, n_block_max;
};

// In which order blocks of query rows are worked on: one after the other, or when local in pairs of a long and a short
// one, which together take the same time. Made by the host: divisions are slow.
struct Tile_order {
    int units;  // of work, which thread blocks take: pairs, then the single blocks
    int pairs;
    int per_head;                                                       // blocks
    int total_heads;                                                    // of all sequences
    cutlass::FastDivmod by_blocks, by_pairs, by_heads, by_total_heads;  // of a head, of a head, of a sequence, of all

    Tile_order(const Row_blocks &blocks, bool is_local, int multiprocessors)
        : per_head(blocks.per_head),
          total_heads(static_cast<int>(blocks.count() / std::max(per_head, 1))),
          by_blocks(std::max(per_head, 1)),
          by_pairs(std::max(per_head / 2, 1)),
          by_heads(blocks.heads),
          by_total_heads(std::max(total_heads, 1)) {
        // Pairs take as long as two blocks: with few of them for each multiprocessor, the last would keep some waiting.
        const bool is_paired = is_local && blocks.count() >= 6 * int64_t(multiprocessors);
        pairs = is_paired ? total_heads * (per_head / 2) : 0;
        units = is_paired ? total_heads * ((per_head + 1) / 2) : static_cast<int>(blocks.count());
    }
};

// The tiles of one thread block: of n, number i takes the i-th unit of a round of n units, and in every second round
// the i-th from its end, so that where the units of a round go from long to short nobody gets the longest of each.
template <Kind kKind, int kBlockM, int kBlockN>
class Tile_scheduler {
public:
    __device__ Tile_scheduler(const Flash_fwd_params &params, const Tile_order &order) : params(params), order(order) {}

    __device__ Tile next() {
        for (;;) {
            const int first = round * gridDim.x;
            const int unit = first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
            Tile tile{};
            if (first >= order.units) {
                tile.state = Tile::is_no_tile;
                return tile;
            }
            const bool is_second = is_second_of_pair;
            is_second_of_pair = unit < order.pairs && !is_second;
            round += is_second_of_pair ? 0 : 1;
            if (unit >= order.units) {
                continue;
            }
            tile.place = place(unit, is_second);
            tile.sequence = sequence<may_be_varlen(kKind)>(params, tile.place.bidb);
            if (tile.place.block * kBlockM >= tile.sequence.seqlen_q) {
                continue;
            }
            const BlockInfo<kBlockM, kBlockN, is_local(kKind)> info(params, tile.sequence, tile.place.block);
            tile.state = info.n_block_max > info.n_block_min ? Tile::has_keys : Tile::has_no_keys;
            tile.n_block_min = info.n_block_min;
            tile.n_block_max = info.n_block_max;
            return tile;
        }
    }

private:
    const Flash_fwd_params &params;
    const Tile_order &order;
    int round = 0;
    bool is_second_of_pair = false;

    __device__ Row_blocks::Place place(int unit, bool is_second) const {
        int head, block;
        if (!is_local(kKind)) {  // head after head, so that thread blocks share K and V in L2
            order.by_blocks(head, block, unit);
        } else if (unit < order.pairs) {  // likewise
            order.by_pairs(head, block, unit);
            block = is_second ? block : order.per_head - 1 - block;
        } else {  // over all heads from long to short; behind pairs there is one left of each head
            order.by_total_heads(block, head, unit - order.pairs);
            block = order.pairs > 0 ? order.per_head / 2 : order.per_head - 1 - block;
        }
        if (may_be_varlen(kKind)) {
            const Sequence_block found = find_block(params.cu_seqlens_q, params.b, kBlockM, block);
            return {found.bidb, head, found.block};
        }
        int bidb, bidh;
        order.by_heads(bidb, bidh, head);
        return {bidb, bidh, block};
    }
};

// The tiles on their way from the producer's warp to the consumers, in shared memory, where a consumer leaves what it
// needs once a tile.
struct Tile_ring {
    static constexpr int kStages = 4;  // a consumer holds two at once, and the producer is ahead
    struct SharedStorage {
        Tile tiles[kStages];
        Barriers<kStages> barriers;
    };
    SharedStorage &shared;
    Ring<kStages> ring = {};

    // Both return where in the ring the tile is.
    __device__ __forceinline__ int push(const Tile &tile) {
        ring.acquire(shared.barriers);
        if (threadIdx.x % 32 == 0) {
            shared.tiles[ring.stage] = tile;
            shared.barriers.full[ring.stage].arrive();
        }
        __syncwarp();
        const int stage = ring.stage;
        ring.advance();
        return stage;
    }
    __device__ __forceinline__ int take() {
        ring.wait(shared.barriers);
        const int stage = ring.stage;
        ring.advance();
        return stage;
    }

    __device__ __forceinline__ const Tile &operator[](int stage) const { return shared.tiles[stage]; }

    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        Ring<kStages>{stage}.release(shared.barriers);
    }
};

}  // namespace flash::sm90
