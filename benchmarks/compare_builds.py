"""Speed of two builds of the extension in one process: forward, backward and deterministic backward, interleaved.

  python -m benchmarks.compare_builds OLD/flash_attn_mini/_C.*.so flash_attn_mini/_C.*.so

A tool for developers; it writes no result. Both libraries are loaded side by side and called directly, in the official
argument order, as replays of CUDA graphs, on the benchmark grid in bf16. It prints the new build's speed ÷ the old's.
Points below 0.99 are measured again with twice the rounds; if a forward or a default backward stays below, the exit
status is 1. The deterministic backward is shown and not judged. Results must agree, or the run ends.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_speed import GRIDS, Grid, Point, draw_inputs
from benchmarks.methods import as_timed, check_agreement, interleave, progress, ratio, require_gpu, timer_for
from benchmarks.rivals import Call, Rival, upstream_gradient
from benchmarks.tables import pivot

KINDS = ("forward", "backward", "deterministic")
JUDGED = KINDS[:2]
LEAST_RATIO = 0.99


def load(path: Path, name: str) -> Any:
    """The extension at `path` as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}._C", path)  # the file defines PyInit__C
    if spec is None or spec.loader is None:
        raise SystemExit(f"compare_builds: {path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Build(Rival):
    """One kind of call of a loaded extension."""

    def __init__(self, name: str, extension: Any, kind: str) -> None:
        self.name = name
        self.extension = extension
        self.kind = kind

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        # p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
        scalars = (0.0, q.shape[-1] ** -0.5, causal, -1, 0 if causal else -1, 0.0)
        # out, which makes a call of this build's kernels and not of the op, alibi_slopes; return_softmax, generator
        forward = partial(self.extension.fwd, q, k, v, torch.empty_like(q), None, *scalars, False, None)
        if self.kind == "forward":
            return forward
        out, softmax_lse, *_ = forward()
        # dq, dk, dv, alibi_slopes; deterministic, generator, rng_state
        tensors = (upstream_gradient(q), q, k, v, out, softmax_lse, None, None, None, None)
        return partial(self.extension.bwd, *tensors, *scalars, self.kind == "deterministic", None, None)

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(result[: 1 if self.kind == "forward" else 3])


def compare(extensions: Sequence[Any], kind: str, point: Point, grid: Grid, rounds: int, rep_ms: float) -> float:
    """Speed of the second extension ÷ speed of the first."""
    device = torch.device(grid.device)
    q, k, v = draw_inputs(point, device, grid.dtype)
    builds = [Build(name, extension, kind) for name, extension in zip(("old", "new"), extensions, strict=True)]
    calls = {build: as_timed(build, build.bind(q, k, v, point.causal), device) for build in builds}
    check_agreement(builds, calls)
    timings = interleave(calls, timer_for(device), rounds=rounds, rep_ms=rep_ms)
    return ratio(timings["new"], timings["old"])


def table(ratios: dict[tuple[str, Point], float]) -> str:
    """Kind, head dim and mask down, sequence length across."""
    lengths = sorted({point.seqlen for _, point in ratios})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for (kind, point), value in ratios.items():
        mask = "causal" if point.causal else "full"
        cells.setdefault((kind, f"d{point.headdim} {mask}"), {})[point.seqlen] = f"{value:.3f}"
    return pivot(["", ""], cells, lengths)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the extension to compare with")
    parser.add_argument("new", type=Path)
    parser.add_argument("--grid", choices=("perf", "tiny"), default="perf", help="tiny: float32 on the CPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--rep-ms", type=float, default=30.0, help="time of one median (default: %(default)s)")
    arguments = parser.parse_args(argv)
    grid = GRIDS["forward"][arguments.grid]
    if grid.device == "cuda":
        require_gpu("compare_builds")
    extensions = [load(arguments.old.resolve(), "old_build"), load(arguments.new.resolve(), "new_build")]
    torch.manual_seed(0)
    measure = partial(compare, extensions, grid=grid, rep_ms=arguments.rep_ms)
    work = [(kind, point) for kind in arguments.kinds for point in grid.points(quick=False)]
    ratios = {(kind, point): measure(kind, point, rounds=arguments.rounds) for kind, point in progress(work, "new")}
    again = [key for key, value in ratios.items() if value < LEAST_RATIO]
    for kind, point in progress(again, "again"):
        ratios[kind, point] = measure(kind, point, rounds=2 * arguments.rounds)
    print(f"{arguments.new} ÷ {arguments.old}, speed; {len(again)} points measured again\n\n{table(ratios)}")
    for kind in arguments.kinds:
        values = sorted(value for (of, _), value in ratios.items() if of == kind)
        print(f"{kind}: lowest {values[0]:.3f}, median {values[len(values) // 2]:.3f}, highest {values[-1]:.3f}")
    slow = [key for key in again if key[0] in JUDGED and ratios[key] < LEAST_RATIO]
    if slow:
        listed = "; ".join(f"{kind} {point}: {ratios[kind, point]:.3f}" for kind, point in slow)
        raise SystemExit(f"compare_builds: below {LEAST_RATIO}: {listed}")


if __name__ == "__main__":
    main()
