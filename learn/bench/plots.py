"""Plots of results: the ladder, the tutorials' grid, rooflines."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Drawing, draw_lines, kind_of
from learn.draw import figure_of

# Keys of rows of roofline.py.
STANDARD, FLASH = "standard, FLOPs a byte", "flash, FLOPs a byte"
BY_ROOFLINE, MEASURED = "speed-up by the roofline", "speed-up measured"


def drawing_of(result: dict[str, Any]) -> Drawing | None:
    """The function that draws the rows of a result, None for a result without a plot."""
    benchmark, row = result["benchmark"], result["data"][0]
    if benchmark == "grid":
        return draw_grid
    if benchmark == "ladder" and "rung" in row:
        return figure_of
    if benchmark == "roofline" and "rung" in row:
        return draw_roofline
    if benchmark == "roofline" and STANDARD in row:
        return draw_lengths
    return None


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
