"""Speed of the forward or the backward against PyTorch's kernels over a grid of shapes, with ratios within one run.

The result is named after the direction and the first backend measured, such as forward_cuda. A backward counts 2.5
times the forward's FLOPs: five matrix products instead of two.

  python -m benchmarks.bench_speed                        the cuda backend, bf16, 16,384 tokens, nheads * headdim = 2048
  python -m benchmarks.bench_speed --backward             the same for the backward op
  python -m benchmarks.bench_speed --grid fp16            forward: the cuda backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_speed --grid triton          either direction: the triton backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_speed --backward --grid headdims   head dims 32, 96 and 192
  python -m benchmarks.bench_speed --backward --grid gqa        grouped heads, 32 query heads of 128
  python -m benchmarks.bench_speed --grid tiny            either direction: the cpu backend on shapes that take no time
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import cli
from benchmarks.methods import Budget, matmul_ceiling
from benchmarks.speed import (
    BACKWARD,
    FORWARD,
    GRAPHS,
    MAX_REP_MS,
    MEASURE_OVERHEAD_MS,
    MIN_REP_MS,
    Direction,
    Grid,
    measure_point,
)


def of_16384_tokens(seqlen: int, headdim: int) -> tuple[int, int]:
    """(batch, nheads) of 16,384 tokens and nheads * headdim = 2048."""
    return 16384 // seqlen, 2048 // headdim


def of_8_heads(seqlen: int, headdim: int) -> tuple[int, int]:
    return 4, 8


def of_32_heads(seqlen: int, headdim: int) -> tuple[int, int]:
    return 16384 // seqlen, 32


TRITON = {"dtype": torch.float16, "headdims": (64, 128), "seqlens": (4096, 8192, 16384), "shape_of": of_8_heads}
TINY = {"dtype": torch.float32, "headdims": (16, 32), "seqlens": (32, 64), "shape_of": lambda *_: (1, 2)}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CUDNN_FIRST, FLASH_FIRST = ("cuDNN", "FLASH_ATTENTION"), ("FLASH_ATTENTION", "cuDNN")


def shared_grids(name: str) -> dict[str, Grid]:
    """The grids that both directions have."""
    triton, tiny = f"{name} of the Triton backend, fp16, batch 4, 8 heads", f"{name} on the CPU, float32, a trial run"
    return {
        "triton": Grid(triton, ("triton",), FLASH_FIRST, **TRITON),
        "tiny": Grid(tiny, ("cpu",), ("SDPA",), **TINY, device="cpu"),
    }


GRIDS: dict[str, dict[str, Grid]] = {
    "forward": {
        "perf": Grid(
            "Forward, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
            ("cuda", "cuda sm80"),
            CUDNN_FIRST,
            (64, 128, 256),
            LENGTHS,
            of_16384_tokens,
        ),
        "fp16": Grid(
            "Forward, fp16, batch 4, 8 heads",
            ("cuda", "cuda sm80", "triton"),
            CUDNN_FIRST,
            (64, 128),
            (256, *LENGTHS),
            of_8_heads,
            torch.float16,
            suffix="_fp16",
        ),
        **shared_grids("Forward"),
    },
    "backward": {
        "perf": Grid(
            "Backward, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
            ("cuda", "cuda deterministic"),
            FLASH_FIRST,
            (64, 128, 256),
            LENGTHS,
            of_16384_tokens,
        ),
        "headdims": Grid(
            "Backward, head dims 32, 96 and 192, bf16, 16,384 tokens a batch, nheads * headdim ≈ 2048",
            ("cuda",),
            ("FLASH_ATTENTION",),
            (32, 96, 192),
            (1024, 4096, 16384),
            of_16384_tokens,
            suffix="_headdims",
        ),
        "gqa": Grid(
            "Backward with grouped heads, bf16, 16,384 tokens a batch, 32 query heads of 128",
            ("cuda",),
            FLASH_FIRST,
            (128,),
            (1024, 4096, 16384),
            of_32_heads,
            nheads_k=(32, 8, 1),
            suffix="_gqa",
        ),
        **shared_grids("Backward"),
    },
}


def measure_grid(direction: Direction, grid_name: str, grid: Grid, arguments: argparse.Namespace) -> None:
    """Measures the points of a grid until the time is used up, and saves them."""
    on_gpu = grid.device == "cuda"
    if on_gpu:
        cli.require_gpu("bench_speed")
    ours = list(arguments.backend or grid.backends)
    theirs = list(arguments.rivals or grid.rivals)
    points = grid.points(arguments.quick)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    notes = [f"Medians of {arguments.rounds} interleaved rounds."]
    ceiling = None
    if on_gpu:
        notes = [f"{notes[0][:-1]} under sustained load, the L2 cache cleared between calls.", GRAPHS]
        ceiling = round(matmul_ceiling(torch.device(grid.device), grid.dtype))
        notes.append(f"In the same run an 8192³ matrix product of this dtype reached {ceiling} TFLOP/s.")
    min_rep_ms, max_rep_ms, overhead_ms = (
        direction.work * time for time in (MIN_REP_MS, MAX_REP_MS, MEASURE_OVERHEAD_MS)
    )
    data: list[dict[str, Any]] = []
    skipped = 0
    for number, point in enumerate(cli.progress(points, grid_name)):
        if budget.left() <= 0:
            skipped += 1
            continue
        parts = (len(points) - number) * arguments.rounds * (len(ours) + len(theirs))
        rep_ms = min(max_rep_ms, max(min_rep_ms, budget.share(parts) - overhead_ms)) if on_gpu else 1.0
        row = measure_point(direction, point, grid, ours, theirs, arguments.rounds, rep_ms)
        data.append(row if ceiling is None else {**row, "ceiling_tflops": ceiling})
        for name, reason in row["unsupported"].items():
            print(f"{name} cannot run {point}: {reason}")
    if skipped:
        notes.append(f"{skipped} of {len(points)} points were left out: the {arguments.seconds:.0f} s were used up.")
    missing = [name for name in ours if not any(name in row["ratio"] for row in data)]
    if missing:
        raise SystemExit(f"bench_speed: {', '.join(missing)} ran at no point; nothing is written")
    cli.finish(
        arguments.name or f"{direction.name}_{ours[0]}{grid.suffix}",
        benchmark="bench_speed",
        title=grid.title,
        data=data,
        sources=["benchmarks/speed.py", *(glob for name in ours for glob in direction.sources.get(name, ()))],
        arguments=arguments,
        notes=notes,
        complete=skipped == 0,
    )
    if skipped:
        raise SystemExit(f"bench_speed: {notes[-1]}")


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--backward", action="store_true", help="measure the backward op")
    parser.add_argument("--grid", choices=sorted({name for grids in GRIDS.values() for name in grids}), default="perf")
    parser.add_argument("--backend", action="append", help="ours, repeatable (default: the grid's)")
    parser.add_argument("--rivals", nargs="+", help="theirs; ratios in tables are against the first")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--name", help="of the result (default: DIRECTION_BACKEND)")
    arguments = parser.parse_args(argv)
    direction = BACKWARD if arguments.backward else FORWARD
    grids = GRIDS[direction.name]
    if arguments.grid not in grids:
        parser.error(f"--grid {arguments.grid}: the {direction.name} has {', '.join(grids)}")
    measure_grid(direction, arguments.grid, grids[arguments.grid], arguments)


if __name__ == "__main__":
    main()
