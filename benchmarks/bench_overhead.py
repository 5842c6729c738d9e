"""Host time of a call on tiny tensors, against PyTorch's SDPA: what a call costs before any kernel matters.

On CUDA the calls are only enqueued inside the clock, never waited for; on the CPU the (tiny) computation is included.

  python -m benchmarks.bench_overhead                     CUDA tensors
  python -m benchmarks.bench_overhead --device cpu        CPU tensors
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import cli, provenance
from benchmarks.methods import interleave, ratio
from benchmarks.rivals import Rival, select

SHAPES = {"cuda": ((1, 16, 1, 64), (2, 32, 4, 128)), "cpu": ((1, 1, 1, 64), (1, 8, 2, 64))}  # (b, s, h, d)
CONTENDERS = {"cuda": ("cuda", "triton", "FLASH_ATTENTION"), "cpu": ("cpu",)}
ROUNDS = 15
CALLS = {"cuda": 200, "cpu": 1000}  # in a round: on CUDA fewer than the launch queue holds, so that none waits


def time_host(calls: int, device: torch.device) -> Callable[[Callable[[], Any], float], float]:
    """A timer for `interleave`: milliseconds of host time a call, over `calls` calls in a row."""

    def measure(call: Callable[[], Any], rep_ms: float) -> float:
        for _ in range(20):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return elapsed * 1e3 / calls

    return measure


def measure_shape(
    shape: tuple[int, int, int, int], names: list[str], device: torch.device, calls: int
) -> list[dict[str, Any]]:
    """Rows for one shape: every contender that runs, in microseconds and as a multiple of SDPA's time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    able: list[Rival] = []
    for rival in select([*names, "SDPA"]):
        reason = rival.unsupported(q, k, v, False)
        if reason is None:
            able.append(rival)
        else:
            print(f"{rival.name} cannot run {shape} on {device.type}: {reason}")
    bound = {rival: rival.bind(q, k, v, False) for rival in able}
    timings = interleave(bound, time_host(calls, device), rounds=ROUNDS, rep_ms=0.0)
    return [
        {
            "device": device.type,
            "shape": "×".join(map(str, shape)),
            "name": rival.name,
            "microseconds": round(timings[rival.name].ms * 1e3, 3),
            "ratio_to_sdpa": round(1.0 / ratio(timings[rival.name], timings["SDPA"]), 3),
        }
        for rival in able
    ]


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=60.0)
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--backend", action="append", help="contender beside SDPA, repeatable (default: all)")
    arguments = parser.parse_args(argv)
    device = cli.require_gpu("bench_overhead") if arguments.device == "cuda" else torch.device("cpu")
    names = list(arguments.backend or CONTENDERS[arguments.device])
    calls = CALLS[arguments.device] // (10 if arguments.quick else 1)
    data: list[dict[str, Any]] = []
    for shape in SHAPES[arguments.device]:
        data += measure_shape(shape, names, device, calls)
    backends = [name for name in names if name in provenance.SOURCES_OF_BACKEND]
    missing = [name for name in names[:1] if not any(row["name"] == name for row in data)]
    if missing:
        raise SystemExit(f"bench_overhead: {missing[0]} did not run; nothing is written")
    cli.finish(
        f"overhead_{arguments.device}",
        benchmark="bench_overhead",
        title=f"Host time of a call, {'bf16' if device.type == 'cuda' else 'float32'}, tiny tensors, without autograd",
        data=data,
        sources=[*provenance.HOST, *(glob for name in backends for glob in provenance.SOURCES_OF_BACKEND[name])],
        arguments=arguments,
        notes=["SDPA chooses its own kernel; its inputs are transposed views made outside the clock."],
    )


if __name__ == "__main__":
    main()
