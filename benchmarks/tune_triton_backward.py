"""Compiles, checks and times explicit configurations of the Triton backward kernels on a GPU.

Run `python benchmarks/tune_triton_backward.py --json FILE`. It needs torch and Triton, not the compiled extension. Each
candidate is compiled and checked against float64 in a process of its own, many at a time, so that a failure ends no
other candidate. The correct ones are timed kernel by kernel. The best of each kernel are then timed together,
alternately with PyTorch's FLASH_ATTENTION backward. It prints the lists for backends/triton/configs.py and writes them
to FILE with all times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tune_triton import BATCH, NHEADS, attention_in, import_backend, milliseconds, plain_options, random_inputs, reason

CHECK_TIMEOUT = 150.0  # seconds for one candidate: starting Python, four kernels to compile, a small reference
CHECK_SHARE = 0.5  # of the time that checks may take
TIMES_PYTORCH = 3.0  # how many times as far from float64 as PyTorch in the same dtype a gradient may be
CLOSE_ENOUGH = 1.02  # a configuration that is this near to the best of a problem makes that best unneeded
MAX_LISTED = 3  # a user's first call times them all

# (seqlen_q, seqlen_k, nheads, nheads_k, causal). The first two compile what the timings run.
CHECKS = [
    (512, 512, NHEADS, NHEADS, False),
    (512, 512, NHEADS, NHEADS, True),
    (333, 777, 4, 2, True),
    (777, 333, 4, 1, True),
    (333, 777, 4, 2, False),
]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The arguments of configs.tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = True
    maxnreg: int | None = None

    def options(self) -> dict[str, Any]:
        options = {"tma": self.tma, "maxnreg": self.maxnreg}
        defaults = {"tma": True, "maxnreg": None}
        return {name: value for name, value in options.items() if value != defaults[name]}

    def config(self, configs: Any) -> Any:
        return configs.tile(self.block_m, self.block_n, self.num_warps, self.num_stages, **self.options())

    def __str__(self) -> str:
        """As configs.py has it."""
        options = "".join(f", {name}={value}" for name, value in self.options().items())
        return f"tile({self.block_m}, {self.block_n}, {self.num_warps}, {self.num_stages}{options})"


T = Tile
DQ: dict[int, list[Tile]] = {
    64: [
        T(64, 64, 4, 2),
        T(64, 64, 4, 3),
        T(128, 64, 4, 2),
        T(128, 64, 4, 3),
        T(128, 64, 8, 3),
        T(64, 128, 4, 2),
        T(128, 128, 8, 2),
        T(128, 64, 8, 3, tma=False),
        T(64, 64, 4, 3, tma=False),
    ],
    128: [
        T(64, 64, 4, 2),
        T(128, 64, 8, 2),
        T(128, 64, 8, 3),
        T(128, 128, 8, 2),
        T(64, 32, 4, 3),
        T(64, 32, 4, 4),
        T(128, 32, 8, 3),
        T(64, 64, 4, 2, tma=False),
        T(128, 64, 8, 2, tma=False),
    ],
    256: [
        T(128, 32, 8, 2),
        T(64, 32, 4, 2),
        T(64, 32, 4, 3),
        T(128, 32, 8, 2, tma=False),
    ],
}
DKV: dict[int, list[Tile]] = {
    64: [
        T(64, 64, 4, 3),
        T(64, 64, 4, 2),
        T(64, 64, 4, 3, maxnreg=168),
        T(64, 64, 4, 2, maxnreg=168),
        T(64, 128, 8, 2),
        T(64, 128, 8, 3),
        T(32, 64, 4, 3),
        T(32, 128, 4, 2),
        T(128, 64, 4, 2),
        T(128, 128, 8, 2),
        T(64, 128, 8, 2, tma=False),
        T(64, 64, 4, 2, tma=False),
    ],
    128: [
        T(64, 64, 4, 2),
        T(64, 128, 8, 2),
        T(64, 128, 8, 3),
        T(32, 64, 4, 2),
        T(32, 64, 4, 3),
        T(32, 128, 8, 2),
        T(32, 128, 8, 3),
        T(64, 128, 8, 2, tma=False),
        T(64, 64, 4, 2, tma=False),
    ],
    256: [
        T(32, 128, 8, 2),
        T(64, 64, 4, 2),
        T(64, 128, 8, 2),
        T(32, 64, 4, 2),
        T(32, 64, 4, 3),
        T(32, 128, 8, 2, tma=False),
    ],
}
CANDIDATES = {"dq": DQ, "dkv": DKV}
TABLES = {"dq": "BACKWARD_DQ", "dkv": "BACKWARD_DKV"}


# ---- one candidate in a process of its own ------------------------------------------------------------------------


def gradients_in(
    dtype: torch.dtype, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, causal: bool
) -> dict[str, torch.Tensor]:
    """dq, dk, dv of attention computed in ``dtype`` by autograd, without the rows that see no key."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    out, lse = attention_in(dtype, *leaves, causal)
    seen = (lse > -math.inf).transpose(1, 2)[..., None]
    gradients = torch.autograd.grad(out, leaves, dout.to(dtype) * seen)
    return {name: g.nan_to_num(0.0) for name, g in zip(("dq", "dk", "dv"), gradients, strict=True)}


