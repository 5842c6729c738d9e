"""Fills the result blocks of the documents of learn/ from learn/results/, so that no figure is typed by hand.

A block lies between `<!-- results:NAME begin -->` and `<!-- results:NAME end -->`. NAME is a file of the results, for
its tables, or FILE.plot, for its picture.

  python -m learn.bench.report             rewrite the blocks
  python -m learn.bench.report --check     say which documents differ from the results, exit 1 if any does
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from learn.bench.record import RESULTS, ROOT, Rows, describe, load

BLOCK = re.compile(r"(<!-- results:(?P<name>[\w.-]+) begin -->\n).*?(<!-- results:(?P=name) end -->)", re.DOTALL)
MARK = re.compile(r"<!-- results:[\w.-]+ (?:begin|end) -->")
PLOT = ".plot"
NOT_MEASURED = "Not measured yet."


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    return str(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=("left",) * len(headers)))


def kind_of(row: dict[str, Any]) -> str:
    """Head dim and mask."""
    return f"d{row['headdim']} {'causal' if row['causal'] else 'full'}"


def plain_tables(data: Rows) -> list[str]:
    """Keys across, rows down."""
    headers = list(dict.fromkeys(key for row in data for key in row))
    cells = [[row.get(header, "") for header in headers] for row in data]
    return [markdown_table(headers, [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in cells])]


def ladder_tables(data: Rows) -> list[str]:
    """The rungs of the ladder, or rows of one of its experiments."""
    if "rung" not in data[0]:
        return plain_tables(data)
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
    if not any("matmul_percent" in row for row in data):  # an earlier result
        del columns["% of a matrix product"]
    body = []
    for number, row in enumerate(data, start=1):
        cells = [row["reason"], *[""] * (len(columns) - 1)] if "reason" in row else [f(row) for f in columns.values()]
        body.append([f"{number}. {row['rung']}", *cells])
    return [markdown_table(["rung", *columns], body)]


def over_q(row: dict[str, Any]) -> float:
    """Extra memory of a rung as a multiple of q's bytes."""
    itemsize = {"float16": 2, "float32": 4}[row["dtype"]]
    return float(row["extra_bytes"] / (itemsize * row["batch"] * row["heads"] * row["seqlen"] * row["headdim"]))


def grid_tables(data: Rows) -> list[str]:
    """A table for each pass: head dim and mask down, sequence length across, every contender in a cell."""
    lengths = sorted({row["seqlen"] for row in data})
    names = list(dict.fromkeys(name for row in data for key in ("tflops", "unsupported") for name in row[key]))
    tables = []
    for which in dict.fromkeys(row["pass"] for row in data):
        cells: dict[str, dict[int, str]] = {}
        for row in data:
            if row["pass"] == which:
                speeds = (f"{row['tflops'][name]:.3g}" if name in row["tflops"] else "–" for name in names)
                cells.setdefault(kind_of(row), {})[row["seqlen"]] = " / ".join(speeds)
        body = [[kind, *(by_length.get(length, "") for length in lengths)] for kind, by_length in cells.items()]
        caption = f"{which.capitalize()}: {' / '.join(names)}, TFLOP/s, by sequence length:"
        tables.append(f"{caption}\n\n{markdown_table(['', *map(str, lengths)], body)}")
    if any(row["unsupported"] for row in data):
        tables.append("–: out of memory.")
    return tables


VIEWS: dict[str, Callable[[Rows], list[str]]] = {"grid": grid_tables, "ladder": ladder_tables}


def render(result: dict[str, Any]) -> str:
    """A result's tables, its notes and the line that says where its figures come from."""
    parts = VIEWS.get(result["benchmark"], plain_tables)(result["data"])
    source = f"`learn/results/{result['name']}.json`"
    return "\n\n".join([*parts, *result["notes"], f"Measured on {describe(result['stamp'])} ({source})."])


def fill(text: str, results: Path) -> str:
    """The text with every block filled. A block without a result says so; an unpaired mark is an error."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"].removesuffix(PLOT)
        path = results / f"{name}.json"
        if not path.exists() or (match["name"].endswith(PLOT) and not path.with_suffix(".png").exists()):
            body = NOT_MEASURED
        elif match["name"].endswith(PLOT):
            body = f"![{load(path)['title']}](results/{name}.png)"
        else:
            body = render(load(path))
        return f"{match[1]}\n{body}\n\n{match[3]}"

    unpaired = MARK.search(BLOCK.sub("", text))
    if unpaired:
        raise ValueError(f"{unpaired.group()} has no partner on a line of its own")
    return BLOCK.sub(replace, text)


def documents() -> list[Path]:
    """The files that may hold result blocks."""
    return sorted((ROOT / "learn").glob("*.md"))


def outdated(results: Path = RESULTS) -> list[tuple[Path, str]]:
    """The documents whose blocks differ from the results, each with its new text."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in documents()]
    return [(path, fill(text, results)) for path, text in texts if fill(text, results) != text]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a document differs")
    arguments = parser.parse_args(argv)
    changes = outdated()
    for path, text in changes:
        if arguments.check:
            print(f"{path} differs from {RESULTS}; run python -m learn.bench.report")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"filled: {path}")
    if arguments.check and changes:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
