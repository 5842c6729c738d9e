// Barriers among consumer warpgroups, and within one. Barrier 0 is __syncthreads'.
#pragma once

#include <cstdint>

namespace flash::sm90 {

enum class Barrier : uint32_t {
    turn = 1,       // + warpgroup: it may issue its products
    warpgroup = 4,  // + warpgroup: its 128 threads are all there
};

__device__ __forceinline__ void sync(Barrier barrier, int warpgroup, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(Barrier barrier, int warpgroup, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}

// The consumers' turns to issue products: while one computes its softmax, the tensor cores work for another.
template <int kConsumers, bool kIsOn>
struct PingPong {
    int warpgroup;

    __device__ explicit PingPong(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) {
            pass();  // the first turn is that of warpgroup 0
        }
    }
    __device__ __forceinline__ void await() const {
        if (kIsOn) {
            sync(Barrier::turn, warpgroup, 256);
        }
    }
    __device__ __forceinline__ void pass() const {
        if (kIsOn) {
            arrive(Barrier::turn, warpgroup == kConsumers - 1 ? 0 : warpgroup + 1, 256);
        }
    }
};

}  // namespace flash::sm90
