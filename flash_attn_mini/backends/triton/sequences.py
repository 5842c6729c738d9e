# mypy: disable-error-code="no-untyped-def"
"""Where the rows of one sequence lie when the batch has sequences of different lengths, or keys in pages.

flash_fwd_kernel, flash_bwd_dq_kernel and flash_bwd_dkv_kernel call these; csrc/common/sequence.h does the same in C++.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_block(
    cu_seqlens,  # [num_sequences + 1] int32: rows before each sequence
    num_sequences,
    index,  # of a block in the whole batch
    BLOCK: tl.constexpr,  # rows of a block
):
    """(sequence, block of it) of a block of the batch; the block lies past the sequence's end where it has no rows.

    The first block of sequence i has the index ``cu_seqlens[i] // BLOCK + i``: each sequence may leave a block unused,
    but nobody has to add lengths up, neither here nor on the host, which launches total // BLOCK + num_sequences.
    """
    AT_ONCE: tl.constexpr = 128
    low = tl.cast(0, tl.int32)
    high = tl.cast(num_sequences, tl.int32)
    while high - low > AT_ONCE:  # sequence `low` begins at or before the block, sequence `high` after it
        middle = (low + high) // 2
        is_before = tl.load(cu_seqlens + middle) // BLOCK + middle <= index
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    candidates = low + tl.arange(0, AT_ONCE)
    in_range = candidates < high
    first_blocks = tl.load(cu_seqlens + candidates, mask=in_range, other=0) // BLOCK + candidates
    sequence = low + tl.sum((in_range & (first_blocks <= index)).to(tl.int32)) - 1
    return sequence, index - (tl.load(cu_seqlens + sequence) // BLOCK + sequence)


@triton.jit
def sequence_rows(cu_seqlens, sequence):
    """(first row, rows) of a sequence."""
    begin = tl.load(cu_seqlens + sequence)
    return begin, tl.load(cu_seqlens + sequence + 1) - begin


@triton.jit
def load_paged_rows(
    src,  # a pointer to the first element of [pages, page_size, heads, headdim]
    stride_page,
    stride_h,
    stride_s,
    block_table,  # the pages of this sequence, int32
    page_size,
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Rows [start, start + BLOCK_ROWS) of one sequence and head; zeros beyond row `end` and beyond HEAD_DIM."""
    rows = start + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    in_range = rows < end
    pages = tl.load(block_table + rows // page_size, mask=in_range, other=0).to(tl.int64)
    first = src + head.to(tl.int64) * stride_h
    pointers = first + (pages * stride_page + (rows % page_size).to(tl.int64) * stride_s)[:, None] + cols[None, :]
    mask = in_range[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (cols[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=mask, other=0.0)
