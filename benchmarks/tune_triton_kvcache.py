"""Times configurations of the Triton kernels for a KV cache on a GPU, beside the cuda backend.

Run `python -m benchmarks.tune_triton_kvcache`. For each shape: GB/s of K and V, the cuda backend's, and the ratios, of
the configuration that the library chooses and of each candidate, best first. Calls are CUDA graphs on caches in turn
that exceed the L2 cache. Results are compared with the cuda backend's. Worker processes compile all candidates first,
into Triton's cache on disk. The results go into backends/triton/configs.py and docs/tuning/triton.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_kvcache import Ours, Point, Problem, draw, number_of_caches

K = 1024
CALLS = 32  # in a CUDA graph
VARIANTS = ("three loops", "no early start", "combine 2k")
MAIN = Point(8, 16 * K)
UNIFORM = Point(32, 8 * K, shortest=100, page_size=64)
POINTS = (
    replace(MAIN, nheads_k=1),
    UNIFORM,
    Point(16, K),
    Point(16, 2 * K),
    Point(16, 4 * K),
    MAIN,
    replace(MAIN, page_size=64),
    replace(MAIN, page_size=16),
    Point(64, 4 * K),
    Point(64, 4 * K, page_size=64),
    Point(1, 64 * K),
    Point(1, K),
    replace(MAIN, headdim=64),
    replace(MAIN, headdim=256),
    replace(MAIN, seqlen_q=4),
    replace(MAIN, seqlen_q=16),
    replace(MAIN, headdim=256, seqlen_q=16),
    replace(MAIN, nheads_k=32),
    replace(UNIFORM, page_size=0),
    Point(8, K),
)


@dataclass(frozen=True)
class Candidate:
    """A configuration, as arguments of configs.tile without the rows; stages as without pages."""

    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    waves: int = 1  # programs ÷ those that run at once
    variant: str = ""  # see `varied`

    @property
    def label(self) -> str:
        registers = f" r{self.maxnreg}" if self.maxnreg else ""
        waves = f" waves {self.waves}" if self.waves > 1 else ""
        return f"n{self.block_n} w{self.num_warps} s{self.num_stages}{registers}{waves} {self.variant}".rstrip()


def candidates(point: Point) -> list[Candidate]:
    """The configurations to time for a shape."""
    rows = point.seqlen_q * (point.nheads // point.nheads_k)
    if rows <= 16:
        step = {64: 128, 128: 64, 256: 32}[point.headdim]
        found = [
            Candidate(step, 4, 3, 168),
            Candidate(step, 4, 3, 168, waves=2),
            Candidate(step, 4, 4),
            Candidate(step, 4, 4, waves=2),
            Candidate(step, 4, 4, waves=4),
            Candidate(step // 2, 4, 5, 168),
            Candidate(step // 2, 4, 3, 128),
            Candidate(step, 8, 3, 128),
        ]
        if point in (POINTS[1], POINTS[2], MAIN):
            found += [Candidate(step // 2, 4, 3, 128, variant=name) for name in (*VARIANTS, "combine 8k")]
        if point.page_size % step:
            found += [Candidate(step, 4, 4, 168), Candidate(step, 4, 2, 168)]
        return found
    if rows <= 32:
        return [
            Candidate(64, 4, 4),
            Candidate(64, 4, 4, waves=2),
            Candidate(64, 4, 3),
            Candidate(32, 4, 5, 168),
            Candidate(32, 4, 5, 168, waves=2),
            Candidate(32, 4, 7),
            Candidate(64, 8, 4, 128),
            Candidate(64, 8, 3, 128),
            *(Candidate(64, 4, 4, variant=name) for name in (*VARIANTS, "combine 4k")),
        ]
    step = {64: 128, 128: 64, 256: 32}[point.headdim]
    return [
        Candidate(step, 4, 3),
        Candidate(step, 4, 2),
        Candidate(step, 4, 2, waves=2),
        Candidate(step, 8, 3, 128),
        Candidate(step, 8, 2, 128),
        Candidate(step, 8, 3),
        Candidate(step // 2, 4, 4),
        Candidate(step, 4, 2, variant="one loop"),
        Candidate(step, 8, 2, 128, variant="one loop"),
    ]


def import_kvcache(root: Path | None = None) -> types.ModuleType:
    """The launcher, of this package or of another checkout."""
    if root is None:
        return importlib.import_module("flash_attn_mini.backends.triton.kvcache")
    for name in ("other_flash_attn_mini", "other_flash_attn_mini.backends"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(root / name.removeprefix("other_").replace(".", "/"))]
        sys.modules.setdefault(name, stub)
    return importlib.import_module("other_flash_attn_mini.backends.triton.kvcache")


@contextlib.contextmanager
def varied(variant: str) -> Iterator[None]:
    """Within it, the launcher does something differently."""
    module = import_kvcache()
    changes: dict[str, tuple[str, Any]] = {
        "three loops": ("ONE_LOOP_ROWS", 0),
        "one loop": ("ONE_LOOP_ROWS", 128),
        "no early start": ("starts_early", lambda device: False),
        "combine 8k": ("combine_splits", lambda block_m, block_d: min(64, 8192 // block_d)),
        "combine 4k": ("combine_splits", lambda block_m, block_d: min(64, 4096 // block_d)),
        "combine 2k": ("combine_splits", lambda block_m, block_d: min(64, 2048 // block_d)),
    }
    if not variant:
        yield
        return
    name, value = changes[variant]
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@dataclass(frozen=True)
class Cache:
    """The tensors of one call, in pages if the point has them."""

    problem: Problem
    k: Tensor
    v: Tensor
    block_table: Tensor | None

    def options(self, module: types.ModuleType) -> tuple[Any, Any]:
        """(KvCache, Options) of the module's package."""
        cache = module.KvCache(*[None] * 4, cache_seqlens=self.problem.seqlens, cache_seqlen=-1, cache_batch_idx=None,
                               cache_leftpad=None, block_table=self.block_table, rotary_interleaved=True,
                               num_splits=0, split_keys=0)  # fmt: skip
        return cache, module.Options(0.0, self.problem.point.headdim**-0.5, False, -1, -1, 0.0, None)

    def triton_call(self, module: types.ModuleType) -> Callable[[], Tensor]:
        """A call as the library makes it."""
        arguments = (self.problem.q, self.k, self.v, *self.options(module))
        return lambda: module.forward_kvcache(*arguments)[0]

    def cuda_call(self) -> Callable[[], Tensor]:
        from flash_attn_mini import flash_attn_with_kvcache

        options = Ours("cuda").options(self.problem)
        if self.block_table is not None:
            options["block_table"] = self.block_table
        return partial(flash_attn_with_kvcache, self.problem.q, self.k, self.v, **options, backend="cuda")

    def attention_call(self) -> Any:
        """The launcher's CacheCall."""
        module = import_kvcache()
        q = self.problem.q
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        cache, options = self.options(module)
        return module.CacheCall(q, self.k, self.v, None, options, None, torch.empty_like(q), lse, cache)

    def candidate_call(self, candidate: Candidate) -> Callable[[], Tensor]:
        """A call with a configuration. Launches it to learn how many of its programs run at once."""
        module, call = import_kvcache(), self.attention_call()
        config = triton_config(module, call, candidate)
        with varied(candidate.variant):
            kernel = module.launch_splitkv(call, module.Chosen(config, 1))
        chosen = module.Chosen(config, candidate.waves * module.programs_per_sm(kernel, config, call.q.device))

        def run() -> Tensor:
            with varied(candidate.variant):
                module.launch_splitkv(call, chosen)
            return call.out

        return run


