// Facts about the current GPU, read once per device. Plain CUDA runtime, no torch: host code and the launch code of the
// kernels include it.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "common/launch.h"

namespace flash {

struct DeviceProperties {
    int sm_count;      // SMs
    int major, minor;  // compute capability
    int max_smem;      // bytes of shared memory that a CTA may have
};

// Safe to call from several threads. The reference stays valid.
inline const DeviceProperties &device_properties(int device) {
    static std::mutex mutex;
    static std::map<int, DeviceProperties> known;  // by device; a map never moves its elements
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(device);
    if (found != known.end()) {
        return found->second;
    }
    const auto attribute = [device](cudaDeviceAttr name) {
        int value = 0;
        check_cuda(cudaDeviceGetAttribute(&value, name, device), "reading an attribute of the GPU");
        return value;
    };
    const DeviceProperties properties{
        attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrComputeCapabilityMajor),
        attribute(cudaDevAttrComputeCapabilityMinor), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
    return known.emplace(device, properties).first->second;
}

// Of the current device.
inline const DeviceProperties &device_properties() {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "reading the current device");
    return device_properties(device);
}

}  // namespace flash
