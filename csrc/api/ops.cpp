// The library of custom ops: schemas, the kernels for CPU and CUDA tensors, autocast, and dropout under torch.vmap.
// autograd.cpp has their gradients, flash_attn_mini/ops.py their fake implementations, flash_attn_mini/vmap.py their
// rules for vmap.
#include "api/ops.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/rand.h>
#include <torch/library.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "api/allocation.h"
#include "api/attn_bias.h"
#include "api/backend_choice.h"
#include "api/checks.h"
#include "api/flash_api.h"
#include "api/latent_cache.h"
#include "api/score_mod.h"
#include "common/message.h"
#include "common/trace.h"

namespace flash::ops {

constexpr int64_t kPackedDim =
    -3;  // of q, k, v in [..., 3, nheads, headdim], and of k, v in [..., 2, nheads_k, headdim]

SeparateInputs separate(const SeparateInputs &inputs) {
    return inputs;
}

SeparateInputs separate(const PackedInputs &inputs) {
    const std::vector<Tensor> parts = inputs.packed.unbind(kPackedDim);
    return inputs.q.has_value() ? SeparateInputs{*inputs.q, parts[0], parts[1]}
                                : SeparateInputs{parts[0], parts[1], parts[2]};
}

namespace {

using c10::SymInt;

// "float16[2,33,4,64]@cpu", as flash_attn_mini/tracing.py writes it.
std::string text_of(const Tensor &x) {
    const auto dtype = x.scalar_type();
    std::string text = dtype == at::kHalf       ? "float16"
                       : dtype == at::kBFloat16 ? "bfloat16"
                       : dtype == at::kFloat    ? "float32"
                       : dtype == at::kDouble   ? "float64"
                                                : c10::toString(dtype);
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
        text += (dim == 0 ? "[" : ",") + std::to_string(x.size(dim));
    }
    return text + "]@" + x.device().str();
}

void trace_op(const char *name, Backend backend, std::initializer_list<std::pair<const char *, Tensor>> tensors,
              const std::string &more = "") {
    if (!trace_enabled()) {
        return;
    }
    std::string fields;
    for (const auto &[field, x] : tensors) {
        fields += std::string(field) + "=" + text_of(x) + " ";
    }
    trace(name, "%sbackend=%s%s", fields.c_str(), name_of(backend), more.c_str());
}

// ---- the kernels for CPU and CUDA tensors ---------------------------------------------------------------------------

FwdResult forward(const FwdCall<SeparateInputs, int64_t> &call) {
    const auto &[q, k, v] = call.inputs;
    const Backend backend = choose_backend(call.options.backend, q, v);
    trace_op(Fwd::kName, backend, {{"q", q}, {"k", k}, {"v", v}});
    const FwdArgs args{q, k, v, std::nullopt, call.sequences, call.options};
    if (backend != Backend::triton) {
        const FwdResults results = mha_fwd(args, call.rng_state);
        return {results.out, results.softmax_lse, results.rng_state, results.max_logits};
    }
    check_fwd(args, name_of(backend));
    FwdCall<SeparateInputs, int64_t> triton = call;
    Tensor rng_state;
    if (call.options.dropout_p > 0.0) {
        rng_state = rng_state_of_call(q, call.rng_state);
        triton.rng_state = rng_state;
    }
    auto [out, softmax_lse, max_logits] = ops::call<TritonFwd, int64_t>(triton);
    return {std::move(out), std::move(softmax_lse), std::move(rng_state), std::move(max_logits)};
}

FwdResult packed_forward(const FwdCall<PackedInputs, int64_t> &call) {
    return forward({separate(call.inputs), call.sequences, call.options, call.rng_state});
}

SeparateInputs::Gradients separate_backward(const BwdCall<SeparateInputs, int64_t> &call) {
    return backward(call, std::nullopt, std::nullopt, std::nullopt);
}

// The kernels write to views of the packed gradient.
PackedInputs::Gradients packed_backward(const BwdCall<PackedInputs, int64_t> &call) {
    const auto &[q, packed] = call.inputs;
    const auto [needs_q, needs_packed] = call.output_mask;
    Tensor dpacked;
    std::vector<Optional> parts(3);  // of dq, dk and dv, as far as they are in dpacked
    if (needs_packed) {
        dpacked = empty_contiguous_last(packed);
        std::vector<Tensor> views = dpacked.unbind(kPackedDim);
        std::move(views.begin(), views.end(), parts.begin() + (q.has_value() ? 1 : 0));
    }
    const auto [dq, dk, dv, softmax_d] =
        backward({call.dout,
                  separate(call.inputs),
                  call.out,
                  call.softmax_lse,
                  call.dsoftmax_lse,
                  call.sequences,
                  call.options,
                  call.rng_state,
                  {q.has_value() ? needs_q : needs_packed, needs_packed, needs_packed}},
                 parts[0], parts[1], parts[2]);
    return {q.has_value() ? dq : Tensor(), dpacked, softmax_d};
}

Tensor attn_bias_backward(const BiasBwdCall<int64_t> &call) {
    const auto &[q, k, v] = call.inputs;
    const Backend backend = choose_backend(call.options.backend, q, v);
    trace_op(BiasBwd::kName, backend, {{"dout", call.dout}, {"q", q}, {"k", k}});
    const BiasBwdArgs args{
        {q, k, v, std::nullopt, {}, call.options}, call.dout, call.softmax_lse, call.softmax_d, call.rng_state};
    if (backend != Backend::triton) {
        return mha_attn_bias_bwd(args);
    }
    check_attn_bias_bwd(args, name_of(backend));
    return ops::call<TritonBiasBwd, int64_t>(call);
}

// Which kernels choose_backend considers for a call. Traces why a call of a latent cache takes another kernel.
CallOf kind_of_cache(const KvCacheArgs &args) {
    if (!has_latent_head_dims(args)) {
        return CallOf::kvcache;
    }
    const std::string reason = reason_against_latent(args);
    if (!reason.empty() && trace_enabled()) {
        trace("kind_of_cache", "the kernel of a latent cache does not take the call: %s", reason.c_str());
    }
    return reason.empty() ? CallOf::latent_kvcache : CallOf::kvcache;
}

TwoTensors forward_kvcache(const KvCacheCall<int64_t> &call) {
    const KvCacheArgs args{call.cache, call.q, call.k_cache, call.v_cache, std::nullopt, call.options};
    const Backend backend = choose_backend(call.options.backend, call.q, call.v_cache, kind_of_cache(args));
    trace_op(KvCache::kName, backend, {{"q", call.q}, {"k_cache", call.k_cache}, {"v_cache", call.v_cache}});
    if (backend != Backend::triton) {
        return mha_fwd_kvcache(args);
    }
    check_kvcache(args, name_of(backend));
    return ops::call<TritonKvCache, int64_t>(call);
}

Tensor forward_kvcache_backward(const Tensor &, at::IntArrayRef) {
    FLASH_CHECK_NOT_IMPLEMENTED(false,
                                "flash_attn_mini: no backend implements the backward of flash_attn_with_kvcache; "
                                "backends that have it: none. Available: torch.no_grad(), or flash_attn_func for "
                                "training");
}

// The gradient of an option, computed by kFunction.
constexpr char kOptionGradient[] = "flash_attn_mini::option_gradient";
using OptionGradient = Tensor(c10::string_view, const Tensor &, const Tensor &, const Tensor &, const Optional &,
                              const Optional &);
template <auto kFunction>
Tensor option_gradient_by(c10::string_view option, const Tensor &x, const Tensor &softmax_lse, const Tensor &softmax_d,
                          const Optional &dsoftmax_lse, const Optional &cu_seqlens_q) {
    return kFunction(std::string(option), x, {softmax_lse, softmax_d, dsoftmax_lse, cu_seqlens_q});
}

// ---- autocast -------------------------------------------------------------------------------------------------------

// Casts as PyTorch casts the inputs of scaled_dot_product_attention.
template <typename Op, at::DeviceType kDevice>
FwdResult autocast_forward(typename Op::template Call<SymInt> call) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kDevice == at::kCPU ? c10::DispatchKey::AutocastCPU
                                                                       : c10::DispatchKey::AutocastCUDA);
    const auto cast = [](auto &x) {
        x = at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), x, kDevice);
    };
    if constexpr (std::is_same_v<typename Op::template Call<SymInt>::Inputs, SeparateInputs>) {
        cast(call.inputs.q);
        cast(call.inputs.k);
        cast(call.inputs.v);
    } else {
        cast(call.inputs.q);
        cast(call.inputs.packed);
    }
    if (call.options.attn_bias.has_value() && call.options.attn_bias->scalar_type() != at::kFloat) {
        cast(*call.options.attn_bias);
    }
    return ops::call<Op, SymInt>(call);
}

