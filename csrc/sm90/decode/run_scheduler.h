// The work tiles of a CTA whose keys are split: the runs of its piece (kvcache/splitkv_schedule.h).
#pragma once

#include "kvcache/splitkv_schedule.h"
#include "sm90/forward/key_blocks.h"
#include "sm90/forward/tile_scheduler.h"

namespace flash::sm90 {

// CTA i has row tile i % row_tiles and piece i / row_tiles, so that neighbours share the keys in L2.
template <int kBlockM, int kBlockN>
class RunScheduler {
public:
    // Called by a whole warp.
    __device__ RunScheduler(const Flash_fwd_params &params, const kvcache::SplitkvPlan &plan)
        : params(params),
          row_tile(blockIdx.x % plan.row_tiles),
          is_writer(threadIdx.x % 32 == 0 && row_tile == 0),
          runs(params, plan, blockIdx.x / plan.row_tiles, 0) {
        if (runs.left <= 0 && is_writer) {
            runs.record_nothing();
        }
    }

    // The next work tile. Called by a whole warp.
    __device__ WorkTile next() {
        WorkTile tile{};
        if (has_run && is_writer) {
            runs.record(run);  // now, because the others wait for no tile
        }
        if (runs.left <= 0) {
            tile.is_end = true;
            return tile;
        }
        tile.sequence = cache_sequence(params, runs.at.bidb);
        run = runs.next(tile.sequence);
        has_run = true;
        tile.place = {run.bidb, run.bidh_k * params.h_h_k_ratio, row_tile};
        const BlockInfo<kBlockM, kBlockN, true> info(params, tile.sequence,
                                                     query_of<Kind::split>(params, row_tile * kBlockM),
                                                     query_of<Kind::split>(params, (row_tile + 1) * kBlockM - 1));
        tile.n_block_min = max(info.n_block_min, run.first_key / kBlockN);
        tile.n_block_max = min(info.n_block_max, (run.end_key + kBlockN - 1) / kBlockN);
        tile.slot = static_cast<int>(run.slot);
        return tile;
    }

private:
    const Flash_fwd_params &params;
    const int row_tile;
    const bool is_writer;
    kvcache::Runs runs;
    kvcache::Runs::Run run{};  // the last
    bool has_run = false;
};

}  // namespace flash::sm90
