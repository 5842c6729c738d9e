"""The C++ CPU backend: the chain of the CUDA backend, ``_C.fwd`` and ``_C.bwd``, ends in csrc/cpu/ for CPU tensors."""

from __future__ import annotations

import torch

from . import extension

forward = extension.forward
backward = extension.backward


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason()
