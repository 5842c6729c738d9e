// Facts about a GPU. The functions belong to the kernels (device.cu): host code that calls them needs neither CUDA's
// headers nor its runtime, so that it can be built against a wheel of kernels (build_tools/kernel_wheel.py).
#pragma once

#include <cstdint>

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

struct DeviceProperties {
    int sm_count;      // SMs
    int major, minor;  // compute capability
    int max_smem;      // bytes of shared memory that a CTA may have
};

// Read once per device. Safe to call from several threads. The reference stays valid.
const DeviceProperties &device_properties(int device);

// The same of the current device.
const DeviceProperties &device_properties();

// Sets memory on the current device to 0, in the order of the stream.
void set_to_zero(void *memory, int64_t bytes, cudaStream_t stream);

// The version of the CUDA toolkit that compiled the kernels, as CUDART_VERSION: 13000 for 13.0.
int cuda_version();

}  // namespace flash
