"""The C++ CPU backend: the chain of the CUDA backend, ``_C.fwd``, ``_C.bwd`` and the others, ends in csrc/cpu/."""

from __future__ import annotations

import torch

from . import extension

forward = extension.forward
backward = extension.backward
forward_kvcache = extension.forward_kvcache


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason()
