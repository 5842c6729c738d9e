"""The gradients of attention, written out as the kernels compute them: from q, k, v, out and the log-sum-exp alone.

The forward keeps no probabilities; exp(score - lse) gives them back. "FlashAttention-2" (Dao, arXiv 2307.08691),
algorithm 2, with one term more: delta takes in the gradient that arrives at the lse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention import attention_scores, expand_heads


def attention_reference_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given those of the results of `attention_reference`.

    Args:
        dout: ``[batch, seqlen_q, nheads, headdim_v]``, the gradient of out.
        q, k, v: as the forward had them.
        out, lse: what it returned.
        dlse: ``[batch, nheads, seqlen_q]``, the gradient of lse; None for zeros.
        softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask: as the forward had them.
        dtype: of the computation and of the results.

    Returns:
        dq, dk and dv, shaped like q, k and v. A query that sees no key has dq 0 and adds nothing to dk and dv. The
        slopes have no gradient.

    >>> from flash_attn_mini.reference import attention_reference
    >>> q, k, v, dout = torch.randn(4, 2, 5, 4, 64).unbind(0)
    >>> out, lse = attention_reference(q, k, v)
    >>> [x.shape for x in attention_reference_backward(dout, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]
    True
    """
    nheads, headdim = q.shape[2:]
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    q, k, v, out, lse, dout = (x.to(dtype) for x in (q, k, v, out, lse, dout))
    k_of_head, v_of_head = expand_heads(k, nheads), expand_heads(v, nheads)

    scores = attention_scores(
        q,
        k,
        softmax_scale=scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dtype=dtype,
    )
    no_key = (lse == -math.inf)[..., None]
    probabilities = torch.exp(scores - lse[..., None].masked_fill(no_key, 0.0))  # exp(-inf) = 0 in rows without keys
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    if dlse is not None:
        delta = delta - dlse.to(dtype)

    kept = probabilities  # what the values were multiplied with
    dprobabilities = torch.einsum("bihd,bjhd->bhij", dout, v_of_head)
    if dropout_p > 0.0 and dropout_mask is not None:
        factor = dropout_mask.to(dtype) / (1.0 - dropout_p)
        kept, dprobabilities = kept * factor, dprobabilities * factor
    # delta is sum(P dP) with dropout too: what was dropped is in neither dP nor out.
    dscores = probabilities * (dprobabilities - delta[..., None])  # before the scale
    if softcap > 0.0:
        capped = attention_scores(q, k, softmax_scale=scale, softcap=softcap, dtype=dtype)
        dscores = dscores * (1.0 - (capped / softcap).square())
    dq = scale * torch.einsum("bhij,bjhd->bihd", dscores, k_of_head)
    dk = scale * torch.einsum("bhij,bihd->bjhd", dscores, q)
    dv = torch.einsum("bhij,bihd->bjhd", kept, dout)
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def _sum_groups(gradient: Tensor, nheads_k: int) -> Tensor:
    """The gradient of a key/value head is the sum over the query heads that read it."""
    batch, seqlen_k, nheads, headdim = gradient.shape
    return gradient.reshape(batch, seqlen_k, nheads_k, nheads // nheads_k, headdim).sum(3)
