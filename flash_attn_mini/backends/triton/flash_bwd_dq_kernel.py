"""The first backward kernel in Triton: delta, and dQ of one block of BLOCK_M query rows of one head.

The chain: launch_bwd.backward -> flash_bwd_dq_kernel -> accumulate_dq -> tiles.load_rows. A program reads Q, dO and O
of its rows once and loops over the keys. flash_bwd_dkv_kernel runs after it and reads row_stats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attn_bias import bias_of_rows, probabilities, with_bias
from .dropout import dropout_stream, keep_tile
from .key_ranges import blocks_of_ranges, chosen_blocks, is_in, load_ranges, store_no_ranges, store_ranges
from .score_mod import LN_2, LOG2_E, head_slope, modified_logits, row_sink
from .sequences import find_block, sequence_rows
from .tiles import assigned_block, from_row, load_rows, store_rows
from .visible import first_seeing_row, visible_keys


@triton.jit
def accumulate_dq(
    acc,  # (BLOCK_M, BLOCK_D) float32: dQ so far, before the scale
    q_tile,  # (BLOCK_M, BLOCK_D)
    do_tile,  # (BLOCK_M, BLOCK_DV)
    lse_log2,  # (BLOCK_M,) float32; with a bias natural
    delta,  # (BLOCK_M,) float32
    k,
    v,
    batch,
    head_k,
    first_key,  # (BLOCK_M,) int32: the first key that each row sees; counts with WINDOW
    last_key,  # (BLOCK_M,) int32: the last key that each row sees
    n_begin,
    n_end,
    seqlen_k,
    qk_scale,
    score_mod,  # as in attend_blocks, also slope and position
    slope,
    position,
    dropout,  # (stream, threshold, start_m, keep_scale), or None
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
    second=None,  # as in attend_blocks
    bias=None,  # of bias_of_rows
):
    """Add the contributions of keys [n_begin, n_end), BLOCK_N at a time. MASKED: some row may not see all of them."""
    for n in tl.range(n_begin, n_end, BLOCK_N):
        k_tile = load_rows(k, batch, head_k, n, seqlen_k, None, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA)
        v_tile = load_rows(v, batch, head_k, n, seqlen_k, None, HEAD_DIM_V, BLOCK_DV, BLOCK_N, MASKED, USE_TMA)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
        if not SCORE_MOD:
            p = tl.math.exp2(scores * qk_scale - lse_log2[:, None])
        else:
            logits, derivative = modified_logits(scores, qk_scale, score_mod, slope, position - n, BLOCK_N)
            if bias is not None:
                p = probabilities(with_bias(logits, bias, n, BLOCK_N), lse_log2[:, None])
            else:
                p = tl.math.exp2(logits - lse_log2[:, None])
        if MASKED:
            keys = n + tl.arange(0, BLOCK_N)
            visible = keys[None, :] <= last_key[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] >= first_key[:, None])
            if second is not None:
                visible = visible | is_in((second[0][:, None], second[1][:, None]), keys[None, :])
            p = tl.where(visible, p, 0.0)
        if dropout is not None:
            stream, threshold, start_m, keep_scale = dropout
            dp = tl.where(keep_tile(stream, threshold, start_m, n, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if SCORE_MOD:
            ds *= derivative
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    return acc


# See flash_fwd_kernel.
NOT_SPECIALIZED = [
    "seqlen_q", "seqlen_k", "batch_heads", "nheads", "heads_per_kv", "heads_per_group",
    "num_sequences", "window_left", "window_right", "threshold",
    "ranges_stride_b", "ranges_stride_h", "ranges_stride_s",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_bwd_dq_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a tuple or a descriptor, see tiles.py
    k,  # [batch, seqlen_k, nheads_k, headdim], like q
    v,  # [batch, seqlen_k, nheads_k, headdim of v], like q
    dout,  # [batch, seqlen_q, nheads, headdim of v], like q
    out,  # [batch, seqlen_q, nheads, headdim of v]: a tuple
    dq,  # [batch, seqlen_q, nheads, headdim]: a tuple; None: dQ is not wanted
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    dlse,  # like lse, or None: zeros
    row_stats,  # [2, batch, nheads, padded_q] float32: delta, and lse * log2(e), or with attn_bias lse
    softmax_scale,
    qk_scale,  # softmax_scale * log2(e); with score_mod see modified_logits
    seqlen_q,  # variable length: the rows of all sequences, and the tensors have one batch entry
    seqlen_k,
    batch_heads,  # batch * nheads
    nheads,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    HEAD_DIM_V: tl.constexpr,  # of v, dout and out
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_N: tl.constexpr,  # as in flash_fwd_kernel
    ROW_STATS_MULTIPLE: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    cu_seqlens=None,  # from here on as in flash_fwd_kernel
    num_sequences=None,
    window_left=None,
    window_right=None,
    SCORE_MOD: tl.constexpr = False,
    score_mod=None,
    rng_state=None,
    threshold=None,
    keep_scale=None,
    key_ranges=None,
    ranges_stride_b=None,
    ranges_stride_h=None,
    ranges_stride_s=None,
    NUM_RANGES: tl.constexpr = 0,
    row_ranges=None,  # see store_ranges
    unit_ranges=None,
    ROWS_OF_UNIT: tl.constexpr = 0,
    attn_bias=None,
    row_mod=None,  # with attn_bias, which may leave a row without keys
):
    """Grid: padded_q / BLOCK_M * batch * nheads programs."""
    # The rows and the head of this program. padded_q is seqlen_q rounded up to ROW_STATS_MULTIPLE. Of variable length,
    # each sequence begins at a multiple of it, at the first block that find_block gives it.
    if cu_seqlens is None:
        padded_q = tl.cdiv(seqlen_q, ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    else:
        padded_q = (seqlen_q // ROW_STATS_MULTIPLE + num_sequences) * ROW_STATS_MULTIPLE
    m_block, batch_head = assigned_block(padded_q // BLOCK_M, batch_heads, heads_per_group, CAUSAL)
    batch = batch_head // nheads
    head = batch_head % nheads
    head_k = head // heads_per_kv
    stats = row_stats + batch_head.to(tl.int64) * padded_q + m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    lse_offset = batch_head.to(tl.int64) * seqlen_q
    if NUM_RANGES > 0:
        ranges = (key_ranges, ranges_stride_b, ranges_stride_h, ranges_stride_s)
        num_rows = batch_heads.to(tl.int64) * padded_q
        first_row = batch_head.to(tl.int64) * padded_q + m_block * BLOCK_M
        row_ranges += first_row
        unit_ranges += first_row // ROWS_OF_UNIT
    sequence = batch
    if cu_seqlens is not None:
        PER_UNIT: tl.constexpr = ROW_STATS_MULTIPLE // BLOCK_M
        sequence, unit = find_block(cu_seqlens[0], num_sequences, seqlen_q, m_block // PER_UNIT, ROW_STATS_MULTIPLE)
        m_block = unit * PER_UNIT + m_block % PER_UNIT
        q_begin, seqlen_q = sequence_rows(cu_seqlens[0], sequence, seqlen_q)
        k_begin, seqlen_k = sequence_rows(cu_seqlens[1], sequence, seqlen_k)
        if m_block * BLOCK_M >= seqlen_q:  # padding
            tl.store(stats, tl.zeros([BLOCK_M], tl.float32))
            tl.store(stats + batch_heads.to(tl.int64) * padded_q, tl.full([BLOCK_M], float("inf"), tl.float32))
            if NUM_RANGES > 0:
                store_no_ranges(row_ranges, unit_ranges, num_rows, BLOCK_M, ROWS_OF_UNIT, NUM_RANGES)
            return
        q = from_row(q, q_begin)
        dout = from_row(dout, q_begin)
        out = from_row(out, q_begin)
        k = from_row(k, k_begin)
        v = from_row(v, k_begin)
        lse_offset += q_begin
        if dq is not None:
            dq = from_row(dq, q_begin)
        if NUM_RANGES > 0:
            ranges = from_row(ranges, q_begin)
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)

    # The ranges of keys, also for flash_bwd_dkv_kernel.
    if NUM_RANGES > 0:
        first_key, last_key, _, _, _, _ = visible_keys(
            start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
        )
        begin_0, end_0, begin_1, end_1 = load_ranges(
            ranges, batch, head, rows, seqlen_q, first_key, last_key, window_left is not None, NUM_RANGES
        )
        store_ranges(
            (begin_0, end_0, begin_1, end_1), rows < seqlen_q, row_ranges, unit_ranges, num_rows,
            BLOCK_M, ROWS_OF_UNIT, NUM_RANGES,
        )  # fmt: skip

    # delta, and the lse as exp2 wants it. A row without keys or beyond the last has lse * log2(e) = inf: its P is 0.
    do_tile = load_rows(dout, batch, head, start_m, seqlen_q, None, HEAD_DIM_V, BLOCK_DV, BLOCK_M, True, USE_TMA)
    o_tile = load_rows(out, batch, head, start_m, seqlen_q, None, HEAD_DIM_V, BLOCK_DV, BLOCK_M, True, False)
    in_range = rows < seqlen_q
    row_offset = lse_offset + rows
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + row_offset, mask=in_range, other=0.0)
    row_lse = tl.load(lse + row_offset, mask=in_range, other=float("-inf"))
    sees_nothing = row_lse == float("-inf")
    # The lse of such a row may be a sink.
    if NUM_RANGES > 0:
        sees_nothing = sees_nothing | (end_0 == 0)
    elif CAUSAL or window_left is not None:
        sees_nothing = sees_nothing | (rows < first_seeing_row(seqlen_q, seqlen_k, window_left, window_right))
    if row_mod is not None:
        sees_nothing = sees_nothing | (row_lse == row_sink(row_mod, sequence, head))
    delta = tl.where(sees_nothing, 0.0, delta)  # dout and dlse of such a row may be NaN
    if attn_bias is None:
        lse_log2 = tl.where(sees_nothing, float("inf"), row_lse * LOG2_E)
    else:
        lse_log2 = tl.where(sees_nothing, float("inf"), row_lse)
    tl.store(stats, delta)
    tl.store(stats + batch_heads.to(tl.int64) * padded_q, lse_log2)

    if dq is not None:
        # The keys.
        if NUM_RANGES == 0:
            first_key, last_key, n_begin, full_begin, full_end, n_end = visible_keys(
                start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
            )
            if start_m >= seqlen_q:  # only here to fill row_stats
                if window_left is not None:
                    full_begin = n_begin
                full_end = full_begin
                n_end = full_begin

        # Score modification and dropout.
        slope = head_slope(SCORE_MOD, score_mod, sequence, nheads, head)
        position = rows + (seqlen_k - seqlen_q)
        dropout = None
        if rng_state is not None:
            dropout = (dropout_stream(rng_state, sequence * nheads + head), threshold, start_m, keep_scale)
        bias = None
        if attn_bias is not None:
            slope *= LN_2
            bias = bias_of_rows(attn_bias, batch, head, rows, seqlen_q)

        q_tile = load_rows(q, batch, head, start_m, seqlen_q, None, HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if NUM_RANGES == 0:
            if window_left is not None:
                acc = accumulate_dq(
                    acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                    n_begin, full_begin, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, True, SCORE_MOD, USE_TMA, bias=bias,
                )  # fmt: skip
            acc = accumulate_dq(
                acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                full_begin, full_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N, False, False, SCORE_MOD, USE_TMA, bias=bias,
            )  # fmt: skip
            if CAUSAL or not EVEN_N:
                acc = accumulate_dq(
                    acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                    full_end, n_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, window_left is not None, SCORE_MOD, USE_TMA, bias=bias,
                )  # fmt: skip
        else:
            first_key = begin_0
            last_key = end_0 - 1
            second = None
            if NUM_RANGES == 2:
                second = (begin_1, end_1)
            blocks = blocks_of_ranges((begin_0, end_0, begin_1, end_1), rows < seqlen_q, BLOCK_N)
            for part in range(NUM_RANGES):
                n_begin, full_begin, full_end, n_end = chosen_blocks(blocks, part, NUM_RANGES)
                acc = accumulate_dq(
                    acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                    n_begin, full_begin, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, True, SCORE_MOD, USE_TMA, second=second, bias=bias,
                )  # fmt: skip
                acc = accumulate_dq(
                    acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                    full_begin, full_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    False, False, SCORE_MOD, USE_TMA, bias=bias,
                )  # fmt: skip
                acc = accumulate_dq(
                    acc, q_tile, do_tile, lse_log2, delta, k, v, batch, head_k, first_key, last_key,
                    full_end, n_end, seqlen_k, qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, True, SCORE_MOD, USE_TMA, second=second, bias=bias,
                )  # fmt: skip
        acc = acc * softmax_scale
        if CAUSAL or not EVEN_N:  # a row without keys: dout, K or V may have made acc NaN
            acc = tl.where(lse_log2[:, None] == float("inf"), 0.0, acc)
        store_rows(dq, acc, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_D, BLOCK_M)
