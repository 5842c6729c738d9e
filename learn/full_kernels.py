"""Rungs 8, 9 and on: the kernels of the library, called through flash_attn_func."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.rivals import kernels_of
from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS, extension
from flash_attn_mini.backends.cuda import sm80_unavailable_reason

HEADDIM = 128  # of the rungs on a GPU


def unavailable_reason(backend: str, arch: int | None = None) -> str | None:
    """None when a backend can run here, with the kernels of ``arch`` if that is given; else one sentence."""
    device = torch.device("cpu" if backend == "cpu" or not torch.cuda.is_available() else "cuda")
    if backend == "cuda" and device.type == "cpu":
        return "needs a CUDA GPU"
    reason = BACKENDS[backend].unavailable_reason(device)
    if reason is None and arch == 90 and (torch.cuda.get_device_capability() != (9, 0) or "90a" not in built_archs()):
        return "needs a Hopper GPU (compute capability 9.0) and kernels that were compiled for it"
    if reason is None and backend == "cuda" and not has_kernels(extension.load().build_info()):
        return f"needs kernels for fp16 and head dim {HEADDIM}; build them all with: pip install ."
    return reason or (sm80_unavailable_reason() if arch == 80 else None)


def has_kernels(build: dict[str, Any]) -> bool:
    """Whether a build has CUDA kernels for the tensors of the rungs on a GPU."""
    return "fp16" in build["dtypes"] and any(built >= HEADDIM for built in build["hdims"])


def built_archs() -> list[str]:
    """The architectures that the extension has kernels for, as FLASH_ATTN_MINI_ARCHS lists them."""
    archs: list[str] = extension.load().build_info()["arch_names"]
    return archs


def library_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str, arch: int | None = None
) -> torch.Tensor:
    """flash_attn_func on ``[batch, heads, seqlen, headdim]``; ``arch`` 80 keeps a call on the kernels of sm80."""
    with kernels_of(arch), torch.no_grad():
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend=backend)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)
