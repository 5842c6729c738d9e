"""Time of calls with key_ranges, compared with causal=True and with FlexAttention on the same mask in the same run.

TFLOP/s       of the pairs that the mask shows: 4 FLOPs for each pair and feature in a forward, 10 in a backward
packed        without key_ranges: the same tokens as packed sequences, by flash_attn_varlen_func
÷ causal      TFLOP/s ÷ those of causal=True
÷ FlexAttention   its time ÷ ours, for forward and backward together; compiled, with its own block mask

python -m benchmarks.bench_masks                   the cuda backend, bf16
python -m benchmarks.bench_masks --headdim 64
python -m benchmarks.bench_masks --no-flex         without FlexAttention, whose compilation takes minutes
python -m benchmarks.bench_masks --grid tiny       the cpu backend on a shape that takes no time
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.methods import (
    BACKWARD_WORK,
    DISAGREEMENT,
    Budget,
    check_close,
    interleave,
    require_gpu,
    timer_for,
)
from benchmarks.rivals import Call, ForwardOrBoth, Rival, as_sdpa_takes_them
from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, masks

CAUSAL = "causal"
FLEX = "FlexAttention"


@dataclass(frozen=True)
class Shape:
    """One sequence, and the lengths that its masks are made of."""

    device: str
    dtype: torch.dtype
    backend: str
    seqlen: int
    features: int  # of all heads
    mean_document: int
    chunk: int
    num_global: int
    window: int


GRIDS = {
    "perf": Shape("cuda", torch.bfloat16, "cuda", 16384, 2048, 2048, 2048, 256, 1024),
    "tiny": Shape("cpu", torch.float32, "cpu", 192, 32, 32, 48, 5, 20),
}


class Mask(NamedTuple):
    """A mask as key_ranges with or without causal, and as the function that FlexAttention takes.

    With cu_seqlens in place of key_ranges it is one of packed sequences.
    """

    name: str
    key_ranges: Tensor | None
    causal: bool
    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key
    cu_seqlens: Tensor | None = None


def draw_documents(shape: Shape) -> list[int]:
    """The first token of each document and the end: lengths that are random and the same in every run."""
    draw = random.Random(0)
    count = shape.seqlen // shape.mean_document
    return [0, *sorted(draw.sample(range(1, shape.seqlen), count - 1)), shape.seqlen]


def masks_of(shape: Shape) -> list[Mask]:
    """The masks of a run: causal=True first."""
    device, seqlen, prefix = shape.device, shape.seqlen, shape.seqlen // 4
    begins = torch.tensor(draw_documents(shape), dtype=torch.int32, device=device)
    document = torch.bucketize(torch.arange(seqlen, device=device), begins[1:], right=True)
    of_documents = masks.documents(cu_seqlens=begins, seqlen=seqlen)
    chunks = torch.arange(0, seqlen + 1, shape.chunk, dtype=torch.int32, device=device)

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return document[i] == document[j]

    def earlier_in_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i)

    def earlier_in_chunk(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i // shape.chunk == j // shape.chunk) & (j <= i)

    return [
        Mask(CAUSAL, None, True, lambda b, h, i, j: j <= i),
        Mask("documents", of_documents, False, same_document),
        Mask("documents, packed", None, False, same_document, begins),
        Mask("documents, causal", of_documents, True, earlier_in_document),
        Mask("documents, causal, packed", None, True, earlier_in_document, begins),
        Mask(
            "prefix-LM",
            masks.prefix_lm(torch.tensor([prefix], device=device), seqlen),
            False,
            lambda b, h, i, j: (j < prefix) | (j <= i),
        ),
        Mask("chunks, causal", masks.chunked(seqlen, shape.chunk, device=device), True, earlier_in_chunk),
        Mask("chunks, causal, packed", None, True, earlier_in_chunk, chunks),
        Mask(
            "global and window, causal",
            masks.global_and_window(seqlen, seqlen, shape.num_global, shape.window, device=device),
            True,
            lambda b, h, i, j: ((j < shape.num_global) | (i - j <= shape.window)) & (j <= i),
        ),
    ]


def visible_pairs(mask: Mask, shape: Shape) -> int:
    """The pairs of a query and a key that the mask shows."""
    zero, keys, pairs = torch.zeros((), dtype=torch.int64), torch.arange(shape.seqlen, device=shape.device), 0
    for first in range(0, shape.seqlen, 1024):
        queries = torch.arange(first, min(first + 1024, shape.seqlen), device=shape.device)
        pairs += int(mask.visible(zero, zero, queries[:, None], keys[None, :]).sum())
    return pairs


def ours(shape: Shape, mask: Mask) -> Callable[..., Tensor]:
    """Our forward with the mask."""
    if mask.cu_seqlens is None:
        return partial(flash_attn_func, causal=mask.causal, key_ranges=mask.key_ranges, backend=shape.backend)
    cu_seqlens, longest = mask.cu_seqlens, int(mask.cu_seqlens.diff().max())

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        out: Tensor = flash_attn_varlen_func(q[0], k[0], v[0], *lengths, causal=mask.causal, backend=shape.backend)
        return out[None]

    return forward


def of_flex(shape: Shape, mask: Mask) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with the mask as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # each mask compiles the same functions again
    blocks = create_block_mask(mask.visible, None, None, shape.seqlen, shape.seqlen, device=shape.device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(*as_sdpa_takes_them(q, k, v, False), block_mask=blocks)
        return out.transpose(1, 2)

    return forward


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="perf")
    parser.add_argument("--headdim", type=int, help="default: 128, or 16 on the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    arguments = parser.parse_args(argv)
    shape = GRIDS[arguments.grid]
    if shape.device == "cuda":
        require_gpu("bench_masks")
    headdim = arguments.headdim or (128 if shape.device == "cuda" else 16)
    nheads, device = shape.features // headdim, torch.device(shape.device)
    budget = Budget(arguments.seconds)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, shape.seqlen, nheads, headdim, device=device, dtype=shape.dtype).unbind(0)

    calls: dict[Rival, Call] = {}
    names: dict[tuple[str, str, bool], str] = {}
    all_masks = masks_of(shape)
    with_flex = shape.device == "cuda" and not arguments.no_flex
    for mask in all_masks:
        contenders = {"ours": ours(shape, mask)}
        if with_flex and mask.key_ranges is not None:
            contenders[FLEX] = of_flex(shape, mask)
            with torch.no_grad():
                found, expected = (forward(q, k, v) for forward in contenders.values())
            check_close(f"{FLEX} and ours with the mask {mask.name}", [found], [expected], DISAGREEMENT)
        for who, forward in contenders.items():
            for backward in (False, True):
                rival = ForwardOrBoth(f"{who}, {mask.name}", forward, backward)
                calls[rival] = rival.bind(q, k, v)
                names[mask.name, who, backward] = rival.name
    rep_ms = budget.rep_ms(len(calls) * arguments.rounds, shape.device)
    timings = interleave(calls, timer_for(device), rounds=arguments.rounds, rep_ms=rep_ms)

    data: list[dict[str, Any]] = []
    speeds: dict[tuple[str, str], float] = {}  # TFLOP/s of ours
    for mask in all_masks:
        flops = 4.0 * visible_pairs(mask, shape) * nheads * headdim
        row: dict[str, Any] = {
            "mask": mask.name,
            "seqlen": shape.seqlen,
            "nheads": nheads,
            "headdim": headdim,
            "dtype": str(shape.dtype).removeprefix("torch."),
        }
        for direction, backward in (("forward", False), ("both", True)):
            ms = timings[names[mask.name, "ours", backward]].ms
            speed = flops * (1.0 + BACKWARD_WORK * backward) / ms / 1e9
            speeds[mask.name, direction] = speed
            flex = names.get((mask.name, FLEX, backward))
            row[f"{direction}_ms"] = round(ms, 4)
            row[f"{direction}_tflops"] = float(f"{speed:.4g}")
            row[f"{direction}_to_causal"] = round(speed / speeds[CAUSAL, direction], 3)
            row[f"{direction}_to_flex"] = round(timings[flex].ms / ms, 3) if flex else None
        data.append(row)
    results.finish(
        f"masks_{shape.backend}_d{headdim}",
        "bench_masks",
        f"Masks as key_ranges on the {shape.backend} backend, head dim {headdim}",
        data,
        arguments,
        sources=results.SOURCES_OF_BACKEND[shape.backend],
        notes=[f"Medians of {arguments.rounds} interleaved rounds in random order. TFLOP/s count the visible pairs."],
        left_out=[],
    )


if __name__ == "__main__":
    main()