def prepared(launch_bwd: Any, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, causal: bool) -> Any:
    """A call with the out and lse of a float64 forward; its own outputs are full of NaN."""
    out, lse = attention_in(torch.float64, *inputs, causal)
    options = plain_options(inputs[0].shape[-1], causal)
    call = launch_bwd.prepare(dout, *inputs, out.to(dout.dtype), lse.float(), None, options)
    for tensor in (call.dq, call.dk, call.dv, call.row_stats):
        tensor.fill_(math.nan)
    return call


def launch(launch_bwd: Any, configs: Any, kernel: str, call: Any, tile: Tile) -> None:
    """Run one kernel; twice if dK and dV have a launch each."""
    config = tile.config(configs)
    if kernel == "dq":
        launch_bwd.launch_dq(call, config)
        return
    for want_dk, want_dv in launch_bwd.dkv_launches(call):
        launch_bwd.launch_dkv(call, config, want_dk=want_dk, want_dv=want_dv)


def check_one(kernel: str, head_dim: int, tile: Tile) -> str:
    """Run CHECKS with one candidate. Returns what is wrong, or nothing."""
    launch_bwd, configs = import_backend("launch_bwd")
    torch.manual_seed(0)
    for seqlen_q, seqlen_k, nheads, nheads_k, causal in CHECKS:
        inputs = random_inputs(1, seqlen_q, seqlen_k, nheads, nheads_k, head_dim, torch.float16)
        dout = torch.randn_like(inputs[0])
        expected = gradients_in(torch.float64, inputs, dout, causal)
        rival = gradients_in(torch.float16, inputs, dout, causal)
        call = prepared(launch_bwd, inputs, dout, causal)
        if kernel == "dkv":
            launch(launch_bwd, configs, "dq", dataclasses.replace(call, dq=None), Tile(64, 64, 4, 1))
        launch(launch_bwd, configs, kernel, call, tile)
        torch.cuda.synchronize()
        for name in ("dq",) if kernel == "dq" else ("dk", "dv"):
            error = (getattr(call, name).double() - expected[name]).abs().max().item()
            bound = TIMES_PYTORCH * (rival[name].double() - expected[name]).abs().max().item() + 1e-5
            if not error <= bound:
                return f"WRONG: {name} is off by {error:.2e}, bound {bound:.2e}, {seqlen_q}x{seqlen_k} causal={causal}"
    return ""


def check_in_process(deadline: float, task: tuple[str, int, Tile]) -> str:
    """What is wrong with one candidate, or nothing; it is compiled into Triton's cache on disk on the way."""
    kernel, head_dim, tile = task
    left = deadline - time.monotonic()
    if left < 10:
        return "not checked: out of time"
    request = json.dumps([kernel, head_dim, dataclasses.astuple(tile)])
    command = [sys.executable, __file__, "--check-one", request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(left, CHECK_TIMEOUT))
    except subprocess.TimeoutExpired:
        return "failed: took too long"
    if done.returncode == 0:
        return done.stdout.strip().rpartition("\n")[2].removeprefix("right")
    return f"failed: {' '.join((done.stderr or done.stdout).split())[-160:]}"


def check_all(tasks: list[tuple[str, int, Tile]], deadline: float) -> dict[tuple[str, int, Tile], str]:
    """What is wrong with each candidate. Many at a time: most of it is compiling."""
    workers = max(1, min(len(os.sched_getaffinity(0)) - 1, 16))
    with ThreadPoolExecutor(workers) as pool:
        verdicts = dict(zip(tasks, pool.map(partial(check_in_process, deadline), tasks), strict=True))
    for (kernel, head_dim, tile), verdict in verdicts.items():
        if verdict:
            print(f"  {kernel:<4} d{head_dim:<4}{tile!s:<48}{verdict}")
    return verdicts


# ---- timing -------------------------------------------------------------------------------------------------------


def backward_flops(head_dim: int, seqlen: int, causal: bool) -> float:
    """Operations of five products, the usual count of a backward; these kernels do seven."""
    return 10.0 * BATCH * NHEADS * seqlen * seqlen * head_dim / (2 if causal else 1)


