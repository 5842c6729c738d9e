"""What three choices of the Triton backend gain (learn/tutorial.md): fp16, batch 4, 8 heads. Needs a GPU.

  python -m learn.bench.choices                    all three
  python -m learn.bench.choices --figure delta     delta computed once and shared, or once for each kernel

The results are choice_delta, choice_autotune (the best tile of the table against its first) and choice_descriptor
(TensorDescriptor, that is TMA, against pointers, with the same tile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.methods import Budget, require_gpu, time_cuda
from learn.bench import report

BATCH, NHEADS = 4, 8
LENGTHS = (4096, 16384)
HEADDIMS = (64, 128)
REP_MS = 15.0
ROUNDS = 3


def median_times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds by name: the median of interleaved rounds."""
    rounds = [{name: time_cuda(call, REP_MS) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: sorted(times[name] for times in rounds)[ROUNDS // 2] for name in calls}


def inputs(seqlen: int, headdim: int) -> list[Tensor]:
    """q, k, v and dout ``[batch, seqlen, heads, headdim]``."""
    torch.manual_seed(0)
    return [torch.randn(BATCH, seqlen, NHEADS, headdim, device="cuda").half() for _ in range(4)]


def options(headdim: int, causal: bool) -> Any:
    from flash_attn_mini.options import Options

    return Options(0.0, headdim**-0.5, causal, -1, 0 if causal else -1, 0.0, None)


Point = tuple[int, int, bool]  # head dim, sequence length, causal


def points_of(quick: bool, masks: tuple[bool, ...]) -> list[Point]:
    """Every mask is another compilation: two seconds for each tile."""
    lengths = LENGTHS[:1] if quick else LENGTHS
    return [(headdim, seqlen, causal) for headdim in HEADDIMS for causal in masks for seqlen in lengths]


def in_time(points: list[Point], budget: Budget) -> Iterator[tuple[dict[str, Any], int, list[Tensor], Any]]:
    """The first fields of a row, the head dim, the tensors and the options of each point, until the time is used up."""
    for headdim, seqlen, causal in points:
        if budget.left() <= 0:
            return
        row = {"head dim": headdim, "seqlen": seqlen, "mask": "causal" if causal else "full"}
        yield row, headdim, inputs(seqlen, headdim), options(headdim, causal)


def tiles_of(tables: Any, headdim: int) -> list[Any]:
    """The configurations of a kernel for this GPU; the first is the fixed one."""
    tiles: list[Any] = (tables.hopper if torch.cuda.get_device_capability() >= (9, 0) else tables.plain)[headdim]
    return tiles


def tile_name(config: Any) -> str:
    """Rows × keys, warps, stages, and the kind of loads."""
    kwargs = config.kwargs
    loads = "TMA" if kwargs["USE_TMA"] else "pointers"
    return f"{kwargs['BLOCK_M']}×{kwargs['BLOCK_N']} w{config.num_warps} s{config.num_stages} {loads}"


def delta_rows(points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The backward as it is, where the dQ kernel stores delta for the dK/dV kernel, and with delta computed again."""
    from flash_attn_mini.backends.triton import configs, launch, launch_bwd

    rows = []
    for row, headdim, (q, k, v, dout), chosen in in_time(points, budget):
        forward = launch.prepare(q, k, v, chosen)
        launch.launch(forward, tiles_of(configs.FORWARD, headdim)[0])
        prepare = partial(launch_bwd.prepare, dout, q, k, v, forward.out, forward.lse, None, chosen)
        call, delta_alone = prepare(), prepare(output_mask=(False, False, False))
        dq_tile, dkv_tile = (tiles_of(table, headdim)[0] for table in (configs.BACKWARD_DQ, configs.BACKWARD_DKV))

        def once(call: Any = call, dq_tile: Any = dq_tile, dkv_tile: Any = dkv_tile) -> None:
            launch_bwd.launch_dq(call, dq_tile)
            launch_bwd.launch_dkv(call, dkv_tile)

        def twice(once: Any = once, delta_alone: Any = delta_alone, dq_tile: Any = dq_tile) -> None:
            once()
            launch_bwd.launch_dq(delta_alone, dq_tile)

        ms = median_times({"once": once, "twice": twice})
        rows.append(
            {
                **row,
                "delta once, ms": float(f"{ms['once']:.4g}"),
                "delta for each kernel, ms": float(f"{ms['twice']:.4g}"),
                "saved, percent": round(100 * (ms["twice"] - ms["once"]) / ms["twice"], 1),
            }
        )
    return rows


def autotune_rows(points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The forward with every tile of the table: the best against the first, which is the fixed one."""
    from flash_attn_mini.backends.triton import configs, launch

    rows = []
    for row, headdim, (q, k, v, _), chosen in in_time(points, budget):
        call = launch.prepare(q, k, v, chosen)
        tiles = tiles_of(configs.FORWARD, headdim)
        ms = median_times({tile_name(tile): partial(launch.launch, call, tile) for tile in tiles})
        fixed, best = tile_name(tiles[0]), min(ms, key=lambda name: ms[name])
        rows.append(
            {
                **row,
                "fixed tile": fixed,
                "its ms": float(f"{ms[fixed]:.4g}"),
                "best tile": best,
                "best ms": float(f"{ms[best]:.4g}"),
                "gain, percent": round(100 * (ms[fixed] / ms[best] - 1), 1),
            }
        )
    return rows


def descriptor_rows(points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The forward with the same tiles, loaded through TensorDescriptor and through pointers."""
    from flash_attn_mini.backends.triton import configs, launch

    if torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("choices: TensorDescriptor needs a GPU of compute capability 9.0 or later")
    tiles = {64: [(128, 64, 4, 3), (64, 128, 4, 2)], 128: [(64, 64, 4, 3), (128, 64, 8, 3)]}
    rows = []
    for row, headdim, (q, k, v, _), chosen in in_time(points, budget):
        call = launch.prepare(q, k, v, chosen)
        for shape in tiles[headdim]:
            by_loads = {loads: configs.tile(*shape, tma=loads == "TMA") for loads in ("TMA", "pointers")}
            ms = median_times({loads: partial(launch.launch, call, tile) for loads, tile in by_loads.items()})
            rows.append(
                {
                    **row,
                    "tile": tile_name(by_loads["TMA"]).removesuffix(" TMA"),
                    "TensorDescriptor, ms": float(f"{ms['TMA']:.4g}"),
                    "pointers, ms": float(f"{ms['pointers']:.4g}"),
                    "gain, percent": round(100 * (ms["pointers"] / ms["TMA"] - 1), 1),
                }
            )
    return rows


@dataclass(frozen=True)
class Figure:
    """One result: its title, the masks, the rows that a point gives, and the measurement."""

    title: str
    masks: tuple[bool, ...]
    rows_of_point: int
    measure: Callable[[list[Point], Budget], list[dict[str, Any]]]


FIGURES = {
    "delta": Figure(
        "Backward of the Triton backend, delta computed once and shared, or for each kernel", (False,), 1, delta_rows
    ),
    "autotune": Figure(
        "Forward of the Triton backend, the best tile of the table against its first", (False, True), 1, autotune_rows
    ),
    "descriptor": Figure(
        "Forward of the Triton backend, TensorDescriptor (TMA) against pointers", (False,), 2, descriptor_rows
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = report.parser_for(__doc__, seconds=40.0)
    parser.add_argument("--figure", choices=sorted(FIGURES), help="only this one")
    arguments = parser.parse_args(argv)
    require_gpu("choices")
    from flash_attn_mini.backends.triton.operands import bind_context

    bind_context(torch.device("cuda", torch.cuda.current_device()))
    budget = Budget(arguments.seconds)
    for name, figure in FIGURES.items():
        if arguments.figure in (None, name):
            wanted = points_of(arguments.quick, figure.masks)
            rows = figure.measure(wanted, budget)
            report.finish(
                f"choice_{name}",
                benchmark="choices",
                title=f"{figure.title}: fp16, batch {BATCH}, {NHEADS} heads",
                data=rows,
                arguments=arguments,
                sources=[*report.LEARN, *results.TRITON],
                notes=[f"Medians of {ROUNDS} interleaved rounds."],
                complete=len(rows) == figure.rows_of_point * len(wanted),
            )


if __name__ == "__main__":
    main()
