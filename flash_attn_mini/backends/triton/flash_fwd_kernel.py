"""The forward kernel in Triton: one program computes one block of BLOCK_M query rows of one head.

The chain: launch.forward -> flash_fwd_kernel -> attend_blocks -> load_rows. It is the tutorial's attention kernel
grown up: exp2 with the scale folded in, steps that need a mask apart from steps that do not, TMA loads where the
GPU has them, any strides, lengths and head dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import assigned_block, load_rows, store_rows


@triton.jit
def attend_blocks(
    acc,  # (BLOCK_M, BLOCK_D) float32: the output so far, not yet divided by row_sum
    row_sum,  # (BLOCK_M,) float32
    row_max,  # (BLOCK_M,) float32, before scaling
    q_tile,  # (BLOCK_M, BLOCK_D)
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
    NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Attend to keys [n_begin, n_end), BLOCK_N at a time. MASKED: some of them may lie beyond `last_key`."""
    for n in tl.range(n_begin, n_end, BLOCK_N):
        k_tile = load_rows(
            k, k_stride_b, k_stride_h, k_stride_s, batch, head_k, n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
        )  # fmt: skip
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if NEGATIVE_SCALE:
            scores = -scores
        if MASKED:
            scores = tl.where(n + tl.arange(0, BLOCK_N)[None, :] <= last_key[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKED:  # a row that has seen no key yet: -inf - -inf would make its probabilities NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        # Not scores * qk_scale - shift * qk_scale: one FFMA, but 2^-24 of a score of 1e9 is an exponent of 60.
        p = tl.math.exp2((scores - shift[:, None]) * qk_scale)
        alpha = tl.math.exp2((row_max - shift) * qk_scale)
        acc = acc * alpha[:, None]
        v_tile = load_rows(
            v, v_stride_b, v_stride_h, v_stride_s, batch, head_k, n, seqlen_k,
            HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
        )  # fmt: skip
        block_sum = tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        row_sum = row_sum * alpha + block_sum
        row_max = new_max
    return acc, row_sum, row_max


# Another length or number of heads must not compile another kernel.
NOT_SPECIALIZED = ["seqlen_q", "seqlen_k", "batch_heads", "nheads", "heads_per_kv", "heads_per_group"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_fwd_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a pointer, or what load_rows calls a descriptor
    k,  # [batch, seqlen_k, nheads_k, headdim], likewise
    v,  # [batch, seqlen_k, nheads_k, headdim], likewise
    out,  # [batch, seqlen_q, nheads, headdim]: always a pointer
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    qk_scale,  # |softmax_scale| * log2(e)
    seqlen_q,
    seqlen_k,
    batch_heads,  # batch * nheads
    nheads,
    heads_per_kv,  # nheads / nheads_k
    heads_per_group,  # heads that are worked on together, so that their K and V stay in the L2 cache
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    CAUSAL: tl.constexpr,
    EVEN_N: tl.constexpr,  # without the causal mask: seqlen_k is a multiple of BLOCK_N
    NEGATIVE_SCALE: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: cdiv(seqlen_q, BLOCK_M) * batch * nheads programs."""
    # Which rows of which head.
    num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    m_block, batch_head = assigned_block(num_m_blocks, batch_heads, heads_per_group, CAUSAL)
    batch = batch_head // nheads
    head = batch_head % nheads
    head_k = head // heads_per_kv

    # Which keys: [0, n_full) are seen by every row of the block, [n_full, n_end) need a mask.
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    if CAUSAL:
        diagonal = seqlen_k - seqlen_q
        last_key = tl.minimum(rows + diagonal, seqlen_k - 1)
        n_full = tl.maximum(tl.minimum(start_m + diagonal + 1, seqlen_k), 0) // BLOCK_N * BLOCK_N
        n_end = tl.minimum(start_m + BLOCK_M + diagonal, seqlen_k)
    else:
        last_key = tl.full([BLOCK_M], 0, tl.int32) + (seqlen_k - 1)
        n_full = seqlen_k // BLOCK_N * BLOCK_N
        n_end = seqlen_k

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    q_tile = load_rows(
        q, q_stride_b, q_stride_h, q_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA,
    )  # fmt: skip
    acc, row_sum, row_max = attend_blocks(
        acc, row_sum, row_max, q_tile, k, v,
        k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, last_key,
        0, n_full, seqlen_k, qk_scale,
        NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, False, USE_TMA,
    )  # fmt: skip
    if CAUSAL or not EVEN_N:
        acc, row_sum, row_max = attend_blocks(
            acc, row_sum, row_max, q_tile, k, v,
            k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, last_key,
            n_full, n_end, seqlen_k, qk_scale,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA,
        )  # fmt: skip

    # Rows without any key: out 0, lse -inf.
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * (1.0 / divisor)[:, None]
    row_lse = (row_max * qk_scale + tl.math.log2(divisor)) * 0.6931471805599453
    tl.store(lse + batch_head.to(tl.int64) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
    store_rows(
        out, acc, o_stride_b, o_stride_h, o_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M,
    )  # fmt: skip
