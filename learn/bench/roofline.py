"""FLOPs, bytes and the roofline (learn/roofline.md): every rung, standard attention against flash attention, memory.

  python -m learn.bench.roofline     on a GPU; elsewhere the same on the CPU, with short sequences

The results are roofline_DEVICE (the machine's limits and every rung), roofline_lengths_DEVICE (intensity and speed-up
over the length), roofline_memory_DEVICE (bytes that calls allocate) and, on a GPU, roofline_kernels (what standard
attention launches).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import Budget, attention_flops, timer_for
from learn.bench import report
from learn.bench.grid import OUT_OF_MEMORY, Function, function_of
from learn.measure import MATMUL_SIZE, matmul_tflops

BATCH, NHEADS = 4, 8
LENGTHS = {"cuda": (256, 512, 1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024)}
MEMORY_LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192, 16384), "cpu": (512, 1024)}
REP_MS = 15.0
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
ITEMSIZE = 2


def bytes_of_standard(batch_heads: int, seqlen: int, headdim: int, itemsize: int = ITEMSIZE) -> float:
    """q, k, v and out once; the scores written, read, P written and read: the fewest with three kernels."""
    return itemsize * batch_heads * (4.0 * seqlen * headdim + 4.0 * seqlen**2)


def bytes_of_flash(batch_heads: int, seqlen: int, headdim: int, itemsize: int = ITEMSIZE) -> float:
    """q, k, v and out once, if the L2 cache serves repeated reads; the float32 log-sum-exp."""
    return batch_heads * (itemsize * 4.0 * seqlen * headdim + 4.0 * seqlen)


def seconds_on(peak_tflops: float, gbps: float, flops: float, moved: float) -> float:
    """The least time on a machine of these limits: the roofline."""
    return max(flops / (peak_tflops * 1e12), moved / (gbps * 1e9))


def copy_gbps(device: torch.device) -> float:
    """Bytes read and written by a copy ÷ time: the machine's limit at the time of the run."""
    source = torch.empty(COPY_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer_for(device)(lambda: target.copy_(source), 50.0) / 1e6


def rung_rows(peak: float, gbps: float, quick: bool) -> list[dict[str, Any]]:
    """Every rung that runs here: FLOPs a byte of its loops, and its speed."""
    from learn.rungs import RUNGS, measure

    rows = [measure(rung, seconds=0.05 if quick else 0.3) for rung in RUNGS]
    return [
        {
            "rung": f"{number}. {row['rung']}",
            "intensity": float(f"{row['tflops'] / row['gbps'] * 1e3:.4g}"),
            "tflops": row["tflops"],
            "roof_tflops": float(f"{min(peak, row['tflops'] / row['gbps'] * gbps):.4g}"),
            "peak_tflops": peak,
            "copy_gbps": gbps,
            "ridge": round(peak / gbps * 1e3, 1),
        }
        for number, row in enumerate(rows, start=1)
        if "ms" in row and not row["interpreted"]
    ]


def inputs(device: torch.device, seqlen: int, headdim: int) -> list[Tensor]:
    """q, k and v ``[batch, seqlen, heads, headdim]``."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return [torch.randn(BATCH, seqlen, NHEADS, headdim, device=device).to(dtype) for _ in range(3)]


def length_rows(device: torch.device, peak: float, gbps: float, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Intensities, and the speed-up of flash attention over standard attention: by the roofline, and measured."""
    rows = []
    ours = function_of(device.type)
    for headdim in (64, 128):
        for seqlen in lengths:
            flops = attention_flops(BATCH, NHEADS, seqlen, seqlen, headdim, False)
            itemsize = ITEMSIZE if device.type == "cuda" else 4
            standard, flash = (
                f(BATCH * NHEADS, seqlen, headdim, itemsize) for f in (bytes_of_standard, bytes_of_flash)
            )
            q, k, v = inputs(device, seqlen, headdim)
            ms: dict[str, float] = {}
            for name, function in (("naive", function_of("naive")), ("flash", ours)):
                try:
                    with torch.no_grad():
                        ms[name] = timer_for(device)(partial(function, q, k, v, False), REP_MS)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
            theory = seconds_on(peak, gbps, flops, standard) / seconds_on(peak, gbps, flops, flash)
            rows.append(
                {
                    "head dim": headdim,
                    "seqlen": seqlen,
                    "standard, FLOPs a byte": round(flops / standard, 1),
                    "flash, FLOPs a byte": round(flops / flash, 1),
                    "speed-up by the roofline": round(theory, 2),
                    "speed-up measured": round(ms["naive"] / ms["flash"], 2) if len(ms) == 2 else OUT_OF_MEMORY,
                }
            )
    return rows


def kernel_rows(device: torch.device) -> list[dict[str, Any]]:
    """The kernels that a causal call of naive attention and of the cuda backend launch, with their times."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = inputs(device, 4096, 64)
    rows = []
    for name in ("naive", "cuda"):
        function: Function = function_of(name)
        with torch.no_grad():
            function(q, k, v, True)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                function(q, k, v, True)
                torch.cuda.synchronize()
        launches = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        rows += [
            {
                "implementation": name,
                "number": number,
                "kernel": short_name(event.name),
                "µs": round(event.device_time, 1),
            }
            for number, event in enumerate(sorted(launches, key=lambda event: event.time_range.start), start=1)
        ]
    return rows


def short_name(kernel: str) -> str:
    """A kernel's name without arguments and most of its template arguments."""
    text = kernel.removeprefix("void ").split("(")[0]
    return f"`{text if len(text) <= 60 else text[:59] + '…'}`"


def memory_rows(device: torch.device, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Bytes that a forward allocates beyond q, k, v and out: measured, head dim 64."""
    from learn.measure import extra_bytes
    from learn.rungs import run_v1, run_v2, triton_device

    has_triton = triton_device() == device == torch.device("cuda")
    rows = []
    for seqlen in lengths:
        q, k, v = inputs(device, seqlen, 64)
        heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        calls = {"naive": partial(function_of("naive"), q, k, v, False)}
        if has_triton:
            calls |= {"v1": partial(run_v1, *heads_first), "v2": partial(run_v2, *heads_first)}
            calls["triton"] = partial(function_of("triton"), q, k, v, False)
        calls |= {name: partial(function_of(name), q, k, v, False) for name in ("SDPA", device.type)}
        row: dict[str, Any] = {"seqlen": seqlen}
        for name, call in calls.items():
            try:
                with torch.no_grad():
                    call()  # one-time allocations do not count
                    row[name] = f"{extra_bytes(call, device) / 2**20:,.2f}"
            except torch.cuda.OutOfMemoryError:
                row[name] = OUT_OF_MEMORY
                torch.cuda.empty_cache()
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = report.parser_for(__doc__, seconds=40.0)
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the ladder: its blocks are small
    os.environ["FLASH_ATTN_MINI_TRITON_AUTOTUNE"] = "0"
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    dtype, size = torch.float16 if device.type == "cuda" else torch.float32, MATMUL_SIZE[device.type]
    peak, gbps = (float(f"{x:.4g}") for x in (matmul_tflops(device, dtype), copy_gbps(device)))
    limits = f"A {size}³ matrix product reached {peak} TFLOP/s and a copy {gbps} GB/s in the same run."
    where = f"batch {BATCH}, {NHEADS} heads"

    def save(name: str, title: str, data: list[dict[str, Any]], *notes: str) -> None:
        sources = report.SOURCES[device.type]
        report.finish(
            name, benchmark="roofline", title=title, data=data, arguments=arguments, sources=sources, notes=notes
        )

    cut = 2 if arguments.quick else None
    save(f"roofline_{device.type}", "The roofline and the rungs", rung_rows(peak, gbps, arguments.quick), limits)
    rows = length_rows(device, peak, gbps, LENGTHS[device.type][:cut])
    save(f"roofline_lengths_{device.type}", f"Standard attention and flash attention, {where}", rows, limits)
    if device.type == "cuda":
        title = f"Kernels of one causal call: {where}, 4096 tokens, head dim 64"
        save("roofline_kernels", title, kernel_rows(device))
    title = f"MiB that a forward allocates beyond q, k, v and out, measured: {where}, head dim 64"
    save(f"roofline_memory_{device.type}", title, memory_rows(device, MEMORY_LENGTHS[device.type][:cut]))
    if budget.left() < 0:
        print(f"roofline: took {-budget.left():.0f} s more than the {arguments.seconds:.0f} s asked for")


if __name__ == "__main__":
    main()
