"""The Triton backend: the kernels of forward and backward, the tile sizes they may use, and what picks among them.

The chains: torch.ops.flash_attn_mini._flash_attn_forward -> forward (here) -> launch.forward -> flash_fwd_kernel, and
torch.ops.flash_attn_mini._flash_attn_backward -> backward (here) -> launch_bwd.backward -> flash_bwd_dq_kernel, then
flash_bwd_dkv_kernel. Nothing here needs the compiled extension, and Triton itself is imported at the first call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache

import torch

__all__ = ["backward", "forward", "unavailable_reason"]

MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 4)  # TensorDescriptor, and autotuning results kept on disk


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend can run on ``device``, else one sentence that says why it cannot."""
    reason = _triton_missing_reason()
    if reason is not None:
        return reason
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
        return None
    if device.type != "cuda":
        return f"the triton backend needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the triton backend needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
    return None


@cache
def _triton_missing_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name: no telling how old it is
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"the triton backend needs triton 3.4 or newer; version {version} is installed"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of checked arguments.

    Args:
        q: ``[batch, seqlen_q, nheads, headdim]``, float16, bfloat16 or float32; any strides with a last one of 1.
        k: ``[batch, seqlen_k, nheads_k, headdim]``, likewise; nheads is a multiple of nheads_k.
        v: Like k.
        softmax_scale: What the scores are multiplied with.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.

    Returns:
        ``out`` like q, contiguous, and ``softmax_lse`` float32 ``[batch, nheads, seqlen_q]``, natural logarithm. A
        query that sees no key has out 0 and lse -inf.
    """
    from . import launch

    return launch.forward(q, k, v, softmax_scale=softmax_scale, causal=causal)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *,
    softmax_scale: float,
    causal: bool,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Gradients of exact attention, of checked arguments. The same inputs give the same bits, always.

    P = exp(scale * q k^T - lse), delta = rowsum(dout * out) - dlse, dS = P * (dout v^T - delta); then dv = P^T dout,
    dq = scale * dS k and dk = scale * dS^T q (Dao 2023, arXiv:2307.08691, section 3.1.2; delta takes in the gradient
    of the lse).

    Args:
        dout: The gradient of out, ``[batch, seqlen_q, nheads, headdim]``, of q's dtype; any strides.
        q: ``[batch, seqlen_q, nheads, headdim]``, float16, bfloat16 or float32; any strides with a last one of 1.
        k: ``[batch, seqlen_k, nheads_k, headdim]``, likewise; nheads is a multiple of nheads_k.
        v: Like k.
        out: What the forward returned, like q.
        softmax_lse: What the forward returned, float32 ``[batch, nheads, seqlen_q]``.
        dsoftmax_lse: The gradient of softmax_lse, likewise; None for zeros.
        softmax_scale: What the scores were multiplied with; any finite number.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.
        output_mask: Which of dq, dk, dv are wanted; the others are not computed.

    Returns:
        ``dq`` like q, ``dk`` and ``dv`` like k, strides too, None where not wanted; and delta, float32 ``[batch,
        nheads, seqlen_q rounded up to a multiple of 128]``, 0 past seqlen_q. A query that sees no key has dq 0 and adds
        nothing to dk and dv.
    """
    from . import launch_bwd

    return launch_bwd.backward(
        dout, q, k, v, out, softmax_lse, dsoftmax_lse,
        softmax_scale=softmax_scale, causal=causal, output_mask=output_mask,
    )  # fmt: skip
