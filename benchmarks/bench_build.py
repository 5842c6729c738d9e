"""Build times: runs a build command, times it, and stores the time under a label in results/build.json.

  python -m benchmarks.bench_build --label "CPU part" --limit 120 -- python setup.py build_ext --inplace

Each label has its own row with the machine that it was timed on; timing a label again replaces its row. The kernel
cache is empty at the start; delete build/ first, so that the host files are compiled too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cli, provenance

COMPILED = re.compile(r"^kernels: (\S+) compiled in ([\d.]+) s")  # what build_tools/kernels.py prints
SOURCES = ("setup.py", "build_tools/*.py", "csrc/**/*")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_and_listen(command: list[str]) -> dict[str, float]:
    """Runs the build with an empty kernel cache, shows its output, and returns the seconds of each kernel in it."""
    kernels: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "FLASH_ATTN_MINI_CACHE": cache}
        process = subprocess.Popen(
            command, cwd=provenance.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            compiled = COMPILED.search(line)
            if compiled:
                kernels[compiled[1]] = float(compiled[2])
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
    return kernels


def time_command(label: str, command: list[str], limit: float | None) -> dict[str, Any]:
    """The row of one build. A command that fails is an error, and its time is not stored."""
    start = time.perf_counter()
    kernels = run_and_listen(command)
    seconds = time.perf_counter() - start
    return {
        "label": label,
        "kernels": kernels,
        "seconds": round(seconds, 1),
        "limit_seconds": limit,
        "cores": usable_cores(),
        "machine": provenance.stamp()["cpu"],
        "command": [Path(command[0]).name, *command[1:]],  # the program's folder is left out
    }


def merge(row: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier result, if its sources have not changed, with this label's row replaced."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        fresh = earlier["stamp"]["sources_sha256"] == provenance.hash_sources(earlier["stamp"]["sources"])
        rows = [old for old in earlier["data"] if fresh and old["label"] != row["label"]]
    return sorted([*rows, row], key=lambda entry: str(entry["label"]))


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=0.0)
    parser.add_argument("--label", required=True, help="what is built")
    parser.add_argument("--limit", type=float, help="seconds that the build may take; more is an error")
    parser.add_argument("command", nargs="+", help="the build, after --")
    arguments = parser.parse_args(argv)
    row = time_command(arguments.label, arguments.command, arguments.limit)
    cli.finish(
        "build",
        benchmark="bench_build",
        title="Build times",
        data=merge(row, arguments.out_dir / "build.json"),
        sources=SOURCES,
        arguments=arguments,
    )
    if arguments.limit is not None and row["seconds"] > arguments.limit:
        raise SystemExit(f"{arguments.label}: {row['seconds']:.0f} s, the limit is {arguments.limit:.0f} s")


if __name__ == "__main__":
    main()
