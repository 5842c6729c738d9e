"""Forward speed against PyTorch's kernels over a grid of shapes: TFLOP/s and ratios within one run.

The result is named after the first backend measured, forward_cuda for one:

  python -m benchmarks.bench_forward                      the cuda backend, bf16, 16,384 tokens, nheads * headdim = 2048
  python -m benchmarks.bench_forward --grid fp16          the cuda backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_forward --grid triton        the triton backend, fp16, batch 4, 8 heads
  python -m benchmarks.bench_forward --grid tiny          the cpu backend on shapes that take no time
"""

from __future__ import annotations

import torch

from benchmarks import provenance, speed
from benchmarks.rivals import RIVALS
from benchmarks.speed import Direction, Grid

FORWARD = Direction("forward", RIVALS, work=1.0, sources=provenance.SOURCES_OF_BACKEND)

GRIDS = {
    "perf": Grid(
        title="Forward, bf16, 16,384 tokens a batch, nheads * headdim = 2048",
        device="cuda",
        dtype=torch.bfloat16,
        backends=("cuda", "cuda sm80"),
        rivals=("cuDNN", "FLASH_ATTENTION"),
        headdims=(64, 128, 256),
        seqlens=(512, 1024, 2048, 4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (16384 // seqlen, 2048 // headdim),
    ),
    "fp16": Grid(
        title="Forward, fp16, batch 4, 8 heads",
        device="cuda",
        dtype=torch.float16,
        backends=("cuda", "cuda sm80", "triton"),
        rivals=("cuDNN", "FLASH_ATTENTION"),
        headdims=(64, 128),
        seqlens=(256, 512, 1024, 2048, 4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (4, 8),
        suffix="_fp16",
    ),
    "triton": Grid(
        title="Forward of the Triton backend, fp16, batch 4, 8 heads",
        device="cuda",
        dtype=torch.float16,
        backends=("triton",),
        rivals=("FLASH_ATTENTION", "cuDNN"),
        headdims=(64, 128),
        seqlens=(4096, 8192, 16384),
        shape_of=lambda seqlen, headdim: (4, 8),
    ),
    "tiny": Grid(
        title="Forward on the CPU, float32, shapes that only show that the benchmark runs",
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
    speed.run(FORWARD, GRIDS, __doc__, argv)


if __name__ == "__main__":
    main()
