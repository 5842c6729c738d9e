# mypy: disable-error-code="no-untyped-def"
"""Split-KV: which keys of a KV cache a program computes. Each sequence is cut into splits of consecutive keys.

The kernels cut by the lengths that they read on the device. A head is one key/value head of one sequence. Two ways:

- FIXED_UNITS: each sequence has units_per_sequence splits. A split has split_keys keys, or with split_keys 0 the keys
  of the sequence are divided by units_per_sequence. A sequence does not depend on the others. A program has one split.
- otherwise: the keys of each head are cut into units of UNIT_KEYS. The units of all heads, one after the other, are cut
  into pieces whose sizes differ by at most one unit. A program has one piece. Its keys of one head are a run: one
  split of the head. Example: 3 heads of 5, 1 and 6 units, 3 pieces:

    unit    A0  A1  A2  A3   A4 | B0 | C0  C1   C2  C3  C4  C5
    piece   0--------------  1----------------  2-------------
    slot    1                2  |    | 3        4

  The partial result of a run goes to slot 2 * piece + 1 if the run begins its head, else to slot 2 * piece. A run with
  all keys of its head, such as B's, has no partial result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sequences import cached_keys

MIN_PIECE_UNITS = tl.constexpr(2)


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
    unit, cache, batch, seqlen_q, window_left, units_per_sequence, split_keys, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(sequence, split, splits of the sequence, first key, end key) of a program with FIXED_UNITS.

    The keys count from the first valid one. Every sequence has at least one split. A program past the splits of its
    sequence has no keys.
    """
    sequence = unit // units_per_sequence
    split = unit % units_per_sequence
    first, seqlen_k = keys_to_split(cache, sequence, batch, seqlen_q, window_left)
    size = split_keys
    if split_keys == 0:
        first = first // BLOCK_N * BLOCK_N
        size = tl.maximum(round_up(tl.cdiv(seqlen_k - first, units_per_sequence), BLOCK_N), BLOCK_N)
    else:
        first = first // size * size
    num_splits = tl.maximum(tl.cdiv(seqlen_k - first, size), 1).to(tl.int32)
    begin = (first + split * size).to(tl.int32)
    end = tl.minimum(begin + size, seqlen_k).to(tl.int32)
    return sequence, split, num_splits, begin, end


@triton.jit
def units_of(cache, sequence, batch, seqlen_q, window_left, UNIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(units of a head of the sequence, its first key, keys of the sequence); 0 units past the batch, else at least 1.

    The first key is a multiple of BLOCK_N. sequence: a scalar or a tensor.
    """
    first, seqlen_k = keys_to_split(cache, sequence, batch, seqlen_q, window_left)
    first = first // BLOCK_N * BLOCK_N
    units = tl.maximum(tl.cdiv(seqlen_k - first, UNIT_KEYS), 1)
    return tl.where(sequence < batch, units, 0).to(tl.int32), first.to(tl.int32), seqlen_k.to(tl.int32)


@triton.jit
def find_piece(
    piece,
    cache,
    batch,
    nheads_k,
    seqlen_q,
    window_left,
    most_pieces,
    UNIT_KEYS: tl.constexpr,  # such that the number of units fits into int32
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,  # lengths that are read at once
    READ_ONCE: tl.constexpr,  # batch <= AT_ONCE
):
    """(sequence, first unit in the sequence, first unit in the batch, units, units of the batch, pieces) of a piece.

    Units count the heads of a sequence one after the other. Piece i begins at unit i * units // pieces, so that a
    number of pieces that is a multiple of the number of equal heads cuts at every head. A piece past the last has
    0 units.
    """
    sequences = tl.arange(0, AT_ONCE)
    if READ_ONCE:
        units, _, _ = units_of(cache, sequences, batch, seqlen_q, window_left, UNIT_KEYS, BLOCK_N)
        total = tl.sum(units, 0) * nheads_k
    else:
        total = tl.cast(0, tl.int32)
        for start in tl.range(0, batch, AT_ONCE, num_stages=1):
            units, _, _ = units_of(cache, start + sequences, batch, seqlen_q, window_left, UNIT_KEYS, BLOCK_N)
            total += tl.sum(units, 0) * nheads_k
    pieces = tl.minimum(tl.maximum(total // MIN_PIECE_UNITS, 1), most_pieces)
    share = total // pieces  # piece * total does not fit into int32, the products below do
    rest = total - share * pieces
    begin = piece * share + piece * rest // pieces
    size = share + (piece + 1) * rest // pieces - piece * rest // pieces
    size = tl.where(piece < pieces, size, 0)

    if READ_ONCE:
        ends = tl.cumsum(units, 0) * nheads_k
        is_before = (ends <= begin) & (sequences < batch)
        sequence = tl.sum(is_before.to(tl.int32), 0)
        before = tl.max(tl.where(is_before, ends, 0), 0)
    else:
        sequence = tl.cast(0, tl.int32)
        before = tl.cast(0, tl.int32)
        end = tl.cast(0, tl.int32)
        for start in tl.range(0, batch, AT_ONCE, num_stages=1):
            units, _, _ = units_of(cache, start + sequences, batch, seqlen_q, window_left, UNIT_KEYS, BLOCK_N)
            ends = end + tl.cumsum(units, 0) * nheads_k
            is_before = (ends <= begin) & (start + sequences < batch)
            sequence += tl.sum(is_before.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
            end += tl.sum(units, 0) * nheads_k
    return sequence, begin - before, begin, size, total, pieces


@triton.jit
def piece_of(unit, total, pieces):
    """The piece that has a unit of the batch: the last one that begins at or before it."""
    return (((unit + 1).to(tl.int64) * pieces - 1) // total).to(tl.int32)
