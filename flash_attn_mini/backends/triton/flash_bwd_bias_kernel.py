"""The third backward kernel in Triton: the gradient of attn_bias for one block of rows and keys of one bias head.

The chain: launch_bwd_bias.bias_backward -> flash_bwd_bias_kernel -> ds_of_tile -> tiles.load_rows. It runs after
flash_bwd_dq_kernel and reads its delta. A program adds dS of all pairs of a sequence and a head that share the bias,
one after the other, so that no sum needs an atomic. A bias that all rows share also sums dS over the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attn_bias import bias_of_rows, probabilities, with_bias
from .dropout import dropout_stream, keep_tile
from .key_ranges import is_in, load_ranges
from .score_mod import LN_2, head_slope, modified_logits
from .tiles import load_rows
from .visible import visible_keys, visible_queries


@triton.jit
def ds_of_tile(
    q,
    k,
    v,
    dout,
    attn_bias,
    lse,
    delta,
    padded_q,
    batch,
    head,
    nheads,
    heads_per_kv,
    start_m,
    start_n,
    seqlen_q,
    seqlen_k,
    qk_scale,
    window_left,
    window_right,
    score_mod,
    dropout,  # (rng_state, threshold, keep_scale), or None
    ranges,  # as in load_ranges, or None
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N): the derivative of the loss by the logits of one head of one sequence."""
    rows = start_m + tl.arange(0, BLOCK_M)
    keys = start_n + tl.arange(0, BLOCK_N)
    head_k = head // heads_per_kv
    q_tile = load_rows(q, batch, head, start_m, seqlen_q, None, HEAD_DIM, BLOCK_D, BLOCK_M, True, False)
    k_tile = load_rows(k, batch, head_k, start_n, seqlen_k, None, HEAD_DIM, BLOCK_D, BLOCK_N, True, False)
    do_tile = load_rows(dout, batch, head, start_m, seqlen_q, None, HEAD_DIM_V, BLOCK_DV, BLOCK_M, True, False)
    v_tile = load_rows(v, batch, head_k, start_n, seqlen_k, None, HEAD_DIM_V, BLOCK_DV, BLOCK_N, True, False)
    scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")

    slope = head_slope(True, score_mod, batch, nheads, head) * LN_2
    position = rows + (seqlen_k - seqlen_q)
    logits, _ = modified_logits(scores, qk_scale, score_mod, slope, position - start_n, BLOCK_N)
    logits = with_bias(logits, bias_of_rows(attn_bias, batch, head, rows, seqlen_q), start_n, BLOCK_N)
    first_key, last_key, _, _, _, _ = visible_keys(
        start_m, rows, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )
    if NUM_RANGES > 0:
        begin_0, end_0, begin_1, end_1 = load_ranges(
            ranges, batch, head, rows, seqlen_q, first_key, last_key, window_left is not None, NUM_RANGES
        )
        visible = is_in((begin_0[:, None], end_0[:, None]), keys[None, :])
        if NUM_RANGES == 2:
            visible = visible | is_in((begin_1[:, None], end_1[:, None]), keys[None, :])
        logits = tl.where(visible, logits, float("-inf"))
    elif window_left is not None:
        visible = (keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None])
        logits = tl.where(visible, logits, float("-inf"))
    elif CAUSAL:
        logits = tl.where(keys[None, :] <= last_key[:, None], logits, float("-inf"))

    if dropout is not None:
        rng_state, threshold, keep_scale = dropout
        stream = dropout_stream(rng_state, batch * nheads + head)
        dp = tl.where(keep_tile(stream, threshold, start_m, start_n, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
    batch_head = (batch * nheads + head).to(tl.int64)
    row_lse = tl.load(lse + batch_head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    row_delta = tl.load(delta + batch_head * padded_q + rows, mask=rows < seqlen_q, other=0.0)
    ds = probabilities(logits, row_lse[:, None]) * (dp - row_delta[:, None])
    # A row without keys may have NaN in dout, and its lse may be -inf.
    return tl.where(logits == float("-inf"), 0.0, ds)


# See flash_fwd_kernel.
NOT_SPECIALIZED = [
    "padded_q", "seqlen_q", "seqlen_k", "batch", "nheads", "heads_per_kv", "bias_batch", "bias_heads", "parts",
    "window_left", "window_right", "threshold", "ranges_stride_b", "ranges_stride_h", "ranges_stride_s",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_bwd_bias_kernel(
    q,  # [batch, seqlen_q, nheads, headdim]: a tuple, see tiles.py
    k,  # [batch, seqlen_k, nheads_k, headdim], like q
    v,  # [batch, seqlen_k, nheads_k, headdim of v], like q
    dout,  # [batch, seqlen_q, nheads, headdim of v], like q
    dbias,  # [parts, bias_batch, bias_heads, SUM_ROWS ? 1 : seqlen_q, seqlen_k], contiguous
    lse,  # [batch, nheads, seqlen_q] float32, contiguous
    delta,  # [batch, nheads, padded_q] float32, contiguous
    padded_q,
    qk_scale,  # see modified_logits
    seqlen_q,
    seqlen_k,
    batch,
    nheads,
    heads_per_kv,  # nheads / nheads_k
    bias_batch,  # 1 or batch
    bias_heads,  # 1 or nheads
    parts,  # the pairs of a sequence and a head that share a bias are divided into
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    HEAD_DIM_V: tl.constexpr,  # of v and dout
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    SUM_ROWS: tl.constexpr,  # all rows share the bias
    USE_TMA: tl.constexpr,  # False
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    window_left=None,  # from here on as in flash_fwd_kernel
    window_right=None,
    SCORE_MOD: tl.constexpr = True,
    score_mod=None,
    rng_state=None,
    threshold=None,
    keep_scale=None,
    key_ranges=None,
    ranges_stride_b=None,
    ranges_stride_h=None,
    ranges_stride_s=None,
    NUM_RANGES: tl.constexpr = 0,
    attn_bias=None,
):
    """Grid: blocks of rows (with SUM_ROWS one), times blocks of keys, bias_heads, bias_batch and parts."""
    # The block, the bias head and the part of this program.
    num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    grid_m = 1 if SUM_ROWS else num_m_blocks
    num_n_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    m_block = program % grid_m
    program = program // grid_m
    start_n = program % num_n_blocks * BLOCK_N
    program = program // num_n_blocks
    bias_head = program % bias_heads
    bias_sequence = program // bias_heads % bias_batch
    part = program // bias_heads // bias_batch

    # The pairs of this part. All heads of a sequence follow each other.
    shared_heads = nheads // bias_heads
    pairs = batch // bias_batch * shared_heads
    pairs_of_part = tl.cdiv(pairs, parts)
    first_pair = tl.minimum(part * pairs_of_part, pairs)
    num_pairs = tl.minimum(pairs - first_pair, pairs_of_part)

    # The blocks of rows that see a key of this block.
    _, _, m_begin, _, _, m_end = visible_queries(
        start_n, seqlen_q, seqlen_k, window_left, window_right, CAUSAL, BLOCK_M, BLOCK_N
    )
    if SUM_ROWS:
        first_block = m_begin // BLOCK_M
        blocks = tl.cdiv(tl.maximum(m_end - m_begin, 0), BLOCK_M)
        acc = tl.zeros([BLOCK_N], tl.float32)
    else:
        first_block = m_block
        blocks = ((m_block * BLOCK_M >= m_begin) & (m_block * BLOCK_M < m_end)).to(tl.int32)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    ranges = None
    if NUM_RANGES > 0:
        ranges = (key_ranges, ranges_stride_b, ranges_stride_h, ranges_stride_s)
    dropout = None
    if rng_state is not None:
        dropout = (rng_state, threshold, keep_scale)
    for step in tl.range(0, num_pairs * blocks):
        pair = first_pair + step
        start_m = first_block * BLOCK_M
        if SUM_ROWS:
            pair = first_pair + step // blocks
            start_m += step % blocks * BLOCK_M
        ds = ds_of_tile(
            q, k, v, dout, attn_bias, lse, delta, padded_q,
            bias_sequence + pair // shared_heads, bias_head + pair % shared_heads, nheads, heads_per_kv,
            start_m, start_n, seqlen_q, seqlen_k, qk_scale, window_left, window_right, score_mod, dropout, ranges,
            HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, CAUSAL, BLOCK_M, BLOCK_N, NUM_RANGES,
        )  # fmt: skip
        if SUM_ROWS:
            acc += tl.sum(ds, 0)
        else:
            acc += ds

    keys = start_n + tl.arange(0, BLOCK_N)
    of_head = (part.to(tl.int64) * bias_batch + bias_sequence) * bias_heads + bias_head
    if SUM_ROWS:
        tl.store(dbias + of_head * seqlen_k + keys, acc.to(dbias.dtype.element_ty), mask=keys < seqlen_k)
    else:
        rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = dbias + (of_head * seqlen_q + rows)[:, None] * seqlen_k + keys[None, :]
        is_inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
        tl.store(pointers, acc.to(dbias.dtype.element_ty), mask=is_inside)
