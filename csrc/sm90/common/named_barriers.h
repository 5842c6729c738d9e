// Named barriers of the consumer warpgroups. Barrier 0 belongs to __syncthreads.
#pragma once

#include <cstdint>

namespace flash::sm90 {

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

}  // namespace flash::sm90
