"""The second backward kernel in Triton: dK and dV of one block of BLOCK_N keys of one key head.

The chain: launch_bwd.backward -> flash_bwd_dkv_kernel -> accumulate_dkv -> tiles.load_rows. A program reads K and V of
its keys once and loops over the queries of every query head that shares them, so that no sum needs an atomic. It works
on the transposed S^T = K Q^T, because its registers are those of an operand of P^T dO and dS^T Q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attn_bias import bias_of_keys, probabilities, with_bias
from .dropout import dropout_stream, keep_tile
from .key_ranges import is_in, load_stored_ranges, rows_of_keys
from .score_mod import LN_2, head_slope, modified_logits
from .sequences import find_block, sequence_rows
from .tiles import assigned_block, from_row, load_rows, store_rows
from .visible import first_seeing_row, visible_queries


@triton.jit
def load_stat(
    row_stats,  # USE_TMA: a descriptor of [2, batch * nheads, padded_q]; else a pointer to the first element
    which,  # 0: delta; 1: lse * log2(e)
    head,  # of batch * nheads
    start,  # counted from the head's first padded row
    num_heads,  # batch * nheads
    padded_q,
    BLOCK_M: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """row_stats[which, head, start:start + BLOCK_M]."""
    if USE_TMA:
        stat = row_stats.load([which, head, start]).reshape(BLOCK_M)
    else:
        first = (tl.cast(which, tl.int64) * num_heads + head) * padded_q + start
        stat = tl.load(row_stats + first + tl.arange(0, BLOCK_M))
    return stat


@triton.jit
def accumulate_dkv(
    dk_acc,  # (BLOCK_N, BLOCK_D) float32: dK so far, before the scale
    dv_acc,  # (BLOCK_N, BLOCK_DV) float32: dV so far
    k_tile,  # (BLOCK_N, BLOCK_D)
    v_tile,  # (BLOCK_N, BLOCK_DV)
    row_stats,
    q,
    dout,
    batch,
    head,
    batch_head,
    num_heads,
    begin_row,  # rows before it see no key; None: no row of [m_begin, m_end) is before it, and no TMA
    first_row,  # (BLOCK_N,) int32: the first row that sees each key
    last_row,  # (BLOCK_N,) int32: the last row that sees each key; counts with WINDOW
    m_begin,
    m_end,
    seqlen_q,
    padded_q,
    padded_begin,
    qk_scale,
    score_mod,  # as in attend_blocks, also slope
    slope,
    position,  # (BLOCK_N,) int32: the row on the diagonal of each key, for ALiBi
    dropout,  # (stream, threshold, start_n, keep_scale), or None
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    EVEN_M: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    USE_TMA: tl.constexpr,
    keys=None,  # (BLOCK_N,) int32: the keys, with key_ranges
    row_ranges=None,  # see load_stored_ranges, from the first row of the sequence and head on
    num_rows=None,
    NUM_RANGES: tl.constexpr = 0,  # 0: no key_ranges
    bias=None,  # of bias_of_keys
):
    """Add the contributions of rows [m_begin, m_end), BLOCK_M at a time. MASKED: not all of them may see each key."""
    for m in tl.range(m_begin, m_end, BLOCK_M):
        sees = None
        if MASKED and NUM_RANGES > 0:
            begin_0, end_0, begin_1, end_1 = load_stored_ranges(row_ranges + m, num_rows, BLOCK_M, NUM_RANGES)
            sees = end_0 > 0  # a row without keys may hold NaN: see below
        if bias is not None:
            lse_log2 = load_stat(row_stats, 1, batch_head, padded_begin + m, num_heads, padded_q, BLOCK_M, USE_TMA)
            sees = lse_log2 < float("inf")
        q_tile = load_rows(
            q, batch, head, m, seqlen_q, begin_row, HEAD_DIM, BLOCK_D, BLOCK_M, not EVEN_M, USE_TMA, sees
        )  # fmt: skip
        do_tile = load_rows(
            dout, batch, head, m, seqlen_q, begin_row, HEAD_DIM_V, BLOCK_DV, BLOCK_M, not EVEN_M, USE_TMA, sees
        )  # fmt: skip
        if bias is None:
            lse_log2 = load_stat(row_stats, 1, batch_head, padded_begin + m, num_heads, padded_q, BLOCK_M, USE_TMA)
        scores_t = tl.dot(k_tile, q_tile.T, input_precision="ieee")
        if not SCORE_MOD:
            p_t = tl.math.exp2(scores_t * qk_scale - lse_log2[None, :])
        else:
            logits_t, derivative_t = modified_logits(scores_t, qk_scale, score_mod, slope, position - m, BLOCK_M)
            if bias is not None:
                p_t = probabilities(with_bias(logits_t, bias, m, BLOCK_M), lse_log2[None, :])
            else:
                p_t = tl.math.exp2(logits_t - lse_log2[None, :])
        if MASKED:
            if NUM_RANGES == 0:
                rows = m + tl.arange(0, BLOCK_M)
                visible_t = rows[None, :] >= first_row[:, None]
                if WINDOW:
                    visible_t = visible_t & (rows[None, :] <= last_row[:, None])
            else:
                visible_t = is_in((begin_0[None, :], end_0[None, :]), keys[:, None])
                if NUM_RANGES == 2:
                    visible_t = visible_t | is_in((begin_1[None, :], end_1[None, :]), keys[:, None])
            p_t = tl.where(visible_t, p_t, 0.0)
        dropped_p_t = p_t
        if dropout is not None:
            stream, threshold, start_n, keep_scale = dropout
            keep_t = keep_tile(stream, threshold, m, start_n, BLOCK_M, BLOCK_N).T
            dropped_p_t = tl.where(keep_t, p_t, 0.0)
        if WANT_DV:
            dv_acc = tl.dot(dropped_p_t.to(do_tile.dtype), do_tile, dv_acc, input_precision="ieee")
        if WANT_DK:
            delta = load_stat(row_stats, 0, batch_head, padded_begin + m, num_heads, padded_q, BLOCK_M, USE_TMA)
            dp_t = tl.dot(v_tile, do_tile.T, input_precision="ieee")
            if dropout is not None:
                dp_t = tl.where(keep_t, dp_t * keep_scale, 0.0)
            ds_t = p_t * (dp_t - delta[None, :])
            if SCORE_MOD:
                ds_t *= derivative_t
            dk_acc = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc


# See flash_fwd_kernel.
NOT_SPECIALIZED = [
    "seqlen_q", "seqlen_k", "batch_heads", "nheads_k", "heads_per_kv", "heads_per_group",
    "num_sequences", "window_left", "window_right", "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_bwd_dkv_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a tuple or a descriptor, see tiles.py
    k,  # [batch, seqlen_k, nheads_k, headdim], like q
    v,  # [batch, seqlen_k, nheads_k, headdim of v], like q
    dout,  # [batch, seqlen_q, nheads, headdim of v], like q
    dk,  # [batch, seqlen_k, nheads_k, headdim]: a tuple; None: dK is not wanted
    dv,  # [batch, seqlen_k, nheads_k, headdim of v]: a tuple; None: dV is not wanted
    row_stats,  # [2, batch * nheads, padded_q] float32, written by flash_bwd_dq_kernel: see load_stat
    softmax_scale,
    qk_scale,  # softmax_scale * log2(e); with score_mod see modified_logits
    seqlen_q,
    seqlen_k,  # variable length: the rows of all sequences, and the tensors have one batch entry
    batch_heads,  # batch * nheads_k
    nheads_k,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    HEAD_DIM_V: tl.constexpr,  # of v and dout
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_M: tl.constexpr,  # seqlen_q is a multiple of BLOCK_M, or TMA reads zeros past the end
    KEYLESS_ROWS: tl.constexpr,  # some row may see no key
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
    NUM_RANGES: tl.constexpr = 0,
    row_ranges=None,  # see store_ranges
    unit_ranges=None,
    ROWS_OF_UNIT: tl.constexpr = 0,
    attn_bias=None,
):
    """Grid: cdiv(seqlen_k, BLOCK_N) * batch * nheads_k programs; variable length: see find_block, times nheads_k."""
    # The keys and the head of this program. Under the causal mask the first keys have the most rows.
    if cu_seqlens is None:
        num_n_blocks = tl.cdiv(seqlen_k, BLOCK_N)
        padded_q = tl.cdiv(seqlen_q, ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    else:
        num_n_blocks = seqlen_k // BLOCK_N + num_sequences
        padded_q = (seqlen_q // ROW_STATS_MULTIPLE + num_sequences) * ROW_STATS_MULTIPLE
    n_block, batch_head = assigned_block(num_n_blocks, batch_heads, heads_per_group, False)
    batch = batch_head // nheads_k
    head_k = batch_head % nheads_k
    sequence = batch
    padded_begin = 0
    if cu_seqlens is not None:
        sequence, n_block = find_block(cu_seqlens[1], num_sequences, seqlen_k, n_block, BLOCK_N)
        q_begin, seqlen_q = sequence_rows(cu_seqlens[0], sequence, seqlen_q)
        k_begin, seqlen_k = sequence_rows(cu_seqlens[1], sequence, seqlen_k)
        if n_block * BLOCK_N >= seqlen_k:
            return
        padded_begin = (q_begin // ROW_STATS_MULTIPLE + sequence) * ROW_STATS_MULTIPLE
        q = from_row(q, q_begin)
        dout = from_row(dout, q_begin)
        k = from_row(k, k_begin)
        v = from_row(v, k_begin)
        if dk is not None:
            dk = from_row(dk, k_begin)
        if dv is not None:
            dv = from_row(dv, k_begin)
    start_n = n_block * BLOCK_N

    # The rows. One without keys may hold NaN, which a product with P = 0 keeps: it is loaded as zeros. Only masked
    # steps meet such rows, but with USE_TMA the descriptor begins after them for all steps.
    first_row, last_row, m_begin, full_begin, full_end, m_end = visible_queries(
        start_n, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )
    begin_row = None
    full_begin_row = None
    if KEYLESS_ROWS:
        begin_row = first_seeing_row(seqlen_q, seqlen_k, window_left, window_right)
        if USE_TMA:
            full_begin_row = begin_row

    # Keys beyond the last are zeros. Their sums belong to rows of dK and dV that are not stored.
    k_tile = load_rows(k, batch, head_k, start_n, seqlen_k, None, HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA)
    v_tile = k_tile
    if dk is not None:
        v_tile = load_rows(v, batch, head_k, start_n, seqlen_k, None, HEAD_DIM_V, BLOCK_DV, BLOCK_N, True, USE_TMA)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    num_heads = batch_heads * heads_per_kv
    position = start_n + tl.arange(0, BLOCK_N) - (seqlen_k - seqlen_q)
    for group_head in range(heads_per_kv):
        head = head_k * heads_per_kv + group_head
        stats_head = batch_head * heads_per_kv + group_head

        # Score modification and dropout.
        nheads = nheads_k * heads_per_kv
        slope = head_slope(SCORE_MOD, score_mod, sequence, nheads, head)
        dropout = None
        if rng_state is not None:
            dropout = (dropout_stream(rng_state, sequence * nheads + head), threshold, start_n, keep_scale)
        bias = None
        if attn_bias is not None:
            slope *= LN_2
            bias = bias_of_keys(attn_bias, batch, head, start_n + tl.arange(0, BLOCK_N), seqlen_q)

        if NUM_RANGES == 0:
            if CAUSAL or window_left is not None:
                dk_acc, dv_acc = accumulate_dkv(
                    dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                    begin_row, first_row, last_row, m_begin, full_begin, seqlen_q, padded_q, padded_begin,
                    qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, window_left is not None, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                    bias=bias,
                )  # fmt: skip
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                full_begin_row, first_row, last_row, full_begin, full_end, seqlen_q, padded_q, padded_begin,
                qk_scale, score_mod, slope, position, dropout,
                HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                False, False, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                bias=bias,
            )  # fmt: skip
            if window_left is not None:
                dk_acc, dv_acc = accumulate_dkv(
                    dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                    begin_row, first_row, last_row, full_end, m_end, seqlen_q, padded_q, padded_begin,
                    qk_scale, score_mod, slope, position, dropout,
                    HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, True, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                    bias=bias,
                )  # fmt: skip
        else:
            num_rows = num_heads.to(tl.int64) * padded_q
            before = stats_head.to(tl.int64) * padded_q + padded_begin
            of_head = row_ranges + before
            begin_m, begin_full, end_full, end_m = rows_of_keys(
                start_n, tl.minimum(start_n + BLOCK_N, seqlen_k), unit_ranges + before // ROWS_OF_UNIT,
                num_rows // ROWS_OF_UNIT, seqlen_q, BLOCK_M, ROWS_OF_UNIT, NUM_RANGES,
            )  # fmt: skip
            keys = start_n + tl.arange(0, BLOCK_N)
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                None, first_row, last_row, begin_m, begin_full, seqlen_q, padded_q, padded_begin,
                qk_scale, score_mod, slope, position, dropout,
                HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, False, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                keys, of_head, num_rows, NUM_RANGES, bias,
            )  # fmt: skip
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                None, first_row, last_row, begin_full, end_full, seqlen_q, padded_q, padded_begin,
                qk_scale, score_mod, slope, position, dropout,
                HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                False, False, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                keys, of_head, num_rows, NUM_RANGES, bias,
            )  # fmt: skip
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout, batch, head, stats_head, num_heads,
                None, first_row, last_row, end_full, end_m, seqlen_q, padded_q, padded_begin,
                qk_scale, score_mod, slope, position, dropout,
                HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N,
                True, False, SCORE_MOD, EVEN_M, dk is not None, dv is not None, USE_TMA,
                keys, of_head, num_rows, NUM_RANGES, bias,
            )  # fmt: skip

    if dk is not None:
        store_rows(dk, dk_acc * softmax_scale, batch, head_k, start_n, seqlen_k, HEAD_DIM, BLOCK_D, BLOCK_N)
    if dv is not None:
        if rng_state is not None:
            dv_acc = dv_acc * keep_scale
        store_rows(dv, dv_acc, batch, head_k, start_n, seqlen_k, HEAD_DIM_V, BLOCK_DV, BLOCK_N)
