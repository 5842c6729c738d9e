"""Accuracy over the whole list of tests/cases.py: the worst error of each backend and dtype as a share of the allowed.

Allowed is what tests/bounds.py says: twice the error of PyTorch's own computation in the same dtype, and a floor. A
share above 1 is a failure, of the exit status too.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks import cli, provenance
from benchmarks.methods import Budget
from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS
from tests.bounds import forward_accuracy
from tests.cases import FORWARD_CASES, SMALL_FORWARD_CASES, Case, make_inputs

DEVICES = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}
DTYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "triton": (torch.float16, torch.bfloat16),
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def shares_of_case(case: Case, backend: str, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """The error of out and of softmax_lse on one case, each divided by the error that it may have."""
    q, k, v = make_inputs(case, dtype, DEVICES[backend], seed)
    options: dict[str, Any] = {"softmax_scale": case.softmax_scale, "causal": case.causal}
    out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True, backend=backend)
    results = forward_accuracy(q, k, v, out, lse, **options)
    return {result.what: result.error / result.bound if result.bound else math.inf for result in results}


def measure(backend: str, dtype: torch.dtype, cases: list[Case], budget: Budget, seed: int) -> dict[str, Any]:
    """One row: the worst shares over the cases, and how many of them the time was enough for."""
    worst = {"out": (0.0, ""), "softmax_lse": (0.0, "")}
    done = 0
    for case in cli.progress(cases, f"{backend} {dtype}"):
        if budget.left() <= 0:
            break
        for what, share in shares_of_case(case, backend, dtype, seed).items():
            worst[what] = max(worst[what], (share, case.name))
        done += 1
    return {
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": done,
        "all_cases": len(cases),
        "out_share": round(worst["out"][0], 4),
        "out_case": worst["out"][1],
        "lse_share": round(worst["softmax_lse"][0], 4),
        "lse_case": worst["softmax_lse"][1],
    }


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--backend", action="append", choices=sorted(DEVICES), help="repeatable (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    backends = arguments.backend or [
        name for name, device in DEVICES.items() if device == "cpu" or torch.cuda.is_available()
    ]
    cases = SMALL_FORWARD_CASES[::8] if arguments.quick else FORWARD_CASES
    budget = Budget(arguments.seconds)
    data = []
    for backend in backends:
        reason = BACKENDS[backend].unavailable_reason(torch.device(DEVICES[backend]))
        if reason is not None:
            print(f"{backend} cannot run: {reason}")
            continue
        rows = [measure(backend, dtype, cases, budget, arguments.seed) for dtype in DTYPES[backend]]
        data += [row for row in rows if row["cases"]]
    unfinished = [f"{row['backend']} {row['dtype']}" for row in data if row["cases"] < row["all_cases"]]
    cli.finish(
        "accuracy" if torch.cuda.is_available() else "accuracy_cpu",
        benchmark="accuracy",
        title="Worst error over the case list, as a share of the allowed error",
        data=data,
        sources=[
            *(glob for name in backends for glob in provenance.SOURCES_OF_BACKEND[name]),
            "flash_attn_mini/reference/*.py",
            "tests/cases.py",
            "tests/bounds.py",
            "tests/poison.py",
        ],
        arguments=arguments,
        notes=[f"The time was not enough for every case of {', '.join(unfinished)}."] if unfinished else [],
        complete=not unfinished,
    )
    failed = [f"{row['backend']} {row['dtype']}" for row in data if max(row["out_share"], row["lse_share"]) > 1]
    if failed:
        raise SystemExit(f"accuracy: above the allowed error: {', '.join(failed)}")
    if unfinished:
        raise SystemExit(f"accuracy: out of time in {', '.join(unfinished)}")


if __name__ == "__main__":
    main()
