"""The definition of attention in this package: scores, softmax with its log-sum-exp, and the weighted sum of v.

The other references (varlen.py, kvcache.py, packed.py) arrange their tensors and call `attention_reference`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .masks import alibi_bias, in_key_ranges, visible_keys


def expand_heads(kv: Tensor, nheads: int) -> Tensor:
    """Repeat key/value heads for the query heads: query head h reads key/value head ``h // (nheads / nheads_k)``.

    Grouped-query attention (Ainslie et al., arXiv 2305.13245); nheads_k = 1 is multi-query attention.

    Args:
        kv: ``[batch, seqlen_k, nheads_k, headdim]``.
        nheads: The number of query heads, a multiple of nheads_k.

    Returns:
        ``[batch, seqlen_k, nheads, headdim]``.
    """
    nheads_k = kv.shape[2]
    if nheads_k == 0 or nheads % nheads_k != 0:
        raise ValueError(f"nheads must be a multiple of nheads_k; given nheads {nheads} and nheads_k {nheads_k}")
    return kv.repeat_interleave(nheads // nheads_k, dim=2)


def attention_scores(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The logits of the softmax, in this order: scale, softcap, ALiBi, additive bias, mask.

    Args: as in `attention_reference`.

    Returns:
        ``[batch, nheads, seqlen_q, seqlen_k]`` in `dtype`, -inf where a query does not see a key.
    """
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be [batch, seqlen, nheads, headdim]; given {list(q.shape)}, {list(k.shape)}")
    seqlen_q, nheads, headdim = q.shape[1:]
    seqlen_k = k.shape[1]
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale

    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), expand_heads(k.to(dtype), nheads)) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(dtype), seqlen_q, seqlen_k)
    visible = visible_keys(seqlen_q, seqlen_k, causal=causal, window_size=window_size, device=q.device)
    if attn_bias is not None:
        if attn_bias.dtype == torch.bool:
            visible = visible & attn_bias
        else:
            scores = scores + attn_bias.to(dtype)
            visible = visible & (attn_bias != -math.inf)
    if key_ranges is not None:
        visible = visible & in_key_ranges(key_ranges, seqlen_k)
    return scores.masked_fill(~visible, -math.inf)


def attention_max_logits(q: Tensor, k: Tensor, **score_options: Any) -> Tensor:
    """The largest logit of each head among the pairs of a query and a key that it sees, ``[batch, nheads]``.

    -inf for a head that has no such pair. NaN does not count. Options as in `attention_scores`.
    """
    scores = attention_scores(q, k, **score_options).detach().flatten(2)
    nothing = scores.new_full((*scores.shape[:2], 1), -math.inf)  # so that there is a maximum
    return torch.cat([scores.masked_fill(scores.isnan(), -math.inf), nothing], -1).amax(-1)


def score_derivative(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **score_options: Any,
) -> Tensor | float:
    """The derivative of the logits of `attention_scores` with respect to the scaled scores: 1 without a softcap."""
    if softcap == 0.0:
        return 1.0
    capped = attention_scores(q, k, softmax_scale=softmax_scale, softcap=softcap, dtype=dtype)
    return 1.0 - (capped / softcap).square()


