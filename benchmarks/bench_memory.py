"""Peak GPU memory of a forward beyond its inputs and output, at 32,768 tokens, 16 heads, head dim 128, bf16.

O(seqlen) means the LSE and nothing of seqlen²: python -m benchmarks.bench_memory
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import cli, provenance
from benchmarks.rivals import Rival, select

BATCH, NHEADS, HEADDIM = 1, 16, 128
CONTENDERS = ("cuda", "triton", "FLASH_ATTENTION", "cuDNN")


def extra_bytes(rival: Rival, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> int:
    """Bytes that one call allocates at its peak beyond what was there before and the output that it returns."""
    call = rival.bind(q, k, v, causal)
    with rival.active():
        call()  # one-time allocations (workspaces, tuning) are not the call's
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=60.0)
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--backend", action="append", help="contender, repeatable (default: all)")
    arguments = parser.parse_args(argv)
    device = cli.require_gpu("bench_memory")
    seqlen = 4096 if arguments.quick else arguments.seqlen
    q, k, v = (torch.randn(BATCH, seqlen, NHEADS, HEADDIM, device=device).to(torch.bfloat16) for _ in range(3))
    data: list[dict[str, Any]] = []
    for rival in select(list(arguments.backend or CONTENDERS)):
        for causal in (False, True):
            reason = rival.unsupported(q, k, v, causal)
            if reason is not None:
                print(f"{rival.name} cannot run: {reason}")
                continue
            data.append(
                {
                    "name": rival.name,
                    "batch": BATCH,
                    "nheads": NHEADS,
                    "seqlen": seqlen,
                    "headdim": HEADDIM,
                    "causal": causal,
                    "extra_bytes": extra_bytes(rival, q, k, v, causal),
                    "lse_bytes": BATCH * NHEADS * seqlen * 4,
                    "score_matrix_bytes": BATCH * NHEADS * seqlen * seqlen * 2,
                }
            )
    cli.finish(
        "memory",
        benchmark="bench_memory",
        title=f"Peak extra memory of a forward, bf16, {seqlen:,} tokens, {NHEADS} heads",
        data=data,
        sources=[*provenance.HOST, *provenance.SOURCES_OF_BACKEND["cuda"], *provenance.TRITON],
        arguments=arguments,
    )


if __name__ == "__main__":
    main()
