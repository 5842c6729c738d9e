// The custom ops flash_attn_mini::fwd, bwd, packed_fwd, packed_bwd, attn_bias_bwd and fwd_kvcache, as C++ calls through
// the dispatcher. A call is one struct. Its fields, in the order of the schema, come from the lists of options.h.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>

#include "api/options.h"

namespace flash::ops {

using at::Tensor;

// q, k and v in three tensors.
struct SeparateInputs {
    static constexpr char kSchema[] = "Tensor q, Tensor k, Tensor v";
    static constexpr char kMask[] = ", bool[3] output_mask";
    static constexpr char kGradients[] = "(Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)";
    static constexpr size_t kCount = 3;
    using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

    Tensor q, k, v;
    auto tie() const { return std::tie(q, k, v); }
    std::array<Tensor, kCount> tensors() const { return {q, k, v}; }
};

// q, k and v in one tensor [..., 3, nheads, headdim], or q, and k and v in one tensor [..., 2, nheads_k, headdim].
struct PackedInputs {
    static constexpr char kSchema[] = "Tensor? q, Tensor packed";
    static constexpr char kMask[] = ", bool[2] output_mask";
    static constexpr char kGradients[] = "(Tensor dq, Tensor dpacked, Tensor softmax_d)";
    static constexpr size_t kCount = 2;
    using Gradients = std::tuple<Tensor, Tensor, Tensor>;

    Optional q;
    Tensor packed;
    auto tie() const { return std::tie(q, packed); }
    std::array<Tensor, kCount> tensors() const { return {q.value_or(Tensor()), packed}; }
};

template <typename Inputs_, typename Int>
struct FwdCall {
    using Inputs = Inputs_;
    static std::string schema() {
        return std::string(Inputs::kSchema) + FLASH_SEQUENCES(FLASH_SCHEMA) FLASH_OPTIONS(FLASH_SCHEMA) +
               ", Tensor? rng_state";
    }

    Inputs inputs;
    SequencesOf<Int> sequences;
    OptionsOf<Int> options;
    Optional rng_state;  // int64 [2]: used instead of drawing one
    auto tie() const { return std::tuple_cat(inputs.tie(), sequences.tie(), options.tie(), std::tie(rng_state)); }
};

template <typename Inputs_, typename Int>
struct BwdCall {
    using Inputs = Inputs_;
    static std::string schema() {
        return std::string("Tensor dout, ") + Inputs::kSchema +
               ", Tensor out, Tensor softmax_lse, Tensor? dsoftmax_lse" +
               FLASH_SEQUENCES(FLASH_SCHEMA) FLASH_OPTIONS(FLASH_SCHEMA) + ", Tensor? rng_state" + Inputs::kMask;
    }

    Tensor dout;
    Inputs inputs;
    Tensor out, softmax_lse;
    Optional dsoftmax_lse;
    SequencesOf<Int> sequences;
    OptionsOf<Int> options;
    Optional rng_state;  // as the forward returned it
    std::array<bool, Inputs::kCount> output_mask;
    auto tie() const {
        return std::tuple_cat(std::tie(dout), inputs.tie(), std::tie(out, softmax_lse, dsoftmax_lse), sequences.tie(),
                              options.tie(), std::tie(rng_state, output_mask));
    }
};

// The gradient of the option attn_bias, after the backward. Equal lengths.
template <typename Int>
struct BiasBwdCall {
    static std::string schema() {
        return "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor softmax_d" FLASH_OPTIONS(
            FLASH_SCHEMA) ", Tensor? rng_state";
    }

    Tensor dout;
    SeparateInputs inputs;
    Tensor softmax_lse, softmax_d;  // as the forward and the backward returned them
    OptionsOf<Int> options;
    Optional rng_state;  // as the forward returned it
    auto tie() const {
        return std::tuple_cat(std::tie(dout), inputs.tie(), std::tie(softmax_lse, softmax_d), options.tie(),
                              std::tie(rng_state));
    }
};

template <typename Int>
struct KvCacheCall {
    static std::string schema() {
        return "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache" FLASH_KV_CACHE(FLASH_SCHEMA)
            FLASH_OPTIONS(FLASH_SCHEMA);
    }

