"""Time and memory of many short sequences: forward, and forward with backward, and PyTorch's kernels in the same run.

The shapes: residues of a protein model, patches in windows as Swin's (without its bias), and 64 tokens with heads of
64. `general kernels` are ours that take all other calls (FLASH_ATTN_MINI_ARCH). Memory is the peak above the inputs, in
units of q.

python -m benchmarks.bench_short                  the cuda backend, bf16
python -m benchmarks.bench_short --grid tiny      the cpu backend on a shape that takes no time
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.methods import (
    DISAGREEMENT,
    Budget,
    check_close,
    interleave,
    ratio,
    require_gpu,
    timer_for,
)
from benchmarks.rivals import Call, ForwardOrBoth, as_sdpa_takes_them, kernels_of
from flash_attn_mini import flash_attn_func

OURS, GENERAL = "ours", "general kernels"
MAX_BATCH_OF_FLASH = 16384


@dataclass(frozen=True)
class Shape:
    """Self-attention of `batch` sequences."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    causal: bool = False


GRIDS = {
    "perf": (Shape(28800, 15, 16, 72), Shape(8192, 49, 12, 32), Shape(4096, 64, 16, 64), Shape(4096, 64, 16, 64, True)),
    "tiny": (Shape(3, 15, 2, 24),),
}


class Contender(ForwardOrBoth):
    """An implementation, in one direction. kernel: of SDPA; None: ours. arch: of our general kernels."""

    def __init__(
        self, who: str, direction: str, backend: str, kernel: SDPBackend | None = None, arch: int | None = None
    ) -> None:
        super().__init__(who, self.attend, direction == "both")
        self.who, self.backend, self.kernel, self.arch, self.causal = who, backend, kernel, arch, False
        self.is_sdpa = who not in (OURS, GENERAL)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.is_sdpa:
            return flash_attn_func(q, k, v, causal=self.causal, backend=self.backend)
        with sdpa_kernel(self.kernel) if self.kernel is not None else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(*as_sdpa_takes_them(q, k, v, self.causal), is_causal=self.causal)
        return out.transpose(1, 2)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with kernels_of(self.arch), super().active():
            yield

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Call:
        self.causal = causal
        return super().bind(q, k, v)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        if self.kernel == SDPBackend.FLASH_ATTENTION and q.shape[0] > MAX_BATCH_OF_FLASH:
            return "PyTorch's kernel ends in an illegal memory access (torch 2.11, batch 28,800)"
        return super().unsupported(q, k, v, causal)


def contenders_of(device: torch.device, direction: str) -> list[Contender]:
    if device.type == "cpu":
        return [Contender(OURS, direction, "cpu"), Contender("SDPA", direction, "")]
    arch = 90 if torch.cuda.get_device_capability(device)[0] == 9 else 80
    backends = {
        "FLASH_ATTENTION": SDPBackend.FLASH_ATTENTION,
        "EFFICIENT_ATTENTION": SDPBackend.EFFICIENT_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
    }
    return [
        Contender(OURS, direction, "cuda"),
        Contender(GENERAL, direction, "cuda", arch=arch),
        *(Contender(name, direction, "", kernel) for name, kernel in backends.items()),
    ]


def peak_of(call: Call, q: Tensor) -> float | None:
    """The largest memory of a call above what was allocated before, in units of q. None on the CPU."""
    if not q.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / (q.numel() * q.element_size()), 2)


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int, budget: Budget, left: int) -> Any:
    """The rows of one shape, one for each direction. left: shapes and directions that share the rest of the budget."""
    sizes = (shape.batch, shape.seqlen, shape.nheads, shape.headdim)
    q, k, v = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(3))
    for direction in ("forward", "both"):
        calls: dict[Contender, Call] = {}
        peaks: dict[str, float | None] = {}
        expected: tuple[Tensor, ...] = ()
        left_out = {}
        for contender in contenders_of(device, direction):
            why = contender.unsupported(q, k, v, shape.causal)
            if why is not None:
                left_out[contender.who] = why
                continue
            call = contender.bind(q, k, v, shape.causal)
            with contender.active():
                peaks[contender.who] = peak_of(call, q)
                found = contender.outputs(call())
            expected = expected or found
            check_close(f"{contender.name} and {OURS}", found, expected, DISAGREEMENT)
            del found
            calls[contender] = call
        del expected
        rep_ms = budget.rep_ms(left * len(calls) * rounds, device.type)
        timings = interleave(calls, timer_for(device), rounds=rounds, rep_ms=rep_ms)
        left -= 1
        mine = next(timings[contender.name] for contender in calls if contender.who == OURS)
        yield {
            **asdict(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "direction": direction,
            "ms": {contender.who: round(timings[contender.name].ms, 4) for contender in calls},
            "ratio": {contender.who: round(ratio(mine, timings[contender.name]), 3) for contender in calls},
            "peak": peaks,
            "left_out": left_out,
        }


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=45.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    arguments = parser.parse_args(argv)
    is_tiny = arguments.grid == "tiny"
    device = torch.device("cpu") if is_tiny else require_gpu("bench_short")
    dtype = torch.float32 if is_tiny else torch.bfloat16
    torch.manual_seed(0)
    budget, shapes = Budget(arguments.seconds), GRIDS[arguments.grid]
    data = []
    for i, shape in enumerate(shapes):
        data += measure(shape, device, dtype, arguments.rounds, budget, 2 * (len(shapes) - i))
    results.finish(
        f"short_{device.type}",
        "bench_short",
        f"Short sequences on the {device.type} backend",
        data,
        arguments,
        sources=results.SOURCES_OF_BACKEND[device.type],
        notes=[
            f"Medians of {arguments.rounds} interleaved rounds in random order.",
            "ratio: their time ÷ ours. peak: memory above the inputs, in units of q.",
        ],
    )


if __name__ == "__main__":
    main()
