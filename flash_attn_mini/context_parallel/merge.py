"""Partial results of attention, each over a part of a row's keys, become one: weights from the log-sum-exp.

out = sum of exp(lse_p - lse) out_p, with lse = log of the sum of exp(lse_p), in float32 (float64 for float64 inputs).
The weights of a row add up to 1, so 16-bit parts add one rounding of a 16-bit result at most.
"""

from __future__ import annotations

import math

import torch

from ..backends.triton import kernels_unavailable_reason


def merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add the result of more keys to (out, lse), in place.

    Args:
        out: float32 or float64, ``[batch, rows, nheads, headdim]``.
        lse: ``[batch, nheads, rows]`` in the dtype of out, -inf where a row has no key so far.
        part: Like out, in any dtype.
        part_lse: Like lse.
    """
    if out.is_cuda and kernels_unavailable_reason(out.device) is None:
        from . import merge_triton

        merge_triton.merge_into(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    base = total.masked_fill(total == -math.inf, 0.0)  # rows without keys: both weights become 0
    kept, added = ((x - base).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(kept).add_(part.to(out.dtype) * added)
    lse.copy_(total)


class Partial:
    """The result of the calls so far: out and log-sum-exp of some rows, both in the layout of q.

    The result of one call for all rows stays as it is, in 16 bits. A second one makes it float32.
    """

    def __init__(self, q: torch.Tensor, lse_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """``q``: for the shape of out. ``dtype``: of the log-sum-exp and of sums."""
        self._like, self._lse_shape, self._dtype = q, lse_shape, dtype
        self._out: torch.Tensor | None = None
        self._lse = torch.empty(0)

    def add(self, row: int, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        """Add a call's result for the rows from ``row`` on."""
        rows_dim = self._like.ndim - 3
        rows = part.shape[rows_dim]
        if self._out is None:
            if rows == self._like.shape[rows_dim]:
                self._out, self._lse = part, part_lse
                return
            self._out = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
            self._lse = torch.full(self._lse_shape, -math.inf, dtype=self._dtype, device=part.device)
        elif self._out.dtype != self._dtype:
            self._out = self._out.to(self._dtype)
        tensors = (self._out.narrow(rows_dim, row, rows), self._lse.narrow(-1, row, rows), part, part_lse)
        merge_into(*(tensors if rows_dim == 1 else (x[None] for x in tensors)))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out in the dtype of q, and the log-sum-exp."""
        if self._out is None:  # no row sees a key
            lse = torch.full(self._lse_shape, -math.inf, dtype=self._dtype, device=self._like.device)
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format), lse
        return self._out.to(self._like.dtype), self._lse


class Sum:
    """The sum of gradients of some rows, each from one call, in the layout of a tensor.

    A single one for all rows stays as it is, in 16 bits. A second one makes the sum float32.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        """``dtype``: of sums."""
        self._like, self._dtype = like, dtype
        self._sum: torch.Tensor | None = None

    def add(self, row: int, part: torch.Tensor) -> None:
        """Add a gradient of the rows from ``row`` on."""
        rows_dim = self._like.ndim - 3
        rows = part.shape[rows_dim]
        if self._sum is None:
            if rows == self._like.shape[rows_dim]:
                self._sum = part
                return
            self._sum = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        elif self._sum.dtype != self._dtype:
            self._sum = self._sum.to(self._dtype)
        self._sum.narrow(rows_dim, row, rows).add_(part)

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, contiguous, in ``dtype``."""
        if self._sum is None:
            return torch.zeros_like(self._like, dtype=dtype, memory_format=torch.contiguous_format)
        return self._sum.to(dtype).contiguous()
