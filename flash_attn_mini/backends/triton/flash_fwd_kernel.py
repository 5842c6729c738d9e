"""The forward kernel in Triton: one program computes one block of BLOCK_M query rows of one head.

The chain: launch.forward -> flash_fwd_kernel -> attend_blocks -> load_keys. It is the tutorial's attention kernel with
the scale inside exp2, separate steps with and without a mask, TMA loads where the GPU has them, and any strides,
lengths and head dims. A feature that a call does not use is None to the kernel, and not compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attn_bias import bias_of_rows, with_bias
from .dropout import dropout_stream, keep_tile
from .key_ranges import blocks_of_ranges, chosen_blocks, is_in, load_ranges
from .score_mod import LN_2, LOG2_E, head_slope, join_row_mod, modified_logits
from .sequences import (
    cache_row,
    cached_keys,
    find_block,
    load_keys,
    load_keys_of_page,
    page_number,
    paged_length,
    sequence_rows,
)
from .tiles import assigned_block, from_column, from_row, load_rows, store_rows
from .visible import visible_keys


@triton.jit
def attend_blocks(
    state,  # acc (BLOCK_M, BLOCK_DV): the output before the division; row_sum (BLOCK_M,); row_max (BLOCK_M,), unscaled
    q_tile,  # (BLOCK_M, BLOCK_D)
    k,
    v,
    pages,  # as in load_keys
    batch,
    head_k,
    first_key,  # (BLOCK_M,) int32: the first key that each row sees; counts with WINDOW
    last_key,  # (BLOCK_M,) int32: the last key that each row sees
    n_begin,
    n_end,
    seqlen_k,
    qk_scale,
    score_mod,  # as in score_mod.py; row_max is then in units of log 2
    slope,
    position,  # (BLOCK_M,) int32: the key on the diagonal of each row, for ALiBi
    dropout,  # (stream, threshold, start_m), or None
    NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    USE_TMA: tl.constexpr,
    TILES_IN_PAGES: tl.constexpr = False,  # no tile has keys of two pages
    second=None,  # (begin, end), each (BLOCK_M,) int32: keys that each row sees, too; counts with MASKED
    bias=None,  # of bias_of_rows; row_max is then natural
    q_rest=None,  # (BLOCK_M, BLOCK_REST): the columns of q past BLOCK_D; without TMA
    BLOCK_REST: tl.constexpr = 0,
):
    """Attend to keys [n_begin, n_end), BLOCK_N at a time. MASKED: some row may not see all of them."""
    acc, row_sum, row_max = state
    if TILES_IN_PAGES:
        page = page_number(pages, n_begin, n_end)
    for n in tl.range(n_begin, n_end, BLOCK_N):
        if TILES_IN_PAGES:
            # The next page number arrives while this tile does, so that no load waits for one.
            next_page = page_number(pages, n + BLOCK_N, n_end)
            k_tile = load_keys_of_page(
                k, pages, page, head_k, n, seqlen_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED
            )  # fmt: skip
        else:
            k_tile = load_keys(k, pages, batch, head_k, n, seqlen_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if BLOCK_REST > 0:
            k_rest = from_column(k, BLOCK_D)
            if TILES_IN_PAGES:
                rest = load_keys_of_page(
                    k_rest, pages, page, head_k, n, seqlen_k, HEAD_DIM - BLOCK_D, BLOCK_REST, BLOCK_N, MASKED
                )  # fmt: skip
            else:
                rest = load_keys(
                    k_rest, pages, batch, head_k, n, seqlen_k, HEAD_DIM - BLOCK_D, BLOCK_REST, BLOCK_N, MASKED, USE_TMA
                )  # fmt: skip
            scores = tl.dot(q_rest, rest.T, scores, input_precision="ieee")
        if SCORE_MOD:
            scores, _ = modified_logits(scores, qk_scale, score_mod, slope, position - n, BLOCK_N)
        elif NEGATIVE_SCALE:
            scores = -scores
        if bias is not None:
            scores = with_bias(scores, bias, n, BLOCK_N)
        if MASKED:
            keys = n + tl.arange(0, BLOCK_N)
            visible = keys[None, :] <= last_key[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] >= first_key[:, None])
            if second is not None:
                visible = visible | is_in((second[0][:, None], second[1][:, None]), keys[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKED or bias is not None:  # a row that has seen no key yet: -inf - -inf would make its probabilities NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if bias is not None:
            p = tl.math.exp2((scores - shift[:, None]) * LOG2_E)
            alpha = tl.math.exp2((row_max - shift) * LOG2_E)
        elif not SCORE_MOD:
            # Not scores * qk_scale - shift * qk_scale: one FFMA, but 2^-24 of a score of 1e9 is an exponent of 60.
            p = tl.math.exp2((scores - shift[:, None]) * qk_scale)
            alpha = tl.math.exp2((row_max - shift) * qk_scale)
        else:
            p = tl.math.exp2(scores - shift[:, None])
            alpha = tl.math.exp2(row_max - shift)
        acc = acc * alpha[:, None]
        if TILES_IN_PAGES:
            v_tile = load_keys_of_page(
                v, pages, page, head_k, n, seqlen_k, HEAD_DIM_V, BLOCK_DV, BLOCK_N, MASKED
            )  # fmt: skip
            page = next_page
        else:
            v_tile = load_keys(v, pages, batch, head_k, n, seqlen_k, HEAD_DIM_V, BLOCK_DV, BLOCK_N, MASKED, USE_TMA)
        block_sum = tl.sum(p, 1)
        if dropout is not None:  # only for the product with V: the sum of the softmax counts dropped probabilities
            stream, threshold, start_m = dropout
            p = tl.where(keep_tile(stream, threshold, start_m, n, BLOCK_M, BLOCK_N), p, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        row_sum = row_sum * alpha + block_sum
        row_max = new_max
    return acc, row_sum, row_max


# Another length, number of heads or window must not compile another kernel. Triton specializes the integers of a tuple
# in spite of this list, so only strides travel in tuples.
NOT_SPECIALIZED = [
    "seqlen_q", "seqlen_k", "batch_heads", "nheads", "heads_per_kv", "heads_per_group",
    "num_sequences", "max_pages", "num_pages", "page_size", "window_left", "window_right", "threshold",
    "cache_seqlen", "seqlen_new", "batch_cache", "ranges_stride_b", "ranges_stride_h", "ranges_stride_s",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_fwd_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a tuple or a descriptor, see tiles.py
    k,  # [batch, seqlen_k, nheads_k, headdim], like q; paged: the tuple of [num_pages, page_size, nheads_k, headdim]
    v,  # like k, with its own head dim
    out,  # [batch, seqlen_q, nheads, headdim of v]: a tuple
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    qk_scale,  # |softmax_scale| * log2(e); with score_mod see modified_logits
    seqlen_q,  # variable length: the rows of all sequences, and the tensors have one batch entry
    seqlen_k,
    batch_heads,  # batch * nheads
    nheads,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,  # heads that run together, so that their K and V stay in the L2 cache
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    HEAD_DIM_V: tl.constexpr,  # of v and out
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_N: tl.constexpr,  # without causal mask and key_ranges: seqlen_k is a multiple of BLOCK_N
    NEGATIVE_SCALE: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    # Most calls do not pass the following arguments: each one costs host time.
    cu_seqlens=None,  # of q and of k: [num_sequences + 1] int32 each; None: sequences of equal length
    num_sequences=None,
    block_table=None,  # [num_sequences, max_pages] int32; None: keys lie one after the other
    max_pages=None,
    num_pages=None,
    page_size=None,
    window_left=None,  # None: no window but CAUSAL
    window_right=None,
    SCORE_MOD: tl.constexpr = False,  # see score_mod.py
    score_mod=None,
    rng_state=None,  # [2] int64: seed and offset; None: no dropout
    threshold=None,  # see keep_tile
    keep_scale=None,  # 1 / (1 - dropout_p)
    HAS_CACHE: tl.constexpr = False,  # k and v are KV caches, and seqlen_k is the capacity: see cached_keys
    cache_seqlens=None,
    cache_seqlen=None,
    seqlen_new=None,
    cache_leftpad=None,
    cache_batch_idx=None,
    batch_cache=None,
    row_mod=None,  # see score_mod.py
    key_ranges=None,  # see load_ranges
    ranges_stride_b=None,
    ranges_stride_h=None,
    ranges_stride_s=None,
    NUM_RANGES: tl.constexpr = 0,  # of a query; 0: no key_ranges
    attn_bias=None,  # [batch, nheads, seqlen_q, seqlen_k]: see attn_bias.py
    max_logits=None,  # [batch, nheads] float32, contiguous, filled with -inf; None: not wanted
    BLOCK_REST: tl.constexpr = 0,  # with HAS_CACHE: HEAD_DIM - BLOCK_D rounded up to a power of two; 0: at most BLOCK_D
):
    """Grid: cdiv(seqlen_q, BLOCK_M) * batch * nheads programs; variable length: see find_block, times nheads."""
    # The rows and the head of this program.
    if cu_seqlens is None:
        num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    else:
        num_m_blocks = seqlen_q // BLOCK_M + num_sequences
    m_block, batch_head = assigned_block(num_m_blocks, batch_heads, heads_per_group, CAUSAL)
    batch = batch_head // nheads
    head = batch_head % nheads
    head_k = head // heads_per_kv
    sequence = batch
    pages = None
    if NUM_RANGES > 0:
        ranges = (key_ranges, ranges_stride_b, ranges_stride_h, ranges_stride_s)
    lse += batch_head.to(tl.int64) * seqlen_q
    if cu_seqlens is not None:
        sequence, m_block = find_block(cu_seqlens[0], num_sequences, seqlen_q, m_block, BLOCK_M)
        q_begin, seqlen_q = sequence_rows(cu_seqlens[0], sequence, seqlen_q)
        if m_block * BLOCK_M >= seqlen_q:
            return
        q = from_row(q, q_begin)
        out = from_row(out, q_begin)
        lse += q_begin
        if NUM_RANGES > 0:
            ranges = from_row(ranges, q_begin)
        if block_table is None:
            k_begin, seqlen_k = sequence_rows(cu_seqlens[1], sequence, seqlen_k)
            k = from_row(k, k_begin)
            v = from_row(v, k_begin)
        else:
            seqlen_k = paged_length(cu_seqlens[1], sequence, max_pages, page_size)
            pages = (block_table + sequence.to(tl.int64) * max_pages, num_pages, page_size, 0)
    batch_k = batch
    if HAS_CACHE:
        num_sequences = batch_heads // nheads
        k_begin, seqlen_k = cached_keys(
            cache_seqlens, cache_seqlen, seqlen_new, cache_leftpad, seqlen_k, sequence, num_sequences
        )
        if block_table is None:
            batch_k = cache_row(cache_batch_idx, batch_cache, sequence)
            k = from_row(k, k_begin)
            v = from_row(v, k_begin)
        else:
            pages = (block_table + sequence.to(tl.int64) * max_pages, num_pages, page_size, k_begin)

    # The keys.
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    first_key, last_key, n_begin, full_begin, full_end, n_end = visible_keys(
        start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )

    # Score modification and dropout.
    slope = head_slope(SCORE_MOD, score_mod, sequence, nheads, head)
    position = rows + (seqlen_k - seqlen_q)
    dropout = None
    if rng_state is not None:
        dropout = (dropout_stream(rng_state, sequence * nheads + head), threshold, start_m)
    bias = None
    if attn_bias is not None:
        slope *= LN_2
        bias = bias_of_rows(attn_bias, batch, head, rows, seqlen_q)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = (acc, row_sum, row_max)
    q_tile = load_rows(q, batch, head, start_m, seqlen_q, None, HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA)
    q_rest = None
    if BLOCK_REST > 0:
        q_rest = load_rows(
            from_column(q, BLOCK_D), batch, head, start_m, seqlen_q, None,
            HEAD_DIM - BLOCK_D, BLOCK_REST, BLOCK_M, True, USE_TMA,
        )  # fmt: skip
    if NUM_RANGES == 0:
        if window_left is not None:
            state = attend_blocks(
                state, q_tile, k, v, pages, batch_k, head_k, first_key, last_key, n_begin, full_begin,
                seqlen_k, qk_scale, score_mod, slope, position, dropout,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, True, SCORE_MOD, USE_TMA, bias=bias, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
            )  # fmt: skip
        state = attend_blocks(
            state, q_tile, k, v, pages, batch_k, head_k, first_key, last_key, full_begin, full_end,
            seqlen_k, qk_scale, score_mod, slope, position, dropout,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
            False, False, SCORE_MOD, USE_TMA, bias=bias, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
        )  # fmt: skip
        if CAUSAL or not EVEN_N:
            state = attend_blocks(
                state, q_tile, k, v, pages, batch_k, head_k, first_key, last_key, full_end, n_end,
                seqlen_k, qk_scale, score_mod, slope, position, dropout,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, window_left is not None, SCORE_MOD, USE_TMA, bias=bias, q_rest=q_rest, BLOCK_REST=BLOCK_REST,
            )  # fmt: skip
        acc, row_sum, row_max = state
    else:
        begin_0, end_0, begin_1, end_1 = load_ranges(
            ranges, batch, head, rows, seqlen_q, first_key, last_key, window_left is not None, NUM_RANGES
        )
        first_key = begin_0
        last_key = end_0 - 1
        second = None
        if NUM_RANGES == 2:
            second = (begin_1, end_1)
        blocks = blocks_of_ranges((begin_0, end_0, begin_1, end_1), rows < seqlen_q, BLOCK_N)
        for part in range(NUM_RANGES):
            n_begin, full_begin, full_end, n_end = chosen_blocks(blocks, part, NUM_RANGES)
            acc, row_sum, row_max = attend_blocks(
                (acc, row_sum, row_max), q_tile, k, v, pages, batch_k, head_k, first_key, last_key,
                n_begin, full_begin, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, True, SCORE_MOD, USE_TMA, second=second, bias=bias,
            )  # fmt: skip
            acc, row_sum, row_max = attend_blocks(
                (acc, row_sum, row_max), q_tile, k, v, pages, batch_k, head_k, first_key, last_key,
                full_begin, full_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                False, False, SCORE_MOD, USE_TMA, bias=bias,
            )  # fmt: skip
            acc, row_sum, row_max = attend_blocks(
                (acc, row_sum, row_max), q_tile, k, v, pages, batch_k, head_k, first_key, last_key,
                full_end, n_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, True, SCORE_MOD, USE_TMA, second=second, bias=bias,
            )  # fmt: skip

    # A row without keys has out 0 and lse -inf.
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    if rng_state is None:
        acc = acc * (1.0 / divisor)[:, None]
    else:
        acc = acc * (keep_scale / divisor)[:, None]
    if CAUSAL or not EVEN_N:  # NaN or infinity in V may have made acc NaN
        acc = tl.where(is_empty[:, None], 0.0, acc)
    if attn_bias is None and not SCORE_MOD:
        row_max = row_max * qk_scale
    if max_logits is not None:
        largest = tl.max(tl.where(rows < seqlen_q, row_max, float("-inf")), 0)
        if attn_bias is None:
            largest = largest * 0.6931471805599453
        tl.atomic_max(max_logits + batch_head, largest, sem="relaxed")
    if attn_bias is not None:
        row_lse = row_max + tl.math.log2(divisor) * LN_2
    else:
        row_lse = (row_max + tl.math.log2(divisor)) * 0.6931471805599453
    if row_mod is not None:
        row_lse, factor = join_row_mod(row_mod, sequence, head, row_lse)
        acc = acc * factor[:, None]
    tl.store(lse + rows, row_lse, mask=rows < seqlen_q)
    store_rows(out, acc, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_DV, BLOCK_M)
