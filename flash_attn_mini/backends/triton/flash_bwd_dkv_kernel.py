"""The second backward kernel in Triton: dK and dV of one block of BLOCK_N keys of one key head.

The chain: launch_bwd.backward -> flash_bwd_dkv_kernel -> accumulate_dkv -> tiles.load_rows. A program reads K and V of
its keys once and walks over the queries of every query head that shares them, so that no sum needs an atomic. It works
on the transposed S^T = K Q^T, whose registers are those of an operand of P^T dO and dS^T Q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import dropout_stream, keep_tile
from .score_mod import alibi_bias, capped, capped_derivative, tanh_gap
from .sequences import find_block, sequence_rows
from .tiles import assigned_block, load_rows, store_rows
from .visible import visible_queries


@triton.jit
def load_stat(
    row_stats,  # USE_TMA: a descriptor over [2, batch * nheads, padded_q]; else a pointer to the first element
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
    dv_acc,  # (BLOCK_N, BLOCK_D) float32: dV so far
    k_tile,  # (BLOCK_N, BLOCK_D)
    v_tile,  # (BLOCK_N, BLOCK_D)
    row_stats,
    q,
    dout,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    do_stride_b,
    do_stride_h,
    do_stride_s,
    batch,
    head,
    batch_head,
    num_heads,
    first_row,  # (BLOCK_N,) int32: the first row that sees each key
    last_row,  # (BLOCK_N,) int32: the last row that sees each key; counts with WINDOW
    m_begin,
    m_end,
    seqlen_q,
    padded_q,
    padded_begin,
    qk_scale,
    softcap,  # as in attend_blocks, and slope
    slope,
    position,  # with slope: (BLOCK_N,) int32, the row at the place of each key
    dropout,  # (stream, threshold, start_n, keep_scale), or None
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN_M: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Add what rows [m_begin, m_end) give, BLOCK_M at a time. MASKED: not all may see each key."""
    for m in tl.range(m_begin, m_end, BLOCK_M):
        q_tile = load_rows(
            q, q_stride_b, q_stride_h, q_stride_s, batch, head, m, seqlen_q,
            HEAD_DIM, BLOCK_D, BLOCK_M, not EVEN_M, USE_TMA,
        )  # fmt: skip
        do_tile = load_rows(
            dout, do_stride_b, do_stride_h, do_stride_s, batch, head, m, seqlen_q,
            HEAD_DIM, BLOCK_D, BLOCK_M, not EVEN_M, USE_TMA,
        )  # fmt: skip
        lse_log2 = load_stat(row_stats, 1, batch_head, padded_begin + m, num_heads, padded_q, BLOCK_M, USE_TMA)
        scores_t = tl.dot(k_tile, q_tile.T, input_precision="ieee")
        if softcap is None and slope is None:
            p_t = tl.math.exp2(scores_t * qk_scale - lse_log2[None, :])
        else:
            if softcap is None:
                logits_t = scores_t * qk_scale
            else:
                gap_t = tanh_gap(scores_t, qk_scale)
                logits_t = capped(gap_t, softcap)
            if slope is not None:
                logits_t += alibi_bias(slope, position - m, BLOCK_M)
            p_t = tl.math.exp2(logits_t - lse_log2[None, :])
        if MASKED:
            rows = m + tl.arange(0, BLOCK_M)
            visible_t = rows[None, :] >= first_row[:, None]
            if WINDOW:
                visible_t = visible_t & (rows[None, :] <= last_row[:, None])
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
            if softcap is not None:
                ds_t *= capped_derivative(gap_t)
            dk_acc = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc


