"""Split-KV forward of a KV cache: one program attends a tile of queries to one piece of the keys; see splits.py.

The chain: kvcache.forward_kvcache -> flash_fwd_splitkv_kernel -> attend_split, then flash_fwd_splitkv_combine_kernel
if a head may have several splits. The query heads of a group share their keys, so they are the rows of one tile: row r
is query r // heads_per_kv of head r % heads_per_kv of the group. The result of a head with one split goes to out and
lse; those of several splits go to partial_out and statistics.
"""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .flash_fwd_kernel import attend_blocks
from .score_mod import head_slope, join_row_mod
from .sequences import cache_row, cached_keys
from .splits import find_piece, find_split, piece_of, units_of
from .tiles import from_row
from .visible import visible_keys_of_split


@triton.jit
def with_strides_of_8(tensor):
    """The tuple of a tensor whose strides are multiples of 8, known to the compiler, which then loads 16 bytes at once.

    Without this it looks for multiples of 16 elements. Example: head dim 40.
    """
    pointer, stride_b, stride_h, stride_s = tensor
    return pointer, stride_b // 8 * 8, stride_h // 8 * 8, stride_s // 8 * 8


NOT_SPECIALIZED = [
    "batch", "seqlen_q", "capacity", "nheads", "nheads_k", "heads_per_kv", "cache_seqlen", "seqlen_new", "batch_cache",
    "max_pages", "num_pages", "page_size", "window_left", "window_right", "units_per_sequence", "split_keys",
    "most_pieces",
]  # fmt: skip


