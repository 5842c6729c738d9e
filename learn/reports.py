"""What `--rung NAME` prints beyond the row of the table: the experiments that belong to a rung, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import experiments, minimal_cuda
from .rungs import fastest_device, triton_device, triton_unavailable_reason

DIFFERENCES = """\
The kernels of csrc/sm80 run the same loop. They differ in this:
  products   tensor cores on 16-bit operands, float32 sums; here one multiply-add a thread at a time
  copies     cp.async, one product ahead; here a step waits for its tiles
  conflicts  a swizzle of 16-byte pieces; here one float of padding a row
  softmax    base 2, the output is rescaled only when the maximum has grown by 2^8; here base e, in every step
  mask       only in blocks at an edge; here every score is compared
  features   any strides, grouped heads, windows, score modifiers, dropout, pages, the log-sum-exp; here none"""


def text_of(value: Any) -> str:
    """A value as the tables show it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10000 else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table in plain text: keys across, rows down."""
    headers = list(rows[0])
    body = [[text_of(row[header]) for header in headers] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *body, strict=True)]
    lines = [headers, ["-" * width for width in widths], *body]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def left_out(rows: list[dict[str, Any]], wanted: int) -> Iterator[str]:
    """A line that says how many of the wanted rows are missing, if any."""
    if len(rows) < wanted:
        yield f"{wanted - len(rows)} larger sizes are left out: they take too long here (--seconds gives them more)."


def naive(seconds: float) -> Iterator[str]:
    """Memory over the length."""
    yield "Extra memory of one head, head dim 64, measured. Twice the length takes four times the memory:"
    yield table(experiments.naive_memory(fastest_device()))


def online_softmax(seconds: float) -> Iterator[str]:
    """The scheme that keeps whole rows on chip, and where it ends."""
    yield "The tempting scheme, whole_row.py: 64 whole rows of scores in shared memory."
    yield table(experiments.whole_row_limits())
    yield "With 99 KB, head dim 128, float16:"
    yield table(experiments.whole_row_runs())
    yield "online_softmax.py keeps 64 scores of each row, whatever the length."


def minimal_triton(seconds: float) -> Iterator[str]:
    """Errors over the length."""
    reason = triton_unavailable_reason()
    if reason is not None:
        yield reason
        return
    rows = experiments.minimal_triton_lengths(triton_device(), seconds)
    yield "One head, head dim 128, float16, against float64:"
    yield table(rows)
    yield from left_out(rows, len(experiments.MINIMAL_LENGTHS))


def flash_versions(seconds: float) -> Iterator[str]:
    """v1 against v2 against naive: errors, times, memory."""
    reason = triton_unavailable_reason()
    if reason is not None:
        yield reason
        return
    yield "Largest error against float64, float16, batch×seqlen×headdim:"
    yield table(experiments.version_errors(triton_device()))
    rows = experiments.version_times(triton_device(), seconds)
    yield "Time, and memory beyond q, k, v and out:"
    yield table(rows)
    yield from left_out(rows, len(experiments.TIMED_SHAPES))


def minimal_cuda_kernel(seconds: float) -> Iterator[str]:
    """Padding on and off, and what the full kernel does differently."""
    if minimal_cuda.unavailable_reason() is None:
        yield "Rows of a tile in shared memory with and without padding: batch 4, 8 heads, 1024 tokens."
        yield table(experiments.padding())
    yield DIFFERENCES


REPORTS: dict[str, Callable[[float], Iterator[str]]] = {
    "naive": naive,
    "online-softmax": online_softmax,
    "minimal-triton": minimal_triton,
    "flash-v1": flash_versions,
    "flash-v2": flash_versions,
    "minimal-cuda": minimal_cuda_kernel,
}
