"""Context parallel, forward and backward: the rate of each GPU relative to one GPU on the same total sequence.

  torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel
  python -m benchmarks.bench_context_parallel --model     the same on paper, for 8 to 1,024 GPUs; needs no GPU

bf16, head dim 128. Contenders: this library's strategies, and PyTorch's experimental `context_parallel` with its
kernels, where it has the mask. Rounds interleave all contenders, one GPU included; a time is that of the slowest rank.
Steps are timed back to back, so that the GPU has the clock that it keeps under load. They are timed twice: enqueued
before the GPU starts them, as in a model whose other layers keep the GPU busy, and with an idle GPU that waits for the
host. Messages without attention are timed too, for the model. Writes context_parallel_N for N GPUs.

The model derives the rate of each GPU from a FLOP rate and two bandwidths: causal attention on `zigzag_shards`, forward
and backward. docs/context_parallel.md derives the formulas and compares them with measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.methods import BACKWARD_WORK, Budget, require_gpu
from benchmarks.rivals import first_line
from flash_attn_mini import (
    cp_flash_attn_func,
    cp_flash_attn_varlen_func,
    flash_attn_func,
    flash_attn_varlen_func,
    packed_shards,
    zigzag_shards,
)
from flash_attn_mini.context_parallel import Shards, functions
from flash_attn_mini.context_parallel.kernels import Attention
from flash_attn_mini.options import Options

HEADDIM = 128
STRATEGIES = ("ring", "ulysses", "all_gather")
ONE_GPU = "one GPU"
PYTORCH = {"PyTorch FLASH": SDPBackend.FLASH_ATTENTION, "PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION}
SHORTEST, LONGEST = 1024, 32 * 1024  # documents
MESSAGE_MIB = (8, 64, 256)
MAX_CTAS = 16  # of NCCL's kernels in the group of this library's functions
TIMEOUT = timedelta(seconds=90)
BUSY_MS = 60.0  # milliseconds of steps that a time is the mean of, after half as many that are not counted
MOST_HEAD_START = 300.0  # milliseconds; a first step may compile for longer
CYCLES_OF_MILLISECOND = 2e6  # at the highest clock of a Hopper
Step = Callable[[], Any]  # a forward and a backward


@dataclass(frozen=True)
class Point:
    """One row of the table. `tokens` of each GPU; window 0: causal without one."""

    kind: str
    tokens: int
    nheads: int
    nheads_k: int
    window: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"window_size": (self.window, 0)} if self.window else {"causal": True}


POINTS = [
    Point("causal", 8192, 16, 16),
    Point("causal", 32768, 16, 16),
    Point("documents", 32768, 16, 16),
    Point("window of 4,096", 32768, 16, 16, 4096),
    Point("causal", 8192, 32, 8),
    Point("causal", 32768, 32, 8),
    Point("documents", 32768, 32, 8),
    Point("window of 4,096", 32768, 32, 8, 4096),
]


def documents_of(total: int) -> list[int]:
    """Lengths of documents, the same on every rank."""
    choice, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(min(choice.randint(SHORTEST, LONGEST), total - sum(lengths)))
    return lengths


def visible_pairs(point: Point, lengths: list[int]) -> int:
    """Pairs of query and key in all sequences."""
    window = point.window or max(lengths)
    return sum(n * (n + 1) // 2 - max(0, n - window - 1) * max(0, n - window) // 2 for n in lengths)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def step_of(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Step:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def contenders_of(point: Point, lengths: list[int], shards: Shards) -> dict[str, Step]:
    """The steps of one GPU and of every strategy."""
    total, is_packed = sum(lengths), point.kind == "documents"
    before = () if is_packed else (1,)

    def tensors(tokens: int) -> list[Tensor]:
        return [normal(*before, tokens, heads, HEADDIM) for heads in (point.nheads, point.nheads_k, point.nheads_k)]

    if is_packed:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        sequences = (cu_seqlens, cu_seqlens, max(lengths), max(lengths))
        steps = {
            ONE_GPU: step_of(lambda q, k, v: flash_attn_varlen_func(q, k, v, *sequences, causal=True), *tensors(total))
        }
    else:
        steps = {ONE_GPU: step_of(lambda q, k, v: flash_attn_func(q, k, v, **point.options), *tensors(total))}
    function = cp_flash_attn_varlen_func if is_packed else cp_flash_attn_func
    for strategy in STRATEGIES:
        if strategy == "ulysses" and point.nheads_k % shards.size != 0:
            continue
        local = tensors(shards.tokens[shards.rank])
        steps[strategy] = step_of(
            lambda q, k, v, strategy=strategy: function(q, k, v, shards, **point.options, strategy=strategy), *local
        )
    return steps


@contextlib.contextmanager
def pytorch_step(kernel: SDPBackend, point: Point, total: int) -> Iterator[Step]:
    """The step of PyTorch's context_parallel, within which SDPA is patched."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [normal(1, heads, total, HEADDIM) for heads in (point.nheads, point.nheads_k, point.nheads_k)]
    settings = {"buffers": buffers, "buffer_seq_dims": [2, 2, 2], "no_restore_buffers": set(buffers)}
    with sdpa_kernel(kernel), context_parallel(mesh, **settings):  # type: ignore[arg-type]
        attend = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
            q, k, v, is_causal=True, enable_gqa=point.nheads != point.nheads_k
        )
        yield step_of(attend, *[x.detach() for x in buffers])


