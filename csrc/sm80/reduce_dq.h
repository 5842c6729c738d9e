// How the tiles of dQ that thread blocks compute become sums in global memory: by reductions from registers, spread
// over the products that follow, or staged in shared memory and added by the copy engine (compute capability 9.0 and
// later), which leaves the load and store units alone. In any order, or key block by key block when it has to be
// repeatable.
//
// Taking turns orders reductions, and no data is read: a turn is passed on when the reductions before it are known to
// be done, and what comes after it depends on having seen it. So relaxed accesses do, and the caches need no fences
// (docs/tuning.md has what they cost).
//
// The accumulator holds a row block as the threads of flash_bwd_convert_dq read it: warp after warp, of a warp the i-th
// four values of all its lanes, 16 bytes a lane. What a warp adds is contiguous, and no other warp of its block adds
// there.
#pragma once

#include <cute/tensor.hpp>

namespace flash::sm80 {

using namespace cute;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASH_HAS_BULK_REDUCE
#endif

// One warp's part of the accumulator of a row block. kVectors: times 4 values, of each thread.
template <int kVectors>
struct DqReduction {
    float *target;    // of this warp, in global memory
    int *turns;       // of this warp and row block: how many key blocks have added; null: any order
    int turn;         // how many have to add before this one
    bool is_my_turn;  // found so early that looking cost no time; lane 0 alone knows

    __device__ DqReduction(float *accum, int *turns_, int turn) : turn(turn) {
        const int warp = threadIdx.x / 32;
        target = accum + warp * kVectors * 128;
        turns = turns_ == nullptr ? nullptr : turns_ + warp;
        is_my_turn = turns == nullptr || (threadIdx.x % 32 == 0 && turns_passed(turns) == turn);
    }

    // What the warp has to wait for before it adds.
    __device__ __forceinline__ void await_turn() const {
        if (turns != nullptr) {
            if (threadIdx.x % 32 == 0 && !is_my_turn) {
                while (turns_passed(turns) != turn) {
                }
            }
            __syncwarp();
        }
    }

    // Adds the vectors [begin, end) of this thread from registers.
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
    // Adds all vectors by way of `room`, kVectors * 128 values of shared memory for each warp.
    template <typename TensorQ>
    __device__ __forceinline__ void add_staged(const TensorQ &acc_dq, float *room) const {
        const int lane = threadIdx.x % 32;
        float *staged = room + threadIdx.x / 32 * kVectors * 128;
        if (lane == 0) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the room has been read
        }
        __syncwarp();
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<float4 *>(staged + (i * 32 + lane) * 4) =
                make_float4(acc_dq(4 * i), acc_dq(4 * i + 1), acc_dq(4 * i + 2), acc_dq(4 * i + 3));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        await_turn();
        __syncwarp();
        if (lane == 0) {
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
                         "r"(cast_smem_ptr_to_uint(staged)), "n"(kVectors * 512)
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
#endif

private:
    __device__ static int turns_passed(const int *turn) {
        int count;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(turn) : "memory");
        return count;
    }
};

// The turn that a warp still holds: passed on at the end of the step, behind the other products, when what it added has
// had time to arrive.
template <bool kStaged>
struct TurnToPass {
    int *turns = nullptr;
    int turn = 0;

    __device__ __forceinline__ void pass() {
        if (turns == nullptr) {
            return;
        }
#ifdef FLASH_HAS_BULK_REDUCE
        if constexpr (kStaged) {
            if (threadIdx.x % 32 == 0) {
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the sums are in L2
            }
        }
#endif
        if constexpr (!kStaged) {
            __threadfence();
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {
            asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
        }
        turns = nullptr;
    }
};

}  // namespace flash::sm80
