"""Results of learn/ as JSON: the rows, and the machine, the versions, the date and the commit that they belong to."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "learn" / "results"
Rows = list[dict[str, Any]]


def parser_for(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """An argument parser with the options that every measurement has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="wall-clock budget (default: %(default)s)")
    parser.add_argument("--out-dir", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--quick", action="store_true", help="fewer points; writes NAME_quick instead of NAME")
    return parser


def require_gpu(measurement: str) -> None:
    """Ends the program with a sentence where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{measurement} needs a CUDA GPU and this machine shows none to PyTorch")


def _first_line_of(*command: str) -> str | None:
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
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


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def stamp() -> dict[str, Any]:
    """Machine, versions, date (UTC) and commit."""
    has_gpu = torch.cuda.is_available()
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _first_line_of("git", "rev-parse", "--short=12", "HEAD"),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _first_line_of(*query) if has_gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_threads": torch.get_num_threads(),
    }


def describe(stamp: dict[str, Any]) -> str:
    """The stamp in one line, for captions under tables. Earlier results have no commit."""
    where = [stamp.get("gpu") or f"{stamp.get('cpu')}, {stamp.get('cpu_threads')} threads"]
    for key, label in (("driver", "driver"), ("cuda", "CUDA"), ("torch", "torch"), ("triton", "triton")):
        if stamp.get(key) and (stamp.get("gpu") or key == "torch"):
            where.append(f"{label} {stamp[key]}")
    if stamp.get("cudnn"):
        major, minor, patch = stamp["cudnn"] // 10000, stamp["cudnn"] // 100 % 100, stamp["cudnn"] % 100
        where.append(f"cuDNN {major}.{minor}.{patch}")
    commit = f", commit {stamp['commit']}" if stamp.get("commit") else ""
    return f"{', '.join(where)}; {stamp['date']}{commit}"


def save(name: str, *, benchmark: str, title: str, data: Rows, out_dir: Path, notes: Sequence[str] = ()) -> Path:
    """Writes `out_dir/name.json`. `benchmark` is the module of learn.bench that measured: report.py chooses by it."""
    if not data:
        raise RuntimeError(f"{name}: nothing was measured, so nothing is written")
    head = {"name": name, "benchmark": benchmark, "title": title, "notes": list(notes), "stamp": stamp()}
    path = out_dir / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # a run that dies leaves the earlier result as it was
    unfinished.write_text(as_json({**head, "data": data}), encoding="utf-8")
    unfinished.replace(path)
    return path


def as_json(result: dict[str, Any]) -> str:
    """The result as JSON with one line for each row of the data."""
    head = json.dumps({**result, "data": []}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in result["data"])
    return f"{head.removesuffix('[]' + chr(10) + '}')}[\n{rows}\n ]\n}}\n"


def load(path: Path) -> dict[str, Any]:
    """A result as `save` wrote it."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def finish(
    name: str,
    *,
    benchmark: str,
    title: str,
    data: Rows,
    arguments: argparse.Namespace,
    notes: Sequence[str] = (),
    complete: bool = True,
) -> None:
    """Saves the rows under `name` with their plot, and prints their tables.

    A quick run, and one that ran out of time (not `complete`), writes under another name and keeps the earlier result.
    """
    from learn.bench import plots, report

    suffix = "_quick" if arguments.quick else "" if complete else "_partial"
    path = save(name + suffix, benchmark=benchmark, title=title, data=data, notes=notes, out_dir=arguments.out_dir)
    result = load(path)
    plots.plot(result, path.with_suffix(".png"))
    print(f"{title}\n\n{report.render(result)}\nwritten: {path}")
