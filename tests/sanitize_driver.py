"""Runs the small cases, forward and backward, on the cuda backend, without pytest: for `make sanitize`.

Every small case under memcheck; racecheck is slow, so `--per-headdim` keeps a few for each head dim:

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.sanitize_driver
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.sanitize_driver --per-headdim 2 64 128
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from flash_attn_mini import flash_attn_func
from tests.cases import SMALL_FORWARD_CASES, Case, make_dlse, make_dout, make_inputs

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def choose(headdims: list[int], per_headdim: int | None) -> list[Case]:
    """The small cases of these head dims (all when none is named), at most `per_headdim` of each kind of mask.

    The largest come first: they have the most steps, and so the most that can race.
    """
    chosen: list[Case] = []
    taken: dict[tuple[int, bool], int] = {}
    for case in sorted(SMALL_FORWARD_CASES, key=lambda case: -case.seqlen_q * case.seqlen_k):
        if headdims and case.headdim not in headdims:
            continue
        kind = (case.headdim, case.causal)
        taken[kind] = taken.get(kind, 0) + 1
        if per_headdim is None or taken[kind] <= per_headdim:
            chosen.append(case)
    return chosen


def run(case: Case, dtype: torch.dtype) -> None:
    """The forward, and both kinds of backward: dq summed as it comes, and in order."""
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda", seed=0))
    dout, dlse = make_dout(case, dtype, "cuda", seed=0), make_dlse(case, dtype, "cuda", seed=0)
    for deterministic in (False, True):
        out, lse, _ = flash_attn_func(
            q,
            k,
            v,
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            deterministic=deterministic,
            return_attn_probs=True,
            backend="cuda",
        )
        results = {"out": out}
        gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        results.update(zip(("dq", "dk", "dv"), gradients, strict=True))
        for name, result in results.items():
            if not bool(result.isfinite().all()):
                raise SystemExit(f"{case.name}, {dtype}: {name} is not finite; {case.shape}")


def run_minimal() -> None:
    """The plain kernel of csrc/minimal: ragged, and with rows that see no key."""
    from flash_attn_mini import _C

    for seqlen_q, seqlen_k, headdim in ((130, 70, 40), (65, 129, 128)):
        q, k, v = (torch.randn(s, headdim, device="cuda") for s in (seqlen_q, seqlen_k, seqlen_k))
        _C.minimal_fwd(q, k, v, headdim**-0.5, True)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headdims", nargs="*", type=int, help="default: all")
    parser.add_argument("--per-headdim", type=int, help="at most so many cases of each head dim and mask")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=sorted(DTYPES))
    arguments = parser.parse_args()
    # Without PyTorch's pool every tensor is an allocation of its own, and memcheck knows its bounds.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    cases = choose(arguments.headdims, arguments.per_headdim)
    start = time.monotonic()
    for dtype in arguments.dtypes:
        for case in cases:
            run(case, DTYPES[dtype])
    run_minimal()
    print(f"ran {len(cases)} cases in {', '.join(arguments.dtypes)}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
