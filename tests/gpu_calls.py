"""Calls on a GPU, and their capture in CUDA graphs, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS

GPU_BACKENDS = [name for name in BACKENDS if name != "cpu"]
each_gpu_backend = pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
Result = TypeVar("Result")


def inputs(batch: int, seqlen: int, nheads: int, headdim: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(batch, seqlen, nheads, headdim, device="cuda", dtype=dtype) for _ in range(3)]


def gradients(
    inputs: list[Tensor], dout: Tensor, backend: str, causal: bool = False, deterministic: bool = False
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=backend)
    return torch.autograd.grad(out, leaves, dout)


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of the call, captured after one call on a side stream, and the results that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