# Another length, number of heads or window must not compile another kernel.
NOT_SPECIALIZED = [
    "seqlen_q", "seqlen_k", "batch_heads", "nheads_k", "heads_per_kv", "heads_per_group",
    "num_sequences", "window_left", "window_right", "alibi_stride", "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_bwd_dkv_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a pointer, or what load_rows calls a descriptor
    k,  # [batch, seqlen_k, nheads_k, headdim], likewise
    v,  # [batch, seqlen_k, nheads_k, headdim], likewise
    dout,  # [batch, seqlen_q, nheads, headdim], likewise
    dk,  # [batch, seqlen_k, nheads_k, headdim]: a pointer; not WANT_DK: not written
    dv,  # [batch, seqlen_k, nheads_k, headdim]: a pointer; not WANT_DV: not written
    row_stats,  # [2, batch * nheads, padded_q] float32, as flash_bwd_dq_kernel left it: what load_stat calls so
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    do_stride_b,
    do_stride_h,
    do_stride_s,
    dk_stride_b,
    dk_stride_h,
    dk_stride_s,
    dv_stride_b,
    dv_stride_h,
    dv_stride_s,
    softmax_scale,
    qk_scale,  # softmax_scale * log2(e); softcap: 2 * softmax_scale / softcap * log2(e)
    seqlen_q,
    seqlen_k,  # variable length: the rows of all sequences, of which the tensors have one batch
    batch_heads,  # batch * nheads_k
    nheads_k,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    CAUSAL: tl.constexpr,
    EVEN_M: tl.constexpr,  # seqlen_q is a multiple of BLOCK_M, or TMA minds the end
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    ROW_STATS_MULTIPLE: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    cu_seqlens_q=None,  # from here on as in flash_fwd_kernel
    cu_seqlens_k=None,
    num_sequences=None,
    window_left=None,
    window_right=None,
    softcap=None,
    alibi_slopes=None,
    alibi_stride=None,
    rng_state=None,
    threshold=None,
    keep_scale=None,
):
    """Grid: cdiv(seqlen_k, BLOCK_N) * batch * nheads_k programs; variable length: see find_block, times nheads_k."""
    # Which keys of which head. Under the causal mask the first keys have the most rows.
    if cu_seqlens_q is None:
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
    if cu_seqlens_q is not None:
        sequence, n_block = find_block(cu_seqlens_k, num_sequences, n_block, BLOCK_N)
        q_begin, seqlen_q = sequence_rows(cu_seqlens_q, sequence)
        k_begin, seqlen_k = sequence_rows(cu_seqlens_k, sequence)
        if n_block * BLOCK_N >= seqlen_k:
            return
        padded_begin = (q_begin // ROW_STATS_MULTIPLE + sequence) * ROW_STATS_MULTIPLE
        q += q_begin.to(tl.int64) * q_stride_s
        dout += q_begin.to(tl.int64) * do_stride_s
        k += k_begin.to(tl.int64) * k_stride_s
        v += k_begin.to(tl.int64) * v_stride_s
        if WANT_DK:
            dk += k_begin.to(tl.int64) * dk_stride_s
        if WANT_DV:
            dv += k_begin.to(tl.int64) * dv_stride_s
    start_n = n_block * BLOCK_N

    # Which rows.
    first_row, last_row, m_begin, full_begin, full_end, m_end = visible_queries(
        start_n, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )

    # Keys beyond the last are zeros: what they add goes to rows of dK and dV that are not stored.
    k_tile = load_rows(
        k, k_stride_b, k_stride_h, k_stride_s, batch, head_k, start_n, seqlen_k,
        HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA,
    )  # fmt: skip
    v_tile = k_tile
    if WANT_DK:
        v_tile = load_rows(
            v, v_stride_b, v_stride_h, v_stride_s, batch, head_k, start_n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA,
        )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    num_heads = batch_heads * heads_per_kv
    for group_head in range(heads_per_kv):
        head = head_k * heads_per_kv + group_head
        stats_head = batch_head * heads_per_kv + group_head

        # What becomes of the scores and the probabilities.
        slope = None
        position = None
        if alibi_slopes is not None:
            slope = tl.load(alibi_slopes + sequence.to(tl.int64) * alibi_stride + head) * 1.4426950408889634
            position = start_n + tl.arange(0, BLOCK_N) - (seqlen_k - seqlen_q)
        dropout = None
        if rng_state is not None:
            sequence_head = sequence * (nheads_k * heads_per_kv) + head
            dropout = (dropout_stream(rng_state, sequence_head), threshold, start_n, keep_scale)

        if CAUSAL or window_left is not None:
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout,
                q_stride_b, q_stride_h, q_stride_s, do_stride_b, do_stride_h, do_stride_s, batch, head,
                stats_head, num_heads, first_row, last_row, m_begin, full_begin, seqlen_q, padded_q, padded_begin,
                qk_scale, softcap, slope, position, dropout,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, window_left is not None, EVEN_M, WANT_DK, WANT_DV, USE_TMA,
            )  # fmt: skip
        dk_acc, dv_acc = accumulate_dkv(
            dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout,
            q_stride_b, q_stride_h, q_stride_s, do_stride_b, do_stride_h, do_stride_s, batch, head,
            stats_head, num_heads, first_row, last_row, full_begin, full_end, seqlen_q, padded_q, padded_begin,
            qk_scale, softcap, slope, position, dropout,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, False, False, EVEN_M, WANT_DK, WANT_DV, USE_TMA,
        )  # fmt: skip
        if window_left is not None:
            dk_acc, dv_acc = accumulate_dkv(
                dk_acc, dv_acc, k_tile, v_tile, row_stats, q, dout,
                q_stride_b, q_stride_h, q_stride_s, do_stride_b, do_stride_h, do_stride_s, batch, head,
                stats_head, num_heads, first_row, last_row, full_end, m_end, seqlen_q, padded_q, padded_begin,
                qk_scale, softcap, slope, position, dropout,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, True, EVEN_M, WANT_DK, WANT_DV, USE_TMA,
            )  # fmt: skip

    if WANT_DK:
        store_rows(
            dk, dk_acc * softmax_scale, dk_stride_b, dk_stride_h, dk_stride_s, batch, head_k, start_n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if WANT_DV:
        if rng_state is not None:
            dv_acc = dv_acc * keep_scale
        store_rows(
            dv, dv_acc, dv_stride_b, dv_stride_h, dv_stride_s, batch, head_k, start_n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
