"""torch.vmap of options: key_ranges and attn_bias of samples, and dropout, where `randomness` decides which samples
share a mask, as for PyTorch's own dropout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

SAMPLES = 4
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def dense(q: Tensor, v: Tensor, backend: str) -> Tensor:
    return flash_attn_func(q[None], q[None], v[None], 0.5, deterministic=True, backend=backend)[0]


def varlen(q: Tensor, v: Tensor, backend: str) -> Tensor:
    cu_seqlens = torch.tensor([0, 20, 33], dtype=torch.int32, device=q.device)
    lengths = (cu_seqlens, cu_seqlens, 20, 20)
    return flash_attn_varlen_func(q, q, v, *lengths, 0.5, deterministic=True, backend=backend)


each_call = pytest.mark.parametrize("call", [dense, varlen])
Call = Callable[[Tensor, Tensor, str], Tensor]


def sample(device: str, draw: torch.Generator) -> Tensor:
    return torch.randn(33, 2, 16, generator=draw).half().to(device)


def vmapped(call: Call, backend: str, **how: Any) -> Callable[..., Tensor]:
    return torch.vmap(lambda q, v: call(q, v, backend), **how)


@each_call
@pytest.mark.parametrize("in_dims", [(0, 0), (None, 1)], ids=str)
def test_error_is_the_default(call: Call, in_dims: Any, backend: str, device: str, draw: torch.Generator) -> None:
    x = sample(device, draw)
    q = x.expand(SAMPLES, *x.shape) if in_dims[0] == 0 else x
    v = torch.stack([x] * SAMPLES, dim=in_dims[1])
    with pytest.raises(RuntimeError, match=r"dropout.*randomness='error'"):
        vmapped(call, backend, in_dims=in_dims)(q, v)


def test_error_holds_for_inputs_that_are_not_batched(backend: str, device: str, draw: torch.Generator) -> None:
    x, other = sample(device, draw), torch.zeros(SAMPLES, device=device)
    with pytest.raises(RuntimeError, match="randomness='error'"):
        torch.vmap(lambda t: dense(x, x, backend) + t)(other)


@each_call
@pytest.mark.parametrize("in_dims", [(0, 0), (None, 1)], ids=str)
def test_same_repeats_the_mask(call: Call, in_dims: Any, backend: str, device: str, draw: torch.Generator) -> None:
    """Each sample is the result of a call with the generator's state before vmap."""
    qs, vs = ([sample(device, draw) for _ in range(SAMPLES)] for _ in range(2))
    if in_dims[0] is None:
        qs = qs[:1] * SAMPLES
    q = qs[0] if in_dims[0] is None else torch.stack(qs)
    expected = []
    for one_q, one_v in zip(qs, vs, strict=True):
        torch.manual_seed(1)
        expected.append(call(one_q, one_v, backend))
    after = torch.rand(3, device=device)
    torch.manual_seed(1)
    got = vmapped(call, backend, in_dims=in_dims, randomness="same")(q, torch.stack(vs, dim=in_dims[1]))
    assert torch.equal(got, torch.stack(expected))
    assert torch.equal(torch.rand(3, device=device), after), "vmap draws once"


@each_call
@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "not_batched"])
def test_different_draws_for_each_sample(
    call: Call, is_batched: bool, backend: str, device: str, draw: torch.Generator
) -> None:
    x, zeros = sample(device, draw), torch.zeros(SAMPLES, 1, 1, 1, device=device).half()

    def attend(t: Tensor) -> Tensor:
        return call(x + t, x, backend) if is_batched else call(x, x, backend) + t

    got = torch.vmap(attend, randomness="different")(zeros)
    assert got.shape == (SAMPLES, *x.shape)
    for i in range(SAMPLES):
        assert not any(torch.equal(got[i], got[j]) for j in range(i))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_see_the_mask_of_their_sample(randomness: str, backend: str, device: str) -> None:
    """v is the identity, so that out is the dropped probabilities, and the gradient of out's sum is their sum."""
    q = torch.zeros(16, 1, 16, device=device).half()
    v = torch.eye(16, device=device).half()[:, None].expand(SAMPLES, 16, 1, 16)

    def loss(v: Tensor) -> tuple[Tensor, Tensor]:
        out = dense(q, v, backend)
        return out.sum(), out

    dv, out = torch.vmap(torch.func.grad(loss, has_aux=True), randomness=randomness)(v)
    torch.testing.assert_close(dv[..., 0, 0], out[:, :, 0].sum(1))
    assert torch.equal(out[0], out[1]) == (randomness == "same")


