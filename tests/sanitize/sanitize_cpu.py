"""Runs the CPU kernels' tests and random calls under AddressSanitizer and UndefinedBehaviorSanitizer.

  python -m tests.sanitize.sanitize_cpu                            `make sanitize` on a machine without a GPU
  python -m tests.sanitize.sanitize_cpu --count 20000 --seed 7     more random calls, or those of an earlier run

Builds the extension with both sanitizers into build/sanitize, with copies of the package and the tests. The ordinary
build stays as it is. First it runs a call that reads past the end of a tensor, which must be reported. A process ends
at the first error; its last lines say which test or call it was. Exits with 1 when there is an error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
TREE = BUILD / "tree"
# Tests of the kernels and of the host code above them. With the build they take eight to nine minutes on two cores; the
# random calls have the options that other files test.
TESTS = (
    "kernels/test_forward.py",
    "kernels/test_backward.py",
    "kernels/test_varlen.py",
    "kernels/test_kvcache.py",
    "kernels/test_cpu_kvcache.py",
    "kernels/test_rows_without_keys.py",
    "kernels/test_dropout_state.py",
    "api/test_packed.py",
    "api/test_strided_inputs.py",
    "api/test_memory_overlap.py",
    "api/test_errors.py",
    "api/test_backward_errors.py",
    "api/test_varlen_errors.py",
    "api/test_kvcache_errors.py",
    "api/test_cpu_kvcache_errors.py",
)
LEVELS = ("", "avx2", "default")  # of ATEN_CPU_CAPABILITY; "": the machine's
OVERREAD = """
import ctypes, torch
from flash_attn_mini import _C

short = torch.zeros(64)  # the view below says that there is one row more
rows = (ctypes.c_float * 80).from_address(short.data_ptr())
k = torch.frombuffer(rows, dtype=torch.float32).view(1, 5, 1, 16)
_C.fwd(torch.zeros(1, 1, 1, 16), k, torch.zeros(1, 5, 1, 16), None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)
"""


def build() -> None:
    """The extension with sanitizers, and the files that the tests need."""
    for folder in ("flash_attn_mini", "tests"):
        shutil.rmtree(TREE / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, TREE / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", TREE)
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    folders = [f"--build-lib={TREE}", f"--build-temp={BUILD / 'objects'}"]
    environment = {**os.environ, "FLASH_ATTN_MINI_SANITIZE": "1", "FLASH_ATTN_MINI_ARCHS": "none"}
    subprocess.run([*command, *folders], cwd=ROOT, env=environment, check=True)


def library(name: str) -> str:
    """Where the compiler finds a library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment(level: str = "") -> dict[str, str]:
    """The sanitizer's library is loaded first, then C++'s, whose functions it wraps when it starts."""
    capability = {"ATEN_CPU_CAPABILITY": level} if level else {}
    return {
        **os.environ,
        **capability,
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python leaks; too large a tensor is an error
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(TREE),
    }


def run(arguments: list[str], level: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python on the build with sanitizers; its output is in stdout."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TREE,
        env=environment(level),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def reported(output: str) -> str:
    """What a process was doing when it ended, and the first lines of the report."""
    lines = output.splitlines()
    errors = [i for i, line in enumerate(lines) if "AddressSanitizer" in line or "runtime error:" in line]
    shown = lines[max(errors[0] - 4, 0) : errors[0] + 30] if errors else lines[-60:]
    return "\n".join(line[:1000] for line in shown)


def check_that_it_sees_an_overread() -> None:
    seen = run(["-c", OVERREAD])
    if seen.returncode == 0 or "heap-buffer-overflow" not in seen.stdout:
        raise SystemExit(f"sanitize: a read past the end of a tensor was not reported\n{reported(seen.stdout)}")
    print("sanitize: a deliberate read past the end of a tensor is reported", flush=True)


def jobs(count: int, seed: int) -> dict[str, tuple[list[str], str]]:
    """Arguments of Python and the instruction set, by name."""
    work: dict[str, tuple[list[str], str]] = {}
    for i, level in enumerate(LEVELS):
        calls = ["-m", "tests.sanitize.random_calls", "--count", str(-(-count // len(LEVELS))), "--seed", str(seed + i)]
        work[f"random calls, seed {seed + i}{level and ', '}{level}"] = (calls, level)
    for file in TESTS:
        pytest = ["-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
        work[file] = ([*pytest, f"tests/{file}"], "")
    return work


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6000, help="random calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random calls (default: a new one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    arguments = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**30) if arguments.seed is None else arguments.seed
    start = time.monotonic()
    build()
    print(f"sanitize: built in {time.monotonic() - start:.0f} s", flush=True)
    check_that_it_sees_an_overread()
    failed = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        work = {pool.submit(run, *job): name for name, job in jobs(arguments.count, seed).items()}
        for done in concurrent.futures.as_completed(work):
            name, result = work[done], done.result()
            *_, last = ["", *result.stdout.strip().splitlines()]
            outcome = last if result.returncode == 0 else f"failed\n{reported(result.stdout)}"
            print(f"sanitize: {time.monotonic() - start:4.0f} s  {name}: {outcome}", flush=True)
            if result.returncode != 0:
                failed.append(name)
    if failed:
        raise SystemExit(f"sanitize: there are errors in {', '.join(failed)}")


if __name__ == "__main__":
    main()
