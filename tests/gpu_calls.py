"""Calls that the tests of a GPU have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS

GPU_BACKENDS = [name for name in BACKENDS if name != "cpu"]
each_gpu_backend = pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)


def inputs(batch: int, seqlen: int, nheads: int, headdim: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(batch, seqlen, nheads, headdim, device="cuda", dtype=dtype) for _ in range(3)]


def gradients(
    inputs: list[Tensor], dout: Tensor, backend: str, causal: bool = False, deterministic: bool = False
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=backend)
    return torch.autograd.grad(out, leaves, dout)
