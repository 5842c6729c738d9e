// How the warps of a CTA wait for each other: named barriers, and pipelines in shared memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>

#include <cstdint>

namespace flash::sm90 {

// ---- named barriers of the consumer warpgroups; barrier 0 belongs to __syncthreads

enum class Barrier : uint32_t {
    ping_pong = 1,  // + warpgroup: it may issue its products
    warpgroup = 4,  // + warpgroup: all of its 128 threads have arrived
};

__device__ __forceinline__ void sync(Barrier barrier, int warpgroup, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(Barrier barrier, int warpgroup, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}

// Ping-pong: the consumer warpgroups issue their products one after the other, so that the tensor cores work for one
// while another computes its softmax.
template <int kConsumers, bool kIsOn>
struct PingPong {
    int warpgroup;

    __device__ explicit PingPong(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) {
            signal_next();  // warpgroup 0 goes first
        }
    }
    __device__ __forceinline__ void wait() const {
        if (kIsOn) {
            sync(Barrier::ping_pong, warpgroup, 256);
        }
    }
    __device__ __forceinline__ void signal_next() const {
        if (kIsOn) {
            arrive(Barrier::ping_pong, warpgroup == kConsumers - 1 ? 0 : warpgroup + 1, 256);
        }
    }
};

// ---- multi-stage pipelines in shared memory: the producer fills a stage (by TMA or cp.async), the consumer warpgroups
// read and release it

template <int kStages>
struct PipelineBarriers {
    cutlass::arch::ClusterTransactionBarrier full[kStages];  // the stage holds its data
    cutlass::arch::ClusterBarrier empty[kStages];            // every consumer has released the stage

    // Called by one thread. warps: arrivals that release a stage. writers: threads that fill it.
    __device__ void init(int warps, int writers = 1) {
        for (int stage = 0; stage < kStages; ++stage) {
            full[stage].init(writers);
            empty[stage].init(warps);
        }
    }
};

// The position of the producer or of one consumer in a pipeline.
template <int kStages>
struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;  // flips each time the stages wrap around

    // steps: a divisor of kStages.
    __device__ __forceinline__ void advance(int steps = 1) {
        stage += steps;
        if (stage >= kStages) {
            stage -= kStages;
            phase ^= 1;
        }
    }

    // Producer: waits until the stage is empty. Then one thread announces the bytes to come, and gets the barrier that
    // TMA completes.
    __device__ __forceinline__ void acquire(PipelineBarriers<kStages> &barriers) const {
        barriers.empty[stage].wait(phase ^ 1);
    }
    // The same without waiting. Called by a whole warp.
    __device__ __forceinline__ bool is_empty(PipelineBarriers<kStages> &barriers) const {
        return __all_sync(0xffffffffu, barriers.empty[stage].test_wait(phase ^ 1));
    }
    __device__ __forceinline__ uint64_t &expect(PipelineBarriers<kStages> &barriers, int bytes) const {
        barriers.full[stage].arrive_and_expect_tx(bytes);
        return *reinterpret_cast<uint64_t *>(&barriers.full[stage]);
    }

    // Consumer: waits for the data. Each warp releases the stage for itself.
    __device__ __forceinline__ void wait(PipelineBarriers<kStages> &barriers) const {
        barriers.full[stage].wait(phase);
    }
    __device__ __forceinline__ void release(PipelineBarriers<kStages> &barriers) const {
        if (cute::elect_one_sync()) {
            barriers.empty[stage].arrive();
        }
    }
};

// The position after `uses` stages.
template <int kStages>
__device__ __forceinline__ PipelineState<kStages> position_after(int uses) {
    return {uses % kStages, static_cast<uint32_t>(uses / kStages % 2)};
}

}  // namespace flash::sm90
