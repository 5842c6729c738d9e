"""The gradients of attention as the kernels compute them: from q, k, v, out and the log-sum-exp.

The forward stores no probabilities; exp(score - lse) recomputes them. "FlashAttention-2" (Dao, arXiv 2307.08691),
algorithm 2, with one more term: delta includes the gradient of the lse.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .attention import attention_scores, expand_heads, score_derivative


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
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **score_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given those of the results of `attention_reference`.

    Args:
        dout: ``[batch, seqlen_q, nheads, headdim_v]``, the gradient of out.
        q, k, v: the inputs of the forward.
        out, lse: the results of the forward.
        dlse: ``[batch, nheads, seqlen_q]``, the gradient of lse; None for zeros.
        softmax_scale, dropout_p, dropout_mask: the arguments of the forward.
        dtype: the dtype of the computation and of the results.
        score_options: causal, window_size and the score modifiers of the forward.

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
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    kept, dscores = _probabilities_and_gradient(
        *(dout, q, k, v, lse, delta), scale, dropout_p, dropout_mask, dtype, **score_options
    )
    k_of_head = expand_heads(k, nheads)
    dscores = dscores * score_derivative(q, k, softmax_scale=scale, dtype=dtype, **score_options)
    dq = scale * torch.einsum("bhij,bjhd->bihd", dscores, k_of_head)
    dk = scale * torch.einsum("bhij,bihd->bjhd", dscores, q)
    dv = torch.einsum("bhij,bihd->bjhd", kept, dout)
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def attn_bias_reference_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    attn_bias: Tensor,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **score_options: Any,
) -> Tensor:
    """The gradient of attn_bias ``[1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k]``, in its shape and `dtype`.

    Args: as in `attention_reference_backward`.
        delta: ``[batch, nheads, seqlen_q]``, the sum over headdim of ``dout * out``, minus the gradient of lse.
    """
    scale = 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    q, k, v, lse, dout, delta = (x.to(dtype) for x in (q, k, v, lse, dout, delta))
    options = {"attn_bias": attn_bias, **score_options}
    _, dscores = _probabilities_and_gradient(
        *(dout, q, k, v, lse, delta), scale, dropout_p, dropout_mask, dtype, **options
    )
    return dscores.sum_to_size(attn_bias.shape)


def _probabilities_and_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dropout_p: float,
    dropout_mask: Tensor | None,
    dtype: torch.dtype,
    **score_options: Any,
) -> tuple[Tensor, Tensor]:
    """The factors of the values, after dropout, and the gradient of the logits of `attention_scores`."""
    scores = attention_scores(q, k, softmax_scale=scale, dtype=dtype, **score_options)
    no_key = (lse == -math.inf)[..., None]
    probabilities = torch.exp(scores - lse[..., None].masked_fill(no_key, 0.0))  # exp(-inf) = 0 in rows without keys
    kept = probabilities
    dprobabilities = torch.einsum("bihd,bjhd->bhij", dout, expand_heads(v, q.shape[2]))
    if dropout_p > 0.0 and dropout_mask is not None:
        factor = dropout_mask.to(dtype) / (1.0 - dropout_p)
        kept, dprobabilities = kept * factor, dprobabilities * factor
    # delta is sum(P dP) with dropout too: a dropped element is in neither dP nor out.
    return kept, probabilities * (dprobabilities - delta[..., None])


def _sum_groups(gradient: Tensor, nheads_k: int) -> Tensor:
    """The gradient of a key/value head is the sum over the query heads that read it."""
    batch, seqlen_k, nheads, headdim = gradient.shape
    return gradient.reshape(batch, seqlen_k, nheads_k, nheads // nheads_k, headdim).sum(3)
