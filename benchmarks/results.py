"""Results: JSON files with the machine, date and commit of the measurement, and the documents that show them.

Every benchmark ends with `finish`. `python -m benchmarks --stale` lists the results whose kernels have changed since.
The documents' blocks between `<!-- results:NAME begin -->` and `<!-- results:NAME end -->` are filled from the results,
so that no figure is typed by hand. NAME is a file of the results, for its tables, FILE.summary or FILE+FILE.summary,
for their median ratios, or FILE.plot, for its picture.

  python -m benchmarks.results             rewrite the blocks
  python -m benchmarks.results --plots     draw the pictures of the results again, too
  python -m benchmarks.results --check     say which files differ from the results, exit 1 if any does
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables

Result = dict[str, Any]  # as `save` writes it

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LEARN_RESULTS = ROOT / "learn" / "results"

# What a figure depends on, by concern: paths or globs relative to the repository root. A benchmark names its concerns:
# an edit of the CPU kernel leaves the GPU's results fresh, for example.
LAUNCH = ("csrc/flash.h", "csrc/api", "csrc/common", "csrc/dispatch")
HOST = (*LAUNCH, "flash_attn_mini/*.py", "flash_attn_mini/backends/*.py")
ATTENTION = (  # of the cuda backend, without a KV cache
    *LAUNCH,
    "csrc/kvcache/instructions.h",
    "csrc/single_tile",
    "csrc/sm80",
    *(f"csrc/sm90/{folder}" for folder in ("backward", "common", "forward")),
)
CUDA = (*ATTENTION, "csrc/kvcache", "csrc/sm90/decode")
TRITON = ("flash_attn_mini/backends/triton",)
CPU = (*LAUNCH, "csrc/cpu")
SOURCES_OF_BACKEND = {"cuda": ATTENTION, "triton": TRITON, "cpu": CPU}
SOURCES_OF_CACHE = {**SOURCES_OF_BACKEND, "cuda": CUDA}  # of calls with a KV cache
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")  # prints a line for each GPU
KERNELS = ("csrc", *TRITON)  # of a result that names no sources

BLOCK = re.compile(r"(<!-- results:(?P<name>[\w.+-]+) begin -->\n).*?(<!-- results:(?P=name) end -->)", re.DOTALL)
CPP_STRING = r'"(?:\\.|[^"\\\n])*"'
CPP_TOKENS = re.compile(
    rf'{CPP_STRING}|(?P<no_code>//[^\n]*|/\*.*?\*/|\bstatic_assert\((?:[^;"]|{CPP_STRING})*;)', re.DOTALL
)
MARK = re.compile(r"<!-- results:[\w.+-]+ (?:begin|end) -->")
SUMMARY, PLOT = ".summary", ".plot"
NOT_MEASURED = "Not measured yet."


def _output_of(command: Sequence[str], folder: Path = ROOT) -> str | None:
    """What a command prints; None where it fails or is not installed."""
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _git(arguments: Sequence[str], root: Path) -> str | None:
    return _output_of(["git", *arguments], root)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.metadata(package)["Version"]
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(sources: Iterable[str] = (), root: Path = ROOT) -> str | None:
    """The commit that is checked out, with `+` behind it if the sources differ from it; None outside a repository."""
    commit = _git(["rev-parse", "HEAD"], root)
    if commit is None:
        return None
    changed = _git(["status", "--porcelain", "--", *_pathspecs(sources or KERNELS)], root)
    return f"{commit}+" if changed else commit


def _pathspecs(sources: Iterable[str]) -> list[str]:
    return [f":(top,glob){source}" for source in sources]  # a * matches no slash


def stamp(sources: Iterable[str] = (), root: Path = ROOT) -> dict[str, Any]:
    """The stamp of a result: machine, versions, date (UTC), commit, and the sources that its figures depend on."""
    import torch  # here, so that `--stale` needs no torch

    has_gpu = torch.cuda.is_available()
    paths = sorted(set(sources))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": (_output_of(DRIVER) or "").partition("\n")[0] or None if has_gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_threads": torch.get_num_threads(),
        "commit": commit_of(paths, root),
        "sources": paths,
    }


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a run that dies leaves the previous file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def save(
    name: str,
    *,
    benchmark: str,
    title: str,
    data: list[dict[str, Any]],
    sources: Iterable[str] = (),
    notes: Sequence[str] = (),
    out_dir: Path = RESULTS,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Writes `out_dir/name.json`: the rows measured and their stamp.

    `benchmark` names what was measured; tables.py chooses the layout by it. A result is stale after a commit
    of its `sources`. `extra` is added to the stamp.
    """
    if not data:
        raise RuntimeError(f"{name}: nothing was measured, so nothing is written")
    result = {
        "name": name,
        "benchmark": benchmark,
        "title": title,
        "notes": list(notes),
        "stamp": {**stamp(sources), **(extra or {})},
        "data": data,
    }
    path = out_dir / f"{name}.json"
    write_atomically(path, as_json(result))
    return path


