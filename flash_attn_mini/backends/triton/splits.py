# mypy: disable-error-code="no-untyped-def"
"""Split-KV: which keys of a KV cache a program computes. Each sequence is cut into splits of consecutive keys.

The kernels cut by the lengths that they read on the device. A unit is one split of one sequence. Two layouts of units:

- FIXED_UNITS: each sequence has units_per_sequence units. A split has split_keys keys, or with split_keys 0 the keys of
  the sequence are divided by units_per_sequence. A sequence does not depend on the others.
- else: every split of the batch has the same number of keys, so that there are at most target_units + batch units.
  Example: BLOCK_N 64, target_units 4, lengths 1000 and 100: splits of 320 keys, 4 units and 1 unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sequences import cached_keys

MIN_SPLIT_KEYS = tl.constexpr(128)  # of a split whose size the kernels choose


@triton.jit
def keys_to_split(cache, sequence, batch, seqlen_q, window_left):
    """(first key that a query of the sequence sees, keys of the sequence). cache: arguments of cached_keys."""
    cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity = cache
    _, seqlen_k = cached_keys(cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity, sequence, batch)
    first = tl.zeros_like(seqlen_k)
    if window_left is not None:
        first = tl.maximum(seqlen_k - seqlen_q - tl.minimum(window_left, seqlen_k), 0)
    return first, seqlen_k


@triton.jit
def round_up(x, BLOCK: tl.constexpr):
    """The next multiple of BLOCK."""
    return tl.cdiv(x, BLOCK) * BLOCK


@triton.jit
def find_split(
    unit,
    cache,
    batch,
    seqlen_q,
    window_left,
    units_per_sequence,
    split_keys,
    target_units,
    FIXED_UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,  # lengths that are read at once
):
    """(sequence, split, splits of the sequence, first key, end key, slot) of a unit.

    The keys count from the first valid one. An unused unit has a sequence past the batch, or a split past the splits of
    the sequence. Every sequence has at least one split. The slot is the unit's place among partial results: without
    FIXED_UNITS only sequences of two splits or more have slots, which are at most 2 * target_units.
    """
    if FIXED_UNITS:
        sequence = unit // units_per_sequence
        split = unit % units_per_sequence
        slot = unit
        first, seqlen_k = keys_to_split(cache, sequence, batch, seqlen_q, window_left)
        size = split_keys
        if split_keys == 0:
            first = first // BLOCK_N * BLOCK_N
            size = tl.maximum(round_up(tl.cdiv(seqlen_k - first, units_per_sequence), BLOCK_N), BLOCK_N)
        else:
            first = first // size * size
    else:
        total = tl.cast(0, tl.int64)
        for begin in range(0, batch, AT_ONCE):
            first, seqlen_k = keys_to_split(cache, begin + tl.arange(0, AT_ONCE), batch, seqlen_q, window_left)
            total += tl.sum((seqlen_k - first // BLOCK_N * BLOCK_N).to(tl.int64))
        size = tl.maximum(round_up(tl.cdiv(total, target_units), BLOCK_N), MIN_SPLIT_KEYS)
        sequence = tl.cast(0, tl.int32)
        units_before = tl.cast(0, tl.int32)
        slots_before = tl.cast(0, tl.int32)
        end = tl.cast(0, tl.int32)
        for begin in range(0, batch, AT_ONCE):
            sequences = begin + tl.arange(0, AT_ONCE)
            first, seqlen_k = keys_to_split(cache, sequences, batch, seqlen_q, window_left)
            units = tl.maximum(tl.cdiv(seqlen_k - first // BLOCK_N * BLOCK_N, size), 1).to(tl.int32)
            units = tl.where(sequences < batch, units, 0)
            is_before = (sequences < batch) & (end + tl.cumsum(units, 0) <= unit)
            sequence += tl.sum(is_before.to(tl.int32))
            units_before += tl.sum(tl.where(is_before, units, 0))
            slots_before += tl.sum(tl.where(is_before & (units > 1), units, 0))
            end += tl.sum(units)
        split = unit - units_before
        slot = slots_before + split
        first, seqlen_k = keys_to_split(cache, sequence, batch, seqlen_q, window_left)
        first = first // BLOCK_N * BLOCK_N
    num_splits = tl.maximum(tl.cdiv(seqlen_k - first, size), 1).to(tl.int32)
    begin_key = (first + split * size).to(tl.int32)
    end_key = tl.minimum(begin_key + size, seqlen_k).to(tl.int32)
    return sequence, split, num_splits, begin_key, end_key, slot
