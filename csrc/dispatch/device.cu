// The functions of device.h. Compiled once: it has no kernel.
#include "device.h"

#include <map>
#include <mutex>

#include "launch.h"

namespace flash {

const DeviceProperties &device_properties(int device) {
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

const DeviceProperties &device_properties() {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "reading the current device");
    return device_properties(device);
}

void set_to_zero(void *memory, int64_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream), "setting memory to 0");
}

int cuda_version() {
    return CUDART_VERSION;
}

}  // namespace flash
