"""The experiments that belong to a rung, as rows of values: `--rung NAME` prints them, benchmarks save them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flash_attn_mini.reference import attention_reference

from .measure import extra_bytes, milliseconds
from .naive import naive_attention
from .verify import verify
from .whole_row import most_keys, whole_row_attention

Tensor = torch.Tensor
Rows = list[dict[str, Any]]

MINIMAL_LENGTHS = (128, 256, 500, 512, 1024, 2048, 4096)
MINIMAL_HEADDIM = 128
TIMED_SHAPES = ((1, 256, 64), (2, 512, 64), (4, 1024, 64), (8, 2048, 64), (32, 4096, 64))  # batch, seqlen, headdim
CHECKED_SHAPES = ((1, 32, 16), (2, 64, 32), (4, 128, 64))
SHARED_MEMORY = {  # KB that a thread block may use
    "every GPU, without asking": 48,
    "compute capability 8.6, 8.9, 12.0": 99,
    "A100": 163,
    "H100, H200": 227,
}


def draw(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """q, k and v, random normal."""
    generator = torch.Generator(device).manual_seed(shape[-2])
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3)]


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in float64 of ``[batch, seqlen, headdim]``, an entry at a time."""
    outs = [attention_reference(*(x[None, :, None] for x in entry))[0][0, :, 0] for entry in zip(q, k, v, strict=True)]
    return torch.stack(outs)


class Budget:
    """Says whether a call is likely to end in time, from the time of the call before it and the amount of work.

    A GPU runs everything: there the compiler takes the time, and that does not grow with the work.
    """

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.end = math.inf if device.type == "cuda" else time.perf_counter() + seconds
        self.seconds_per_work = 0.0

    def allows(self, work: float) -> bool:
        """True for the first call, and if a call of this much work is likely to end in time."""
        expected = work * self.seconds_per_work
        return expected == 0.0 or time.perf_counter() + expected <= self.end

    def spent(self, work: float, seconds: float) -> None:
        """Notes the time of a call."""
        self.seconds_per_work = seconds / work


def naive_memory(device: torch.device) -> Rows:
    """Extra memory of the naive rung over the length, measured: one head, head dim 64."""
    rows = []
    for seqlen in (512, 1024, 2048, 4096):
        q, k, v = draw((1, seqlen, 64), device, torch.float16 if device.type == "cuda" else torch.float32)
        extra = extra_bytes(partial(naive_attention, q, k, v), device)
        rows.append({"seqlen": seqlen, "extra bytes": extra, "÷ bytes of q": round(extra / q.nbytes)})
    return rows


def whole_row_limits() -> Rows:
    """Where the scheme of whole_row.py ends, by GPU, for 16-bit inputs."""
    return [
        {
            "GPU": name,
            "shared memory of a CTA": f"{kilobytes} KB",
            "most keys, head dim 64": most_keys(64, 2, kilobytes * 1024),
            "most keys, head dim 128": most_keys(128, 2, kilobytes * 1024),
        }
        for name, kilobytes in SHARED_MEMORY.items()
    ]


def whole_row_runs(lengths: tuple[int, ...] = (128, 200, 256, 500, 1000)) -> Rows:
    """What whole_row.py gives for each number of keys, head dim 128, float16, 99 KB of shared memory."""
    rows = []
    for seqlen in lengths:
        q, k, v = draw((1, seqlen, 128), torch.device("cpu"))
        try:
            result = str(verify(whole_row_attention(q, k, v), reference(q, k, v)))
        except MemoryError as error:
            result = str(error)
        rows.append({"keys": seqlen, "result": result})
    return rows


def minimal_triton_lengths(device: torch.device, seconds: float) -> Rows:
    """The four measures of the error for each length that ends in time: float16, one head, head dim 128."""
    from .minimal_triton import minimal_triton_attention

    budget, rows = Budget(seconds, device), []
    for seqlen in MINIMAL_LENGTHS:
        if not budget.allows(seqlen**2):
            continue
        q, k, v = draw((1, seqlen, MINIMAL_HEADDIM), device)
        start = time.perf_counter()
        report = verify(minimal_triton_attention(q[0], k[0], v[0]), reference(q, k, v)[0])
        budget.spent(seqlen**2, time.perf_counter() - start)
        rows.append(
            {
                "N": seqlen,
                "max abs": float(f"{report.max_abs:.3g}"),
                "mean abs": float(f"{report.mean_abs:.3g}"),
                "max rel": float(f"{report.max_rel:.3g}"),
                "cosine": f"{report.cosine:.6f}",
                "verdict": "passed" if report.passed else "FAILED",
            }
        )
    return rows


def versions() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The functions that `version_errors` and `version_times` compare, by name."""
    from .flash_v1 import flash_attention
    from .flash_v2 import flash_attention_v2

    return {"naive": naive_attention, "v1": flash_attention, "v2": flash_attention_v2}


def version_errors(device: torch.device) -> Rows:
    """Largest error of naive, v1 and v2 against float64: float16, batch×seqlen×headdim."""
    rows = []
    for shape in CHECKED_SHAPES:
        q, k, v = draw(shape, device)
        expected = reference(q, k, v)
        reports = {name: verify(function(q, k, v), expected) for name, function in versions().items()}
        rows.append(
            {
                "shape": "×".join(map(str, shape)),
                **{name: float(f"{report.max_abs:.3g}") for name, report in reports.items()},
                "verdict": "passed" if all(report.passed for report in reports.values()) else "FAILED",
            }
        )
    return rows


def version_times(device: torch.device, seconds: float) -> Rows:
    """Milliseconds and extra bytes of naive, v1 and v2 for each shape that ends in time."""
    budget, rows = Budget(seconds, device), []
    for shape in TIMED_SHAPES:
        work = shape[0] * shape[1] ** 2
        if not budget.allows(work):
            continue
        q, k, v = draw(shape, device)
        row: dict[str, Any] = {"shape": "×".join(map(str, shape))}
        start = time.perf_counter()
        for name, function in versions().items():
            ms = milliseconds(partial(function, q, k, v), device, 0.2)
            row[f"{name}, ms"] = float(f"{ms:.3g}")
        for name, function in versions().items():
            row[f"{name}, extra bytes"] = extra_bytes(partial(function, q, k, v), device)
        budget.spent(work, time.perf_counter() - start)
        rows.append(row)
    return rows


def padding() -> Rows:
    """The minimal CUDA kernel with and without a float of padding in each row of shared memory. Needs a GPU."""
    from .minimal_cuda import minimal_cuda_attention

    device, rows = torch.device("cuda"), []
    for headdim in (32, 64, 96, 128):
        q, k, v = draw((4, 8, 1024, headdim), device, torch.float32)
        ms = {
            padded: milliseconds(partial(minimal_cuda_attention, q, k, v, padded=padded), device)
            for padded in (True, False)
        }
        rows.append(
            {
                "head dim": headdim,
                "padded, ms": float(f"{ms[True]:.4g}"),
                "not padded, ms": float(f"{ms[False]:.4g}"),
                "not padded ÷ padded": round(ms[False] / ms[True], 2),
            }
        )
    return rows
