"""Rung 1: attention as its formula says it, with the whole matrix of scores in memory."""

from __future__ import annotations

import math

import torch


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` (Vaswani et al., arXiv 1706.03762).

    Args:
        q: ``[..., seqlen_q, headdim]``, any floating dtype. The leading dimensions are batch and heads.
        k: ``[..., seqlen_k, headdim]``.
        v: ``[..., seqlen_k, headdim]``.
        softmax_scale: The factor on the scores; default ``1 / sqrt(headdim)``.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``. A query that sees no key gives NaN.

    Returns:
        out like q.

    Example:
        >>> import torch
        >>> from learn import naive_attention, online_softmax_attention
        >>> q, k, v = (torch.randn(2, 100, 32) for _ in range(3))
        >>> torch.allclose(naive_attention(q, k, v), online_softmax_attention(q, k, v)[0], atol=1e-5)
        True
    """
    seqlen_q, headdim = q.shape[-2:]
    seqlen_k = k.shape[-2]
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    scores = q @ k.mT  # [..., seqlen_q, seqlen_k]: quadratic memory, written by this line and read by the next
    scores = scores * scale
    if causal:
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~visible, -math.inf)
    probabilities = torch.softmax(scores, dim=-1)
    return probabilities @ v
