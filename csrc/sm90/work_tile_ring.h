// The tiles on their way from the producer's warp that finds them to the one that loads them and the consumers, in
// shared memory, where a consumer leaves what has no room in registers.
#pragma once

#include "../common/dropout.h"
#include "../common/score_mod.h"
#include "key_blocks.h"
#include "pipeline.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// Every tile in the ring has keys, and its turn to be loaded comes: a consumer takes the next one before it gives the
// last one back.
template <int kConsumers>
struct WorkTileRing {
    static constexpr int kStages = 3;  // a consumer holds two at once, and the other is ahead
    struct SharedStorage {
        WorkTile tiles[kStages];
        KeyBlocks key_blocks[kStages][kConsumers];
        ScoreMod score_mods[kStages];     // of the general kind
        DropoutStream dropouts[kStages];  // likewise
        Barriers<kStages> barriers;
    };
    SharedStorage &shared;
    Ring<kStages> ring = {};

    // By the warp that finds tiles: waits for room for another.
    __device__ __forceinline__ void await_room() const { ring.acquire(shared.barriers); }

    // Likewise: puts one there, with what key_blocks_of(consumer) says.
    template <Kind kKind, typename KeyBlocksOf>
    __device__ __forceinline__ void push(const Flash_fwd_params &params, const WorkTile &tile, const ScoreMod &score_mod,
                                         const KeyBlocksOf &key_blocks_of) {
        const int lane = threadIdx.x % 32, stage = ring.stage;
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
            shared.barriers.full[stage].arrive();  // every lane that wrote, so that its own writes are there
        }
        ring.advance();
    }

    // The others wait for the next tile; returns where it is.
    __device__ __forceinline__ int take() {
        ring.wait(shared.barriers);
        const int stage = ring.stage;
        ring.advance();
        return stage;
    }

    __device__ __forceinline__ const WorkTile &operator[](int stage) const { return shared.tiles[stage]; }
    __device__ __forceinline__ const KeyBlocks &key_blocks(int stage, int consumer) const {
        return shared.key_blocks[stage][consumer];
    }

    __device__ __forceinline__ const ScoreMod &score_mod(int stage) const { return shared.score_mods[stage]; }
    __device__ __forceinline__ const DropoutStream &dropout(int stage) const { return shared.dropouts[stage]; }

    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        Ring<kStages>{stage}.release(shared.barriers);
    }
};

}  // namespace flash::sm90
