"""Score modifiers outside of the kernels: what joins the softmax of a row (attention sinks), and the gradients.

Kernels apply the modifiers themselves: backends/triton/score_mod.py, csrc/common/score_mod.h, csrc/common/row_mod.h.
With the extension csrc/api/score_mod.cpp computes the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .options import ROWS_MULTIPLE, Options


def modifies_rows(options: Options) -> bool:
    """True if something joins the softmax of each row besides its keys."""
    return options.learnable_sink is not None


def with_modified_rows(forward: Callable[[Options], tuple[Tensor, Tensor]], options: Options) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of a forward that modifies no rows, after the modifiers of rows have joined. Differentiable.

    Args:
        forward: Returns out ``[..., seqlen, nheads, headdim]`` and, if `modifies_rows`, softmax_lse
            ``[..., nheads, seqlen]``, -inf for rows without keys.
        options: The options of the whole call. The forward gets them without modifiers of rows.
    """
    out, softmax_lse = forward(options._replace(learnable_sink=None))
    if options.learnable_sink is not None:
        out, softmax_lse = join_sink(out, softmax_lse, options.learnable_sink)
    return out, softmax_lse


def fill_lse_without_keys(softmax_lse: Tensor, options: Options) -> None:
    """Write the log-sum-exp of rows without keys: -inf, or the sink."""
    if options.learnable_sink is None:
        softmax_lse.fill_(-math.inf)
    else:
        softmax_lse.copy_(options.learnable_sink[..., None].expand_as(softmax_lse))


def join_sink(out: Tensor, softmax_lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of attention with a sink, from those without. Differentiable.

    Args:
        out: ``[..., seqlen, nheads, headdim]``.
        softmax_lse: ``[..., nheads, seqlen]``, -inf for rows without keys.
        sink: ``[nheads]`` or ``[batch, nheads]``.
    """
    logit = sink.to(softmax_lse.dtype)[..., None]
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
    is_all = softmax_lse == logits  # as in a row without keys, whose lse is the sink, -inf too
    if dsoftmax_lse is not None:
        delta = torch.where(is_all, -dsoftmax_lse, delta)
    products = torch.exp((logits - softmax_lse).masked_fill(is_all, 0.0)) * delta
    if cu_seqlens_q is not None:  # a row of no sequence has an undefined log-sum-exp, and delta 0
        products = torch.where(delta == 0.0, delta, products)
    of_batch = sink.ndim == 1 and products.ndim == 3
    return -products.sum((0, 2) if of_batch else (-1,)).to(sink.dtype)


# By the name of an option: its gradient, a function with the arguments of `sink_gradient`.
GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "learnable_sink": sink_gradient
}


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
