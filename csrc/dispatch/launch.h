// Launches on the current GPU, for the launch code of the kernels: CUDA errors as exceptions, limits of a launch. Plain
// CUDA runtime, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "device.h"

namespace flash {

inline void check_cuda(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        cudaGetLastError();  // the exception reports it; the next check of a launch would report it again
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

// Sets an attribute of a kernel on the current device to `value` or more. Each thread does so once: its first call also
// makes the device's context current in the thread, which the driver needs to encode a TMA descriptor.
template <typename Kernel>
void raise_attribute(Kernel *kernel, cudaFuncAttribute attribute, int value, const char *what) {
    static thread_local std::map<std::tuple<int, const void *, cudaFuncAttribute>, int> set_by_thread;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "reading the current device");
    int &known = set_by_thread[{device, reinterpret_cast<const void *>(kernel), attribute}];
    if (value > known) {
        check_cuda(cudaFuncSetAttribute(kernel, attribute, value), what);
        known = value;
    }
}

// Allows each CTA of `kernel` smem bytes of dynamic shared memory.
template <typename Kernel>
void reserve_smem(Kernel *kernel, int smem) {
    constexpr int kDefaultSmem = 48 * 1024;  // bytes that a CTA may use without this call
    if (smem > kDefaultSmem) {
        raise_attribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem, "reserving shared memory");
    }
}

// A launch in clusters of `cluster` CTAs.
struct ClusterLaunch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2] = {};

    ClusterLaunch(dim3 grid, dim3 cluster, int threads, int smem, cudaStream_t stream) {
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = smem;
        config.stream = stream;
        config.attrs = attributes;
        if (cluster.x * cluster.y * cluster.z > 1) {
            attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            auto &dimension = attributes[config.numAttrs++].val.clusterDim;
            dimension.x = cluster.x;
            dimension.y = cluster.y;
            dimension.z = cluster.z;
        }
    }
    ClusterLaunch(const ClusterLaunch &) = delete;  // config points to attributes

    template <typename... Parameters, typename... Args>
    void run(void (*kernel)(Parameters...), const char *what, const Args &...args) const {
        check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
    }
};

// The same with clusters along y. On Hopper and later the launch is programmatic: the kernel may be scheduled before
// the kernel ahead of it in the stream has ended, and waits for it itself.
struct ProgrammaticLaunch : ClusterLaunch {
    ProgrammaticLaunch(dim3 grid, int cluster, int threads, int smem, cudaStream_t stream)
        : ClusterLaunch(grid, dim3(1, static_cast<unsigned>(cluster)), threads, smem, stream) {
        if (device_properties().major >= 9) {
            attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
    }
};

}  // namespace flash
