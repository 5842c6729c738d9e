// The extension flash_attn_mini._C: pybind11 names on mha_fwd and mha_bwd, which check, allocate, set params and run.
// CPU and CUDA tensors take the same path.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
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
        trace("readable_by_kernel", "%s is not 16-byte aligned: copied", name);
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

// How many query heads of a group one thread block of the CUDA backward sums up in registers: the whole group, unless
// that leaves multiprocessors idle. Where it does, dk and dv get several heads per group, which are summed afterwards.
int heads_per_thread_block(const at::Tensor &q, const at::Tensor &k) {
    constexpr int64_t kKeysPerBlock = 128;  // the usual tile
    constexpr int64_t kBlocksPerSM = 2;     // enough for the last ones to balance
    const int64_t group = q.size(2) / k.size(2);
    const int64_t blocks_per_head = (k.size(1) + kKeysPerBlock - 1) / kKeysPerBlock * q.size(0);
    int64_t heads = group;
    for (int64_t parts = 1; parts <= group; ++parts) {
        if (group % parts == 0) {
            heads = group / parts;
            if (blocks_per_head * k.size(2) * parts >= kBlocksPerSM * multiprocessor_count()) {
                break;
            }
        }
    }
    return static_cast<int>(heads);
}

// A gradient of the call and the memory that the kernel writes: the same, or a temporary that is stored afterwards.
struct Gradient {
    at::Tensor result;   // undefined: not wanted
    at::Tensor written;  // like result; dk and dv of the CUDA kernels may have more heads, whose groups add up

    Gradient(bool wanted, const std::optional<at::Tensor> &given, const at::Tensor &like, int64_t heads) {
        if (!wanted) {
            return;
        }
        result = given.has_value() ? *given : at::empty_like(like);
        const bool in_place = heads == like.size(2) && (like.is_cpu() || is_vector_aligned(result));
        written = in_place ? result : at::empty({like.size(0), like.size(1), heads, like.size(3)}, like.options());
    }

    void store() {
        if (!result.defined() || written.is_same(result)) {
            return;
        }
        const int64_t heads = result.size(2);
        if (written.size(2) == heads) {
            result.copy_(written);
        } else {
            at::sum_out(result, written.unflatten(2, {heads, written.size(2) / heads}), 3);
        }
    }

    void zero() {
        if (result.defined()) {
            result.zero_();
        }
    }
};

// Scratch of the CUDA kernels; it has to live until they are launched (the caching allocator keeps it for the stream).
struct Cuda_scratch {
    at::Tensor lse_padded, large_rows, dq_accum, dq_turn;

    Cuda_scratch(Flash_bwd_params &params, const at::Tensor &q) {
        const int64_t b = params.b, h = params.h, rows = params.seqlen_q_rounded;
        params.d_rounded = built_headdim_for(params.d);
        lse_padded = at::empty({b, h, rows}, q.options().dtype(at::kFloat));
        params.lse_padded = lse_padded.data_ptr<float>();
        large_rows = at::empty({b, h, rows / 64}, q.options().dtype(at::kInt));
        params.large_rows = large_rows.data_ptr<int>();
        if (params.dq.ptr == nullptr) {
            return;
        }
        dq_accum = at::empty({b, h, rows, params.d_rounded}, q.options().dtype(at::kFloat));
        params.dq_accum = dq_accum.data_ptr<float>();
        if (params.deterministic) {
            const int64_t turns = b * h * (rows / Flash_bwd_params::kRowsPerTurn);
            dq_turn = at::zeros({turns + 1}, q.options().dtype(at::kInt));
            params.dq_turn = dq_turn.data_ptr<int>();
            params.dq_ticket = params.dq_turn + turns;
        }
    }
};

