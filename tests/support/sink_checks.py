"""Calls with attention sinks, and checks of their results and gradients against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini.reference import attention_reference

from .bounds import (
    FLOOR,
    TIMES_PYTORCH_GRADIENT,
    Cumulative,
    accuracy,
    assert_forward_accurate,
    by_sequence,
    pytorch_attention,
    refuse,
)
from .flash_bounds import assert_gradients_accurate_beside_flash

Attend = Callable[..., tuple[Tensor, Tensor]]  # attend(q, k, v, sinks) -> (out, softmax_lse)


def draw_sinks(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Logits as large as those of a few keys."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (2.0 + torch.randn(shape, generator=torch.Generator().manual_seed(seed + 3), dtype=wide)).to(device, dtype)


def check_forward_and_gradients(
    attend: Attend,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    where: str,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> None:
    """Both outputs, and the gradients of q, k, v and the sinks."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, sinks)]
    out, lse = attend(*leaves)
    known = {"sinks": sinks, "cu_seqlens": cu_seqlens, **options}
    assert_forward_accurate(*inputs, out.detach(), lse.detach(), case=where, **known)
    arriving = (dout,) if dlse is None else (dout, dlse)
    *gradients, dsinks = torch.autograd.grad((out, lse)[: len(arriving)], leaves, arriving)
    assert_gradients_accurate_beside_flash(*inputs, dout, tuple(gradients), case=where, dlse=dlse, **known)
    check_sink_gradient(dsinks, inputs, sinks, dout, dlse, where, cu_seqlens, **options)


def check_sink_gradient(
    got: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    where: str,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> None:
    def gradient(attention: Any, dtype: torch.dtype) -> Tensor:
        leaf = sinks.detach().to(dtype).requires_grad_()
        out, lse = by_sequence(attention, cu_seqlens)(*(x.to(dtype) for x in inputs), sinks=leaf, **options)
        total = (out * dout.to(out.dtype)).sum()
        if dlse is not None:
            total = total + (lse * dlse.to(lse.dtype)).sum()
        return torch.autograd.grad(total, leaf)[0]

    assert got.shape == sinks.shape, where
    assert got.dtype == sinks.dtype, where
    expected, pytorch = gradient(attention_reference, torch.float64), gradient(pytorch_attention, inputs[0].dtype)
    # It is a sum over rows of differences; each row's delta carries the rounding of the output.
    floor = FLOOR[inputs[0].dtype] * max(1.0, float(dout.double().abs().sum()) / sinks.numel())
    result = accuracy("learnable_sink", got, expected, pytorch.to(got.dtype), floor, TIMES_PYTORCH_GRADIENT)
    refuse([] if result.passed else [result], f"\n  case {where}")
