"""`merge.combine` as one Triton kernel: a pass over memory, where PyTorch's operators make several."""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .merge import MOST_PARTS, Part

BLOCK_ROWS = 32


@triton.jit
def load_lse(part, batch, head, row, IS_PRESENT: tl.constexpr):
    """The log-sum-exp of a part for some rows, -inf where it has none."""
    lse = tl.full(row.shape, float("-inf"), tl.float32)
    if IS_PRESENT:
        _, lse_ptr, first, rows, _, _, _, batch_stride, head_stride = part
        place = lse_ptr + batch * batch_stride + head * head_stride + (row - first)
        lse = tl.load(place, mask=(row >= first) & (row < first + rows), other=float("-inf"))
    return lse


@triton.jit
def load_values(part, batch, head, row, column, headdim, IS_PRESENT: tl.constexpr):
    """The values of a part for some rows in float32, 0 where it has none."""
    values = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    if IS_PRESENT:
        ptr, _, first, rows, batch_stride, row_stride, head_stride, _, _ = part
        place = ptr + batch * batch_stride + head * head_stride
        place += (row - first)[:, None] * row_stride + column[None, :]
        is_row = (row >= first) & (row < first + rows)
        values = tl.load(place, mask=is_row[:, None] & (column < headdim)[None, :], other=0.0).to(tl.float32)
    return values


@triton.jit
def combine_kernel(
    out,  # the result: values, lse, strides of batch, row, head, strides of lse's batch, head; its rows are contiguous
    a,  # a part, or None: values, lse, first row, rows, strides of batch, row, head, strides of lse's batch, head
    b,
    c,
    rows,
    nheads,
    headdim,
    PARTS: tl.constexpr,  # how many of a, b, c count
    IS_WEIGHTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine BLOCK_ROWS rows of one head. A part may lie in the memory of the result, row on row.

    Several threads may load one element: no thread stores before all have loaded (the barriers).
    """
    out_ptr, lse_ptr, out_batch_stride, out_row_stride, out_head_stride, lse_batch_stride, lse_head_stride = out
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    batch = (tl.program_id(1) // nheads).to(tl.int64)
    head = (tl.program_id(1) % nheads).to(tl.int64)
    column = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    is_row = row < rows

    a_values = load_values(a, batch, head, row, column, headdim, PARTS > 0)
    b_values = load_values(b, batch, head, row, column, headdim, PARTS > 1)
    c_values = load_values(c, batch, head, row, column, headdim, PARTS > 2)
    if IS_WEIGHTED:
        a_lse = load_lse(a, batch, head, row, PARTS > 0)
        b_lse = load_lse(b, batch, head, row, PARTS > 1)
        c_lse = load_lse(c, batch, head, row, PARTS > 2)
        largest = tl.maximum(tl.maximum(a_lse, b_lse), c_lse)
        base = tl.where(largest == float("-inf"), 0.0, largest)  # rows without keys: all weights become 0
        a_weight = tl.exp(a_lse - base)
        b_weight = tl.exp(b_lse - base)
        c_weight = tl.exp(c_lse - base)
        total = a_weight + b_weight + c_weight
        scale = tl.where(total == 0.0, 0.0, 1.0 / total)
        values = a_values * (a_weight * scale)[:, None]
        values += b_values * (b_weight * scale)[:, None]
        values += c_values * (c_weight * scale)[:, None]
        tl.debug_barrier()
        place = lse_ptr + batch * lse_batch_stride + head * lse_head_stride + row
        tl.store(place, base + tl.log(total), mask=is_row)
    else:
        values = a_values + b_values + c_values
        tl.debug_barrier()
    place = out_ptr + batch * out_batch_stride + head * out_head_stride
    place += row[:, None] * out_row_stride + column[None, :]
    tl.store(place, values.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < headdim)[None, :])


def combine(parts: list[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Arguments as `merge.combine` takes them; the rows of lse contiguous, at most MOST_PARTS parts."""
    batch, rows, nheads, headdim = out.shape
    if out.numel() == 0:
        if lse is not None:
            lse.fill_(-float("inf"))
        return
    assert len(parts) <= MOST_PARTS
    arguments: list[tuple[Any, ...]] = []
    for row, values, part_lse in parts:
        lse_strides = (0, 0) if part_lse is None else part_lse.stride()[:2]
        part_rows = values.shape[1]
        given = values if part_lse is None else part_lse
        arguments.append((values, given, row, part_rows, *values.stride()[:3], *lse_strides))
    unused = [None] * (MOST_PARTS - len(parts))  # each tensor in an argument takes host time
    with torch.cuda.device_of(out):
        combine_kernel[(triton.cdiv(rows, BLOCK_ROWS), batch * nheads)](
            (out, out, *out.stride()[:3], 0, 0) if lse is None else (out, lse, *out.stride()[:3], *lse.stride()[:2]),
            *arguments,
            *unused,
            rows,
            nheads,
            headdim,
            PARTS=len(parts),
            IS_WEIGHTED=lse is not None,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_D=triton.next_power_of_2(headdim),
        )
