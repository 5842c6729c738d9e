"""The packed functions: the values of the unpacked ones, gradients written into one tensor, no copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

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


@each_form
def test_kernels_read_views_and_write_into_the_packed_gradient(
    form: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_mini import autograd

    seen: dict[str, tuple[Tensor | None, ...]] = {}
    run_forward, run_backward = autograd.run_forward, autograd.run_backward

    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
        seen["read"] = (q, k, v)
        return run_forward(q, k, v, *arguments)

    def backward(*arguments: Any, into: Any) -> Any:
        seen["written"] = into
        return run_backward(*arguments, into=into)

    monkeypatch.setattr(autograd, "run_forward", forward)
    monkeypatch.setattr(autograd, "run_backward", backward)
    inputs, packed, _ = call_of(form, backend, device, gqa=False)
    gradients = torch.autograd.grad(packed(*inputs).sum(), inputs)
    for tensors, wholes in (("read", inputs), ("written", gradients)):
        parts = [x for whole in wholes for x in (whole.unbind(-3) if whole is wholes[-1] else [whole])]
        for part, expected in zip(seen[tensors], parts, strict=True):
            assert part is not None
            assert part.data_ptr() == expected.data_ptr()
            assert part.stride() == expected.stride()


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@each_form
def test_dispatch_modes_see_the_operators(form: str, backend: str, device: str) -> None:
    inputs, packed, _ = call_of(form, backend, device)
    expected = torch.autograd.grad(packed(*inputs, deterministic=True).sum(), inputs)
    with Counting() as mode:
        got = torch.autograd.grad(packed(*inputs, deterministic=True).sum(), inputs)
    kind = "_varlen" if "varlen" in form else ""
    for direction in ("forward", "backward"):
        assert mode.names.count(f"flash_attn_mini::_flash_attn{kind}_{direction}") == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    out = packed(*inputs, deterministic=True).sum()
    with Counting() as mode:
        got = torch.autograd.grad(out, inputs)
    assert mode.names.count(f"flash_attn_mini::_flash_attn{kind}_backward") == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@each_form
def test_packed_compiles_without_graph_breaks(form: str, backend: str, device: str) -> None:
    torch._dynamo.reset()
    inputs, packed, _ = call_of(form, backend, device)

    def step(*tensors: Tensor) -> Tensor:
        return packed(*tensors, causal=True, deterministic=True).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(step(*inputs), inputs), strict=True
    ):
        assert torch.equal(a, b)


@each_form
def test_second_derivative_of_packed_says_that_it_is_not_there(form: str, backend: str, device: str) -> None:
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
