// The functions of current_stream.h. c10/cuda/CUDAStream.h includes CUDA's headers; PyTorch's C interface does not.
#ifdef FLASH_WITH_CUDA
#include "api/current_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#define USE_CUDA  // declares the function below
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "common/message.h"

namespace flash {

int current_device() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
}

cudaStream_t current_stream() {
    void *stream = nullptr;
    FLASH_CHECK(aoti_torch_get_current_cuda_stream(current_device(), &stream) == AOTI_TORCH_SUCCESS,
                "PyTorch returned no current stream");
    return static_cast<cudaStream_t>(stream);
}

}  // namespace flash
#endif
