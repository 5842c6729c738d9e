"""Backward speed against PyTorch's backward ops over a grid of shapes: TFLOP/s and ratios within one run.

What is timed is the backward op with every kernel that it launches (backward_rivals.py), not autograd around it. A
backward counts 2.5 times the forward's FLOPs: five matrix products instead of two.

  python -m benchmarks.bench_backward                     the cuda backend, bf16, 16,384 tokens, nheads * headdim = 2048
  python -m benchmarks.bench_backward --grid headdims     the same for the head dims between
  python -m benchmarks.bench_backward --grid gqa          grouped heads, 32 query heads of 128
  python -m benchmarks.bench_backward --grid triton       the triton backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_backward --grid tiny         the cpu backend on shapes that take no time
"""

from __future__ import annotations

import torch

from benchmarks import provenance, speed
from benchmarks.backward_rivals import BACKWARD_RIVALS
from benchmarks.methods import BACKWARD_WORK
from benchmarks.speed import Direction, Grid

BACKWARD = Direction("backward", BACKWARD_RIVALS, work=BACKWARD_WORK, sources=provenance.BACKWARD_SOURCES_OF_BACKEND)

GRIDS = {
    "perf": Grid(
        title="Backward, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
        device="cuda",
        dtype=torch.bfloat16,
        backends=("cuda", "cuda deterministic"),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(64, 128, 256),
        seqlens=(1024, 2048, 4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (16384 // seqlen, 2048 // headdim),
    ),
    "headdims": Grid(
        title="Backward, head dims 32, 96 and 192, bf16, 16,384 tokens a batch, nheads * headdim ≈ 2048",
        device="cuda",
        dtype=torch.bfloat16,
        backends=("cuda",),
        rivals=("FLASH_ATTENTION",),
        headdims=(32, 96, 192),
        seqlens=(1024, 4096, 16384),
        shape_of=lambda seqlen, headdim: (16384 // seqlen, 2048 // headdim),
        suffix="_headdims",
    ),
    "gqa": Grid(
        title="Backward with grouped heads, bf16, 16,384 tokens a batch, 32 query heads of 128",
        device="cuda",
        dtype=torch.bfloat16,
        backends=("cuda",),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(128,),
        seqlens=(1024, 4096, 16384),
        shape_of=lambda seqlen, headdim: (16384 // seqlen, 32),
        nheads_k=(8, 1),
        suffix="_gqa",
    ),
    "triton": Grid(
        title="Backward of the Triton backend, fp16, batch 4, 8 heads",
        device="cuda",
        dtype=torch.float16,
        backends=("triton",),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(64, 128),
        seqlens=(4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (4, 8),
    ),
    "tiny": Grid(
        title="Backward on the CPU, float32, shapes that only show that the benchmark runs",
        device="cpu",
        dtype=torch.float32,
        backends=("cpu",),
        rivals=("SDPA",),
        headdims=(16, 32),
        seqlens=(32, 64),
        shape_of=lambda seqlen, headdim: (1, 2),
    ),
}


def main(argv: list[str] | None = None) -> None:
    speed.run(BACKWARD, GRIDS, __doc__, argv)


if __name__ == "__main__":
    main()