def softmax_with_lse(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over the keys and its log-sum-exp (natural logarithm), defined for rows that see no key.

    A sink (Xiao et al., arXiv 2309.17453, in the learned per-head form) is a logit without a value. It is part of the
    sum of the softmax and of the lse, so the probabilities of the keys sum to less than 1.

    A row whose every logit is -inf gives probabilities 0 and lse -inf; with a sink, probabilities 0 and lse = the sink.
    Gradients are finite in both cases: 0 for the scores of such a row.

    Args:
        scores: ``[batch, nheads, seqlen_q, seqlen_k]``.
        sinks: ``[nheads]`` or ``[batch, nheads]`` logits, not scaled by softmax_scale.

    Returns:
        probabilities ``[batch, nheads, seqlen_q, seqlen_k]`` and lse ``[batch, nheads, seqlen_q]``.
    """
    batch, nheads, seqlen_q, _ = scores.shape
    if sinks is None:
        extra = scores.new_full((batch, nheads, seqlen_q, 1), -math.inf)
    else:
        extra = sinks.to(scores.dtype)[..., None, None].expand(batch, nheads, seqlen_q, 1)
    logits = torch.cat([scores, extra], dim=-1)  # never empty, also with seqlen_k = 0

    row_max = logits.detach().amax(dim=-1, keepdim=True)
    no_key = row_max == -math.inf
    row_max = row_max.masked_fill(no_key, 0.0)
    weights = torch.exp(logits - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    # No 0/0 and log(0) in the graph: a later torch.where would replace their values but not their NaN gradients.
    row_sum = row_sum.masked_fill(no_key, 1.0)
    lse = (row_max + torch.log(row_sum)).masked_fill(no_key, -math.inf)
    return weights[..., :-1] / row_sum, lse.squeeze(-1)


def attention_probabilities(q: Tensor, k: Tensor, *, sinks: Tensor | None = None, **score_options: Any) -> Tensor:
    """The probabilities before dropout, ``[batch, nheads, seqlen_q, seqlen_k]``. Options as in `attention_scores`."""
    return softmax_with_lse(attention_scores(q, k, **score_options), sinks)[0]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **score_options: Any,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T + ...) v`` (Vaswani et al., arXiv 1706.03762), and the log-sum-exp of its scores.

    Args:
        q: ``[batch, seqlen_q, nheads, headdim]``, any floating dtype and strides.
        k: ``[batch, seqlen_k, nheads_k, headdim]``; nheads is a multiple of nheads_k.
        v: ``[batch, seqlen_k, nheads_k, headdim_v]``; headdim_v may differ from headdim.
        softmax_scale: the factor on the scores, default ``1 / sqrt(headdim)``.
        causal: query i sees key j when ``j <= i + seqlen_k - seqlen_q`` (aligned to the bottom right).
        window_size: ``(left, right)`` keys around the query's position, -1 = unbounded; see `visible_keys`.
        softcap: if positive, a scaled score s becomes ``softcap * tanh(s / softcap)`` (Gemma 2, arXiv 2408.00118).
        alibi_slopes: ``[nheads]`` or ``[batch, nheads]``; see `alibi_bias`.
        attn_bias: broadcasts to ``[batch, nheads, seqlen_q, seqlen_k]``. Floating: added after softcap and ALiBi; -inf
            hides a key. bool: True where the query sees the key.
        key_ranges: ``[1 or batch, 1 or nheads, seqlen_q, 2]`` or ``[..., 2, 2]``; see `in_key_ranges`.
        sinks: ``[nheads]`` or ``[batch, nheads]`` logits without values; see `softmax_with_lse`.
        dropout_p: probability of dropping, in [0, 1); kept probabilities are scaled by ``1 / (1 - dropout_p)``.
        dropout_mask: bool ``[batch, nheads, seqlen_q, seqlen_k]``, True = kept; required when dropout_p > 0.
        dtype: the dtype of the computation and of both results.

    Returns:
        out ``[batch, seqlen_q, nheads, headdim_v]`` and lse ``[batch, nheads, seqlen_q]``, natural logarithm, before
        dropout. A row that sees no key has out 0 and lse -inf (with a sink: lse = the sink), and zero gradients.

    >>> q, k, v = torch.randn(3, 2, 5, 4, 64).unbind(0)
    >>> out, lse = attention_reference(q, k, v, causal=True)
    >>> out.shape, out.dtype, lse.shape
    (torch.Size([2, 5, 4, 64]), torch.float64, torch.Size([2, 4, 5]))
    """
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); given {dropout_p}")
    if dropout_p > 0.0 and dropout_mask is None:
        raise ValueError(
            "dropout_mask (True = kept) is needed when dropout_p > 0: the reference draws no random numbers"
        )
    scores = attention_scores(q, k, dtype=dtype, **score_options)
    probabilities, lse = softmax_with_lse(scores, sinks)
    if dropout_p > 0.0 and dropout_mask is not None:
        probabilities = probabilities * dropout_mask.to(dtype) / (1.0 - dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", probabilities, expand_heads(v.to(dtype), q.shape[2]))
    return out, lse
