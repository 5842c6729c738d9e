"""Fills the result blocks of the README and the docs from benchmarks/results/, so that no figure is typed by hand.

A block lies between `<!-- results:NAME begin -->` and `<!-- results:NAME end -->`. NAME is a file of the results, for
its tables, FILE.summary, for one line of its figures, or FILE.plot, for its picture.

  python -m benchmarks.report                             rewrite the blocks
  python -m benchmarks.report --plots                     draw the pictures of the results again, too
  python -m benchmarks.report --check                     say which files differ from the results, exit 1 if any does
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks import plotting, provenance, tables

BLOCK = re.compile(r"(<!-- results:(?P<name>[\w.-]+) begin -->\n).*?(<!-- results:(?P=name) end -->)", re.DOTALL)
MARK = re.compile(r"<!-- results:[\w.-]+ (?:begin|end) -->")
SUMMARY, PLOT = ".summary", ".plot"
NOT_MEASURED = "Not measured yet."


def fill(text: str, results: Path, folder: Path | None = None) -> str:
    """The text with every block filled. A block without a result says so; an unpaired mark is an error.

    `folder` is that of the document, for links to pictures (default: the folder of the results).
    """

    def replace(match: re.Match[str]) -> str:
        if match["name"].endswith(PLOT):
            return f"{match[1]}\n{picture(results / match['name'].removesuffix(PLOT), folder or results)}\n\n{match[3]}"
        view = tables.summarize if match["name"].endswith(SUMMARY) else tables.render
        path = results / f"{match['name'].removesuffix(SUMMARY)}.json"
        body = view(provenance.load(path)) if path.exists() else NOT_MEASURED
        return f"{match[1]}\n{body}\n\n{match[3]}"

    unpaired = MARK.search(BLOCK.sub("", text))
    if unpaired:
        raise ValueError(f"{unpaired.group()} has no partner on a line of its own")
    return BLOCK.sub(replace, text)


def picture(stem: Path, folder: Path) -> str:
    """The link to the picture of a result, from a document in `folder`."""
    json, png = stem.with_suffix(".json"), stem.with_suffix(".png")
    if not (json.exists() and png.exists()):
        return NOT_MEASURED
    return f"![{provenance.load(json)['title']}]({Path(os.path.relpath(png, folder)).as_posix()})"


def documents(root: Path = provenance.ROOT) -> list[Path]:
    """The files that may hold result blocks."""
    return [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.exists()]


def outdated(paths: Iterable[Path], results: Path) -> list[tuple[Path, str]]:
    """The files whose blocks differ from the results, each with its new text."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    filled = [(path, text, fill(text, results, path.parent)) for path, text in texts]
    return [(path, new) for path, old, new in filled if new != old]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file differs")
    parser.add_argument("--plots", action="store_true", help="draw the pictures of the results again")
    parser.add_argument("--results", type=Path, default=provenance.RESULTS)
    parser.add_argument("files", nargs="*", type=Path, help="default: README.md and docs/**/*.md")
    arguments = parser.parse_args(argv)
    changes = outdated(arguments.files or documents(), arguments.results)
    if arguments.plots:
        for path in sorted(arguments.results.glob("*.json")):
            plotting.plot(provenance.load(path), path.with_suffix(".png"))
    for path, text in changes:
        if arguments.check:
            print(f"{path} differs from the results in {arguments.results}; run python -m benchmarks.report")
        else:
            provenance.write_atomically(path, text)
            print(f"filled: {path}")
    if arguments.check and changes:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
