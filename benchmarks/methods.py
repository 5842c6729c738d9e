"""How benchmarks measure: interleaved rounds, medians, ratios within one run, joules; and how they count FLOPs.

On a GPU a time is the median of triton.testing.do_bench: calls back to back (a sustained load, not a burst), with the
L2 cache cleared between calls. as_timed turns a call into the replay of a CUDA graph, which leaves the host's time out
(bench_overhead.py measures that). On a CPU a time is the median of perf_counter over repeated calls.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.rivals import Rival

WARMUP_MS = 10.0
# Milliseconds of one median of a forward; those of a backward are BACKWARD_WORK times as long.
MIN_REP_MS, MAX_REP_MS = 20.0, 100.0
MEASURE_OVERHEAD_MS = 40.0  # time of a do_bench besides its timed repetitions
GRAPHS = "Calls are replayed as CUDA graphs: times exclude the host."
DISAGREEMENT = 2e-2  # largest difference between two contenders, as a share of the largest value: 16-bit rounding
BACKWARD_WORK = 2.5  # FLOPs as a multiple of the forward's: five matrix products (S, dP, dV, dK, dQ) to two


def attention_flops(batch: int, nheads: int, seqlen_q: int, seqlen_k: int, headdim: float, causal: bool) -> float:
    """Floating-point operations of a forward: two matrix products, a multiply-add is two; causal counts half.

    Where v has a head dim of its own, headdim is the mean of the products' head dims.
    """
    return 4.0 * batch * nheads * seqlen_q * seqlen_k * headdim * (0.5 if causal else 1.0)


T = TypeVar("T")


def progress(items: Sequence[T], label: str) -> Iterable[T]:
    """The items with a progress bar on a terminal, and without one elsewhere or when tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=label, leave=False, disable=not sys.stderr.isatty())
    return bar


def require_gpu(benchmark: str) -> torch.device:
    """The GPU, or an end of the program that says one is needed."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{benchmark} needs a CUDA GPU and this machine shows none to PyTorch")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class Budget:
    """The wall-clock time that a benchmark may use."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def share(self, parts: int) -> float:
        """The time left divided into `parts`, in milliseconds."""
        return max(0.0, self.left()) * 1e3 / max(1, parts)

    def rep_ms(self, parts: int, device: str) -> float:
        """How long each of `parts` measurements repeats a call, in milliseconds: as the time left allows, within
        limits. 1 on the CPU."""
        share = self.share(parts) - MEASURE_OVERHEAD_MS
        return 1.0 if device == "cpu" else min(MAX_REP_MS, max(MIN_REP_MS, share))

    def within(self, items: Sequence[T], label: str) -> Iterator[tuple[int, T]]:
        """The items with their numbers, while there is time, and with a progress bar."""
        for number, item in enumerate(progress(items, label)):
            if self.left() <= 0:
                return
            yield number, item

    def left_out(self, done: int, points: int) -> list[str]:
        """A note on the points for which there was no time; [] if there are none."""
        if done == points:
            return []
        return [f"{points - done} of {points} points were left out: the {self.seconds:.0f} s were used up."]


def time_cuda(call: Callable[[], Any], rep_ms: float) -> float:
    """Median milliseconds of one call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=WARMUP_MS, rep=rep_ms, return_mode="median"))


@dataclass(frozen=True)
class Replay:
    """A call recorded as a CUDA graph: every kernel that it launches, without the host's work.

    With dropout, PyTorch sets the generator's state by two small kernels before each replay.
    """

    call: Callable[[], Any]  # holds the inputs
    graph: torch.cuda.CUDAGraph
    result: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def as_timed(rival: Rival, call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call to time: on a GPU its replay. Raises RuntimeError where a call cannot be recorded."""
    if device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with rival.active():
        call()  # compiles, tunes and allocates workspaces
        with torch.cuda.graph(graph):
            result = call()
    return Replay(call, graph, result)


