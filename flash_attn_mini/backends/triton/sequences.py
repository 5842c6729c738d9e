# mypy: disable-error-code="no-untyped-def"
"""Sequences of variable length, keys in pages, and keys in a KV cache: the rows of each sequence, and its blocks.

The host does not read cu_seqlens, block_table and the tensors of a KV cache, which lie in GPU memory. Every value is
clamped where it is loaded: a sequence is a range inside the tensor and a page is one of the pool, for all values.
csrc/common/sequence.h has the same rules in C++.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import load_rows


@triton.jit
def clamped(x, low, high):
    """x, but at least low and at most high."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def find_block(
    cu_seqlens,  # [num_sequences + 1] int32: the first row of each sequence, and the end of the last
    num_sequences,
    total,  # rows of the tensor
    index,  # of a block in the whole batch
    BLOCK: tl.constexpr,  # rows of a block
):
    """(sequence, block of it) of a block of the batch. An unused block lies past the end of its sequence.

    The first block of sequence i has the index ``cu_seqlens[i] // BLOCK + i``. This leaves at most one unused block per
    sequence and needs no sum over lengths. The host launches total // BLOCK + num_sequences blocks per head.
    """
    AT_ONCE: tl.constexpr = 128
    low = tl.cast(0, tl.int32)
    high = tl.cast(num_sequences, tl.int32)
    while high - low > AT_ONCE:  # sequence `low` begins at or before the block, sequence `high` after it
        middle = (low + high) // 2
        is_before = clamped(tl.load(cu_seqlens + middle), 0, total) // BLOCK + middle <= index
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    candidates = low + tl.arange(0, AT_ONCE)
    in_range = candidates < high
    begins = clamped(tl.load(cu_seqlens + candidates, mask=in_range, other=0), 0, total)
    num_before = tl.sum((in_range & (begins // BLOCK + candidates <= index)).to(tl.int32))
    sequence = low + tl.maximum(num_before - 1, 0)
    first_block = clamped(tl.load(cu_seqlens + sequence), 0, total) // BLOCK + sequence
    return sequence, tl.maximum(index - first_block, 0)


@triton.jit
def sequence_rows(cu_seqlens, sequence, total):
    """(first row, rows) of a sequence of a tensor with ``total`` rows."""
    begin = clamped(tl.load(cu_seqlens + sequence), 0, total)
    end = clamped(tl.load(cu_seqlens + sequence + 1), begin, total)
    return begin, end - begin


@triton.jit
def paged_length(cu_seqlens, sequence, max_pages, page_size):
    """Keys of a sequence in pages. Only the differences of cu_seqlens count."""
    MAX_ROWS: tl.constexpr = 1 << 29  # no row number of a kernel overflows
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    max_keys = tl.minimum(tl.cast(max_pages, tl.int64) * page_size, MAX_ROWS)
    return clamped(end - begin, 0, max_keys).to(tl.int32)


@triton.jit
def filled_keys(
    cache_seqlens,  # [batch] int32: keys in the cache before the call; None: cache_seqlen, for every sequence
    cache_seqlen,
    capacity,  # keys of a cache row, or of max_pages pages
    sequence,  # a scalar or a tensor
    batch,
):
    """Keys of a sequence in the KV cache before the call, left padding included; 0 past the batch."""
    if cache_seqlens is None:
        length = tl.zeros_like(sequence) + cache_seqlen
    else:
        length = tl.load(cache_seqlens + sequence, mask=sequence < batch, other=0)
    return tl.where(sequence < batch, clamped(length, 0, capacity), 0)


@triton.jit
def cached_keys(cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity, sequence, batch):
    """(first key, keys) of a sequence in a KV cache, appended keys included and left padding excluded.

    Appended keys past the capacity do not exist.
    """
    length = filled_keys(cache_seqlens, cache_seqlen, capacity, sequence, batch)
    end = length + tl.minimum(seqlen_new, capacity - length)
    begin = tl.zeros_like(sequence)
    if cache_leftpad is not None:
        begin = clamped(tl.load(cache_leftpad + sequence, mask=sequence < batch, other=0), 0, end)
    return begin, end - begin


@triton.jit
def cache_row(cache_batch_idx, batch_cache, sequence):
    """The row of a KV cache without pages that holds a sequence."""
    row = sequence
    if cache_batch_idx is not None:
        row = clamped(tl.load(cache_batch_idx + sequence), 0, batch_cache - 1)
    return row


@triton.jit
def load_keys(
    src,  # K or V as in load_rows; with pages the tuple of [num_pages, page_size, heads, headdim]
    pages,  # (the sequence's row of block_table, num_pages, page_size, number of its first key), or None
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
    """Keys [start, start + BLOCK_ROWS) of one sequence and head; zeros beyond key `end` and beyond HEAD_DIM."""
    if pages is None:
        tile = load_rows(src, batch, head, start, end, None, HEAD_DIM, BLOCK_D, BLOCK_ROWS, CHECK_ROWS, USE_TMA)
    else:
        tile = load_paged_rows(src, pages, head, start, end, HEAD_DIM, BLOCK_D, BLOCK_ROWS)
    return tile


@triton.jit
def page_number(pages, start, end):
    """The page of key `start`, clamped; key `end` and those after it have none, and the result is some page."""
    block_table, num_pages, page_size, first_key = pages
    page = tl.load(block_table + (start + first_key) // page_size, mask=start < end, other=0)
    return clamped(page, 0, num_pages - 1)


@triton.jit
def load_keys_of_page(
    src,
    pages,
    page,  # of key `start`: all keys of the tile lie in it
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """load_keys with pages whose size is a multiple of BLOCK_ROWS, for a tile that lies in one page."""
    pointer, stride_page, stride_h, stride_s = src
    page_size, first_key = pages[2], pages[3]
    pointer += page.to(tl.int64) * stride_page + (start + first_key) % page_size * tl.cast(stride_s, tl.int64)
    rows = pointer, stride_page, stride_h, stride_s
    batch = tl.cast(0, tl.int32)
    return load_rows(rows, batch, head, 0, end - start, None, HEAD_DIM, BLOCK_D, BLOCK_ROWS, CHECK_ROWS, False)


@triton.jit
def load_paged_rows(
    src,
    pages,
    head,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """load_keys with pages."""
    pointer, stride_page, stride_h, stride_s = src
    block_table, num_pages, page_size, first_key = pages
    rows = start + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    in_range = rows < end
    rows += first_key
    page = clamped(tl.load(block_table + rows // page_size, mask=in_range, other=0), 0, num_pages - 1).to(tl.int64)
    first = pointer + head.to(tl.int64) * stride_h
    pointers = first + (page * stride_page + (rows % page_size).to(tl.int64) * stride_s)[:, None] + cols[None, :]
    mask = in_range[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (cols[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=mask, other=0.0)
