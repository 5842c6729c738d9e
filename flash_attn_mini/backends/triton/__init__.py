"""The Triton backend: a forward kernel, the tile sizes it may use, and the launcher that picks among them.

The chain: torch.ops.flash_attn_mini._flash_attn_forward -> forward (here) -> launch.forward -> flash_fwd_kernel.
Nothing here needs the compiled extension, and Triton itself is imported at the first call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache

import torch

__all__ = ["forward", "unavailable_reason"]

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
