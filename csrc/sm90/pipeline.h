// Rings of tiles in shared memory between the producer, for whom TMA fills them, and the consumer warpgroups.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>

#include <cstdint>

namespace flash::sm90 {

template <int kStages>
struct Barriers {
    cutlass::arch::ClusterTransactionBarrier full[kStages];  // the tile has landed
    cutlass::arch::ClusterBarrier empty[kStages];            // nobody needs it any more

    // By one thread. warps: how many have to release a tile; writers: how many threads fill it.
    __device__ void init(int warps, int writers = 1) {
        for (int stage = 0; stage < kStages; ++stage) {
            full[stage].init(writers);
            empty[stage].init(warps);
        }
    }
};

// Where the producer or a consumer is on its way around the ring.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;  // flips each time around

    // steps: a divisor of kStages.
    __device__ __forceinline__ void advance(int steps = 1) {
        stage += steps;
        if (stage >= kStages) {
            stage -= kStages;
            phase ^= 1;
        }
    }

    // The producer waits until the tile is free. One of its threads says how many bytes will come; returns the barrier
    // that TMA completes.
    __device__ __forceinline__ void acquire(Barriers<kStages> &barriers) const {
        barriers.empty[stage].wait(phase ^ 1);
    }
    __device__ __forceinline__ uint64_t &expect(Barriers<kStages> &barriers, int bytes) const {
        barriers.full[stage].arrive_and_expect_tx(bytes);
        return *reinterpret_cast<uint64_t *>(&barriers.full[stage]);
    }

    // Consumers wait for the tile, and give it back, each warp for itself.
    __device__ __forceinline__ void wait(Barriers<kStages> &barriers) const { barriers.full[stage].wait(phase); }
    __device__ __forceinline__ void release(Barriers<kStages> &barriers) const {
        if (cute::elect_one_sync()) {
            barriers.empty[stage].arrive();
        }
    }
};

}  // namespace flash::sm90
