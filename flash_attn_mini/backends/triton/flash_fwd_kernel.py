"""The forward kernel in Triton: one program computes one block of BLOCK_M query rows of one head.

The chain: launch.forward -> flash_fwd_kernel -> attend_blocks -> load_rows. It is the tutorial's attention kernel
grown up: exp2 with the scale folded in, steps that need a mask apart from steps that do not, TMA loads where the
GPU has them, any strides, lengths and head dims. What a call does not use is None to the kernel, and not compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import dropout_stream, keep_tile
from .score_mod import alibi_bias, capped, tanh_gap
from .sequences import find_block, load_paged_rows, sequence_rows
from .tiles import assigned_block, load_rows, store_rows
from .visible import visible_keys


@triton.jit
def attend_blocks(
    acc,  # (BLOCK_M, BLOCK_D) float32: the output so far, not yet divided by row_sum
    row_sum,  # (BLOCK_M,) float32
    row_max,  # (BLOCK_M,) float32, before scaling; with score_mod of the logits
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
    first_key,  # (BLOCK_M,) int32: the first key that each row sees; counts with WINDOW
    last_key,  # (BLOCK_M,) int32: the last key that each row sees
    n_begin,
    n_end,
    seqlen_k,
    qk_scale,
    softcap,  # softcap * log2(e), or None
    slope,  # ALiBi's slope * log2(e), or None
    position,  # with slope: (BLOCK_M,) int32, the key at the place of each row
    dropout,  # (stream, threshold, start_m), or None
    block_table,  # the pages of this sequence, or None
    page_size,
    NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Attend to keys [n_begin, n_end), BLOCK_N at a time. MASKED: a row may not see all of them."""
    for n in tl.range(n_begin, n_end, BLOCK_N):
        if block_table is None:
            k_tile = load_rows(
                k, k_stride_b, k_stride_h, k_stride_s, batch, head_k, n, seqlen_k,
                HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
            )  # fmt: skip
        else:
            k_tile = load_paged_rows(
                k, k_stride_b, k_stride_h, k_stride_s, block_table, page_size, head_k, n, seqlen_k,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if softcap is not None or slope is not None:
            if softcap is None:
                scores = scores * qk_scale
            else:
                scores = capped(tanh_gap(scores, qk_scale), softcap)
            if slope is not None:
                scores += alibi_bias(slope, position - n, BLOCK_N)
        elif NEGATIVE_SCALE:
            scores = -scores
        if MASKED:
            keys = n + tl.arange(0, BLOCK_N)
            visible = keys[None, :] <= last_key[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] >= first_key[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKED:  # a row that has seen no key yet: -inf - -inf would make its probabilities NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if softcap is None and slope is None:
            # Not scores * qk_scale - shift * qk_scale: one FFMA, but 2^-24 of a score of 1e9 is an exponent of 60.
            p = tl.math.exp2((scores - shift[:, None]) * qk_scale)
            alpha = tl.math.exp2((row_max - shift) * qk_scale)
        else:
            p = tl.math.exp2(scores - shift[:, None])
            alpha = tl.math.exp2(row_max - shift)
        acc = acc * alpha[:, None]
        if block_table is None:
            v_tile = load_rows(
                v, v_stride_b, v_stride_h, v_stride_s, batch, head_k, n, seqlen_k,
                HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, USE_TMA,
            )  # fmt: skip
        else:
            v_tile = load_paged_rows(
                v, v_stride_b, v_stride_h, v_stride_s, block_table, page_size, head_k, n, seqlen_k,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        block_sum = tl.sum(p, 1)
        if dropout is not None:  # of what is multiplied with V, not of the softmax
            stream, threshold, start_m = dropout
            p = tl.where(keep_tile(stream, threshold, start_m, n, BLOCK_M, BLOCK_N), p, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        row_sum = row_sum * alpha + block_sum
        row_max = new_max
    return acc, row_sum, row_max


# Another length, number of heads or window must not compile another kernel.
NOT_SPECIALIZED = [
    "seqlen_q", "seqlen_k", "batch_heads", "nheads", "heads_per_kv", "heads_per_group",
    "num_sequences", "block_table_stride", "page_size", "window_left", "window_right", "alibi_stride", "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_fwd_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a pointer, or what load_rows calls a descriptor
    k,  # [batch, seqlen_k, nheads_k, headdim], likewise; pages: [pages, page_size, nheads_k, headdim], a pointer
    v,  # like k
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
    qk_scale,  # |softmax_scale| * log2(e); ALiBi: with the sign; softcap: 2 * softmax_scale / softcap * log2(e)
    seqlen_q,  # variable length: the rows of all sequences, of which the tensors have one batch
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
    # From here on what most calls do without, and need not pass: each argument costs host time.
    cu_seqlens_q=None,  # [num_sequences + 1] int32; None: all sequences have the same lengths
    cu_seqlens_k=None,  # likewise
    num_sequences=None,
    block_table=None,  # [num_sequences, most pages] int32; None: keys lie one after the other
    block_table_stride=None,
    page_size=None,
    window_left=None,  # None: no window but CAUSAL
    window_right=None,
    softcap=None,  # softcap * log2(e), or None
    alibi_slopes=None,  # [sequences, nheads] float32, or None
    alibi_stride=None,  # between sequences
    rng_state=None,  # [2] int64: seed and offset; None: no dropout
    threshold=None,  # see keep_tile
    keep_scale=None,  # 1 / (1 - dropout_p)
):
    """Grid: cdiv(seqlen_q, BLOCK_M) * batch * nheads programs; variable length: see find_block, times nheads."""
    # Which rows of which head.
    if cu_seqlens_q is None:
        num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    else:
        num_m_blocks = seqlen_q // BLOCK_M + num_sequences
    m_block, batch_head = assigned_block(num_m_blocks, batch_heads, heads_per_group, CAUSAL)
    batch = batch_head // nheads
    head = batch_head % nheads
    head_k = head // heads_per_kv
    sequence = batch
    if cu_seqlens_q is not None:
        sequence, m_block = find_block(cu_seqlens_q, num_sequences, m_block, BLOCK_M)
        lse += batch_head.to(tl.int64) * seqlen_q
        q_begin, seqlen_q = sequence_rows(cu_seqlens_q, sequence)
        k_begin, seqlen_k = sequence_rows(cu_seqlens_k, sequence)
        if m_block * BLOCK_M >= seqlen_q:
            return
        q += q_begin.to(tl.int64) * q_stride_s
        out += q_begin.to(tl.int64) * o_stride_s
        lse += q_begin
        if block_table is None:
            k += k_begin.to(tl.int64) * k_stride_s
            v += k_begin.to(tl.int64) * v_stride_s
        else:
            block_table += sequence.to(tl.int64) * block_table_stride

    # Which keys.
    start_m = m_block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    first_key, last_key, n_begin, full_begin, full_end, n_end = visible_keys(
        start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )

    # What becomes of the scores and the probabilities.
    slope = None
    position = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + sequence.to(tl.int64) * alibi_stride + head) * 1.4426950408889634
        position = rows + (seqlen_k - seqlen_q)
    dropout = None
    if rng_state is not None:
        dropout = (dropout_stream(rng_state, sequence * nheads + head), threshold, start_m)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    q_tile = load_rows(
        q, q_stride_b, q_stride_h, q_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M, True, USE_TMA,
    )  # fmt: skip
    if window_left is not None:
        acc, row_sum, row_max = attend_blocks(
            acc, row_sum, row_max, q_tile, k, v,
            k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, first_key, last_key,
            n_begin, full_begin, seqlen_k, qk_scale, softcap, slope, position, dropout, block_table, page_size,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, True, USE_TMA,
        )  # fmt: skip
    acc, row_sum, row_max = attend_blocks(
        acc, row_sum, row_max, q_tile, k, v,
        k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, first_key, last_key,
        full_begin, full_end, seqlen_k, qk_scale, softcap, slope, position, dropout, block_table, page_size,
        NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, False, False, USE_TMA,
    )  # fmt: skip
    if CAUSAL or not EVEN_N:
        acc, row_sum, row_max = attend_blocks(
            acc, row_sum, row_max, q_tile, k, v,
            k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, head_k, first_key, last_key,
            full_end, n_end, seqlen_k, qk_scale, softcap, slope, position, dropout, block_table, page_size,
            NEGATIVE_SCALE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, window_left is not None, USE_TMA,
        )  # fmt: skip

    # Rows without any key: out 0, lse -inf.
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    if rng_state is None:
        acc = acc * (1.0 / divisor)[:, None]
    else:
        acc = acc * (keep_scale / divisor)[:, None]
    if softcap is None and slope is None:
        row_max = row_max * qk_scale
    row_lse = (row_max + tl.math.log2(divisor)) * 0.6931471805599453
    if cu_seqlens_q is None:
        lse += batch_head.to(tl.int64) * seqlen_q
    tl.store(lse + rows, row_lse, mask=rows < seqlen_q)
    store_rows(
        out, acc, o_stride_b, o_stride_h, o_stride_s, batch, head, start_m, seqlen_q,
        HEAD_DIM, BLOCK_D, BLOCK_M,
    )  # fmt: skip
