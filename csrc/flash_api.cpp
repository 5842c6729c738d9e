// The extension flash_attn_mini._C: pybind11 names on mha_fwd, which checks, allocates, sets params and runs. CPU and
// CUDA tensors take the same path.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "message.h"
#include "run_mha.h"
#include "set_params.h"
#include "static_switch.h"
#include "trace.h"

#ifdef FLASH_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "minimal/flash_attn_minimal.h"
#endif

namespace flash {
namespace {

constexpr int64_t kVectorBytes = 16;  // what one cp.async moves

// Whether every row of x starts on a 16-byte boundary, as the CUDA kernels need; strides of single-element dimensions
// are never walked.
bool is_vector_aligned(const at::Tensor &x) {
    if (reinterpret_cast<uintptr_t>(x.data_ptr()) % kVectorBytes != 0) {
        return false;
    }
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
        if (x.size(dim) > 1 && x.stride(dim) * x.element_size() % kVectorBytes != 0) {
            return false;
        }
    }
    return true;
}

// x itself on the CPU and where the CUDA kernels can read it, else a contiguous copy.
at::Tensor readable_by_kernel(const at::Tensor &x, const char *name) {
    if (x.device().is_cpu() || is_vector_aligned(x)) {
        return x;
    }
    if (trace_enabled()) {
        trace("mha_fwd", "%s is not 16-byte aligned: copied", name);
    }
    return x.clone(at::MemoryFormat::Contiguous);
}

// The kernels find the largest score before they scale it, so they need a scale above 0 (a normal float32 number). A
// negative scale moves its sign into q, which is exact; a scale of 0 weighs all visible keys alike, as q = 0 does.
std::pair<at::Tensor, double> with_positive_scale(const at::Tensor &q, double softmax_scale) {
    const double smallest =
        q.scalar_type() == at::kDouble ? std::numeric_limits<double>::min() : double{std::numeric_limits<float>::min()};
    if (softmax_scale >= smallest) {
        return {q, softmax_scale};
    }
    if (softmax_scale <= -smallest) {
        return {q.neg(), -softmax_scale};
    }
    return {at::zeros_like(q), 1.0};
}

// softmax_lse has float32, and float64 for float64 inputs: as precise as the sums that it holds.
at::ScalarType lse_dtype(const at::Tensor &q) {
    return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<at::Tensor> mha_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                std::optional<at::Tensor> out_, std::optional<at::Tensor> alibi_slopes,
                                double p_dropout, double softmax_scale, bool is_causal, int64_t window_size_left,
                                int64_t window_size_right, double softcap, bool return_softmax,
                                std::optional<at::Generator> /*generator*/) {
    FLASH_CHECK_NOT_IMPLEMENTED(q.is_cpu() || q.is_cuda(), "q is on ", q.device(), "; allowed: cpu and cuda devices");
    if (q.is_neg() || k.is_neg() || v.is_neg()) {  // views that negate when read, which kernels do not do
        return mha_fwd(q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), out_, alibi_slopes, p_dropout, softmax_scale,
                       is_causal, window_size_left, window_size_right, softcap, return_softmax, std::nullopt);
    }
    const std::string backend = q.is_cpu() ? "cpu" : "cuda";
    if (trace_enabled()) {
        trace("mha_fwd", "backend=%s seqlen_q=%ld seqlen_k=%ld", backend.c_str(), q.dim() > 1 ? long(q.size(1)) : -1L,
              k.dim() > 1 ? long(k.size(1)) : -1L);
    }
    check_fwd({q, k, v, out_, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
               softcap, return_softmax},
              backend);
    FLASH_CHECK_VALUE(q.is_cpu() || q.size(3) % 8 == 0, "q has headdim ", q.size(3),
                      "; allowed: a multiple of 8 (flash_attn_func pads other sizes)");

    const c10::OptionalDeviceGuard device_guard(q.device());
    const at::Tensor out = out_.has_value() ? *out_ : at::empty_like(q);
    const at::Tensor softmax_lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(lse_dtype(q)));
    const at::Tensor S_dmask = at::empty({0}, q.options());
    const at::Tensor rng_state = at::empty({0}, q.options().dtype(at::kLong));
    if (k.size(1) == 0) {
        out.zero_();
        softmax_lse.fill_(-std::numeric_limits<double>::infinity());
    } else if (q.numel() > 0) {
        const bool writes_in_place = out.is_cpu() || is_vector_aligned(out);
        const at::Tensor kernel_out = writes_in_place ? out : at::empty(out.sizes(), out.options());
        const auto [scaled_q, positive_scale] = with_positive_scale(q, softmax_scale);
        const at::Tensor kernel_q = readable_by_kernel(scaled_q, "q"), kernel_k = readable_by_kernel(k, "k"),
                         kernel_v = readable_by_kernel(v, "v");
        Flash_fwd_params params =
            set_params_fprop(kernel_q, kernel_k, kernel_v, kernel_out, softmax_lse,
                             {positive_scale, is_causal, window_size_left, window_size_right, softcap});
        run_mha_fwd(params, q.device());
        if (!writes_in_place) {
            out.copy_(kernel_out);
        }
    }
    return {out, softmax_lse, S_dmask, rng_state};
}

