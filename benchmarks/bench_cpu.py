"""The cpu backend against PyTorch's scaled_dot_product_attention and a matrix product, interleaved in one run.

  python -m benchmarks.bench_cpu                                  forward, float32, one and two threads
  python -m benchmarks.bench_cpu --dtype bfloat16 --isa amx       ends with an error where the CPU has no AMX
  python -m benchmarks.bench_cpu --backward                       the backward op against that of SDPA's autograd

The results are cpu_DTYPE and cpu_backward_DTYPE; their stamp holds the instruction set that the kernels ran on. `of
matmul` is the speed ÷ that of a 1024³ matrix product of the same dtype.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.bench_speed import BACKWARD, FORWARD, Direction, Point, draw_inputs
from benchmarks.methods import Budget, attention_flops, check_agreement, interleave, ratio, time_cpu
from benchmarks.rivals import Call, Rival, select

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
MATMUL_SIZE = 1024
CPU = torch.device("cpu")
ISAS = ("baseline", "avx2", "avx512", "amx")  # csrc/cpu/select_isa.h
ONE_CALL = """
import torch
from flash_attn_mini import flash_attn_func
x = torch.zeros(1, 1, 1, 16, dtype=torch.{})
flash_attn_func(x, x, x, backend="cpu")
"""


@functools.cache
def instruction_set(dtype: str) -> str:
    """The instruction set of the cpu backend's kernel for a dtype, as the trace of a call names it."""
    command = [sys.executable, "-c", ONE_CALL.format(dtype)]
    environment = {**os.environ, "FLASH_ATTN_MINI_TRACE": "1"}
    run = subprocess.run(command, cwd=results.ROOT, env=environment, capture_output=True, text=True)
    found = re.search(r"run_mha_fwd_cpu.* isa=(\w+)", run.stderr)
    if found is None:
        raise SystemExit(f"bench_cpu: the trace of a call names no instruction set\n{run.stderr.strip()}")
    return found[1]


class Matmul(Rival):
    """A square matrix product in q's dtype, whatever the shapes of q, k and v."""

    name = "matmul"

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(q.dtype) for _ in range(2))
        return partial(torch.matmul, a, b)


def measure_point(direction: Direction, q: Tensor, k: Tensor, v: Tensor, causal: bool, rounds: int) -> dict[str, Any]:
    """One row of the result. A contender's time in a round is the median of three calls or more."""
    batch, seqlen, nheads, headdim = q.shape
    ours, theirs, matmul = [*select(["cpu", "SDPA"], direction.rivals), Matmul()]
    calls = {rival: rival.bind(q, k, v, causal) for rival in (ours, theirs, matmul)}
    check_agreement([ours, theirs], calls)
    timings = interleave(calls, time_cpu, rounds=rounds, rep_ms=1.0)
    mine, rival, product = (timings[contender.name] for contender in (ours, theirs, matmul))
    gflop = direction.work * attention_flops(batch, nheads, seqlen, seqlen, headdim, causal) / 1e9
    matmul_speed = 2 * MATMUL_SIZE**3 / 1e6 / product.ms
    ratios = [b / a for a, b in zip(mine.rounds, rival.rounds, strict=True)]
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(q.dtype).removeprefix("torch."),
        "headdim": headdim,
        "causal": causal,
        "batch": batch,
        "nheads": nheads,
        "seqlen": seqlen,
        "ms": round(mine.ms, 3),
        "SDPA ms": round(rival.ms, 3),
        "GFLOP/s": round(gflop / mine.ms * 1e3, 1),
        "ratio": round(ratio(mine, rival), 3),
        "lowest ratio": round(min(ratios), 3),
        "highest ratio": round(max(ratios), 3),
        "of matmul": round(gflop / mine.ms * 1e3 / matmul_speed, 3),
        "SDPA of matmul": round(gflop / rival.ms * 1e3 / matmul_speed, 3),
    }


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=300.0)
    parser.add_argument("--backward", action="store_true", help="measure the backward op")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--isa", choices=ISAS, help="end with an error where the kernels run on another one")
    parser.add_argument("--headdims", type=int, nargs="+", default=[64, 128], help="default: %(default)s")
    parser.add_argument("--seqlens", type=int, nargs="+", help="default: 512 to 4096; of the backward to 2048")
    parser.add_argument("--nheads", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds at each point (default: %(default)s)")
    arguments = parser.parse_args(argv)
    direction = BACKWARD if arguments.backward else FORWARD
    isa = instruction_set(arguments.dtype)
    if arguments.isa not in (None, isa):
        raise SystemExit(f"bench_cpu: {arguments.dtype} runs on {isa} here, --isa asks for {arguments.isa}")
    asked = arguments.seqlens or [512, 1024, 2048, 4096][: 3 if arguments.backward else 4]
    seqlens = asked[:1] if arguments.quick else asked
    dtype = DTYPES[arguments.dtype]
    points = [
        (t, d, c, s) for t in arguments.threads for d in arguments.headdims for c in (False, True) for s in seqlens
    ]
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    data = []
    for _, (threads, headdim, causal, seqlen) in budget.within(points, "cpu"):
        torch.set_num_threads(threads)
        q, k, v = draw_inputs(
            Point(1, arguments.nheads, arguments.nheads, seqlen, headdim, causal, headdim), CPU, dtype
        )
        data.append(measure_point(direction, q, k, v, causal, arguments.rounds))
    notes = [f"Medians of {arguments.rounds} interleaved rounds; the inputs are bshd in memory."]
    if data:
        notes.append(f"Median of the ratios: {statistics.median(row['ratio'] for row in data):.2f}.")
    results.finish(
        f"cpu{'_backward' * arguments.backward}_{arguments.dtype}",
        "bench_cpu",
        f"{direction.name.capitalize()} of the cpu backend against PyTorch's SDPA, {arguments.dtype}",
        data,
        arguments,
        sources=results.CPU,
        notes=notes,
        left_out=budget.left_out(len(data), len(points)),
        extra={"instruction_set": isa},
    )


if __name__ == "__main__":
    main()
