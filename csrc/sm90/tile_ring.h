// The tiles on their way from the producer's warp that finds them to the one that loads them and the consumers, in
// shared memory, where a consumer leaves what it needs once a tile.
#pragma once

#include "key_blocks.h"
#include "pipeline.h"
#include "tile_scheduler.h"

namespace flash::sm90 {

// Every tile in the ring has keys, and its turn to be loaded comes: a consumer takes the next one before it gives the
// last one back.
template <int kConsumers>
struct Tile_ring {
    static constexpr int kStages = 4;  // a consumer holds two at once, and the others are ahead
    struct SharedStorage {
        Tile tiles[kStages];
        Key_blocks key_blocks[kStages][kConsumers];
        Barriers<kStages> barriers;
    };
    SharedStorage &shared;
    Ring<kStages> ring = {};

    // By the warp that finds tiles: puts one there, with what key_blocks_of(consumer) says.
    template <typename Key_blocks_of>
    __device__ __forceinline__ void push(const Tile &tile, const Key_blocks_of &key_blocks_of) {
        const int lane = threadIdx.x % 32, stage = ring.stage;
        ring.acquire(shared.barriers);
        if (lane < kConsumers) {
            shared.key_blocks[stage][lane] = key_blocks_of(lane);
        }
        if (lane == 0) {
            shared.tiles[stage] = tile;
        }
        __syncwarp();
        if (lane == 0) {
            shared.barriers.full[stage].arrive();
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

    __device__ __forceinline__ const Tile &operator[](int stage) const { return shared.tiles[stage]; }
    __device__ __forceinline__ const Key_blocks &key_blocks(int stage, int consumer) const {
        return shared.key_blocks[stage][consumer];
    }

    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        Ring<kStages>{stage}.release(shared.barriers);
    }
};

}  // namespace flash::sm90
