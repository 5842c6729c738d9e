"""The custom op of the KV cache as PyTorch's tools see it: opcheck, fake results, compilers, autograd, tracing."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from flash_attn_mini import flash_attn_with_kvcache, use_backend
from flash_attn_mini.options import KvCache, Options

from ..support.kvcache_cases import BY_NAME, CacheCall, make_call
from ..support.kvcache_checks import bits, copied, run
from ..support.op_calls import FWD_KVCACHE, argument_names, assert_fake_is_like_real, kvcache_arguments, result_names

NAMES = ["decode", "read_only", "no_keys", "batch_idx_leftpad", "pages_7", "headdim_33", "rotary_neox", "alibi_batch"]
EVERY = [*NAMES, "int_length", "full", "layout_bhsd", "layout_padded_dim", "layout_misaligned"]


def op_arguments(call: CacheCall, backend: str, dense: bool = False) -> tuple[Any, ...]:
    """The arguments of the op; ``dense``: with caches of their own memory, as opcheck needs them."""
    given, case = call.definition, call.case
    lengths = given["cache_seqlens"]
    length = -1 if isinstance(lengths, Tensor) else case.keys if lengths is None else lengths
    q, k_cache, v_cache, k, v = (x if x is None or not dense else x.clone() for x in call.tensors)
    named = ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes")
    of_case = ("causal", "window_size", "softcap", "rotary_interleaved", "num_splits", "split_keys")
    return kvcache_arguments(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
        cache_seqlen=length,
        **{name: given[name] for name in named},
        **{name: getattr(case, name) for name in of_case},
        backend=backend,
    )


def without_poison(call: CacheCall) -> CacheCall:
    """opcheck compares results of repeated calls, and NaN with itself."""
    for cache in (call.k_cache, call.v_cache):
        cache.nan_to_num_()
    return call


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, backend: str, device: str, seed: int) -> None:
    call = without_poison(make_call(BY_NAME[name], torch.float16, device, seed))
    torch.library.opcheck(FWD_KVCACHE, op_arguments(call, backend, dense=True))


@pytest.mark.parametrize("name", EVERY)
def test_fake_results_look_like_real_ones(name: str, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    call = make_call(BY_NAME[name], dtype, device, seed)
    assert_fake_is_like_real(FWD_KVCACHE, op_arguments(call, backend))


def test_operator_signature_is_stable() -> None:
    """Exported programs carry this schema: a change of it breaks them."""
    assert KvCache._fields == (
        "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_seqlen", "cache_batch_idx", "cache_leftpad",
        "block_table", "rotary_interleaved", "num_splits", "split_keys",
    )  # fmt: skip
    assert argument_names(FWD_KVCACHE) == ["q", "k_cache", "v_cache", *KvCache._fields, *Options._fields]
    assert result_names(FWD_KVCACHE) == ["out", "softmax_lse"]
    arguments = FWD_KVCACHE._schema.arguments
    assert not any(argument.has_default_value() for argument in arguments)
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]


def test_the_signature_is_the_official_one() -> None:
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    required = inspect.Parameter.empty
    assert list(positional.items()) == [
        ("q", required), ("k_cache", required), ("v_cache", required), ("k", None), ("v", None), ("rotary_cos", None),
        ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None), ("cache_leftpad", None),
        ("block_table", None), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
        ("rotary_interleaved", True), ("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False),
    ]  # fmt: skip
    assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["split_keys", "learnable_sink", "backend"]


# ---- compilers ------------------------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """A step of generation: operators before and after, and uses of the written cache."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Any:
        out, lse = flash_attn_with_kvcache(
            *(q * 2, k_cache, v_cache, k + 1, v),
            cache_seqlens=lengths,
            causal=True,
            return_softmax_lse=True,
            backend=self.backend,
        )
        return out + 1, lse.exp(), k_cache.amax(dim=(1, 3)), v_cache * 2


def step_inputs(
    batch: int, seqlen: int, capacity: int, device: str, requires_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).half()

    q, k, v = tensor(batch, seqlen, 4, 40), tensor(batch, seqlen, 2, 40), tensor(batch, seqlen, 2, 40)
    k_cache, v_cache = tensor(batch, capacity, 2, 40), tensor(batch, capacity, 2, 40)
    return q.requires_grad_(requires_grad), k_cache, v_cache, k.requires_grad_(requires_grad), v


def assert_same_step(first: Any, second: Any, inputs: tuple[Tensor, ...], lengths: Any) -> None:
    """Both steps give the same results, and leave the same caches."""
    q, k_cache, v_cache, k, v = inputs
    results = []
    for step in (first, second):
        caches = [k_cache.clone(), v_cache.clone()]
        results.append([*step(q, *caches, k, v, lengths), *caches])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(results[0][-1], v_cache), "nothing was appended"


