"""Attention by its definition, one score at a time, for test_reference*.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def randn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def qkv(draw: torch.Generator, seqlen_q: int, seqlen_k: int, nheads: int = 4, nheads_k: int = 2) -> tuple[Tensor, ...]:
    return (
        randn(draw, 2, seqlen_q, nheads, 8),
        randn(draw, 2, seqlen_k, nheads_k, 8),
        randn(draw, 2, seqlen_k, nheads_k, 8),
    )


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one score at a time, in Python floats; shares no code with the reference."""
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    out = torch.zeros(batch, seqlen_q, nheads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, nheads, seqlen_q), -math.inf, dtype=torch.float64)
    left, right = window_size
    for b in range(batch):
        for h in range(nheads):
            h_k = h * nheads_k // nheads
            for i in range(seqlen_q):
                weights = {}
                at = i + seqlen_k - seqlen_q
                for j in range(seqlen_k):
                    hidden = (causal and j > at) or (left >= 0 and j < at - left)
                    if hidden or (right >= 0 and j > at + right):
                        continue
                    score = float(q[b, i, h] @ k[b, j, h_k]) * softmax_scale
                    if softcap > 0:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
                        score -= float(slope) * abs(at - j)
                    if attn_bias is not None:
                        score += float(attn_bias.expand(batch, nheads, seqlen_q, seqlen_k)[b, h, i, j])
                    weights[j] = math.exp(score)
                total = sum(weights.values()) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                if total == 0.0:
                    continue
                lse[b, h, i] = math.log(total)
                for j, weight in weights.items():
                    kept = 1.0 if dropout_mask is None else float(dropout_mask[b, h, i, j]) / (1 - dropout_p)
                    out[b, i, h] += weight / total * kept * v[b, j, h_k]
    return out, lse