// ---- dropout under torch.vmap ---------------------------------------------------------------------------------------

// A random tensor without elements takes no random numbers. PyTorch's rule for it raises with randomness='error', and
// gives one tensor for each sample with 'different', so that the vmap rule of the op runs even if q, k and v are the
// same for all samples. An rng_state without elements means that the op draws one.
template <typename Op>
FwdResult vmap_mode_forward(typename Op::template Call<SymInt> call) {
    if (call.options.dropout_p > 0.0 && !call.rng_state.has_value()) {
        const Tensor &q = call.inputs.tensors().back();
        try {
            call.rng_state = at::rand({0}, q.options().dtype(at::kFloat));
        } catch (const c10::Error &) {
            FLASH_CHECK(false,
                        "flash_attn_mini: attention with dropout is called in torch.vmap with "
                        "randomness='error', its default; allowed: torch.vmap(..., randomness='different') or "
                        "'same', or dropout_p=0");
        }
    }
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchVmapMode);
    return ops::call<Op, SymInt>(call);
}

template <typename Op>
void define(torch::Library &library, const char *returns, const std::vector<at::Tag> &tags) {
    const std::string name = std::string(Op::kName).substr(sizeof("flash_attn_mini::") - 1);
    library.def((name + "(" + Op::template Call<SymInt>::schema() + ") -> " + returns).c_str(), tags);
}

