"""Draws docs/images/masks.svg: which key each query sees, as flash_attn_mini.reference says.

    python docs/draw_masks.py

The picture depends only on the reference, to the byte: tests/docs/test_docs.py draws it again and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_attn_mini.reference import alibi_bias, visible_keys  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "masks.svg"
CELL, COLUMN, LABEL, TOP, MARGIN = 14, 150, 236, 66, 14
SEEN, UNSEEN, LINE, TEXT = "#3b6ea8", "#eef1f4", "#ffffff", "#24292f"
SHADES = ("#3b6ea8", "#5d88b8", "#80a2c8", "#a2bcd8", "#c5d6e8")  # of ALiBi: from no distance to 4 and more
LENGTHS = ((4, 7), (6, 6), (7, 4))
MASKS = (
    ("all keys", "", {}),
    ("causal", "causal=True", {"causal": True}),
    ("window", "window_size=(2, 1)", {"window_size": (2, 1)}),
    ("window, one-sided", "window_size=(-1, 1)", {"window_size": (-1, 1)}),
    ("causal window", "causal=True, window_size=(2, 0)", {"causal": True, "window_size": (2, 0)}),
)
SEQLENS_Q, SEQLENS_K = (3, 0, 5, 1), (5, 2, 5, 4)


def cells(shades: Tensor, left: float, top: float) -> Iterator[str]:
    """A grid of squares: row = query, column = key; each value an index into the colours, -1 = not seen."""
    colours = (*SHADES, UNSEEN)
    for value in sorted(set(shades.flatten().tolist())):
        squares = "".join(
            f"M{left + key * CELL:g} {top + query * CELL:g}h{CELL}v{CELL}h-{CELL}z"
            for query, key in (shades == value).nonzero().tolist()
        )
        yield f'<path fill="{colours[value]}" stroke="{LINE}" d="{squares}"/>'


def text(x: float, y: float, words: str, style: str = "") -> str:
    """One line of writing."""
    return f'<text x="{x:g}" y="{y:g}"{style}>{words}</text>'


def rows_of_masks() -> Iterator[tuple[str, str, list[Tensor]]]:
    """Name, arguments, and the grid for each pair of lengths."""
    for name, arguments, options in MASKS:
        yield name, arguments, [visible_keys(q, k, **options).int() - 1 for q, k in LENGTHS]
    slope = torch.ones(1)
    yield (
        "ALiBi, causal",
        "alibi_slopes=..., causal=True",
        [
            torch.where(visible_keys(q, k, causal=True), -alibi_bias(slope, q, k)[0, 0].clamp(min=-4).int(), -1)
            for q, k in LENGTHS
        ],
    )


def varlen() -> Tensor:
    """Four sequences end to end, causal: each a mask of its own on the diagonal."""
    ends_q, ends_k = (list(accumulate(lengths, initial=0)) for lengths in (SEQLENS_Q, SEQLENS_K))
    grid = torch.full((ends_q[-1], ends_k[-1]), -1, dtype=torch.int)
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        grid[q0:q1, k0:k1] = visible_keys(q1 - q0, k1 - k0, causal=True).int() - 1
    return grid


def picture() -> str:
    """The whole SVG."""
    lefts = [LABEL + n * COLUMN for n in range(len(LENGTHS))]
    width = LABEL + len(LENGTHS) * COLUMN
    body = [text(MARGIN, 24, "Rows are queries, columns are keys; blue = seen. Everything hangs at the last key.")]
    bold = ' font-weight="bold"'
    for (q, k), left in zip(LENGTHS, lefts, strict=True):
        sign = "&lt;" if q < k else "=" if q == k else "&gt;"
        body.append(text(left, 52, f"seqlen_q {sign} seqlen_k", bold))
    top: float = TOP
    for name, arguments, grids in rows_of_masks():
        body += [text(MARGIN, top + 14, name, bold), text(MARGIN, top + 32, arguments, ' font-family="monospace"')]
        for grid, left in zip(grids, lefts, strict=True):
            body += cells(grid, left, top)
        top += max(grid.shape[0] for grid in grids) * CELL + 20
    lengths = (f"q {', '.join(map(str, SEQLENS_Q))}", f"k {', '.join(map(str, SEQLENS_K))}")
    body += [
        text(MARGIN, top + 14, "variable length, causal", bold),
        text(MARGIN, top + 32, "sequences of"),
        *(text(MARGIN, top + 50 + 18 * n, line, ' font-family="monospace"') for n, line in enumerate(lengths)),
        *cells(varlen(), LABEL, top),
    ]
    height = top + sum(SEQLENS_Q) * CELL + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