def as_json(result: Result) -> str:
    """The result as JSON with one line for each row of the data."""
    head = json.dumps({**result, "data": []}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in result["data"])
    return f"{head.removesuffix('[]' + chr(10) + '}')}[\n{rows}\n ]\n}}\n"


def load(path: Path) -> Result:
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def _code(file: str, text: str) -> str:
    """The text without comments, and of C++ without static_assert and line breaks."""
    if file.endswith(".py"):
        return ast.unparse(ast.parse(text))
    return " ".join(CPP_TOKENS.sub(lambda match: " " if match["no_code"] else match[0], text).split())


def _code_changed(commit: str, paths: Sequence[str], root: Path) -> bool | None:
    """Whether the code of the files differs between a commit and HEAD; None if the commit is unknown."""
    names = _git(["diff", "--name-only", "--no-renames", f"{commit}..HEAD", "--", *paths], root)
    if names is None:
        return None

    def code(revision: str, file: str) -> str:
        return _code(file, _git(["show", f"{revision}:{file}"], root) or "")

    return any(code(commit, file) != code("HEAD", file) for file in names.splitlines())


def last_change(path: Path, root: Path = ROOT) -> str | None:
    """The last commit of the sources since a result was measured, with its date and subject; None if their code has not
    changed. Neither comments nor static_assert are code.

    A result of sources that were not committed counts from the commit that brought it, one that is not committed
    either, or of an unknown commit, from its date.
    """
    stamp = load(path).get("stamp", {})
    commit, date = str(stamp.get("commit") or "+"), stamp.get("date", "1970-01-01")
    if commit.endswith("+"):
        brought = _git(["log", "--format=%H", f"-S{date}", "--", str(path.resolve())], root)
        commit = brought.splitlines()[-1] if brought else commit.rstrip("+")
    show, paths = ["log", "-1", "--format=%h, %cs, %s"], _pathspecs(stamp.get("sources") or KERNELS)
    changed = _code_changed(commit, paths, root) if commit else None
    if changed is None:
        return _git([*show, f"--since={date}", "--", *paths], root) or None
    return _git([*show, f"{commit}..HEAD", "--", *paths], root) if changed else None


def stale_results(results: Path = RESULTS, root: Path = ROOT) -> list[tuple[Path, str]]:
    """The results whose kernels have changed since, each with the reason."""
    stale = []
    for path in sorted(results.glob("*.json")):
        changed = last_change(path, root)
        if changed is not None:
            measured = load(path).get("stamp", {}).get("date", "without a stamp")
            stale.append((path, f"measured {measured}; changed since: {changed}"))
    return stale


def print_stale(results: Path = RESULTS) -> None:
    """A line for each stale result."""
    for path, reason in stale_results(results):
        print(f"stale: {path.name}, {reason}")


