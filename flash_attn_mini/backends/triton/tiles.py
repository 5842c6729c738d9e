"""What the Triton kernels share: which block of which head a program has, and how a block of rows is read and written.

flash_fwd_kernel, flash_bwd_dq_kernel and flash_bwd_dkv_kernel call these.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def assigned_block(
    num_blocks,  # blocks of one head
    num_heads,  # heads of all batches
    heads_per_group,  # heads that are worked on together, so that what they read again and again stays in the L2 cache
    LAST_FIRST: tl.constexpr,
):
    """(block, head) of this program. Programs start in order of their id: within a group of heads all first blocks
    come first, or all last ones, so that under the causal mask the longest start first and short ones fill the end."""
    program = tl.program_id(0)
    first_head = program // (heads_per_group * num_blocks) * heads_per_group
    group_heads = tl.minimum(heads_per_group, num_heads - first_head)
    within_group = program - first_head * num_blocks
    block = within_group // group_heads
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, first_head + within_group % group_heads


@triton.jit
def load_rows(
    src,  # USE_TMA: a descriptor over [batch, heads, seqlen, headdim]; else a pointer to the first element
    stride_b,
    stride_h,
    stride_s,
    batch,
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Rows [start, start + BLOCK_ROWS) of src[batch, :, head, :]; zeros beyond row `end` and beyond HEAD_DIM."""
    if USE_TMA:
        tile = src.load([batch, head, start, 0]).reshape(BLOCK_ROWS, BLOCK_D)
    else:
        first = src + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tl.cast(start, tl.int64) * stride_s
        rows = tl.arange(0, BLOCK_ROWS)
        cols = tl.arange(0, BLOCK_D)
        pointers = first + rows[:, None].to(tl.int64) * stride_s + cols[None, :]
        if CHECK_ROWS and HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(rows[:, None] < end - start) & (cols[None, :] < HEAD_DIM), other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(pointers, mask=rows[:, None] < end - start, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    dst,  # a pointer to the first element of [batch, seqlen, heads, headdim]
    tile,  # (BLOCK_ROWS, BLOCK_D) float32
    stride_b,
    stride_h,
    stride_s,
    batch,
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write dst[batch, start:start + BLOCK_ROWS, head, :], nothing beyond row `end`, rounded to dst's dtype."""
    rows = start + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    pointers = (
        dst
        + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h)
        + (rows[:, None].to(tl.int64) * stride_s + cols[None, :])
    )
    in_range = rows[:, None] < end
    if HEAD_DIM != BLOCK_D:
        in_range = in_range & (cols[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(dst.dtype.element_ty), mask=in_range)
