// register_autograd (ops.h): a graph node for the forwards, whose backward calls the backward op through the
// dispatcher, and nodes that refuse what has no derivative.
//
// The nodes are written by hand, because torch::autograd::Function supports neither torch.func nor compiled autograd.
#include "api/ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api/backend_choice.h"
#include "api/score_mod.h"
#include "common/message.h"
#include "flash.h"

namespace flash::ops {
namespace {

using c10::SymInt;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Nodes are held by shared_ptr in older versions of torch, by intrusive_ptr in newer ones.
template <typename T>
auto make_node(std::shared_ptr<Node> *) {
    return std::shared_ptr<T>(new T(), [](T *node) { deleteNode(node); });  // found by argument where it exists
}
template <typename T, typename Pointer>
auto make_node(Pointer *) {
    return c10::make_intrusive<T>();
}
template <typename T>
auto make_node() {
    using Pointer = decltype(std::declval<Node &>().getptr());
    return make_node<T>(static_cast<Pointer *>(nullptr));
}

Optional if_defined(Tensor x) {
    return x.defined() ? Optional(std::move(x)) : std::nullopt;
}

Tensor or_undefined(const Optional &x) {
    return x.value_or(Tensor());
}

using Inputs = c10::SmallVector<Tensor, 8>;  // undefined: not given

// The tensors that a call reads and that may require a gradient, then those among its options.
template <typename Tensors>
Inputs inputs_of(const Tensors &tensors, const OptionsOf<SymInt> &options) {
    Inputs inputs(tensors.begin(), tensors.end());
    for_each_tensor(options, [&](const char *, const Optional &x) { inputs.push_back(or_undefined(x)); });
    return inputs;
}

void refuse_forward_mode(at::TensorList tensors) {
    for (const Tensor &x : tensors) {
        FLASH_CHECK_NOT_IMPLEMENTED(!x.defined() || !x._fw_grad(/*level=*/0).defined(),
                                    "flash_attn_mini: forward-mode automatic differentiation is not supported; "
                                    "backends that have it: none");
    }
}

template <typename Function, typename... Fields>
void for_each(Function function, std::tuple<Fields...> &fields) {
    std::apply([&](auto &...x) { (function(x), ...); }, fields);
}

// ---- fields of a call in a node -------------------------------------------------------------------------------------

template <typename T>
struct Saved {
    using type = T;
    static T save(const T &x) { return x; }
    static T load(const T &x) { return x; }
};
template <>
struct Saved<Tensor> {
    using type = SavedVariable;
    static SavedVariable save(const Tensor &x) { return {x, /*is_output=*/false}; }
    static Tensor load(const SavedVariable &x) { return x.unpack(); }
};
template <>
struct Saved<Optional> {
    using type = SavedVariable;
    static SavedVariable save(const Optional &x) { return {or_undefined(x), /*is_output=*/false}; }
    static Optional load(const SavedVariable &x) { return if_defined(x.unpack()); }
};
template <>
struct Saved<std::optional<c10::string_view>> {
    using type = std::optional<std::string>;
    static type save(const std::optional<c10::string_view> &x) {
        return x.has_value() ? type(std::string(*x)) : std::nullopt;
    }
    static std::optional<c10::string_view> load(const type &x) {
        return x.has_value() ? std::optional<c10::string_view>(*x) : std::nullopt;
    }
};

template <typename Tie>
struct SavedFields;
template <typename... Fields>
struct SavedFields<std::tuple<const Fields &...>> {
    using type = std::tuple<typename Saved<Fields>::type...>;
    static type save(const std::tuple<const Fields &...> &fields) {
        return std::apply([](const Fields &...x) { return type(Saved<Fields>::save(x)...); }, fields);
    }
    template <typename Call>
    static Call load(const type &saved) {
        return std::apply([](const typename Saved<Fields>::type &...x) { return Call{Saved<Fields>::load(x)...}; },
                          saved);
    }
};

// ---- forward --------------------------------------------------------------------------------------------------------

// The gradient of a forward. Its inputs are the gradients of out and softmax_lse.
template <typename Forward, typename Backward>
class FlashAttnBackward : public Node {
    using Call = typename Forward::template Call<SymInt>;
    using Fields = SavedFields<Tie<Forward, SymInt>>;
    using BackwardCall = typename Backward::template Call<SymInt>;
    static constexpr size_t kInputs = Call::Inputs::kCount;  // then the tensors among the options
    static constexpr char kAttnBias[] = "attn_bias";         // its gradient has an op, that of others option_gradient

public:
    void save(const Call &call, const FwdResult &results) {
        fields_ = Fields::save(call.tie());
        out_ = SavedVariable(std::get<0>(results), /*is_output=*/true);
        softmax_lse_ = SavedVariable(std::get<1>(results), /*is_output=*/true);
        rng_state_ = SavedVariable(std::get<2>(results), /*is_output=*/false);
    }

