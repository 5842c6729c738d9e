"""Rung 7: both products on tensor cores, nothing overlapped, in CuTe: learn/csrc/flash_attn_tensor_cores.cu."""

from __future__ import annotations

import torch

from . import kernels


def unavailable_reason() -> str | None:
    """None when the kernel can run here, else one sentence that says why not."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return kernels.unavailable_reason()


def tensor_core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention by the tensor-core kernel without overlap.

    Args:
        q: ``[batch, heads, seqlen_q, headdim]``, float16, contiguous, on a GPU; headdim 64 or 128.
        k: ``[batch, heads, seqlen_k, headdim]``.
        v: ``[batch, heads, seqlen_k, headdim]``.
        softmax_scale: The factor on the scores, not negative; default ``1 / sqrt(headdim)``.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.

    Returns:
        out like q; 0 for a query that sees no key.

    Raises:
        RuntimeError: If there is no GPU, or the kernel cannot be compiled.
        TypeError: For another dtype.
        ValueError: For other shapes.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"tensor_core_attention: {reason}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out: torch.Tensor = kernels.load().tensor_cores_fwd(q, k, v, scale, causal)
    return out
