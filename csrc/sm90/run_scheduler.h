// The work tiles of a CTA whose keys are split: the runs of its piece (kvcache/splitkv_schedule.h).
#pragma once

#include "../kvcache/splitkv_schedule.h"
#include "key_blocks.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// CTA i has row tile i % row_tiles and piece i / row_tiles, so that neighbours share the keys in L2.
template <int kBlockM, int kBlockN>
class RunScheduler {
public:
    // Called by a whole warp.
    __device__ RunScheduler(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan)
        : params(params), plan(plan), row_tile(blockIdx.x % plan.row_tiles), piece(blockIdx.x / plan.row_tiles) {
        const kvcache::Schedule schedule(params, plan);
        left = schedule.begin_of(piece + 1) - schedule.begin_of(piece);
        if (left > 0) {
            at = schedule.find(schedule.begin_of(piece));
        }
    }

    // The next work tile. Called by a whole warp.
    __device__ WorkTile next() {
        WorkTile tile{};
        if (left <= 0) {
            tile.is_end = true;
            return tile;
        }
        tile.place = {at.bidb, at.bidh_k * params.h_h_k_ratio, row_tile};
        tile.sequence = cache_sequence(params, at.bidb);
        const kvcache::Units units(params, plan, tile.sequence);
        const int count = uniform(units.count), run = min(left, count - at.unit);
        const BlockInfo<kBlockM, kBlockN, true> info(params, tile.sequence,
                                                     query_of<Kind::split>(params, row_tile * kBlockM),
                                                     query_of<Kind::split>(params, (row_tile + 1) * kBlockM - 1));
        tile.n_block_min = max(info.n_block_min, units.first_key(at.unit) / kBlockN);
        tile.n_block_max = min(info.n_block_max, (units.first_key(at.unit + run) + kBlockN - 1) / kBlockN);
        const bool is_whole = run == count;
        tile.slot = is_whole ? -1 : 2 * piece + (at.unit == 0);
        left -= run;
        at = at.after(run, count, params.h_k);
        return tile;
    }

private:
    const Flash_fwd_params &params;
    const kvcache::SplitkvPlan &plan;
    const int row_tile, piece;
    int left;  // units
    kvcache::UnitPlace at{};
};

}  // namespace flash::sm90
