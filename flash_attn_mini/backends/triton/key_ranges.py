# mypy: disable-error-code="no-untyped-def"
"""The option key_ranges: the one or two ranges of keys [begin, end) that each query sees.

Each kernel loads the ranges of its rows and normalises them: clamped to what mask and length let the row see, sorted,
and one range where two overlap or touch. A row thus sees [begin_0, end_0) and [begin_1, end_1) with
begin_0 <= end_0 < begin_1 <= end_1; an empty range is [0, 0), and the second is empty if the first is.

The hull of a block's first ranges, and that of its second ranges, are the keys that the block visits. Keys that all
rows see by the same range need no mask. flash_bwd_dq_kernel also stores the ranges of each row, and the hulls of each
unit of ROWS_OF_UNIT rows. flash_bwd_dkv_kernel finds the rows that see a block of keys in them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS_OF_UNIT = 16  # divides every BLOCK_M of flash_bwd_dq_kernel

NOWHERE = tl.constexpr(2**30)  # after every key: MAX_ROWS of check_tensors.py is 2^29
UNITS_AT_ONCE = tl.constexpr(512)  # that flash_bwd_dkv_kernel reads
NO_UNIT = tl.constexpr(2**26)  # after every unit, and no number of its rows overflows


# ---- on the host ----------------------------------------------------------------------------------------------------


def leading_dims(is_varlen: bool) -> int:
    """The dimensions of key_ranges for batch (equal lengths only), heads and queries."""
    return 2 if is_varlen else 3


def num_ranges(key_ranges: torch.Tensor, is_varlen: bool) -> int:
    """Ranges of a query: 1 or 2."""
    return 2 if key_ranges.ndim == leading_dims(is_varlen) + 2 else 1


def readable(key_ranges: torch.Tensor, is_varlen: bool) -> torch.Tensor:
    """The tensor, or a copy if the numbers of a query do not follow each other in memory."""
    expected = 1
    for dim in range(key_ranges.ndim - 1, leading_dims(is_varlen) - 1, -1):
        if key_ranges.stride(dim) != expected:
            return key_ranges.contiguous()
        expected *= 2
    return key_ranges


def range_arguments(key_ranges: torch.Tensor, is_varlen: bool) -> dict[str, Any]:
    """The arguments of the attention kernels. A batch or heads of one element have a stride of 0: all share it."""
    rows_dim = leading_dims(is_varlen) - 1
    strides = [0 if n == 1 else stride for n, stride in zip(key_ranges.shape, key_ranges.stride(), strict=True)]
    return {
        "key_ranges": key_ranges,
        "ranges_stride_b": 0 if is_varlen else strides[0],
        "ranges_stride_h": strides[rows_dim - 1],
        "ranges_stride_s": key_ranges.stride(rows_dim),
        "NUM_RANGES": num_ranges(key_ranges, is_varlen),
    }


# ---- in kernels: the keys of a block of rows ------------------------------------------------------------------------


@triton.jit
def clamped_range(begin, end, first_key, end_key):
    """[begin, end) within [first_key, end_key), for all values; [0, 0) if nothing is left."""
    begin = tl.maximum(begin, first_key)
    end = tl.minimum(end, end_key)
    is_empty = end <= begin
    return tl.where(is_empty, 0, begin), tl.where(is_empty, 0, end)


@triton.jit
def in_order(begin_0, end_0, begin_1, end_1):
    """Two ranges of clamped_range sorted, the empty one last; one range if they overlap or touch."""
    is_swapped = (end_1 > 0) & ((end_0 == 0) | (begin_1 < begin_0))
    first_begin = tl.where(is_swapped, begin_1, begin_0)
    first_end = tl.where(is_swapped, end_1, end_0)
    second_begin = tl.where(is_swapped, begin_0, begin_1)
    second_end = tl.where(is_swapped, end_0, end_1)
    is_one = second_begin <= first_end  # also if the second is empty, or both are
    first_end = tl.where(is_one, tl.maximum(first_end, second_end), first_end)
    return first_begin, first_end, tl.where(is_one, 0, second_begin), tl.where(is_one, 0, second_end)


@triton.jit
def load_ranges(
    key_ranges,  # int32: the tuple of [batch, heads, rows, NUM_RANGES, 2], as in tiles.py; strides of 0 broadcast
    batch,
    head,
    rows,  # (BLOCK_M,) int32
    seqlen_q,
    first_key,  # (BLOCK_M,) int32, as of visible_keys; counts with WINDOW
    last_key,  # (BLOCK_M,) int32
    WINDOW: tl.constexpr,
    NUM_RANGES: tl.constexpr,
):
    """(begin_0, end_0, begin_1, end_1) of each row, normalised; all 0 for rows past the last."""
    pointer, stride_b, stride_h, stride_s = key_ranges
    pointers = pointer + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h)
    pointers += rows.to(tl.int64) * stride_s
    first = tl.zeros_like(last_key)
    if WINDOW:
        first = tl.maximum(first_key, 0)
    end = tl.where(rows < seqlen_q, last_key + 1, 0)
    in_range = rows < seqlen_q
    begin_0, end_0 = clamped_range(
        tl.load(pointers, mask=in_range, other=0), tl.load(pointers + 1, mask=in_range, other=0), first, end
    )
    begin_1 = tl.zeros_like(begin_0)
    end_1 = begin_1
    if NUM_RANGES == 2:
        begin_1, end_1 = clamped_range(
            tl.load(pointers + 2, mask=in_range, other=0), tl.load(pointers + 3, mask=in_range, other=0), first, end
        )
        begin_0, end_0, begin_1, end_1 = in_order(begin_0, end_0, begin_1, end_1)
    return begin_0, end_0, begin_1, end_1


@triton.jit
def hull(begin, end, is_row, AXIS: tl.constexpr):
    """(begin, end, full_begin, full_end) of the ranges of some rows: their hull, and what is in all of them.

    is_row: false for rows past the last, which do not count. An empty range makes [full_begin, full_end) empty.
    """
    hull_end = tl.max(end, AXIS)
    hull_begin = tl.minimum(tl.min(tl.where(end > begin, begin, NOWHERE), AXIS), hull_end)
    full_begin = tl.max(begin, AXIS)
    full_end = tl.minimum(tl.min(tl.where(is_row, end, NOWHERE), AXIS), hull_end)
    return hull_begin, hull_end, full_begin, full_end


@triton.jit
def blocks_of_hull(bounds, after, BLOCK_N: tl.constexpr):
    """(n_begin, full_begin, full_end, n_end) of a hull, as of visible_keys, for the blocks from ``after`` on."""
    begin, end, full_begin, full_end = bounds
    n_begin = tl.maximum(begin // BLOCK_N * BLOCK_N, after)
    full_begin = tl.maximum(tl.cdiv(full_begin, BLOCK_N) * BLOCK_N, n_begin)
    full_end = full_end // BLOCK_N * BLOCK_N
    has_full = full_end > full_begin
    return n_begin, tl.where(has_full, full_begin, n_begin), tl.where(has_full, full_end, n_begin), end


@triton.jit
def blocks_of_ranges(ranges, is_row, BLOCK_N: tl.constexpr):
    """The blocks of keys of the first ranges of a block of rows, and those of the second that are not among them."""
    begin_0, end_0, begin_1, end_1 = ranges
    of_first = blocks_of_hull(hull(begin_0, end_0, is_row, 0), 0, BLOCK_N)
    after = tl.cdiv(of_first[3], BLOCK_N) * BLOCK_N
    return of_first, blocks_of_hull(hull(begin_1, end_1, is_row, 0), after, BLOCK_N)


@triton.jit
def chosen_blocks(blocks, part, NUM_RANGES: tl.constexpr):
    """The blocks of the first ranges, or with part 1 those of the second."""
    n_begin, full_begin, full_end, n_end = blocks[0]
    if NUM_RANGES == 2:
        n_begin = tl.where(part == 0, n_begin, blocks[1][0])
        full_begin = tl.where(part == 0, full_begin, blocks[1][1])
        full_end = tl.where(part == 0, full_end, blocks[1][2])
        n_end = tl.where(part == 0, n_end, blocks[1][3])
    return n_begin, full_begin, full_end, n_end


@triton.jit
def is_in(second, keys):
    """True where a key is in the second range, a pair (begin, end)."""
    return (keys >= second[0]) & (keys < second[1])


# ---- in kernels: the rows of a block of keys ------------------------------------------------------------------------


@triton.jit
def store_ranges(
    ranges,
    is_row,
    row_ranges,  # int32 [2 * NUM_RANGES, batch * nheads, padded_q], from the first row of the block on
    unit_ranges,  # int32 [4 * NUM_RANGES, batch * nheads, padded_q / ROWS_OF_UNIT], from its first unit on
    num_rows,  # batch * nheads * padded_q
    BLOCK_M: tl.constexpr,
    ROWS_OF_UNIT: tl.constexpr,
    NUM_RANGES: tl.constexpr,
):
    """Write the ranges of a block of rows, and the hulls of its units."""
    UNITS: tl.constexpr = BLOCK_M // ROWS_OF_UNIT
    num_units = num_rows // ROWS_OF_UNIT
    rows = row_ranges + tl.arange(0, BLOCK_M)
    units = unit_ranges + tl.arange(0, UNITS)
    is_row_of_unit = is_row.reshape(UNITS, ROWS_OF_UNIT)
    for i in tl.static_range(NUM_RANGES):
        begin, end = ranges[2 * i], ranges[2 * i + 1]
        tl.store(rows + 2 * i * num_rows, begin)
        tl.store(rows + (2 * i + 1) * num_rows, end)
        bounds = hull(begin.reshape(UNITS, ROWS_OF_UNIT), end.reshape(UNITS, ROWS_OF_UNIT), is_row_of_unit, 1)
        for j in tl.static_range(4):
            tl.store(units + (4 * i + j) * num_units, bounds[j])


@triton.jit
def store_no_ranges(
    row_ranges, unit_ranges, num_rows, BLOCK_M: tl.constexpr, ROWS_OF_UNIT: tl.constexpr, NUM_RANGES: tl.constexpr
):
    """store_ranges of a block past the last row."""
    none = tl.zeros([BLOCK_M], tl.int32)
    store_ranges(
        (none, none, none, none), none > 0, row_ranges, unit_ranges, num_rows, BLOCK_M, ROWS_OF_UNIT, NUM_RANGES
    )


@triton.jit
def load_stored_ranges(row_ranges, num_rows, BLOCK_M: tl.constexpr, NUM_RANGES: tl.constexpr):
    """(begin_0, end_0, begin_1, end_1) of a block of rows that store_ranges wrote."""
    rows = row_ranges + tl.arange(0, BLOCK_M)
    begin_0 = tl.load(rows)
    end_0 = tl.load(rows + num_rows)
    begin_1 = begin_0
    end_1 = begin_0
    if NUM_RANGES == 2:
        begin_1 = tl.load(rows + 2 * num_rows)
        end_1 = tl.load(rows + 3 * num_rows)
    return begin_0, end_0, begin_1, end_1


@triton.jit
def rows_of_keys(
    start_n,
    end_n,
    unit_ranges,  # as of store_ranges, from the first unit of a sequence and head on
    num_units,  # batch * nheads * padded_q / ROWS_OF_UNIT
    seqlen_q,
    BLOCK_M: tl.constexpr,
    ROWS_OF_UNIT: tl.constexpr,
    NUM_RANGES: tl.constexpr,
):
    """(m_begin, full_begin, full_end, m_end) of keys [start_n, end_n), as of visible_queries.

    Rows of [m_begin, m_end) may see some of the keys, the others none. All rows of [full_begin, full_end) see them all.
    """
    units = tl.cdiv(seqlen_q, ROWS_OF_UNIT)
    first = tl.full([UNITS_AT_ONCE], NO_UNIT, tl.int32)
    last = tl.full([UNITS_AT_ONCE], -1, tl.int32)
    first_full = first
    last_full = last
    num_full = tl.zeros([UNITS_AT_ONCE], tl.int32)
    for start in tl.range(0, units, UNITS_AT_ONCE):
        unit = start + tl.arange(0, UNITS_AT_ONCE)
        sees = unit < 0
        is_full = sees
        for i in tl.static_range(NUM_RANGES):
            bounds = unit_ranges + tl.cast(4 * i, tl.int64) * num_units + unit
            in_range = unit < units
            begin = tl.load(bounds, mask=in_range, other=0)
            end = tl.load(bounds + num_units, mask=in_range, other=0)
            full_begin = tl.load(bounds + 2 * num_units, mask=in_range, other=0)
            full_end = tl.load(bounds + 3 * num_units, mask=in_range, other=0)
            sees = sees | ((begin < end_n) & (end > start_n))
            is_full = is_full | ((full_begin <= start_n) & (full_end >= end_n))
        first = tl.minimum(first, tl.where(sees, unit, NO_UNIT))
        last = tl.maximum(last, tl.where(sees, unit, -1))
        first_full = tl.minimum(first_full, tl.where(is_full, unit, NO_UNIT))
        last_full = tl.maximum(last_full, tl.where(is_full, unit, -1))
        num_full += is_full.to(tl.int32)
    m_begin = tl.min(first, 0) * ROWS_OF_UNIT // BLOCK_M * BLOCK_M
    m_end = (tl.max(last, 0) + 1) * ROWS_OF_UNIT
    first_unit = tl.min(first_full, 0)
    end_unit = tl.max(last_full, 0) + 1
    full_begin = tl.cdiv(first_unit * ROWS_OF_UNIT, BLOCK_M) * BLOCK_M
    full_end = end_unit * ROWS_OF_UNIT // BLOCK_M * BLOCK_M
    # Full units with others between them are not a range of rows: all of them take the mask.
    has_full = (end_unit - first_unit == tl.sum(num_full, 0)) & (full_end > full_begin)
    return m_begin, tl.where(has_full, full_begin, m_begin), tl.where(has_full, full_end, m_begin), m_end