template <typename Op, auto kFunction>
void implement(torch::Library &library) {
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
        library.impl(std::string(Op::kName).c_str(), key, &Kernel<Op, int64_t, kFunction>::run);
    }
}

// The kernels read lazily negated views themselves.
void fall_through_negation(torch::Library &library, const char *name) {
    library.impl(name, torch::dispatch(c10::DispatchKey::Negative, torch::CppFunction::makeFallthrough()));
}

template <typename Op>
void implement_modes(torch::Library &library) {
    library.impl(Op::kName, c10::DispatchKey::AutocastCPU, &Kernel<Op, SymInt, autocast_forward<Op, at::kCPU>>::run);
    library.impl(Op::kName, c10::DispatchKey::AutocastCUDA, &Kernel<Op, SymInt, autocast_forward<Op, at::kCUDA>>::run);
    library.impl(Op::kName, c10::DispatchKey::FuncTorchVmapMode, &Kernel<Op, SymInt, vmap_mode_forward<Op>>::run);
}

void define_and_implement(torch::Library &library) {
    // The mask of dropout comes from torch's generators: no two calls are the same call.
    const std::vector<at::Tag> forward_tags{at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded},
        tags{at::Tag::pt2_compliant_tag};
    constexpr char kForward[] = "(Tensor out, Tensor softmax_lse, Tensor rng_state, Tensor max_logits)";
    define<Fwd>(library, kForward, forward_tags);
    define<Bwd>(library, SeparateInputs::kGradients, tags);
    define<PackedFwd>(library, kForward, forward_tags);
    define<PackedBwd>(library, PackedInputs::kGradients, tags);
    define<BiasBwd>(library, "Tensor", tags);
    define<KvCache>(library, "(Tensor out, Tensor softmax_lse)", tags);
    library.def("fwd_kvcache_backward(Tensor dout, SymInt[] size) -> Tensor", tags);
    library.def(
        "option_gradient(str option, Tensor x, Tensor softmax_lse, Tensor softmax_d, Tensor? dsoftmax_lse, "
        "Tensor? cu_seqlens_q) -> Tensor",
        tags);

    implement<Fwd, forward>(library);
    implement<Bwd, separate_backward>(library);
    implement<PackedFwd, packed_forward>(library);
    implement<PackedBwd, packed_backward>(library);
    implement<BiasBwd, attn_bias_backward>(library);
    implement<KvCache, forward_kvcache>(library);
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
        library.impl("fwd_kvcache_backward", key, forward_kvcache_backward);
    }
    for (const auto key :
         {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::FuncTorchBatchedDecomposition}) {
        library.impl(kOptionGradient, key, option_gradient_by<flash::option_gradient>);
    }
    library.impl(kOptionGradient, c10::DispatchKey::CUDA, option_gradient_by<option_gradient_cuda>);
    for (const char *name :
         {Fwd::kName, Bwd::kName, PackedFwd::kName, PackedBwd::kName, BiasBwd::kName, KvCache::kName}) {
        fall_through_negation(library, name);
    }
    implement_modes<Fwd>(library);
    implement_modes<PackedFwd>(library);
    register_autograd(library);
}

}  // namespace