LENGTHS = (3, 7, 11, "tensor")


def lengths_of(length: Any, batch: int, device: str) -> Any:
    if length != "tensor":
        return length
    return torch.arange(batch, device=device, dtype=torch.int32) * 3


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_graph_breaks(dynamic: bool, backend: str, device: str) -> None:
    torch._dynamo.reset()
    step = Step(backend)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in LENGTHS:
        for sizes in ((2, 1, 30), (3, 4, 41)) if dynamic else ((2, 1, 30),):
            assert_same_step(compiled, step, step_inputs(*sizes, device), lengths_of(length, sizes[0], device))


@pytest.mark.slow
def test_inductor_writes_to_the_caches(backend: str, device: str) -> None:
    torch._dynamo.reset()
    step = Step(backend)
    compiled = torch.compile(step, fullgraph=True)
    q, k_cache, v_cache, k, v = step_inputs(2, 1, 30, device)
    caches = [k_cache.clone(), v_cache.clone()]
    got = compiled(q, k_cache, v_cache, k, v, lengths_of("tensor", 2, device))
    expected = step(q, *caches, k, v, lengths_of("tensor", 2, device))
    for a, b in zip((*got, k_cache, v_cache), (*expected, *caches), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_an_int_length_does_not_recompile(backend: str, device: str) -> None:
    """Each step of a generation has another length."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Step(backend), fullgraph=True, dynamic=True, backend=counter)
    inputs = step_inputs(3, 5, 41, device)
    for length in range(2, 20):
        compiled(*inputs, length)
        if length == 3:
            compiled_once = counter.frame_count
    assert counter.frame_count == compiled_once


def test_compiled_call_obeys_use_backend(backend: str, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Step(None), fullgraph=True, backend="aot_eager")  # type: ignore[arg-type]
    with use_backend(backend):
        assert_same_step(compiled, Step(backend), step_inputs(2, 1, 30, device), 4)
    if device == "cpu":
        with use_backend("cuda"), pytest.raises(RuntimeError, match="'cuda'"):
            compiled(*step_inputs(2, 1, 30, device), 4)


def test_export(backend: str, device: str) -> None:
    step = Step(backend)
    q, k_cache, v_cache, k, v = step_inputs(2, 1, 30, device)
    lengths = lengths_of("tensor", 2, device)
    program = torch.export.export(step, (q, k_cache, v_cache, k, v, lengths))
    assert FWD_KVCACHE in [node.target for node in program.graph.nodes]
    assert_same_step(program.module(), step, (q, k_cache, v_cache, k, v), lengths)


# ---- autograd -------------------------------------------------------------------------------------------------------

NO_BACKWARD = "backward of flash_attn_with_kvcache.*backends that have it: none"


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_inputs_may_require_a_gradient_and_the_backward_raises(
    compiled: bool, which: str, backend: str, device: str
) -> None:
    torch._dynamo.reset()
    step: Any = Step(backend)
    call = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    inputs = dict(zip(("q", "k_cache", "v_cache", "k", "v"), step_inputs(2, 1, 30, device), strict=True))
    plain = [x.clone() for x in inputs.values()]
    expected = step(*plain, 4)
    inputs[which].requires_grad_()
    out, lse, *_ = call(*inputs.values(), 4)
    assert torch.equal(out, expected[0])
    assert torch.equal(inputs["k_cache"], plain[1])
    assert not inputs["k_cache"].requires_grad
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match=NO_BACKWARD):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not call(*inputs.values(), 4)[0].requires_grad


@pytest.mark.parametrize("through_op", [False, True], ids=["direct", "dispatcher"])
def test_autograd_sees_that_the_caches_are_written(
    through_op: bool, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    """A gradient that needs the old values of a cache is an error; a call that only reads it changes nothing."""

    def call(name: str) -> Tensor:
        made = make_call(BY_NAME[name], dtype, device, seed)
        weight = torch.ones((), device=device, dtype=dtype, requires_grad=True)
        product = made.v_cache * weight
        if through_op:
            FWD_KVCACHE(*op_arguments(made, backend))
        else:
            run(made, backend)
        return product.sum()

    call("read_only").backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        call("decode").backward()


def test_caches_of_inference_mode_are_taken(backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    expected = run(make_call(BY_NAME["decode"], dtype, device, seed), backend)
    with torch.inference_mode():
        call = make_call(BY_NAME["decode"], dtype, device, seed)
        assert torch.equal(run(call, backend)[0], expected[0])
    assert call.k_cache.is_inference()
    assert torch.equal(run(call, backend)[0], expected[0])


def test_forward_mode_differentiation_raises(backend: str, device: str) -> None:
    q, k_cache, v_cache, _, _ = step_inputs(1, 1, 5, device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_attn_with_kvcache(dual, k_cache, v_cache, backend=backend)


# ---- what a call accepts --------------------------------------------------------------------------------------------

ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "length_numpy": ({"cache_seqlens": 7}, {"cache_seqlens": np.int64(7)}),
    "length_0d": ({"cache_seqlens": 7}, {"cache_seqlens": torch.tensor(7)}),
    "length_0d_int32": ({"cache_seqlens": 7}, {"cache_seqlens": torch.tensor(7, dtype=torch.int32)}),
    "window_list": ({"window_size": (4, 2)}, {"window_size": [4, 2]}),
    "window_array": ({"window_size": (4, 2)}, {"window_size": np.array([4, 2])}),
    "window_tensor": ({"window_size": (4, 2)}, {"window_size": torch.tensor([4, 2])}),
    "scale": ({"softmax_scale": 0.25}, {"softmax_scale": np.float32(0.25)}),
    "softcap": ({"softcap": 2.0}, {"softcap": torch.tensor(2)}),
    "causal": ({"causal": True}, {"causal": np.bool_(True)}),
    "interleaved": ({"rotary_interleaved": False}, {"rotary_interleaved": 0}),
    "num_splits": ({"num_splits": 2}, {"num_splits": np.int32(2)}),
    "split_keys": ({"split_keys": 16}, {"split_keys": torch.tensor(16)}),
    "return_softmax_lse": ({"return_softmax_lse": True}, {"return_softmax_lse": 1}),
}


@pytest.mark.parametrize("form", ACCEPTED)
def test_numbers_and_flags_of_other_types(form: str, backend: str, device: str, seed: int) -> None:
    results = []
    for options in ACCEPTED[form]:
        call = make_call(BY_NAME["int_length"], torch.float16, device, seed)
        results.append(run(call, backend, **options))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "argument"), [("batch_idx", "cache_batch_idx"), ("pages_7", "block_table")])
def test_rows_and_pages_may_have_strides(
    name: str, argument: str, compiled: bool, backend: str, device: str, seed: int
) -> None:
    """A column of a tensor, for example. Only the numbers are copied."""
    torch._dynamo.reset()
    call, other = (make_call(BY_NAME[name], torch.float16, device, seed) for _ in range(2))
    columns = torch.stack([getattr(other, argument)] * 3, dim=-1)
    setattr(other, argument, columns[..., 1])
    assert getattr(other, argument).stride(-1) == 3

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)

    options = {**other.arguments, "return_softmax_lse": True, "backend": backend}
    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    results = function(*other.tensors, options)
    for got, expected in zip(results, run(call, backend), strict=True):
        assert torch.equal(got, expected)
    for got, expected in ((other.k_cache, call.k_cache), (other.v_cache, call.v_cache)):
        assert torch.equal(bits(got._base), bits(expected._base))


def test_without_return_softmax_lse_the_result_is_out(backend: str, device: str, seed: int) -> None:
    call = make_call(BY_NAME["decode"], torch.float16, device, seed)
    expected = run(call, backend)[0]
    out = flash_attn_with_kvcache(*call.tensors, **call.arguments, backend=backend)
    assert isinstance(out, Tensor)
    assert torch.equal(out, expected)


def test_a_call_that_raises_leaves_the_caches(backend: str, device: str, seed: int) -> None:
    call = make_call(BY_NAME["decode"], torch.float16, device, seed)
    before = copied(call.k_cache, call.v_cache)
    with pytest.raises(ValueError, match="softcap"):
        run(call, backend, softcap=-1.0)
    for cache, copy in zip((call.k_cache, call.v_cache), before, strict=True):
        assert torch.equal(bits(cache._base), bits(copy._base))


def test_a_call_is_traced(
    backend: str, device: str, seed: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(BY_NAME["decode"], torch.float16, device, seed)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    run(call, backend)
    links = [line.split()[1] for line in capfd.readouterr().err.splitlines() if line.startswith("[flash_attn_mini]")]
    assert links[:2] == ["flash_attn_with_kvcache", "flash_attn_mini::fwd_kvcache"]
    if backend != "triton":
        assert links[2:4] == ["mha_fwd_kvcache", "set_params_kvcache"]


def test_vmap_is_refused(backend: str, device: str, seed: int) -> None:
    """A cache that the samples share would be written by each of them."""
    call = make_call(BY_NAME["decode"], torch.float16, device, seed)
    samples = torch.stack([call.q, call.q])
    with pytest.raises(NotImplementedError, match=r"torch\.vmap does not map flash_attn_with_kvcache"):
        torch.vmap(lambda q: flash_attn_with_kvcache(q, *call.tensors[1:], **call.arguments, backend=backend))(samples)
