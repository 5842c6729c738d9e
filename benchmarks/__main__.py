"""`make bench`: runs the benchmarks whose results the documents show within one time budget, each in its own process.

On a machine with a GPU it runs those of the GPU, elsewhere those of the cpu backend. bench_build,
bench_context_parallel, the forward on different values and decoding against FlashAttention-3 are run by hand
(docs/measurements.md).

A benchmark that fails leaves its earlier result as it was. One that is not done in its share of the time writes
NAME_partial. The others still run, and the exit status is 1. The extension must be built already.

  python -m benchmarks --seconds 1200 --out-dir benchmarks/results
  python -m benchmarks --only backward --seconds 240
  python -m benchmarks --stale                                  list the results whose kernels have changed, learn's too
  python -m benchmarks --renew --seconds 1200                   run what is missing or listed by --stale
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results

MIN_SECONDS = 5.0  # with less time left, a step is not started and counts as failed
GRACE_SECONDS = 45.0  # a step is stopped this long after the end of the whole budget


@dataclass(frozen=True)
class Step:
    """One benchmark: its module, patterns of its results' names, its arguments, and its share of the time."""

    module: str
    results: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    weight: float = 1.0  # relative to the other steps: about the tens of seconds that it takes on an H200

    @property
    def label(self) -> str:
        return " ".join([self.module, *self.arguments])


# The most important figures come first, because late steps may be cut. The Triton grids tune before they measure.
GPU_STEPS = (
    Step("bench_speed", ("forward_cuda",), ("--grid", "perf", "--rounds", "5"), 12.0),
    Step("bench_speed", ("forward_cuda_fp16",), ("--grid", "fp16"), 5.0),
    Step("bench_speed", ("backward_cuda",), ("--backward", "--grid", "perf"), 9.0),
    Step("bench_kvcache", ("kvcache_[!co]*",), (), 7.0),
    Step("bench_features", ("features_cuda",), (), 5.0),
    Step("bench_masks", ("masks_cuda_d128",), (), 3.0),
    Step("bench_masks", ("masks_cuda_d64",), ("--headdim", "64", "--no-flex"), 1.5),
    Step("bench_bias", ("bias_cuda_d128",), (), 1.5),
    Step("bench_bias", ("bias_cuda_d64",), ("--headdim", "64"), 1.5),
    Step("bench_short", ("short_cuda",), (), 3.0),
    Step("bench_models", ("models_cuda",), (), 17.0),
    Step("bench_overhead", ("overhead_cuda",), (), 1.0),
    Step("bench_overhead", ("overhead_backward_cuda",), ("--backward",), 2.5),
    Step("bench_overhead", ("memory",), ("--memory",), 1.5),
    Step("bench_overhead", ("memory_backward",), ("--memory", "--backward"), 1.5),
    Step("bench_speed", ("forward_triton",), ("--grid", "triton"), 4.0),
    Step("bench_speed", ("backward_triton",), ("--backward", "--grid", "triton"), 10.0),
    Step("accuracy", ("accuracy",), (), 11.0),
    Step("accuracy", ("accuracy_backward",), ("--backward", "--backend", "cuda", "--backend", "triton"), 15.0),
    Step("bench_speed", ("backward_cuda_headdims",), ("--backward", "--grid", "headdims", "--rounds", "2"), 3.0),
    Step("bench_speed", ("backward_cuda_gqa",), ("--backward", "--grid", "gqa", "--rounds", "2"), 4.0),
    Step("bench_speed", ("forward_cuda_latent",), ("--grid", "latent", "--rivals", "cuDNN"), 2.0),
    Step("bench_speed", ("backward_cuda_latent",), ("--backward", "--grid", "latent", "--rivals", "cuDNN"), 2.5),
)
CPU_STEPS = (
    Step("bench_cpu", ("cpu_float32",)),
    Step("bench_cpu", ("cpu_backward_float32",), ("--backward",)),
    Step("bench_cpu", ("cpu_bfloat16",), ("--dtype", "bfloat16")),
    Step("bench_cpu", ("cpu_backward_bfloat16",), ("--dtype", "bfloat16", "--backward")),
    Step("bench_models", ("models_cpu",), ("--device", "cpu")),
    Step("bench_kvcache", ("kvcache_cpu_float32",), ("--device", "cpu")),
    Step("bench_kvcache", ("kvcache_cpu_bfloat16",), ("--device", "cpu", "--dtype", "bfloat16")),
)


def stale_steps(steps: list[Step], folder: Path) -> list[Step]:
    """The steps of which a result is missing or stale."""
    stale = {path for path, _ in results.stale_results(folder)}

    def is_stale(step: Step) -> bool:
        found = [list(folder.glob(f"{pattern}.json")) for pattern in step.results]
        return not all(found) or any(path in stale for paths in found for path in paths)

    return [step for step in steps if is_stale(step)]


def run_step(step: Step, seconds: float, limit: float, passed_on: list[str]) -> bool:
    """Runs a step with a budget of `seconds`, and stops it after `limit`."""
    command = [sys.executable, "-m", f"benchmarks.{step.module}", *step.arguments, "--seconds", f"{seconds:.0f}"]
    start = time.monotonic()
    try:
        status = subprocess.run([*command, *passed_on], cwd=results.ROOT, timeout=limit).returncode
        outcome = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        status, outcome = 1, "stopped: out of time"
    print(f"== {step.label}: {outcome} after {time.monotonic() - start:.0f} s\n", flush=True)
    return status == 0


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=1200.0)
    parser.add_argument("--only", help="run only the steps whose command line contains this")
    parser.add_argument("--stale", action="store_true", help="run nothing; list the stale results")
    parser.add_argument("--renew", action="store_true", help="run only the steps whose results are missing or stale")
    arguments = parser.parse_args(argv)
    if arguments.stale:
        results.print_stale(arguments.out_dir)
        if arguments.out_dir == results.RESULTS:
            results.print_stale(results.LEARN_RESULTS)
        return
    import torch  # here, because --stale needs no other package

    from benchmarks.methods import Budget

    here = GPU_STEPS if torch.cuda.is_available() else CPU_STEPS
    steps = [step for step in here if not arguments.only or arguments.only in step.label]
    if not steps:
        raise SystemExit(f"no step contains {arguments.only!r}; the steps: {'; '.join(step.label for step in here)}")
    if arguments.renew:
        steps = stale_steps(steps, arguments.out_dir)
    passed_on = ["--out-dir", str(arguments.out_dir.resolve()), *(["--quick"] if arguments.quick else [])]
    passed_on += ["--commit", arguments.commit] if arguments.commit else []
    budget = Budget(arguments.seconds)
    failed = []
    for number, step in enumerate(steps):
        left = budget.left()
        share = left * step.weight / sum(later.weight for later in steps[number:])
        if left < MIN_SECONDS or not run_step(step, share, left + GRACE_SECONDS, passed_on):
            failed.append(step.label)
    if arguments.out_dir.resolve() == results.RESULTS and not arguments.quick:
        results.main([])
    results.print_stale(arguments.out_dir)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
