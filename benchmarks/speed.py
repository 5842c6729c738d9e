"""Measures points of a grid of shapes in one direction: TFLOP/s, and ratios within one run (bench_speed.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.methods import BACKWARD_WORK, as_timed, attention_flops, interleave, ratio, timer_for
from benchmarks.rivals import BACKWARD_RIVALS, RIVALS, Rival, select

# Milliseconds of one median of a forward; those of a backward are Direction.work times as long.
MIN_REP_MS, MAX_REP_MS = 20.0, 100.0
MEASURE_OVERHEAD_MS = 40.0  # time of a do_bench beside its timed repetitions
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
    """Shapes and their contenders; ratios in tables are against the first rival."""

    title: str
    backends: tuple[str, ...]
    rivals: tuple[str, ...]
    headdims: tuple[int, ...]
    seqlens: tuple[int, ...]
    shape_of: Callable[[int, int], tuple[int, int]]  # (seqlen, headdim) -> (batch, nheads)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    nheads_k: tuple[int, ...] = ()  # numbers of key heads to measure; empty: as many as query heads
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
    """The forward or the backward."""

    name: str  # the results' names begin with it
    rivals: Mapping[str, Rival]
    work: float  # FLOPs as a multiple of the forward's
    sources: Mapping[str, Sequence[str]]  # by backend


FORWARD = Direction("forward", RIVALS, 1.0, provenance.SOURCES_OF_BACKEND)
BACKWARD = Direction("backward", BACKWARD_RIVALS, BACKWARD_WORK, provenance.BACKWARD_SOURCES_OF_BACKEND)


def check_agreement(rivals: Sequence[Rival], calls: Mapping[Rival, Callable[[], Any]]) -> None:
    """RuntimeError unless every contender's result agrees with the last one's: wrong results are not timed."""
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
    """One row of the result: times, TFLOP/s, ratios, and the reasons of contenders that could not run.

    If one of ours differs from the first rival it is an error; a rival that differs is left out with that reason.
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
