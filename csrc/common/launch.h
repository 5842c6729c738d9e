// What every kernel launch needs: errors as exceptions, shared memory beyond the default, a grid that CUDA takes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash {

inline void check_cuda(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("flash_attn_mini: ") + what + " failed: " + cudaGetErrorString(error));
    }
}

// grid: thread blocks; what: the product that they are.
inline void check_grid(int64_t grid, const char *what) {
    if (grid > INT32_MAX) {
        throw std::runtime_error(std::string("flash_attn_mini: ") + what + " is " + std::to_string(grid) +
                                 "; allowed: up to 2147483647 thread blocks");
    }
}

// Lets thread blocks of `kernel` have smem bytes of dynamic shared memory.
template <typename Kernel>
void reserve_smem(Kernel *kernel, int smem) {
    constexpr int kDefaultSmem = 48 * 1024;  // bytes a block may use without asking
    if (smem > kDefaultSmem) {
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem),
                   "reserving shared memory");
    }
}

}  // namespace flash
