"""Forward speed against PyTorch's kernels over a grid of shapes: TFLOP/s and ratios within one run.

The result is named after the backend measured, forward_cuda for one:

  python -m benchmarks.bench_forward                      the cuda backend, bf16, 16,384 tokens, nheads * headdim = 2048
  python -m benchmarks.bench_forward --grid triton        the triton backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_forward --grid tiny          the cpu backend on shapes that take no time
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import cli, provenance
from benchmarks.methods import Budget, attention_flops, interleave, matmul_ceiling, ratio, timer_for
from benchmarks.rivals import Rival, select

MIN_REP_MS, MAX_REP_MS = 20.0, 100.0
MEASURE_OVERHEAD_MS = 40.0  # what one do_bench costs beside its timed repetitions


@dataclass(frozen=True)
class Point:
    """One shape of a grid; queries and keys are of the same length."""

    batch: int
    nheads: int
    seqlen: int
    headdim: int
    causal: bool


@dataclass(frozen=True)
class Grid:
    """Shapes and who runs them; ratios in tables are against the first rival."""

    title: str
    device: str
    dtype: torch.dtype
    backends: tuple[str, ...]
    rivals: tuple[str, ...]
    headdims: tuple[int, ...]
    seqlens: tuple[int, ...]
    shape_of: Callable[[int, int], tuple[int, int]]  # (seqlen, headdim) -> (batch, nheads)

    def points(self, quick: bool) -> list[Point]:
        seqlens = self.seqlens[1::3] if quick and len(self.seqlens) > 3 else self.seqlens
        return [
            Point(*self.shape_of(seqlen, headdim), seqlen, headdim, causal)
            for headdim in self.headdims
            for causal in (False, True)
            for seqlen in seqlens
        ]


GRIDS = {
    "perf": Grid(
        title="Forward, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
        device="cuda",
        dtype=torch.bfloat16,
        backends=("cuda",),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(64, 128, 256),
        seqlens=(512, 1024, 2048, 4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (16384 // seqlen, 2048 // headdim),
    ),
    "triton": Grid(
        title="Forward of the Triton backend, fp16, batch 4, 8 heads",
        device="cuda",
        dtype=torch.float16,
        backends=("triton",),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(64, 128),
        seqlens=(4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (4, 8),
    ),
    "tiny": Grid(
        title="Forward on the CPU, float32, shapes that only show that the benchmark runs",
        device="cpu",
        dtype=torch.float32,
        backends=("cpu",),
        rivals=("SDPA",),
        headdims=(16, 32),
        seqlens=(32, 64),
        shape_of=lambda seqlen, headdim: (1, 2),
    ),
}


def check_agreement(rivals: list[Rival], calls: dict[Rival, Callable[[], torch.Tensor]]) -> None:
    """The time of a wrong result is no figure: every contender must agree with the last one."""
    outputs = {}
    for rival in rivals:
        with rival.active():
            outputs[rival.name] = rival.output(calls[rival]()).float()
    names = list(outputs)
    for name in names[:-1]:
        out, expected = outputs[name], outputs[names[-1]]
        if not torch.allclose(out, expected, rtol=2e-2, atol=2e-2):
            worst = (out - expected).abs().max().item()
            raise RuntimeError(f"{name} and {names[-1]} disagree by up to {worst:.3g}")


def measure_point(
    point: Point, grid: Grid, ours: list[str], theirs: list[str], rounds: int, rep_ms: float
) -> dict[str, Any]:
    """One row of the result: times, TFLOP/s, ratios, and who could not run and why."""
    device = torch.device(grid.device)
    shape = (point.batch, point.seqlen, point.nheads, point.headdim)
    q, k, v = (torch.randn(shape, device=device).to(grid.dtype) for _ in range(3))
    contenders = select([*ours, *theirs])
    reasons = {rival.name: rival.unsupported(q, k, v, point.causal) for rival in contenders}
    able = [rival for rival in contenders if reasons[rival.name] is None]
    calls = {rival: rival.bind(q, k, v, point.causal) for rival in able}
    check_agreement(able, calls)
    timings = interleave(calls, timer_for(device), rounds=rounds, rep_ms=rep_ms)
    flops = attention_flops(point.batch, point.nheads, point.seqlen, point.seqlen, point.headdim, point.causal)
    return {
        **asdict(point),
        "dtype": str(grid.dtype).removeprefix("torch."),
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in timings.items()},
        "tflops": {name: float(f"{flops / timing.ms / 1e9:.4g}") for name, timing in timings.items()},
        "ratio": {
            mine: {rival: round(ratio(timings[mine], timings[rival]), 3) for rival in theirs if rival in timings}
            for mine in ours
            if mine in timings
        },
        "unsupported": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def run(grid_name: str, arguments: argparse.Namespace) -> None:
    grid = GRIDS[grid_name]
    if grid.device == "cuda":
        cli.require_gpu("bench_forward")
    ours = list(arguments.backend or grid.backends)
    theirs = list(arguments.rivals or grid.rivals)
    points = grid.points(arguments.quick)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    notes = [
        f"Medians of {arguments.rounds} interleaved rounds under sustained load, the L2 cache cleared between calls."
    ]
    if grid.device == "cuda":
        ceiling = matmul_ceiling(torch.device(grid.device), grid.dtype)
        notes.append(f"In the same run an 8192³ matrix product of this dtype reached {ceiling:.0f} TFLOP/s.")
    data: list[dict[str, Any]] = []
    skipped = 0
    for number, point in enumerate(cli.progress(points, grid_name)):
        if budget.left() <= 0:
            skipped += 1
            continue
        parts = (len(points) - number) * arguments.rounds * (len(ours) + len(theirs))
        rep_ms = min(MAX_REP_MS, max(MIN_REP_MS, budget.share(parts) - MEASURE_OVERHEAD_MS))
        row = measure_point(point, grid, ours, theirs, arguments.rounds, 1.0 if grid.device == "cpu" else rep_ms)
        data.append(row)
        for name, reason in row["unsupported"].items():
            print(f"{name} cannot run {point}: {reason}")
    if skipped:
        notes.append(f"{skipped} of {len(points)} points were left out: the {arguments.seconds:.0f} s were used up.")
    missing = [name for name in ours if not any(name in row["ratio"] for row in data)]
    if missing:
        raise SystemExit(f"bench_forward: {', '.join(missing)} ran at no point; nothing is written")
    sources = [glob for name in ours for glob in provenance.SOURCES_OF_BACKEND.get(name, ())]
    cli.finish(
        arguments.name or f"forward_{'_'.join(ours)}",
        benchmark="bench_forward",
        title=grid.title,
        data=data,
        sources=sources,
        arguments=arguments,
        notes=notes,
        complete=skipped == 0,
    )
    if skipped:
        raise SystemExit(f"bench_forward: {notes[-1]}")


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--backend", action="append", help="ours, repeatable (default: the grid's)")
    parser.add_argument("--rivals", nargs="+", help="theirs; ratios in tables are against the first")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--name", help="of the result (default: forward_BACKEND)")
    arguments = parser.parse_args(argv)
    run(arguments.grid, arguments)


if __name__ == "__main__":
    main()
