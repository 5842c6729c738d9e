"""Kernels that call the device functions of the Triton backend one by one, for test_triton_*.py."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn_mini.backends.triton.key_ranges import blocks_of_ranges, load_ranges, rows_of_keys, store_ranges
from flash_attn_mini.backends.triton.sequences import find_block
from flash_attn_mini.backends.triton.splits import find_piece, find_split, piece_of
from flash_attn_mini.backends.triton.visible import visible_keys, visible_queries


@triton.jit
def find_block_probe(cu_seqlens, num_sequences, total, found, BLOCK: tl.constexpr):
    """found [blocks, 2]: sequence and block of it."""
    index = tl.program_id(0)
    sequence, block = find_block(cu_seqlens, num_sequences, total, index, BLOCK)
    tl.store(found + 2 * index, sequence)
    tl.store(found + 2 * index + 1, block)


@triton.jit
def visible_keys_probe(
    ranges, seqlen_q, seqlen_k, window_left, window_right, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ranges [blocks of queries, 4]: n_begin, full_begin, full_end, n_end."""
    start_m = tl.program_id(0) * BLOCK_M
    _, _, n_begin, full_begin, full_end, n_end = visible_keys(
        start_m, start_m + tl.arange(0, BLOCK_M), seqlen_q, seqlen_k, window_left, window_right,
        CAUSAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    tl.store(ranges + 4 * tl.program_id(0), n_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 1, full_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 2, full_end)
    tl.store(ranges + 4 * tl.program_id(0) + 3, n_end)


@triton.jit
def visible_queries_probe(
    ranges, seqlen_q, seqlen_k, window_left, window_right, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ranges [blocks of keys, 4]: m_begin, full_begin, full_end, m_end."""
    _, _, m_begin, full_begin, full_end, m_end = visible_queries(
        tl.program_id(0) * BLOCK_N, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )
    tl.store(ranges + 4 * tl.program_id(0), m_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 1, full_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 2, full_end)
    tl.store(ranges + 4 * tl.program_id(0) + 3, m_end)


@triton.jit
def find_split_probe(
    found, cache_seqlens, capacity, batch, seqlen_q, window_left, units_per_sequence, split_keys, BLOCK_N: tl.constexpr
):  # fmt: skip
    """found [units, 5]: what find_split returns."""
    unit = tl.program_id(0)
    cache = (cache_seqlens, capacity, 0, None, capacity)
    sequence, split, num_splits, begin, end = find_split(
        unit, cache, batch, seqlen_q, window_left, units_per_sequence, split_keys, BLOCK_N
    )
    tl.store(found + 5 * unit, sequence)
    tl.store(found + 5 * unit + 1, split)
    tl.store(found + 5 * unit + 2, num_splits)
    tl.store(found + 5 * unit + 3, begin)
    tl.store(found + 5 * unit + 4, end)


@triton.jit
def find_piece_probe(
    found, pieces_of, cache_seqlens, capacity, batch, nheads_k, seqlen_q, window_left, most_pieces,
    UNIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, READ_ONCE: tl.constexpr,
):  # fmt: skip
    """found [pieces, 6]: what find_piece returns. pieces_of [units of the batch]: piece_of each unit of the piece."""
    piece = tl.program_id(0)
    cache = (cache_seqlens, capacity, 0, None, capacity)
    sequence, unit, begin, size, total, pieces = find_piece(
        piece, cache, batch, nheads_k, seqlen_q, window_left, most_pieces, UNIT_KEYS, BLOCK_N, AT_ONCE, READ_ONCE
    )
    tl.store(found + 6 * piece, sequence)
    tl.store(found + 6 * piece + 1, unit)
    tl.store(found + 6 * piece + 2, begin)
    tl.store(found + 6 * piece + 3, size)
    tl.store(found + 6 * piece + 4, total)
    tl.store(found + 6 * piece + 5, pieces)
    for i in range(size):
        tl.store(pieces_of + begin + i, piece_of(begin + i, total, pieces))


@triton.jit
def ranges_of_rows_probe(
    blocks, row_ranges, unit_ranges, key_ranges, seqlen_q, seqlen_k, window_left, window_right,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_OF_UNIT: tl.constexpr,
    NUM_RANGES: tl.constexpr,
):  # fmt: skip
    """blocks [blocks of queries, 2, 4]: blocks_of_ranges. row_ranges, unit_ranges: as of store_ranges, of one head."""
    m_block = tl.program_id(0)
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    first_key, last_key, _, _, _, _ = visible_keys(
        start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )
    ranges = load_ranges(
        (key_ranges, 0, 0, 2 * NUM_RANGES), m_block, m_block, rows, seqlen_q, first_key, last_key,
        window_left is not None, NUM_RANGES,
    )  # fmt: skip
    of_ranges = blocks_of_ranges(ranges, rows < seqlen_q, BLOCK_N)
    for part in tl.static_range(2):
        for i in tl.static_range(4):
            tl.store(blocks + 8 * m_block + 4 * part + i, of_ranges[part][i])
    num_rows = tl.num_programs(0) * BLOCK_M
    units = unit_ranges + start_m // ROWS_OF_UNIT
    store_ranges(
        ranges, rows < seqlen_q, row_ranges + start_m, units, num_rows, BLOCK_M, ROWS_OF_UNIT, NUM_RANGES
    )  # fmt: skip


@triton.jit
def rows_of_keys_probe(
    ranges, unit_ranges, num_units, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS_OF_UNIT: tl.constexpr, NUM_RANGES: tl.constexpr,
):  # fmt: skip
    """ranges [blocks of keys, 4]: what rows_of_keys returns."""
    start_n = tl.program_id(0) * BLOCK_N
    m_begin, full_begin, full_end, m_end = rows_of_keys(
        start_n, tl.minimum(start_n + BLOCK_N, seqlen_k), unit_ranges, num_units, seqlen_q,
        BLOCK_M, ROWS_OF_UNIT, NUM_RANGES,
    )  # fmt: skip
    tl.store(ranges + 4 * tl.program_id(0), m_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 1, full_begin)
    tl.store(ranges + 4 * tl.program_id(0) + 2, full_end)
    tl.store(ranges + 4 * tl.program_id(0) + 3, m_end)