def triton_config(module: types.ModuleType, call: Any, candidate: Candidate) -> Any:
    configs = importlib.import_module("flash_attn_mini.backends.triton.configs")
    per_key = call.cache.block_table is not None and not module.has_tiles_in_pages(call, candidate.block_n)
    stages = 2 * candidate.num_stages - 1 if per_key else candidate.num_stages
    return configs.tile(
        module.tile_rows(call), candidate.block_n, candidate.num_warps, stages, tma=False, maxnreg=candidate.maxnreg
    )


def make_caches(point: Point, device: torch.device, number: int | None = None) -> list[Cache]:
    first = draw(point, device, torch.bfloat16)
    number = number_of_caches(first.bytes, device) if number is None else number
    problems = [first, *[draw(point, device, torch.bfloat16) for _ in range(number - 1)]]
    if not point.page_size:
        return [Cache(x, x.k, x.v, None) for x in problems]
    caches = []
    for problem in problems:
        k, v, table = problem.pages(point.page_size)
        caches.append(Cache(replace(problem, k=problem.k[:0], v=problem.v[:0]), k, v, table))
    return caches


# ---- compilation ----------------------------------------------------------------------------------------------------


def compile_one(point: Point, candidate: Candidate | None, other: Path | None) -> str:
    """In a worker: compile and run once on empty sequences. Returns a line about the kernel, or why it failed."""
    start = time.monotonic()
    device = torch.device("cuda")
    small = replace(point, seqlen_k=max(256, point.page_size))
    try:
        (cache,) = make_caches(small, device, 1)
        cache.problem.seqlens.zero_()
        if candidate is None:
            cache.triton_call(import_kvcache(other))()
        else:
            cache.candidate_call(candidate)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{reason(error)}"
    return f"ok {time.monotonic() - start:.1f}"


