"""A bound for gradients where PyTorch's formula is exact by cancellation, and FlashAttention's cannot be exact.

With few keys, with one key whose probability is nearly 1, or with a head dim of 1, PyTorch's dP - sum(P dP)
cancels exactly, because both terms come from the same dP. FlashAttention computes delta = rowsum(dO * O) from the
rounded O, so its difference does not. Here PyTorch's error is that of FlashAttention's formula, as in SDPA's flash
kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini.reference import alibi_bias, attention_probabilities, attention_reference

from .bounds import (
    FLOOR,
    TIMES_PYTORCH_GRADIENT,
    Cumulative,
    accuracy,
    assert_like_inputs,
    assert_no_gradient_without_keys,
    by_sequence,
    differentiate,
    gradients_accuracy,
    refuse,
    visible_pairs,
)


def rounded_delta(dout: Tensor, exact: Tensor, rounded: Tensor, eps: float) -> Tensor:
    """rowsum(dO * O) of the rounded O, at least one standard deviation of its rounding from that of the exact O.

    In a row with one key, dq and dk depend only on this error. It may be 0 by chance, in PyTorch or in the backend,
    but its typical size is the same for both.
    """
    truth = (dout * exact).sum(dim=-1, keepdim=True)
    error = (dout * rounded).sum(dim=-1, keepdim=True) - truth
    return truth + torch.where(error < 0, -1.0, 1.0) * torch.maximum(error.abs(), deviation_of_delta(dout, exact, eps))


def deviation_of_delta(dout: Tensor, out: Tensor, eps: float) -> Tensor:
    """The standard deviation of rowsum(dO * O) of the rounded O. Rounding to nearest changes an element of O by at most
    eps / 2, uniformly distributed: a standard deviation of eps / 2 / sqrt(3)."""
    return eps / 2 / math.sqrt(3) * (dout * out).square().sum(dim=-1, keepdim=True).sqrt()


def flash_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in PyTorch as FlashAttention computes them (https://arxiv.org/abs/2205.14135, appendix B).

    P comes from the lse, delta from the rounded O (`rounded_delta`). P and dS are rounded to the dtype of q for the
    products; sums and elementwise arithmetic are float32.
    """
    return _gradients(q, k, v, dout, **options)[:3]


def flash_bias_gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, attn_bias: Tensor, **options: Any) -> Tensor:
    """The gradient of attn_bias in the same way, summed in float32 and rounded to its dtype."""
    ds = _gradients(q, k, v, dout, attn_bias=attn_bias, **options)[3]
    return ds.sum_to_size(attn_bias.shape).to(attn_bias.dtype)


def deviation_of_bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, attn_bias: Tensor, **options: Any
) -> Tensor:
    """The standard deviation that the rounding of O gives to the gradient of attn_bias, of its shape.

    The errors of rows are independent. Where rows share a bias they add up, or cancel by chance.
    """
    doubles = (q.double(), k.double(), v.double())
    out, _ = attention_reference(*doubles, attn_bias=attn_bias, **options)
    of_rows = deviation_of_delta(dout.double(), out, torch.finfo(q.dtype).eps).transpose(1, 2)
    without_dropout = {x: y for x, y in options.items() if not x.startswith("dropout")}
    p = attention_probabilities(*doubles[:2], attn_bias=attn_bias, **without_dropout)
    return (p * of_rows).square().sum_to_size(attn_bias.shape).sqrt()


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv, and the gradient of the logits."""
    seqlen_q, nheads, headdim = q.shape[1:]
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    q, k, v, dout = (x.detach().to(wide).transpose(1, 2) for x in (q, k, v, dout))  # [batch, nheads, seqlen, headdim]
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size, key_ranges, q.device, attn_bias)
    scores = q @ k.mT * scale
    slope = torch.ones_like(scores)  # of the softcap
    if softcap > 0.0:
        tanh = torch.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1.0 - tanh.square()
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes, seqlen_q, seqlen_k)
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        scores = scores + attn_bias.to(wide)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[..., None, None])
    p = torch.exp(scores - lse).masked_fill(~visible, 0.0)
    kept = torch.ones_like(p) if dropout_mask is None else dropout_mask.to(wide) / (1.0 - dropout_p)
    p_kept = (p * kept).to(dtype).to(wide)
    delta = rounded_delta(dout, (p * kept) @ v, (p_kept @ v).to(dtype).to(wide), torch.finfo(dtype).eps)
    if dlse is not None:
        delta = delta - dlse.to(wide)[..., None]
    dlogits = p * (kept * (dout @ v.mT) - delta)
    ds = (dlogits * slope).to(dtype).to(wide)
    dq = scale * (ds @ k)
    dk, dv = (x.unflatten(1, (nheads_k, -1)).sum(dim=2) for x in (scale * (ds.mT @ q), p_kept.mT @ dout))
    return dq.to(dtype).transpose(1, 2), dk.to(dtype).transpose(1, 2), dv.to(dtype).transpose(1, 2), dlogits


def assert_gradients_accurate_beside_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    *,
    case: str,
    dlse: Tensor | None = None,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> None:
    """Fail unless dq, dk and dv are within the curated cases' bound or that of `flash_gradients`.

    `case` and options are those of `assert_forward_accurate`. Only dense calls may have a dlse.
    """
    assert_like_inputs(q, k, v, gradients, case)
    strict = gradients_accuracy(q, k, v, dout, gradients, dlse=dlse, cu_seqlens=cu_seqlens, **options)
    if not all(result.passed for result in strict):
        doubles = (q.double(), k.double(), v.double())
        expected = differentiate(by_sequence(attention_reference, cu_seqlens), doubles, dout, dlse, **options)
        arriving = {} if dlse is None else {"dlse": dlse}
        flash = by_sequence(flash_gradients, cu_seqlens)(q, k, v, dout, **options, **arriving)
        failed = []
        for result, got, truth, theirs in zip(strict, gradients, expected, flash, strict=True):
            by_flash = accuracy(result.what, got, truth, theirs, FLOOR[q.dtype], TIMES_PYTORCH_GRADIENT)
            if not (result.passed or by_flash.passed):
                failed.append(max(result, by_flash, key=lambda x: x.bound))
        refuse(failed, f"\n  case {case}")
    assert_no_gradient_without_keys(q, k, gradients[0], case, cu_seqlens, **options)
