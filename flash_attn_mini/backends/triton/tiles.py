"""What all Triton kernels share: the block of a program, and loads and stores of a block of rows.

A tensor is one argument: the tuple (pointer, stride_b, stride_h, stride_s) of [batch, seqlen, heads, headdim], or with
USE_TMA a descriptor of [batch, heads, seqlen, headdim]. operands.py makes both.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def assigned_block(
    num_blocks,  # blocks of one head
    num_heads,  # heads of all batch entries
    heads_per_group,  # heads that run together, so that the tensors that they read repeatedly stay in the L2 cache
    LAST_FIRST: tl.constexpr,
):
    """(block, head) of this program. Programs start in order of their id. In a group of heads all first blocks start
    first, or all last ones: under the causal mask the longest start first, and short ones fill the end."""
    program = tl.program_id(0)
    first_head = program // (heads_per_group * num_blocks) * heads_per_group
    group_heads = tl.minimum(heads_per_group, num_heads - first_head)
    within_group = program - first_head * num_blocks
    block = within_group // group_heads
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, first_head + within_group % group_heads


@triton.jit
def from_row(tensor, row):
    """The tuple of a tensor, from ``row`` on."""
    pointer, stride_b, stride_h, stride_s = tensor
    return pointer + row.to(tl.int64) * stride_s, stride_b, stride_h, stride_s


@triton.jit
def from_column(tensor, COLUMN: tl.constexpr):
    """The tuple of a tensor, from column ``COLUMN`` of the head dim on."""
    pointer, stride_b, stride_h, stride_s = tensor
    return pointer + COLUMN, stride_b, stride_h, stride_s


@triton.jit
def load_rows(
    src,
    batch,
    head,
    start,
    end,
    begin,  # rows before it read as zeros; None: there are none. With USE_TMA the descriptor begins at this row
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr,
    is_read=None,  # (BLOCK_ROWS,) booleans: the other rows are zeros
):
    """Rows [start, start + BLOCK_ROWS) of src[batch, :, head, :]; zeros beyond row `end` and beyond HEAD_DIM."""
    if USE_TMA:
        if begin is not None:
            start -= begin
        tile = src.load([batch, head, start, 0]).reshape(BLOCK_ROWS, BLOCK_D)
        if is_read is not None:
            tile = tl.where(is_read[:, None], tile, 0.0)
    else:
        pointer, stride_b, stride_h, stride_s = src
        first = pointer + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        first += tl.cast(start, tl.int64) * stride_s
        rows = tl.arange(0, BLOCK_ROWS)
        cols = tl.arange(0, BLOCK_D)
        pointers = first + rows[:, None].to(tl.int64) * stride_s + cols[None, :]
        mask = None
        if CHECK_ROWS:
            mask = rows[:, None] < end - start
        if begin is not None:
            is_after = rows[:, None] >= begin - start
            mask = is_after if mask is None else mask & is_after
        if is_read is not None:
            mask = is_read[:, None] if mask is None else mask & is_read[:, None]
        if HEAD_DIM != BLOCK_D:
            is_inside = cols[None, :] < HEAD_DIM
            mask = is_inside if mask is None else mask & is_inside
        tile = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(
    dst,  # a tuple
    tile,  # (BLOCK_ROWS, BLOCK_D) float32
    batch,
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write dst[batch, start:start + BLOCK_ROWS, head, :], nothing beyond row `end`, rounded to dst's dtype."""
    pointer, stride_b, stride_h, stride_s = dst
    rows = start + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    pointers = (
        pointer
        + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h)
        + (rows[:, None].to(tl.int64) * stride_s + cols[None, :])
    )
    in_range = rows[:, None] < end
    if HEAD_DIM != BLOCK_D:
        in_range = in_range & (cols[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=in_range)