def kernel_kind(point: Point) -> tuple[Any, ...]:
    """Points of one kind have the same compiled kernels."""
    rows = point.seqlen_q * (point.nheads // point.nheads_k)
    paging = point.page_size and (point.page_size % 64 == 0 or point.page_size)
    return point.headdim, rows, paging, point.batch <= 32, point.batch <= 128


def compile_all(points: list[Point], other: Path | None, workers: int, deadline: float) -> None:
    """Fill Triton's cache on disk from several processes."""
    jobs: dict[Any, tuple[Point, Candidate | None, Path | None]] = {}
    for point in points:
        kind = kernel_kind(point)
        jobs.setdefault((kind, None), (point, None, None))
        if other is not None:
            jobs.setdefault((kind, None, "other"), (point, None, other))
        for candidate in candidates(point):
            jobs.setdefault((kind, replace(candidate, waves=1)), (point, replace(candidate, waves=1), None))
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    futures = {pool.submit(compile_one, *job): job for job in jobs.values()}
    seconds = []
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            point, candidate, _ = futures[future]
            result = reason(future.exception()) if future.exception() else future.result()
            if result.startswith("ok"):
                seconds.append(float(result.split()[1]))
            else:
                print(f"  {name_of(point)}, {candidate.label if candidate else 'chosen'}: {result}")
    except TimeoutError:
        print("  (out of time: the rest compiles when it is timed)")
    pool.shutdown(wait=False, cancel_futures=True)
    took = time.monotonic() - start
    longest = max(seconds, default=0.0)
    print(f"compiled {len(seconds)} of {len(jobs)} in {took:.0f} s, longest {longest:.1f} s", flush=True)


def reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


# ---- timing ---------------------------------------------------------------------------------------------------------


class Graph:
    """Calls on all caches in turn as a CUDA graph."""

    def __init__(self, calls: list[Callable[[], Tensor]]) -> None:
        repeats = math.ceil(CALLS / len(calls))
        self.result = calls[-1]()
        torch.cuda.synchronize()
        self.calls = repeats * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls * repeats:
                self.result = call()
        self.graph.replay()
        torch.cuda.synchronize()

    def milliseconds(self, rep_ms: float) -> float:
        """Of one call."""
        once = self._time(1)
        repeats = max(1, round(rep_ms / once))
        return self._time(repeats) / repeats / self.calls

    def _time(self, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def name_of(point: Point) -> str:
    lengths = f"{point.shortest}..{point.seqlen_k}" if point.shortest is not None else str(point.seqlen_k)
    name = f"{point.batch} x {lengths}, {point.nheads} on {point.nheads_k}, d{point.headdim}, q{point.seqlen_q}"
    return name + (f", pages of {point.page_size}" if point.page_size else "")


def time_point(point: Point, other: Path | None, rounds: int, rep_ms: float, deadline: float) -> dict[str, Any]:
    """Microseconds and GB/s by contender: cuda, chosen, other and the candidates' labels; what was chosen; failures."""
    device = torch.device("cuda")
    caches = make_caches(point, device)
    wanted: dict[str, Callable[[Cache], Callable[[], Tensor]]] = {
        "cuda": Cache.cuda_call,
        "chosen": lambda cache: cache.triton_call(import_kvcache()),
    }
    if other is not None:
        wanted["other"] = lambda cache: cache.triton_call(import_kvcache(other))
    for candidate in candidates(point):
        wanted[candidate.label] = partial(Cache.candidate_call, candidate=candidate)  # type: ignore[assignment]
    graphs: dict[str, Graph] = {}
    failed: dict[str, str] = {}
    expected: Tensor | None = None
    for name, bind in wanted.items():
        if time.monotonic() > deadline:
            failed[name] = "out of time"
            continue
        try:
            graph = Graph([bind(cache) for cache in caches])
            if expected is None:
                expected = graph.result.float()
            difference = ((graph.result.float() - expected).abs().max() / expected.abs().max()).item()
            if not difference < 0.02:
                failed[name] = f"WRONG: differs by {difference:.3g} of the largest value"
            graphs[name] = graph
        except Exception as error:
            failed[name] = reason(error)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.milliseconds(rep_ms))
    size = caches[0].problem.bytes
    return {
        **asdict(point),
        "us": {name: round(1e3 * statistics.median(ms), 2) for name, ms in times.items()},
        "gbps": {name: round(size / statistics.median(ms) / 1e6) for name, ms in times.items()},
        "choice": choice_of(caches[0]) if "chosen" in graphs else "",
        "failed": failed,
    }


def show(point: Point, result: dict[str, Any]) -> None:
    """Three lines: the summary, what the library chose, and every candidate in GB/s, best first."""
    gbps = dict(result["gbps"])
    cuda = gbps.pop("cuda", math.nan)
    line = f"{name_of(point)}: cuda {cuda}"
    for name in ("other", "chosen"):
        if name in gbps:
            line += f"; {name} {gbps[name]} ({gbps.pop(name) / cuda:.2f})"
    ranked = sorted(gbps.items(), key=lambda item: -item[1])
    if ranked:
        line += f"; best {ranked[0][1]} ({ranked[0][1] / cuda:.2f}) {ranked[0][0]}"
    print(line)
    print(f"    chosen: {result['choice']}")
    print("    " + " | ".join(f"{name} {rate}" for name, rate in ranked))
    for name, why in result["failed"].items():
        print(f"    {name}: {why}")
    sys.stdout.flush()


def choice_of(cache: Cache) -> str:
    """The configuration that the library uses for a cache."""
    chosen = import_kvcache().chosen_for(cache.attention_call())
    config = chosen.config
    registers = f" r{config.maxnreg}" if config.maxnreg else ""
    return (
        f"{config.kwargs['BLOCK_M']} rows n{config.kwargs['BLOCK_N']} w{config.num_warps} s{config.num_stages}"
        f"{registers}, {chosen.programs_per_sm} programs an SM"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="stop starting measurements after this long")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--points", type=int, nargs="+", help="numbers of shapes, from 0; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep-ms", type=float, default=6.0, help="milliseconds of one time")
    parser.add_argument("--other", type=Path, help="another checkout, whose own choice is timed too")
    parser.add_argument("--json", type=Path, help="write all results there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_triton_kvcache: no GPU here", file=sys.stderr)
        return 2
    start = time.monotonic()
    torch.manual_seed(0)
    points = [POINTS[i] for i in arguments.points] if arguments.points else list(POINTS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s of K and V (÷ cuda's)", flush=True)
    compile_all(points, arguments.other, arguments.workers, start + 0.6 * arguments.seconds)
    results, good = [], True
    for point in points:
        if time.monotonic() - start > arguments.seconds:
            print(f"{name_of(point)}: out of time")
            continue
        try:
            deadline = start + arguments.seconds
            result = time_point(point, arguments.other, arguments.rounds, arguments.rep_ms, deadline)
        except Exception as error:
            print(f"{name_of(point)}: {reason(error)}")
            good = False
            continue
        show(point, result)
        good &= not any("WRONG" in why for why in result["failed"].values())
        results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(f"{time.monotonic() - start:.0f} s; " + ("all results agree" if good else "some results are WRONG"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