    std::string name() const override { return "FlashAttnBackward"; }

    variable_list apply(variable_list &&gradients) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        variable_list results(num_outputs());
        const Tensor &dout = gradients[0], &dsoftmax_lse = gradients[1];
        if (!dout.defined() && !dsoftmax_lse.defined()) {
            return results;
        }
        const Call call = Fields::template load<Call>(fields_);
        size_t input = kInputs;
        for_each_tensor(call.options, [&](const std::string &name, const Optional &) {
            FLASH_CHECK_NOT_IMPLEMENTED(!task_should_compute_output(input++) || name == kAttnBias || has_gradient(name),
                                        "flash_attn_mini: ", name,
                                        " requires a gradient, which is not supported; backends that have it: none. "
                                        "Allowed: one that requires none, for example ",
                                        name, ".detach()");
        });
        const Tensor out = out_.unpack(this->getptr());
        BackwardCall backward{dout.defined() ? dout : at::zeros_like(out),
                              call.inputs,
                              out,
                              softmax_lse_.unpack(this->getptr()),
                              if_defined(dsoftmax_lse),
                              call.sequences,
                              call.options,
                              if_defined(rng_state_.unpack()),
                              {}};
        for (size_t i = 0; i < kInputs; ++i) {
            backward.output_mask[i] = task_should_compute_output(i);
        }
        const auto computed = ops::call<Backward, SymInt>(backward);
        take(computed, backward.output_mask, results, std::make_index_sequence<kInputs>());
        input = kInputs;
        for_each_tensor(call.options, [&](const std::string &name, const Optional &x) {
            if (task_should_compute_output(input) && name == kAttnBias) {
                results[input] =
                    ops::call<BiasBwd, SymInt>({backward.dout, separate(call.inputs), backward.softmax_lse,
                                                std::get<kInputs>(computed), call.options, backward.rng_state});
            } else if (task_should_compute_output(input)) {
                results[input] = option_gradient(name, *x, backward.softmax_lse, std::get<kInputs>(computed),
                                                 backward.dsoftmax_lse, call.sequences.cu_seqlens_q);
            }
            ++input;
        });
        return results;
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for_each_variable([](SavedVariable &x) { x.reset_data(); });
    }

    // Compiled autograd. Newer versions of torch call the const one.
    using Arguments = torch::dynamo::autograd::CompiledNodeArgs;
    void compiled_args(Arguments &arguments) { std::as_const(*this).compiled_args(arguments); }
    void compiled_args(Arguments &arguments) const {
        std::apply([&](const auto &...x) { (collect(arguments, x), ...); }, fields_);
        arguments.collect(out_, /*is_output=*/true);
        arguments.collect(softmax_lse_, /*is_output=*/true);
        arguments.collect(rng_state_, /*is_output=*/false);
    }
    variable_list apply_with_saved(const variable_list &gradients,
                                   torch::dynamo::autograd::SwapSavedVariables &swap) override {
        for_each_variable([&](SavedVariable &x) { swap.before(x); });
        for_each_symbol([&](SymInt &x) { swap.before(x); });
        variable_list results = apply(variable_list(gradients));
        for_each_variable([&](SavedVariable &x) { swap.after(x); });
        for_each_symbol([&](SymInt &x) { swap.after(x); });
        return results;
    }

private:
    template <size_t... kIndices, typename Computed>
    static void take(const Computed &computed, const std::array<bool, kInputs> &mask, variable_list &results,
                     std::index_sequence<kIndices...>) {
        ((results[kIndices] = mask[kIndices] ? std::get<kIndices>(computed) : Tensor()), ...);
    }

