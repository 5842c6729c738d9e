"""Speed and energy of the forward or the backward against PyTorch's kernels, FlashAttention-3 and FlashAttention-4.

Ratios come from one run. A contender that cannot be imported or run is named with the reason. The result is named after
the direction and the first backend measured, such as forward_cuda. A backward counts 2.5 times the forward's FLOPs:
five matrix products instead of two.

--joules adds the energy that the whole GPU uses for a call at the longest sequences, by NVML's counter. It needs
pynvml.

  python -m benchmarks.bench_speed                        the cuda backend, bf16, 16,384 tokens, nheads * headdim = 2048
  python -m benchmarks.bench_speed --backward             the same for the backward op
  python -m benchmarks.bench_speed --grid fp16            forward: the cuda backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_speed --grid triton          either direction: the triton backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_speed --backward --grid headdims   head dims 32, 96 and 192
  python -m benchmarks.bench_speed --backward --grid gqa        grouped heads, 32 query heads of 128
  python -m benchmarks.bench_speed --grid latent          either direction: the cuda backend, head dim 128, and 192 with
                                                          128 of v, against FlexAttention, which is compiled
  python -m benchmarks.bench_speed --grid wide            either direction: the triton backend at head dim 512, the same
  python -m benchmarks.bench_speed --grid tiny            either direction: the cpu backend on shapes that take no time
  python -m benchmarks.bench_speed --values --rounds 5 --seconds 240

--values measures the forward on different values against one rival. The ratio should not depend on the values. They are
logits of standard deviation 1 to 64, a constant level of up to ±400 added to every logit, and one sink key whose logits
lie 35 or 90 above the rest. Level and sink use the last dimension of q and k. Each round measures all of them in
another random order, because the call before may change the GPU's clocks. A ratio below 0.95 of the ratio at standard
deviation 1 makes the exit status 1.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import results, tables
from benchmarks.methods import (
    BACKWARD_WORK,
    GRAPHS,
    MAX_REP_MS,
    MEASURE_OVERHEAD_MS,
    MIN_REP_MS,
    Budget,
    Timing,
    as_timed,
    attention_flops,
    check_agreement,
    energy_counter,
    interleave,
    joules_per_call,
    matmul_ceiling,
    ratio,
    ratios,
    require_gpu,
    timer_for,
)
from benchmarks.rivals import BACKWARD_RIVALS, RIVALS, Rival, first_line, select

MIN_JOULES_SECONDS = 2.0  # of load; with 0.25 to 1 s, joules ÷ time were 454 to 934 W on a card of 700 W
LEAST_RELATIVE_RATIO = 0.95  # of the ratio of speeds on some values ÷ that at standard deviation 1


@dataclass(frozen=True)
class Point:
    """One shape of a grid; queries and keys are of the same length."""

    batch: int
    nheads: int
    nheads_k: int
    seqlen: int
    headdim: int
    causal: bool
    headdim_v: int  # of v

    def mean_headdim(self, direction: Direction) -> float:
        """Of the products: one of each head dim in a forward; in a backward three of headdim, two of headdim_v."""
        weight = 0.5 if direction is FORWARD else 0.6
        return weight * self.headdim + (1.0 - weight) * self.headdim_v


@dataclass(frozen=True)
class Grid:
    """Shapes and their contenders; ratios in tables are against the first rival."""

    title: str
    backends: tuple[str, ...]
    rivals: tuple[str, ...]
    headdims: tuple[int | tuple[int, int], ...]  # a pair: of q and k, and of v
    seqlens: tuple[int, ...]
    shape_of: Callable[[int, int], tuple[int, int]]  # (seqlen, headdim) -> (batch, nheads)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    nheads_k: tuple[int, ...] = ()  # numbers of key heads to measure; empty: as many as query heads
    suffix: str = ""  # of the result's name, where several grids measure the same contenders

    def points(self, quick: bool) -> list[Point]:
        seqlens = self.seqlens[1::3] if quick and len(self.seqlens) > 3 else self.seqlens
        pairs = [pair if isinstance(pair, tuple) else (pair, pair) for pair in self.headdims]
        return [
            Point(*shape, nheads_k or shape[1], seqlen, headdim, causal, headdim_v)
            for headdim, headdim_v in pairs
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


FORWARD = Direction("forward", RIVALS, 1.0)
BACKWARD = Direction("backward", BACKWARD_RIVALS, BACKWARD_WORK)


def draw_inputs(point: Point, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random normal q, k, v as [batch, seqlen, heads, headdim]."""
    sizes = ((point.nheads, point.headdim), (point.nheads_k, point.headdim), (point.nheads_k, point.headdim_v))
    return [torch.randn(point.batch, point.seqlen, *size, device=device).to(dtype) for size in sizes]