    Tensor q, k_cache, v_cache;
    KvCacheOptionsOf<Int> cache;
    OptionsOf<Int> options;
    auto tie() const { return std::tuple_cat(std::tie(q, k_cache, v_cache), cache.tie(), options.tie()); }
};

// ---- the ops --------------------------------------------------------------------------------------------------------

// out, softmax_lse, rng_state, which is undefined without dropout, and max_logits, which is undefined unless wanted.
using FwdResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;
// out and softmax_lse.
using TwoTensors = std::tuple<Tensor, Tensor>;

struct Fwd {
    static constexpr char kName[] = "flash_attn_mini::fwd";
    template <typename Int>
    using Call = FwdCall<SeparateInputs, Int>;
    using Result = FwdResult;
};
struct Bwd {
    static constexpr char kName[] = "flash_attn_mini::bwd";
    template <typename Int>
    using Call = BwdCall<SeparateInputs, Int>;
    using Result = SeparateInputs::Gradients;
};
struct PackedFwd {
    static constexpr char kName[] = "flash_attn_mini::packed_fwd";
    template <typename Int>
    using Call = FwdCall<PackedInputs, Int>;
    using Result = FwdResult;
};
struct PackedBwd {
    static constexpr char kName[] = "flash_attn_mini::packed_bwd";
    template <typename Int>
    using Call = BwdCall<PackedInputs, Int>;
    using Result = PackedInputs::Gradients;
};
struct BiasBwd {
    static constexpr char kName[] = "flash_attn_mini::attn_bias_bwd";
    template <typename Int>
    using Call = BiasBwdCall<Int>;
    using Result = Tensor;
};
struct KvCache {
    static constexpr char kName[] = "flash_attn_mini::fwd_kvcache";
    template <typename Int>
    using Call = KvCacheCall<Int>;
    using Result = TwoTensors;
};

// The ops of the Triton backend, which are written in Python (backends/triton/ops.py).
struct TritonFwd {
    static constexpr char kName[] = "flash_attn_mini::triton_fwd";
    template <typename Int>
    using Call = FwdCall<SeparateInputs, Int>;
    using Result = std::tuple<Tensor, Tensor, Tensor>;  // out, softmax_lse, max_logits
};
struct TritonBwd : Bwd {
    static constexpr char kName[] = "flash_attn_mini::triton_bwd";
};
struct TritonBiasBwd : BiasBwd {
    static constexpr char kName[] = "flash_attn_mini::triton_attn_bias_bwd";
};
struct TritonKvCache : KvCache {
    static constexpr char kName[] = "flash_attn_mini::triton_fwd_kvcache";
};

// ---- calls through the dispatcher -----------------------------------------------------------------------------------

// How a field of a call is passed to an op.
template <typename T>
using Passed = std::conditional_t<std::is_same_v<T, Tensor> || std::is_same_v<T, Optional>, const T &, T>;

template <typename Result, typename Tie>
struct SignatureOf;
template <typename Result, typename... Fields>
struct SignatureOf<Result, std::tuple<const Fields &...>> {
    using type = Result(Passed<Fields>...);
};

template <typename Op, typename Int>
using Tie = decltype(std::declval<typename Op::template Call<Int>>().tie());

template <typename Op, typename Int = c10::SymInt>
const auto &handle() {
    using Signature = typename SignatureOf<typename Op::Result, Tie<Op, Int>>::type;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::kName, "").template typed<Signature>();
    return op;
}

template <typename Op, typename Int>
typename Op::Result call(const typename Op::template Call<Int> &arguments) {
    return std::apply([](const auto &...fields) { return handle<Op, Int>().call(fields...); }, arguments.tie());
}

template <typename Op>
typename Op::Result redispatch(c10::DispatchKeySet keys, const typename Op::template Call<c10::SymInt> &arguments) {
    return std::apply([&](const auto &...fields) { return handle<Op>().redispatch(keys, fields...); }, arguments.tie());
}

// A function of a call as kernel of an op: Kernel<Op, Int, function>::run, and run_with_keys for a function that also
// takes the dispatch keys.
template <typename Op, typename Int, auto kFunction, typename = Tie<Op, Int>>
struct Kernel;
template <typename Op, typename Int, auto kFunction, typename... Fields>
struct Kernel<Op, Int, kFunction, std::tuple<const Fields &...>> {
    using Call = typename Op::template Call<Int>;
    static typename Op::Result run(Passed<Fields>... fields) { return kFunction(Call{fields...}); }
    static typename Op::Result run_with_keys(c10::DispatchKeySet keys, Passed<Fields>... fields) {
        return kFunction(keys, Call{fields...});
    }
};

// Defines the ops, unless another build of the extension in this process has defined them.
void register_library();

// The kernel of the op bwd. dq, dk, dv: tensors that receive the gradients, none for new ones.
SeparateInputs::Gradients backward(const BwdCall<SeparateInputs, int64_t> &call, const Optional &dq, const Optional &dk,
                                   const Optional &dv, bool zero_tensors = false);

// q, k and v as separate tensors: views.
SeparateInputs separate(const SeparateInputs &inputs);
SeparateInputs separate(const PackedInputs &inputs);

// The gradient of an option (score_mod.h) for the graph node of a forward: through the dispatcher, or where the graph
// of the gradient itself is recorded, by differentiable operators.
Tensor option_gradient(const std::string &option, const Tensor &x, const Tensor &softmax_lse, const Tensor &softmax_d,
                       const Optional &dsoftmax_lse, const Optional &cu_seqlens_q);

// The gradients of the ops: kernels for the dispatch key Autograd (autograd.cpp).
void register_autograd(torch::Library &library);

}  // namespace flash::ops
