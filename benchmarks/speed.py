"""Speed on a GPU over a grid of shapes: TFLOP/s and ratios within one run. bench_forward and bench_backward name the
grids and the contenders, and this measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import cli
from benchmarks.methods import Budget, as_timed, attention_flops, interleave, matmul_ceiling, ratio, timer_for
from benchmarks.rivals import Rival, select

# For one median of a forward; a backward gets as much more as it has more to do.
MIN_REP_MS, MAX_REP_MS = 20.0, 100.0
MEASURE_OVERHEAD_MS = 40.0  # what one do_bench costs beside its timed repetitions
GRAPHS = "Calls are replayed as CUDA graphs: the time is the GPU's alone."
DISAGREEMENT = 2e-2  # largest difference between two contenders, as a share of the largest value: 16-bit rounding


@dataclass(frozen=True)
class Point:
    """One shape of a grid; queries and keys are of the same length."""

    batch: int
    nheads: int
    nheads_k: int
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
    nheads_k: tuple[int, ...] = ()  # numbers of key heads to measure; none: as many as query heads
    suffix: str = ""  # of the result's name, where several grids measure the same contenders

    def points(self, quick: bool) -> list[Point]:
        seqlens = self.seqlens[1::3] if quick and len(self.seqlens) > 3 else self.seqlens
        return [
            Point(*shape, nheads_k or shape[1], seqlen, headdim, causal)
            for headdim in self.headdims
            for nheads_k in self.nheads_k or (None,)
            for causal in (False, True)
            for seqlen in seqlens
            for shape in [self.shape_of(seqlen, headdim)]
        ]


@dataclass(frozen=True)
class Direction:
    """What is measured: the forward or the backward."""

    name: str  # the results' names begin with it
    rivals: Mapping[str, Rival]
    work: float  # FLOPs as a multiple of the forward's
    sources: Mapping[str, Sequence[str]]  # by backend

    @property
    def benchmark(self) -> str:
        return f"bench_{self.name}"


def check_agreement(rivals: Sequence[Rival], calls: Mapping[Rival, Callable[[], Any]]) -> None:
    """The time of a wrong result is no figure: every contender must agree with the last one."""
    results = {}
    for rival in rivals:
        with rival.active():
            results[rival.name] = rival.outputs(calls[rival]())
    names = list(results)
    for name in names[:-1]:
        for got, expected in zip(results[name], results[names[-1]], strict=True):
            share = ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
            if not share <= DISAGREEMENT:  # NaN too
                raise RuntimeError(f"{name} and {names[-1]} disagree by up to {share:.3g} of the largest value")


def draw_inputs(point: Point, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random normal q, k, v as [batch, seqlen, heads, headdim]."""
    heads = (point.nheads, point.nheads_k, point.nheads_k)
    return [torch.randn(point.batch, point.seqlen, h, point.headdim, device=device).to(dtype) for h in heads]


def measure_point(
    direction: Direction, point: Point, grid: Grid, ours: list[str], theirs: list[str], rounds: int, rep_ms: float
) -> dict[str, Any]:
    """One row of the result: times, TFLOP/s, ratios, and who could not run and why.

    One of ours whose result differs from the first rival's is an error, another rival is left out with that reason.
    """
    device = torch.device(grid.device)
    q, k, v = draw_inputs(point, device, grid.dtype)
    contenders = select([*ours, *theirs], direction.rivals)
    reasons = {rival.name: rival.unsupported(q, k, v, point.causal) for rival in contenders}
    calls: dict[Rival, Callable[[], Any]] = {}
    for rival in contenders:
        if reasons[rival.name] is not None:
            continue
        try:
            calls[rival] = as_timed(rival, rival.bind(q, k, v, point.causal), device)
        except RuntimeError as error:
            if rival.name in ours:
                raise
            reasons[rival.name] = str(error).splitlines()[0]
    able = list(calls)
    reference = next((rival for rival in able if rival.name in theirs), able[-1])
    for rival in able:
        try:
            check_agreement([rival, reference], calls)
        except RuntimeError as error:
            if rival.name in ours:
                raise
            reasons[rival.name] = str(error)
            del calls[rival]
    timings = interleave(calls, timer_for(device), rounds=rounds, rep_ms=rep_ms)
    flops = direction.work * attention_flops(
        point.batch, point.nheads, point.seqlen, point.seqlen, point.headdim, point.causal
    )
    against = {rival.name: [rival.baseline] if rival.baseline else theirs for rival in contenders if rival.name in ours}
    return {
        **asdict(point),
        "dtype": str(grid.dtype).removeprefix("torch."),
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in timings.items()},
        "tflops": {name: float(f"{flops / timing.ms / 1e9:.4g}") for name, timing in timings.items()},
        "ratio": {
            mine: {rival: round(ratio(timings[mine], timings[rival]), 3) for rival in others if rival in timings}
            for mine, others in against.items()
            if mine in timings
        },
        "unsupported": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def run(direction: Direction, grids: Mapping[str, Grid], doc: str | None, argv: list[str] | None) -> None:
    """The command line of a benchmark of speed."""
    parser = cli.parser_for(doc, seconds=120.0)
    parser.add_argument("--grid", choices=sorted(grids), default="perf")
    parser.add_argument("--backend", action="append", help="ours, repeatable (default: the grid's)")
    parser.add_argument("--rivals", nargs="+", help="theirs; ratios in tables are against the first")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--name", help=f"of the result (default: {direction.name}_BACKEND)")
    arguments = parser.parse_args(argv)
    measure_grid(direction, arguments.grid, grids[arguments.grid], arguments)


def measure_grid(direction: Direction, grid_name: str, grid: Grid, arguments: argparse.Namespace) -> None:
    """Measures the points of a grid as far as the time goes, and saves them."""
    if grid.device == "cuda":
        cli.require_gpu(direction.benchmark)
    ours = list(arguments.backend or grid.backends)
    theirs = list(arguments.rivals or grid.rivals)
    points = grid.points(arguments.quick)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    notes = [
        f"Medians of {arguments.rounds} interleaved rounds under sustained load, the L2 cache cleared between calls."
    ]
    ceiling = None
    if grid.device == "cuda":
        notes.append(GRAPHS)
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
        rep_ms = 1.0 if grid.device == "cpu" else min(max_rep_ms, max(min_rep_ms, budget.share(parts) - overhead_ms))
        row = measure_point(direction, point, grid, ours, theirs, arguments.rounds, rep_ms)
        data.append(row if ceiling is None else {**row, "ceiling_tflops": ceiling})
        for name, reason in row["unsupported"].items():
            print(f"{name} cannot run {point}: {reason}")
    if skipped:
        notes.append(f"{skipped} of {len(points)} points were left out: the {arguments.seconds:.0f} s were used up.")
    missing = [name for name in ours if not any(name in row["ratio"] for row in data)]
    if missing:
        raise SystemExit(f"{direction.benchmark}: {', '.join(missing)} ran at no point; nothing is written")
    cli.finish(
        arguments.name or f"{direction.name}_{ours[0]}{grid.suffix}",
        benchmark=direction.benchmark,
        title=grid.title,
        data=data,
        sources=["benchmarks/speed.py", *(glob for name in ours for glob in direction.sources.get(name, ()))],
        arguments=arguments,
        notes=notes,
        complete=skipped == 0,
    )
    if skipped:
        raise SystemExit(f"{direction.benchmark}: {notes[-1]}")
