"""Kernels that call the device functions of the Triton backend one by one, for test_triton_*.py."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn_mini.backends.triton.sequences import find_block
from flash_attn_mini.backends.triton.splits import find_split
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
    found, cache_seqlens, capacity, batch, seqlen_q, window_left, units_per_sequence, split_keys, target_units,
    FIXED_UNITS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """found [units, 6]: what find_split returns."""
    unit = tl.program_id(0)
    cache = (cache_seqlens, 0, 0, None, capacity)
    sequence, split, num_splits, begin, end, slot = find_split(
        unit, cache, batch, seqlen_q, window_left, units_per_sequence, split_keys, target_units,
        FIXED_UNITS, BLOCK_N, AT_ONCE,
    )  # fmt: skip
    tl.store(found + 6 * unit, sequence)
    tl.store(found + 6 * unit + 1, split)
    tl.store(found + 6 * unit + 2, num_splits)
    tl.store(found + 6 * unit + 3, begin)
    tl.store(found + 6 * unit + 4, end)
    tl.store(found + 6 * unit + 5, slot)
