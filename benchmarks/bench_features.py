"""Time of calls with features, each compared with the plain call of the same shape in the same run.

  window    time ÷ (time of the plain full call × share of blocks that the window shows)
  cost      time that softcap, ALiBi and dropout add, in percent
  hopper    time of the same calls on the kernels of sm80 ÷ time on those of Hopper
  varlen    speedup of packed sequences over the padded batch ÷ ratio of their FLOPs

The result is named after the backend measured:

  python -m benchmarks.bench_features                     the cuda backend, bf16
  python -m benchmarks.bench_features --backend triton
  python -m benchmarks.bench_features --grid tiny         the cpu backend on shapes that take no time
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.bench_speed import Point as Shape
from benchmarks.bench_speed import draw_inputs
from benchmarks.methods import (
    DISAGREEMENT,
    GRAPHS,
    Budget,
    as_timed,
    attention_flops,
    check_close,
    interleave,
    ratio,
    require_gpu,
    timer_for,
)
from benchmarks.rivals import PLAIN, Feature, Mini, Rival

TAIL = 64  # last queries that are compared with the reference
BLOCK = 128  # queries and keys of a block in the share of visible blocks
DIRECTIONS = ("forward", "backward")
FLOAT32_DISAGREEMENT = 1e-4

IDEAL = (
    f"A window's share of blocks is the number of blocks of {BLOCK} queries and keys in which a query sees a key ÷ the "
    "number of all blocks. A varlen batch is compared with the padded batch, both causal."
)


@dataclass(frozen=True)
class Group:
    """Features measured together with plain calls, interleaved in one run."""

    figure: str  # a key of FIGURES
    batch: int
    seqlen: int
    heads: tuple[tuple[int, int], ...]  # (nheads, headdim)
    plain: tuple[tuple[Feature, bool], ...]  # with causal
    calls: tuple[tuple[Feature, bool], ...]  # each compared with the plain call of its mask, or else the first one
    directions: tuple[str, ...] = DIRECTIONS


@dataclass(frozen=True)
class Grid:
    """The groups of a run, their backend and dtype."""

    device: str
    dtype: torch.dtype
    backend: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Point:
    """One shape of a group, in one direction."""

    group: Group
    nheads: int
    headdim: int
    direction: str


def draw_lengths(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths of sequences, the same in every run."""
    draw = random.Random(0)
    return tuple(draw.randint(shortest, longest) for _ in range(count))


