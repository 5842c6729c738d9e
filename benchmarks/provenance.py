"""Provenance of a result: the machine and the sources that it was measured on, and whether the sources have changed.

Every benchmark saves through `save`; `python -m benchmarks.provenance check` lists the results in benchmarks/results/
whose sources differ from the working tree.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from build_tools import kernels

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# Sources by concern: globs relative to the repository root; a .cu brings the files that it includes. A benchmark names
# the concerns that its figures depend on: an edit of the CPU kernel leaves the GPU's results fresh, for example.
HOST = (
    "csrc/flash.h",
    "csrc/api/*",
    "csrc/dispatch/*",
    "csrc/common/message.h",
    "csrc/common/trace.h",
    "flash_attn_mini/flash_attn_interface.py",
    "flash_attn_mini/varlen.py",
    "flash_attn_mini/packed.py",
    "flash_attn_mini/kvcache.py",
    "flash_attn_mini/allocation.py",
    "flash_attn_mini/argument_checks.py",
    "flash_attn_mini/official.py",
    "flash_attn_mini/ops.py",
    "flash_attn_mini/options.py",
    "flash_attn_mini/rng_state.py",
    "flash_attn_mini/s_dmask.py",
    "flash_attn_mini/schemas.py",
    "flash_attn_mini/tracing.py",
    "flash_attn_mini/transforms.py",
    "flash_attn_mini/backends/*.py",
)
LAUNCH = ("csrc/flash.h", "csrc/dispatch/*", "csrc/api/set_params.*")
CUDA = ("csrc/sm*/forward/*.cu", "build_tools/kernels.py")
KVCACHE = ("csrc/kvcache/*", "csrc/sm90/decode/*.cu")  # beside CUDA
CUDA_BACKWARD = ("csrc/sm*/backward/*.cu", "build_tools/kernels.py")
TRITON = ("flash_attn_mini/backends/triton/**/*.py",)
CPU = ("csrc/common/**/*", "csrc/cpu/**/*")
METHOD = ("benchmarks/methods.py", "benchmarks/rivals.py", "benchmarks/features.py")
SOURCES_OF_BACKEND = {"cuda": (*LAUNCH, *CUDA), "triton": TRITON, "cpu": (*LAUNCH, *CPU)}
BACKWARD_SOURCES_OF_BACKEND = {
    "cuda": (*LAUNCH, "csrc/api/allocation.*", *CUDA_BACKWARD),
    "triton": TRITON,
    "cpu": (*LAUNCH, *CPU),
}
KVCACHE_SOURCES_OF_BACKEND = {**SOURCES_OF_BACKEND, "cuda": (*SOURCES_OF_BACKEND["cuda"], *KVCACHE)}

_CPP_SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".inl"}
_SUFFIXES = _CPP_SUFFIXES | {".py"}
# A string or character literal (kept) or a comment (dropped).
_CPP_TOKEN = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _docstring_lines(text: str) -> set[int]:
    """The numbers of the lines that docstrings take up, counted from 1."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def normalise(text: str, suffix: str) -> str:
    """The text without comments, docstrings, blank lines and, in C++, layout: what cannot change a measurement."""
    if suffix in _CPP_SUFFIXES:
        without_comments = _CPP_TOKEN.sub(lambda match: match.group(1) or " ", text)
        return "".join(without_comments.split())
    skipped = _docstring_lines(text)
    lines = (line.rstrip() for number, line in enumerate(text.splitlines(), start=1) if number not in skipped)
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def find_sources(globs: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The source files that the globs name, and those that the .cu files among them include, sorted, each once."""
    named = {path for pattern in globs for path in root.glob(pattern) if path.is_file() and path.suffix in _SUFFIXES}
    included = {path for source in named if source.suffix == ".cu" for path in kernels.included_files(source)}
    return sorted(named | included)


def hash_sources(globs: Iterable[str], root: Path = ROOT) -> str:
    """SHA-256 over the paths and the normalised text of the files that the globs name."""
    digest = hashlib.sha256()
    for path in find_sources(globs, root):
        text = normalise(path.read_text(encoding="utf-8"), path.suffix)
        digest.update(f"{path.relative_to(root).as_posix()}\0{text}\0".encode())
    return digest.hexdigest()


def _first_line_of(command: Sequence[str]) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip().splitlines()[0] if output.strip() else None


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


def stamp(sources: Iterable[str] = (), root: Path = ROOT) -> dict[str, Any]:
    """The stamp of a result: machine, versions, date (UTC), and the sources with their hash."""
    import torch  # here, so that `check` needs no torch

    has_gpu = torch.cuda.is_available()
    globs = sorted(set(sources))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _first_line_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if has_gpu
        else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_threads": torch.get_num_threads(),
        "sources": globs,
        "sources_sha256": hash_sources(globs, root),
    }


def describe(stamp: dict[str, Any]) -> str:
    """The stamp in one line of prose, for captions under tables."""
    where = [stamp.get("gpu") or f"{stamp.get('cpu')}, {stamp.get('cpu_threads')} threads"]
    if stamp.get("instruction_set"):
        where.append(f"instruction set {stamp['instruction_set']}")
    for key, label in (("driver", "driver"), ("cuda", "CUDA"), ("torch", "torch"), ("triton", "triton")):
        if stamp.get(key) and (stamp.get("gpu") or key == "torch"):
            where.append(f"{label} {stamp[key]}")
    if stamp.get("cudnn"):
        major, minor, patch = stamp["cudnn"] // 10000, stamp["cudnn"] // 100 % 100, stamp["cudnn"] % 100
        where.append(f"cuDNN {major}.{minor}.{patch}")
    return f"{', '.join(where)}; {stamp['date']}"


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
    sources: Iterable[str],
    notes: Sequence[str] = (),
    out_dir: Path = RESULTS,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Writes `out_dir/name.json`: the rows measured and their stamp.

    `benchmark` names the module that measured; tables.py chooses the layout by it. The stamp covers its source and
    those of the method. `extra` is added to the stamp.
    """
    if not data:
        raise RuntimeError(f"{name}: nothing was measured, so nothing is written")
    globs = [*sources, *METHOD, f"benchmarks/{benchmark}.py"]
    result = {
        "name": name,
        "benchmark": benchmark,
        "title": title,
        "notes": list(notes),
        "stamp": {**stamp(globs), **(extra or {})},
        "data": data,
    }
    path = out_dir / f"{name}.json"
    write_atomically(path, as_json(result))
    return path


def as_json(result: dict[str, Any]) -> str:
    """The result as JSON with one line for each row of the data."""
    head = json.dumps({**result, "data": []}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in result["data"])
    return f"{head.removesuffix('[]' + chr(10) + '}')}[\n{rows}\n ]\n}}\n"


def load(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def stale_results(results: Path = RESULTS, root: Path = ROOT) -> list[tuple[Path, str]]:
    """The results whose sources have changed since they were measured, each with the date of its measurement."""
    stale = []
    for path in sorted(results.glob("*.json")):
        measured = load(path).get("stamp", {})
        if hash_sources(measured.get("sources", ()), root) != measured.get("sources_sha256"):
            stale.append((path, measured.get("date", "no stamp")))
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "stamp"), help="list stale results, or print this machine's stamp")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "stamp":
        print(json.dumps(stamp(), indent=1))
        return
    for path, date in stale_results(arguments.results):
        print(f"stale: {path.name}, measured {date}: its sources have changed since")


if __name__ == "__main__":
    main()
