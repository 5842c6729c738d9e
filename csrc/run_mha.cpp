// The one place where run-time values become template arguments.
#include "run_mha.h"

#include "cpu/flash_fwd_cpu.h"
#include "message.h"
#include "static_switch.h"
#include "trace.h"

#ifdef FLASH_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "sm80/flash_fwd.h"
#endif

namespace flash {

#ifdef FLASH_WITH_CUDA

namespace {

// The compute capabilities that the kernels were compiled for, 90 for 9.0.
constexpr int kBuiltArchs[] = {FLASH_ARCHS};

// Machine code runs on the same major version from its minor version up.
bool runs_on(int major, int minor) {
    for (int arch : kBuiltArchs) {
        if (arch / 10 == major && arch % 10 <= minor) {
            return true;
        }
    }
    return false;
}

void run_mha_fwd_cuda(Flash_fwd_params &params) {
    const int device = c10::cuda::current_device();
    int major = 0, minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&params.num_sm, cudaDevAttrMultiProcessorCount, device));
    const std::string reason = cuda_unavailable_reason(major, minor);
    FLASH_CHECK(reason.empty(), reason);
    FLASH_CHECK(is_built(params.dtype), "no kernel was compiled for this dtype; build it with: ",
                "FLASH_ATTN_MINI_DTYPES=\"fp16;bf16\" pip install .");
    FLASH_CHECK(built_headdim_for(params.d) != 0, "no kernel was compiled for headdim ", params.d,
                "; compiled: ", list_of(kBuiltHeadDims), "; build them all with: FLASH_ATTN_MINI_HDIMS= pip install .");
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            BOOL_SWITCH(params.is_causal, Is_causal, [&] {
                if (trace_enabled()) {
                    trace("run_mha_fwd", "device=cuda arch=sm80 kHeadDim=%d Is_causal=%s", kHeadDim,
                          name_of(Is_causal));
                }
                sm80::run_flash_fwd<kDType, kHeadDim, Is_causal>(params, stream);
            });
        });
    });
}

}  // namespace

std::string cuda_unavailable_reason(int major, int minor) {
    if (runs_on(major, minor)) {
        return {};
    }
    return message("no kernel was compiled for compute capability ", major, ".", minor,
                   "; compiled: ", list_of(kBuiltArchs), "; build it with: FLASH_ATTN_MINI_ARCHS=", major, minor,
                   " pip install .");
}

#else

std::string cuda_unavailable_reason(int major, int minor) {
    return message("this build has no CUDA kernels; with a CUDA build of torch and nvcc, build them with: ",
                   "FLASH_ATTN_MINI_ARCHS=", major, minor, " pip install .");
}

#endif

void run_mha_fwd(Flash_fwd_params &params, c10::Device device) {
    if (device.is_cpu()) {
        if (trace_enabled()) {
            trace("run_mha_fwd", "device=cpu d=%d is_causal=%s", params.d, name_of(params.is_causal));
        }
        run_mha_fwd_cpu(params);
        return;
    }
#ifdef FLASH_WITH_CUDA
    run_mha_fwd_cuda(params);
#else
    FLASH_CHECK(false, cuda_unavailable_reason(9, 0));
#endif
}

}  // namespace flash
