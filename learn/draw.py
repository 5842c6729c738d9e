"""The plot of the ladder: bars in the terminal, or a picture by matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BAR = 46  # characters of the longest bar


def text_plot(rows: list[dict[str, Any]]) -> str:
    """A bar for each measured rung: TFLOP/s on a logarithmic scale."""
    measured = [row for row in rows if "ms" in row]
    if not measured:
        return ""
    lowest = math.log10(min(row["tflops"] for row in measured)) - 0.3
    span = max(math.log10(max(row["tflops"] for row in measured)) - lowest, 1e-9)
    width = max(len(row["rung"]) for row in measured)
    lines = ["TFLOP/s, logarithmic:"]
    for row in measured:
        bar = "█" * max(1, round(BAR * (math.log10(row["tflops"]) - lowest) / span))
        lines.append(f"  {row['rung']:<{width}}  {bar} {row['tflops']:.3g}")
    return "\n".join(lines)


def figure_of(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """TFLOP/s and extra memory of each measured rung, side by side. ``plt`` is matplotlib.pyplot."""
    measured = [row for row in rows if "ms" in row][::-1]
    names = [row["rung"] for row in measured]
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 0.4 * len(names) + 1.6), layout="constrained")
    speed.barh(names, [row["tflops"] for row in measured], log=True, color="#3b6ea5")
    memory.barh(names, [max(row["extra_bytes"], 1) for row in measured], log=True, color="#a5653b")
    for axis, key, style, least in ((speed, "tflops", "{:.3g}", 0.0), (memory, "extra_bytes", "{:,}", 1.0)):
        for n, row in enumerate(measured):
            axis.text(max(row[key], least), n, " " + style.format(row[key]), va="center", fontsize=8)
        low, high = axis.get_xlim()
        axis.set_xlim(low, high * 20)
    speed.set_title("TFLOP/s", fontsize=10)
    memory.set_title("extra memory, bytes", fontsize=10)
    memory.set_yticks([])
    return figure


def save_plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws `figure_of` to a file.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = figure_of(plt, rows)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
