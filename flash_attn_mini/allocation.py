"""Allocates outputs and gradients, real or fake, and copies tensors that kernels cannot read as they are."""

from __future__ import annotations

import torch

from .options import Options


def empty_contiguous_last(like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for an output or a gradient. The last dimension is contiguous, as the kernels require.

    The strides are those of ``torch.empty_like`` if these meet the requirement, else those of a contiguous tensor. A
    head dim of 1 also gives a contiguous tensor, because ``empty_like`` and its fake implementation differ there. The
    extension's function of the same name (csrc/api/allocation.h) has the same rule.
    """
    x = torch.empty_like(like)
    return x if x.stride(-1) == 1 and x.shape[-1] != 1 else like.new_empty(like.shape)


def empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for out: `empty_contiguous_last` of q, contiguous where v has another head dim."""
    if v.shape[-1] == q.shape[-1]:
        return empty_contiguous_last(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of softmax_lse."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def empty_max_logits(q: torch.Tensor, options: Options) -> torch.Tensor | None:
    """Uninitialised memory for max_logits, ``[batch, nheads]``, varlen ``[nheads]``; None if they are not wanted."""
    if not options.return_max_logits:
        return None
    *batch, _, nheads, _ = q.shape
    return q.new_empty((*batch, nheads), dtype=lse_dtype(q))


def without_neg(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a contiguous copy if ``x`` is a lazily negated view, which kernels would read without its sign."""
    return x.clone(memory_format=torch.contiguous_format) if x.is_neg() else x


def contiguous_float(x: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy, or ``x`` if it is one."""
    return x.to(torch.float32, memory_format=torch.contiguous_format)
