"""The rungs in order: what each runs, what it teaches, how many bytes its loops move; and the measurement of one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from flash_attn_mini.backends import triton
from flash_attn_mini.reference import attention_reference

from . import full_kernels, minimal_cuda, tensor_cores
from .measure import attention_flops, extra_bytes, matmul_tflops, milliseconds
from .naive import naive_attention
from .online_softmax import online_softmax_attention
from .verify import verify

Tensor = torch.Tensor
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """q, k and v are ``[batch, heads, seqlen, headdim]``."""

    batch: int
    heads: int
    seqlen: int
    headdim: int

    @property
    def tensor_elements(self) -> int:
        return self.batch * self.heads * self.seqlen * self.headdim

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.seqlen**2

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.heads} heads, {self.seqlen} queries and keys, head dim {self.headdim}"


GPU_SHAPE = Shape(4, 8, 4096, 128)
CPU_SHAPE = Shape(1, 2, 256, 64)  # several blocks of queries and keys, and fast in Triton's interpreter


# Bytes that loops read and write. Caches are left out: on a GPU the L2 cache serves most repeated reads.


def bytes_of_naive(shape: Shape, itemsize: int) -> float:
    """S written, read and written by the scaling, read by softmax, P written and read; q, k, v and out once."""
    return itemsize * (6.0 * shape.scores + 4 * shape.tensor_elements)


def bytes_of_online(shape: Shape, itemsize: int) -> float:
    """Every operation on a block goes through memory, in float32: ten times a block of scores, six times one of out."""
    blocks = shape.seqlen / 64
    return FLOAT_BYTES * (10.0 * shape.scores + 9 * shape.tensor_elements * blocks) + itemsize * shape.tensor_elements


def bytes_of_v1(shape: Shape, itemsize: int) -> float:
    """k and v once; for each block of keys all of q, and the float32 output, maximum and sum read and written."""
    rounds = -(-shape.seqlen // 64)
    rows = shape.tensor_elements / shape.headdim
    state = 2 * FLOAT_BYTES * (shape.tensor_elements + 2 * rows)
    return itemsize * 3.0 * shape.tensor_elements + rounds * (itemsize * shape.tensor_elements + state)


def bytes_of_v2(shape: Shape, itemsize: int, block_m: int = 64) -> float:
    """q and out once; for each block of queries all of k and v."""
    return itemsize * shape.tensor_elements * (2.0 + 2 * -(-shape.seqlen // block_m))


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: What `--rung` takes.
        source: The file to read.
        lesson: What changed since the rung before, and why it matters.
        unavailable_reason: None when it runs here, else one sentence.
        device: Where its tensors live.
        dtype: Of q, k and v, given the device.
        run: ``run(q, k, v) -> out``, each ``[batch, heads, seqlen, headdim]``.
        bytes_moved: ``bytes_moved(shape, itemsize)``: bytes that its loops read and write.
    """

    name: str
    source: str
    lesson: str
    unavailable_reason: Callable[[], str | None]
    device: Callable[[], torch.device]
    dtype: Callable[[torch.device], torch.dtype]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    bytes_moved: Callable[[Shape, int], float]


def fastest_device() -> torch.device:
    """CUDA where there is a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def triton_device() -> torch.device:
    """The CPU with Triton's interpreter, else CUDA."""
    return torch.device("cpu" if triton.unavailable_reason(torch.device("cpu")) is None else "cuda")


def triton_unavailable_reason() -> str | None:
    """None when Triton's kernels run here, else one sentence."""
    return triton.unavailable_reason(fastest_device())


def on(name: str) -> Callable[[], torch.device]:
    """Always this device."""
    return lambda: torch.device(name)


def half(device: torch.device) -> torch.dtype:
    """Always float16."""
    return torch.float16


def single(device: torch.device) -> torch.dtype:
    """Always float32."""
    return torch.float32


def half_on_gpu(device: torch.device) -> torch.dtype:
    """float16 on a GPU, float32 on a CPU, which has no fast float16."""
    return torch.float16 if device.type == "cuda" else torch.float32