    template <typename T>
    static void collect(Arguments &arguments, const T &x) {
        if constexpr (std::is_same_v<T, SavedVariable>) {
            arguments.collect(x, /*is_output=*/false);
        } else if constexpr (std::is_same_v<T, std::optional<std::string>>) {
            arguments.collect(x.value_or(""));
        } else {
            arguments.collect(x);
        }
    }

    template <typename Function>
    void for_each_variable(Function function) {
        for_each(
            [&](auto &x) {
                if constexpr (std::is_same_v<std::decay_t<decltype(x)>, SavedVariable>) function(x);
            },
            fields_);
        function(out_);
        function(softmax_lse_);
        function(rng_state_);
    }
    template <typename Function>
    void for_each_symbol(Function function) {
        for_each(
            [&](auto &x) {
                if constexpr (std::is_same_v<std::decay_t<decltype(x)>, SymInt>) function(x);
            },
            fields_);
    }

    typename Fields::type fields_;
    SavedVariable out_, softmax_lse_, rng_state_;
};

template <typename Forward, typename Backward>
FwdResult forward(c10::DispatchKeySet keys, typename Forward::template Call<SymInt> call) {
    const Inputs inputs = inputs_of(call.inputs.tensors(), call.options);
    refuse_forward_mode(inputs);
    const bool needs_grad = torch::autograd::compute_requires_grad(at::TensorList(inputs));
    if (needs_grad) {
        const auto tensors = call.inputs.tensors();  // packed: the first may be undefined; all have one head dim
        const Tensor &first = tensors[0].defined() ? tensors[0] : tensors.back();
        call.options.backend = backend_of_gradient(call.options.backend, first, tensors.back());
    }
    FwdResult results = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return redispatch<Forward>(keys & c10::after_autograd_keyset, call);
    }();
    if (needs_grad) {
        const auto node = make_node<FlashAttnBackward<Forward, Backward>>();
        node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
        torch::autograd::set_history(std::get<0>(results), node);
        torch::autograd::set_history(std::get<1>(results), node);
        node->save(call, results);
    }
    return results;
}

// ---- what has no derivative -----------------------------------------------------------------------------------------

struct FlashAttnDoubleBackward : Node {
    std::string name() const override { return "FlashAttnDoubleBackward"; }
    variable_list apply(variable_list &&) override {
        FLASH_CHECK_NOT_IMPLEMENTED(
            false,
            "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that "
            "have it: none. Where second derivatives are needed, compute attention with PyTorch's own operators "
            "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)");
    }
};

// Runs an op that has no derivative. inputs: the tensors that it reads and that may require a gradient.
template <typename Op>
typename Op::Result without_derivative(c10::DispatchKeySet keys, const typename Op::template Call<SymInt> &call,
                                       const Inputs &inputs) {
    refuse_forward_mode(inputs);
    auto results = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return redispatch<Op>(keys & c10::after_autograd_keyset, call);
    }();
    if (torch::autograd::compute_requires_grad(at::TensorList(inputs))) {
        const auto node = make_node<FlashAttnDoubleBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
        const auto record = [&](Tensor &x) { x.defined() ? torch::autograd::set_history(x, node) : void(); };
        if constexpr (std::is_same_v<typename Op::Result, Tensor>) {
            record(results);
        } else {
            for_each(record, results);
        }
    }
    return results;
}

template <typename Backward>
typename Backward::Result backward(c10::DispatchKeySet keys, const typename Backward::template Call<SymInt> &call) {
    Inputs inputs = inputs_of(call.inputs.tensors(), call.options);
    inputs.append({call.dout, call.out, call.softmax_lse, or_undefined(call.dsoftmax_lse)});
    return without_derivative<Backward>(keys, call, inputs);
}

Tensor backward_of_attn_bias(c10::DispatchKeySet keys, const BiasBwd::Call<SymInt> &call) {
    Inputs inputs = inputs_of(call.inputs.tensors(), call.options);
    inputs.append({call.dout, call.softmax_lse, call.softmax_d});
    return without_derivative<BiasBwd>(keys, call, inputs);
}

