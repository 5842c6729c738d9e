"""Inputs whose elements share memory in any way: strides of 0, rows that overlap, strides of dimensions of size 1.

What a call returns has a contiguous last dimension, the values of the same call with contiguous inputs, and the strides
of the fake implementation. The first test runs those of the Triton launchers in Triton's interpreter where there is no
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn_mini
from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_mini.allocation import empty_contiguous_last
from flash_attn_mini.options import KvCache

from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.op_calls import BWD, FWD, FWD_KVCACHE, bwd_arguments, fwd_arguments, kvcache_arguments
from ..support.triton_calls import DEVICE, backward, forward, make_options, runs_triton

DRAWS = 20  # of shapes and strides in a test


@pytest.mark.slow
@pytest.mark.thorough
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def integer(draw: torch.Generator, among: Sequence[int]) -> int:
    return among[int(torch.randint(len(among), (), generator=draw))]


def strided(shape: tuple[int, ...], dtype: torch.dtype, device: str, draw: torch.Generator) -> Tensor:
    """A view with random strides, the last one 1; elements may share memory."""
    strides = [integer(draw, (0, 1, 2, shape[-1] // 2, shape[-1], 3 * shape[-1], 64)) for _ in shape[:-1]]
    last = integer(draw, (1, 5)) if shape[-1] == 1 else 1
    strides.append(last)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.randn(extent, generator=draw).to(device, dtype).as_strided(shape, strides)


def random_qkv(dtype: torch.dtype, device: str, draw: torch.Generator, batch: int | None = None) -> list[Tensor]:
    batch = integer(draw, (1, 2, 3)) if batch is None else batch
    headdim, nheads_k = integer(draw, (1, 8, 8, 16, 20, 64)), integer(draw, (1, 2))
    shape_q = (batch, integer(draw, (1, 5, 40)), nheads_k * integer(draw, (1, 3)), headdim)
    shape_k = (batch, integer(draw, (1, 7, 50)), nheads_k, headdim)
    return [strided(shape, dtype, device, draw) for shape in (shape_q, shape_k, shape_k)]


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    described = [(tuple(x.shape), x.stride()) for x in inputs]
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.is_cuda:  # strides may select another kernel, with other roundings
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02, msg=lambda m: f"{m}; inputs {described}")
        else:
            assert torch.equal(a, b), f"result {i} is off by {(a - b).abs().max()}; inputs {described}"
        assert a.stride(-1) == 1, f"result {i} has strides {a.stride()}; inputs {described}"


def with_gradients(function: Any, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_dense_calls(backend: str, device: str, dtype: torch.dtype, draw: torch.Generator, seed: int) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, softmax_scale=scale, deterministic=True, backend=backend)

    for _ in range(DRAWS):
        scale = (0.3, -0.3, 0.0)[integer(draw, range(3))]
        inputs = random_qkv(dtype, device, draw)
        if integer(draw, (0, 0, 1)):
            inputs = [torch._neg_view(x) for x in inputs]
        got = with_gradients(call, inputs, seed)
        assert_same(got, with_gradients(call, contiguous(inputs), seed), inputs)


def test_varlen_calls(backend: str, device: str, dtype: torch.dtype, draw: torch.Generator, seed: int) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        cu = [torch.tensor([0, len(x) // 3, len(x)], dtype=torch.int32, device=device) for x in (q, k)]
        return flash_attn_varlen_func(q, k, v, *cu, 40, 50, deterministic=True, backend=backend)

    for _ in range(DRAWS):
        inputs = [x[0] for x in random_qkv(dtype, device, draw, batch=1)]
        got = with_gradients(call, inputs, seed)
        assert_same(got, with_gradients(call, contiguous(inputs), seed), inputs)


@pytest.mark.parametrize("form", ["qkv", "kv"])
def test_packed_calls(form: str, backend: str, device: str, draw: torch.Generator, seed: int) -> None:
    def call(*tensors: Tensor) -> Any:
        if form == "qkv":
            return flash_attn_mini.flash_attn_qkvpacked_func(*tensors, deterministic=True, backend=backend)
        return flash_attn_mini.flash_attn_kvpacked_func(*tensors, deterministic=True, backend=backend)

    for _ in range(DRAWS):
        batch, seqlen, nheads, headdim = (integer(draw, among) for among in ((1, 2), (1, 30), (1, 2), (8, 20)))
        shapes = [(batch, seqlen, 3, nheads, headdim)]
        if form == "kv":
            shapes = [(batch, 9, nheads, headdim), (batch, seqlen, 2, nheads, headdim)]
        inputs = [strided(shape, torch.float16, device, draw) for shape in shapes]
        got = with_gradients(call, inputs, seed)
        assert_same(got, with_gradients(call, contiguous(inputs), seed), inputs)


def test_kvcache_calls(backend: str, device: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    for _ in range(DRAWS):
        scale = (0.3, -0.3, 0.0)[integer(draw, range(3))]
        q, k, v = random_qkv(dtype, device, draw)
        headdim, capacity = k.shape[-1], k.shape[1] + 3
        cos, sin = torch.randn(2, 64, 8, generator=draw).to(device, dtype)
        rotary = {"rotary_cos": cos, "rotary_sin": sin} if headdim >= 16 and integer(draw, (0, 1)) else {}
        caches = torch.randn(2, k.shape[0], capacity, *k.shape[2:], generator=draw).to(device, dtype)
        if integer(draw, (0, 0, 1)):
            q, k, v = (torch._neg_view(x) for x in (q, k, v))
        results = []
        for tensors in ((q, k, v), contiguous((q, k, v))):
            both = caches.clone()
            out = flash_attn_with_kvcache(
                tensors[0], *both, *tensors[1:], **rotary, cache_seqlens=3, softmax_scale=scale, backend=backend
            )
            results.append((out, both))
        assert_same(*results, (q, k, v))


def assert_same_strides(real: Sequence[Tensor], fake: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """A dimension of size 1 may have any stride."""
    for r, f in zip(real, fake, strict=True):
        strides = [[s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1] for x in (r, f)]
        assert strides[0] == strides[1], f"{strides}, inputs {[(tuple(x.shape), x.stride()) for x in inputs]}"


def test_the_fake_implementations_have_these_strides(backend: str, device: str, draw: torch.Generator) -> None:
    for _ in range(3 * DRAWS):
        q, k, v = random_qkv(torch.float16, device, draw)
        caches = [torch.zeros(*k.shape[:1], 60, *k.shape[2:], dtype=k.dtype, device=device) for _ in range(2)]

        def both(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> list[Tensor]:
            out, lse, *_ = FWD(*fwd_arguments(q, k, v, backend=backend))
            gradients = BWD(*bwd_arguments(out, q, k, v, out, lse, deterministic=True, backend=backend))
            of_cache = FWD_KVCACHE(*kvcache_arguments(q, *caches, k=k, v=v, cache_seqlen=3, backend=backend))
            return [out, *gradients[:3], of_cache[0]]

        with FakeTensorMode() as mode:
            fake = both(*(mode.from_tensor(x) for x in (q, k, v, *caches)))
        assert_same_strides(both(q, k, v, *caches), fake, (q, k, v))


def test_dense_layouts_are_kept(backend: str, device: str, draw: torch.Generator) -> None:
    """A q in the order of dimensions that another operator left gives an out in the same order."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        permuted = torch.randn(2, 3, 4, 8, generator=draw).to(device, torch.float16).permute(*order, 3)
        for x in (permuted, torch.cat([permuted] * 2, dim=-1)[..., :8]):
            out = flash_attn_func(x, x, x, backend=backend)
            assert out.stride() == torch.empty_like(x).stride()
            assert empty_contiguous_last(x).stride() == torch.empty_like(x).stride()


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_triton_launchers(dtype: torch.dtype, draw: torch.Generator, seed: int) -> None:
    from flash_attn_mini.backends.triton import kvcache

    for _ in range(DRAWS // 4):
        inputs = random_qkv(dtype, DEVICE, draw)
        k = inputs[1]
        cache = KvCache(None, None, None, None, None, -1, None, None, None, False, 0, 0)
        cache = cache._replace(k=k, v=k, cache_seqlen=3)
        results = []
        for q, k, v in (inputs, contiguous(inputs)):
            out, lse = forward(q, k, v, softmax_scale=0.3)
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
            *gradients, _ = backward(dout, q, k, v, out, lse, None, softmax_scale=0.3)
            caches = torch.zeros(2, k.shape[0], 60, *k.shape[2:], dtype=dtype, device=DEVICE)
            of_cache, _ = kvcache.forward_kvcache(q, *caches, cache._replace(k=k, v=v), make_options(0.3))
            results.append([out, *gradients, of_cache, caches])
        assert_same(*results, inputs)


@runs_triton
@pytest.mark.parametrize("is_cached", [False, True], ids=["dense", "kvcache"])
def test_the_triton_ops_read_negated_views(is_cached: bool, draw: torch.Generator, seed: int) -> None:
    """PyTorch's own copy of a negated view may have another last stride than 1."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if not is_cached:
            return with_gradients(lambda *x: flash_attn_func(*x, backend="triton"), (q, k, v), seed)
        caches = torch.zeros(2, k.shape[0], 60, *k.shape[2:], dtype=k.dtype, device=DEVICE)
        return [flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3, backend="triton"), *caches]

    shapes = ((1, 5, 6, 8), (1, 7, 2, 8), (1, 7, 2, 8))
    for strides in ((1, 2, 0, 1), (4, 8, 1, 1), (64, 64, 1, 1), (0, 64, 2, 1)):
        flat = torch.randn(3, 512, generator=draw).to(DEVICE, torch.float16)
        inputs = [torch._neg_view(x.as_strided(shape, strides)) for x, shape in zip(flat, shapes, strict=True)]
        assert_same(call(*inputs), call(*contiguous(inputs)), inputs)


def fill_free_memory(draw: torch.Generator) -> None:
    """Leave random bits in the memory that the next tensors get."""
    sizes = [256] * 64 + [1024] * 64 + [1 << 14] * 32 + [1 << 18] * 16 + [1 << 22] * 8
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 22,), generator=draw, dtype=torch.int32).to(DEVICE)
    copies = [bits[:size].clone() for size in sizes]
    del copies


@runs_triton
@pytest.mark.parametrize("headdim", [1, 20])
def test_the_triton_kernels_read_rows_one_element_apart(headdim: int, draw: torch.Generator, seed: int) -> None:
    """On a GPU the compiled kernel must not load them across the head dim: see operands.with_rows_apart."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        dense = with_gradients(lambda *x: flash_attn_func(*x, backend="triton"), (q, k, v), seed)
        return [*dense, flash_attn_with_kvcache(q, k, v, cache_seqlens=k.shape[1] - 2, backend="triton")]

    ones, apart = (1, 1, 1, 1), (0, 3 * headdim, headdim, 1)
    for of_q, of_k, of_v in ((ones, ones, ones), (ones, apart, apart), (apart, ones, apart), (apart, apart, ones)):
        fill_free_memory(draw)
        flat = torch.randn(3, 8192, generator=draw).to(DEVICE, torch.float16)
        shapes = ((1, 40, 3, headdim), (1, 70, 3, headdim), (1, 70, 3, headdim))
        inputs = [x.as_strided(*y) for x, y in zip(flat, zip(shapes, (of_q, of_k, of_v), strict=True), strict=True)]
        torch.testing.assert_close(call(*inputs), call(*contiguous(inputs)), rtol=0.02, atol=0.02)
