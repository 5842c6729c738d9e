// The functions of backend_choice.h.
#include "api/backend_choice.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <string>

#include "common/message.h"
#include "common/trace.h"
#include "dispatch/run_mha.h"
#include "flash.h"

#ifdef FLASH_WITH_CUDA
#include "dispatch/device.h"
#endif

namespace flash {
namespace {

constexpr char kEnvironmentVariable[] = "FLASH_ATTN_MINI_BACKEND";

// Empty if compiled kernels run on the GPU of q, else why not.
std::string reason_against_cuda(const at::Tensor &q) {
#ifdef FLASH_WITH_CUDA
    const DeviceProperties &properties = device_properties(q.get_device());
    return cuda_unavailable_reason(properties.major, properties.minor);
#else
    return "this build has no CUDA kernels; with a CUDA build of torch, and nvcc or the wheel flash_attn_mini_kernels, "
           "build them with: pip install .";
#endif
}

// Whether the CUDA kernels have the head dims of q and v. True for tensors without dimensions: the checks refuse them.
// Traced tensors may have symbolic sizes.
bool has_cuda_head_dims(const at::Tensor &q, const at::Tensor &v, CallOf kind) {
    if (q.dim() == 0 || v.dim() == 0 || kind == CallOf::latent_kvcache) {
        return true;
    }
    const c10::SymInt headdim = q.sym_size(-1), headdim_v = v.sym_size(-1);
    const bool has = headdim <= kMaxHeadDimCuda && headdim_v <= kMaxHeadDimCuda &&
                     (kind == CallOf::attention || headdim == headdim_v);
    if (!has && trace_enabled()) {
        const auto text_of = [](const c10::SymInt &size) {
            const std::optional<int64_t> known = size.maybe_as_int();
            return known.has_value() ? std::to_string(*known) : std::string("unknown");
        };
        trace("choose_backend", "triton, because the CUDA kernels lack headdim %s with headdim %s of v",
              text_of(headdim).c_str(), text_of(headdim_v).c_str());
    }
    return has;
}

}  // namespace

const char *name_of(Backend backend) {
    return backend == Backend::cpu ? "cpu" : backend == Backend::cuda ? "cuda" : "triton";
}

std::optional<c10::string_view> backend_asked_for(std::optional<c10::string_view> argument) {
    if (argument.has_value()) {
        return argument;
    }
    const char *value = std::getenv(kEnvironmentVariable);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<c10::string_view>(value);
}

std::optional<c10::string_view> backend_of_gradient(std::optional<c10::string_view> argument, const at::Tensor &q,
                                                    const at::Tensor &v) {
    const std::optional<c10::string_view> asked = backend_asked_for(argument);
    if (asked.has_value() || !(q.is_cpu() || (q.is_cuda() && at::globalContext().hasCUDA()))) {
        return asked;
    }
    return name_of(choose_backend(std::nullopt, q, v));
}

Backend choose_backend(std::optional<c10::string_view> argument, const at::Tensor &q, const at::Tensor &v,
                       CallOf kind) {
    FLASH_CHECK_NOT_IMPLEMENTED(q.is_cpu() || q.is_cuda(), "q is on ", q.device(), "; allowed: cpu and cuda devices");
    const std::optional<c10::string_view> asked = backend_asked_for(argument);
    if (!asked.has_value()) {
        return q.is_cpu()                                                         ? Backend::cpu
               : reason_against_cuda(q).empty() && has_cuda_head_dims(q, v, kind) ? Backend::cuda
                                                                                  : Backend::triton;
    }
    const std::string name(*asked), source = argument.has_value() ? "the backend argument" : kEnvironmentVariable;
    if (name == "triton") {
        return Backend::triton;
    }
    FLASH_CHECK_VALUE(name == "cpu" || name == "cuda", "flash_attn_mini: backend '", name, "', given by ", source,
                      ", is unknown; known: cuda, triton, cpu");
    const bool is_cpu = name == "cpu";
    const std::string reason = is_cpu        ? q.is_cpu() ? "" : "it takes CPU tensors"
                               : q.is_cuda() ? reason_against_cuda(q)
                                             : "it takes CUDA tensors";
    FLASH_CHECK(reason.empty(), "flash_attn_mini: backend '", name, "', asked for by ", source, ", cannot run on ",
                q.device(), ": ", reason);
    return is_cpu ? Backend::cpu : Backend::cuda;
}

}  // namespace flash
