"""Checks and times configurations of the Triton kernels on a GPU, which go into backends/triton/configs.py.

  python -m benchmarks.tune_triton forward
  python -m benchmarks.tune_triton backward --json FILE
  python -m benchmarks.tune_triton kvcache --head-dims 128

Each candidate is compiled and checked against the float64 reference in its own process, many at a time, so that a
failure ends no other candidate. The correct ones are timed in rounds with a rival: FLASH_ATTENTION of PyTorch, or the
cuda backend for a KV cache. For each problem it prints the candidates, best first; for a backward also the best of both
kernels together; in the end the shortest lists that are near the best of every problem. docs/tuning/triton.md has the
results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench_kvcache, results
from benchmarks.bench_kvcache import MAIN, UNIFORM, K, Ours, Point, Problem
from benchmarks.methods import (
    BACKWARD_WORK,
    Timing,
    as_timed,
    attention_flops,
    check_agreement,
    interleave,
    ratio,
    require_gpu,
    time_cuda,
    timer_for,
)
from benchmarks.rivals import BACKWARD_RIVALS, RIVALS, Call, Rival, upstream_gradient
from tests.support.bounds import Accuracy, forward_accuracy, gradients_accuracy

BATCH, NHEADS = 4, 8
LENGTHS = (4096, 16384)  # not of a KV cache
ROUNDS, REP_MS = 3, 20.0  # interleaved rounds of a problem, milliseconds of one median
SHOWN = 8  # candidates that are printed for each problem
CHECK_SECONDS = 150.0  # for one candidate: starting Python, the kernels to compile, a small reference
CHECK_SHARE = 0.5  # of the time that checks may take
CLOSE_ENOUGH = 1.02  # a configuration that is this near to the best of a problem makes that best unneeded
MAX_LISTED = 3  # a user's first call times them all
RIVAL = "FLASH_ATTENTION"


@dataclass(frozen=True)
class Tile:
    """The arguments of configs.tile."""

    block_m: int  # 0: as many rows as the launcher of a KV cache takes
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = True
    maxnreg: int | None = None
    waves: int = 1  # of a KV cache: programs ÷ those that run at once

    def config(self, **changed: int) -> Any:
        from flash_attn_mini.backends.triton.configs import tile

        values = {**asdict(self), **changed}
        del values["waves"]
        return tile(**values)

    def __str__(self) -> str:
        """As configs.py has it, with the waves behind it."""
        options = "" if self.tma else ", tma=False"
        options += f", maxnreg={self.maxnreg}" if self.maxnreg else ""
        text = f"tile({self.block_m}, {self.block_n}, {self.num_warps}, {self.num_stages}{options})"
        return text + (f" in {self.waves} waves" if self.waves > 1 else "")


def tiles(text: str) -> list[Tile]:
    """Tiles in short: 128x64w8s3pr168 has 128 rows, 64 keys, 8 warps, 3 stages, plain loads, at most 168 registers.

    0x64w4s4pv2 has the rows of the launcher, and runs in 2 waves.
    """
    found = []
    for short in text.split():
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(p?)(?:r(\d+))?(?:v(\d+))?", short)
        assert match, short
        *sizes, plain, registers, waves = match.groups()
        found.append(Tile(*map(int, sizes), not plain, int(registers) if registers else None, int(waves or 1)))
    return found


# Candidates by kernel and head dim, the most promising first.
TILES: dict[str, dict[int, list[Tile]]] = {
    "forward": {
        64: tiles(
            "128x64w4s3 128x64w8s3p 64x128w4s2 128x64w4s3p 128x128w8s2r128 64x128w4s2p 64x128w4s3 "
            "128x64w4s4 128x64w4s2 256x64w8s3 128x64w8s4p 128x128w4s2 64x64w4s3p 64x64w4s4 128x64w8s3 "
            "64x64w4s3"
        ),
        128: tiles(
            "128x64w4s2 64x64w4s3 128x64w8s3 128x64w8s2r128 128x64w4s2p 64x64w4s3p 128x32w4s3 256x64w8s2 "
            "256x64w8s3 128x32w4s4 128x64w8s3p 128x64w8s4 64x64w4s4"
        ),
        256: tiles("128x64w8s2 128x64w8s2p 128x32w8s3 128x32w8s4 64x32w4s2 64x32w4s3"),
        512: tiles("64x32w8s2 64x64w8s1 32x32w8s3p 64x16w8s2 64x16w8s3 64x32w8s2p"),
    },
    "dq": {
        64: tiles("64x64w4s2 64x64w4s3 128x64w4s2 128x64w4s3 128x64w8s3 64x128w4s2 128x128w8s2 128x64w8s3p 64x64w4s3p"),
        128: tiles("64x64w4s2 128x64w8s2 128x64w8s3 128x128w8s2 64x32w4s3 64x32w4s4 128x32w8s3 64x64w4s2p 128x64w8s2p"),
        256: tiles("128x32w8s2 64x32w4s2 64x32w4s3 128x32w8s2p"),
        512: tiles("64x16w8s2 64x32w8s1 32x32w8s2p 32x32w8s1p 32x16w8s2p"),
    },
    "dkv": {
        64: tiles(
            "64x64w4s3 64x64w4s2 64x64w4s3r168 64x64w4s2r168 64x128w8s2 64x128w8s3 32x64w4s3 32x128w4s2 "
            "128x64w4s2 128x128w8s2 64x128w8s2p 64x64w4s2p"
        ),
        128: tiles("64x64w4s2 64x128w8s2 64x128w8s3 32x64w4s2 32x64w4s3 32x128w8s2 32x128w8s3 64x128w8s2p 64x64w4s2p"),
        256: tiles("32x128w8s2 64x64w4s2 64x128w8s2 32x64w4s2 32x64w4s3 32x128w8s2p"),
        512: tiles("16x64w8s2 32x64w8s1 32x32w8s2p 32x32w8s1p 16x32w8s2p"),
    },
}
KERNELS = {"forward": ("forward",), "backward": ("dq", "dkv"), "kvcache": ("kvcache",)}  # of a direction
TABLES = {"forward": "FORWARD", "dq": "BACKWARD_DQ", "dkv": "BACKWARD_DKV"}
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}  # matrix products of a kernel; dK and dV apart recompute one more

# (seqlen_q, seqlen_k, nheads, nheads_k, causal); the first two compile what the timings run.
CHECKS = (
    (512, 512, NHEADS, NHEADS, False),
    (512, 512, NHEADS, NHEADS, True),
    (333, 777, 4, 2, True),
    (777, 333, 4, 1, True),
    (333, 777, 4, 2, False),
)
CACHES = (
    replace(MAIN, nheads_k=1),
    UNIFORM,
    *(Point(16, length * K) for length in (1, 2, 4)),
    *(replace(MAIN, page_size=page_size) for page_size in (0, 64, 16)),
    *(Point(64, 4 * K, page_size=page_size) for page_size in (0, 64)),
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


def cache_tiles(point: Point) -> list[Tile]:
    """Candidates for a KV cache. The rows of a tile are those of a group; stages are counted as without pages."""
    rows, step = point.seqlen_q * (point.nheads // point.nheads_k), {64: 128, 128: 64, 256: 32}[point.headdim]
    half = step // 2
    if rows <= 16:
        text = f"0x{step}w4s3pr168 0x{step}w4s3pr168v2 0x{step}w4s4p 0x{step}w4s4pv2 0x{step}w4s4pv4"
        text += f" 0x{half}w4s5pr168 0x{half}w4s3pr128 0x{step}w8s3pr128"
        return tiles(text + (f" 0x{step}w4s4pr168 0x{step}w4s2pr168" if point.page_size % step else ""))
    if rows <= 32:
        text = "0x64w4s4p 0x64w4s4pv2 0x64w4s3p 0x32w4s5pr168 0x32w4s5pr168v2 0x32w4s7p 0x64w8s4pr128 0x64w8s3pr128"
        return tiles(text)
    text = (
        f"0x{step}w4s3p 0x{step}w4s2p 0x{step}w4s2pv2 0x{step}w8s3pr128 0x{step}w8s2pr128 0x{step}w8s3p 0x{half}w4s4p"
    )
    return tiles(text)


def tiles_for(kernel: str, point: Point) -> list[Tile]:
    return cache_tiles(point) if kernel == "kvcache" else TILES[kernel][point.headdim]


# ---- candidates as contenders ---------------------------------------------------------------------------------------


def plain_options(headdim: int, causal: bool) -> Any:
    """The options of attention without features."""
    from flash_attn_mini.options import Options

    return Options(0.0, headdim**-0.5, causal, -1, 0 if causal else -1, 0.0, None)


class Forward(Rival):
    """The forward kernel with one configuration."""

    def __init__(self, tile: Tile) -> None:
        self.name, self.tile = str(tile), tile

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini.backends.triton import launch

        call = launch.prepare(q, k, v, plain_options(q.shape[3], causal))
        call.out.fill_(math.nan)
        call.lse.fill_(math.nan)
        launch.bind_context(q.device)
        return partial(self.run, launch.launch, call, self.tile.config())

    @staticmethod
    def run(launch: Callable[..., None], call: Any, config: Any) -> tuple[Tensor, Tensor]:
        launch(call, config)
        return call.out, call.lse

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return (result[0],)


class Backward(Rival):
    """One or both backward kernels, each with one configuration."""

    def __init__(self, dq: Tile | None, dkv: Tile | None) -> None:
        self.name = " and ".join(str(tile) for tile in (dq, dkv) if tile is not None)
        self.dq, self.dkv = dq, dkv

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini.backends.triton import launch, launch_bwd

        options = plain_options(q.shape[3], causal)
        forward = launch.prepare(q, k, v, options)
        launch.run(forward)
        call = launch_bwd.prepare(upstream_gradient(q), q, k, v, forward.out, forward.lse, None, options)
        for tensor in (call.dq, call.dk, call.dv, call.row_stats):
            tensor.fill_(math.nan)
        launch_bwd.bind_context(q.device)
        if self.dq is None:  # what the other kernel reads
            launch_bwd.launch_dq(replace(call, dq=None), Tile(64, 64, 4, 1, tma=False).config())
        return partial(self.run, launch_bwd, call)

    def run(self, launch_bwd: Any, call: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self.dq is not None:
            launch_bwd.launch_dq(call, self.dq.config())
        for want_dk, want_dv in launch_bwd.dkv_launches(call) if self.dkv is not None else ():
            launch_bwd.launch_dkv(call, self.dkv.config(), want_dk=want_dk, want_dv=want_dv)
        return call.dq, call.dk, call.dv

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        return (*result[: self.dq is not None], *(result[1:] if self.dkv is not None else ()))


class Cache(Ours):
    """The kernels for a KV cache with one configuration."""

    def __init__(self, tile: Tile) -> None:
        super().__init__("triton")
        self.name, self.tile = str(tile), tile

    def bind_problem(self, problem: Problem) -> Call:
        from flash_attn_mini.backends.triton import kvcache, operands

        point, q, k, v, table = problem.point, problem.q, problem.k, problem.v, None
        if point.page_size:
            k, v, table = problem.pages(point.page_size)
        lse = q.new_empty((point.batch, point.nheads, point.seqlen_q), dtype=torch.float32)
        cache = kvcache.KvCache(
            *[None] * 4, cache_seqlens=problem.seqlens, cache_seqlen=-1, cache_batch_idx=None, cache_leftpad=None,
            block_table=table, rotary_interleaved=True, num_splits=0, split_keys=0,
        )  # fmt: skip
        options = plain_options(point.headdim, point.causal)
        call = kvcache.CacheCall(q, k, v, None, options, None, torch.full_like(q, math.nan), lse, None, cache)
        page_per_key = table is not None and not kvcache.has_tiles_in_pages(call, self.tile.block_n)
        stages = 2 * self.tile.num_stages - 1 if page_per_key else self.tile.num_stages
        config = self.tile.config(block_m=kvcache.tile_rows(call), num_stages=stages)
        kernel = kvcache.launch_splitkv(call, kvcache.Chosen(config, 1))
        programs = 1 if operands.INTERPRETED else kvcache.programs_per_sm(kernel, config, q.device)
        return partial(self.run, kvcache.launch_splitkv, call, kvcache.Chosen(config, self.tile.waves * programs))

    @staticmethod
    def run(launch: Callable[..., Any], call: Any, chosen: Any) -> Tensor:
        launch(call, chosen)
        out: Tensor = call.out
        return out


def contender(kernel: str, tile: Tile) -> Rival:
    if kernel == "kvcache":
        return Cache(tile)
    if kernel == "forward":
        return Forward(tile)
    return Backward(tile, None) if kernel == "dq" else Backward(None, tile)


# ---- one candidate in a process of its own --------------------------------------------------------------------------


def draw_inputs(point: Point, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((point.seqlen_q, point.nheads), *[(point.seqlen_k, point.nheads_k)] * 2)
    return [torch.randn(point.batch, *shape, point.headdim, device=device).to(dtype) for shape in shapes]


def check_dense(kernel: str, point: Point, tile: Tile, device: torch.device, dtype: torch.dtype) -> list[Accuracy]:
    """The accuracy of what the kernel computes."""
    rival = contender(kernel, tile)
    inputs = draw_inputs(point, device, dtype)
    with rival.active():
        results = rival.bind(*inputs, point.causal)()
    if kernel == "forward":
        return forward_accuracy(*inputs, *results, causal=point.causal)
    computed = ("dq",) if kernel == "dq" else ("dk", "dv")
    found = gradients_accuracy(*inputs, upstream_gradient(inputs[0]), results, causal=point.causal)
    return [accuracy for accuracy in found if accuracy.what in computed]


def dtype_of_caches(device: torch.device) -> torch.dtype:
    """bfloat16; Triton's interpreter misreads it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def check_cache(point: Point, tile: Tile, device: torch.device) -> None:
    """RuntimeError for a wrong result on a short cache of the point's kind."""
    short = replace(point, seqlen_k=max(256, point.page_size))
    problem = bench_kvcache.draw(short, device, dtype_of_caches(device))
    rival = Cache(tile)
    with rival.active():
        bench_kvcache.check_result(rival, problem, rival.bind_problem(problem)())