def bound_calls(
    direction: Direction, point: Point, grid: Grid, ours: list[str], theirs: list[str]
) -> tuple[dict[Rival, Callable[[], Any]], dict[str, str | None]]:
    """The calls of the contenders on random inputs, and for each contender the reason why it cannot run, or None.

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
        except rival.failures as error:
            if rival.name in ours:
                raise
            reasons[rival.name] = first_line(error)
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
    return calls, reasons


def measure_point(
    direction: Direction, point: Point, grid: Grid, ours: list[str], theirs: list[str], rounds: int, rep_ms: float
) -> dict[str, Any]:
    """One row of the result: times, TFLOP/s, ratios, and the reasons of contenders that could not run."""
    calls, reasons = bound_calls(direction, point, grid, ours, theirs)
    timings = interleave(calls, timer_for(torch.device(grid.device)), rounds=rounds, rep_ms=rep_ms)
    sizes = (point.batch, point.nheads, point.seqlen, point.seqlen)
    flops = direction.work * attention_flops(*sizes, point.mean_headdim(direction), point.causal)
    return {
        **asdict(point),
        "dtype": str(grid.dtype).removeprefix("torch."),
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in timings.items()},
        "tflops": {name: float(f"{flops / timing.ms / 1e9:.4g}") for name, timing in timings.items()},
        "ratio": ratios(timings, select(ours, direction.rivals), theirs),
        "unsupported": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def of_16384_tokens(seqlen: int, headdim: int) -> tuple[int, int]:
    """(batch, nheads) of 16,384 tokens and nheads * headdim = 2048."""
    return 16384 // seqlen, 2048 // headdim


def of_8_heads(seqlen: int, headdim: int) -> tuple[int, int]:
    return 4, 8


def of_16_heads(seqlen: int, headdim: int) -> tuple[int, int]:
    return 16384 // seqlen, 16


def of_32_heads(seqlen: int, headdim: int) -> tuple[int, int]:
    return 16384 // seqlen, 32


PERF = {"headdims": (64, 128, 256), "seqlens": (512, 1024, 2048, 4096, 8192, 16384), "shape_of": of_16384_tokens}
TRITON = {"headdims": (64, 128), "seqlens": (4096, 8192, 16384), "shape_of": of_8_heads, "dtype": torch.float16}
TINY = {"headdims": (16, 32), "seqlens": (32, 64), "shape_of": lambda *_: (1, 2), "dtype": torch.float32}
CUDNN_FIRST, FLASH_FIRST = ("cuDNN", "FLASH_ATTENTION"), ("FLASH_ATTENTION", "cuDNN")
OFFICIAL = ("FA3", "FA4")
SHAPES = "bf16, 16,384 tokens a batch, nheads * headdim = 2048"


def shared_grids(name: str) -> dict[str, Grid]:
    """The grids that both directions have."""
    triton, tiny = f"{name} of the Triton backend, fp16, batch 4, 8 heads", f"{name} on the CPU, float32, a trial run"
    latent, lengths = f"{name} with 192 columns of q and k and 128 of v, and with 128 of all, bf16", (1024, 4096, 16384)
    wide = f"{name} of the Triton backend at head dim 512, bf16, 16,384 tokens a batch, 4 heads"
    flex = ("FlexAttention", "cuDNN")
    return {
        "triton": Grid(triton, ("triton",), FLASH_FIRST, **TRITON),
        "latent": Grid(latent, ("cuda",), flex, (128, (192, 128)), lengths, of_16_heads, suffix="_latent"),
        "wide": Grid(wide, ("triton",), flex, (512,), (1024, 4096), of_16384_tokens, suffix="_wide"),
        "tiny": Grid(tiny, ("cpu",), ("SDPA",), **TINY, device="cpu"),
    }


GRIDS: dict[str, dict[str, Grid]] = {
    "forward": {
        "perf": Grid(f"Forward, {SHAPES}", ("cuda", "cuda sm80"), (*CUDNN_FIRST, *OFFICIAL), **PERF),
        "fp16": Grid(
            "Forward, fp16, batch 4, 8 heads",
            ("cuda", "cuda sm80", "triton"),
            (*CUDNN_FIRST, *OFFICIAL),
            **{**TRITON, "seqlens": (256, *PERF["seqlens"])},
            suffix="_fp16",
        ),
        **shared_grids("Forward"),
    },
    "backward": {
        "perf": Grid(f"Backward, {SHAPES}", ("cuda", "cuda deterministic"), (*FLASH_FIRST, *OFFICIAL), **PERF),
        "headdims": Grid(
            "Backward, head dims 32, 96 and 192, bf16, 16,384 tokens a batch, nheads * headdim ≈ 2048",
            ("cuda",),
            ("FLASH_ATTENTION", *OFFICIAL),
            (32, 96, 192),
            (1024, 4096, 16384),
            of_16384_tokens,
            suffix="_headdims",
        ),
        "gqa": Grid(
            "Backward with grouped heads, bf16, 16,384 tokens a batch, 32 query heads of 128",
            ("cuda",),
            (*FLASH_FIRST, *OFFICIAL),
            (128,),
            (1024, 4096, 16384),
            of_32_heads,
            nheads_k=(32, 8, 1),
            suffix="_gqa",
        ),
        **shared_grids("Backward"),
    },
    "values": {
        "perf": Grid(
            f"The forward on different values, {SHAPES}",
            ("cuda",),
            ("cuDNN",),
            **{**PERF, "seqlens": (1024, 4096, 16384)},
        ),
        "tiny": Grid(
            "The forward on different values on the CPU, float32, a trial run",
            ("cpu",),
            ("SDPA",),
            **{**TINY, "headdims": (16,), "seqlens": (64,)},
            device="cpu",
        ),
    },
}


def add_joules(
    direction: Direction,
    points: Sequence[Point],
    grid: Grid,
    ours: list[str],
    theirs: list[str],
    data: list[dict[str, Any]],
    seconds: float,
    counter: Callable[[], float],
) -> None:
    """Adds the joules of a call to the rows of the longest sequences, measured under `seconds` of load for each
    contender. data: a row for each of the first points."""
    longest = max(row["seqlen"] for row in data)
    for point, row in zip(points, data, strict=False):
        if point.seqlen == longest:
            calls, _ = bound_calls(direction, point, grid, ours, theirs)
            used = joules_per_call(calls, row["ms"], counter, seconds, torch.cuda.synchronize)
            row["joules"] = {name: float(f"{value:.4g}") for name, value in used.items()}


def absent(data: list[dict[str, Any]]) -> list[str]:
    """A sentence for each contender that did not run at some points, with the reason at the first of them."""
    reasons: dict[str, list[str]] = {}
    for row in data:
        for name, reason in row["unsupported"].items():
            reasons.setdefault(name, []).append(reason)
    return [f"{name} did not run at {len(why)} of {len(data)} points: {why[0]}." for name, why in reasons.items()]


def measure_grid(direction: Direction, grid_name: str, grid: Grid, arguments: argparse.Namespace) -> None:
    """Measures the points of a grid until the time is used up, and saves them."""
    on_gpu = grid.device == "cuda"
    if on_gpu:
        require_gpu("bench_speed")
    ours = list(arguments.backend or grid.backends)
    theirs = list(arguments.rivals or grid.rivals)
    points = grid.points(arguments.quick)
    try:
        counter = energy_counter(torch.device(grid.device)) if arguments.joules else None
    except RuntimeError as error:
        raise SystemExit(f"bench_speed: --joules: {error}") from None
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
    for number, point in budget.within(points, grid_name):
        parts = (len(points) - number) * arguments.rounds * (len(ours) + len(theirs))
        rep_ms = min(max_rep_ms, max(min_rep_ms, budget.share(parts) - overhead_ms)) if on_gpu else 1.0
        row = measure_point(direction, point, grid, ours, theirs, arguments.rounds, rep_ms)
        data.append(row if ceiling is None else {**row, "ceiling_tflops": ceiling})
    if counter is not None and data:
        add_joules(direction, points, grid, ours, theirs, data, arguments.joules, counter)
        notes.append(f"Joules are of the whole GPU, under {arguments.joules:g} s of load for each contender.")
    notes += absent(data)
    missing = [name for name in ours if not any(name in row["ratio"] for row in data)]
    if missing:
        reasons = "\n".join(["", *absent(data)])
        raise SystemExit(f"bench_speed: {', '.join(missing)} ran at no point; nothing is written{reasons}")
    name = f"{direction.name}_{ours[0]}{grid.suffix}"
    sources = [path for name in ours for path in results.SOURCES_OF_BACKEND.get(name.split()[0], ())]
    left_out = budget.left_out(len(data), len(points))
    results.finish(name, "bench_speed", grid.title, data, arguments, sources=sources, notes=notes, left_out=left_out)


# ---- the same inputs with different logits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The distribution of the logits."""

    name: str
    deviation: float = 1.0
    level: float = 0.0  # added to every logit
    sink: float = 0.0  # added to the logits of one key
    is_first: bool = True  # whether the sink is the first key; otherwise a random one of each head

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with these logits, from random normal ones [batch, seqlen, heads, headdim]."""
        q, k = (q.float() * self.deviation).to(q.dtype), k.clone()
        shift = self.level or self.sink
        if shift:
            factor = math.sqrt(abs(shift) * math.sqrt(q.shape[-1]))  # scores are scaled by 1 / sqrt(headdim)
            key = torch.full_like(k[..., 0], math.copysign(factor, shift))  # [batch, seqlen_k, heads]
            if self.sink:
                chosen = torch.zeros_like(key[:, :1], dtype=torch.int64)
                if not self.is_first:
                    chosen.random_(0, k.shape[1])
                key = torch.zeros_like(key).scatter_(1, chosen, factor)
            q[..., -1], k[..., -1] = factor, key
        return q, k


VALUES = (
    *(Values(f"std {deviation}", deviation=deviation) for deviation in (1, 3, 9, 25, 64)),
    *(Values(f"level {level:+}", level=level) for level in (80, -80, 400, -400)),
    *(
        Values(f"sink {sink} {'first' if is_first else 'random'}", sink=sink, is_first=is_first)
        for sink in (35, 90)
        for is_first in (True, False)
    ),
)


def measure_values(
    point: Point, grid: Grid, names: tuple[str, str], rounds: int, rep_ms: float
) -> list[dict[str, Any]]:
    """A row for each kind of values; `ratio` is our speed ÷ the rival's."""
    device = torch.device(grid.device)
    normal_q, normal_k, v = draw_inputs(point, device, grid.dtype)
    calls: dict[Values, dict[Rival, Callable[[], Any]]] = {}
    for values in VALUES:
        q, k = values.apply(normal_q, normal_k)
        calls[values] = {
            RIVALS[name]: as_timed(RIVALS[name], RIVALS[name].bind(q, k, v, point.causal), device) for name in names
        }
        check_agreement(list(calls[values]), calls[values])
    times = {values: {name: Timing([]) for name in names} for values in VALUES}
    order = random.Random(0)
    for _ in range(rounds):
        for values in order.sample(VALUES, len(VALUES)):
            pair = dict(order.sample(list(calls[values].items()), len(names)))
            for name, timing in interleave(pair, timer_for(device), rounds=1, rep_ms=rep_ms).items():
                times[values][name].rounds.extend(timing.rounds)
    ratios = {values: ratio(times[values][names[0]], times[values][names[1]]) for values in VALUES}
    return [
        {
            "values": values.name,
            **asdict(point),
            "dtype": str(grid.dtype).removeprefix("torch."),
            "ms": {name: round(times[values][name].ms, 5) for name in names},
            "spread": {name: round(times[values][name].spread, 3) for name in names},
            "ratio": round(ratios[values], 3),
            "relative_ratio": round(ratios[values] / ratios[VALUES[0]], 3),
        }
        for values in VALUES
    ]


