"""Accuracy over the cases of tests/support/cases.py: the worst error of each backend and dtype ÷ the allowed error.

tests/support/bounds.py defines the allowed error: twice that of PyTorch's own computation in the same dtype, three
times for gradients, and a floor. A share above 1 makes the exit status 1.

  python -m benchmarks.accuracy                   out and softmax_lse
  python -m benchmarks.accuracy --backward        dq, dk and dv, through autograd
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.methods import Budget
from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS
from tests.support.bounds import Accuracy, differentiate, forward_accuracy, gradients_accuracy
from tests.support.cases import FORWARD_CASES, SMALL_FORWARD_CASES, Case, make_dout, make_inputs
from tests.support.limits import unreachable_gradients

SUPPORT = [f"tests/support/{name}.py" for name in ("bounds", "cases", "limits", "poison")]

DEVICES = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}
DTYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "triton": (torch.float16, torch.bfloat16),
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
SEED = 0
SHORT_NAMES = {"softmax_lse": "lse"}


def attention(q: Tensor, k: Tensor, v: Tensor, case: Case, backend: str) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"softmax_scale": case.softmax_scale, "causal": case.causal}
    out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True, backend=backend)
    return out, lse


def accuracy_of_case(case: Case, backend: str, dtype: torch.dtype, backward: bool) -> list[Accuracy]:
    """The errors of out and of softmax_lse on one case; of dq, dk and dv where `backward`."""
    inputs = make_inputs(case, dtype, DEVICES[backend], SEED)
    options: dict[str, Any] = {"softmax_scale": case.softmax_scale, "causal": case.causal}
    if not backward:
        return forward_accuracy(*inputs, *attention(*inputs, case, backend), **options)
    dout = make_dout(case, dtype, DEVICES[backend], SEED)
    gradients = differentiate(attention, inputs, dout, None, case=case, backend=backend)
    return gradients_accuracy(*inputs, dout, gradients, **options)


def shares(results: list[Accuracy]) -> dict[str, float]:
    """Each error ÷ the allowed error."""
    return {
        SHORT_NAMES.get(result.what, result.what): result.error / result.bound if result.bound else math.inf
        for result in results
    }


def measure(backend: str, dtype: torch.dtype, cases: list[Case], budget: Budget, backward: bool) -> dict[str, Any]:
    """One row: the worst shares over the cases, and the number of cases done in time."""
    worst = dict.fromkeys(("dq", "dk", "dv") if backward else ("out", "lse"), (0.0, ""))
    if backward:
        cases = [case for case in cases if unreachable_gradients(case, backend) is None]
    done = 0
    for number, case in budget.within(cases, f"{backend} {dtype}"):
        for what, share in shares(accuracy_of_case(case, backend, dtype, backward)).items():
            worst[what] = max(worst[what], (share, case.name))
        done = number + 1
    row: dict[str, Any] = {
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": done,
        "all_cases": len(cases),
    }
    for what, (share, name) in worst.items():
        row |= {f"{what}_share": round(share, 4), f"{what}_case": name}
    return row


def worst_share(row: dict[str, Any]) -> float:
    return max(float(value) for key, value in row.items() if key.endswith("_share"))


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--backward", action="store_true", help="the gradients")
    parser.add_argument("--backend", action="extend", nargs="+", choices=sorted(DEVICES), help="default: all")
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
        rows = [measure(backend, dtype, cases, budget, arguments.backward) for dtype in DTYPES[backend]]
        data += [row for row in rows if row["cases"]]
    unfinished = [f"{row['backend']} {row['dtype']}" for row in data if row["cases"] < row["all_cases"]]
    notes = [f"The time was not enough for every case of {', '.join(unfinished)}."] if unfinished else []
    if arguments.backward:
        reasons = {(name, case.name): unreachable_gradients(case, name) for name in backends for case in cases}
        notes += [f"Left out on {name}: {case} ({reason})." for (name, case), reason in reasons.items() if reason]
    sources = [path for name in backends for path in results.SOURCES_OF_BACKEND[name]]
    results.finish(
        f"accuracy{'_backward' * arguments.backward}{'' if torch.cuda.is_available() else '_cpu'}",
        "accuracy",
        f"Worst error{' of gradients' * arguments.backward} over the case list, as a share of the allowed error",
        data,
        arguments,
        sources=[*sources, "flash_attn_mini/reference", *SUPPORT],
        notes=notes,
        complete=not unfinished,
    )
    failed = [f"{row['backend']} {row['dtype']}" for row in data if not worst_share(row) <= 1]
    if failed:
        raise SystemExit(f"accuracy: above the allowed error: {', '.join(failed)}")
    if unfinished:
        raise SystemExit(f"accuracy: out of time in {', '.join(unfinished)}")


if __name__ == "__main__":
    main()
