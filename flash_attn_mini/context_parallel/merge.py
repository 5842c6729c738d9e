"""Partial results of attention, each over a part of a row's keys, become one: weights from the log-sum-exp.

out = sum of exp(lse_p - lse) out_p, with lse = log of the sum of exp(lse_p), in float32 (float64 for float64 inputs).
The weights of a row add up to 1, so 16-bit parts add one rounding of a 16-bit result at most. Gradients are plain sums.
Parts wait until there are a few, and one pass over memory adds them all. Rows that have a single part are not touched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backends.triton import unavailable_reason
from .blocks import Interval, union

MOST_PARTS = 3  # in one pass: two blocks of the ring, and what came before


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

    @property
    def rows(self) -> Interval:
        """First row, number of rows."""
        return self.row, self.values.shape[1]

    def within(self, first: int, rows: int) -> Part:
        """The part's rows among ``rows`` rows, counted from ``first``."""
        if first <= self.row and self.row + self.values.shape[1] <= first + rows:
            return Part(self.row - first, self.values, self.lse)
        begin = min(max(self.row, first), first + rows)
        end = max(min(self.row + self.values.shape[1], first + rows), begin)
        values = self.values.narrow(1, begin - self.row, end - begin) if end > begin else self.values[:, :0]
        lse = self.lse
        if lse is not None:
            lse = lse.narrow(-1, begin - self.row, end - begin) if end > begin else lse[..., :0]
        return Part(begin - first, values, lse)


def narrowed(x: torch.Tensor, dim: int, interval: Interval) -> torch.Tensor:
    """``x.narrow(dim, *interval)``; x itself for all of its rows, because a view takes host time."""
    return x if interval[1] == x.shape[dim] else x.narrow(dim, *interval)


