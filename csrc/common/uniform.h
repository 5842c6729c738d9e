// Numbers that are the same in every lane of a warp.
#pragma once

namespace flash {

// Moves a number that is the same in every lane of the warp into a uniform register. The compiler then knows that
// branches on it do not diverge.
__device__ __forceinline__ int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
}

}  // namespace flash