class Timed:
    """One problem's tensors."""

    def __init__(self, launch_bwd: Any, head_dim: int, seqlen: int, causal: bool) -> None:
        q, k, v = random_inputs(BATCH, seqlen, seqlen, NHEADS, NHEADS, head_dim, torch.float16)
        dout = torch.randn_like(q)
        leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*leaves, is_causal=causal)
        arguments = (out, leaves, dout.transpose(1, 2))
        self.flash = partial(torch.autograd.grad, *arguments, retain_graph=True)
        lse = torch.ops.aten._scaled_dot_product_flash_attention(*(t.detach() for t in leaves), 0.0, causal)[1]
        tensors = (dout, q.detach(), k.detach(), v.detach(), out.detach().transpose(1, 2), lse, None)
        self.prepare = partial(launch_bwd.prepare, *tensors, plain_options(head_dim, causal))
        self.call = self.prepare()

    def difference(self, gradients: tuple[torch.Tensor, ...]) -> float:
        """The largest difference of a gradient from FLASH_ATTENTION's."""
        pairs = zip(gradients, self.flash(), strict=True)
        return max((ours - theirs.transpose(1, 2)).abs().max().item() for ours, theirs in pairs)


def time_kernel(
    launch_bwd: Any, configs: Any, timed: Timed, kernel: str, tiles: list[Tile], deadline: float
) -> list[tuple[Tile, float]]:
    """(candidate, milliseconds), best first: the better of two rounds, so that one outlier does not count."""
    times: dict[Tile, float] = {}
    for _ in range(2):
        for tile in tiles:
            if time.monotonic() > deadline and times:
                print("  (out of time: the rest of this kernel is left out)")
                return sorted(times.items(), key=lambda row: row[1])
            try:
                taken = milliseconds(partial(launch, launch_bwd, configs, kernel, timed.call, tile))
            except Exception as error:
                print(f"  {kernel:<4} {tile!s:<48}failed: {reason(error)}")
                continue
            times[tile] = min(taken, times.get(tile, math.inf))
    return sorted(times.items(), key=lambda row: row[1])


