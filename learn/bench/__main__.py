"""Runs every measurement of learn/ that this machine can, each in its own process, and fills the documents.

One that fails leaves its earlier result as it was. One that is not done in its share of the time writes NAME_partial.
The others still run, and the exit status is 1. The extension must be built already.

  python -m learn.bench --seconds 260                          every measurement
  python -m learn.bench --seconds 40 --only ladder             one of them
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from benchmarks.methods import Budget
from learn.bench import report

GPU = {"ladder": 4.0, "grid": 9.0, "roofline": 4.0, "negative": 4.0, "choices": 5.0}  # module: share of the time
CPU = {"ladder": 1.0, "roofline": 1.0}
GRACE_SECONDS = 45.0  # a measurement is stopped this long after the end of the whole budget


def run(name: str, seconds: float, limit: float, passed_on: list[str]) -> bool:
    """Runs a measurement with a budget of `seconds`, and stops it after `limit`."""
    command = [sys.executable, "-m", f"learn.bench.{name}", "--seconds", f"{seconds:.0f}", *passed_on]
    start = time.monotonic()
    try:
        status = subprocess.run(command, cwd=report.ROOT, timeout=limit).returncode
        outcome = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        status, outcome = 1, "stopped: out of time"
    print(f"== {name}: {outcome} after {time.monotonic() - start:.0f} s\n", flush=True)
    return status == 0


def main(argv: list[str] | None = None) -> None:
    here = GPU if torch.cuda.is_available() else CPU
    parser = report.parser_for(__doc__, seconds=260.0)
    parser.add_argument("--only", choices=list(here), help="only this one")
    arguments = parser.parse_args(argv)
    chosen = [name for name in here if arguments.only in (None, name)]
    passed_on = ["--out-dir", str(arguments.out_dir.resolve()), *(["--quick"] if arguments.quick else [])]
    passed_on += ["--commit", arguments.commit] if arguments.commit else []
    budget = Budget(arguments.seconds)
    failed = []
    for number, name in enumerate(chosen):
        left = max(0.0, budget.left())
        share = left * here[name] / sum(here[later] for later in chosen[number:])
        if not run(name, share, left + GRACE_SECONDS, passed_on):
            failed.append(name)
    if arguments.out_dir.resolve() == report.RESULTS and not arguments.quick:
        report.main([])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
