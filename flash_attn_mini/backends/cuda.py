"""The CUDA backend: the compiled CuTe kernels."""

from __future__ import annotations

import functools

import torch

from . import extension

MAX_HEADDIM = 256  # kMaxHeadDimCuda of csrc/flash.h
ARCH_VARIABLE = "FLASH_ATTN_MINI_ARCH"  # 80 keeps calls on the kernels of sm80


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cuda":
        return "it takes CUDA tensors"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    return extension.missing_reason() or _not_built_reason(device.index)


@functools.cache
def _not_built_reason(device_index: int | None) -> str | None:
    major, minor = torch.cuda.get_device_capability(device_index)
    return extension.load().cuda_unavailable_reason(major, minor) or None


def sm80_unavailable_reason() -> str | None:
    """None when the current GPU runs every call on the kernels of sm80; else one sentence with the build that does."""
    return extension.load().sm80_unavailable_reason(*torch.cuda.get_device_capability()) or None
