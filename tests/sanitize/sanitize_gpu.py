"""Counts the errors and hazards that compute-sanitizer finds in this package's kernels on small cases.

  python -m tests.sanitize.sanitize_gpu                     memcheck on all small cases, racecheck on a few of each kind
  python -m tests.sanitize.sanitize_gpu --of kvcache        the same on the cases of a KV cache

The cases of a KV cache are a result of their own. Several processes share the cases of a row (--parts). Exits with 1
when there is an error. tests/sanitize/sanitize_driver.py runs the cases.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.methods import progress, require_gpu
from flash_attn_mini.backends.cuda import sm80_unavailable_reason
from learn import kernels as learning_kernels

TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--wrong-values",),
    "racecheck": ("--per-headdim", "2", "64", "96", "128", "192", "256", "576"),
}
CASES_OF = {"attention": "attention", "kvcache": "KV cache"}  # values of the driver's --of: their names in results
SOURCES = {"attention": (*results.ATTENTION, "learn/csrc"), "kvcache": results.CUDA}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .* displayed \((\d+) errors?, (\d+) warning")
RAN = re.compile(r"ran (\d+) cases in ([^:]+)")
ACCESS = re.compile(r"(?:Read|Write) access at .*\+0x[0-9a-f]+(?: in ([\w.]+):\d+)?")
REPORTED = 1_000_000  # errors that a tool reports, at most; its default is 100
MAX_LINES = 40  # lines of a tool's report that are printed


def compute_sanitizer() -> str:
    """The program: SANITIZER, else on PATH, else of /usr/local/cuda."""
    candidates = (
        os.environ.get("SANITIZER"),
        shutil.which("compute-sanitizer"),
        "/usr/local/cuda/bin/compute-sanitizer",
    )
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise SystemExit("sanitize: there is no compute-sanitizer; it comes with the CUDA toolkit")


def accesses(output: str) -> Counter[str]:
    """The source files of the accesses of each hazard in a report of racecheck, and how many hazards have them.

    The report has a paragraph for each hazard: one access in the first line, those that race with it behind it.
    """
    found: Counter[str] = Counter()
    for paragraph in output.split("========= Error: Race reported between ")[1:]:
        files = ACCESS.findall(paragraph.split("\n========= \n")[0])
        found[" and ".join(dict.fromkeys(name or "a line unknown to the tool" for name in files))] += 1
    return found


def row_of(tool: str, of: str, output: str) -> dict[str, Any]:
    """The summary of a run of `tool` on the cases `of`. Raises SystemExit where the run did not finish."""
    found, ran = SUMMARY.search(output), RAN.search(output)
    if found is None or ran is None:
        raise SystemExit(f"sanitize: {tool} did not finish\n{output[-2000:]}")
    errors = sum(int(number) for number in found.groups(default="0"))
    row = {"tool": tool, "cases_of": CASES_OF[of], "cases": int(ran[1]), "dtypes": ran[2], "errors": errors}
    return row | {"accesses": accesses(output)}


def run(tool: str, of: str, part: int, parts: int) -> dict[str, Any]:
    """The summary of one part of a tool's cases."""
    chosen = ["--of", of, "--part", str(part), str(parts), *TOOLS[tool]]
    driver = [sys.executable, "-m", "tests.sanitize.sanitize_driver", *chosen]
    command = [compute_sanitizer(), "--tool", tool, "--print-limit", str(REPORTED), *driver]
    result = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True)
    output = result.stdout + result.stderr
    row = row_of(tool, of, output)
    if row["errors"]:
        found = [line for line in output.splitlines() if line.startswith("=========")]
        print(f"{tool} reports first, {CASES_OF[of]}:", *found[:MAX_LINES], sep="\n", file=sys.stderr)
    return row


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One summary of all parts of a tool's cases."""
    together = {name: sum(part[name] for part in parts) for name in ("cases", "errors")}
    return parts[0] | together | {"accesses": sum((part["accesses"] for part in parts), Counter())}


def run_tools(kinds: Sequence[str], parts: int) -> list[dict[str, Any]]:
    """The summaries of all tools on these kinds of cases, kind by kind. All parts run side by side."""
    work = list(itertools.product(kinds, TOOLS, range(parts)))
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        running = [pool.submit(run, tool, of, part, parts) for of, tool, part in work]
        rows = [future.result() for future in progress(running, "sanitize")]
    return [joined(rows[i : i + parts]) for i in range(0, len(rows), parts)]


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=600.0)
    parts = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument("--of", choices=list(CASES_OF), action="append", help="default: both")
    parser.add_argument("--parts", type=int, default=parts, help="processes for each row (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.parts < 1:
        parser.error(f"--parts is {arguments.parts}; allowed: 1 and more")
    require_gpu("sanitize")
    kinds = arguments.of or list(CASES_OF)
    if "attention" in kinds:
        learning_kernels.load()  # compiles them here: under the tool nvcc would be slow
    reason = sm80_unavailable_reason()
    if reason is not None:
        print(f"sanitize: the kernels of sm80 are left out: {reason}", file=sys.stderr)
    rows = run_tools(kinds, arguments.parts)
    for of in kinds:
        of_kind = [row for row in rows if row["cases_of"] == CASES_OF[of]]
        title = f"Errors that compute-sanitizer finds: {CASES_OF[of]}"
        results.finish(f"sanitize_{of}", "sanitize", title, of_kind, arguments, sources=SOURCES[of])
    if any(row["errors"] for row in rows):
        raise SystemExit("sanitize: there are errors")


if __name__ == "__main__":
    main()
