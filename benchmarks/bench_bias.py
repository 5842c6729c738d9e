"""Time of calls with attn_bias, compared with PyTorch's EFFICIENT_ATTENTION kernel and with no bias, in the same run.

full bias      [1, nheads, seqlen, seqlen] in the dtype of q, whose gradient is computed: TFLOP/s, and theirs ÷ ours
padding mask   [batch, 1, 1, seqlen], bool and in the dtype of q: the time of a call ÷ that of one without a bias

TFLOP/s count 4 FLOPs for each pair and feature in a forward, 10 in a backward. The two products that the gradient of
the bias takes besides are not counted.

python -m benchmarks.bench_bias                   the cuda backend, bf16
python -m benchmarks.bench_bias --headdim 64
python -m benchmarks.bench_bias --flex            with FlexAttention, whose compilation takes minutes; forward only
python -m benchmarks.bench_bias --grid tiny       the cpu backend on a shape that takes no time
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.methods import (
    BACKWARD_WORK,
    DISAGREEMENT,
    Budget,
    attention_flops,
    check_close,
    interleave,
    require_gpu,
    timer_for,
)
from benchmarks.rivals import Call, ForwardOrBoth, Rival, as_sdpa_takes_them
from flash_attn_mini import flash_attn_func

OURS, EFFICIENT, FLEX = "ours", "EFFICIENT_ATTENTION", "FlexAttention"
FULL, NO_BIAS = "full bias", "no bias"
PADDING = ("padding mask", "bool padding mask")

Forward = Callable[..., Tensor]  # q, k, v and bias


@dataclass(frozen=True)
class Shape:
    """The tensors of a run."""

    device: str
    dtype: torch.dtype
    backend: str
    batch: int
    seqlen: int
    features: int  # of all heads


GRIDS = {
    "perf": Shape("cuda", torch.bfloat16, "cuda", 4, 4096, 2048),
    "tiny": Shape("cpu", torch.float32, "cpu", 2, 48, 32),
}


def ours(shape: Shape) -> Forward:
    """Our forward."""
    return lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias, backend=shape.backend)


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's memory-efficient kernel; on the CPU the kernel that PyTorch chooses."""
    chosen = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if q.is_cuda else contextlib.nullcontext()
    with chosen:
        out = F.scaled_dot_product_attention(*as_sdpa_takes_them(q, k, v, False), attn_mask=bias)
    return out.transpose(1, 2)


def of_flex() -> Forward:
    """FlexAttention, compiled, with the full bias."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = compiled(
            *as_sdpa_takes_them(q, k, v, False), score_mod=lambda score, b, h, i, j: score + bias[0, h, i, j]
        )
        return out.transpose(1, 2)

    return forward


def biases_of(shape: Shape, nheads: int) -> dict[str, Tensor | None]:
    """The biases of a run. The padding is between none and half of the keys."""
    lengths = torch.linspace(shape.seqlen // 2, shape.seqlen, shape.batch, device=shape.device).long()
    is_valid = (torch.arange(shape.seqlen, device=shape.device) < lengths[:, None])[:, None, None]
    as_values = torch.zeros(is_valid.shape, dtype=shape.dtype, device=shape.device).masked_fill(~is_valid, -torch.inf)
    full = torch.randn(1, nheads, shape.seqlen, shape.seqlen, device=shape.device, dtype=shape.dtype)
    return {FULL: full, NO_BIAS: None, PADDING[0]: as_values, PADDING[1]: is_valid}


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=90.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--headdim", type=int, help="default: 128, or 16 on the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--flex", action="store_true", help="with FlexAttention, forward only")
    arguments = parser.parse_args(argv)
    shape = GRIDS[arguments.grid]
    if shape.device == "cuda":
        require_gpu("bench_bias")
    headdim = arguments.headdim or (128 if shape.device == "cuda" else 16)
    nheads, device = shape.features // headdim, torch.device(shape.device)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    sizes = (shape.batch, shape.seqlen, nheads, headdim)
    q, k, v = (torch.randn(sizes, device=device, dtype=shape.dtype) for _ in range(3))
    biases = biases_of(shape, nheads)

    calls: dict[Rival, Call] = {}
    names: dict[tuple[str, str, bool], str] = {}
    for name, bias in biases.items():
        contenders: dict[str, Forward] = {OURS: ours(shape)}
        if name == FULL:
            contenders[EFFICIENT] = efficient
            if arguments.flex:
                contenders[FLEX] = of_flex()
        outputs: dict[tuple[str, bool], tuple[Tensor, ...]] = {}
        for who, forward in contenders.items():
            for backward in (False,) if who == FLEX else (False, True):
                given = bias.detach().requires_grad_() if backward and name == FULL and bias is not None else bias
                others = [] if given is None else [given]
                rival = ForwardOrBoth(f"{who}, {name}", partial(forward, bias=given), backward, others)
                calls[rival] = rival.bind(q, k, v)
                names[name, who, backward] = rival.name
                with rival.active():
                    outputs[who, backward] = rival.outputs(calls[rival]())
        for (who, backward), found in outputs.items():
            check_close(f"{who} and ours with {name}", found, outputs[OURS, backward], DISAGREEMENT)
        del outputs
    rep_ms = budget.rep_ms(len(calls) * arguments.rounds, shape.device)
    timings = interleave(calls, timer_for(device), rounds=arguments.rounds, rep_ms=rep_ms)

    data: list[dict[str, Any]] = []
    flops = attention_flops(shape.batch, nheads, shape.seqlen, shape.seqlen, headdim, False)
    for name in biases:
        row: dict[str, Any] = {
            "bias": name,
            "batch": shape.batch,
            "seqlen": shape.seqlen,
            "nheads": nheads,
            "headdim": headdim,
            "dtype": str(shape.dtype).removeprefix("torch."),
        }
        for direction, backward in (("forward", False), ("both", True)):
            ms = timings[names[name, OURS, backward]].ms
            without = timings[names[NO_BIAS, OURS, backward]].ms
            row[f"{direction}_ms"] = round(ms, 4)
            row[f"{direction}_tflops"] = float(f"{flops * (1.0 + BACKWARD_WORK * backward) / ms / 1e9:.4g}")
            row[f"{direction}_to_no_bias"] = round(ms / without, 3)
            for who, short in ((EFFICIENT, "efficient"), (FLEX, "flex")):
                theirs = names.get((name, who, backward))
                row[f"{direction}_to_{short}"] = round(timings[theirs].ms / ms, 3) if theirs else None
        data.append(row)
    results.finish(
        f"bias_{shape.backend}_d{headdim}",
        "bench_bias",
        f"attn_bias on the {shape.backend} backend, head dim {headdim}",
        data,
        arguments,
        sources=results.SOURCES_OF_BACKEND[shape.backend],
        notes=[
            f"Medians of {arguments.rounds} interleaved rounds in random order.",
            "_to_efficient and _to_flex: their time ÷ ours. _to_no_bias: ours ÷ that of the same call without a bias.",
        ],
        left_out=[],
    )


if __name__ == "__main__":
    main()