def parser_for(doc: str | None, *, seconds: float, out_dir: Path = RESULTS) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="wall-clock budget (default: %(default)s)")
    parser.add_argument("--out-dir", type=Path, default=out_dir, help="where results are written")
    parser.add_argument("--commit", help="what is measured, in a copy of the sources that is no git repository")
    parser.add_argument("--quick", action="store_true", help="fewer points; writes NAME_quick instead of NAME")
    return parser


def finish(
    name: str,
    benchmark: str,
    title: str,
    data: list[dict[str, Any]],
    arguments: argparse.Namespace,
    *,
    sources: Iterable[str] = (),
    notes: Sequence[str] = (),
    left_out: Sequence[str] = (),
    complete: bool = True,
    extra: Mapping[str, str] | None = None,
    render: Callable[[Result], str] = tables.render,
    drawing_of: Callable[[Result], tables.Drawing | None] = tables.drawing_of,
) -> None:
    """Saves the rows under `name` (stamped), draws them where there is a plot, and prints their tables.

    A quick run, and one that ran out of time (not `complete`), writes under another name and keeps the earlier result.
    `left_out`, if not empty, is a note that says so, and ends the program after the result is saved. `extra` is added
    to the stamp, as is --commit.
    """
    stamped = {**(extra or {}), **({"commit": arguments.commit} if arguments.commit else {})}
    suffix = "_quick" if arguments.quick else "_partial" if left_out or not complete else ""
    path = save(
        name + suffix,
        benchmark=benchmark,
        title=title,
        data=data,
        sources=sources,
        notes=[*notes, *left_out],
        out_dir=arguments.out_dir,
        extra=stamped,
    )
    result = load(path)
    tables.plot(result, path.with_suffix(".png"), drawing_of)
    print(f"# {title}\n\n{render(result)}\n\nwritten: {path}")
    if left_out:
        raise SystemExit(f"{benchmark}: {left_out[0]}")


def fill(text: str, results: Path, folder: Path | None = None, render: Callable[[Result], str] = tables.render) -> str:
    """The text with every block filled. A block without a result says so; an unpaired mark is an error.

    `folder` is that of the document, for links to pictures (default: the folder of the results).
    """

    def replace(match: re.Match[str]) -> str:
        if match["name"].endswith(PLOT):
            return f"{match[1]}\n{picture(results / match['name'].removesuffix(PLOT), folder or results)}\n\n{match[3]}"
        view = tables.summarize if match["name"].endswith(SUMMARY) else render
        paths = [results / f"{name}.json" for name in match["name"].removesuffix(SUMMARY).split("+")]
        body = view(*map(load, paths)) if all(path.exists() for path in paths) else NOT_MEASURED
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
    return f"![{load(json)['title']}]({Path(os.path.relpath(png, folder)).as_posix()})"


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold result blocks."""
    return [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.exists()]


def outdated(
    paths: Iterable[Path], results: Path, render: Callable[[Result], str] = tables.render
) -> list[tuple[Path, str]]:
    """The files whose blocks differ from the results, each with its new text."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    filled = [(path, text, fill(text, results, path.parent, render)) for path, text in texts]
    return [(path, new) for path, old, new in filled if new != old]


def update(changes: Sequence[tuple[Path, str]], check: bool, module: str) -> None:
    """Rewrites the documents that `outdated` found; with `check` names them instead and ends the program."""
    for path, text in changes:
        if check:
            print(f"{path} differs from the results; run python -m {module}")
        else:
            write_atomically(path, text)
            print(f"filled: {path}")
    if check and changes:
        raise SystemExit(1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file differs")
    parser.add_argument("--plots", action="store_true", help="draw the pictures of the results again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("files", nargs="*", type=Path, help="default: README.md and docs/**/*.md")
    arguments = parser.parse_args(argv)
    if arguments.plots:
        for path in sorted(arguments.results.glob("*.json")):
            tables.plot(load(path), path.with_suffix(".png"))
    update(outdated(arguments.files or documents(), arguments.results), arguments.check, "benchmarks.results")


if __name__ == "__main__":
    main()
