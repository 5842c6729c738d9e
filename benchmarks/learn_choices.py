"""What three choices of the Triton backend gain (docs/tutorial.md): fp16, batch 4, 8 heads. Needs a GPU.

  python -m benchmarks.learn_choices                    all three
  python -m benchmarks.learn_choices --figure delta     delta computed once and shared, or once for each kernel

The results are choice_delta, choice_autotune (the best tile of the table against its first) and choice_descriptor
(TensorDescriptor, that is TMA, against pointers, with the same tile).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import cli, provenance
from benchmarks.methods import Budget, time_cuda

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


def points(quick: bool, masks: tuple[bool, ...]) -> list[Point]:
    """Every mask is another compilation: two seconds for each tile."""
    lengths = LENGTHS[:1] if quick else LENGTHS
    return [(headdim, seqlen, causal) for headdim in HEADDIMS for causal in masks for seqlen in lengths]


def row_of(headdim: int, seqlen: int, causal: bool) -> dict[str, Any]:
    return {"head dim": headdim, "seqlen": seqlen, "mask": "causal" if causal else "full"}


def delta_rows(chosen_points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The backward as it is, where the dQ kernel stores delta for the dK/dV kernel, and with delta computed again."""
    from flash_attn_mini.backends.triton import configs, launch, launch_bwd

    rows = []
    for headdim, seqlen, causal in chosen_points:
        if budget.left() <= 0:
            break
        q, k, v, dout = inputs(seqlen, headdim)
        chosen = options(headdim, causal)
        forward = launch.prepare(q, k, v, chosen)
        launch.launch(forward, configs.FORWARD.hopper[headdim][0] if hopper() else configs.FORWARD.plain[headdim][0])
        call = launch_bwd.prepare(dout, q, k, v, forward.out, forward.lse, None, chosen)
        alone = launch_bwd.prepare(
            dout, q, k, v, forward.out, forward.lse, None, chosen, output_mask=(False, False, False)
        )
        dq_config, dkv_config = first_of(configs.BACKWARD_DQ, headdim), first_of(configs.BACKWARD_DKV, headdim)

        def once(call: Any = call, dq: Any = dq_config, dkv: Any = dkv_config) -> None:
            launch_bwd.launch_dq(call, dq)
            launch_bwd.launch_dkv(call, dkv, want_dk=True, want_dv=True)

        def twice(once: Any = once, alone: Any = alone, dq: Any = dq_config) -> None:
            once()
            launch_bwd.launch_dq(alone, dq)  # delta alone

        ms = median_times({"once": once, "twice": twice})
        rows.append(
            {
                **row_of(headdim, seqlen, causal),
                "delta once, ms": float(f"{ms['once']:.4g}"),
                "delta for each kernel, ms": float(f"{ms['twice']:.4g}"),
                "saved, percent": round(100 * (ms["twice"] - ms["once"]) / ms["twice"], 1),
            }
        )
    return rows


def hopper() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def first_of(tables: Any, headdim: int) -> Any:
    return (tables.hopper if hopper() else tables.plain)[headdim][0]


def autotune_rows(chosen_points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The forward with every tile of the table: the best against the first, which is the fixed one."""
    from flash_attn_mini.backends.triton import configs, launch

    rows = []
    for headdim, seqlen, causal in chosen_points:
        if budget.left() <= 0:
            break
        q, k, v, _ = inputs(seqlen, headdim)
        call = launch.prepare(q, k, v, options(headdim, causal))
        tiles = (configs.FORWARD.hopper if hopper() else configs.FORWARD.plain)[headdim]
        ms = median_times({tile_name(tile): partial(launch.launch, call, tile) for tile in tiles})
        fixed, best = ms[tile_name(tiles[0])], min(ms.values())
        rows.append(
            {
                **row_of(headdim, seqlen, causal),
                "fixed tile": tile_name(tiles[0]),
                "its ms": float(f"{fixed:.4g}"),
                "best tile": min(ms, key=lambda name: ms[name]),
                "best ms": float(f"{best:.4g}"),
                "gain, percent": round(100 * (fixed / best - 1), 1),
            }
        )
    return rows


def tile_name(config: Any) -> str:
    """Rows × keys, warps, stages, and the kind of loads."""
    kwargs = config.kwargs
    loads = "TMA" if kwargs["USE_TMA"] else "pointers"
    return f"{kwargs['BLOCK_M']}×{kwargs['BLOCK_N']} w{config.num_warps} s{config.num_stages} {loads}"


def descriptor_rows(chosen_points: list[Point], budget: Budget) -> list[dict[str, Any]]:
    """The forward with the same tiles, loaded through TensorDescriptor and through pointers."""
    from flash_attn_mini.backends.triton import configs, launch

    if not hopper():
        raise SystemExit("learn_choices: TensorDescriptor needs a GPU of compute capability 9.0 or later")
    tiles = {64: [(128, 64, 4, 3), (64, 128, 4, 2)], 128: [(64, 64, 4, 3), (128, 64, 8, 3)]}
    rows = []
    for headdim, seqlen, causal in chosen_points:
        if budget.left() <= 0:
            break
        q, k, v, _ = inputs(seqlen, headdim)
        call = launch.prepare(q, k, v, options(headdim, causal))
        for shape in tiles[headdim]:
            by_loads = {tma: configs.tile(*shape, tma=tma) for tma in (True, False)}
            ms = median_times({str(tma): partial(launch.launch, call, tile) for tma, tile in by_loads.items()})
            rows.append(
                {
                    **row_of(headdim, seqlen, causal),
                    "tile": tile_name(by_loads[True]).removesuffix(" TMA"),
                    "TensorDescriptor, ms": float(f"{ms['True']:.4g}"),
                    "pointers, ms": float(f"{ms['False']:.4g}"),
                    "gain, percent": round(100 * (ms["False"] / ms["True"] - 1), 1),
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
    parser = cli.parser_for(__doc__, seconds=40.0)
    parser.add_argument("--figure", choices=sorted(FIGURES), help="only this one")
    arguments = parser.parse_args(argv)
    cli.require_gpu("learn_choices")
    from flash_attn_mini.backends.triton.operands import bind_context

    bind_context(torch.device("cuda", torch.cuda.current_device()))
    budget = Budget(arguments.seconds)
    for name, figure in FIGURES.items():
        if arguments.figure in (None, name):
            wanted = points(arguments.quick, figure.masks)
            rows = figure.measure(wanted, budget)
            cli.finish(
                f"choice_{name}",
                benchmark="learn_choices",
                title=f"{figure.title}: fp16, batch {BATCH}, {NHEADS} heads",
                data=rows,
                sources=provenance.TRITON,
                arguments=arguments,
                notes=[f"Medians of {ROUNDS} interleaved rounds."],
                complete=len(rows) == figure.rows_of_point * len(wanted),
            )


if __name__ == "__main__":
    main()