def combine(parts: list[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write the sum of the parts to ``out``; with ``lse`` the weighted one, and its log-sum-exp to ``lse``.

    ``out`` has all rows, ``[batch, rows, nheads, headdim]``, the last dimension contiguous, in any dtype. It may be the
    values of a part that has all rows. Rows without a part become 0, with a log-sum-exp of -inf.
    """
    if out.is_cuda and _runs_triton(out.device):
        from . import merge_triton

        merge_triton.combine(parts, out, lse)
    else:
        combine_by_torch(parts, out, lse)


@functools.cache  # what a device can run does not change while the process lives, and asking takes host time
def _runs_triton(device: torch.device) -> bool:
    return unavailable_reason(device) is None


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
    """The sum of the parts of some rows, in the layout of a tensor ``[(batch,) rows, nheads, headdim]``, or of several.

    Parts are ``[number x batch, rows, nheads, headdim]``: so dK and dV are one part, one message and one addition.

    A part in the dtype of that tensor that has all rows is the base: the other parts are added to it in place, only in
    their rows. A single part stays as it is, bit for bit.
    """

    def __init__(
        self, like: torch.Tensor, dtype: torch.dtype, lse_shape: tuple[int, ...] | None = None, number: int = 1
    ) -> None:
        """``dtype``: of sums. ``lse_shape``: of the log-sum-exp; None for a plain sum. ``number``: of tensors."""
        self._like, self._dtype, self._lse_shape, self._number = like, dtype, lse_shape, number
        self._batch = like.shape[0] if like.ndim == 4 else 1
        self._shape = (number * self._batch, *like.shape[-3:])
        self._base: Part | None = None
        self._parts: list[Part] = []

    def new(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for a part of a plain sum, which the caller writes and then adds."""
        shape = (self._shape[0], rows, *self._shape[2:])
        return torch.empty(shape, dtype=dtype or self._like.dtype, device=self._like.device)

    def of_each(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of a part: the part of each tensor, ``[batch, rows, nheads, headdim]``."""
        return (part,) if self._number == 1 else part.view(self._number, self._batch, *part.shape[1:]).unbind(0)

    def add(self, row: int, values: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Add a part for the rows from ``row`` on. Its memory belongs to the total from now on."""
        if values.ndim == 3:
            values, lse = values[None], None if lse is None else lse[None]
        part = Part(row, values, lse)
        if self._base is None and not self._parts and self._can_be_base(values):
            self._base = part
            return
        if len(self._parts) == MOST_PARTS - (self._base is not None):
            first, rows = _hull(self._parts)
            self._parts = [self._combined(self._parts, first, rows, self._dtype)]
        self._parts.append(part)

    def take(self, other: Total) -> list[torch.Tensor]:
        """Add the parts of another total of the same rows, which is empty then. Returns their memory."""
        parts = [*([] if other._base is None else [other._base]), *other._parts]
        other._base, other._parts = None, []
        for part in parts:
            self.add(*part)
        return [part.values for part in parts]

    def _can_be_base(self, values: torch.Tensor) -> bool:
        return values.shape == self._shape and values.dtype == self._like.dtype and values.is_contiguous()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, contiguous, in ``dtype``; of several tensors one part, ``[number x batch, ...]``."""
        values = self._sum(dtype).values
        return values.view(self._like.shape) if self._number == 1 else values

    def results(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The sum of each tensor."""
        values = self._sum(dtype).values
        return values.view(self._number, *self._like.shape).unbind(0)

    def result_with_lse(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum, and its log-sum-exp."""
        _, values, lse = self._sum(dtype)
        assert lse is not None
        assert self._lse_shape is not None
        return values.view(self._like.shape), lse.contiguous().view(self._lse_shape)

    def _sum(self, dtype: torch.dtype) -> Part:
        """The sum for all rows, in one contiguous part. No parts wait any more."""
        rows, parts = self._shape[1], self._parts
        if self._base is not None and (not parts or self._base.values.dtype == dtype):
            part = self._base
            for interval in union([x.rows for x in parts]):
                self._add_in_place(part, parts, interval)
        elif self._base is None and len(parts) == 1 and parts[0].values.shape[1] == rows:
            part = parts[0]
        else:
            part = self._combined([*([] if self._base is None else [self._base]), *parts], 0, rows, dtype)
        self._base, self._parts = None, []
        return Part(0, part.values.to(dtype).contiguous(), part.lse)

    def _combined(self, parts: list[Part], first: int, rows: int, dtype: torch.dtype) -> Part:
        """The sum of parts in new memory, for some rows."""
        batch, _, *shape = self._shape
        out = torch.empty((batch, rows, *shape), dtype=dtype, device=self._like.device)
        lse = None
        if self._lse_shape is not None:
            lse = torch.empty((batch, shape[0], rows), dtype=self._dtype, device=self._like.device)
        combine([part.within(first, rows) for part in parts], out, lse)
        return Part(first, out, lse)

    def _add_in_place(self, base: Part, parts: list[Part], rows: Interval) -> None:
        """Add the parts' values of some rows to the base."""
        target = base.within(*rows)
        within = [part for part in (part.within(*rows) for part in parts) if part.values.shape[1] > 0]
        if target.lse is None and len(within) == 1:
            _add(target.values, within[0].values)
        else:
            combine([target, *within], target.values, target.lse)


def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add in place, with the bits of `combine`, without the launch of a Triton kernel.

    A range of rows of dK and dV together is not contiguous, and ``add_`` takes 54 instead of 31 us there (H200, 4,096
    rows of 16 heads). The rows of each tensor are contiguous, and one kernel adds those of all tensors.
    """
    if total.is_contiguous() or total.shape[0] == 1:
        total.add_(part)
    else:
        torch._foreach_add_(list(total.unbind(0)), list(part.unbind(0)))


def _hull(parts: list[Part]) -> Interval:
    first = min(part.row for part in parts)
    return first, max(part.row + part.values.shape[1] for part in parts) - first