@pytest.mark.parametrize("form", ["dense", "varlen"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_s_dmask_has_the_mask_of_its_sample(randomness: str, form: str, backend: str, device: str) -> None:
    """v is the identity: out is 0 where a pair was dropped."""
    q = torch.zeros(16, 1, 16, device=device).half()
    v = torch.eye(16, device=device).half()[:, None].expand(SAMPLES, 16, 1, 16)
    cu_seqlens = torch.tensor([0, 16], dtype=torch.int32, device=device)

    def attend(v: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"dropout_p": 0.5, "return_attn_probs": True, "backend": backend}
        if form == "varlen":
            out, _, S_dmask = flash_attn_varlen_func(q, q, v, cu_seqlens, cu_seqlens, 16, 16, **options)
            return out[:, 0], S_dmask[0, 0, :16, :16]
        out, _, S_dmask = flash_attn_func(q[None], q[None], v[None], **options)
        return out[0, :, 0], S_dmask[0, 0, :16, :16]

    out, S_dmask = torch.vmap(attend, randomness=randomness)(v)
    assert torch.equal(out == 0, torch.signbit(S_dmask))


def test_vmap_of_vmap_asks_each_level(backend: str, device: str, draw: torch.Generator) -> None:
    x = sample(device, draw).expand(2, SAMPLES, 33, 2, 16)
    inner = vmapped(dense, backend, randomness="same")
    got = torch.vmap(inner, randomness="different")(x, x)
    assert all(torch.equal(got[i, 0], got[i, j]) for i in range(2) for j in range(SAMPLES))
    assert not torch.equal(got[0], got[1])
    with pytest.raises(RuntimeError, match="randomness='error'"):
        torch.vmap(inner)(x, x)


def test_randomness_is_ignored_without_dropout(backend: str, device: str, draw: torch.Generator) -> None:
    x = torch.stack([sample(device, draw)[None] for _ in range(SAMPLES)])
    expected = torch.stack([flash_attn_func(one, one, one, backend=backend) for one in x])
    assert torch.equal(torch.vmap(lambda t: flash_attn_func(t, t, t, backend=backend))(x), expected)


@each_call
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_compiled_call_obeys_randomness(
    call: Call, randomness: str, backend: str, device: str, draw: torch.Generator
) -> None:
    """Each run of the program draws anew."""
    torch._dynamo.reset()
    x = sample(device, draw).expand(SAMPLES, 33, 2, 16)
    compiled = torch.compile(vmapped(call, backend, randomness=randomness), backend="aot_eager", fullgraph=True)
    out, other = compiled(x, x), compiled(x, x)
    for i in range(1, SAMPLES):
        assert torch.equal(out[i], out[0]) == (randomness == "same")
    assert not torch.equal(out, other)


@each_call
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_of_a_compiled_call_see_its_masks(
    call: Call, randomness: str, backend: str, device: str, draw: torch.Generator
) -> None:
    """out is linear in v: its value is the product of v and the gradient of the sum over features, for each feature."""
    torch._dynamo.reset()
    q, v = (torch.stack([sample(device, draw) for _ in range(SAMPLES)]).float() for _ in range(2))
    q, v = (x if backend == "cpu" else x.half() for x in (q, v))
    v.requires_grad_()
    compiled = torch.compile(vmapped(call, backend, randomness=randomness), backend="aot_eager", fullgraph=True)
    out = compiled(q, v)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((v * dv).sum((1, 2, 3)), out.sum((1, 2, 3)), rtol=1e-2, atol=1e-1)


def test_error_holds_for_a_compiled_call(backend: str, device: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    x = sample(device, draw).expand(SAMPLES, 33, 2, 16)
    with pytest.raises(Exception) as raised:  # noqa: PT011 (its type depends on the version of PyTorch)
        torch.compile(vmapped(dense, backend), backend="aot_eager", fullgraph=True)(x, x)
    error, texts = raised.value, []
    while error is not None:
        texts.append(str(error).replace("\\'", "'"))  # a compiler may quote it
        error = error.__cause__ or error.__context__
    assert any("randomness='error'" in text for text in texts)


# ---- key_ranges ------------------------------------------------------------------------------------------------------


def drawn_ranges(shape: tuple[int, ...], keys: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, keys + 1, shape, generator=draw, dtype=torch.int32).sort(-1).values


@pytest.mark.parametrize("mapped", ["all", "ranges", "inputs"])
@pytest.mark.parametrize(
    "of_sample",
    [(1, 1, 9, 2), (2, 1, 9, 2), (1, 4, 9, 2), (2, 4, 9, 2), (1, 1, 9, 2, 2), (2, 4, 9, 2, 2)],
    ids=str,
)
def test_key_ranges_belong_to_their_sample(
    of_sample: tuple[int, ...], mapped: str, backend: str, device: str, draw: torch.Generator
) -> None:
    """Results and gradients are those of a call for each sample. The vmap dimension of the ranges is the third."""
    q, k, v = (torch.randn(SAMPLES, 2, n, h, 16, generator=draw).half() for n, h in ((9, 4), (17, 2), (17, 2)))
    key_ranges = drawn_ranges((SAMPLES, *of_sample), 17, draw)
    q, k, v, key_ranges = (x.to(device) for x in (q, k, v, key_ranges))
    of_inputs, of_ranges = (None if mapped == "ranges" else 0), (None if mapped == "inputs" else 2)

    def results(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor) -> tuple[Any, Tensor]:
        def loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": backend}
            out = flash_attn_func(q, k, v, **options, key_ranges=key_ranges)
            return out.float().square().sum(), out

        return torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    arguments = [x if of_inputs == 0 else x[0] for x in (q, k, v)]
    arguments.append(key_ranges[0] if of_ranges is None else key_ranges.movedim(0, 2))
    found = torch.vmap(results, (of_inputs, of_inputs, of_inputs, of_ranges))(*arguments)
    for i in range(SAMPLES):
        n, m = (0 if dim is None else i for dim in (of_inputs, of_ranges))
        gradients, out = results(q[n], k[n], v[n], key_ranges[m])
        for one, expected in zip((*found[0], found[1]), (*gradients, out), strict=True):
            torch.testing.assert_close(one[i], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mapped", ["all", "ranges", "inputs"])
def test_key_ranges_of_varlen_samples(mapped: str, backend: str, device: str, draw: torch.Generator) -> None:
    x = torch.stack([sample(device, draw) for _ in range(SAMPLES)])
    key_ranges = drawn_ranges((SAMPLES, 2, 33, 2), 20, draw).to(device)
    cu_seqlens = torch.tensor([0, 20, 33], dtype=torch.int32, device=device)

    def attend(x: Tensor, key_ranges: Tensor) -> Tensor:
        lengths = (cu_seqlens, cu_seqlens, 20, 20)
        return flash_attn_varlen_func(x, x, x, *lengths, key_ranges=key_ranges, backend=backend)

    of_x, of_ranges = (None if mapped == "ranges" else 0), (None if mapped == "inputs" else 0)
    arguments = (x[0] if of_x is None else x, key_ranges[0] if of_ranges is None else key_ranges)
    found = torch.vmap(attend, (of_x, of_ranges))(*arguments)
    for i in range(SAMPLES):
        n, m = (0 if dim is None else i for dim in (of_x, of_ranges))
        assert torch.equal(found[i], attend(x[n], key_ranges[m]))


# ---- attn_bias -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["all", "bias", "inputs"])
@pytest.mark.parametrize(
    ("batch", "of_sample"),
    [*itertools.product([1, 2], [(1, 1, 9), (1, 4, 9), (1, 4, 1)]), (2, (2, 1, 9)), (2, (2, 4, 1))],
    ids=str,
)
def test_biases_belong_to_their_sample(
    of_sample: tuple[int, int, int], batch: int, mapped: str, backend: str, device: str, draw: torch.Generator
) -> None:
    """Results and gradients are those of a call for each sample. The vmap dimension of the bias is the third."""
    q, k, v = (torch.randn(SAMPLES, batch, n, h, 16, generator=draw).half() for n, h in ((9, 4), (17, 2), (17, 2)))
    bias = torch.randn(SAMPLES, *of_sample, 17, generator=draw).to(device)
    q, k, v = (x.to(device) for x in (q, k, v))
    of_inputs, of_bias = (None if mapped == "bias" else 0), (None if mapped == "inputs" else 2)

    def results(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Any, Tensor]:
        def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": backend}
            out = flash_attn_func(q, k, v, **options, attn_bias=bias)
            return out.float().square().sum(), out

        return torch.func.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    arguments = [x if of_inputs == 0 else x[0] for x in (q, k, v)]
    arguments.append(bias[0] if of_bias is None else bias.movedim(0, 2))
    found = torch.vmap(results, (of_inputs, of_inputs, of_inputs, of_bias))(*arguments)
    for i in range(SAMPLES):
        n, m = (0 if dim is None else i for dim in (of_inputs, of_bias))
        gradients, out = results(q[n], k[n], v[n], bias[m])
        for one, expected in zip((*found[0], found[1]), (*gradients, out), strict=True):
            torch.testing.assert_close(one[i], expected, rtol=1e-2, atol=1e-3)


def test_masks_of_samples(backend: str, device: str, draw: torch.Generator) -> None:
    x = torch.randn(SAMPLES, 2, 20, 4, 16, generator=draw).to(device).half()
    mask = (torch.rand(SAMPLES, 2, 1, 1, 20, generator=draw) < 0.5).to(device)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return flash_attn_func(x, x, x, attn_bias=mask, backend=backend)

    found = torch.vmap(attend)(x, mask)
    for i in range(SAMPLES):
        torch.testing.assert_close(found[i], attend(x[i], mask[i]), rtol=1e-2, atol=1e-3)
