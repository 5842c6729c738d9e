"""The C++ CPU backend: the same chains as CUDA, ``_C.fwd`` and its siblings, ending in csrc/cpu/."""

from __future__ import annotations

import torch

from . import extension


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason()


# All take the arguments of the custom ops: the forwards up to return_softmax, the backwards less `backend`.
forward = extension.fwd
backward = extension.bwd
varlen_forward = extension.varlen_fwd
varlen_backward = extension.varlen_bwd
