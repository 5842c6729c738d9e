"""Decoding from a KV cache: speed as bytes of K and V ÷ time, against PyTorch's kernels, and the cost of each feature.

A figure is a result of its own, such as kvcache_decode. Caches exceed the L2 cache and are used in turn; calls are
replayed as CUDA graphs; lengths are in GPU memory. On the CPU, torch's threads are set to 1 and to 2.

  python -m benchmarks.bench_kvcache                            every figure of the GPU, bf16
  python -m benchmarks.bench_kvcache --figure decode --quick    the first shapes of one figure
  python -m benchmarks.bench_kvcache --backend cuda             without Triton, which compiles for a while
  python -m benchmarks.bench_kvcache --device cpu               one query on full caches, float32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import cli, provenance
from benchmarks.kvcache import Ours, Point, copy_ceiling, measure_point
from benchmarks.methods import Budget
from benchmarks.rivals import Rival, select

K = 1024
REP_MS = {"cuda": 10.0, "cpu": 30.0}  # milliseconds of one median
DEVICE_OF = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Contenders = Callable[[Sequence[str], Sequence[Rival]], Sequence[Rival]]  # of our backends and the rivals


@dataclass(frozen=True)
class Figure:
    """Shapes, and who is measured on them."""

    title: str
    points: tuple[Point, ...]
    contenders: Contenders


def ours_and_rivals(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [*map(Ours, ours), *rivals]


def each_page_size(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [Ours(backend, page_size) for backend in ours for page_size in (0, 1, 16, 64, 256)]


def with_new_keys(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [
        contender
        for backend in ours
        for contender in (Ours(backend), Ours(backend, append=True), Ours(backend, append=True, rotary=True))
    ]


def first_backend(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [Ours(ours[0])]


MAIN = Point(8, 16 * K)
BATCHES = (Point(1, 64 * K), MAIN, Point(64, 4 * K))
UNIFORM = Point(32, 8 * K, shortest=100, page_size=64)
HEADS = (  # head dims; one head of keys for each head of queries; one for all
    replace(MAIN, headdim=64),
    replace(MAIN, headdim=256),
    replace(MAIN, nheads_k=32),
    replace(MAIN, nheads_k=1),
)
QUERIES = (*range(1, 37), *range(60, 69), *range(124, 133))
FIGURES = {
    "decode": Figure(
        "Decoding",
        (
            *BATCHES,
            UNIFORM,
            Point(1, K),
            *HEADS,
            *(replace(point, seqlen_q=n) for point in (MAIN, *HEADS) for n in (4, 16, 128)),
        ),
        ours_and_rivals,
    ),
    "pages": Figure("Decoding from pages", BATCHES, each_page_size),
    "append": Figure("Decoding with a new key", (Point(1, K, causal=True), *BATCHES), with_new_keys),
    "queries": Figure(
        "Several queries, causal",
        tuple(
            replace(point, seqlen_q=n, causal=True) for point in (Point(1, 16 * K), Point(16, 4 * K)) for n in QUERIES
        ),
        first_backend,
    ),
    "lengths": Figure(
        "Decoding by length of the cache",
        tuple(Point(batch, K << shift) for batch in (1, 16) for shift in range(8)),
        ours_and_rivals,
    ),
    "cpu": Figure(
        "Decoding on the CPU",
        (
            Point(1, K),
            Point(1, 4 * K),
            Point(1, 16 * K),
            Point(4, 4 * K),
            Point(1, 4 * K, headdim=64),
            Point(1, 4 * K, nheads_k=32),
            Point(1, 16 * K, nheads=1, nheads_k=1),
            Point(1, 16 * K, nheads=2, nheads_k=2),
        ),
        ours_and_rivals,
    ),
}


def measure_figure(
    name: str, device: torch.device, arguments: argparse.Namespace, budget: Budget, ceiling: int | None
) -> list[str]:
    """Measures a figure, on the CPU with each number of threads, and saves it. Returns what failed."""
    on_gpu = device.type == "cuda"
    figure, dtype = FIGURES[name], torch.bfloat16 if on_gpu else DTYPES[arguments.dtype]
    points = figure.points[: max(1, len(figure.points) // 4)] if arguments.quick else figure.points
    contenders = figure.contenders(arguments.backend, select(arguments.rivals))
    tasks = [(threads, point) for threads in ([None] if on_gpu else arguments.threads) for point in points]
    data: list[dict[str, Any]] = []
    for threads, point in cli.progress(tasks, name):
        if budget.left() <= 0:
            break
        fixed: dict[str, Any] = {"ceiling_gbps": ceiling}
        if threads is not None:
            torch.set_num_threads(threads)
            fixed = {"threads": threads}
        row = measure_point(point, contenders, device, dtype, arguments.rounds, REP_MS[device.type])
        data.append({"figure": name, **row, **fixed})
    notes = [f"Medians of {arguments.rounds} interleaved rounds; the caches exceed the L2 cache and are used in turn."]
    if ceiling is not None:
        notes.append(f"In the same run a copy reached {ceiling / 1e3:.2f} TB/s, read and written.")
    return finish(name, str(dtype).removeprefix("torch."), len(tasks), data, notes, arguments)


def finish(
    name: str, dtype: str, points: int, data: list[dict[str, Any]], notes: list[str], arguments: argparse.Namespace
) -> list[str]:
    """Saves a figure. Points without time fail, and so does our first backend if it ran at no point."""
    for reason in sorted({f"{rival} cannot run: {why}" for row in data for rival, why in row["unsupported"].items()}):
        print(reason)
    ours = arguments.backend
    if not any(ours[0] in row["us"] for row in data):
        return [f"{name}: {ours[0]} ran at no point; nothing is written"]
    skipped = points - len(data)
    if skipped:
        notes.append(f"{skipped} of {points} points were left out: the {arguments.seconds:.0f} s were used up.")
    sources = [glob for backend in ours for glob in provenance.KVCACHE_SOURCES_OF_BACKEND[backend]]
    cli.finish(
        f"kvcache_{name}_{dtype}" if name == "cpu" else f"kvcache_{name}",
        benchmark="bench_kvcache",
        title=f"{FIGURES[name].title}, {dtype}",
        data=data,
        sources=["benchmarks/kvcache.py", "benchmarks/speed.py", *sources],
        arguments=arguments,
        notes=notes,
        complete=not skipped,
    )
    return [f"{name}: {notes[-1]}"] if skipped else []


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=100.0)
    parser.add_argument("--device", choices=sorted(REP_MS), default="cuda")
    parser.add_argument("--figure", nargs="+", choices=list(FIGURES), help="default: all of the device")
    parser.add_argument("--backend", nargs="+", choices=list(DEVICE_OF), help="ours (default: all of the device)")
    parser.add_argument("--rivals", nargs="*", help="default: cuDNN and FLASH_ATTENTION; on the CPU SDPA")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the CPU (default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device == "cuda"
    device = cli.require_gpu("bench_kvcache") if on_gpu else torch.device("cpu")
    figures = arguments.figure or [name for name in FIGURES if on_gpu == (name != "cpu")]
    arguments.backend = arguments.backend or [name for name, where in DEVICE_OF.items() if where == device.type]
    if arguments.rivals is None:
        arguments.rivals = ["cuDNN", "FLASH_ATTENTION"] if on_gpu else ["SDPA"]
    torch.manual_seed(0)
    budget = Budget(arguments.seconds)
    ceiling = round(copy_ceiling(device)) if on_gpu else None
    threads = torch.get_num_threads()
    try:
        failed = [line for name in figures for line in measure_figure(name, device, arguments, budget, ceiling)]
    finally:
        torch.set_num_threads(threads)
    if failed:
        raise SystemExit(f"bench_kvcache: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
