"""flash_attn_func in autocast regions: the dtypes of PyTorch's SDPA, and training in mixed precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_kvpacked_func, flash_attn_varlen_func

from ..support.op_calls import FWD, fwd_arguments
from ..support.small_attention import qkv, sdpa

AUTOCAST_DTYPES = [torch.bfloat16, torch.float16]
# Hopper's own kernels begin at head dim 64.
each_headdim = pytest.mark.parametrize("headdim", [16, pytest.param(64, marks=pytest.mark.gpu)])


@pytest.mark.parametrize("to", AUTOCAST_DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_as_sdpa_does(given: torch.dtype, to: torch.dtype, backend: str, device: str) -> None:
    inputs = qkv(device, given)
    with torch.autocast(device, dtype=to):
        out, lse, _ = flash_attn_func(*inputs, return_attn_probs=True, backend=backend)
        theirs = sdpa(*inputs)
    assert out.dtype == theirs.dtype == to
    assert lse.dtype == torch.float32
    by_hand = flash_attn_func(*(x.to(to) for x in inputs), backend=backend)
    assert torch.equal(out, by_hand)
    (out.sum() + lse.sum()).backward()
    assert [x.grad.dtype for x in inputs] == [given] * 3
    grads = [x.grad for x in inputs]
    expected = torch.autograd.grad(theirs.sum(), inputs)
    assert [x.dtype for x in expected] == [g.dtype for g in grads]


@each_headdim
@pytest.mark.parametrize("to", AUTOCAST_DTYPES, ids=str)
def test_autocast_gradients_are_those_of_the_cast_by_hand(
    to: torch.dtype, headdim: int, backend: str, device: str
) -> None:
    inputs = qkv(device, torch.float32, headdim=headdim)
    with torch.autocast(device, dtype=to):
        total = flash_attn_func(*inputs, deterministic=True, backend=backend).float().square().sum()
        inside = torch.autograd.grad(total, inputs, retain_graph=True)
    outside = torch.autograd.grad(total, inputs)
    by_hand = flash_attn_func(*(x.to(to) for x in inputs), deterministic=True, backend=backend)
    expected = torch.autograd.grad(by_hand.float().square().sum(), inputs)
    for a, b, c in zip(inside, outside, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_autocast_casts_a_mixture_of_dtypes(backend: str, device: str) -> None:
    """As projections in different precisions give them. Without autocast this is a TypeError."""
    q, k, v = qkv(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attn_func(q, k.bfloat16(), v.half(), backend=backend).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="k has dtype"):
        flash_attn_func(q.half(), k.bfloat16(), v.half(), backend=backend)


@pytest.mark.parametrize("form", ["dense", "packed", "varlen"])
def test_the_mask_of_dropout_under_autocast_is_that_of_the_cast_by_hand(form: str, backend: str, device: str) -> None:
    q, k, v = qkv(device, torch.float32, requires_grad=False)
    lengths = [torch.tensor([0, x.shape[1]], dtype=torch.int32, device=device) for x in (q, k)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        options = {"dropout_p": 0.3, "return_attn_probs": True, "backend": backend}
        if form == "dense":
            return flash_attn_func(q, k, v, **options)
        if form == "packed":
            return flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options)
        return flash_attn_varlen_func(q[0], k[0], v[0], *lengths, q.shape[1], k.shape[1], **options)

    with torch.autocast(device, dtype=torch.bfloat16):
        got = attend(q, k, v)
    for a, b in zip(got, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_that_is_off_or_of_another_device_changes_nothing(backend: str, device: str) -> None:
    inputs = qkv(device)
    other = "cuda" if device == "cpu" else "cpu"
    with torch.autocast(other, dtype=torch.bfloat16):
        assert flash_attn_func(*inputs, backend=backend).dtype == torch.float16
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert flash_attn_func(*inputs, backend=backend).dtype == torch.float16


def test_autocast_leaves_float64_alone() -> None:
    inputs = qkv("cpu", torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn_func(*inputs).dtype == sdpa(*inputs).dtype == torch.float64


def test_autocast_in_the_operator_and_in_the_function_agree(backend: str, device: str) -> None:
    q, k, v = qkv(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        short = flash_attn_func(q, k, v, deterministic=True, backend=backend)
        out = FWD(*fwd_arguments(q, k, v, softmax_scale=0.25, deterministic=True, backend=backend))[0]
        with torch.no_grad():
            plain = flash_attn_func(q, k, v, backend=backend)
    assert torch.equal(short, out)
    assert torch.equal(short, plain)
    for a, b in zip(
        torch.autograd.grad(short.sum(), (q, k, v)), torch.autograd.grad(out.sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.gpu
@each_headdim
@pytest.mark.parametrize("to", AUTOCAST_DTYPES, ids=str)
@pytest.mark.backends("cuda", "triton")
def test_mixed_precision_training_with_a_scaler_follows_sdpa(
    to: torch.dtype, headdim: int, backend: str, device: str
) -> None:
    """float32 parameters, autocast, GradScaler: the losses of SDPA within the rounding of the dtype."""
    width = 4 * headdim

    def losses(attention: Callable[..., Tensor]) -> list[float]:
        torch.manual_seed(0)
        project = torch.nn.Linear(width, 3 * width, device=device)
        scaler = torch.amp.GradScaler(device, enabled=to == torch.float16)
        optimizer = torch.optim.AdamW(project.parameters(), lr=3e-3)
        x, target = torch.randn(2, 4, 40, width, device=device).unbind()
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=to):
                q, k, v = project(x).view(4, 40, 3, 4, headdim).unbind(2)
                out = attention(q, k, v)
                assert out.dtype == to
                loss = F.mse_loss(out.flatten(2).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())
        return history

    ours = losses(lambda q, k, v: flash_attn_func(q, k, v, causal=True, backend=backend))
    theirs = losses(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_mixed_precision_training_follows_sdpa_on_the_cpu() -> None:
    """The same in bfloat16 under CPU autocast, which needs no scaler."""

    def losses(attention: Callable[..., Tensor]) -> list[float]:
        torch.manual_seed(0)
        project = torch.nn.Linear(32, 3 * 32)
        optimizer = torch.optim.AdamW(project.parameters(), lr=3e-3)
        x, target = torch.randn(2, 2, 20, 32).unbind()
        history = []
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q, k, v = project(x).view(2, 20, 3, 2, 16).unbind(2)
                loss = F.mse_loss(attention(q, k, v).flatten(2).float(), target)
            loss.backward()
            assert project.weight.grad.dtype == torch.float32
            optimizer.step()
            history.append(loss.item())
        return history

    ours = losses(lambda q, k, v: flash_attn_func(q, k, v, causal=True))
    theirs = losses(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-2)


@pytest.mark.parametrize("to", AUTOCAST_DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.bool], ids=str)
def test_autocast_leaves_a_bias_of_float32(given: torch.dtype, to: torch.dtype, backend: str, device: str) -> None:
    """Others are cast as q is."""
    q, k, v = qkv(device, torch.float32, requires_grad=False)
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(1, q.shape[2], q.shape[1], k.shape[1], generator=draw).to(device, given)
    leaf = bias.requires_grad_() if given.is_floating_point else bias
    with torch.autocast(device, dtype=to):
        out = flash_attn_func(q, k, v, attn_bias=leaf, backend=backend)
    used = bias.detach() if given in (torch.float32, torch.bool) else bias.detach().to(to)
    assert torch.equal(out, flash_attn_func(q.to(to), k.to(to), v.to(to), attn_bias=used, backend=backend))
    if given.is_floating_point:
        (gradient,) = torch.autograd.grad(out.float().sum(), leaf)
        assert gradient.dtype == given
