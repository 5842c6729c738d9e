"""The C++ CPU backend. Its kernels are in csrc/cpu/."""

from __future__ import annotations

import torch

from . import extension


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason()
