"""Peak GPU memory of a call beyond its inputs and outputs, at 32,768 tokens, 16 heads, head dim 128, bf16.

  python -m benchmarks.bench_memory               the forward: O(seqlen) means the LSE and nothing of seqlen²
  python -m benchmarks.bench_memory --backward    the backward: a float32 dQ and delta, and nothing of seqlen²

Outputs of the backward are the three gradients. If one of this library's calls takes more, the exit status is 1.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import results
from benchmarks.bench_speed import BACKWARD, FORWARD
from benchmarks.methods import require_gpu
from benchmarks.rivals import Rival, select

BATCH, NHEADS, HEADDIM = 1, 16, 128
FLOAT_BYTES = 4
CONTENDERS = ["cuda", "triton", "FLASH_ATTENTION", "cuDNN"]
BACKWARD_CONTENDERS = ["cuda", "cuda deterministic", "triton", "FLASH_ATTENTION", "cuDNN"]
OURS = ("cuda", "cuda deterministic", "triton")
ROUNDING = 1.01  # the allocator rounds up to 512 bytes, the kernels to whole tiles


def extra_bytes(rival: Rival, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> int:
    """Bytes that one call allocates at its peak beyond what was there before and the outputs that it returns."""
    call = rival.bind(q, k, v, causal)
    with rival.active():
        call()  # one-time allocations (workspaces, tuning) do not count
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = rival.outputs(call())
        torch.cuda.synchronize()
    returned = sum(output.numel() * output.element_size() for output in outputs)
    return torch.cuda.max_memory_allocated() - before - returned


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=60.0)
    parser.add_argument("--backward", action="store_true", help="measure the backward op")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--backend", action="append", help="contender, repeatable (default: all)")
    arguments = parser.parse_args(argv)
    device = require_gpu("bench_memory")
    seqlen = 4096 if arguments.quick else arguments.seqlen
    lse_bytes = BATCH * NHEADS * seqlen * FLOAT_BYTES
    if arguments.backward:
        direction, contenders, needed = BACKWARD, BACKWARD_CONTENDERS, lse_bytes * (1 + HEADDIM)  # delta, float32 dQ
    else:
        direction, contenders, needed = FORWARD, CONTENDERS, lse_bytes
    q, k, v = (torch.randn(BATCH, seqlen, NHEADS, HEADDIM, device=device).to(torch.bfloat16) for _ in range(3))
    data: list[dict[str, Any]] = []
    for rival in select(arguments.backend or contenders, direction.rivals):
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
                    "dq_and_delta_bytes" if arguments.backward else "lse_bytes": needed,
                    "score_matrix_bytes": BATCH * NHEADS * seqlen * seqlen * 2,
                }
            )
    results.finish(
        "memory_backward" if arguments.backward else "memory",
        benchmark="bench_memory",
        title=f"Peak extra memory of a {direction.name}, bf16, {seqlen:,} tokens, {NHEADS} heads",
        data=data,
        sources=[*results.HOST, *results.CUDA, *results.TRITON],
        arguments=arguments,
    )
    greedy = [
        f"{row['name']} ({'causal' if row['causal'] else 'full'}): {row['extra_bytes']:,}"
        for row in data
        if row["name"] in OURS and row["extra_bytes"] > ROUNDING * needed
    ]
    if greedy:
        raise SystemExit(f"bench_memory: more than the {needed:,} bytes allowed: {'; '.join(greedy)}")


if __name__ == "__main__":
    main()
