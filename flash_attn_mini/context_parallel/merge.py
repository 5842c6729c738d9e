"""Partial results of attention, each over a part of a row's keys, become one: weights from the log-sum-exp.

out = sum of exp(lse_p - lse) out_p, with lse = log of the sum of exp(lse_p), in float32 (float64 for float64 inputs).
The weights of a row add up to 1, so 16-bit parts add one rounding of a 16-bit result at most. Gradients are plain sums.
Parts wait until there are a few, and one pass over memory adds them all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..backends.triton import kernels_unavailable_reason

MOST_PARTS = 3  # that wait: two blocks of the ring, and what came before


class Part(NamedTuple):
    """A result for some rows.

    Attributes:
        row: The first of the rows.
        values: ``[batch, rows, nheads, headdim]``, the last dimension contiguous.
        lse: The log-sum-exp ``[batch, nheads, rows]``, rows contiguous; None in a plain sum.
    """

    row: int
    values: torch.Tensor
    lse: torch.Tensor | None


def combine(parts: list[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write the sum of the parts to ``out``; with ``lse`` the weighted one, and its log-sum-exp to ``lse``.

    ``out`` has all rows, ``[batch, rows, nheads, headdim]``, in any dtype. Rows without a part become 0, with a
    log-sum-exp of -inf.
    """
    if out.is_cuda and kernels_unavailable_reason(out.device) is None:
        from . import merge_triton

        merge_triton.combine(parts, out, lse)
    else:
        combine_by_torch(parts, out, lse)


def combine_by_torch(parts: list[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """`combine` with PyTorch's operators."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    if lse is None:
        for row, values, _ in parts:
            total.narrow(1, row, values.shape[1]).add_(values)
    else:
        total_lse = torch.full_like(lse, -math.inf)
        for row, values, part_lse in parts:
            assert part_lse is not None
            before = total_lse.narrow(-1, row, values.shape[1])
            after = torch.logaddexp(before, part_lse)
            base = after.masked_fill(after == -math.inf, 0.0)  # rows without keys: both weights become 0
            kept, added = ((x - base).exp().transpose(1, 2).unsqueeze(-1) for x in (before, part_lse))
            total.narrow(1, row, values.shape[1]).mul_(kept).add_(values.to(wide) * added)
            before.copy_(after)
        lse.copy_(total_lse)
    out.copy_(total)


class Total:
    """The sum of the parts of some rows, in the layout of a tensor ``[(batch,) rows, nheads, headdim]``.

    A single part for all rows stays as it is, bit for bit.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, lse_shape: tuple[int, ...] | None = None) -> None:
        """``dtype``: of sums. ``lse_shape``: of the log-sum-exp; None for a plain sum."""
        self._like, self._dtype, self._lse_shape = like, dtype, lse_shape
        self._parts: list[Part] = []

    def add(self, row: int, values: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Add a part for the rows from ``row`` on."""
        if len(self._parts) == MOST_PARTS:
            self._parts = [self._combined(self._dtype)]
        if values.ndim == 3:
            values, lse = values[None], None if lse is None else lse[None]
        self._parts.append(Part(row, values, lse))

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, contiguous, in ``dtype``."""
        return self.result_with_lse(dtype)[0]

    def result_with_lse(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the log-sum-exp; empty in a plain sum."""
        rows = self._like.shape[self._like.ndim - 3]
        if len(self._parts) == 1 and self._parts[0].values.shape[1] == rows:
            part = self._parts[0]
        else:
            part = self._combined(dtype)
        self._parts = []
        values = part.values.to(dtype).contiguous().view(self._like.shape)
        if part.lse is None or self._lse_shape is None:
            return values, values.new_empty(0)
        return values, part.lse.contiguous().view(self._lse_shape)

    def _combined(self, dtype: torch.dtype) -> Part:
        shape = self._like.shape if self._like.ndim == 4 else (1, *self._like.shape)
        out = torch.empty(shape, dtype=dtype, device=self._like.device)
        lse = None
        if self._lse_shape is not None:
            lse = torch.empty((shape[0], *self._lse_shape[-2:]), dtype=self._dtype, device=self._like.device)
        combine(self._parts, out, lse)
        return Part(0, out, lse)