SeparateInputs::Gradients backward(const BwdCall<SeparateInputs, int64_t> &call, const Optional &dq, const Optional &dk,
                                   const Optional &dv, bool zero_tensors) {
    const auto &[q, k, v] = call.inputs;
    const Backend backend = choose_backend(call.options.backend, q, v);
    const auto wanted = [&](int i) { return call.output_mask[i] ? "True" : "False"; };
    trace_op(Bwd::kName, backend, {{"dout", call.dout}, {"q", q}, {"k", k}},
             message(" output_mask=(", wanted(0), ",", wanted(1), ",", wanted(2), ")"));
    FLASH_CHECK_NOT_IMPLEMENTED(
        !call.sequences.block_table.has_value(),
        "flash_attn_mini: no backend implements gradients of paged keys and values (the backward of a call with "
        "block_table); backends that have it: none. Available: torch.no_grad(), or k and v without pages");
    Options options = call.options;
    options.deterministic = options.deterministic || at::globalContext().deterministicAlgorithms();
    const BwdArgs args{{q, k, v, call.out, call.sequences, options},
                       call.dout,
                       call.softmax_lse,
                       call.dsoftmax_lse,
                       dq,
                       dk,
                       dv,
                       call.rng_state};
    if (backend != Backend::triton) {
        const BwdResults results = mha_bwd(args, call.output_mask, zero_tensors);
        return {results.dq, results.dk, results.dv, results.softmax_d};
    }
    check_bwd(args, name_of(backend));
    BwdCall<SeparateInputs, int64_t> triton = call;
    triton.options = options;
    auto results = ops::call<TritonBwd, int64_t>(triton);
    const auto store = [](Tensor &gradient, const Optional &given) {
        if (gradient.defined() && given.has_value()) {
            gradient = given->copy_(gradient);
        }
    };
    store(std::get<0>(results), dq);
    store(std::get<1>(results), dk);
    store(std::get<2>(results), dv);
    return results;
}

Tensor option_gradient(const std::string &option, const Tensor &x, const Tensor &softmax_lse, const Tensor &softmax_d,
                       const Optional &dsoftmax_lse, const Optional &cu_seqlens_q) {
    if (at::GradMode::is_enabled()) {
        return flash::option_gradient(option, x, {softmax_lse, softmax_d, dsoftmax_lse, cu_seqlens_q});
    }
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kOptionGradient, "").typed<OptionGradient>();
    return op.call(option, x, softmax_lse, softmax_d, dsoftmax_lse, cu_seqlens_q);
}

void register_library() {
    if (!c10::Dispatcher::singleton().findSchema({Fwd::kName, ""}).has_value()) {
        static torch::Library library = MAKE_TORCH_LIBRARY(flash_attn_mini);
        define_and_implement(library);
    }
}

}  // namespace flash::ops