def measure_values_grid(grid_name: str, grid: Grid, arguments: argparse.Namespace) -> None:
    """Measures the points of a grid on all values, and saves them. SystemExit where the speed depends on them."""
    on_gpu = grid.device == "cuda"
    if on_gpu:
        require_gpu("bench_speed")
    names = ((arguments.backend or grid.backends)[0], (arguments.rivals or grid.rivals)[0])
    points = grid.points(arguments.quick)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    data: list[dict[str, Any]] = []
    for number, point in budget.within(points, grid_name):
        share = budget.share((len(points) - number) * len(VALUES) * len(names) * arguments.rounds)
        rep_ms = min(MAX_REP_MS, max(MIN_REP_MS, share / 2)) if on_gpu else 1.0
        data += measure_values(point, grid, names, arguments.rounds, rep_ms)
    notes = [f"Medians of {arguments.rounds} interleaved rounds; every kind of values in each round, in random order."]
    results.finish(
        f"values_{names[0]}",
        "bench_values",
        grid.title,
        data,
        arguments,
        sources=results.SOURCES_OF_BACKEND[names[0]],
        notes=[*notes, *[GRAPHS] * on_gpu],
        left_out=budget.left_out(len(data) // len(VALUES), len(points)),
    )
    slow = [
        f"{tables.kind_of(row)} {row['seqlen']} {row['values']}: {row['relative_ratio']:.3f}"
        for row in data
        if row["relative_ratio"] < LEAST_RELATIVE_RATIO
    ]
    if slow and on_gpu:
        raise SystemExit(f"bench_speed: below {LEAST_RELATIVE_RATIO} of the ratio at std 1: {'; '.join(slow)}")


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--backward", action="store_true", help="measure the backward op")
    parser.add_argument("--values", action="store_true", help="measure the forward on different values")
    parser.add_argument("--grid", choices=sorted({name for grids in GRIDS.values() for name in grids}), default="perf")
    parser.add_argument("--backend", action="extend", nargs="+", help="ours (default: the grid's)")
    parser.add_argument("--rivals", action="extend", nargs="+", help="theirs; ratios in tables are against the first")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument(
        "--joules", type=float, default=0.0, metavar="SECONDS", help="measure energy too, so long for each contender"
    )
    arguments = parser.parse_args(argv)
    if arguments.joules and arguments.joules < MIN_JOULES_SECONDS:
        parser.error(f"--joules {arguments.joules:g}: the counter needs at least {MIN_JOULES_SECONDS:g} seconds")
    direction = BACKWARD if arguments.backward else FORWARD
    if arguments.values and arguments.backward:
        parser.error("--values measures the forward; give --values or --backward")
    what = "values" if arguments.values else direction.name
    if arguments.grid not in GRIDS[what]:
        parser.error(f"--grid {arguments.grid}: {what} has {', '.join(GRIDS[what])}")
    grid = GRIDS[what][arguments.grid]
    if arguments.values:
        measure_values_grid(arguments.grid, grid, arguments)
    else:
        measure_grid(direction, arguments.grid, grid, arguments)


if __name__ == "__main__":
    main()
