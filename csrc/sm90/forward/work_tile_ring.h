// The pipeline of work tiles: the scheduler warp writes them, the load warps and the consumer warpgroups read
// them.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "common/philox.h"
#include "common/score_mod.h"
#include "key_blocks.h"
#include "sm90/common/pipeline.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

template <int kConsumers>
struct WorkTileRing {
    static constexpr int kStages = 3;  // a consumer holds two at once; one more is ready
    struct SharedStorage {
        WorkTile tiles[kStages];
        KeyBlocks key_blocks[kStages][kConsumers];
        ScoreMod score_mods[kStages];     // general kernels
        DropoutStream dropouts[kStages];  // general kernels
        PipelineBarriers<kStages> barriers;
    };
    SharedStorage &shared;
    PipelineState<kStages> state = {};

    // Scheduler warp: waits for an empty stage.
    __device__ __forceinline__ void acquire() const { state.acquire(shared.barriers); }

    // Scheduler warp: writes a work tile. key_blocks_of(consumer) returns the key blocks of one consumer.
    template <Kind kKind, typename KeyBlocksOf>
    __device__ __forceinline__ void push(const Flash_fwd_params &params, const WorkTile &tile,
                                         const ScoreMod &score_mod, const KeyBlocksOf &key_blocks_of) {
        const int lane = threadIdx.x % 32, stage = state.stage;
        if (lane == 0) {
            shared.tiles[stage] = tile;
            if (is_general(kKind)) {
                shared.score_mods[stage] = score_mod;
            }
        }
        if (is_general(kKind) && params.rng_state != nullptr) {
            const DropoutStream dropout(params.rng_state, tile.place.bidb, params.h, tile.place.bidh);
            if (lane == 0) {
                shared.dropouts[stage] = dropout;
            }
        }
        if (lane < kConsumers) {
            shared.key_blocks[stage][lane] = key_blocks_of(lane);
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

    __device__ __forceinline__ const ScoreMod &score_mod(int stage) const { return shared.score_mods[stage]; }
    __device__ __forceinline__ const DropoutStream &dropout(int stage) const { return shared.dropouts[stage]; }

    // Readers: each warp releases the stage for itself.
    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        PipelineState<kStages>{stage}.release(shared.barriers);
    }
};

}  // namespace flash::sm90