@triton.jit
def attend_split(
    q,  # these as in flash_fwd_splitkv_kernel
    k,
    v,
    qk_scale,
    nheads,
    heads_per_kv,
    seqlen_q,
    cache,  # arguments of cached_keys
    rows_of_cache,  # (cache_batch_idx, batch_cache)
    pages,  # (block_table, max_pages, num_pages, page_size), or None
    window,  # (window_left, window_right)
    score_mod,
    batch,
    sequence,
    head_k,
    m_block,
    begin,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    TILES_IN_PAGES: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The state of attend_blocks for a tile of rows of one head and keys [begin, end) of its sequence."""
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    num_rows = seqlen_q * heads_per_kv
    queries = rows // heads_per_kv
    heads = head_k * heads_per_kv + rows % heads_per_kv
    first_query = m_block * BLOCK_M // heads_per_kv
    last_query = (tl.minimum(m_block * BLOCK_M + BLOCK_M, num_rows) - 1) // heads_per_kv
    in_tile = (rows < num_rows)[:, None]
    if HEAD_DIM != BLOCK_D:
        in_tile = in_tile & (cols[None, :] < HEAD_DIM)

    # The keys.
    cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity = cache
    window_left, window_right = window
    k_begin, seqlen_k = cached_keys(cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity, sequence, batch)
    pages_k = None
    batch_k = sequence
    if pages is None:
        cache_batch_idx, batch_cache = rows_of_cache
        batch_k = cache_row(cache_batch_idx, batch_cache, sequence)
        k = from_row(k, k_begin)
        v = from_row(v, k_begin)
    else:
        block_table, max_pages, num_pages, page_size = pages
        pages_k = (block_table + sequence.to(tl.int64) * max_pages, num_pages, page_size, k_begin)
    first_key, last_key, n_begin, full_begin, full_end, n_end = visible_keys_of_split(
        queries, first_query, last_query, seqlen_q, seqlen_k, begin, end, window_left, window_right, CAUSAL, BLOCK_N
    )
    slope = head_slope(SCORE_MOD, score_mod, sequence, nheads, heads[:, None])
    position = queries + (seqlen_k - seqlen_q)

    q_pointer, q_stride_b, q_stride_h, q_stride_s = q
    q_rows = q_pointer + sequence.to(tl.int64) * q_stride_b
    q_rows += queries.to(tl.int64)[:, None] * q_stride_s + heads.to(tl.int64)[:, None] * q_stride_h
    q_tile = tl.load(q_rows + cols[None, :], mask=in_tile, other=0.0)
    q_rest = None
    if BLOCK_REST > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        mask = (rows < num_rows)[:, None] & (rest < HEAD_DIM)[None, :]
        q_rest = tl.load(q_rows + rest[None, :], mask=mask, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = (acc, row_sum, row_max)
    if ONE_LOOP:
        return attend_blocks(
            state, q_tile, k, v, pages_k, batch_k, head_k, first_key, last_key, n_begin, n_end,
            end, qk_scale, score_mod, slope, position, None,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
            True, window_left is not None, SCORE_MOD, USE_TMA, TILES_IN_PAGES, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
        )  # fmt: skip
    else:  # noqa: RET505 (only one of the branches is compiled)
        if window_left is not None:
            state = attend_blocks(
                state, q_tile, k, v, pages_k, batch_k, head_k, first_key, last_key, n_begin, full_begin,
                end, qk_scale, score_mod, slope, position, None,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, True, SCORE_MOD, USE_TMA, TILES_IN_PAGES, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
            )  # fmt: skip
        state = attend_blocks(
            state, q_tile, k, v, pages_k, batch_k, head_k, first_key, last_key, full_begin, full_end,
            end, qk_scale, score_mod, slope, position, None,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
            False, False, SCORE_MOD, USE_TMA, TILES_IN_PAGES, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
        )  # fmt: skip
        return attend_blocks(
            state, q_tile, k, v, pages_k, batch_k, head_k, first_key, last_key, full_end, n_end,
            end, qk_scale, score_mod, slope, position, None,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
            True, window_left is not None, SCORE_MOD, USE_TMA, TILES_IN_PAGES, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
        )  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_fwd_splitkv_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: tuples, see tiles.py
    k,  # [batch_cache, capacity, nheads_k, headdim]; paged: [num_pages, page_size, nheads_k, headdim]
    v,  # like k, with its own head dim
    out,  # [batch, seqlen_q, nheads, headdim of v]
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    partial_out,  # [slots, seqlen_q * heads_per_kv, headdim of v] float32, contiguous; None: no head has two splits
    statistics,  # [slots, seqlen_q * heads_per_kv, 2] float32, contiguous: as row_max and row_sum below
    plan,  # [batch * nheads_k, 2] int32: number of splits and first slot (with pieces: first piece) of each head
    qk_scale,  # |softmax_scale| * log2(e); with score_mod see modified_logits
    batch,
    seqlen_q,
    capacity,
    nheads,
    nheads_k,
    heads_per_kv,  # nheads / nheads_k
    cache_seqlens,  # see cached_keys
    cache_seqlen,
    seqlen_new,
    cache_leftpad,
    cache_batch_idx,
    batch_cache,
    block_table,  # [batch, max_pages] int32, contiguous; None: no pages
    max_pages,
    num_pages,
    page_size,
    window_left,  # None: no window but CAUSAL
    window_right,
    score_mod,
    row_mod,  # see score_mod.py
    units_per_sequence,  # see find_split
    split_keys,
    most_pieces,  # see find_piece
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    HEAD_DIM_V: tl.constexpr,  # of v and out
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    FIXED_UNITS: tl.constexpr,
    UNIT_KEYS: tl.constexpr,  # see find_piece
    LENGTHS_AT_ONCE: tl.constexpr,
    READ_ONCE: tl.constexpr,  # batch <= LENGTHS_AT_ONCE
    STRIDES_OF_8: tl.constexpr,  # of k and v
    TILES_IN_PAGES: tl.constexpr,  # no tile has keys of two pages
    ONE_LOOP: tl.constexpr,  # every tile is masked: less code, and one pipeline for each run
    PROGRAMMATIC: tl.constexpr,  # this kernel may start before the one before it in the stream has ended
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_REST: tl.constexpr = 0,  # HEAD_DIM - BLOCK_D rounded up to a power of two; 0: at most BLOCK_D
):
    """Grid: pieces * tiles of rows; with FIXED_UNITS batch * units_per_sequence * nheads_k * tiles.

    The tiles of the same keys run together, so that they share the keys in L2.
    """
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    num_rows = seqlen_q * heads_per_kv
    num_m_blocks = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    m_block = num_m_blocks - 1 - program % num_m_blocks  # the last see the most keys under the causal mask
    piece = program // num_m_blocks
    cache = (cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, capacity)
    if STRIDES_OF_8:
        k = with_strides_of_8(k)
        v = with_strides_of_8(v)
    pages = None
    if block_table is not None:
        pages = (block_table, max_pages, num_pages, page_size)

    # The first run.
    if FIXED_UNITS:
        head_k = piece % nheads_k
        sequence, split, num_splits, begin, end = find_split(
            piece // nheads_k, cache, batch, seqlen_q, window_left, units_per_sequence, split_keys, BLOCK_N
        )
        left = (split < num_splits).to(tl.int32)
    else:
        sequence, unit, batch_unit, left, total, pieces_used = find_piece(
            piece, cache, batch, nheads_k, seqlen_q, window_left, most_pieces,
            UNIT_KEYS, BLOCK_N, LENGTHS_AT_ONCE, READ_ONCE,
        )  # fmt: skip
        units, _, _ = units_of(cache, sequence, batch, seqlen_q, window_left, UNIT_KEYS, BLOCK_N)
        head_k = unit // tl.maximum(units, 1)
        unit -= head_k * units

    while (left > 0) & (sequence < batch):
        # The keys of this run, and where its result goes.
        if FIXED_UNITS:
            is_whole = num_splits == 1
            begins_head = split == 0
            slot = (sequence * units_per_sequence + split) * nheads_k + head_k
            planned = (sequence * units_per_sequence) * nheads_k + head_k
            taken = 1
        else:
            units, first, seqlen_k = units_of(cache, sequence, batch, seqlen_q, window_left, UNIT_KEYS, BLOCK_N)
            taken = tl.maximum(tl.minimum(left, units - unit), 1)  # ends even if lengths change meanwhile
            begin = first + unit * UNIT_KEYS
            end = tl.minimum(begin + taken * UNIT_KEYS, seqlen_k)
            is_whole = taken == units
            begins_head = unit == 0
            slot = 2 * piece + begins_head.to(tl.int32)
            planned = piece

        state = attend_split(
            q, k, v, qk_scale, nheads, heads_per_kv, seqlen_q, cache, (cache_batch_idx, batch_cache), pages,
            (window_left, window_right), score_mod, batch, sequence, head_k, m_block, begin, end,
            HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, CAUSAL, NEGATIVE_SCALE, SCORE_MOD, TILES_IN_PAGES, ONE_LOOP,
            BLOCK_M, BLOCK_N, USE_TMA, BLOCK_REST,
        )  # fmt: skip
        acc, row_sum, row_max = state
        is_empty = row_sum == 0.0
        acc = tl.where(is_empty[:, None], 0.0, acc)  # NaN in V may have made it NaN

        rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tl.arange(0, BLOCK_DV)
        in_range = rows < num_rows
        in_tile = in_range[:, None]
        if HEAD_DIM_V != BLOCK_DV:
            in_tile = in_tile & (cols[None, :] < HEAD_DIM_V)
        if partial_out is not None:
            if begins_head & (m_block == 0):
                if not FIXED_UNITS:
                    num_splits = piece_of(batch_unit + units - 1, total, pieces_used) - piece + 1
                tl.store(plan + 2 * (sequence * nheads_k + head_k), num_splits)
                tl.store(plan + 2 * (sequence * nheads_k + head_k) + 1, planned)
            if not is_whole:
                slot_rows = slot.to(tl.int64) * num_rows + rows
                tl.store(statistics + 2 * slot_rows, row_max, mask=in_range)
                tl.store(statistics + 2 * slot_rows + 1, row_sum, mask=in_range)
                tl.store(partial_out + slot_rows[:, None] * HEAD_DIM_V + cols[None, :], acc, mask=in_tile)
        if is_whole:
            # A row without keys has out 0 and lse -inf.
            queries = rows // heads_per_kv
            heads = head_k * heads_per_kv + rows % heads_per_kv
            divisor = tl.where(is_empty, 1.0, row_sum)
            acc = acc * (1.0 / divisor)[:, None]
            if not SCORE_MOD:
                row_max = row_max * qk_scale
            row_lse = (row_max + tl.math.log2(divisor)) * 0.6931471805599453
            if row_mod is not None:
                row_lse, factor = join_row_mod(row_mod, sequence, heads, row_lse)
                acc = acc * factor[:, None]
            lse_at = (sequence.to(tl.int64) * nheads + heads) * seqlen_q + queries
            tl.store(lse + lse_at, row_lse, mask=in_range)
            out_pointer, out_stride_b, out_stride_h, out_stride_s = out
            out_rows = out_pointer + sequence.to(tl.int64) * out_stride_b
            out_rows += queries.to(tl.int64)[:, None] * out_stride_s + heads.to(tl.int64)[:, None] * out_stride_h
            tl.store(out_rows + cols[None, :], acc.to(out_pointer.dtype.element_ty), mask=in_tile)

        left -= taken
        if not FIXED_UNITS:  # the next run begins a head
            batch_unit += taken
            unit = unit * 0
            head_k += 1
            if head_k == nheads_k:
                head_k = head_k * 0
                sequence += 1
