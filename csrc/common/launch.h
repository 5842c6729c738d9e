// Helpers of kernel launches: CUDA errors as exceptions, the limit of a grid, shared memory beyond the default.
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

// grid: CTAs. what: the product that gives this number, for the message.
inline void check_grid(int64_t grid, const char *what) {
    if (grid > INT32_MAX) {
        throw std::runtime_error(std::string("flash_attn_mini: ") + what + " is " + std::to_string(grid) +
                                 "; allowed: up to 2147483647 thread blocks");
    }
}

// Allows each CTA of `kernel` smem bytes of dynamic shared memory.
template <typename Kernel>
void reserve_smem(Kernel *kernel, int smem) {
    constexpr int kDefaultSmem = 48 * 1024;  // bytes that a CTA may use without this call
    if (smem > kDefaultSmem) {
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem),
                   "reserving shared memory");
    }
}

}  // namespace flash
