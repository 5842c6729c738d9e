// Deterministic dQ: the key blocks add to a group of row blocks in a fixed order, which a semaphore in global memory
// keeps. It counts the key blocks that have added. The order is release and acquire at gpu scope, with a fence between
// the two proxies where the copy engine adds.
#pragma once

namespace flash {

// The part of one warp, among the counts of a call. No other warp of its CTA adds to the same values.
// kCopyEngine: the warp adds with cp.reduce.async.bulk, issued by lane 0; else every lane adds from registers.
template <bool kCopyEngine>
struct DqSemaphore {
    static constexpr int kNone = -1;
    int index = kNone;  // of the count; none: any order. Smaller than a pointer, and registers are scarce
    int order = 0;      // key blocks that add before this one

    // Lane 0: whether all of them have added. Relaxed: wait() orders what follows, so this may be called early, where
    // the latency of the load is hidden.
    __device__ __forceinline__ bool is_reached(const int *counts) const {
        int added;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(added) : "l"(counts + index) : "memory");
        return added == order;
    }

    // All lanes: waits until all of them have added; every reduction until pass() comes after theirs. is_known_reached:
    // the earlier result of is_reached().
    __device__ __forceinline__ void wait(const int *counts, bool is_known_reached) const {
        if (index == kNone) {
            return;
        }
        if (threadIdx.x % 32 == 0) {
            if (!is_known_reached) {
                while (!is_reached(counts)) {
                }
            }
            acquire();
        }
        __syncwarp();
    }

    // All lanes: lets the next key block add, when all reductions of this warp are complete.
    __device__ __forceinline__ void pass(int *counts) {
        if (index == kNone) {
            return;
        }
        if constexpr (!kCopyEngine) {
            __syncwarp();  // the release of lane 0 covers what the other lanes added
        }
        if (threadIdx.x % 32 == 0) {
#if __CUDA_ARCH__ >= 900
            if constexpr (kCopyEngine) {
                // Waits until all sums are written. Completion is a fence from the async proxy to the generic proxy.
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            }
#endif
            asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counts + index), "r"(order + 1) : "memory");
        }
        index = kNone;
    }

private:
    // Together with the relaxed load before it this is an acquire. fence.acquire only discards lines of the L1 cache;
    // fence.acq_rel waits for earlier accesses as well.
    __device__ __forceinline__ static void acquire() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
        asm volatile("fence.acquire.gpu;" ::: "memory");
#else
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
#if __CUDA_ARCH__ >= 900
        if constexpr (kCopyEngine) {
            asm volatile("fence.proxy.async.global;" ::: "memory");
        }
#endif
    }
};

}  // namespace flash
