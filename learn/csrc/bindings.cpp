// minimal_fwd and tensor_cores_fwd as functions of a Python module: checks, output, launch. learn/kernels.py compiles
// this file with the kernels.
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "common/message.h"  // csrc/common
#include "flash_attn_minimal.h"
#include "flash_attn_tensor_cores.h"

namespace flash {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int>::max();
constexpr int64_t kMaxHeads = 65535;

// q [batch, heads, seqlen_q, headdim], k and v [batch, heads, seqlen_k, headdim]: contiguous, of `dtype`, on one GPU.
void check_inputs(const char *function, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                  at::ScalarType dtype) {
    for (const at::Tensor &x : {q, k, v}) {
        FLASH_CHECK_VALUE(x.dim() == 4 && x.is_cuda() && x.is_contiguous() && x.device() == q.device(), function,
                          " takes contiguous [batch, heads, seqlen, headdim] tensors on one GPU; given: ", x.sizes(),
                          " on ", x.device());
        FLASH_CHECK_TYPE(x.scalar_type() == dtype, function, " takes ", dtype, "; given: ", x.scalar_type());
        FLASH_CHECK_VALUE(x.size(0) == q.size(0) && x.size(1) == q.size(1) && x.size(3) == q.size(3), function,
                          " takes q, k and v of one batch, number of heads and headdim; given: ", q.sizes(), " and ",
                          x.sizes());
        FLASH_CHECK_VALUE(x.size(2) <= kMaxRows - 64, function, ": seqlen is ", x.size(2), "; allowed: up to ",
                          kMaxRows - 64);
    }
    FLASH_CHECK_VALUE(k.size(2) == v.size(2), function, ": k has seqlen ", k.size(2), " and v ", v.size(2),
                      "; allowed: equal");
    FLASH_CHECK_VALUE(q.size(0) * q.size(1) <= kMaxHeads, function, ": batch * heads is ", q.size(0) * q.size(1),
                      "; allowed: up to ", kMaxHeads);
}

int size_of(const at::Tensor &x, int dim) {
    return static_cast<int>(x.size(dim));
}

int heads_of(const at::Tensor &x) {
    return static_cast<int>(x.size(0) * x.size(1));
}

at::Tensor minimal_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, double softmax_scale,
                       bool is_causal, bool padded) {
    check_inputs("minimal_fwd", q, k, v, at::kFloat);
    FLASH_CHECK_VALUE(q.size(3) <= 128, "minimal_fwd: headdim is ", q.size(3), "; allowed: up to 128");
    const c10::OptionalDeviceGuard device_guard(q.device());
    at::Tensor out = at::empty_like(q);
    if (q.numel() > 0) {
        run_flash_attn_minimal(q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), out.data_ptr<float>(),
                               heads_of(q), size_of(q, 2), size_of(k, 2), size_of(q, 3),
                               static_cast<float>(softmax_scale), is_causal, padded,
                               c10::cuda::getCurrentCUDAStream().stream());
    }
    return out;
}

at::Tensor tensor_cores_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, double softmax_scale,
                            bool is_causal) {
    check_inputs("tensor_cores_fwd", q, k, v, at::kHalf);
    FLASH_CHECK_VALUE(q.size(3) == 64 || q.size(3) == 128, "tensor_cores_fwd: headdim is ", q.size(3),
                      "; allowed: 64 and 128");
    for (const at::Tensor &x : {q, k, v}) {
        FLASH_CHECK_VALUE(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
                          "tensor_cores_fwd takes tensors aligned to 16 bytes; given: an address that is not");
    }
    const c10::OptionalDeviceGuard device_guard(q.device());
    at::Tensor out = at::empty_like(q);
    if (q.numel() > 0) {
        run_flash_attn_tensor_cores(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), heads_of(q),
                                    size_of(q, 2), size_of(k, 2), size_of(q, 3), static_cast<float>(softmax_scale),
                                    is_causal, c10::cuda::getCurrentCUDAStream().stream());
    }
    return out;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    namespace py = pybind11;
    module.def("minimal_fwd", torch::wrap_pybind_function(flash::minimal_fwd), py::arg("q"), py::arg("k"), py::arg("v"),
               py::arg("softmax_scale"), py::arg("is_causal"), py::arg("padded") = true);
    module.def("tensor_cores_fwd", torch::wrap_pybind_function(flash::tensor_cores_fwd), py::arg("q"), py::arg("k"),
               py::arg("v"), py::arg("softmax_scale"), py::arg("is_causal"));
}
