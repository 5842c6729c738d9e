"""The CPU backend: the C++ kernels of csrc/cpu/, in a copy without the extension cpu_reference.py."""

from __future__ import annotations

import torch

from ..namespace import MAY_HAVE_EXTENSION
from . import extension


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cpu":
        return "it takes CPU tensors"
    return extension.missing_reason() if MAY_HAVE_EXTENSION else None