// dsoftmax_lse and output_mask, which the official bwd lacks, come last. Returns dq, dk, dv and softmax_d = delta
// [batch, nheads, seqlen_q rounded up to 128]; a gradient that is not wanted is an empty tensor.
std::vector<at::Tensor> mha_bwd(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                const at::Tensor &out, const at::Tensor &softmax_lse, std::optional<at::Tensor> dq_,
                                std::optional<at::Tensor> dk_, std::optional<at::Tensor> dv_,
                                std::optional<at::Tensor> alibi_slopes, double p_dropout, double softmax_scale,
                                bool is_causal, int64_t window_size_left, int64_t window_size_right, double softcap,
                                bool deterministic, std::optional<at::Generator> /*generator*/,
                                std::optional<at::Tensor> /*rng_state*/, std::optional<at::Tensor> dsoftmax_lse,
                                std::array<bool, 3> output_mask) {
    FLASH_CHECK_NOT_IMPLEMENTED(q.is_cpu() || q.is_cuda(), "q is on ", q.device(), "; allowed: cpu and cuda devices");
    const std::string backend = q.is_cpu() ? "cpu" : "cuda";
    if (trace_enabled()) {
        trace("mha_bwd", "backend=%s seqlen_q=%ld seqlen_k=%ld", backend.c_str(), q.dim() > 1 ? long(q.size(1)) : -1L,
              k.dim() > 1 ? long(k.size(1)) : -1L);
    }
    const std::optional<at::Tensor> out_{out};
    const Fwd_args forward_args{q,
                                k,
                                v,
                                out_,
                                alibi_slopes,
                                p_dropout,
                                softmax_scale,
                                is_causal,
                                window_size_left,
                                window_size_right,
                                softcap,
                                /*return_softmax=*/false};
    check_bwd({forward_args, dout, softmax_lse, dsoftmax_lse, dq_, dk_, dv_}, backend);
    FLASH_CHECK_VALUE(q.is_cpu() || q.size(3) % 8 == 0, "q has headdim ", q.size(3),
                      "; allowed: a multiple of 8 (flash_attn_func pads other sizes)");

    const c10::OptionalDeviceGuard device_guard(q.device());
    const int64_t nheads = q.size(2), nheads_k = k.size(2), group = nheads / nheads_k;
    const bool has_work = q.numel() > 0 && k.numel() > 0;
    const int heads_per_dkv = q.is_cpu() || !has_work ? static_cast<int>(group) : heads_per_thread_block(q, k);
    Gradient dq(output_mask[0], dq_, q, nheads), dk(output_mask[1], dk_, k, nheads / heads_per_dkv),
        dv(output_mask[2], dv_, v, nheads / heads_per_dkv);
    constexpr int64_t kRows = Flash_bwd_params::kRowsRounded;
    const at::Tensor softmax_d =
        at::empty({q.size(0), nheads, (q.size(1) + kRows - 1) / kRows * kRows}, q.options().dtype(lse_dtype(q)));
    if (!has_work) {
        softmax_d.zero_();
        dq.zero();
        dk.zero();
        dv.zero();
    } else {
        const auto readable = [](const at::Tensor &x, const char *name) {
            const at::Tensor resolved = x.resolve_neg();
            return readable_by_kernel(resolved.stride(-1) == 1 ? resolved : resolved.contiguous(), name);
        };
        const at::Tensor kernel_q = readable(q, "q"), kernel_k = readable(k, "k"), kernel_v = readable(v, "v"),
                         kernel_out = readable(out, "out"), kernel_dout = readable(dout, "dout"),
                         lse = softmax_lse.contiguous().resolve_neg(),
                         dlse = dsoftmax_lse.has_value() ? dsoftmax_lse->contiguous().resolve_neg() : at::Tensor();
        const Flash_fwd_params forward =
            set_params_fprop(kernel_q, kernel_k, kernel_v, kernel_out, lse,
                             {softmax_scale, is_causal, window_size_left, window_size_right, softcap});
        Flash_bwd_params params = set_params_dgrad(
            forward, {kernel_dout, dlse, dq.written, dk.written, dv.written, softmax_d}, heads_per_dkv, deterministic);
        const std::optional<Cuda_scratch> scratch =
            q.is_cuda() ? std::optional<Cuda_scratch>(std::in_place, params, q) : std::nullopt;
        run_mha_bwd(params, q.device());
        dq.store();
        dk.store();
        dv.store();
    }
    const auto or_empty = [&](const Gradient &x) {
        return x.result.defined() ? x.result : at::empty({0}, q.options());
    };
    return {or_empty(dq), or_empty(dk), or_empty(dv), softmax_d};
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

// mha_bwd's checks alone, for backends that are not written in C++.
void check_bwd_for(const at::Tensor &dout, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                   const at::Tensor &out, const at::Tensor &softmax_lse, std::optional<at::Tensor> alibi_slopes,
                   double p_dropout, double softmax_scale, bool is_causal, int64_t window_size_left,
                   int64_t window_size_right, double softcap, std::optional<at::Tensor> dsoftmax_lse,
                   const std::string &backend, std::optional<at::Tensor> dq, std::optional<at::Tensor> dk,
                   std::optional<at::Tensor> dv) {
    const std::optional<at::Tensor> out_{out};
    const Fwd_args forward{q,
                           k,
                           v,
                           out_,
                           alibi_slopes,
                           p_dropout,
                           softmax_scale,
                           is_causal,
                           window_size_left,
                           window_size_right,
                           softcap,
                           /*return_softmax=*/false};
    check_bwd({forward, dout, softmax_lse, dsoftmax_lse, dq, dk, dv}, backend);
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

constexpr char kVarlenFwd[] = "varlen_fwd", kVarlenBwd[] = "varlen_bwd", kFwdKvcache[] = "fwd_kvcache";

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
    module.def("bwd", torch::wrap_pybind_function_no_gil(flash::mha_bwd), "Backward: returns [dq, dk, dv, softmax_d]",
               py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("softmax_lse"),
               py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("alibi_slopes"), py::arg("p_dropout"),
               py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
               py::arg("window_size_right"), py::arg("softcap"), py::arg("deterministic"), py::arg("generator"),
               py::arg("rng_state"), py::arg("dsoftmax_lse") = py::none(),
               py::arg("output_mask") = std::array<bool, 3>{true, true, true});
    module.def(flash::kVarlenFwd, torch::wrap_pybind_function(flash::not_implemented<flash::kVarlenFwd>));
    module.def(flash::kVarlenBwd, torch::wrap_pybind_function(flash::not_implemented<flash::kVarlenBwd>));
    module.def(flash::kFwdKvcache, torch::wrap_pybind_function(flash::not_implemented<flash::kFwdKvcache>));
    module.def("check_fwd", torch::wrap_pybind_function(flash::check_fwd_for), "fwd's argument checks alone");
    module.def("check_bwd", torch::wrap_pybind_function(flash::check_bwd_for), "bwd's argument checks alone");
    module.def("cuda_unavailable_reason", &flash::cuda_unavailable_reason, py::arg("major"), py::arg("minor"));
    module.def("build_info", &flash::build_info, "What this extension was built with");
#ifdef FLASH_WITH_CUDA
    module.def("minimal_fwd", torch::wrap_pybind_function(flash::minimal_fwd), py::arg("q"), py::arg("k"), py::arg("v"),
               py::arg("softmax_scale"), py::arg("is_causal"));
#endif
}
