"""The learning path: the rungs of the ladder, and the experiments that belong to them (docs/tutorial.md).

  python -m benchmarks.learn_ladder       on a GPU: every rung; elsewhere: what a CPU runs, Triton in its interpreter

The results are ladder_DEVICE, ladder_lengths_DEVICE (the minimal Triton rung over N), ladder_errors_DEVICE and
ladder_versions_DEVICE (v1 against v2), and on a GPU bank_conflicts (the minimal CUDA kernel without padding).
"""

from __future__ import annotations

import os

import torch

from benchmarks import cli, provenance
from benchmarks.methods import Budget


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=40.0)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
        torch.set_num_threads(1)
    from flash_attn_mini.ladder import experiments
    from flash_attn_mini.ladder.rungs import RUNGS, fastest_device, measure, shape_on, triton_unavailable_reason

    budget = Budget(arguments.seconds)
    device = fastest_device()
    kernels = (*provenance.LADDER, *provenance.MINIMAL)
    own = provenance.SOURCES_OF_BACKEND
    library = (*own["cuda"], *own["triton"]) if device.type == "cuda" else (*own["cpu"], *own["triton"])

    seconds = 0.05 if arguments.quick else 0.5 if device.type == "cuda" else 2.0
    rows = [measure(rung, seconds) for rung in RUNGS]
    cli.finish(
        f"ladder_{device.type}",
        benchmark="learn_ladder",
        title=f"The ladder, forward, full attention, {shape_on(device)}",
        data=rows,
        sources=[*kernels, *library],
        arguments=arguments,
        notes=[
            "GB/s counts the bytes that the loops read and write, repeated reads included; caches serve many of them."
        ],
    )
    reason = triton_unavailable_reason()
    if reason is not None:
        raise SystemExit(f"learn_ladder: no experiments with Triton: {reason}")
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
        cli.finish(
            f"ladder_{name}_{device.type}",
            benchmark="learn_ladder",
            title=title,
            data=data(),
            sources=provenance.LADDER,
            arguments=arguments,
        )
    if device.type == "cuda":
        cli.finish(
            "bank_conflicts",
            benchmark="learn_ladder",
            title="The minimal CUDA kernel with and without padding: batch 4, 8 heads, 1024 tokens, float32",
            data=experiments.padding(),
            sources=kernels,
            arguments=arguments,
        )


if __name__ == "__main__":
    main()
