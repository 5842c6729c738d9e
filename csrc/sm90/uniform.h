// Numbers that are the same in every lane of a warp.
#pragma once

namespace flash::sm90 {

// Moves a number that is the same in every lane of the warp into a uniform register.
__device__ __forceinline__ int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
}

// The thread's number in its warpgroup, in a register of its own. Where a loop needs it, ptxas would read the special
// register again in every iteration, which takes 60 to 110 cycles.
__device__ __forceinline__ int thread_of_warpgroup() {
    return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x % 128, threadIdx.x % 32));
}

}  // namespace flash::sm90