def time_problem(
    launch_bwd: Any,
    configs: Any,
    problem: tuple[int, int, bool],
    good: dict[str, list[Tile]],
    deadline: float,
    top: int,
) -> dict[str, Any]:
    """Times of every candidate of both kernels, and of the best two together beside FLASH_ATTENTION's backward."""
    head_dim, seqlen, causal = problem
    print(f"\nd{head_dim} S={seqlen} {'causal' if causal else 'full'}, fp16, B={BATCH} H={NHEADS}", flush=True)
    timed = Timed(launch_bwd, head_dim, seqlen, causal)
    launch_bwd.bind_context(timed.call.q.device)
    launch_bwd.launch_dq(timed.call, good["dq"][0].config(configs))  # row_stats, for the other kernel
    result: dict[str, Any] = {"head_dim": head_dim, "seqlen": seqlen, "causal": causal, "kernels": {}}
    best: dict[str, Tile] = {}
    for number, kernel in enumerate(("dq", "dkv")):
        now = time.monotonic()
        rows = time_kernel(launch_bwd, configs, timed, kernel, good[kernel], now + (deadline - now) / (2 - number))
        best[kernel] = rows[0][0]
        products = 3 if kernel == "dq" else 4 if head_dim <= launch_bwd.MAX_SHARED_BLOCK_D else 5
        flops = backward_flops(head_dim, seqlen, causal) / 5 * products
        print(f"  {kernel}, {products} products {'':<32}{'ms':>9}{'TFLOP/s':>9}")
        for tile, taken in rows[:top]:
            print(f"  {tile!s:<48}{taken:9.3f}{flops / taken / 1e9:9.1f}")
        result["kernels"][kernel] = [{"tile": dataclasses.asdict(tile), "ms": taken} for tile, taken in rows]

    def ours() -> Any:
        call = timed.prepare()
        launch(launch_bwd, configs, "dq", call, best["dq"])
        launch(launch_bwd, configs, "dkv", call, best["dkv"])
        return call.dq, call.dk, call.dv

    difference = timed.difference(ours())
    rounds = [(milliseconds(ours), milliseconds(timed.flash)) for _ in range(3)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(flash / triton for triton, flash in rounds)
    tflops = [backward_flops(head_dim, seqlen, causal) / t / 1e9 for t in (mine, theirs)]
    print(f"  together, 5 products: {tflops[0]:.1f} TFLOP/s, FLASH_ATTENTION {tflops[1]:.1f}, ratio {ratio:.3f}")
    print(f"  largest difference from FLASH_ATTENTION's gradients: {difference:.1e}", flush=True)
    result.update(ms=mine, flash_ms=theirs, ratio=ratio, tflops=tflops[0], flash_tflops=tflops[1])
    result["difference"] = difference
    return result


# ---- what goes into configs.py ------------------------------------------------------------------------------------


def chosen(kernel: str, head_dim: int, results: list[dict[str, Any]]) -> list[Tile]:
    """The candidate that is nearest to the best over all problems, then the best of each problem that it is not
    CLOSE_ENOUGH in; the best one with plain loads is for tensors that TMA cannot address, and not here."""
    times = [
        {Tile(**row["tile"]): row["ms"] for row in result["kernels"][kernel]}
        for result in results
        if result["head_dim"] == head_dim
    ]
    everywhere = set.intersection(*(set(t) for t in times)) if times else set()
    if not everywhere:
        return []
    best = [min(t.values()) for t in times]
    listed = [min(everywhere, key=lambda tile: math.prod(t[tile] / b for t, b in zip(times, best, strict=True)))]
    for problem, fastest in zip(times, best, strict=True):
        if min(problem[tile] for tile in listed if tile in problem) > CLOSE_ENOUGH * fastest:
            listed.append(min(problem, key=lambda tile: problem[tile]))
    return listed[:MAX_LISTED]


def print_tables(results: list[dict[str, Any]], head_dims: list[int]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The `hopper` lists of configs.py, as text and as what goes into the JSON file."""
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for kernel, name in TABLES.items():
        print(f"\n{name}.hopper:")
        tables[name] = {}
        for head_dim in head_dims:
            tiles = chosen(kernel, head_dim, results)
            tables[name][str(head_dim)] = [dataclasses.asdict(tile) for tile in tiles]
            print(f"        {head_dim}: [")
            for tile in tiles:
                print(f"            {tile},")
            print("        ],")
    return tables


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500.0, help="stop starting measurements after this long")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256], choices=sorted(DQ))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--top", type=int, default=8, help="rows to print per table")
    parser.add_argument("--json", type=Path, help="where to write the times and the lists")
    parser.add_argument("--check-one", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune_triton_backward: no GPU here", file=sys.stderr)
        return 2
    if arguments.check_one:
        kernel, head_dim, tile = json.loads(arguments.check_one)
        print(check_one(kernel, head_dim, Tile(*tile)) or "right")
        return 0

    started = time.monotonic()
    deadline = started + arguments.seconds
    torch.manual_seed(0)
    import triton

    launch_bwd, configs = import_backend("launch_bwd")
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    has_tma = launch_bwd.tma_reaches(torch.zeros(1, 1, 1, 16, dtype=torch.float16, device="cuda"))
    print(device, flush=True)
    tasks = [
        (kernel, head_dim, tile)
        for head_dim in arguments.head_dims
        for kernel, lists in CANDIDATES.items()
        for tile in lists[head_dim]
        if has_tma or not tile.tma
    ]
    verdicts = check_all(tasks, started + CHECK_SHARE * arguments.seconds)
    wrong = sum("WRONG" in verdict for verdict in verdicts.values())
    right = sum(not verdict for verdict in verdicts.values())
    print(f"{right} of {len(tasks)} candidates compile and are right, {wrong} wrong", end=", ")
    print(f"after {time.monotonic() - started:.0f} s", flush=True)

    results: list[dict[str, Any]] = []
    problems = [(d, s, c) for s in arguments.lengths for d in arguments.head_dims for c in (False, True)]
    for number, problem in enumerate(problems):
        good = {
            kernel: [tile for of, head_dim, tile in tasks if (of, head_dim) == (kernel, problem[0])]
            for kernel in CANDIDATES
        }
        good = {kernel: [t for t in tiles if not verdicts[kernel, problem[0], t]] for kernel, tiles in good.items()}
        now = time.monotonic()
        if now > deadline or not all(good.values()):
            print(f"\nd{problem[0]} S={problem[1]} causal={problem[2]}: left out")
            continue
        share = now + (deadline - now) / (len(problems) - number)
        results.append(time_problem(launch_bwd, configs, problem, good, share, arguments.top))
        torch.cuda.empty_cache()
        if arguments.json:  # after every problem, in case the next one ends the process
            failures = [{"kernel": k, "head_dim": d, "tile": str(t), "verdict": v} for (k, d, t), v in verdicts.items()]
            report = {"device": device, "problems": results, "verdicts": [f for f in failures if f["verdict"]]}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    tables = print_tables(results, arguments.head_dims)
    if arguments.json:
        arguments.json.write_text(json.dumps({**report, "tables": tables}, indent=1) + "\n", encoding="utf-8")
    print("\nd     S      kind    TFLOP/s  FLASH   ratio")
    for row in results:
        kind = "causal" if row["causal"] else "full"
        print(f"{row['head_dim']:<6}{row['seqlen']:<7}{kind:<8}{row['tflops']:7.1f}{row['flash_tflops']:7.1f}", end="")
        print(f"{row['ratio']:8.3f}")
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
