"""Shared by the benchmarks' command lines: arguments, progress, and writing a result as JSON and plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import plotting, provenance, tables

T = TypeVar("T")


def parser_for(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="wall-clock budget (default: %(default)s)")
    parser.add_argument("--out-dir", type=Path, default=provenance.RESULTS, help="where results are written")
    parser.add_argument("--commit", help="what is measured, in a copy of the sources that is no git repository")
    parser.add_argument("--quick", action="store_true", help="fewer points; writes NAME_quick instead of NAME")
    return parser


def progress(items: Sequence[T], label: str) -> Iterable[T]:
    """The items with a progress bar on a terminal, and without one elsewhere or when tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=label, leave=False, disable=not sys.stderr.isatty())
    return bar


def require_gpu(benchmark: str) -> torch.device:
    """The GPU, or an end of the program that says one is needed."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{benchmark} needs a CUDA GPU and this machine shows none to PyTorch")
    return torch.device("cuda", torch.cuda.current_device())


def finish(
    name: str,
    *,
    benchmark: str,
    title: str,
    data: list[dict[str, Any]],
    sources: Iterable[str] = (),
    arguments: argparse.Namespace,
    notes: Sequence[str] = (),
    complete: bool = True,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Saves the rows under `name` (stamped), draws them where there is a plot, and prints their tables.

    A quick run, and one that ran out of time (not `complete`), writes under another name and keeps the earlier result.
    `extra` is added to the stamp, as is --commit.
    """
    stamped = {**(extra or {}), **({"commit": arguments.commit} if arguments.commit else {})}
    suffix = "_quick" if arguments.quick else "" if complete else "_partial"
    path = provenance.save(
        name + suffix,
        benchmark=benchmark,
        title=title,
        data=data,
        sources=sources,
        notes=notes,
        out_dir=arguments.out_dir,
        extra=stamped,
    )
    result = provenance.load(path)
    plotting.plot(result, path.with_suffix(".png"))
    print(f"{tables.page(result)}\nwritten: {path}")
