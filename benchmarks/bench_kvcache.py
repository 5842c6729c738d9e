"""Decoding from a KV cache: speed as bytes of K and V ÷ time, against PyTorch's kernels, and the cost of each feature.
bench_models.py has generation by a whole model.

A figure is a result of its own, such as kvcache_decode. Caches exceed the L2 cache and are used in turn; calls are
replayed as CUDA graphs. Lengths are in GPU memory, except where a contender's caches are full. On the CPU, torch's
threads are set to 1 and to 2.

  python -m benchmarks.bench_kvcache                            every figure of the GPU, bf16
  python -m benchmarks.bench_kvcache --figure decode --quick    the first shapes of one figure
  python -m benchmarks.bench_kvcache --backend cuda             without Triton, which compiles for a while
  python -m benchmarks.bench_kvcache --figure official          against FlashAttention-3, which must be installed
  python -m benchmarks.bench_kvcache --device cpu               one query on full caches, float32
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import results
from benchmarks.methods import DISAGREEMENT, Budget, difference, interleave, ratios, require_gpu
from benchmarks.rivals import FA3, Call, Official, Rival, first_line, select

CPU_CACHE = 2**25  # bytes; the caches in turn exceed it as they exceed a GPU's L2 cache
TIMES_CACHE = 4
LEAST_CALLS = 32  # in a CUDA graph, so that the gap between two replays does not count
# The op that PyTorch runs for each of its kernels.
OPS = {"cuDNN": "_scaled_dot_product_cudnn_attention", "FLASH_ATTENTION": "_scaled_dot_product_flash_attention"}


@dataclass(frozen=True)
class Point:
    """One shape. Every row has seqlen_k keys; with `shortest`, their numbers are uniform in shortest .. seqlen_k."""

    batch: int
    seqlen_k: int
    seqlen_q: int = 1
    nheads: int = 32
    nheads_k: int = 8
    headdim: int = 128
    causal: bool = False
    shortest: int | None = None
    page_size: int = 0  # 0: a contiguous cache
    headdim_v: int | None = None  # v is a view of the first columns of k; None: a tensor of its own


@dataclass(frozen=True)
class Problem:
    """The tensors of one call. To append is to write k_new and v_new over the last seqlen_q of the `lengths` keys."""

    point: Point
    lengths: list[int]
    q: Tensor  # [batch, seqlen_q, nheads, headdim]
    k: Tensor  # [batch, seqlen_k, nheads_k, headdim]
    v: Tensor
    k_new: Tensor  # [batch, seqlen_q, nheads_k, headdim]
    v_new: Tensor
    seqlens: Tensor  # int32 [batch]: lengths
    cos: Tensor  # [seqlen_k, headdim / 2]
    sin: Tensor

    @property
    def bytes(self) -> int:
        """Of the keys and values that a call reads. Values that are columns of the keys do not count again."""
        tensors = 2 if self.point.headdim_v is None else 1
        return tensors * sum(self.lengths) * self.point.nheads_k * self.point.headdim * self.k.element_size()

    def caches(self, page_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v and the block table; page_size 0: contiguous caches and no block table."""
        return self.pages(page_size) if page_size else (self.k, self.v, None)

    def pages(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """k and v in pages in random order, and the block table."""
        number = self.point.batch * self.point.seqlen_k // page_size
        order = torch.randperm(number, device=self.k.device)

        def pool_of(x: Tensor) -> Tensor:
            pool = torch.empty_like(x).view(number, page_size, *x.shape[2:])
            pool[order] = x.view_as(pool)
            return pool

        k = pool_of(self.k)
        v = pool_of(self.v) if self.point.headdim_v is None else k[..., : self.point.headdim_v]
        return k, v, order.view(self.point.batch, -1).to(torch.int32)


def draw(point: Point, device: torch.device, dtype: torch.dtype) -> Problem:
    """Random normal q, k and v. The lengths and the rotation are the same in every draw."""
    b, n = point.batch, point.seqlen_k
    lengths = [n] * b
    if point.shortest is not None:
        lengths = torch.randint(point.shortest, n + 1, (b,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = [(b, point.seqlen_q, point.nheads), *[(b, n, point.nheads_k)] * 2]
    shapes += [(b, point.seqlen_q, point.nheads_k)] * 2
    tensors = [torch.randn(*shape, point.headdim, device=device, dtype=dtype) for shape in shapes]
    if point.headdim_v is not None:
        tensors[2], tensors[4] = tensors[1][..., : point.headdim_v], tensors[3][..., : point.headdim_v]
    frequencies = 1e4 ** -torch.linspace(0, 1, point.headdim // 2, device=device)
    angles = torch.outer(torch.arange(n, device=device), frequencies)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Problem(point, lengths, *tensors, seqlens, angles.cos().to(dtype), angles.sin().to(dtype))


class Ours(Rival):
    """flash_attn_with_kvcache of one backend: on pages, with new keys, or with new keys and rotary embedding.

    ``full``: without cache_seqlens, so that the host knows that the caches are full, as it does for PyTorch's kernels.
    """

    def __init__(
        self,
        backend: str,
        page_size: int | None = None,
        *,
        append: bool = False,
        rotary: bool = False,
        full: bool = False,
    ):
        parts = [backend, *[f"pages of {page_size}"] * bool(page_size), *["append"] * append, *["rotary"] * rotary]
        parts += ["full caches"] * full
        self.name = ", ".join(parts)
        self.baseline = backend if len(parts) > 1 else None
        self.backend = backend
        self.page_size = page_size  # None: the point's
        self.append = append
        self.rotary = rotary
        self.full = full

    def options(self, problem: Problem) -> dict[str, Any]:
        """Arguments that the reference takes too."""
        options: dict[str, Any] = {"causal": problem.point.causal}
        if not self.full:
            options["cache_seqlens"] = problem.seqlens
        if self.append:
            new = problem.point.seqlen_q
            options |= {"k": problem.k_new, "v": problem.v_new, "cache_seqlens": problem.seqlens - new}
        if self.rotary:
            options |= {"rotary_cos": problem.cos, "rotary_sin": problem.sin, "rotary_interleaved": False}
        return options

    def bind_problem(self, problem: Problem) -> Call:
        from flash_attn_mini import flash_attn_with_kvcache

        if self.full and problem.point.shortest is not None:
            raise NotImplementedError("the lengths differ")
        k, v, block_table = problem.caches(problem.point.page_size if self.page_size is None else self.page_size)
        options = {**self.options(problem), "block_table": block_table, "backend": self.backend}
        return partial(flash_attn_with_kvcache, problem.q, k, v, **options)


class OfficialCache(Official):
    """flash_attn_with_kvcache of FlashAttention-3."""

    def __init__(self) -> None:
        super().__init__("FA3", FA3)

    def bind_problem(self, problem: Problem) -> Call:
        k, v, page_table = problem.caches(problem.point.page_size)
        options = {"cache_seqlens": problem.seqlens, "page_table": page_table, "causal": problem.point.causal}
        return partial(self.function("flash_attn_with_kvcache"), problem.q, k, v, **options)


def bind(rival: Rival, problem: Problem) -> Call:
    """A call of the rival on one cache. Raises NotImplementedError for what PyTorch lacks."""
    if isinstance(rival, Ours | OfficialCache):
        return rival.bind_problem(problem)
    if problem.point.shortest is not None or problem.point.page_size:
        raise NotImplementedError("PyTorch has neither rows of different lengths nor pages")
    return rival.bind(problem.q, problem.k, problem.v, problem.point.causal)


class SeenOps(TorchDispatchMode):
    """The names of the ops that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def check_kernel(rival: Rival, call: Call) -> None:
    """RuntimeError if PyTorch ran another kernel than the one asked for."""
    if rival.name in OPS:
        with SeenOps() as seen:
            call()
        if OPS[rival.name] not in seen.names:
            raise RuntimeError(f"{rival.name} was asked for; PyTorch ran {', '.join(sorted(seen.names))}")


def check_result(rival: Rival, problem: Problem, out: Tensor) -> None:
    """RuntimeError unless the first and the last row agree with the float64 reference, the caches with new keys too."""
    from flash_attn_mini.reference import attention_kvcache_reference

    options = (rival if isinstance(rival, Ours) else Ours("")).options(problem)
    for row in sorted({0, problem.point.batch - 1}):
        one = slice(row, row + 1)
        of_row = {name: x[one] if name in ("k", "v", "cache_seqlens") else x for name, x in options.items()}
        caches = [x[one, : problem.lengths[row]] for x in (problem.k, problem.v)]
        k, v = (x.clone() for x in caches)
        expected, _ = attention_kvcache_reference(problem.q[one], k, v, **of_row)
        for name, got, right in (("out", out[one], expected), ("k_cache", caches[0], k), ("v_cache", caches[1], v)):
            share = difference(got, right)
            if not share <= DISAGREEMENT:  # NaN too
                raise RuntimeError(
                    f"{rival.name} differs from the reference: {name} by {share:.3g} of the largest value"
                )


@dataclass(frozen=True)
class Turns:
    """Calls on one cache after the other; on a GPU the replay of them as a CUDA graph."""

    calls: Sequence[Call]
    graph: torch.cuda.CUDAGraph | None
    result: list[Any]  # of the last call

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for call in self.calls:
            self.result[0] = call()


def in_turn(rival: Rival, problems: Sequence[Problem], device: torch.device) -> Turns:
    """The rival's calls on all problems, run once."""
    with rival.active():
        calls = [bind(rival, problem) for problem in problems]
        check_kernel(rival, calls[0])
        if device.type != "cuda":
            turns = Turns(calls, None, [None])
            turns()
            return turns
        calls *= math.ceil(LEAST_CALLS / len(calls))
        result = [calls[0]()]  # compiles, tunes and allocates workspaces
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                result[0] = call()
    turns = Turns(calls, graph, result)
    turns()
    torch.cuda.synchronize(device)
    return turns


def time_turns(turns: Callable[[], Any], rep_ms: float) -> float:
    """Milliseconds of one call, from replays back to back for about rep_ms."""
    assert isinstance(turns, Turns)
    estimate = _milliseconds(turns, 1)
    repeats = max(1, round(rep_ms / max(estimate, 1e-3)))
    return _milliseconds(turns, repeats) / repeats / len(turns.calls)


def _milliseconds(turns: Turns, repeats: int) -> float:
    if turns.graph is None:
        begin = time.perf_counter()
        for _ in range(repeats):
            turns()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        turns()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Copy(Rival):
    """Copies one half of a tensor to the other in a kernel. In a CUDA graph the copy engine takes 1.6 times as long."""

    name = "copy"

    def bind_bytes(self, size: int, device: torch.device) -> Call:
        a, b = torch.ones(2, size // 8, device=device)
        return partial(torch.add, b, 0.0, out=a)


def copy_ceiling(device: torch.device, size: int = 2**31) -> float:
    """GB/s of a copy, bytes read and written: the memory's limit at the time of the run."""
    rival = Copy()
    calls = [rival.bind_bytes(size, device)] * 8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    turns = Turns(calls, graph, [])
    timing = interleave({rival: turns}, time_turns, rounds=5, rep_ms=20.0)[rival.name]
    return size / timing.ms / 1e6


def number_of_caches(bytes_of_one: int, device: torch.device) -> int:
    """So many caches that none of their bytes is in the L2 cache when a call reads them; at least two."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE
    return max(2, math.ceil(TIMES_CACHE * cache / bytes_of_one))


def measure_point(
    point: Point, contenders: Sequence[Rival], device: torch.device, dtype: torch.dtype, rounds: int, rep_ms: float
) -> dict[str, Any]:
    """One row of a result: µs, GB/s of keys and values, ratios of speed, and why a contender could not run.

    A wrong result of ours is an error. A rival that is wrong or cannot run is left out with the reason.
    """
    problems = [draw(point, device, dtype)]
    problems += [draw(point, device, dtype) for _ in range(number_of_caches(problems[0].bytes, device) - 1)]
    calls: dict[Rival, Turns] = {}
    unsupported: dict[str, str] = {}
    for rival in contenders:
        try:
            turns = in_turn(rival, problems, device)
            check_result(rival, problems[-1], rival.outputs(turns.result[0])[0])
        except rival.failures as error:
            if isinstance(rival, Ours) and not isinstance(error, NotImplementedError):
                raise
            unsupported[rival.name] = first_line(error)
        else:
            calls[rival] = turns
    timings = interleave(calls, time_turns, rounds=rounds, rep_ms=rep_ms)
    ours = [rival for rival in contenders if isinstance(rival, Ours)]
    return {
        **asdict(point),
        "dtype": str(dtype).removeprefix("torch."),
        "us": {name: round(timing.ms * 1e3, 2) for name, timing in timings.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in timings.items()},
        "gbps": {name: float(f"{problems[0].bytes / timing.ms / 1e6:.4g}") for name, timing in timings.items()},
        "ratio": ratios(timings, ours, [rival.name for rival in contenders if rival not in ours]),
        "unsupported": unsupported,
    }


K = 1024
REP_MS = {"cuda": 10.0, "cpu": 30.0}  # milliseconds of one median
RIVALS = {"cuda": ["cuDNN", "FLASH_ATTENTION"], "cpu": ["SDPA"]}
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
    return [*map(Ours, ours), *[Ours("cuda", full=True)] * ("cuda" in ours), *rivals]


def each_page_size(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [Ours(backend, page_size) for backend in ours for page_size in (0, 1, 16, 64, 256)]


def with_new_keys(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [
        contender
        for backend in ours
        for contender in (Ours(backend), Ours(backend, append=True), Ours(backend, append=True, rotary=True))
    ]


def with_pages(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [Ours(backend, page_size) for backend in ours for page_size in (0, 64)]


def first_backend_and_official(ours: Sequence[str], rivals: Sequence[Rival]) -> Sequence[Rival]:
    return [Ours(ours[0]), OfficialCache()]


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
LATENT = tuple(
    replace(point, nheads=nheads, nheads_k=1, headdim=576, headdim_v=512)
    for nheads in (16, 64, 128)
    for point in (Point(64, 4 * K), MAIN, Point(1, 64 * K))
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
    "latent": Figure("Decoding with one latent head", LATENT, with_pages),
    "official": Figure(
        "Decoding against FlashAttention-3",
        (
            *BATCHES,
            UNIFORM,
            Point(1, K),
            *(replace(MAIN, page_size=n) for n in (16, 64)),
            *(replace(MAIN, seqlen_q=n, causal=True) for n in (4, 33, 65, 128)),
        ),
        first_backend_and_official,
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
) -> None:
    """Measures a figure, on the CPU with each number of threads, and saves it.

    SystemExit if our first backend ran at no point, or after saving if the time was not enough for every point.
    """
    on_gpu = device.type == "cuda"
    figure, dtype = FIGURES[name], torch.bfloat16 if on_gpu else DTYPES[arguments.dtype]
    points = figure.points[: max(1, len(figure.points) // 4)] if arguments.quick else figure.points
    contenders = figure.contenders(arguments.backend, select(RIVALS[device.type]))
    tasks = [(threads, point) for threads in ([None] if on_gpu else arguments.threads) for point in points]
    data: list[dict[str, Any]] = []
    for _, (threads, point) in budget.within(tasks, name):
        fixed: dict[str, Any] = {"ceiling_gbps": ceiling}
        if threads is not None:
            torch.set_num_threads(threads)
            fixed = {"threads": threads}
        row = measure_point(point, contenders, device, dtype, arguments.rounds, REP_MS[device.type])
        data.append({"figure": name, **row, **fixed})
    for reason in sorted({f"{rival} cannot run: {why}" for row in data for rival, why in row["unsupported"].items()}):
        print(reason)
    ours, dtype_name = arguments.backend, str(dtype).removeprefix("torch.")
    if not any(ours[0] in row["us"] for row in data):
        raise SystemExit(f"{ours[0]} ran at no point; nothing is written")
    notes = [f"Medians of {arguments.rounds} interleaved rounds; the caches exceed the L2 cache and are used in turn."]
    if ceiling is not None:
        notes.append(f"In the same run a copy reached {ceiling / 1e3:.2f} TB/s, read and written.")
    results.finish(
        f"kvcache_{name}_{dtype_name}" if name == "cpu" else f"kvcache_{name}",
        "bench_kvcache",
        f"{figure.title}, {dtype_name}",
        data,
        arguments,
        sources=[glob for backend in ours for glob in results.SOURCES_OF_CACHE[backend]],
        notes=notes,
        left_out=budget.left_out(len(data), len(tasks)),
    )


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=100.0)
    parser.add_argument("--device", choices=sorted(REP_MS), default="cuda")
    parser.add_argument(
        "--figure", action="extend", nargs="+", choices=list(FIGURES), help="default: all of the device but official"
    )
    parser.add_argument(
        "--backend", action="extend", nargs="+", choices=list(DEVICE_OF), help="ours (default: all of the device)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds at each point (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the CPU (default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device == "cuda"
    device = require_gpu("bench_kvcache") if on_gpu else torch.device("cpu")
    figures = arguments.figure or ([name for name in FIGURES if name not in ("cpu", "official")] if on_gpu else ["cpu"])
    arguments.backend = arguments.backend or [name for name, where in DEVICE_OF.items() if where == device.type]
    torch.manual_seed(0)
    budget = Budget(arguments.seconds)
    ceiling = round(copy_ceiling(device)) if on_gpu else None
    threads, failed = torch.get_num_threads(), []
    for name in figures:
        try:
            measure_figure(name, device, arguments, budget, ceiling)
        except SystemExit as error:
            failed.append(f"{name}: {str(error).removeprefix('bench_kvcache: ')}")
        finally:
            torch.set_num_threads(threads)
    if failed:
        raise SystemExit(f"bench_kvcache: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
