"""Two ideas that did not help (learn/negative_results.md), measured in Triton: fp16, 32 heads. Needs a GPU.

  python -m learn.bench.negative     K stored transposed in advance; warp specialisation

The results are negative_transposed_k and negative_warp_specialization. Each attempt to specialise runs in a process of
its own, because the compiler may end it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import Budget, attention_flops, require_gpu, time_cuda
from learn.bench import report

HEADS = 32
LENGTHS = (1024, 4096, 16384)
HEADDIMS = (64, 128)
REP_MS = 30.0
ATTEMPT_SECONDS = 60.0
ALLOWED = 2e-2  # largest error, as a share of the largest value


def inputs(seqlen: int, headdim: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(HEADS, seqlen, headdim, device="cuda").half() for _ in range(3)]


def share_of_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Largest difference from PyTorch's attention, as a share of the largest value; NaN if there is one."""
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0].float()
    return ((out.float() - expected).abs().max() / expected.abs().max()).item()


def transposed_rows(lengths: tuple[int, ...], budget: Budget) -> list[dict[str, Any]]:
    """K as it is and transposed in global memory, interleaved, and the time of the transposition."""
    from learn.bench.negative_kernels import attention

    rows = []
    for headdim in HEADDIMS:
        for seqlen in lengths:
            if budget.left() <= 0:
                break
            q, k, v = inputs(seqlen, headdim)
            k_t = k.mT.contiguous()
            calls: dict[str, Callable[[], Tensor]] = {
                "plain": partial(attention, q, k, v),
                "transposed": partial(attention, q, k_t, v, k_transposed=True),
                "transposition": k.mT.contiguous,
            }
            for name in ("plain", "transposed"):
                share = share_of_error(calls[name](), q, k, v)
                if not share <= ALLOWED:
                    raise RuntimeError(f"negative: {name} is off by {share:.3g} of the largest value")
            rounds = [{name: time_cuda(call, REP_MS) for name, call in calls.items()} for _ in range(3)]
            ms = {name: sorted(r[name] for r in rounds)[1] for name in calls}
            rows.append(
                {
                    "head dim": headdim,
                    "seqlen": seqlen,
                    "K as it is, ms": float(f"{ms['plain']:.4g}"),
                    "K transposed in advance, ms": float(f"{ms['transposed']:.4g}"),
                    "its transposition, ms": float(f"{ms['transposition']:.4g}"),
                    "as it is ÷ transposed": round(ms["plain"] / ms["transposed"], 2),
                }
            )
    return rows


def attempt(headdim: int, seqlen: int) -> dict[str, Any]:
    """Times one kernel with warp specialisation; for the child process."""
    from learn.bench.negative_kernels import attention

    q, k, v = inputs(seqlen, headdim)
    call = partial(attention, q, k, v, specialize=True)
    share = share_of_error(call(), q, k, v)
    return {"share": share, "ms": time_cuda(call, REP_MS)}


def outcome(run: subprocess.CompletedProcess[str]) -> tuple[str, float | None]:
    """What became of an attempt, in words, and its milliseconds if the result was right."""
    try:
        answer = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line.strip() for line in run.stderr.splitlines() if "rror" in line]
        return f"ended with status {run.returncode}: {lines[-1][:120] if lines else 'no message'}", None
    share = answer["share"]
    if share != share:
        return "compiled; the output is NaN", None
    if share > ALLOWED:
        return f"compiled; off by {share:.2g} of the largest value", None
    return "right", float(answer["ms"])


def specialized_rows(seqlen: int) -> list[dict[str, Any]]:
    """The kernel without and with warp specialisation."""
    from learn.bench.negative_kernels import attention

    rows = []
    for headdim in HEADDIMS:
        q, k, v = inputs(seqlen, headdim)
        plain = time_cuda(partial(attention, q, k, v), REP_MS)
        command = [sys.executable, "-m", "learn.bench.negative", "--attempt", f"{headdim},{seqlen}"]
        try:
            run = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, timeout=ATTEMPT_SECONDS)
            words, ms = outcome(run)
        except subprocess.TimeoutExpired:
            words, ms = f"not done after {ATTEMPT_SECONDS:.0f} s", None
        tflop = attention_flops(1, HEADS, seqlen, seqlen, headdim, False) / 1e12
        rows.append(
            {
                "head dim": headdim,
                "plain, TFLOP/s": round(tflop / plain * 1e3),
                "specialised, TFLOP/s": "–" if ms is None else str(round(tflop / ms * 1e3)),
                "outcome": words,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = report.parser_for(__doc__, seconds=30.0)
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    require_gpu("negative")
    if arguments.attempt:
        print(json.dumps(attempt(*map(int, arguments.attempt.split(",")))))
        return
    lengths, budget = LENGTHS[:1] if arguments.quick else LENGTHS, Budget(arguments.seconds)
    specialized = specialized_rows(lengths[-1])
    transposed = transposed_rows(lengths, budget)
    for name, title, rows, wanted in (
        (
            "warp_specialization",
            f"Triton's warp specialisation: forward, fp16, {HEADS} heads, {lengths[-1]} tokens",
            specialized,
            len(HEADDIMS),
        ),
        (
            "transposed_k",
            f"K stored transposed in advance: forward, fp16, {HEADS} heads, medians of three interleaved rounds",
            transposed,
            len(HEADDIMS) * len(lengths),
        ),
    ):
        report.finish(
            f"negative_{name}",
            benchmark="negative",
            title=title,
            data=rows,
            arguments=arguments,
            complete=len(rows) == wanted,
        )


if __name__ == "__main__":
    main()
