"""Attention sinks outside of the kernels: results that a sink joins, and its gradient.

With the extension csrc/api/autograd.cpp computes the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import ROWS_MULTIPLE


def join_sink(out: Tensor, softmax_lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of attention with a sink, from those without. Differentiable.

    Args:
        out: ``[..., seqlen, nheads, headdim]``.
        softmax_lse: ``[..., nheads, seqlen]``, -inf for rows without keys.
        sink: ``[nheads]``.
    """
    logit = sink.to(softmax_lse.dtype)[:, None]
    factor = torch.sigmoid(softmax_lse - logit)
    weighted = out.to(factor.dtype) * factor.transpose(-1, -2)[..., None]
    return weighted.to(out.dtype), torch.logaddexp(softmax_lse, logit)


def sink_gradient(
    sink: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    dsoftmax_lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> Tensor:
    """The gradient of a sink: the sum of ``-exp(sink - softmax_lse) * softmax_d`` over the rows of a head.

    Args:
        sink: ``[nheads]`` or ``[batch, nheads]``.
        softmax_lse: With the sink, ``[batch, nheads, seqlen_q]``; varlen ``[nheads, total_q]``.
        softmax_d: From the backward: the rows of a sequence begin at a multiple of 128.
        dsoftmax_lse: The gradient of softmax_lse, or None. softmax_d does not have it in rows without keys.
        cu_seqlens_q: int32 ``[batch + 1]``, or None for equal lengths.
    """
    rows = softmax_lse.shape[-1]
    if softmax_lse.numel() == 0:
        return torch.zeros_like(sink)
    delta = softmax_d[..., :rows] if cu_seqlens_q is None else _rows_of_sequences(softmax_d, cu_seqlens_q, rows)
    logits = sink.to(softmax_lse.dtype)[..., None]
    if dsoftmax_lse is not None:  # the lse of a row without keys is the sink
        delta = torch.where(softmax_lse == logits, -dsoftmax_lse, delta)
    products = torch.exp(logits - softmax_lse) * delta
    if cu_seqlens_q is not None:  # a row of no sequence has an undefined log-sum-exp, and delta 0
        products = torch.where(delta == 0.0, delta, products)
    of_batch = sink.ndim == 1 and products.ndim == 3
    return -products.sum((0, 2) if of_batch else (-1,)).to(sink.dtype)


def _rows_of_sequences(softmax_d: Tensor, cu_seqlens_q: Tensor, rows: int) -> Tensor:
    """``[nheads, total_q]`` of the padded softmax_d; 0 for rows of no sequence."""
    batch = cu_seqlens_q.shape[0] - 1
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens_q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    known = sequence.clamp(max=batch - 1)
    begin = cu_seqlens_q[known]
    padded = (begin // ROWS_MULTIPLE + known) * ROWS_MULTIPLE + row - begin
    of_rows = softmax_d[..., padded.clamp(0, softmax_d.shape[-1] - 1)]
    return of_rows.masked_fill(sequence != known, 0.0)
