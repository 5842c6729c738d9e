"""Rung 2: FlashAttention's loop in plain PyTorch, one block of keys at a time. Every later rung is this loop.

For one query with scores s_j and values v_j, attention is  o = sum_j exp(s_j) v_j / sum_j exp(s_j). Naive attention
needs all scores at once. Online softmax keeps three running quantities over the keys read so far:

    m = max_j s_j          l = sum_j exp(s_j - m)          a = sum_j exp(s_j - m) v_j

The maximum keeps the exponentials from overflowing; it cancels in a / l. A block of keys with maximum m_b gives the new
maximum m' = max(m, m_b). Since exp(s - m') = exp(s - m) exp(m - m'), one factor, alpha = exp(m - m'), converts the old
sums to the new maximum:

    l' = alpha l + sum_{j in block} exp(s_j - m')          a' = alpha a + sum_{j in block} exp(s_j - m') v_j

After the last block  o = a / l, and the log-sum-exp of the scores is  m + log l. The matrix of scores never exists.
Online softmax: Milakov and Gimelshein, arXiv 1805.02867. FlashAttention: Dao et al., arXiv 2205.14135.
"""

from __future__ import annotations

import math

import torch


def online_softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, block by block.

    Args:
        q: ``[..., seqlen_q, headdim]``, any floating dtype; the arithmetic is float32 (float64 for float64).
        k: ``[..., seqlen_k, headdim]``.
        v: ``[..., seqlen_k, headdim]``.
        softmax_scale: The factor on the scores; default ``1 / sqrt(headdim)``.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.
        block_m: Queries per block.
        block_n: Keys per block.

    Returns:
        out like q, and the log-sum-exp of the scores ``[..., seqlen_q]``. A query that sees no key has out 0 and lse
        -inf.

    Example:
        >>> import torch
        >>> from learn import online_softmax_attention
        >>> q, k, v = (torch.randn(100, 32) for _ in range(3))
        >>> out, lse = online_softmax_attention(q, k, v)
        >>> torch.allclose(out, torch.softmax(q @ k.T / 32**0.5, -1) @ v, atol=1e-5)
        True
    """
    seqlen_q, headdim = q.shape[-2:]
    seqlen_k = k.shape[-2]
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)

    for start_m in range(0, seqlen_q, block_m):  # on a GPU: one thread block each
        q_block = q[..., start_m : start_m + block_m, :].to(dtype)  # [..., block_m, headdim]
        rows = torch.arange(start_m, start_m + q_block.shape[-2], device=q.device)
        row_max = torch.full_like(q_block[..., :1], -math.inf)  # [..., block_m, 1]
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros_like(q_block)

        for start_n in range(0, seqlen_k, block_n):
            k_block = k[..., start_n : start_n + block_n, :].to(dtype)  # [..., block_n, headdim]
            v_block = v[..., start_n : start_n + block_n, :].to(dtype)
            scores = q_block @ k_block.mT * scale  # [..., block_m, block_n]
            if causal:
                cols = torch.arange(start_n, start_n + k_block.shape[-2], device=q.device)
                visible = cols[None, :] <= rows[:, None] + seqlen_k - seqlen_q
                scores = scores.masked_fill(~visible, -math.inf)

            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            # Before its first key a row has the maximum -inf, and -inf - -inf is NaN. Any finite shift is right.
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = torch.exp(scores - shift)
            alpha = torch.exp(row_max - shift)
            row_sum = alpha * row_sum + p.sum(dim=-1, keepdim=True)
            acc = alpha * acc + p @ v_block
            row_max = new_max

        divisor = row_sum.masked_fill(row_sum == 0.0, 1.0)
        out[..., start_m : start_m + block_m, :] = (acc / divisor).to(q.dtype)
        lse[..., start_m : start_m + block_m] = (row_max + torch.log(divisor)).squeeze(-1)
    return out, lse
