"""The tutorials' grid: batch 4, 8 heads, forward, backward and forward + backward, naive attention to the CUDA backend.

  python -m learn.bench.grid                 on a GPU: fp16, head dims 64 and 128, 256 to 16,384 tokens
  python -m learn.bench.grid --device cpu    a trial run of a few small shapes

Gradients come from autograd, as a user's do. A contender that runs out of memory is noted with that reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.methods import BACKWARD_WORK, Budget, attention_flops, require_gpu, timer_for
from learn.bench import report

PASSES = {"forward": 1.0, "backward": BACKWARD_WORK, "forward + backward": 1.0 + BACKWARD_WORK}  # work
OUT_OF_MEMORY = "out of memory"
CHECKED_SEQLEN = 2048  # up to here the outputs are compared
DISAGREEMENT = 2e-2
Function = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Grid:
    """Shapes and contenders; the last contender is the one that the others are checked against."""

    device: str
    dtype: torch.dtype
    batch: int
    nheads: int
    headdims: tuple[int, ...]
    seqlens: tuple[int, ...]
    contenders: tuple[str, ...]


LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
GRIDS = {
    "cuda": Grid("cuda", torch.float16, 4, 8, (64, 128), LENGTHS, ("naive", "triton", "cuda", "SDPA")),
    "cpu": Grid("cpu", torch.float32, 1, 2, (16, 32), (32, 64), ("naive", "cpu", "SDPA")),
}


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from learn import naive_attention

    return naive_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    inputs = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.scaled_dot_product_attention(*inputs, is_causal=causal).transpose(1, 2)


def library(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn_mini import flash_attn_func

    out = flash_attn_func(q, k, v, causal=causal, backend=backend)
    assert isinstance(out, Tensor)
    return out


def function_of(name: str) -> Function:
    """The implementation of a contender: ``function(q, k, v, causal)`` on ``[batch, seqlen, heads, headdim]``."""
    return {"naive": naive, "SDPA": sdpa}.get(name, partial(library, name))


def calls_of(function: Function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> dict[str, Any]:
    """A call for each pass. The call that runs only the backward holds a graph."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = partial(function, q, k, v, causal)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    out = attend()
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "forward + backward": lambda: torch.autograd.grad(attend(), leaves, dout),
    }


def check(name: str, got: Tensor, expected: Tensor) -> None:
    """RuntimeError if two outputs differ by more than rounding."""
    share = ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    if not share <= DISAGREEMENT:  # NaN too
        raise RuntimeError(f"{name} and SDPA disagree by up to {share:.3g} of the largest value")


def measure_point(grid: Grid, seqlen: int, headdim: int, causal: bool, rep_ms: float) -> list[dict[str, Any]]:
    """A row for each pass."""
    device = torch.device(grid.device)
    shape = (grid.batch, seqlen, grid.nheads, headdim)
    q, k, v, dout = (torch.randn(shape, device=device).to(grid.dtype) for _ in range(4))
    measure = timer_for(device)
    times: dict[str, dict[str, float]] = {name: {} for name in PASSES}
    failed: dict[str, dict[str, str]] = {name: {} for name in PASSES}
    with torch.no_grad():
        expected = sdpa(q, k, v, causal) if seqlen <= CHECKED_SEQLEN else None
    for name in grid.contenders:
        function = function_of(name)
        try:
            if expected is not None:
                with torch.no_grad():
                    check(name, function(q, k, v, causal), expected)
            for which, call in calls_of(function, q, k, v, dout, causal).items():
                times[which][name] = measure(call, rep_ms)
        except torch.cuda.OutOfMemoryError:
            for which in PASSES:
                if name not in times[which]:
                    failed[which][name] = OUT_OF_MEMORY
        if any(failed.values()) and device.type == "cuda":
            torch.cuda.empty_cache()  # here, where no exception holds tensors any more
    flops = attention_flops(grid.batch, grid.nheads, seqlen, seqlen, headdim, causal)
    return [
        {
            "pass": which,
            "batch": grid.batch,
            "nheads": grid.nheads,
            "nheads_k": grid.nheads,
            "seqlen": seqlen,
            "headdim": headdim,
            "causal": causal,
            "ms": {name: float(f"{ms:.4g}") for name, ms in times[which].items()},
            "tflops": {name: float(f"{work * flops / ms / 1e9:.4g}") for name, ms in times[which].items()},
            "unsupported": failed[which],
        }
        for which, work in PASSES.items()
    ]


def main(argv: list[str] | None = None) -> None:
    parser = report.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--device", choices=sorted(GRIDS), default="cuda")
    parser.add_argument("--tune", action="store_true", help="let the Triton backend time its tiles (minutes)")
    arguments = parser.parse_args(argv)
    grid = GRIDS[arguments.device]
    if grid.device == "cuda":
        require_gpu("grid")
    if not arguments.tune:
        os.environ["FLASH_ATTN_MINI_TRITON_AUTOTUNE"] = "0"
    seqlens = grid.seqlens[1::3] if arguments.quick and len(grid.seqlens) > 3 else grid.seqlens
    points = [(s, d, c) for s in seqlens for d in grid.headdims for c in (False, True)]  # long ones last
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    data: list[dict[str, Any]] = []
    measured = 0
    for number, point in budget.within(points, "grid"):
        share = budget.share((len(points) - number) * len(grid.contenders) * len(PASSES))
        data += measure_point(grid, *point, rep_ms=min(40.0, max(4.0, share / 2 - 20.0)))
        measured = number + 1
    notes = ["Median times of single calls, the host's work included; gradients by autograd."]
    if grid.device == "cuda" and not arguments.tune:
        notes.append("The Triton backend takes the first tile of its table, without timing.")
    report.finish(
        f"grid_{grid.device}",
        benchmark="grid",
        title=f"Batch {grid.batch}, {grid.nheads} heads, {str(grid.dtype).removeprefix('torch.')}",
        data=sorted(data, key=lambda row: (list(PASSES).index(row["pass"]), row["headdim"], row["causal"])),
        arguments=arguments,
        sources=report.SOURCES[grid.device],
        notes=notes,
        left_out=budget.left_out(measured, len(points)),
    )


if __name__ == "__main__":
    main()