def time_cpu(call: Callable[[], Any], rep_ms: float) -> float:
    """Median milliseconds of one call on the CPU: repeated for `rep_ms`, three times at least."""
    times: list[float] = []
    deadline = time.perf_counter() + rep_ms / 1e3
    while len(times) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def timer_for(device: torch.device) -> Callable[[Callable[[], Any], float], float]:
    return time_cuda if device.type == "cuda" else time_cpu


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference ÷ the largest expected value, in float64."""
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def check_close(what: str, got: Sequence[Tensor], expected: Sequence[Tensor], allowed: float = DISAGREEMENT) -> None:
    """RuntimeError where two results differ by more than a share of the largest value; `what` names both."""
    for x, y in zip(got, expected, strict=True):
        share = difference(x, y)
        if not share <= allowed:  # NaN too
            raise RuntimeError(f"{what} disagree by up to {share:.3g} of the largest value")


def check_agreement(rivals: Sequence[Rival], calls: Mapping[Rival, Callable[[], Any]]) -> None:
    """RuntimeError unless every contender's result agrees with the last one's: wrong results are not timed."""
    results = {}
    for rival in rivals:
        with rival.active():
            results[rival.name] = rival.outputs(calls[rival]())
    *names, last = results
    for name in names:
        check_close(f"{name} and {last}", results[name], results[last])


@dataclass
class Timing:
    """One contender's medians, one for each round, in milliseconds."""

    rounds: list[float]

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.ms


def ratio(ours: Timing, theirs: Timing) -> float:
    """Speed of `ours` ÷ speed of `theirs`: the median over the rounds' ratios, so that a drift of clocks cancels."""
    return statistics.median(b / a for a, b in zip(ours.rounds, theirs.rounds, strict=True))


def ratios(timings: Mapping[str, Timing], ours: Iterable[Rival], theirs: Sequence[str]) -> dict[str, dict[str, float]]:
    """Speed of each of ours ÷ that of its baseline, or of each of `theirs` where it has none; of those with a time."""
    against = {rival.name: [rival.baseline] if rival.baseline else theirs for rival in ours if rival.name in timings}
    return {
        mine: {name: round(ratio(timings[mine], timings[name]), 3) for name in others if name in timings}
        for mine, others in against.items()
    }


def interleave(
    contenders: Mapping[Rival, Callable[[], Any]],
    measure: Callable[[Callable[[], Any], float], float],
    *,
    rounds: int,
    rep_ms: float,
) -> dict[str, Timing]:
    """`rounds` medians of each contender, by name. A round measures all of them, in another random order each time:
    the call before may change the clocks and the temperature of a GPU.
    """
    medians: dict[str, list[float]] = {rival.name: [] for rival in contenders}
    for rival, call in contenders.items():
        with rival.active():  # compiles, tunes and touches memory before any clock runs
            call()
    order = random.Random(0)
    for _ in range(rounds):
        for rival, call in order.sample(list(contenders.items()), len(contenders)):
            with rival.active():
                medians[rival.name].append(measure(call, rep_ms))
    return {name: Timing(times) for name, times in medians.items()}


def energy_counter(device: torch.device) -> Callable[[], float]:
    """NVML's counter of the joules that a GPU has used. Raises RuntimeError where pynvml or the GPU has none."""
    try:
        import pynvml
    except ImportError as error:
        raise RuntimeError("pynvml is not installed") from error
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # from millijoules


def joules_per_call(
    contenders: Mapping[Rival, Callable[[], Any]],
    ms: Mapping[str, float],
    counter: Callable[[], float],
    seconds: float,
    wait: Callable[[], Any],
) -> dict[str, float]:
    """Joules of the whole GPU for one call of each contender, by name, from calls back to back for `seconds`.

    ms: milliseconds of a call. A quarter as many calls before them are not counted: they bring the GPU to the power
    that it keeps. `wait` returns when the GPU is done.
    """
    joules = dict.fromkeys((rival.name for rival in contenders), 0.0)
    for rival, call in random.Random(0).sample(list(contenders.items()), len(contenders)):
        calls = max(1, round(seconds * 1e3 / ms[rival.name]))
        with rival.active():
            for _ in range(-(-calls // 4)):
                call()
            wait()
            before = counter()
            for _ in range(calls):
                call()
            wait()
            joules[rival.name] = (counter() - before) / calls
    return joules


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """TFLOP/s of a size³ matrix product on random data: the machine's limit at the time of the run."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    milliseconds = timer_for(device)(lambda: a @ b, 50.0)
    return 2.0 * size**3 / milliseconds / 1e9
