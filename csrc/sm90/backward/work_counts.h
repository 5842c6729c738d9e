// How work tiles of one phase of the backward wait for those of the phase before: counts in global memory, one for each
// head of dK and dV and each phase. A work tile that is done counts with a release. One that waits takes an acquire.
#pragma once

#include "flash.h"

namespace flash::sm90 {

struct WorkCounts {
    int *counts;  // 2 * heads + 1 zeros when the kernel begins
    int heads;    // of dK and dV; equal lengths: of all sequences

    __device__ __forceinline__ int *preprocessed(int head) const { return counts + head; }
    __device__ __forceinline__ int *computed(int head) const { return counts + heads + head; }
    __device__ __forceinline__ int *taken() const { return counts + 2 * heads; }  // work tiles, by CTAs

    // One thread. What it, or threads before a barrier, wrote is seen by those that wait for the count.
    __device__ __forceinline__ static void add(int *count, int value = 1) {
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
    }

    // One thread. Other threads may read after a barrier.
    __device__ __forceinline__ static void wait(const int *count, int expected) {
        int value;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
        while (value < expected) {
            __nanosleep(64);
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
        }
    }
};

// Before the copy engine reads or adds to what others wrote with plain stores.
__device__ __forceinline__ void fence_copies_from_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash::sm90
