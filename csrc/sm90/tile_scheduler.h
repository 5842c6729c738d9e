// Which tiles a persistent thread block works on, and in which order: the producer finds them, and tells the consumers.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>

#include "../common/block_info.h"
#include "block_by_length.h"
#include "../kind.h"

namespace flash::sm90 {

// A block of query rows of one head, and which key blocks it visits.
struct WorkTile {
    RowBlocks::Place place;
    Sequence sequence;
    int n_block_min, n_block_max;
    bool is_end;  // no tile: the list has ended

    __device__ bool has_keys() const { return n_block_max > n_block_min; }
};

// In which order blocks of query rows are worked on: head after head, so that thread blocks share K and V in L2, or
// when local in pairs of a long and a short one, which together take the same time. Pairs of whole heads fill rounds of
// the multiprocessors; the heads that are left go block by block from long to short, as a round that not all take part
// in ends sooner so. Made by the host: divisions are slow.
struct WorkTileOrder {
    static constexpr int kMaxSorted = 128;  // sequences: with more, their lengths would take too long to look at

    bool is_head_by_head;       // else pairs, then block by block
    int per_head;               // blocks
    int paired_heads = 0;       // of all sequences' heads, the first; 0 where pairs would be coarse
    int pairs, middles, units;  // of work, which thread blocks take: pairs, blocks between those, and all
    cutlass::FastDivmod by_blocks, by_pairs, by_heads, by_heads_left;  // of a head, of a head, of a sequence, of all
    int *ticket;          // varlen: how many blocks have been taken; else null
    bool ends_by_length;  // varlen: the last head's blocks go from long to short

    WorkTileOrder(const RowBlocks &blocks, bool is_local, int multiprocessors, int *ticket)
        : is_head_by_head(ticket != nullptr || !is_local),
          per_head(std::max(blocks.per_head, 1)),
          by_blocks(per_head),
          by_heads(blocks.heads),
          ticket(ticket),
          ends_by_length(ticket != nullptr && is_local && blocks.b <= kMaxSorted) {
        const int heads = static_cast<int>(blocks.count() / per_head), per_head_in_pairs = per_head / 2;
        if (!is_head_by_head && blocks.count() >= 6 * int64_t(multiprocessors) && per_head_in_pairs > 0) {
            const int rounds = heads * per_head_in_pairs / multiprocessors;
            paired_heads = rounds * multiprocessors / per_head_in_pairs;
        }
        pairs = paired_heads * per_head_in_pairs;
        middles = paired_heads * (per_head % 2);
        units = pairs + middles + (heads - paired_heads) * per_head;
        by_pairs = cutlass::FastDivmod(std::max(per_head_in_pairs, 1));
        by_heads_left = cutlass::FastDivmod(std::max(heads - paired_heads, 1));
    }
};

// The tiles of one thread block: of n, number i takes the i-th unit of a round of n units, and in every second round
// the i-th from its end, so that where the units of a round go from long to short nobody gets the longest of each.
// Varlen: the host does not know how long they are, and who has room for another (WorkTileRing) takes the next.
template <Kind kKind, int kBlockM, int kBlockN>
class TileScheduler {
public:
    __device__ TileScheduler(const Flash_fwd_params &params, const WorkTileOrder &order) : params(params), order(order) {}

    // By a whole warp.
    __device__ WorkTile next() {
        for (;;) {
            const Unit unit = is_general(kKind) && order.ticket != nullptr ? by_ticket() : by_turn();
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
            const BlockInfo<kBlockM, kBlockN, is_local(kKind)> info(params, tile.sequence, tile.place.block);
            tile.n_block_min = info.n_block_min;
            tile.n_block_max = info.n_block_max;
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
        bool is_second;  // block of a pair
        bool is_end;     // there is no unit left, here and from here on
    };

    __device__ Unit by_turn() {
        const int first = round * gridDim.x;
        const int index = first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        const bool is_second = is_second_of_pair;
        is_second_of_pair = index < order.pairs && !is_second;
        round += is_second_of_pair ? 0 : 1;
        return {index, is_second, first >= order.units};
    }

    __device__ Unit by_ticket() const {
        int index = 0;
        if (threadIdx.x % 32 == 0) {
            index = atomicAdd(order.ticket, 1);
        }
        index = __shfl_sync(0xffffffffu, index, 0);
        return {index, false, index >= order.units};
    }

    __device__ RowBlocks::Place place(const Unit &unit) const {
        int head, block;
        if (order.is_head_by_head) {
            order.by_blocks(head, block, unit.index);
            block = order.per_head - 1 - block;  // varlen and causal: so that the end of the list is short
        } else if (unit.index < order.pairs) {   // head after head too, for K and V in L2
            order.by_pairs(head, block, unit.index);
            block = unit.is_second ? block : order.per_head - 1 - block;
        } else if (unit.index < order.pairs + order.middles) {  // of an odd number of blocks, one is in no pair
            head = unit.index - order.pairs;
            block = order.per_head / 2;
        } else {
            order.by_heads_left(block, head, unit.index - order.pairs - order.middles);
            head += order.paired_heads;
            block = order.per_head - 1 - block;
        }
        if (is_general(kKind) && params.cu_seqlens_q != nullptr) {
            const bool is_by_length = order.ends_by_length && head == params.h - 1;
            const SequenceBlock found =
                is_by_length ? find_block_by_length<kBlockM>(params.cu_seqlens_q, params.b, params.total_q,
                                                             order.per_head - 1 - block)
                             : find_block(params.cu_seqlens_q, params.b, params.total_q, kBlockM, block);
            return {found.bidb, head, found.block};
        }
        int bidb, bidh;
        order.by_heads(bidb, bidh, head);
        return {bidb, bidh, block};
    }
};

}  // namespace flash::sm90
