"""The C++ CPU backend: the same ``_C.fwd`` and ``_C.bwd`` chains as CUDA, ending in csrc/cpu/."""

from __future__ import annotations

from typing import Any

import torch

from . import extension


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason()


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
    """``_C.fwd`` on CPU tensors; ``arguments`` are those of the custom op after q, k and v."""
    alibi_slopes, *scalars = arguments
    return extension.load().fwd(q, k, v, None, alibi_slopes, *scalars, None)


def backward(dout: torch.Tensor, *arguments: Any, into: extension.Gradients = (None, None, None)) -> Any:
    """``_C.bwd`` on CPU tensors; ``arguments`` are those of the custom op after dout."""
    return extension.bwd(dout, *arguments, into=into)