def slowest(milliseconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([milliseconds], device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


class Timing(NamedTuple):
    """Milliseconds of a step on the slowest rank.

    Attributes:
        ahead: With all steps enqueued before the GPU starts them.
        idle: With a GPU that is idle when the host starts to enqueue them.
        is_ahead: False if the host could not enqueue them all before the GPU started, because it waits for the GPU.
    """

    ahead: float
    idle: float
    is_ahead: bool


def time_step(step: Step, ahead_first: bool) -> Timing:
    """The mean of steps back to back, in both ways."""
    begin = time.perf_counter()
    step()
    host = slowest((time.perf_counter() - begin) * 1e3)  # of the first step, which may compile
    repetitions = math.ceil(BUSY_MS / time_steps(step, 1, 0, 0.0)[0])
    head_start = min(3.0 * host * repetitions + 5.0, MOST_HEAD_START)
    order = (head_start, 0.0) if ahead_first else (0.0, head_start)
    measured = {start: time_steps(step, repetitions, max(1, repetitions // 2), start) for start in order}
    ahead, is_ahead = measured[head_start]
    return Timing(ahead, measured[0.0][0], is_ahead)


def time_steps(step: Step, repetitions: int, uncounted: int, head_start: float) -> tuple[float, bool]:
    """Milliseconds of a step back to back, and whether every rank's host had enqueued all before its GPU started.

    Steps before that are not counted bring the GPU to the clock that it keeps. head_start: milliseconds.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(int(head_start * CYCLES_OF_MILLISECOND))
    dist.all_reduce(torch.zeros(1, device="cuda"))  # all ranks start together
    if head_start == 0.0:
        torch.cuda.synchronize()
    begin, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(uncounted):
        step()
    start.record()
    for _ in range(repetitions):
        step()
    is_ahead = not begin.query()
    end.record()
    end.synchronize()
    return slowest(start.elapsed_time(end) / repetitions), slowest(float(not is_ahead)) == 0.0


def measure(point: Point, group: Any, rounds: int) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    total = point.tokens * size
    lengths = documents_of(total) if point.kind == "documents" else [total]
    is_packed = point.kind == "documents"
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shards = packed_shards(starts, group) if is_packed else zigzag_shards(total, group)
    options = Options(0.0, 1.0, True, point.window or -1, 0, 0.0, None)
    choice = functions.choose_strategy(Attention("", shards, options, is_packed), point.nheads, point.nheads_k)
    steps = contenders_of(point, lengths, shards)
    times: dict[str, list[Timing]] = {name: [] for name in steps}
    rivals = PYTORCH if point.kind == "causal" else {}
    times |= {name: [] for name in rivals}
    for turn in range(rounds):
        ahead_first = turn % 2 == 0
        for name, step in steps.items():
            times[name].append(time_step(step, ahead_first))
        for name, kernel in rivals.items():
            try:
                with pytorch_step(kernel, point, total) as step:
                    times[name].append(time_step(step, ahead_first))
            except Exception as error:  # whatever an experimental function raises, the same on every rank
                if rank == 0:
                    print(f"{name} cannot run: {first_line(error)}", file=sys.stderr)
    times = {name: values for name, values in times.items() if values}
    median = {name: statistics.median(value.ahead for value in values) for name, values in times.items()}
    idle = {name: statistics.median(value.idle for value in values) for name, values in times.items()}

    def shares(which: Callable[[Timing], float]) -> dict[str, float]:
        """The median of the rounds' ratios; a contender that failed in some rounds has those of its first ones."""
        return {
            name: round(
                statistics.median(
                    which(one) / (size * which(value)) for one, value in zip(times[ONE_GPU], values, strict=False)
                ),
                4,
            )
            for name, values in times.items()
            if name != ONE_GPU
        }

    flops = 4.0 * visible_pairs(point, lengths) * point.nheads * HEADDIM * (1.0 + BACKWARD_WORK)
    return {
        "kind": point.kind,
        "tokens": point.tokens,
        "nheads": point.nheads,
        "nheads_k": point.nheads_k,
        "headdim": HEADDIM,
        "gpus": size,
        "auto": choice.strategy,
        "ms": {name: round(value, 4) for name, value in median.items()},
        "tflops": {
            name: round(flops / value * 1e-9 / (1 if name == ONE_GPU else size), 4) for name, value in median.items()
        },
        "share": shares(lambda timing: timing.ahead),
        "ms_with_host": {name: round(value, 4) for name, value in idle.items()},
        "share_with_host": shares(lambda timing: timing.idle),
        "waiting": [name for name, values in times.items() if not all(value.is_ahead for value in values)],
    }


def message_rates(group: Any) -> dict[str, float]:
    """GB/s that each GPU sends to the next one, by MiB of a message."""
    size, rank = dist.get_world_size(), dist.get_rank()
    slowest(0.0)  # the first collective sets up NCCL, which takes longer than a head start
    rates = {}
    for mebibytes in MESSAGE_MIB:
        sent = torch.ones(mebibytes << 20, dtype=torch.uint8, device="cuda")
        received = torch.empty_like(sent)

        def step(sent: Tensor = sent, received: Tensor = received) -> None:
            ops = [
                dist.P2POp(dist.isend, sent, (rank + 1) % size, group),
                dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        step()  # the first message sets up a connection
        milliseconds, is_ahead = time_steps(step, 10, 5, MOST_HEAD_START)
        if not is_ahead:
            raise SystemExit(f"bench_context_parallel: the host was too slow to time messages of {mebibytes} MiB")
        rates[str(mebibytes)] = round((mebibytes << 20) / milliseconds * 1e-6, 1)
    return rates


BYTES = 2  # of an element of q, k, v, and of gradients on their way
MEAN = 0.75  # of a rank's keys that a causal ring sends in a step, on average; the first rank receives all of them
MERGE_BYTES = 6  # per element of a step: a 16-bit part is read, a float32 sum is read and written every second step
COPIES = 4  # reads and writes of an element in the packing and reordering of ulysses
GROUPS = 4  # of heads in ulysses
NODE = 8  # GPUs with NVLink between them


@dataclass(frozen=True)
class Machine:
    """FLOP/s of attention (forward and backward), bytes/s from GPU to GPU in each direction, bytes/s of memory."""

    flops: float
    link: float
    memory: float = 4.0e12


# About an H200's rate, NVLink as messages of 64 MiB measure it, and one 400 Gb/s adapter for each GPU.
WITHIN_NODE, BETWEEN_NODES = Machine(600e12, 150e9), Machine(600e12, 45e9)


@dataclass(frozen=True)
class Model:
    """Seconds of one call. `tokens` and heads of each GPU; `size` GPUs."""

    machine: Machine
    size: int
    tokens: int
    nheads: int
    nheads_k: int
    headdim: int = 128

    def work(self) -> tuple[float, float]:
        """Forward and backward of one step of the ring: a causal block, or half of a full one."""
        forward = 2.0 * self.nheads * self.headdim * self.tokens**2 / self.machine.flops
        return forward, BACKWARD_WORK * forward

    def ring(self) -> float:
        """Messages hide behind the work of a step; in the backward behind work on own keys, too, at any time."""
        forward, backward = self.work()
        steps = self.size - 1
        most = self.tokens * 2 * self.nheads_k * self.headdim * BYTES / self.machine.link
        merged = MEAN * self.tokens * self.headdim * MERGE_BYTES / self.machine.memory
        forward_step = max(forward + merged * self.nheads, most)
        backward_step = backward + merged * (self.nheads + 2 * self.nheads_k)
        # Only the first keys travel before the first step, and only gradients after the last one. Keys or gradients
        # travel during the first and the last step, both during the others: a rank that receives most of the keys
        # receives fewest of the gradients, so their sum is 2 MEAN on average over the steps.
        ends = 2 * most + (backward_step if steps == 1 else 2 * max(backward_step, most))
        through_messages = ends + (steps - 2) * max(backward_step, 2 * MEAN * most) if steps > 1 else ends
        backward_of_all = max(backward + steps * backward_step, through_messages if steps else 0.0)
        return forward + steps * forward_step + backward_of_all

    def ulysses(self) -> float:
        """Of the messages of GROUPS groups of heads, those of one group do not hide behind work."""
        elements = self.tokens * 2 * (self.nheads + self.nheads_k) * self.headdim
        sent = elements * BYTES * (self.size - 1) / self.size / self.machine.link
        copied = elements * BYTES * COPIES / self.machine.memory
        return sum(max(self.size * work, sent) + sent / GROUPS + copied for work in self.work())

    def shares(self) -> dict[str, float]:
        """The rate of each GPU relative to one GPU on the whole sequence, by strategy."""
        ideal = self.size * sum(self.work())
        shares = {"ring": ideal / self.ring()}
        if self.nheads_k % self.size == 0:
            shares["ulysses"] = ideal / self.ulysses()
        return shares


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """The shares for a row of bench_context_parallel: the rate of its GPU, and messages of about the size of its K."""
    if row["kind"] != "causal":
        return {}
    rates = row["message_gbps"]
    mebibytes = row["tokens"] * row["nheads_k"] * row["headdim"] * BYTES / (1 << 20)
    link = rates[min(rates, key=lambda size: abs(math.log(int(size) / mebibytes)))] * 1e9
    machine = Machine(row["tflops"]["one GPU"] * 1e12, link)
    return Model(machine, row["gpus"], row["tokens"], row["nheads"], row["nheads_k"], row["headdim"]).shares()


def model_rows() -> list[dict[str, Any]]:
    result = []
    for size in (8, 16, 64, 256, 1024):
        machine = WITHIN_NODE if size <= NODE else BETWEEN_NODES
        for nheads, nheads_k in ((16, 16), (32, 8)):
            for tokens in (8192, 32768):
                shares = Model(machine, size, tokens, nheads, nheads_k).shares()
                result.append(
                    {
                        "GPUs": size,
                        "GB/s between GPUs": machine.link * 1e-9,
                        "heads": f"{nheads} on {nheads_k}",
                        "tokens a GPU": tokens,
                        "tokens": size * tokens,
                        **{name: f"{shares[name]:.2f}" if name in shares else "–" for name in ("ring", "ulysses")},
                    }
                )
    return result


def save_model(arguments: argparse.Namespace) -> None:
    """Saves the model's table."""
    title = "Context parallel on paper: the rate of each GPU relative to one GPU"
    notes = ["Computed by the model, not measured; the stamp below is of the machine that computed it."]
    name, sources = "context_parallel_model", ["benchmarks/bench_context_parallel.py"]
    results.finish(name, name, title, model_rows(), arguments, sources=sources, notes=notes)


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=200.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--nccl-defaults", action="store_true", help="leave CTAs and clusters to NCCL")
    parser.add_argument("--model", action="store_true", help="write the model's table")
    arguments = parser.parse_args(argv)
    if arguments.model:
        save_model(arguments)
        return
    require_gpu("bench_context_parallel")
    if "RANK" not in os.environ:
        raise SystemExit("bench_context_parallel: start it with torchrun --nproc-per-node N")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # NCCL's kernels have to start while other kernels fill the GPU. PyTorch's functions have a separate group, with
    # NCCL's choice of CTAs.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", timeout=TIMEOUT, pg_options=options)
    try:
        run(arguments, own_group(arguments.nccl_defaults))
    finally:
        dist.destroy_process_group()


def own_group(nccl_defaults: bool) -> Any:
    """The group of this library's functions, as docs/context_parallel.md recommends it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if not nccl_defaults:
        options.config.max_ctas = MAX_CTAS
        options.config.cga_cluster_size = 1
    return dist.new_group(timeout=TIMEOUT, pg_options=options)


def run(arguments: argparse.Namespace, group: Any) -> None:
    budget = Budget(arguments.seconds)
    rates = message_rates(group)
    points = POINTS[:1] if arguments.quick else POINTS
    data = []
    for point in points:
        if slowest(-budget.left()) > -5.0:  # the ranks decide together
            break
        row = measure(point, group, arguments.rounds)
        data.append(row | {"max_ctas": 0 if arguments.nccl_defaults else MAX_CTAS, "message_gbps": rates})
        torch.cuda.empty_cache()
    if dist.get_rank() != 0:
        return
    size = dist.get_world_size()
    sources = [*results.HOST, *results.ATTENTION, "flash_attn_mini/context_parallel"]
    results.finish(
        f"context_parallel_{size}",
        "bench_context_parallel",
        f"Context parallel on {size} GPUs, forward and backward, bf16, head dim {HEADDIM}",
        data,
        arguments,
        sources=sources,
        complete=len(data) == len(points),
        extra={"gpus": str(size)},
    )


if __name__ == "__main__":
    main()
