"""Registers, spills and shared memory of every compiled CUDA kernel, read from what ptxas -v said when it was built.

A spill is a defect: it makes the exit status 1. Needs nvcc, no GPU; what the kernel cache lacks is compiled first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from benchmarks import cli, provenance
from build_tools import kernels, selection

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")


def parse(report: str) -> list[dict[str, Any]]:
    """One row for each kernel in the output of ptxas -v."""
    rows = []
    for match in _ENTRY.finditer(report):
        smem = _STATIC_SMEM.search(match["rest"])
        rows.append(
            {
                "kernel": match["symbol"],
                "arch": match["arch"],
                "registers": int(match["registers"]),
                "spill_bytes": int(match["stores"]) + int(match["loads"]),
                "stack_bytes": int(match["stack"]),
                "static_smem_bytes": int(smem[1]) if smem else 0,
            }
        )
    return rows


def readable(symbols: list[str]) -> list[str]:
    """The kernels' names without argument lists, as C++ writes them where c++filt is installed."""
    if not symbols or shutil.which("c++filt") is None:
        return symbols
    answer = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return [name.replace("(anonymous namespace)::", "").replace("flash::", "") for name in answer.stdout.splitlines()]


def main(argv: list[str] | None = None) -> None:
    parser = cli.parser_for(__doc__, seconds=0.0)
    arguments = parser.parse_args(argv)
    chosen = selection.Selection(selection.select_archs(), selection.select_hdims(), selection.select_dtypes())
    data = []
    for path in kernels.build_kernels(chosen, selection.max_jobs()):
        name = path.stem.rpartition("-")[0]
        data += [{"object": name, **row} for row in parse(path.with_suffix(".ptxas.txt").read_text(encoding="utf-8"))]
    for row, label in zip(data, readable([row["kernel"] for row in data]), strict=True):
        row["kernel"] = label
    cli.finish(
        "kernel_resources",
        benchmark="kernel_resources",
        title="Registers, spills and static shared memory of the compiled kernels",
        data=data,
        sources=[*provenance.CUDA, *provenance.MINIMAL, "csrc/flash.h"],
        arguments=arguments,
    )
    spilling = [f"{row['object']} ({row['spill_bytes']} bytes)" for row in data if row["spill_bytes"]]
    if spilling:
        raise SystemExit(f"kernel_resources: registers are spilled in {', '.join(spilling)}")


if __name__ == "__main__":
    main()