def check_one(kernel: str, point: Point, tile: Tile, checks: Sequence[tuple[Any, ...]] = CHECKS) -> str:
    """What is wrong with a candidate, or nothing. Compiles it into Triton's cache on disk on the way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU Triton's interpreter
    torch.manual_seed(0)
    if kernel == "kvcache":
        try:
            check_cache(point, tile, device)
        except RuntimeError as error:
            return f"WRONG: {error}" if "differs" in str(error) else f"failed: {reason(error)}"
        return ""
    for number, (seqlen_q, seqlen_k, nheads, nheads_k, causal) in enumerate(checks):
        shape = Point(1, seqlen_k, seqlen_q, nheads, nheads_k, point.headdim, causal)
        dtype = (torch.float16, torch.bfloat16)[number > 2]  # the timings are in float16
        for accuracy in check_dense(kernel, shape, tile, device, dtype):
            if not accuracy.error <= accuracy.bound:  # NaN too
                return f"WRONG: {accuracy.what} is off by {accuracy.error:.2e}, bound {accuracy.bound:.2e}, {shape}"
    return ""


def check_in_process(deadline: float, task: tuple[str, Point, Tile]) -> str:
    """What is wrong with a candidate, or nothing."""
    left = deadline - time.monotonic()
    if left < 10:
        return "not checked: out of time"
    kernel, point, tile = task
    request = json.dumps([kernel, astuple(point), astuple(tile)])
    command = [sys.executable, "-m", "benchmarks.tune_triton", "check", "--candidate", request]
    limit = min(left, CHECK_SECONDS)
    try:
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "failed: took too long"
    if done.returncode == 0:
        return done.stdout.strip().rpartition("\n")[2].removeprefix("right")
    return f"failed: {' '.join((done.stderr or done.stdout).split())[-160:]}"


def check_all(tasks: Sequence[tuple[str, Point, Tile]], deadline: float) -> dict[tuple[str, Point, Tile], str]:
    """What is wrong with each candidate. Many at a time: most of it is compiling."""
    with ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)) - 1, 16))) as pool:
        verdicts = dict(zip(tasks, pool.map(partial(check_in_process, deadline), tasks), strict=True))
    for (kernel, point, tile), verdict in verdicts.items():
        if verdict:
            print(f"  {kernel}, d{point.headdim}, {tile}: {verdict}")
    return verdicts


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


# ---- timing ---------------------------------------------------------------------------------------------------------


def name_of(point: Point) -> str:
    keys = f"{point.shortest}..{point.seqlen_k}" if point.shortest is not None else str(point.seqlen_k)
    pages = f", pages of {point.page_size}" if point.page_size else ""
    heads = f"{point.nheads} heads on {point.nheads_k}, d{point.headdim}"
    mask = "causal" if point.causal else "full"
    return f"{point.batch} × {keys} keys{pages}, {point.seqlen_q} queries, {heads}, {mask}"


def speed_of(kernel: str, point: Point, ms: float, size: int) -> float:
    """GB/s of K and V, or TFLOP/s of the products that the kernel computes."""
    if kernel == "kvcache":
        return size / ms / 1e6
    flops = attention_flops(point.batch, point.nheads, point.seqlen_q, point.seqlen_k, point.headdim, point.causal)
    return PRODUCTS[kernel] / 2 * flops / ms / 1e9


def time_point(
    kernel: str, point: Point, tiles: Sequence[Tile], device: torch.device, rounds: int, rep_ms: float
) -> dict[str, Any]:
    """Milliseconds, speed and ratio to the rival of each candidate by name, best first; and what failed."""
    contenders = [contender(kernel, tile) for tile in tiles]
    calls: dict[Rival, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    size = 0
    if kernel == "kvcache":
        draw = partial(bench_kvcache.draw, point, device, dtype_of_caches(device))
        first = draw()
        size = first.bytes
        problems = [first, *(draw() for _ in range(bench_kvcache.number_of_caches(size, device) - 1))]
        rival, measure = Ours("cuda"), bench_kvcache.time_turns

        def prepare(contender: Rival) -> Callable[[], Any]:
            turns = bench_kvcache.in_turn(contender, problems, device)
            bench_kvcache.check_result(contender, problems[-1], contender.outputs(turns.result[0])[0])
            return turns

        contenders = [Ours("triton"), *contenders]  # what the library chooses
    else:
        inputs = draw_inputs(point, device, torch.float16)
        rival, measure = (RIVALS if kernel == "forward" else BACKWARD_RIVALS)[RIVAL], timer_for(device)

        def prepare(contender: Rival) -> Callable[[], Any]:
            call = contender.bind(*inputs, point.causal)
            with contender.active():
                call()
            return as_timed(contender, call, device)

    for each in (rival, *contenders):
        try:
            calls[each] = prepare(each)
        except Exception as error:  # whatever Triton raises for one configuration
            failed[each.name] = reason(error)
    timings = interleave(calls, measure, rounds=rounds, rep_ms=rep_ms)
    return {**summary(kernel, point, timings, rival.name, size), "failed": failed}


def summary(kernel: str, point: Point, timings: Mapping[str, Timing], rival: str, size: int) -> dict[str, Any]:
    """The times of one problem as a row of the JSON file."""
    ranked = sorted((name for name in timings if name != rival), key=lambda name: timings[name].ms)
    names = [*ranked, *([rival] if rival in timings else [])]
    return {
        "kernel": kernel,
        **asdict(point),
        "ms": {name: round(timings[name].ms, 5) for name in names},
        "speed": {name: float(f"{speed_of(kernel, point, timings[name].ms, size):.4g}") for name in ranked},
        "ratio": {name: round(ratio(timings[name], timings[rival]), 3) for name in ranked if rival in timings},
    }


def show(row: Mapping[str, Any], top: int) -> None:
    """A line for each of the best candidates, and for each that failed."""
    unit = "GB/s" if row["kernel"] == "kvcache" else f"TFLOP/s of {PRODUCTS[row['kernel']]} products"
    print(f"  {row['kernel']}: ms, {unit}, ratio to the rival")
    for name, speed in list(row["speed"].items())[:top]:
        print(f"  {name:<56}{row['ms'][name]:9.4f}{speed:9.1f}{row['ratio'].get(name, math.nan):7.3f}")
    for name, why in row["failed"].items():
        print(f"  {name:<56} failed: {why}")
    sys.stdout.flush()


def time_together(point: Point, dq: Tile, dkv: Tile) -> str:
    """The speed of the best of both backward kernels together. RuntimeError where they disagree with the rival."""
    device = torch.device("cuda")
    inputs = draw_inputs(point, device, torch.float16)
    contenders: list[Rival] = [Backward(dq, dkv), BACKWARD_RIVALS[RIVAL]]
    calls = {x: as_timed(x, x.bind(*inputs, point.causal), device) for x in contenders}
    check_agreement(contenders, calls)
    ours, theirs = interleave(calls, time_cuda, rounds=ROUNDS, rep_ms=BACKWARD_WORK * REP_MS).values()
    flops = attention_flops(point.batch, point.nheads, point.seqlen_q, point.seqlen_k, point.headdim, point.causal)
    speeds = [BACKWARD_WORK * flops / timing.ms / 1e9 for timing in (ours, theirs)]
    return f"together, 5 products: {speeds[0]:.1f} TFLOP/s, {RIVAL} {speeds[1]:.1f}, ratio {ratio(ours, theirs):.3f}"


def shortest_list(problems: Sequence[Mapping[str, float]]) -> list[str]:
    """From times by name: the candidate that is nearest to the best over all problems, then the best of each problem
    that it is not CLOSE_ENOUGH in. Tiles with plain loads compete too."""
    everywhere = set.intersection(*(set(times) for times in problems)) if problems else set()
    if not everywhere:
        return []
    best = [min(times.values()) for times in problems]
    listed = [min(everywhere, key=lambda n: math.prod(t[n] / b for t, b in zip(problems, best, strict=True)))]
    for times, fastest in zip(problems, best, strict=True):
        if min(times[name] for name in listed if name in times) > CLOSE_ENOUGH * fastest:
            listed.append(min(times, key=lambda name: times[name]))
    return listed[:MAX_LISTED]


def points_of(direction: str, head_dims: Sequence[int], lengths: Sequence[int]) -> list[Point]:
    """The problems of a direction, the shortest first."""
    if direction == "kvcache":
        return [point for point in CACHES if point.headdim in head_dims]
    return [
        Point(BATCH, n, n, NHEADS, NHEADS, d, causal) for n in lengths for d in head_dims for causal in (False, True)
    ]


def kind_of(point: Point) -> Point:
    """A point that stands for all whose kernels are checked at once: a shape of CACHES, or a head dim."""
    return point if point in CACHES else Point(1, 1, headdim=point.headdim)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=(*KERNELS, "check"), help="check: one --candidate, as the tuner does it")
    parser.add_argument("--seconds", type=float, default=500.0, help="stop starting measurements after this long")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256], choices=(64, 128, 256))
    parser.add_argument("--json", type=Path, help="write all times there")
    parser.add_argument("--candidate", help="[kernel, point, tile] as JSON")
    arguments = parser.parse_args(argv)
    if arguments.direction == "check":
        kernel, point, tile = json.loads(arguments.candidate)
        print(check_one(kernel, Point(*point), Tile(*tile)) or "right")
        return 0
    device = require_gpu("tune_triton")
    from flash_attn_mini.backends.triton.operands import tma_reaches

    started = time.monotonic()
    deadline = started + arguments.seconds
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    has_tma = tma_reaches(torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=device))
    kernels = KERNELS[arguments.direction]
    points = points_of(arguments.direction, arguments.head_dims, LENGTHS)
    kinds = list(dict.fromkeys(map(kind_of, points)))
    tasks = [(x, kind, t) for x in kernels for kind in kinds for t in tiles_for(x, kind) if has_tma or not t.tma]
    verdicts = check_all(tasks, started + CHECK_SHARE * arguments.seconds)
    wrong = sum("WRONG" in verdict for verdict in verdicts.values())
    right = [task for task, verdict in verdicts.items() if not verdict]
    print(f"{len(right)} of {len(tasks)} candidates are right, {wrong} wrong", flush=True)

    rows: list[dict[str, Any]] = []
    for point in points:
        best: list[Tile] = []
        print(f"\n{name_of(point)}")
        for kernel in kernels:
            candidates = [tile for of, kind, tile in right if (of, kind) == (kernel, kind_of(point))]
            if time.monotonic() > deadline or not candidates:
                print(f"  {kernel}: left out")
                continue
            rows.append(time_point(kernel, point, candidates, device, ROUNDS, REP_MS))
            show(rows[-1], SHOWN)
            best += [tile for tile in candidates if str(tile) == next(iter(rows[-1]["speed"]), None)]
            torch.cuda.empty_cache()
            if arguments.json:  # after every problem, in case the next one ends the process
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if arguments.direction == "backward" and len(best) == 2:
            print("  " + time_together(point, *best), flush=True)
    for kernel in (x for x in kernels if x in TABLES):
        print(f"\n{TABLES[kernel]}.hopper:")
        for head_dim in arguments.head_dims:
            of_problems = [row for row in rows if (row["kernel"], row["headdim"]) == (kernel, head_dim)]
            times = [{name: row["ms"][name] for name in row["speed"]} for row in of_problems]
            print(f"        {head_dim}: [")
            for name in shortest_list(times):
                print(f"            {name},")
            print("        ],")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
