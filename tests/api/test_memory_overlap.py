"""What a call writes may share memory neither with itself nor with what the call reads.

The random tests compare with sets of addresses. Tensors that alternate in memory, as the parts of a packed gradient do,
share nothing and are written in place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_mini
from flash_attn_mini import _C, flash_attn_with_kvcache

from .test_backward_errors import valid_backward_call
from .test_strided_inputs import integer
from .test_varlen_errors import backward as varlen_backward
from .test_varlen_errors import forward as varlen_forward
from .test_varlen_errors import valid_backward_call as valid_varlen_backward_call
from .test_varlen_errors import valid_paged_call

DRAWS = 300
REFUSED = r"(\w+) shares memory with (\w+); allowed: memory of its own|has strides .*memory of its own"


def addresses(x: Tensor) -> Tensor:
    """The place in the storage of every element."""
    place = torch.tensor(x.storage_offset())
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place = place + (torch.arange(size) * stride).view(-1, *[1] * (x.dim() - dim - 1))
    return place.expand(x.shape).flatten()


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """True if two elements of the tensors, which are views of one buffer, are at one place."""
    every = torch.cat([addresses(x) for x in tensors])
    return len(every.unique()) < len(every)


def random_view(buffer: Tensor, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """A view of the buffer: dense, in a wider tensor, or with any strides."""
    d = shape[-1]
    kind = integer(draw, range(4))
    row = shape[-2] * d
    strides = (shape[1] * row, row, d, 1)
    if kind == 1:
        parts = integer(draw, (2, 3))
        strides = (shape[1] * row * parts, row * parts, d, 1)
    elif kind == 2:
        strides = (shape[1] * row, d, shape[1] * d, 1)
    elif kind == 3:
        strides = (*(integer(draw, (1, 2, d - 1, d, d + 1, 2 * d + 1, 3 * d, 40)) for _ in range(3)), 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    steps = (0, d, row, 2 * row, shape[0] * shape[1] * row, integer(draw, range(len(buffer) - extent)))
    return buffer.as_strided(shape, strides, min(integer(draw, steps), len(buffer) - extent))


def raises(function: Any, *arguments: Any) -> bool:
    """Whether the call is refused, and for that reason alone."""
    refused: list[str] = []
    try:
        function(*arguments)
    except ValueError as error:
        refused.append(str(error))
    assert all(re.search(REFUSED, said) for said in refused), refused
    return bool(refused)


def test_given_gradients_are_refused_if_and_only_if_they_overlap(draw: torch.Generator) -> None:
    shape = (2, 3, 2, 4)
    q, k, v, dout = torch.randn(4, *shape, generator=draw)
    out, lse, _, _ = _C.fwd(q, k, v, None, None, 0.0, 0.5, False, -1, -1, 0.0, False, None)
    inputs, options = (dout, q, k, v, out, lse), (None, 0.0, 0.5, False, -1, -1, 0.0, False, None, None)
    expected = _C.bwd(*inputs, None, None, None, *options)[:3]
    refused = 0
    for index in range(DRAWS):
        buffer = torch.full((400,), torch.nan)
        given = [random_view(buffer, shape, draw) for _ in range(3)]
        if index == 0:  # few draws do not overlap
            given = list(buffer[: 3 * q.numel()].view(3, *shape))
        described = [(x.stride(), x.storage_offset()) for x in given]
        is_refused = raises(_C.bwd, *inputs, *given, *options)
        assert is_refused == share_memory(given), f"refused {is_refused}: {described}"
        refused += is_refused
        if not is_refused:
            for name, got, wanted in zip(("dq", "dk", "dv"), given, expected, strict=True):
                assert torch.equal(got, wanted), f"{name} of {described}"
            assert int(buffer.isnan().sum()) == 400 - 3 * q.numel()
    assert 0 < refused < DRAWS


def test_caches_with_new_keys_are_refused_if_and_only_if_they_overlap(draw: torch.Generator) -> None:
    shape = (2, 5, 2, 4)
    q, new_k, new_v = torch.randn(3, 2, 2, 2, 4, generator=draw)
    refused = 0
    for _ in range(DRAWS):
        buffer = torch.randn(400, generator=draw)
        caches = [random_view(buffer, shape, draw) for _ in range(2)]
        plain = [x.clone(memory_format=torch.contiguous_format) for x in caches]
        described = [(x.stride(), x.storage_offset()) for x in caches]
        flash_attn_with_kvcache(q, *caches, cache_seqlens=3)  # without new keys nothing is written
        is_refused = raises(lambda both=caches: flash_attn_with_kvcache(q, *both, new_k, new_v, cache_seqlens=3))
        assert is_refused == share_memory(caches), f"refused {is_refused}: {described}"
        refused += is_refused
        if not is_refused:
            flash_attn_with_kvcache(q, *plain, new_k, new_v, cache_seqlens=3)
            assert all(torch.equal(a, b) for a, b in zip(caches, plain, strict=True)), described
    assert 0 < refused < DRAWS


def test_caches_whose_rows_overlap_are_named(backend: str, device: str) -> None:
    q, new, cache = (torch.zeros(1, n, 1, 4, device=device, dtype=torch.float16) for n in (1, 2, 8))
    overlapping = torch.zeros(64, device=device, dtype=torch.float16).as_strided([1, 8, 1, 4], [32, 2, 4, 1])
    for caches, name in (((overlapping, cache), "k_cache"), ((cache, overlapping), "v_cache")):
        with pytest.raises(ValueError, match=rf"{name} has strides \[32, 2, 4, 1\].*memory of its own"):
            flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=1, backend=backend)
        flash_attn_with_kvcache(q, *caches, cache_seqlens=1, backend=backend)


def placed(values: Tensor, buffer: Tensor) -> Tensor:
    """The same values in the middle of the buffer."""
    begin = buffer.numel() * buffer.element_size() // 2 // 8 * 8
    place = buffer.view(-1).view(torch.uint8)[begin : begin + values.numel() * values.element_size()]
    return place.view(values.dtype).view(values.shape).copy_(values)


@pytest.mark.parametrize("written", ["dq", "dk", "dv"])
@pytest.mark.parametrize("read", ["softmax_lse", "alibi_slopes", "rng_state"])
def test_gradients_over_what_the_backward_reads(written: str, read: str, backend: str, device: str) -> None:
    call = valid_backward_call(device)
    call["alibi_slopes"] = torch.zeros(call["q"].shape[2], device=device)
    call["rng_state"] = torch.zeros(2, dtype=torch.int64, device=device)
    call["dropout_p"] = 0.1
    with flash_attn_mini.use_backend(backend):
        flash_attn_mini.flash_attn_interface._flash_attn_backward(**call)
        call[read] = placed(call[read], call[written])
        with pytest.raises(ValueError, match=f"{written} shares memory with {read}; allowed: memory of its own"):
            flash_attn_mini.flash_attn_interface._flash_attn_backward(**call)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("written", ["dq", "dk", "dv"])
@pytest.mark.parametrize("read", ["cu_seqlens_q", "cu_seqlens_k"])
def test_gradients_over_lengths(written: str, read: str, backend: str, device: str) -> None:
    call = valid_varlen_backward_call(device)
    varlen_backward(call)
    call[read] = placed(call[read], call[written])
    with pytest.raises(ValueError, match=f"{written} shares memory with {read}; allowed: memory of its own"):
        varlen_backward(call)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("read", ["cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes"])
def test_out_over_what_the_forward_reads(read: str, backend: str, device: str) -> None:
    call = valid_paged_call(device)
    call["alibi_slopes"] = torch.zeros(call["q"].shape[-2], device=device)
    call["out"] = torch.zeros_like(call["q"])
    varlen_forward(call)
    call[read] = placed(call[read], call["out"])
    with pytest.raises(ValueError, match=f"out shares memory with {read}; allowed: memory of its own"):
        varlen_forward(call)


@pytest.mark.backends("cpu", "cuda")
def test_out_may_alternate_with_q(backend: str, device: str, draw: torch.Generator) -> None:
    both = torch.randn(2, 5, 2, 2, 8, generator=draw).to(device, torch.float16)
    k, v = torch.randn(2, 2, 7, 2, 8, generator=draw).to(device, torch.float16)
    q, out = both.unbind(2)
    options = (None, 0.0, 0.5, False, -1, -1, 0.0, False, None)
    expected = _C.fwd(q.clone(), k, v, None, *options)[0]
    assert torch.equal(_C.fwd(q, k, v, out, *options)[0], expected)
    with pytest.raises(ValueError, match="out shares memory with q"):
        _C.fwd(q, k, v, both.flatten()[8:].as_strided(q.shape, q.stride()), *options)
