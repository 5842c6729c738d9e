"""Results of learn/: how they are saved, and the tables that fill its documents, so that no figure is typed by hand.

The files, the blocks in the documents and the plots are those of benchmarks/results.py.

  python -m learn.bench.report             rewrite the blocks
  python -m learn.bench.report --check     say which documents differ from the results, exit 1 if any does
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.tables import Rows
from learn.bench.plots import drawing_of

ROOT = results.ROOT
RESULTS = results.LEARN_RESULTS


def ladder_tables(data: Rows) -> list[str]:
    """The rungs of the ladder, or rows of one of its experiments."""
    if "rung" not in data[0]:
        return tables.plain_tables(data)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "on": lambda row: f"{row['device']}{', interpreted' if row['interpreted'] else ''}, {row['dtype']}",
        "ms": lambda row: f"{row['ms']:.4g}",
        "TFLOP/s": lambda row: f"{row['tflops']:.3g}",
        "% of a matrix product": lambda row: f"{row['matmul_percent']:.3g}" if row["matmul_percent"] else "–",
        "GB/s": lambda row: f"{row['gbps']:.4g}",
        "extra memory ÷ q": lambda row: f"{over_q(row):.3g}",
        "largest error": lambda row: f"{row['max_error']:.1e}",
        "verdict": lambda row: "passed" if row["passed"] else "FAILED",
    }
    body = []
    for number, row in enumerate(data, start=1):
        cells = [row["reason"], *[""] * (len(columns) - 1)] if "reason" in row else [f(row) for f in columns.values()]
        body.append([f"{number}. {row['rung']}", *cells])
    return [tables.markdown_table(["rung", *columns], body)]


def over_q(row: dict[str, Any]) -> float:
    """Extra memory of a rung as a multiple of q's bytes."""
    itemsize = {"float16": 2, "float32": 4}[row["dtype"]]
    return float(row["extra_bytes"] / (itemsize * row["batch"] * row["heads"] * row["seqlen"] * row["headdim"]))


def grid_tables(data: Rows) -> list[str]:
    """A table for each pass: head dim and mask down, sequence length across, every contender in a cell."""
    lengths = sorted({row["seqlen"] for row in data})
    names = list(dict.fromkeys(name for row in data for key in ("tflops", "unsupported") for name in row[key]))
    parts = []
    for which in dict.fromkeys(row["pass"] for row in data):
        cells: dict[tuple[str], dict[int, str]] = {}
        for row in data:
            if row["pass"] == which:
                speeds = (f"{row['tflops'][name]:.3g}" if name in row["tflops"] else "–" for name in names)
                cells.setdefault((tables.kind_of(row),), {})[row["seqlen"]] = " / ".join(speeds)
        caption = f"{which.capitalize()}: {' / '.join(names)}, TFLOP/s, by sequence length:"
        parts.append(f"{caption}\n\n{tables.pivot([''], cells, lengths)}")
    if any(row["unsupported"] for row in data):
        parts.append("–: out of memory.")
    return parts


VIEWS: dict[str, Callable[[Rows], list[str]]] = {"grid": grid_tables, "ladder": ladder_tables}


def describe(stamp: dict[str, Any]) -> str:
    """The stamp in one line. Earlier results have no commit."""
    commit = stamp.get("commit") or ""
    return tables.describe(stamp) + (f", commit {commit[:12]}{'+' * commit.endswith('+')}" if commit else "")


def render(result: dict[str, Any]) -> str:
    """A result's tables, its notes and the line that says where its figures come from."""
    parts = VIEWS.get(result["benchmark"], tables.plain_tables)(result["data"])
    source = f"`learn/results/{result['name']}.json`"
    return "\n\n".join([*parts, *result["notes"], f"Measured on {describe(result['stamp'])} ({source})."])


# What a figure depends on, as in benchmarks/results.py: the kernels of learn/, and those of the library for a device.
LEARN = ("learn/*.py", "learn/csrc", "learn/bench/negative_kernels.py")
SOURCES = {
    "cuda": (*LEARN, *results.ATTENTION, *results.TRITON),
    "cpu": (*LEARN, *results.CPU, *results.TRITON),
}

parser_for = partial(results.parser_for, out_dir=RESULTS)
finish = partial(results.finish, sources=LEARN, render=render, drawing_of=drawing_of)
fill = partial(results.fill, render=render)


def documents() -> list[Path]:
    """The files that may hold result blocks."""
    return sorted((ROOT / "learn").glob("*.md"))


def outdated() -> list[tuple[Path, str]]:
    """The documents whose blocks differ from the results, each with its new text."""
    return results.outdated(documents(), RESULTS, render)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a document differs")
    arguments = parser.parse_args(argv)
    results.update(outdated(), arguments.check, "learn.bench.report")


if __name__ == "__main__":
    main()
