// Adds tiles of dQ to the float32 accumulator in global memory, in any order or in the order of a semaphore
// (common/dq_semaphore.h). A tile is added from registers, spread over the products that follow; or it is staged in
// shared memory and the copy engine adds it (compute capability 9.0 and later), which leaves the load and store units
// free.
//
// Layout of the accumulator of a row block, as flash_bwd_convert_dq reads it: [warp][vector i][lane][4]. Vector i of a
// lane is its registers 4 i to 4 i + 3. Each warp adds to a contiguous range, to which no other warp of its CTA adds.
#pragma once

#include <cute/tensor.hpp>

#include "common/dq_semaphore.h"
#include "kernel_traits_bwd.h"

namespace flash::sm80 {

using namespace cute;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASH_HAS_BULK_REDUCE
#endif

// True: a warp passes its semaphore on in the next step, behind the products of S, so that nothing waits for the
// reduction. False: at the end of the step, so that the next key block waits less, and registers are free earlier.
template <typename Traits, BwdMode kMode>
constexpr bool kPassesInNextStep =
    kMode == BwdMode::deterministic && Traits::kPInRegisters;  // dQ is then the last product of a step

// In order, a CTA waits for its semaphore and passes it on once for this many row blocks. One would double what the
// semaphore costs; with more, the next key block waits longer.
constexpr int kRowBlocksPerPass = 2;

// One warp's part of a row block. kVectors: vectors of 4 values of each lane.
template <int kVectors, bool kStaged>
struct DqReduction {
    float *target;  // of this warp, in global memory
    const int *counts;
    DqSemaphore<kStaged> semaphore;
    bool is_reached = false;  // seen so early that looking cost no time; only lane 0 knows

    // accum: of the row block. semaphore: of this warp, among `counts`; none: any order, or it has waited already.
    __device__ DqReduction(float *accum, const int *counts, const DqSemaphore<kStaged> &semaphore)
        : counts(counts), semaphore(semaphore) {
        target = accum + threadIdx.x / 32 * kVectors * 128;
        if (semaphore.index != DqSemaphore<kStaged>::kNone) {
            is_reached = threadIdx.x % 32 == 0 && semaphore.is_reached(counts);
        }
    }

    __device__ __forceinline__ void wait() const { semaphore.wait(counts, is_reached); }

    // Adds the vectors [begin, end) of this thread from registers. The caller has waited for the semaphore.
    template <typename TensorQ>
    __device__ __forceinline__ void add(const TensorQ &acc_dq, int begin, int end) const {
        CUTE_UNROLL
        for (int i = begin; i < end; ++i) {
            float *address = target + (i * 32 + threadIdx.x % 32) * 4;
#ifdef FLASH_HAS_BULK_REDUCE
            atomicAdd(reinterpret_cast<float4 *>(address),
                      make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3)));
#else
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                atomicAdd(address + j, acc_dq(4 * i + j));
            }
#endif
        }
    }

#ifdef FLASH_HAS_BULK_REDUCE
    // Adds all vectors through `buffer`, kVectors * 128 values of shared memory for each warp.
    template <typename TensorQ>
    __device__ __forceinline__ void add_staged(const TensorQ &acc_dq, float *buffer) const {
        const int lane = threadIdx.x % 32;
        float *staged = buffer + threadIdx.x / 32 * kVectors * 128;
        if (lane == 0) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the copy engine has read the buffer
        }
        __syncwarp();
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<float4 *>(staged + (i * 32 + lane) * 4) =
                make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        wait();
        __syncwarp();
        if (lane == 0) {
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
                         "r"(cast_smem_ptr_to_uint(staged)), "n"(kVectors * 512)
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
#endif
};

}  // namespace flash::sm80
