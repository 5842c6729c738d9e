"""The first backward kernel in Triton: delta, and dQ of one block of BLOCK_M query rows of one head.

The chain: launch_bwd.backward -> flash_bwd_dq_kernel -> accumulate_dq -> tiles.load_rows. A program reads Q, dO and O
of its rows once and walks over the keys. flash_bwd_dkv_kernel runs after it and reads what it left in row_stats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import assigned_block, load_rows, store_rows


@triton.jit
def accumulate_dq(
    acc,  # (BLOCK_M, BLOCK_D) float32: dQ so far, before the scale
    q_tile,  # (BLOCK_M, BLOCK_D)
    do_tile,  # (BLOCK_M, BLOCK_D)
    lse_log2,  # (BLOCK_M,) float32
    delta,  # (BLOCK_M,) float32
    k,
    v,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    batch,
    head_k,
    last_key,  # (BLOCK_M,) int32: the last key that each row sees
    n_begin,
    n_end,
    seqlen_k,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Add what keys [n_begin, n_end) give, BLOCK_N at a time. MASKED: some of them may lie beyond `last_key`."""
    for n in tl.range(n_begin, n_end, BLOCK_N):
        k_tile = load_rows(
            k, k_stride_b, k_stride_h, k_stride_s, batch, head_k, n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
        )  # fmt: skip
        v_tile = load_rows(
            v, v_stride_b, v_stride_h, v_stride_s, batch, head_k, n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
        )  # fmt: skip
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
        p = tl.math.exp2(scores * qk_scale - lse_log2[:, None])
        if MASKED:
            p = tl.where(n + tl.arange(0, BLOCK_N)[None, :] <= last_key[:, None], p, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    return acc


# Another length or number of heads must not compile another kernel.
NOT_SPECIALIZED = ["seqlen_q", "seqlen_k", "batch_heads", "nheads", "heads_per_kv", "heads_per_group"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_bwd_dq_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a pointer, or what load_rows calls a descriptor
    k,  # [batch, seqlen_k, nheads_k, headdim], likewise
    v,  # [batch, seqlen_k, nheads_k, headdim], likewise
    dout,  # [batch, seqlen_q, nheads, headdim], likewise
    out,  # [batch, seqlen_q, nheads, headdim]: always a pointer
    dq,  # [batch, seqlen_q, nheads, headdim]: a pointer; DELTA_ONLY: not written
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    dlse,  # likewise, or None: zeros
    row_stats,  # [2, batch, nheads, seqlen_q rounded up to ROW_STATS_MULTIPLE] float32: delta, and lse * log2(e)
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
    o_stride_b,
    o_stride_h,
    o_stride_s,
    dq_stride_b,
    dq_stride_h,
    dq_stride_s,
    softmax_scale,
    qk_scale,  # softmax_scale * log2(e)
    seqlen_q,
    seqlen_k,
    batch_heads,  # batch * nheads
    nheads,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    CAUSAL: tl.constexpr,
    EVEN_N: tl.constexpr,  # without the causal mask: seqlen_k is a multiple of BLOCK_N
    DELTA_ONLY: tl.constexpr,  # dQ is not wanted
    ROW_STATS_MULTIPLE: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (seqlen_q rounded up to ROW_STATS_MULTIPLE) / BLOCK_M * batch * nheads programs."""
    # Which rows of which head.
    padded_q = tl.cdiv(seqlen_q, ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    m_block, batch_head = assigned_block(padded_q // BLOCK_M, batch_heads, heads_per_group, CAUSAL)
    batch = batch_head // nheads
    head = batch_head % nheads
    head_k = head // heads_per_kv
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)

    # delta, and the lse as exp2 wants it. A row without keys or beyond the last has lse * log2(e) = inf: its P is 0.
    do_tile = load_rows(
        dout, do_stride_b, do_stride_h, do_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA,
    )  # fmt: skip
    o_tile = load_rows(
        out, o_stride_b, o_stride_h, o_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M, True, False,
    )  # fmt: skip
    in_range = rows < seqlen_q
    row_offset = batch_head.to(tl.int64) * seqlen_q + rows
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + row_offset, mask=in_range, other=0.0)
    row_lse = tl.load(lse + row_offset, mask=in_range, other=float("-inf"))
    lse_log2 = tl.where(row_lse == float("-inf"), float("inf"), row_lse * 1.4426950408889634)
    stats = row_stats + batch_head.to(tl.int64) * padded_q + rows
    tl.store(stats, delta)
    tl.store(stats + batch_heads.to(tl.int64) * padded_q, lse_log2)

    if not DELTA_ONLY:
        # Which keys: [0, n_full) are seen by every row of the block, [n_full, n_end) need a mask.
        if CAUSAL:
            diagonal = seqlen_k - seqlen_q
            last_key = tl.minimum(rows + diagonal, seqlen_k - 1)
            n_full = tl.maximum(tl.minimum(start_m + diagonal + 1, seqlen_k), 0) // BLOCK_N * BLOCK_N
            n_end = tl.minimum(start_m + BLOCK_M + diagonal, seqlen_k)
        else:
            last_key = tl.full([BLOCK_M], 0, tl.int32) + (seqlen_k - 1)
            n_full = seqlen_k // BLOCK_N * BLOCK_N
            n_end = seqlen_k
        if start_m >= seqlen_q:  # only here to fill row_stats
            n_full = 0
            n_end = 0

        q_tile = load_rows(
            q, q_stride_b, q_stride_h, q_stride_s, batch, head, start_m, seqlen_q,
            HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA,
        )  # fmt: skip
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc = accumulate_dq(
            acc, q_tile, do_tile, lse_log2, delta, k, v,
            k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, last_key,
            0, n_full, seqlen_k, qk_scale,
            HEAD_DIM, BLOCK_D, BLOCK_N, False, USE_TMA,
        )  # fmt: skip
        if CAUSAL or not EVEN_N:
            acc = accumulate_dq(
                acc, q_tile, do_tile, lse_log2, delta, k, v,
                k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, last_key,
                n_full, n_end, seqlen_k, qk_scale,
                HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA,
            )  # fmt: skip
        store_rows(
            dq, acc * softmax_scale, dq_stride_b, dq_stride_h, dq_stride_s, batch, head, start_m, seqlen_q,
            HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
