// Programmatic launches: kernels that overlap the end of the kernel before them.
#pragma once

#include "../common/launch.h"
#include "dispatch/device.h"

namespace flash::kvcache {

// A launch in clusters of `cluster` CTAs along y. On Hopper and later the launch is programmatic: the kernel may be
// scheduled before the kernel ahead of it in the stream has ended, and waits for it itself.
struct Launch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2] = {};

    Launch(dim3 grid, int cluster, int threads, int smem, cudaStream_t stream) {
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = smem;
        config.stream = stream;
        config.attrs = attributes;
        if (cluster > 1) {
            attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            attributes[config.numAttrs].val.clusterDim.x = attributes[config.numAttrs].val.clusterDim.z = 1;
            attributes[config.numAttrs++].val.clusterDim.y = static_cast<unsigned>(cluster);
        }
        if (device_properties().major >= 9) {
            attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
    }
    Launch(const Launch &) = delete;  // config points to attributes

    template <typename... Parameters, typename... Args>
    void run(void (*kernel)(Parameters...), const char *what, const Args &...args) const {
        check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
    }
};

}  // namespace flash::kvcache
