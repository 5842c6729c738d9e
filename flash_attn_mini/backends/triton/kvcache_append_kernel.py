"""Appends new keys and values to a KV cache, in pages or not, and rotates the new keys and the queries.

Rotary position embedding in float32, rounded once: a pair (a, b) becomes (a cos - b sin, a sin + b cos). Features past
ROTARY_DIM, and values, are copied. New keys past the capacity, in a page that is not in the pool, or in a cache row
that does not exist are not written.
"""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .sequences import filled_keys


@triton.jit
def load_rotated(
    src,  # [batch, seqlen, heads, headdim]: a tuple, see tiles.py
    sequence,
    tokens,  # (ROWS,)
    heads,  # (ROWS,)
    in_range,  # (ROWS,)
    positions,  # (ROWS,): rows of the tables; a token past them is not rotated
    rotary_cos,  # [rotary_rows, ROTARY_DIM / 2], contiguous
    rotary_sin,
    rotary_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0: no rotation
    INTERLEAVED: tl.constexpr,
):
    """(ROWS, BLOCK_D): rotated rows of src, in its dtype."""
    pointer, stride_b, stride_h, stride_s = src
    first = pointer + sequence.to(tl.int64) * stride_b
    first += tokens.to(tl.int64)[:, None] * stride_s + heads.to(tl.int64)[:, None] * stride_h
    cols = tl.arange(0, BLOCK_D)
    mask = in_range[:, None] & (cols < HEAD_DIM)[None, :]
    x = tl.load(first + cols[None, :], mask=mask, other=0.0)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if INTERLEAVED:
            pair = cols // 2
            is_first = cols % 2 == 0
            partner = tl.where(is_first, cols + 1, cols - 1)
        else:
            pair = cols % HALF
            is_first = cols < HALF
            partner = tl.where(is_first, cols + HALF, cols - HALF)
        rotates = (in_range & (positions >= 0) & (positions < rotary_rows))[:, None] & (cols < ROTARY_DIM)[None, :]
        at = positions.to(tl.int64)[:, None] * HALF + pair[None, :]
        cos = tl.load(rotary_cos + at, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(rotary_sin + at, mask=rotates, other=0.0).to(tl.float32)
        other = tl.load(first + partner[None, :], mask=rotates, other=0.0).to(tl.float32)
        rotated = x.to(tl.float32) * cos + other * tl.where(is_first[None, :], -sin, sin)
        x = tl.where(rotates, rotated.to(x.dtype), x)
    return x


@triton.jit
def store_in_cache(
    cache,  # [batch_cache, capacity, nheads_k, headdim] or [num_pages, page_size, nheads_k, headdim]: a tuple
    x,  # (ROWS, BLOCK_D)
    places,  # (ROWS,): cache row or page
    tokens,  # (ROWS,): rows of it
    heads,
    in_range,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write rows of a cache."""
    pointer, stride_b, stride_h, stride_s = cache
    first = pointer + places.to(tl.int64)[:, None] * stride_b + tokens.to(tl.int64)[:, None] * stride_s
    first += heads.to(tl.int64)[:, None] * stride_h
    cols = tl.arange(0, BLOCK_D)
    tl.store(first + cols[None, :], x, mask=in_range[:, None] & (cols < HEAD_DIM)[None, :])


NOT_SPECIALIZED = [
    "rotary_rows", "q_step", "batch", "seqlen_q", "seqlen_new", "capacity", "nheads", "nheads_k", "cache_seqlen",
    "batch_cache", "max_pages", "num_pages", "page_size",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def kvcache_append_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: tuples, see tiles.py
    q_rotated,  # like q; read and written only with ROTARY_DIM
    k_new,  # [batch, seqlen_new, nheads_k, headdim]
    v_new,  # like k_new, with its own head dim
    k_cache,
    v_cache,
    rotary_cos,
    rotary_sin,
    rotary_rows,
    q_step,  # query i is rotated at cache_seqlens + i * q_step
    batch,
    seqlen_q,
    seqlen_new,
    capacity,
    nheads,
    nheads_k,
    cache_seqlens,  # see filled_keys
    cache_seqlen,
    cache_batch_idx,
    batch_cache,
    block_table,  # [batch, max_pages] int32, contiguous; None: no pages
    max_pages,
    num_pages,
    page_size,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # a row is one head of one token
):
    """Grid: for each sequence the blocks of new keys, then those of new values, then with ROTARY_DIM those of q."""
    new_blocks = tl.cdiv(seqlen_new * nheads_k, BLOCK_ROWS)
    blocks = 2 * new_blocks
    if ROTARY_DIM > 0:
        blocks += tl.cdiv(seqlen_q * nheads, BLOCK_ROWS)
    sequence = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    filled = filled_keys(cache_seqlens, cache_seqlen, capacity, sequence, batch)

    if block >= 2 * new_blocks:
        if ROTARY_DIM > 0:
            rows = (block - 2 * new_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            tokens = rows // nheads
            heads = rows % nheads
            in_range = tokens < seqlen_q
            x = load_rotated(
                q, sequence, tokens, heads, in_range, filled + tokens * q_step,
                rotary_cos, rotary_sin, rotary_rows, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
            )  # fmt: skip
            store_in_cache(q_rotated, x, tl.zeros_like(tokens) + sequence, tokens, heads, in_range, HEAD_DIM, BLOCK_D)
        return

    rows = block % new_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = rows // nheads_k
    heads = rows % nheads_k
    in_range = (tokens < seqlen_new) & (tokens < capacity - filled)
    positions = filled + tokens
    if block_table is None:
        cache_row = sequence
        if cache_batch_idx is not None:
            cache_row = tl.load(cache_batch_idx + sequence)
        places = tl.zeros_like(tokens) + cache_row
        in_range = in_range & (places >= 0) & (places < batch_cache)
        slots = positions
    else:
        page_at = block_table + sequence.to(tl.int64) * max_pages + positions // page_size
        places = tl.load(page_at, mask=in_range, other=-1)
        in_range = in_range & (places >= 0) & (places < num_pages)
        slots = positions % page_size
    if block < new_blocks:
        keys = load_rotated(
            k_new, sequence, tokens, heads, in_range, positions,
            rotary_cos, rotary_sin, rotary_rows, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
        store_in_cache(k_cache, keys, places, slots, heads, in_range, HEAD_DIM, BLOCK_D)
    else:
        values = load_rotated(
            v_new, sequence, tokens, heads, in_range, positions,
            rotary_cos, rotary_sin, rotary_rows, HEAD_DIM_V, BLOCK_DV, 0, INTERLEAVED,
        )  # fmt: skip
        store_in_cache(v_cache, values, places, slots, heads, in_range, HEAD_DIM_V, BLOCK_DV)
