"""Rung 6: the same loop in plain CUDA C++, learn/csrc/flash_attn_minimal.cu: float32, no tensor cores."""

from __future__ import annotations

import torch

from . import kernels


def unavailable_reason() -> str | None:
    """None when the kernel can run here, else one sentence that says why not."""
    return kernels.unavailable_reason()


def minimal_cuda_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    padded: bool = True,
) -> torch.Tensor:
    """Attention by the minimal CUDA kernel.

    Args:
        q: ``[batch, heads, seqlen_q, headdim]``, float32, contiguous, on a GPU; headdim up to 128.
        k: ``[batch, heads, seqlen_k, headdim]``.
        v: ``[batch, heads, seqlen_k, headdim]``.
        softmax_scale: The factor on the scores; default ``1 / sqrt(headdim)``.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.
        padded: Rows in shared memory are one float longer than headdim, which avoids bank conflicts.

    Returns:
        out like q; 0 for a query that sees no key.

    Raises:
        RuntimeError: If there is no GPU, or the kernel cannot be compiled.
        TypeError: For another dtype.
        ValueError: For other shapes.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"minimal_cuda_attention: {reason}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out: torch.Tensor = kernels.load().minimal_fwd(q, k, v, scale, causal, padded)
    return out