// mha_fwd's checks alone, for backends that are not written in C++.
void check_fwd_for(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                   std::optional<at::Tensor> alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                   int64_t window_size_left, int64_t window_size_right, double softcap, bool return_softmax,
                   const std::string &backend) {
    check_fwd({q, k, v, std::nullopt, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
               window_size_right, softcap, return_softmax},
              backend);
}

pybind11::dict build_info() {
    pybind11::dict info;
    info["torch"] = FLASH_TORCH_VERSION;
#ifdef FLASH_WITH_CUDA
    info["archs"] = std::vector<int>{FLASH_ARCHS};
    info["hdims"] = std::vector<int>(std::begin(kBuiltHeadDims), std::end(kBuiltHeadDims));
    std::vector<std::string> dtypes;
    for (DType dtype : kBuiltDTypes) {
        dtypes.emplace_back(dtype == DType::float16 ? "fp16" : "bf16");
    }
    info["dtypes"] = dtypes;
    info["cuda"] = CUDART_VERSION;
#else
    info["archs"] = std::vector<int>{};
    info["hdims"] = std::vector<int>{};
    info["dtypes"] = std::vector<std::string>{};
    info["cuda"] = pybind11::none();
#endif
    return info;
}

// The official extension's other entries, whose kernels later versions bring.
template <const char *kName>
[[noreturn]] void not_implemented(const pybind11::args &, const pybind11::kwargs &) {
    FLASH_CHECK_NOT_IMPLEMENTED(false, kName, " is not implemented in this version; backends that have it: none");
    __builtin_unreachable();
}

constexpr char kBwd[] = "bwd", kVarlenFwd[] = "varlen_fwd", kVarlenBwd[] = "varlen_bwd", kFwdKvcache[] = "fwd_kvcache";

#ifdef FLASH_WITH_CUDA
// The teaching kernel of csrc/minimal: q, k, v float32 [seqlen, headdim] contiguous on one GPU.
at::Tensor minimal_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, double softmax_scale,
                       bool is_causal) {
    for (const at::Tensor &x : {q, k, v}) {
        FLASH_CHECK_VALUE(
            x.dim() == 2 && x.is_cuda() && x.is_contiguous() && x.size(1) == q.size(1) && x.size(1) <= 128 &&
                x.device() == q.device(),
            "minimal_fwd takes contiguous [seqlen, headdim] tensors on one GPU, headdim up to 128; given: ", x.sizes(),
            " on ", x.device());
        FLASH_CHECK_TYPE(x.scalar_type() == at::kFloat, "minimal_fwd takes float32; given: ", x.scalar_type());
    }
    FLASH_CHECK_VALUE(k.size(0) == v.size(0), "k has seqlen ", k.size(0), " and v ", v.size(0), "; allowed: equal");
    const c10::OptionalDeviceGuard device_guard(q.device());
    at::Tensor out = at::empty_like(q);
    if (q.numel() > 0) {
        run_flash_attn_minimal(q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), out.data_ptr<float>(),
                               static_cast<int>(q.size(0)), static_cast<int>(k.size(0)), static_cast<int>(q.size(1)),
                               static_cast<float>(softmax_scale), is_causal,
                               c10::cuda::getCurrentCUDAStream().stream());
    }
    return out;
}
#endif

}  // namespace
}  // namespace flash

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    namespace py = pybind11;
    module.doc() = "flash_attn_mini: names and argument order of the official flash_attn_2_cuda";
    module.def("fwd", torch::wrap_pybind_function_no_gil(flash::mha_fwd),
               "Forward: returns [out, softmax_lse, S_dmask, rng_state]", py::arg("q"), py::arg("k"), py::arg("v"),
               py::arg("out"), py::arg("alibi_slopes"), py::arg("p_dropout"), py::arg("softmax_scale"),
               py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"),
               py::arg("return_softmax"), py::arg("generator"));
    module.def(flash::kBwd, torch::wrap_pybind_function(flash::not_implemented<flash::kBwd>));
    module.def(flash::kVarlenFwd, torch::wrap_pybind_function(flash::not_implemented<flash::kVarlenFwd>));
    module.def(flash::kVarlenBwd, torch::wrap_pybind_function(flash::not_implemented<flash::kVarlenBwd>));
    module.def(flash::kFwdKvcache, torch::wrap_pybind_function(flash::not_implemented<flash::kFwdKvcache>));
    module.def("check_fwd", torch::wrap_pybind_function(flash::check_fwd_for), "fwd's argument checks alone");
    module.def("cuda_unavailable_reason", &flash::cuda_unavailable_reason, py::arg("major"), py::arg("minor"));
    module.def("build_info", &flash::build_info, "What this extension was built with");
#ifdef FLASH_WITH_CUDA
    module.def("minimal_fwd", torch::wrap_pybind_function(flash::minimal_fwd), py::arg("q"), py::arg("k"), py::arg("v"),
               py::arg("softmax_scale"), py::arg("is_causal"));
#endif
}