def run_minimal_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel takes a single head: one launch after the other."""
    from .minimal_triton import minimal_triton_attention

    out = torch.empty_like(q)
    for entry in range(q.shape[0]):
        for head in range(q.shape[1]):
            out[entry, head] = minimal_triton_attention(q[entry, head], k[entry, head], v[entry, head])
    return out


def run_v1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are batch entries."""
    from .flash_v1 import flash_attention

    return flash_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)


def run_v2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are batch entries."""
    from .flash_v2 import flash_attention_v2

    return flash_attention_v2(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)


RUNGS: tuple[Rung, ...] = (
    Rung(
        "naive",
        "learn/naive.py",
        "Every score goes through memory several times, so time and memory grow with seqlen².",
        lambda: None,
        fastest_device,
        half_on_gpu,
        naive_attention,
        bytes_of_naive,
    ),
    Rung(
        "online-softmax",
        "learn/online_softmax.py",
        "A running maximum and sum replace the whole row, so the scores of one block are all that exists at a time; "
        "in PyTorch each block still goes through memory, so it saves memory and no time.",
        lambda: None,
        fastest_device,
        half_on_gpu,
        lambda q, k, v: online_softmax_attention(q, k, v)[0],
        bytes_of_online,
    ),
    Rung(
        "minimal-triton",
        "learn/minimal_triton.py",
        "The same loop in one kernel: the block of scores stays on chip; it takes one head, so a launch has few "
        "programs and leaves most of a GPU idle.",
        triton_unavailable_reason,
        triton_device,
        half,
        run_minimal_triton,
        bytes_of_v2,
    ),
    Rung(
        "flash-v1",
        "learn/flash_v1.py",
        "All heads in one launch, keys outside: K and V are read once, but the running output of every query goes "
        "through memory for each block of keys, and a head has one program.",
        triton_unavailable_reason,
        triton_device,
        half,
        run_v1,
        bytes_of_v1,
    ),
    Rung(
        "flash-v2",
        "learn/flash_v2.py",
        "Queries outside: the running output stays in registers and is written once, and each block of queries is a "
        "program of its own, so the GPU is full.",
        triton_unavailable_reason,
        triton_device,
        half,
        run_v2,
        bytes_of_v2,
    ),
    Rung(
        "minimal-cuda",
        "learn/csrc/flash_attn_minimal.cu",
        "The loop with every thread spelled out: shared memory, shuffles and bank conflicts become visible; without "
        "tensor cores it is slower than Triton.",
        minimal_cuda.unavailable_reason,
        on("cuda"),
        single,
        lambda q, k, v: minimal_cuda.minimal_cuda_attention(q, k, v),
        bytes_of_v2,
    ),
    Rung(
        "tensor-cores",
        "learn/csrc/flash_attn_tensor_cores.cu",
        "Both products on tensor cores, P handed on in registers, a swizzle instead of padding; a step still waits "
        "for its loads.",
        tensor_cores.unavailable_reason,
        on("cuda"),
        half,
        lambda q, k, v: tensor_cores.tensor_core_attention(q, k, v),
        bytes_of_v2,
    ),
    Rung(
        "sm80",
        "csrc/sm80/forward/mainloop_fwd.h",
        "cp.async copies the next tile while the tensor cores work on this one, and tiles fit the registers: the "
        "loads disappear behind the products.",
        partial(full_kernels.unavailable_reason, "cuda", 80),
        on("cuda"),
        half,
        partial(full_kernels.library_attention, backend="cuda", arch=80),
        partial(bytes_of_v2, block_m=128),
    ),
    Rung(
        "sm90",
        "csrc/sm90/forward/mainloop_fwd.h",
        "Hopper: one warp has TMA load tiles, the other warps multiply them from shared memory with wgmma, and the "
        "softmax of one runs beside the products of another.",
        partial(full_kernels.unavailable_reason, "cuda", 90),
        on("cuda"),
        half,
        partial(full_kernels.library_attention, backend="cuda"),
        partial(bytes_of_v2, block_m=128),
    ),
    Rung(
        "triton",
        "flash_attn_mini/backends/triton/flash_fwd_kernel.py",
        "Rung 5 with tuned tiles, TMA loads, and separate steps with and without a mask: what a page of Triton "
        "reaches when the compiler does the pipelining.",
        partial(full_kernels.unavailable_reason, "triton"),
        triton_device,
        half,
        partial(full_kernels.library_attention, backend="triton"),
        partial(bytes_of_v2, block_m=128),
    ),
    Rung(
        "cpu",
        "csrc/cpu/row_block_forward.h",
        "The same loop on a CPU: the tile lies in the caches, the products use vector instructions.",
        partial(full_kernels.unavailable_reason, "cpu"),
        on("cpu"),
        single,
        partial(full_kernels.library_attention, backend="cpu"),
        bytes_of_v2,
    ),
)
BY_NAME = {rung.name: rung for rung in RUNGS}


def shape_on(device: torch.device) -> Shape:
    """The shape of the table."""
    return GPU_SHAPE if device.type == "cuda" else CPU_SHAPE


@cache
def inputs(shape: Shape, device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k and v, random normal, rounded to float16; and their output in float64."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.batch, shape.heads, shape.seqlen, shape.headdim)
    q, k, v = (torch.randn(size, generator=generator, device=device).half() for _ in range(3))
    expected = torch.empty(size, dtype=torch.float64, device=device)
    for entry in range(shape.batch):  # one at a time: the reference keeps all scores
        for head in range(shape.heads):
            one = (x[entry : entry + 1, head : head + 1].transpose(1, 2) for x in (q, k, v))
            expected[entry, head] = attention_reference(*one)[0][0, :, 0]
    return (q, k, v), expected


def measure(rung: Rung, seconds: float = 0.3) -> dict[str, Any]:
    """One row of the table.

    Args:
        rung: An element of `RUNGS`.
        seconds: Time to spend on repeated calls, and as much on a matrix product right after them.

    Returns:
        The rung's name, source and lesson; with "reason" alone if it does not run here, else the measured values. The
        values of the matrix product, which has the dtype and the device of the rung, are None for an interpreted rung.
    """
    row: dict[str, Any] = {"rung": rung.name, "source": rung.source, "lesson": rung.lesson}
    reason = rung.unavailable_reason()
    if reason is not None:
        return {**row, "reason": reason}
    device = rung.device()
    dtype = rung.dtype(device)
    shape = shape_on(device)
    tensors, expected = inputs(shape, device)
    q, k, v = (x.to(dtype) for x in tensors)
    is_interpreted = device.type == "cpu" and rung.device is triton_device
    start = time.perf_counter()
    report = verify(rung.run(q, k, v), expected)
    if is_interpreted:  # slow: the call of the check counts
        times = [(time.perf_counter() - start) * 1e3]
        while sum(times) + times[-1] < seconds * 1e3:
            start = time.perf_counter()
            rung.run(q, k, v)
            times.append((time.perf_counter() - start) * 1e3)
        ms = statistics.median(times)
    else:
        ms = milliseconds(lambda: rung.run(q, k, v), device, seconds)
    moved = rung.bytes_moved(shape, q.element_size())
    flops = attention_flops(shape.batch * shape.heads, shape.seqlen, shape.seqlen, shape.headdim)
    tflops = flops / ms / 1e9
    matmul = None if is_interpreted else matmul_tflops(device, dtype, seconds)  # the interpreter's speed says nothing
    extra = extra_bytes(lambda: rung.run(q, k, v), device)
    return {
        **row,
        "device": device.type,
        "interpreted": is_interpreted,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": shape.batch,
        "heads": shape.heads,
        "seqlen": shape.seqlen,
        "headdim": shape.headdim,
        "ms": float(f"{ms:.4g}"),
        "tflops": float(f"{tflops:.4g}"),
        "matmul_tflops": matmul and float(f"{matmul:.4g}"),
        "matmul_percent": matmul and float(f"{100 * tflops / matmul:.3g}"),
        "gbps": float(f"{moved / ms / 1e6:.4g}"),
        "bytes_moved": int(moved),
        "extra_bytes": extra,
        "extra_over_q": float(f"{extra / q.nbytes:.3g}"),
        "max_error": float(f"{report.max_abs:.3g}"),
        "mean_error": float(f"{report.mean_abs:.3g}"),
        "passed": report.passed,
    }
