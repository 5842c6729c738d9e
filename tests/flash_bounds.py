"""A bound for gradients where PyTorch's formula for them is exact by cancellation, as FlashAttention's cannot be.

With few keys, or one that takes nearly all of the softmax, the formula's dP - sum(P dP) cancels to the bit, as both
come from one dP; with delta = rowsum(dO * O) from the rounded O that cannot be, in any FlashAttention. PyTorch's own
error is then that of its computation in FlashAttention's way, which SDPA takes with its flash kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn_mini.reference import attention_reference, visible_keys

from .bounds import FLOOR, TIMES_PYTORCH_GRADIENT, accuracy, differentiate, gradients_accuracy


def flash_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in PyTorch as FlashAttention computes them (https://arxiv.org/abs/2205.14135, appendix B).

    P comes from the lse, delta from the rounded O. P and dS are rounded to the dtype of q for the products; sums and
    elementwise arithmetic are float32.
    """
    seqlen_q, nheads, headdim = q.shape[1:]
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    q, k, v, dout = (x.detach().to(wide).transpose(1, 2) for x in (q, k, v, dout))  # [batch, nheads, seqlen, headdim]
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))
    visible = visible_keys(seqlen_q, seqlen_k, causal=causal, device=q.device)
    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    p = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)).masked_fill(~visible, 0.0)
    out = (p.to(dtype).to(wide) @ v).to(dtype).to(wide)
    delta = (dout * out).sum(dim=-1, keepdim=True)
    ds = (p * (dout @ v.mT - delta)).to(dtype).to(wide)
    dq = scale * (ds @ k)
    dk, dv = (x.unflatten(1, (nheads_k, -1)).sum(dim=2) for x in (scale * (ds.mT @ q), p.to(dtype).to(wide).mT @ dout))
    return dq.to(dtype).transpose(1, 2), dk.to(dtype).transpose(1, 2), dv.to(dtype).transpose(1, 2)


def assert_gradients_accurate_beside_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    *,
    case: str,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> None:
    """Fail unless dq, dk and dv are within the curated cases' bound or that of `flash_gradients`.

    `case` names the case, its shape and the seed: whatever it takes to run it again.
    """
    strict = gradients_accuracy(q, k, v, dout, gradients, causal=causal, softmax_scale=softmax_scale)
    doubles = (q.double(), k.double(), v.double())
    expected = differentiate(attention_reference, doubles, dout, None, causal=causal, softmax_scale=softmax_scale)
    flash = flash_gradients(q, k, v, dout, causal=causal, softmax_scale=softmax_scale)
    failed = []
    for result, got, truth, theirs in zip(strict, gradients, expected, flash, strict=True):
        beside = accuracy(result.what, got, truth, theirs, FLOOR[q.dtype], TIMES_PYTORCH_GRADIENT)
        if not (result.passed or beside.passed):
            failed.append(str(max(result, beside, key=lambda x: x.bound)))
    assert not failed, "\n  ".join(failed) + f"\n  case {case}"
    no_key = ~visible_keys(q.shape[1], k.shape[1], causal=causal, device=q.device).any(dim=-1)
    assert not (gradients[0][:, no_key] != 0).any(), f"a row without keys has a dq other than 0\n  case {case}"
