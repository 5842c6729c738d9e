"""The packed functions: the values of the unpacked ones, gradients written into one tensor, no copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

from ..support.op_calls import PACKED_BWD, PACKED_FWD, Recording

LENGTHS = (5, 0, 33, 64)
DROPOUT = {"dropout_p": 0.2}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window_size": (20, 0), "softmax_scale": 0.3},
    {"softcap": 4.0},
    DROPOUT,
]
Call = Callable[..., Any]


def call_of(
    form: str, backend: str, device: str, headdim: int = 40, gqa: bool = True
) -> tuple[list[Tensor], Call, Call]:
    """Inputs, the packed function, and the unpacked function on the same inputs."""
    dtype = torch.float32 if backend == "cpu" else torch.float16
    nheads, nheads_k = 4, 2 if gqa and "qkv" not in form else 4
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    rows = (sum(LENGTHS),) if "varlen" in form else (2, 70)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*rows, *shape, device=device).to(dtype).requires_grad_()

    lengths = (max(LENGTHS),)
    unpacked = flash_attn_varlen_func if "varlen" in form else flash_attn_func
    both = (cu, cu, *lengths, *lengths) if "varlen" in form else ()
    if "qkv" in form:
        packed = flash_attn_varlen_qkvpacked_func if "varlen" in form else flash_attn_qkvpacked_func
        own = (cu, *lengths) if "varlen" in form else ()
        return (
            [randn(3, nheads, headdim)],
            lambda qkv, **options: packed(qkv, *own, **options, backend=backend),
            lambda qkv, **options: unpacked(*qkv.unbind(-3), *both, **options, backend=backend),
        )
    kvpacked = flash_attn_varlen_kvpacked_func if "varlen" in form else flash_attn_kvpacked_func
    return (
        [randn(nheads, headdim), randn(2, nheads_k, headdim)],
        lambda q, kv, **options: kvpacked(q, kv, *both, **options, backend=backend),
        lambda q, kv, **options: unpacked(q, *kv.unbind(-3), *both, **options, backend=backend),
    )


FORMS = ("qkv", "kv", "varlen_qkv", "varlen_kv")
each_form = pytest.mark.parametrize("form", FORMS)


@each_form
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "dropout"])
def test_packed_is_the_unpacked_function(form: str, options: dict[str, Any], backend: str, device: str) -> None:
    inputs, packed, unpacked = call_of(form, backend, device)
    results = []
    for function in (packed, unpacked):
        torch.manual_seed(1)
        out, lse, _ = function(*inputs, **options, deterministic=True, return_attn_probs=True)
        generator = torch.Generator().manual_seed(2)
        dout = torch.randn(out.shape, generator=generator).to(out)
        dlse = torch.randn(lse.shape, generator=generator).to(lse)
        results.append((out, lse, *torch.autograd.grad((out, lse), inputs, (dout, dlse))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert [x.shape for x in results[0][2:]] == [x.shape for x in inputs]


@each_form
def test_head_dims_that_are_padded_are_packed_too(form: str, backend: str, device: str) -> None:
    inputs, packed, unpacked = call_of(form, backend, device, headdim=33)
    for a, b in zip(
        torch.autograd.grad(packed(*inputs, deterministic=True).sum(), inputs),
        torch.autograd.grad(unpacked(*inputs, deterministic=True).sum(), inputs),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["kv", "varlen_kv"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["q", "kv"])
def test_only_gradients_that_are_needed(form: str, wanted: tuple[bool, bool], backend: str, device: str) -> None:
    inputs, packed, _ = call_of(form, backend, device)
    expected = torch.autograd.grad(packed(*inputs, deterministic=True).square().sum(), inputs)
    leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    packed(*leaves, deterministic=True).square().sum().backward()
    for leaf, wants, gradient in zip(leaves, wanted, expected, strict=True):
        assert torch.equal(leaf.grad, gradient) if wants else leaf.grad is None


@pytest.mark.backends("cpu", "cuda")
@each_form
def test_kernels_read_views_and_write_into_the_packed_gradient(form: str, backend: str, device: str) -> None:
    """No operator copies, stacks or concatenates, as the gradient of ``unbind`` would."""
    inputs, packed, unpacked = call_of(form, backend, device, gqa=False)
    douts = [torch.ones_like(inputs[0].unbind(-3)[0] if "qkv" in form else inputs[0])]

    def operators(function: Call) -> set[str]:
        with torch.profiler.profile() as profile:
            torch.autograd.grad(function(*inputs), inputs, douts)
        return {event.name for event in profile.events()}

    copies = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::stack", "aten::cat"}
    assert operators(unpacked) & copies, "the gradient of unbind stacks: the profiler sees it"
    seen = operators(packed)
    assert PACKED_BWD.name() in seen
    assert not seen & copies


@each_form
def test_dispatch_modes_see_the_operators(form: str, backend: str, device: str) -> None:
    inputs, packed, _ = call_of(form, backend, device)
    expected = torch.autograd.grad(packed(*inputs, deterministic=True).sum(), inputs)
    with Recording() as mode:
        got = torch.autograd.grad(packed(*inputs, deterministic=True).sum(), inputs)
    assert mode.count(PACKED_FWD) == mode.count(PACKED_BWD) == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    out = packed(*inputs, deterministic=True).sum()
    with Recording() as mode:
        got = torch.autograd.grad(out, inputs)
    assert mode.count(PACKED_BWD) == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_form
def test_packed_compiles_without_graph_breaks(form: str, dynamic: bool, backend: str, device: str) -> None:
    torch._dynamo.reset()
    inputs, packed, _ = call_of(form, backend, device)

    def step(*tensors: Tensor) -> Tensor:
        return packed(*tensors, causal=True, deterministic=True).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(step(*inputs), inputs), strict=True
    ):
        assert torch.equal(a, b)


@each_form
def test_compiled_dropout_of_packed_draws_anew(form: str, backend: str, device: str) -> None:
    """Two calls with equal arguments are two masks in one program, and the gradient sees the mask of its call."""
    torch._dynamo.reset()
    inputs, packed, _ = call_of(form, backend, device)

    def step(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return packed(*tensors, **DROPOUT, deterministic=True), packed(*tensors, **DROPOUT, deterministic=True)

    first, second = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    assert not torch.equal(first, second)
    gradients = [torch.autograd.grad(out.sum(), inputs, retain_graph=True)[-1] for out in (first, second, first)]
    assert not torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@each_form
def test_func_grad_of_packed_is_autograds(form: str, backend: str, device: str) -> None:
    inputs, packed, _ = call_of(form, backend, device)

    def loss(*tensors: Tensor) -> Tensor:
        return packed(*tensors, causal=True, deterministic=True).float().square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    positions = tuple(range(len(inputs)))
    got = torch.func.grad(loss, argnums=positions)(*(x.detach() for x in inputs))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@each_form
def test_vmap_of_packed_and_of_its_gradient_keeps_samples_apart(form: str, backend: str, device: str) -> None:
    _, packed, _ = call_of(form, backend, device)
    samples = [[x.detach() for x in call_of(form, backend, device)[0]] for _ in range(3)]

    def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out = packed(*tensors, causal=True, deterministic=True)
        return out.float().square().sum(), out

    positions = tuple(range(len(samples[0])))
    function = torch.func.grad(loss, argnums=positions, has_aux=True)
    gradients, out = torch.vmap(function)(*(torch.stack(parts) for parts in zip(*samples, strict=True)))
    for i, sample in enumerate(samples):
        expected_gradients, expected = function(*sample)
        assert torch.equal(out[i], expected)
        for a, b in zip(gradients, expected_gradients, strict=True):
            assert torch.equal(a[i], b)


@each_form
def test_second_derivative_of_packed_raises(form: str, backend: str, device: str) -> None:
    inputs, packed, _ = call_of(form, backend, device)
    gradients = torch.autograd.grad(packed(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        sum(x.sum() for x in gradients).backward()


@each_form
def test_packed_under_autocast(form: str, backend: str, device: str) -> None:
    inputs, packed, unpacked = call_of(form, backend, device)
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    results = []
    for function in (packed, unpacked):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(*inputs, deterministic=True)
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@each_form
def test_nothing_is_saved_without_gradients(form: str, backend: str, device: str) -> None:
    inputs, packed, unpacked = call_of(form, backend, device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), torch.no_grad():
        assert torch.equal(packed(*inputs), unpacked(*inputs))
    assert saved == []


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: flash_attn_qkvpacked_func(x[:, :, :2]), ValueError, r"qkv has shape \[2, 9, 2, 4, 16\].*3, nheads"),
        (lambda x: flash_attn_qkvpacked_func(x[0]), ValueError, r"qkv has shape \[9, 3, 4, 16\].*batch, seqlen, 3"),
        (
            lambda x: flash_attn_kvpacked_func(x[:, :, 0], x),
            ValueError,
            r"kv has shape \[2, 9, 3, 4, 16\].*2, nheads_k",
        ),
        (lambda x: flash_attn_qkvpacked_func([x]), TypeError, r"qkv is \["),
        (lambda x: flash_attn_kvpacked_func(None, x[:, :, :2]), TypeError, "q is None"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x, None, 9), ValueError, r"qkv has shape.*\[total, 3"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x[0], None, 9), TypeError, "cu_seqlens is None"),
        (lambda x: flash_attn_qkvpacked_func(x, dropout_p="0.1"), TypeError, "dropout_p is '0.1'"),
    ],
)
def test_wrong_packed_calls_name_the_argument(call: Call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(torch.randn(2, 9, 3, 4, 16))