// The backward of a call with a KV cache. It calls an op that raises: a compiled program may contain the backward, and
// raises when it runs, not when it is traced.
struct FlashAttnKvCacheBackward : Node {
    std::vector<std::vector<SymInt>> sizes;  // of the inputs with a gradient

    std::string name() const override { return "FlashAttnKvCacheBackward"; }
    variable_list apply(variable_list &&gradients) override {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("flash_attn_mini::fwd_kvcache_backward", "")
                                   .typed<Tensor(const Tensor &, c10::SymIntArrayRef)>();
        variable_list results(sizes.size());
        const Tensor &gradient = gradients[0].defined() ? gradients[0] : gradients[1];
        for (size_t i = 0; gradient.defined() && i < sizes.size(); ++i) {
            if (task_should_compute_output(i)) {
                results[i] = op.call(gradient, sizes[i]);
            }
        }
        return results;
    }
};

TwoTensors forward_kvcache(c10::DispatchKeySet keys, const KvCache::Call<SymInt> &call) {
    for (const auto &[name, cache] : {std::pair{"k_cache", call.k_cache}, std::pair{"v_cache", call.v_cache}}) {
        FLASH_CHECK_VALUE(!cache.requires_grad(), name,
                          " requires a gradient; allowed: a KV cache that requires none, for example ", name,
                          ".detach()");
    }
    const Inputs inputs =
        inputs_of(std::array{call.q, or_undefined(call.cache.k), or_undefined(call.cache.v),
                             or_undefined(call.cache.rotary_cos), or_undefined(call.cache.rotary_sin)},
                  call.options);
    refuse_forward_mode(inputs);
    TwoTensors results = [&] {
        const at::AutoDispatchBelowAutograd guard;
        return redispatch<KvCache>(keys & c10::after_autograd_keyset, call);
    }();
    if (torch::autograd::compute_requires_grad(at::TensorList(inputs))) {
        const auto node = make_node<FlashAttnKvCacheBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
        for (const Tensor &x : inputs) {
            node->sizes.push_back(x.defined() ? x.sym_sizes().vec() : std::vector<SymInt>());
        }
        torch::autograd::set_history(std::get<0>(results), node);
        torch::autograd::set_history(std::get<1>(results), node);
    }
    return results;
}

// Below Autograd: lets autograd notice that the caches are written. Tensors made in inference mode have no version.
TwoTensors mark_as_written(c10::DispatchKeySet keys, const KvCache::Call<SymInt> &call) {
    const TwoTensors results = redispatch<KvCache>(keys & c10::after_ADInplaceOrView_keyset, call);
    for (const Tensor &cache : {call.k_cache, call.v_cache}) {
        if (call.cache.k.has_value() && !cache.is_inference()) {
            cache.unsafeGetTensorImpl()->bump_version();
        }
    }
    return results;
}

}  // namespace

void register_autograd(torch::Library &library) {
    constexpr auto kAutograd = c10::DispatchKey::Autograd;
    library.impl("fwd", kAutograd, &Kernel<Fwd, SymInt, forward<Fwd, Bwd>>::run_with_keys);
    library.impl("bwd", kAutograd, &Kernel<Bwd, SymInt, backward<Bwd>>::run_with_keys);
    library.impl("packed_fwd", kAutograd, &Kernel<PackedFwd, SymInt, forward<PackedFwd, PackedBwd>>::run_with_keys);
    library.impl("packed_bwd", kAutograd, &Kernel<PackedBwd, SymInt, backward<PackedBwd>>::run_with_keys);
    library.impl("attn_bias_bwd", kAutograd, &Kernel<BiasBwd, SymInt, backward_of_attn_bias>::run_with_keys);
    library.impl("fwd_kvcache", kAutograd, &Kernel<KvCache, SymInt, forward_kvcache>::run_with_keys);
    library.impl("fwd_kvcache", c10::DispatchKey::ADInplaceOrView,
                 &Kernel<KvCache, SymInt, mark_as_written>::run_with_keys);
}

}  // namespace flash::ops
