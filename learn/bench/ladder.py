"""The learning path: the rungs of the ladder, and the experiments that belong to them (learn/tutorial.md).

  python -m learn.bench.ladder       on a GPU: every rung; elsewhere: what a CPU runs, Triton in its interpreter

The results are ladder_DEVICE, ladder_lengths_DEVICE (the minimal Triton rung over N), ladder_errors_DEVICE and
ladder_versions_DEVICE (v1 against v2), and on a GPU bank_conflicts (the minimal CUDA kernel without padding).
"""

from __future__ import annotations

import os

import torch

from benchmarks.methods import Budget
from learn.bench import report


def main(argv: list[str] | None = None) -> None:
    parser = report.parser_for(__doc__, seconds=40.0)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
        torch.set_num_threads(1)
    from learn import experiments
    from learn.rungs import RUNGS, fastest_device, measure, shape_on, triton_unavailable_reason

    budget = Budget(arguments.seconds)
    device = fastest_device()
    seconds = 0.05 if arguments.quick else 0.5 if device.type == "cuda" else 2.0
    rows = [measure(rung, seconds) for rung in RUNGS]
    report.finish(
        f"ladder_{device.type}",
        benchmark="ladder",
        title=f"The ladder, forward, full attention, {shape_on(device)}",
        data=rows,
        arguments=arguments,
        sources=report.SOURCES[device.type],
        notes=[
            "GB/s counts the bytes that the loops read and write, repeated reads included; caches serve many of them."
        ],
    )
    reason = triton_unavailable_reason()
    if reason is not None:
        raise SystemExit(f"ladder: no experiments with Triton: {reason}")
    for name, title, data in (
        (
            "lengths",
            "The minimal Triton rung against float64: one head, head dim 128, float16",
            lambda: experiments.minimal_triton_lengths(device, budget.left() / 3),
        ),
        (
            "errors",
            "Largest error of naive attention, v1 and v2 against float64, float16, batch×seqlen×headdim",
            lambda: experiments.version_errors(device),
        ),
        (
            "versions",
            "Naive attention, v1 and v2: time, and bytes beyond q, k, v and out, float16, batch×seqlen×headdim",
            lambda: experiments.version_times(device, budget.left() - 3),
        ),
    ):
        report.finish(
            f"ladder_{name}_{device.type}",
            benchmark="ladder",
            title=title,
            data=data(),
            arguments=arguments,
        )
    if device.type == "cuda":
        report.finish(
            "bank_conflicts",
            benchmark="ladder",
            title="The minimal CUDA kernel with and without padding: batch 4, 8 heads, 1024 tokens, float32",
            data=experiments.padding(),
            arguments=arguments,
        )


if __name__ == "__main__":
    main()
