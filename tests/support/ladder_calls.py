"""Inputs of the ladder's rungs inside poisoned buffers, and the check of a rung's output against the allowed error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_mini.reference import attention_reference

from .bounds import FLOOR, accuracy, pytorch_attention, refuse
from .poison import Guard, poisoned


def draw_poisoned(
    generator: torch.Generator, batch: int, seqlen_q: int, seqlen_k: int, headdim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k and v ``[batch, seqlen, headdim]``, random normal, with NaN before and after each."""
    tensors = []
    for seqlen in (seqlen_q, seqlen_k, seqlen_k):
        tensor = poisoned((batch, seqlen, headdim), dtype, device)
        tensors.append(tensor.copy_(torch.randn(tensor.shape, generator=generator)))
    return tensors


def assert_right(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, shown: str, *, causal: bool = False
) -> None:
    """Fails unless ``attention(q, k, v)`` is as exact as the bounds ask for, and does not change its inputs."""
    guard = Guard(q, k, v)
    out = attention(q, k, v)
    guard.check()
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    heads = [x.unsqueeze(2) for x in (q, k, v)]  # [batch, seqlen, 1, headdim]
    expected = attention_reference(*heads, causal=causal)[0].squeeze(2)
    theirs = pytorch_attention(*heads, causal=causal)[0].squeeze(2)
    refuse([r for r in [accuracy("out", out, expected, theirs, FLOOR[q.dtype])] if not r.passed], shown)
