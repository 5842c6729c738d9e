"""What the table of the ladder measures: time, the rate of a matrix product, memory beyond inputs and output."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Call = Callable[[], torch.Tensor]

MOST_CALLS = 20
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


def attention_flops(batch_heads: int, seqlen_q: int, seqlen_k: int, headdim: int) -> float:
    """Floating-point operations of two matrix products; a multiply-add is two."""
    return 4.0 * batch_heads * seqlen_q * seqlen_k * headdim


def milliseconds(call: Call, device: torch.device, seconds: float = 0.3) -> float:
    """Median time of a call, after one that warms up: of at most 20 calls, and no more than fit into ``seconds``."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (len(times) < MOST_CALLS and time.perf_counter() < end):
        if device.type == "cuda":
            times.append(_milliseconds_on_gpu(call))
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _milliseconds_on_gpu(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """TFLOP/s of a square matrix product on random numbers, measured now."""
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / milliseconds(lambda: a @ b, device, seconds) / 1e9


class _Allocations(TorchDispatchMode):
    """Bytes of the tensors that ops allocate, and their peak; the CPU has no such counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}  # address of a storage: tensors that use it
        self.sizes: dict[int, int] = {}
        self.seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.before: set[int] = set()  # storages that were there before
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self._address(tensor) not in self.live:
                self.before.add(self._address(tensor))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result

    @staticmethod
    def _address(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def _count(self, tensor: torch.Tensor) -> None:
        address = self._address(tensor)
        if address in self.before or tensor in self.seen:
            return
        self.seen[tensor] = True
        self.live[address] = self.live.get(address, 0) + 1
        self.sizes[address] = tensor.untyped_storage().nbytes()
        weakref.finalize(tensor, self._release, address)

    def _release(self, address: int) -> None:
        self.live[address] -= 1
        if self.live[address] == 0:
            del self.live[address], self.sizes[address]


def extra_bytes(call: Call, device: torch.device) -> int:
    """Peak bytes that a call allocates for tensors, beyond what was there before and the output that it returns.

    Measured: on a GPU by PyTorch's allocator; on a CPU from the tensors that ops allocate, which leaves out memory that
    a C++ kernel takes for itself.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with _Allocations() as allocations:
            out = call()
        peak = allocations.peak
    return peak - out.numel() * out.element_size()
