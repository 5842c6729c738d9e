"""What a call needs beyond its computation: host time, or GPU memory.

Host time is that of a call on tiny tensors, compared with PyTorch's SDPA. On CUDA the clock covers only the enqueuing
of calls; on the CPU it includes the (tiny) computation. Memory is the peak of a call beyond its inputs and outputs (of
the backward the three gradients), at 32,768 tokens, 16 heads, head dim 128, bf16. If one of this library's calls takes
more than the LSE, or than a float32 dQ and delta, the exit status is 1.

  python -m benchmarks.bench_overhead                     a forward of CUDA tensors without autograd
  python -m benchmarks.bench_overhead --backward          a forward and the backward of it, through autograd
  python -m benchmarks.bench_overhead --device cpu        CPU tensors
  python -m benchmarks.bench_overhead --memory            memory of the forward; with --backward of the backward op
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.bench_speed import BACKWARD, FORWARD
from benchmarks.methods import interleave, ratio, require_gpu
from benchmarks.rivals import Call, Rival, select

SHAPES = {"cuda": ((1, 16, 1, 64), (2, 32, 4, 128)), "cpu": ((1, 1, 1, 64), (1, 8, 2, 64))}  # (b, s, h, d)
CONTENDERS = {"cuda": ("cuda", "triton", "FLASH_ATTENTION"), "cpu": ("cpu",)}
ROUNDS = 15
CALLS = {"cuda": 200, "cpu": 1000}  # per round; on CUDA fewer than the launch queue holds, so that no call waits
BACKWARD_CALLS = {"cuda": 50, "cpu": 300}  # each launches several kernels


class Training(Rival):
    """A forward and its backward, as autograd runs them."""

    def __init__(self, forward: Rival) -> None:
        self.name = forward.name
        self.forward = forward

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = self.forward.bind(q, k, v, causal)
        inputs = [x.detach().requires_grad_() for x in forward.args[:3]]  # as the forward takes them
        forward = partial(forward.func, *inputs, *forward.args[3:], **forward.keywords)
        with self.active():
            dout = torch.randn_like(forward())
        return partial(self.step, forward, inputs, dout)

    @staticmethod
    def step(forward: Call, inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, dout)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self.forward.active(), torch.enable_grad():
            yield


def time_host(calls: int, device: torch.device) -> Callable[[Callable[[], Any], float], float]:
    """A timer for `interleave`: milliseconds of host time per call, over `calls` calls in a row."""

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
    shape: tuple[int, int, int, int], rivals: list[Rival], device: torch.device, calls: int
) -> list[dict[str, Any]]:
    """Rows for one shape: every contender that runs, in microseconds and as a multiple of SDPA's time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    able: list[Rival] = []
    for rival in rivals:
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


# ---- memory ----------------------------------------------------------------------------------------------------------

BATCH, NHEADS, SEQLEN, HEADDIM = 1, 16, 32768, 128
FLOAT_BYTES = 4
OURS = ("cuda", "cuda deterministic", "triton")
MEMORY_CONTENDERS = ["cuda", "triton", "FLASH_ATTENTION", "cuDNN"]
BACKWARD_MEMORY_CONTENDERS = [*OURS, "FLASH_ATTENTION", "cuDNN"]
ROUNDING = 1.01  # the allocator rounds up to 512 bytes, the kernels to whole tiles


def extra_bytes(rival: Rival, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> int:
    """Bytes that one call allocates at its peak beyond what was there before and the outputs that it returns."""
    call = rival.bind(q, k, v, causal)
    with rival.active():
        call()  # one-time allocations (workspaces, tuning) do not count
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = rival.outputs(call())
        torch.cuda.synchronize()
    returned = sum(output.numel() * output.element_size() for output in outputs)
    return torch.cuda.max_memory_allocated() - before - returned


def measure_memory(arguments: argparse.Namespace) -> None:
    """Saves the memory of every contender. SystemExit where one of ours takes more than it needs."""
    device = require_gpu("bench_overhead")
    seqlen = 4096 if arguments.quick else SEQLEN
    lse_bytes = BATCH * NHEADS * seqlen * FLOAT_BYTES
    if arguments.backward:
        direction, contenders, key = BACKWARD, BACKWARD_MEMORY_CONTENDERS, "dq_and_delta_bytes"
        needed = lse_bytes * (1 + HEADDIM)
    else:
        direction, contenders, key, needed = FORWARD, MEMORY_CONTENDERS, "lse_bytes", lse_bytes
    q, k, v = (torch.randn(BATCH, seqlen, NHEADS, HEADDIM, device=device).to(torch.bfloat16) for _ in range(3))
    data: list[dict[str, Any]] = []
    for rival in select(arguments.backend or contenders, direction.rivals):
        for causal in (False, True):
            reason = rival.unsupported(q, k, v, causal)
            if reason is not None:
                print(f"{rival.name} cannot run: {reason}")
                continue
            shape = {"batch": BATCH, "nheads": NHEADS, "seqlen": seqlen, "headdim": HEADDIM, "causal": causal}
            used = {"extra_bytes": extra_bytes(rival, q, k, v, causal), key: needed}
            data.append({"name": rival.name, **shape, **used, "score_matrix_bytes": BATCH * NHEADS * seqlen**2 * 2})
    title = f"Peak extra memory of a {direction.name}, bf16, {seqlen:,} tokens, {NHEADS} heads"
    sources = [*results.HOST, *results.ATTENTION, *results.TRITON]
    results.finish(f"memory{'_backward' * arguments.backward}", "bench_memory", title, data, arguments, sources=sources)
    greedy = [
        f"{row['name']} ({'causal' if row['causal'] else 'full'}): {row['extra_bytes']:,}"
        for row in data
        if row["name"] in OURS and row["extra_bytes"] > ROUNDING * needed
    ]
    if greedy:
        raise SystemExit(f"bench_overhead: more than the {needed:,} bytes allowed: {'; '.join(greedy)}")


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=60.0)
    parser.add_argument("--backward", action="store_true", help="measure a forward and its backward, through autograd")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--backend", action="extend", nargs="+", help="contenders (default: all)")
    parser.add_argument("--memory", action="store_true", help="measure the memory of a call on the GPU")
    arguments = parser.parse_args(argv)
    if arguments.memory:
        measure_memory(arguments)
        return
    device = require_gpu("bench_overhead") if arguments.device == "cuda" else torch.device("cpu")
    names = list(arguments.backend or CONTENDERS[arguments.device])
    calls = (BACKWARD_CALLS if arguments.backward else CALLS)[arguments.device] // (10 if arguments.quick else 1)
    rivals = select([*names, "SDPA"])
    if arguments.backward:
        rivals = [Training(rival) for rival in rivals]
    data: list[dict[str, Any]] = []
    for shape in SHAPES[arguments.device]:
        data += measure_shape(shape, rivals, device, calls)
    if not any(row["name"] == names[0] for row in data):
        raise SystemExit(f"bench_overhead: {names[0]} did not run; nothing is written")
    sources = [*results.HOST, *(path for name in names for path in results.SOURCES_OF_BACKEND.get(name, ()))]
    notes = ["SDPA chooses its own kernel; its inputs are transposed views that are made before the clock starts."]
    call = "forward and backward, through autograd" if arguments.backward else "call"
    title = f"Host time of a {call}, {'bf16' if device.type == 'cuda' else 'float32'}, tiny tensors"
    title += "" if arguments.backward else ", without autograd"
    name = f"overhead{'_backward' * arguments.backward}_{arguments.device}"
    results.finish(name, "bench_overhead", title, data, arguments, sources=sources, notes=notes)


if __name__ == "__main__":
    main()
