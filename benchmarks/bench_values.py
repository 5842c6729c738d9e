"""The forward on different values: our speed ÷ the rival's on the same inputs, which should not depend on the values.

Values are logits of standard deviation 1 to 64, a constant level of up to ±400 added to every logit, and one sink key
whose logits lie 35 or 90 above the rest. Level and sink use the last dimension of q and k. Each round measures all of
them in another random order, because the call before may change the GPU's clocks. A ratio below 0.95 of the ratio at
standard deviation 1 makes the exit status 1.

  python -m benchmarks.bench_values                       the cuda backend against cuDNN, bf16, 16,384 tokens
  python -m benchmarks.bench_values --grid tiny           the cpu backend on shapes that take no time
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.bench_speed import (
    GRAPHS,
    MAX_REP_MS,
    MIN_REP_MS,
    Grid,
    Point,
    check_agreement,
    draw_inputs,
    of_16384_tokens,
)
from benchmarks.methods import Budget, Timing, as_timed, interleave, progress, ratio, require_gpu, timer_for
from benchmarks.rivals import RIVALS, Rival

LEAST_RELATIVE_RATIO = 0.95


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

GRIDS = {
    "perf": Grid(
        "The forward on different values, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
        ("cuda",),
        ("cuDNN",),
        (64, 128, 256),
        (1024, 4096, 16384),
        of_16384_tokens,
    ),
    "tiny": Grid(
        "The forward on different values on the CPU, float32, a trial run",
        ("cpu",),
        ("SDPA",),
        (16,),
        (64,),
        lambda *_: (1, 2),
        torch.float32,
        "cpu",
    ),
}


def measure_point(point: Point, grid: Grid, names: tuple[str, str], rounds: int, rep_ms: float) -> list[dict[str, Any]]:
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
            "batch": point.batch,
            "nheads": point.nheads,
            "nheads_k": point.nheads_k,
            "seqlen": point.seqlen,
            "headdim": point.headdim,
            "causal": point.causal,
            "dtype": str(grid.dtype).removeprefix("torch."),
            "ms": {name: round(times[values][name].ms, 5) for name in names},
            "spread": {name: round(times[values][name].spread, 3) for name in names},
            "ratio": round(ratios[values], 3),
            "relative_ratio": round(ratios[values] / ratios[VALUES[0]], 3),
        }
        for values in VALUES
    ]


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=240.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--backend", help="ours (default: the grid's)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds at each point (default: %(default)s)")
    arguments = parser.parse_args(argv)
    grid = GRIDS[arguments.grid]
    if grid.device == "cuda":
        require_gpu("bench_values")
    names = (arguments.backend or grid.backends[0], grid.rivals[0])
    points = grid.points(arguments.quick)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    data: list[dict[str, Any]] = []
    skipped = 0
    for number, point in enumerate(progress(points, arguments.grid)):
        if budget.left() <= 0:
            skipped += 1
            continue
        share = budget.share((len(points) - number) * len(VALUES) * len(names) * arguments.rounds)
        rep_ms = min(MAX_REP_MS, max(MIN_REP_MS, share / 2)) if grid.device == "cuda" else 1.0
        data += measure_point(point, grid, names, arguments.rounds, rep_ms)
    notes = [f"Medians of {arguments.rounds} interleaved rounds; every kind of values in each round, in random order."]
    if grid.device == "cuda":
        notes.append(GRAPHS)
    if skipped:
        notes.append(f"{skipped} of {len(points)} points were left out: the {arguments.seconds:.0f} s were used up.")
    results.finish(
        f"values_{names[0]}",
        benchmark="bench_values",
        title=grid.title,
        data=data,
        sources=results.SOURCES_OF_BACKEND[names[0]],
        arguments=arguments,
        notes=notes,
        complete=skipped == 0,
    )
    if skipped:
        raise SystemExit(f"bench_values: {notes[-1]}")
    slow = [
        f"d{row['headdim']} {'causal' if row['causal'] else 'full'} {row['seqlen']} {row['values']}: "
        f"{row['relative_ratio']:.3f}"
        for row in data
        if row["relative_ratio"] < LEAST_RELATIVE_RATIO
    ]
    if slow and grid.device == "cuda":
        raise SystemExit(f"bench_values: below {LEAST_RELATIVE_RATIO} of the ratio at std 1: {'; '.join(slow)}")


if __name__ == "__main__":
    main()
