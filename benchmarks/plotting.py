"""Plots of results of speed, TFLOP/s over sequence length: a panel for each head dim, number of key heads and mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import kind_of


def plot(result: dict[str, Any], path: Path) -> bool:
    """Draws a result of speed to `path`. False when there is nothing to draw or matplotlib is not installed."""
    rows = result["data"]
    if result["benchmark"] != "bench_speed":
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False

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
            for name in dict.fromkeys(name for row in here for name in row["tflops"]):
                points = sorted((row["seqlen"], row["tflops"][name]) for row in here if name in row["tflops"])
                axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
            if "ceiling_tflops" in here[0]:
                axis.axhline(here[0]["ceiling_tflops"], color="gray", linestyle="--", label="matrix product")
            lengths = sorted({row["seqlen"] for row in here})
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
            axis.set_ylim(bottom=0)
            axis.set_title(kind_of(here[0]), fontsize=10)
            axis.grid(alpha=0.3)
    axes[-1][0].set_xlabel("sequence length")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{result['title']}\n{result['stamp'].get('gpu') or result['stamp'].get('cpu')}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