def window_group(size: int, seqlen: int, heads: tuple[tuple[int, int], ...]) -> Group:
    """One sequence; a window of `size` keys to the left, and half of it to each side."""
    behind, around = (size, 0), (size // 2, size // 2)
    calls = tuple((Feature(f"window {window}", window_size=window), window is behind) for window in (behind, around))
    return Group("window", 1, seqlen, heads, ((PLAIN, False),), calls)


SCORE_FEATURES = (
    Feature("softcap 30", softcap=30.0),
    Feature("ALiBi", alibi=True),
    Feature("dropout 0.1", dropout_p=0.1),
)
MASKS = (False, True)


def cost_group(batch: int, seqlen: int, heads: tuple[tuple[int, int], ...]) -> Group:
    """Features that act on every score or probability, with each mask."""
    calls = tuple((feature, causal) for causal in MASKS for feature in SCORE_FEATURES)
    return Group("cost", batch, seqlen, heads, tuple((PLAIN, causal) for causal in MASKS), calls)


def hopper_group(batch: int, seqlen: int, heads: tuple[tuple[int, int], ...]) -> Group:
    """These features and the plain call, each compared with the same call on the kernels of sm80."""
    calls = tuple((feature, causal) for causal in MASKS for feature in (PLAIN, *SCORE_FEATURES))
    return Group("hopper", batch, seqlen, heads, calls, calls, directions=("forward",))


def varlen_group(count: int, shortest: int, longest: int, heads: tuple[tuple[int, int], ...]) -> Group:
    """Sequences of lengths drawn from a range, packed and padded."""
    lengths = draw_lengths(count, shortest, longest)
    packed = Feature(f"varlen {count} of {shortest} to {longest}", lengths=lengths, is_packed=True)
    return Group("varlen", count, longest, heads, ((Feature("padded", lengths=lengths), True),), ((packed, True),))


GRIDS = {
    "perf": Grid(
        "cuda",
        torch.bfloat16,
        "cuda",
        (
            window_group(1024, 16384, ((16, 128), (32, 64))),
            cost_group(4, 4096, ((16, 128), (32, 64))),
            hopper_group(4, 4096, ((16, 128), (32, 64), (8, 256))),
            varlen_group(32, 256, 4096, ((16, 128), (32, 64))),
        ),
    ),
    "tiny": Grid(
        "cpu",
        torch.float32,
        "cpu",
        (
            window_group(64, 512, ((2, 16),)),
            cost_group(1, 96, ((2, 16),)),
            hopper_group(1, 96, ((2, 16),)),
            varlen_group(4, 3, 70, ((2, 16),)),
        ),
    ),
}


def visible_share(feature: Feature, seqlen: int, causal: bool) -> float:
    """The blocks of BLOCK queries and BLOCK keys in which some query sees some key, as a share of all."""
    left, right = feature.window_size
    right = 0 if causal else right
    count = -(-seqlen // BLOCK)
    visible = 0
    for block in range(count):
        first, last = block * BLOCK, min((block + 1) * BLOCK, seqlen) - 1
        begin = 0 if left < 0 else max(0, first - left)
        end = seqlen if right < 0 else min(seqlen, last + right + 1)
        visible += -(-end // BLOCK) - begin // BLOCK
    return visible / count**2


def true_share(feature: Feature, point: Point, causal: bool) -> float:
    """FLOPs of the tokens ÷ FLOPs of the padded batch."""

    def flops(batch: int, length: int) -> float:
        return attention_flops(batch, point.nheads, length, length, point.headdim, causal)

    return sum(flops(1, length) for length in feature.lengths) / flops(point.group.batch, point.group.seqlen)


# A group's figure from two numbers: time of the plain call ÷ time of the call, and the call's share of the work.
FIGURES: dict[str, Callable[[float, float], float]] = {
    "window": lambda faster, share: 1.0 / (faster * share),
    "cost": lambda faster, _: (1.0 / faster - 1.0) * 100.0,
    "hopper": lambda faster, _: faster,
    "varlen": lambda faster, share: faster * share,
}


def share_of_work(point: Point, feature: Feature, causal: bool) -> float:
    """Work of a call ÷ work of the plain call that it is compared with."""
    if point.group.figure == "window":
        return visible_share(feature, point.group.seqlen, causal)
    return true_share(feature, point, causal) if feature.is_packed else 1.0


@dataclass
class Contender:
    """A call of a group."""

    rival: Mini
    causal: bool
    plain: Contender | None = None  # the call that it is compared with; None for a plain call

    @property
    def feature(self) -> Feature:
        return self.rival.feature


def contenders_of(point: Point, backend: str) -> list[Contender]:
    """The plain calls, then the others; the names include the mask."""
    figure = point.group.figure

    def named(feature: Feature, causal: bool, plain: Contender | None = None) -> Contender:
        is_of_sm80 = figure == "cost" or (figure == "hopper" and plain is None)
        arch = 80 if is_of_sm80 and point.direction == "forward" else None
        rival = Mini(backend, feature, arch=arch, backward=point.direction == "backward")
        rival.name = f"{feature.name} {'causal' if causal else 'full'}"
        if figure == "hopper" and plain is None:
            rival.name += " on sm80"
        return Contender(rival, causal, plain)

    plain = [named(*call) for call in point.group.plain]
    if figure == "hopper":
        return plain + [named(*call, itself) for call, itself in zip(point.group.calls, plain, strict=True)]
    with_mask = {contender.causal: contender for contender in plain}
    return plain + [named(*call, with_mask.get(call[1], plain[0])) for call in point.group.calls]


def reference_tail(feature: Feature, q: Tensor, k: Tensor, v: Tensor, causal: bool, rng_state: Tensor | None) -> Tensor:
    """The last queries of the first head of the first sequence, [queries, headdim], from the definition.

    Masks and ALiBi count from the end of the sequence, so the last queries can be computed without the others.
    """
    from flash_attn_mini.reference import attention_reference
    from flash_attn_mini.reference.philox import dropout_mask

    rows = min(TAIL, q.shape[1])
    kept = None
    if rng_state is not None:
        kept = dropout_mask(rng_state, feature.dropout_p, 1, 1, q.shape[1], k.shape[1], q.device)[..., -rows:, :]
    slopes = feature.slopes(q)
    out, _ = attention_reference(
        q[:1, -rows:, :1],
        k[:1, :, :1],
        v[:1, :, :1],
        causal=causal,
        window_size=feature.window_size,
        softcap=feature.softcap,
        alibi_slopes=None if slopes is None else slopes[:1],
        dropout_p=feature.dropout_p,
        dropout_mask=kept,
    )
    return out[0, :, 0]


def check_tail(backend: str, feature: Feature, q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: float) -> None:
    """RuntimeError unless the last rows of a dense forward are those of the definition."""
    from flash_attn_mini import ops
    from flash_attn_mini.options import Options

    left, right = feature.window_size
    scale, right = q.shape[-1] ** -0.5, 0 if causal else right
    options = Options(feature.dropout_p, scale, causal, left, right, feature.softcap, feature.slopes(q), False, backend)
    with torch.no_grad():
        out, _, rng_state, _ = ops.forward(q, k, v, None, options)
        expected = reference_tail(feature, q, k, v, causal, rng_state)
        got = out[0, -expected.shape[0] :, 0].to(expected.dtype)
    check_close(f"{backend} with {feature.name} and the reference", [got], [expected], allowed)


def check(contenders: list[Contender], direction: str, inputs: list[Tensor]) -> None:
    """RuntimeError unless a forward agrees with the definition, varlen calls with the padded batch, and every gradient
    is finite: wrong results are not timed."""
    allowed = FLOAT32_DISAGREEMENT if inputs[0].dtype == torch.float32 else DISAGREEMENT
    for contender in contenders:
        rival, feature = contender.rival, contender.feature
        what = f"{rival.backend} with {rival.name}, {direction},"
        with rival.active():
            results = rival.outputs(rival.bind(*inputs, contender.causal)())
            if feature.is_packed and contender.plain is not None:
                plain = contender.plain.rival
                expected = [feature.packed(x) for x in plain.outputs(plain.bind(*inputs, contender.causal)())]
                check_close(f"{what} and {plain.name}", results, expected, allowed)
            elif direction == "forward":
                check_tail(rival.backend, feature, *inputs, contender.causal, allowed)
        if not all(x.isfinite().all() for x in results):
            raise RuntimeError(f"{what} is not finite")


def measure_point(point: Point, grid: Grid, backend: str, rounds: int, rep_ms: float) -> list[dict[str, Any]]:
    """A row for each call of the group that is not plain."""
    group, device = point.group, torch.device(grid.device)
    shape = Shape(group.batch, point.nheads, point.nheads, group.seqlen, point.headdim, False, point.headdim)
    inputs = draw_inputs(shape, device, grid.dtype)
    contenders = contenders_of(point, backend)
    check(contenders, point.direction, inputs)
    bound = {x.rival: x.rival.bind(*inputs, x.causal) for x in contenders}
    calls: dict[Rival, Callable[[], Any]] = {rival: as_timed(rival, call, device) for rival, call in bound.items()}
    timings = interleave(calls, timer_for(device), rounds=rounds, rep_ms=rep_ms)

    rows = []
    for contender in contenders:
        if contender.plain is None:
            continue
        ours, plain = timings[contender.rival.name], timings[contender.plain.rival.name]
        share = share_of_work(point, contender.feature, contender.causal)
        rows.append(
            {
                "feature": contender.feature.name,
                "direction": point.direction,
                "figure": group.figure,
                **asdict(replace(shape, causal=contender.causal)),
                "dtype": str(grid.dtype).removeprefix("torch."),
                "ms": round(ours.ms, 5),
                "plain_ms": round(plain.ms, 5),
                "spread": round(max(ours.spread, plain.spread), 3),
                "share_of_work": float(f"{share:.4g}"),
                "value": float(f"{FIGURES[group.figure](ratio(ours, plain), share):.4g}"),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=180.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--backend", help="ours (default: the grid's)")
    parser.add_argument("--figure", choices=sorted(FIGURES), help="only this group")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds at each point (default: %(default)s)")
    arguments = parser.parse_args(argv)
    grid = GRIDS[arguments.grid]
    backend = arguments.backend or grid.backend
    if grid.device == "cuda":
        require_gpu("bench_features")
    chosen = [group for group in grid.groups if arguments.figure in (None, group.figure)]
    points = [
        Point(group, *heads, direction)
        for group in chosen
        for heads in (group.heads[:1] if arguments.quick else group.heads)
        for direction in group.directions
    ]
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    data: list[dict[str, Any]] = []
    measured = 0
    for number, point in budget.within(points, arguments.grid):
        calls = sum(len(later.group.calls) + len(later.group.plain) for later in points[number:])
        rep_ms = budget.rep_ms(calls * arguments.rounds, grid.device)
        data += measure_point(point, grid, backend, arguments.rounds, rep_ms)
        measured = number + 1
    rounds = f"Medians of {arguments.rounds} interleaved rounds, each compared with the plain call of the same round."
    notes = [rounds, IDEAL, *[GRAPHS] * (grid.device == "cuda")]
    results.finish(
        f"features_{backend}_{arguments.figure}" if arguments.figure else f"features_{backend}",
        "bench_features",
        f"What features cost on the {backend} backend, {str(grid.dtype).removeprefix('torch.')}",
        data,
        arguments,
        sources=results.SOURCES_OF_BACKEND[backend],
        notes=notes,
        left_out=budget.left_out(measured, len(points)),
    )


if __name__ == "__main__":
    main()
