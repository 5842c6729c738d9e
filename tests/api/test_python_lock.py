"""Python's lock (GIL): a short call keeps it, a long call on the CPU gives it up.

A thread that gives the lock up while another thread computes gets it back after Python's switch interval, 5 ms.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_mini.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

CALLS = 200


class BusyThread(threading.Thread):
    """Computes in Python until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_wait = 0.0  # seconds for which it could not run
        self.ends = threading.Event()

    def run(self) -> None:
        before = time.perf_counter()
        while not self.ends.is_set():
            now = time.perf_counter()
            self.longest_wait = max(self.longest_wait, now - before)
            before = now


@pytest.fixture
def busy() -> Iterator[BusyThread]:
    thread = BusyThread()
    thread.start()
    yield thread
    thread.ends.set()
    thread.join()


def short_calls(device: str) -> dict[str, Callable[[], Any]]:
    x = torch.zeros(1, 1, 1, 64, device=device, dtype=torch.float16)
    kv = torch.stack([x, x], dim=2)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    cache = torch.zeros(1, 8, 1, 64, device=device, dtype=torch.float16)
    options = (0.0, 0.125, False, -1, -1, 0.0, None)
    out, lse, *_ = _flash_attn_forward(x, x, x, *options, False)
    gradients = [torch.empty_like(x) for _ in range(3)]
    return {
        "dense": lambda: flash_attn_func(x, x, x),
        "packed": lambda: flash_attn_kvpacked_func(x, kv),
        "varlen": lambda: flash_attn_varlen_func(x[0], x[0], x[0], cu_seqlens, cu_seqlens, 1, 1),
        "kvcache": lambda: flash_attn_with_kvcache(x, cache, cache.clone(), x, x, cache_seqlens=3),
        "backward": lambda: _flash_attn_backward(x, x, x, x, out, lse, *gradients, *options, False),
    }


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("name", ["dense", "packed", "varlen", "kvcache", "backward"])
def test_a_busy_thread_does_not_delay_short_calls(name: str, backend: str, device: str, busy: BusyThread) -> None:
    with use_backend(backend):
        call = short_calls(device)[name]
        seconds = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    assert statistics.median(seconds) < 2e-3, f"median {statistics.median(seconds) * 1e3:.2f} ms"


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_long_call_lets_other_threads_run(name: str, busy: BusyThread) -> None:
    q = torch.zeros(1, 4096, 2, 64, requires_grad=name == "backward")
    out = flash_attn_func(q, q, q) if name == "backward" else None
    busy.longest_wait, begin = 0.0, time.perf_counter()
    if out is None:
        flash_attn_func(q, q, q)
    else:
        out.sum().backward()
    seconds = time.perf_counter() - begin
    assert seconds > 0.02, "the call is too short for this test"
    assert busy.longest_wait < seconds / 2, f"a wait of {busy.longest_wait:.3f} s in {seconds:.3f} s"
