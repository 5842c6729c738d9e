// Keeps addresses of operands out of registers.
#pragma once

namespace flash::sm90 {

// The same pointer, as a value that the compiler does not know before this point of the code. The descriptors of a tile
// that stays in shared memory are constants of a loop. Where there are more of them than uniform registers, the
// compiler keeps them in others, and each wgmma waits for moves. Called in an outer loop, it keeps addresses that all
// iterations have in common out of registers that the inner loop needs.
template <typename T>
__device__ __forceinline__ T *unhoisted(T *pointer) {
    int zero;
    asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    return pointer + zero;
}

}  // namespace flash::sm90
