"""Plots of results: TFLOP/s over sequence length, GB/s and µs of KV caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import LABELS, kind_of

KVCACHE = {"lengths": ("seqlen_k", "gbps", "keys", "GB/s of K and V"), "queries": ("seqlen_q", "us", "queries", "µs")}


def plot(result: dict[str, Any], path: Path) -> bool:
    """Draws a result to `path`. False when there is nothing to draw or matplotlib is not installed."""
    draw = drawing_of(result)
    if draw is None:
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False

    drawing = draw(plt, result["data"])
    drawing.suptitle(f"{result['title']}\n{result['stamp'].get('gpu') or result['stamp'].get('cpu')}", fontsize=10)
    drawing.savefig(path, dpi=110)
    plt.close(drawing)
    return True


def drawing_of(result: dict[str, Any]) -> Callable[[Any, list[dict[str, Any]]], Any] | None:
    """The function that draws the rows of a result, None for a result without a plot."""
    benchmark, row = result["benchmark"], result["data"][0]
    if benchmark == "bench_speed":
        return draw_speed
    if benchmark == "bench_kvcache" and row.get("figure") in KVCACHE:
        return draw_kvcache
    return None


def draw_speed(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """A panel for each head dim, number of key heads and mask."""
    columns = list(dict.fromkeys((row["headdim"], row["nheads_k"]) for row in rows))
    masks = sorted({row["causal"] for row in rows})
    size = (4.2 * len(columns), 3.2 * len(masks) + 0.6)
    figure, axes = plt.subplots(len(masks), len(columns), figsize=size, squeeze=False, layout="constrained")
    for i, causal in enumerate(masks):
        for j, column in enumerate(columns):
            axis = axes[i][j]
            here = [row for row in rows if (row["headdim"], row["nheads_k"]) == column and row["causal"] == causal]
            if not here:  # an incomplete result
                axis.axis("off")
                continue
            if "ceiling_tflops" in here[0]:  # before draw_lines, which fixes the limits of the axis
                axis.axhline(here[0]["ceiling_tflops"], color="gray", linestyle="--", label="matrix product")
            draw_lines(axis, here, "seqlen", "tflops")
            axis.set_title(kind_of(here[0]), fontsize=10)
    axes[-1][0].set_xlabel("sequence length")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=8)
    return figure


def draw_kvcache(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """A panel for each batch size."""
    x, y, x_label, y_label = KVCACHE[rows[0]["figure"]]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure, axes = plt.subplots(1, len(batches), figsize=(5 * len(batches), 4), squeeze=False, layout="constrained")
    for axis, batch in zip(axes[0], batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        if y == "gbps" and "ceiling_gbps" in here[0]:
            axis.axhline(here[0]["ceiling_gbps"], color="gray", linestyle="--", label="copy")
        draw_lines(axis, here, x, y)
        axis.set_title(f"batch {batch}", fontsize=10)
        axis.set_xlabel(x_label)
    axes[0][0].set_ylabel(y_label)
    axes[0][0].legend(fontsize=8)
    return figure


def draw_lines(axis: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    """A line for each contender, over a logarithmic axis of lengths. It fixes the limits of the vertical axis."""
    for name in dict.fromkeys(name for row in rows for name in row[y]):
        points = sorted((row[x], row[y][name]) for row in rows if name in row[y])
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker="o", markersize=4, label=LABELS.get(name, name))
    values = sorted({row[x] for row in rows})
    ticks = [value for value in values if value & (value - 1) == 0]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(value) for value in ticks], fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
