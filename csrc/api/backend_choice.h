// Which backend a call takes: the backend argument, else FLASH_ATTN_MINI_BACKEND, else by device. The Python functions
// put the name that use_backend(...) chose in the backend argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>

namespace flash {

enum class Backend { cpu, cuda, triton };

const char *name_of(Backend backend);

// The name asked for by `argument` or by the environment; none: the device decides.
std::optional<c10::string_view> backend_asked_for(std::optional<c10::string_view> argument);

// The name to run a backward on, as the environment is at its forward: the name asked for, else by device and head
// dims. None for a device that this machine lacks, as fake tensors may have.
std::optional<c10::string_view> backend_of_gradient(std::optional<c10::string_view> argument, const at::Tensor &q,
                                                    const at::Tensor &v);

enum class CallOf { attention, kvcache, latent_kvcache };  // latent_kvcache: the CUDA kernel of latent_cache.h takes it

// The backend of a call with tensors on the device of q. CUDA tensors take Triton by default where the CUDA kernels
// lack the GPU or the head dims of q and v. ValueError for an unknown name, RuntimeError if the backend asked for
// cannot run there. Whether Triton can run is checked by its ops, the head dims by the checks of the backend.
Backend choose_backend(std::optional<c10::string_view> argument, const at::Tensor &q, const at::Tensor &v,
                       CallOf kind = CallOf::attention);

}  // namespace flash
