"""Plots of results: TFLOP/s over sequence length, GB/s and µs of KV caches, and those of the learning path: the ladder,
the tutorials' grid, rooflines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import LABELS, kind_of
from flash_attn_mini.ladder.draw import figure_of

# Keys of rows of learn_roofline.
STANDARD, FLASH = "standard, FLOPs a byte", "flash, FLOPs a byte"
BY_ROOFLINE, MEASURED = "speed-up by the roofline", "speed-up measured"
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
    if benchmark == "learn_grid":
        return draw_grid
    if benchmark == "learn_ladder" and "rung" in row:
        return figure_of
    if benchmark == "learn_roofline" and "rung" in row:
        return draw_roofline
    if benchmark == "learn_roofline" and STANDARD in row:
        return draw_lengths
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


def draw_grid(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """A row of panels for each pass, a column for each head dim and mask. A cross: out of memory."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    kinds = list(dict.fromkeys(map(kind_of, rows)))
    size = (3.6 * len(kinds), 2.7 * len(passes) + 0.6)
    figure, axes = plt.subplots(len(passes), len(kinds), figsize=size, squeeze=False, layout="constrained")
    for i, which in enumerate(passes):
        for j, kind in enumerate(kinds):
            axis = axes[i][j]
            here = [row for row in rows if row["pass"] == which and kind_of(row) == kind]
            draw_lines(axis, here, "seqlen", "tflops")
            for row in here:
                for name, reason in row["unsupported"].items():
                    axis.plot([row["seqlen"]], [0], marker="x", color="red", clip_on=False)
                    axis.annotate(f"{name}: {reason}", (row["seqlen"], 0), fontsize=7, color="red", ha="right")
            axis.set_title(f"{which}, {kind}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=8)
    return figure


def draw_roofline(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """The roof of the machine, and each rung at its intensity and speed."""
    peak, gbps, ridge = rows[0]["peak_tflops"], rows[0]["copy_gbps"], rows[0]["ridge"]
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    right = 4 * max(ridge, *(row["intensity"] for row in rows))
    left = min(row["intensity"] for row in rows) / 4
    axis.plot([left, ridge, right], [left * gbps / 1e3, peak, peak], color="gray", label="roof: copy, matrix product")
    axis.axvline(ridge, color="gray", linestyle=":", label=f"ridge: {ridge:.0f} FLOPs a byte")
    for row in rows:
        axis.plot([row["intensity"]], [row["tflops"]], marker="o", linestyle="", label=row["rung"])
        axis.annotate(f" {row['rung'].split('.')[0]}", (row["intensity"], row["tflops"]), fontsize=8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOPs for each byte that the loops read and write")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def draw_lengths(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Intensity and speed-up of flash attention and standard attention over the length."""
    figure, (intensity, speed_up) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for headdim in dict.fromkeys(row["head dim"] for row in rows):
        here = [row for row in rows if row["head dim"] == headdim]
        seqlens = [row["seqlen"] for row in here]
        for key, style in ((STANDARD, "--"), (FLASH, "-")):
            intensity.plot(
                seqlens, [row[key] for row in here], style, marker="o", label=f"d{headdim} {key.split(',')[0]}"
            )
        speed_up.plot(
            seqlens, [row[BY_ROOFLINE] for row in here], "--", marker="o", label=f"d{headdim} by the roofline"
        )
        measured = [(row["seqlen"], row[MEASURED]) for row in here if not isinstance(row[MEASURED], str)]
        speed_up.plot([x for x, _ in measured], [y for _, y in measured], marker="o", label=f"d{headdim} measured")
    intensity.set_yscale("log")
    for axis, title in ((intensity, "FLOPs a byte"), (speed_up, "speed-up of flash over standard attention")):
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
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
