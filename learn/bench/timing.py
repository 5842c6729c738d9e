"""How the measurements of learn/ take times, and how they count FLOPs.

On a GPU a time is the median of triton.testing.do_bench: calls back to back, with the L2 cache cleared between calls.
On a CPU it is the median of perf_counter over repeated calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WARMUP_MS = 10.0
BACKWARD_WORK = 2.5  # FLOPs as a multiple of the forward's: five matrix products (S, dP, dV, dK, dQ) to two


def attention_flops(batch: int, nheads: int, seqlen_q: int, seqlen_k: int, headdim: int, causal: bool) -> float:
    """Floating-point operations of a forward: two matrix products, a multiply-add is two; causal counts half."""
    return 4.0 * batch * nheads * seqlen_q * seqlen_k * headdim * (0.5 if causal else 1.0)


@dataclass
class Budget:
    """The wall-clock time that a measurement may use."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def share(self, parts: int) -> float:
        """The time left divided into `parts`, in milliseconds."""
        return max(0.0, self.left()) * 1e3 / max(1, parts)


def time_cuda(call: Callable[[], Any], rep_ms: float) -> float:
    """Median milliseconds of one call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=WARMUP_MS, rep=rep_ms, return_mode="median"))


def time_cpu(call: Callable[[], Any], rep_ms: float) -> float:
    """Median milliseconds of one call on the CPU: repeated for `rep_ms`, three times at least."""
    times: list[float] = []
    deadline = time.perf_counter() + rep_ms / 1e3
    while len(times) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def timer_for(device: torch.device) -> Callable[[Callable[[], Any], float], float]:
    return time_cuda if device.type == "cuda" else time_cpu
