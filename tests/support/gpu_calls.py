"""Calls on a GPU, and their capture in CUDA graphs, for several test files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS
from flash_attn_mini.backends.cuda import ARCH_VARIABLE, sm80_unavailable_reason

GPU_BACKENDS = [name for name in BACKENDS if name != "cpu"]
each_gpu_backend = pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
Result = TypeVar("Result")
Results = tuple[Tensor, ...]


def inputs(batch: int, seqlen: int, nheads: int, headdim: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(batch, seqlen, nheads, headdim, device="cuda", dtype=dtype) for _ in range(3)]


def stress_runs(default: int) -> int:
    """How often a test under stress repeats a call: FLASH_ATTN_MINI_STRESS_RUNS, or `default`."""
    runs = int(os.environ.get("FLASH_ATTN_MINI_STRESS_RUNS", default))
    if runs < 1:
        raise ValueError(f"FLASH_ATTN_MINI_STRESS_RUNS is {runs}; allowed: 1 and more")
    return runs


def run_on_sm80(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the cuda backend run on the kernels of sm80, on a Hopper GPU too; skips where the build lacks them."""
    reason = sm80_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv(ARCH_VARIABLE, "80")


def gradients(
    inputs: list[Tensor], dout: Tensor, backend: str, causal: bool = False, deterministic: bool = False
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=backend)
    return torch.autograd.grad(out, leaves, dout)


def assert_captures_first_call(call: Callable[[], list[Tensor]]) -> None:
    """A call is captured without a call on a side stream before, and a replay gives the bits of an eager call."""
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


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


def differing_runs(run: Callable[[int], Results], expected: Sequence[Results], runs: int = 1000) -> list[int]:
    """For each result, the number of runs in which it differs from ``expected[i % len(expected)]``.

    Another kernel runs on the GPU at the same time.
    """
    noise, side = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    differs = torch.zeros(len(expected[0]), device="cuda", dtype=torch.int64)
    for i in range(runs):
        if i % 3 == 0:
            with torch.cuda.stream(side):
                noise = torch.tanh(noise @ noise)
        differs += torch.stack([(a != b).any() for a, b in zip(run(i), expected[i % len(expected)], strict=True)])
    torch.cuda.synchronize()
    return differs.tolist()
