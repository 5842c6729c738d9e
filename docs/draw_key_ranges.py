"""Draws docs/images/key_ranges.svg: which key each query sees with the ranges of each builder of flash_attn_mini.masks.

    python docs/draw_key_ranges.py

The picture is a function of the builders and the reference, to the byte: tests/docs/test_docs.py draws it again and
compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from draw_masks import CELL, MARGIN, TEXT, cells, text  # noqa: E402

from flash_attn_mini import masks  # noqa: E402
from flash_attn_mini.reference import in_key_ranges, visible_keys  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "key_ranges.svg"
LABEL, COLUMN, TOP, TOKENS = 330, 150, 66, 8
BOUNDARIES, KEPT = torch.tensor([0, 3, 4, 8]), torch.tensor([[False] * 2 + [True] * 6])


def rows() -> Iterator[tuple[str, str, Tensor, bool]]:
    """Name, call, key_ranges, and whether they are combined with causal=True."""
    documents, padding = masks.documents(BOUNDARIES), masks.padding(KEPT, TOKENS)
    yield "documents", "documents([0, 3, 4, 8])", documents, True
    yield "prefix", "prefix_lm([3], 8)", masks.prefix_lm(torch.tensor([3]), TOKENS), False
    yield "chunks", "chunked(8, 3)", masks.chunked(TOKENS, 3), True
    yield "padding", "padding([[0, 0, 1, 1, 1, 1, 1, 1]], 8)", padding, True
    both = masks.intersection(documents, padding)
    yield "documents and padding", "intersection(documents, padding)", both, True
    yield "first keys and a window", "global_and_window(8, 8, 2, 1)", masks.global_and_window(8, 8, 2, 1), False


def picture() -> str:
    """The whole SVG."""
    bold, code = ' font-weight="bold"', ' font-family="monospace"'
    lefts = (LABEL, LABEL + COLUMN)
    body = [text(MARGIN, 24, "Rows are queries, columns are keys; blue = seen. 8 queries and 8 keys.")]
    body += [text(lefts[0], 52, "key_ranges", bold), text(lefts[1], 52, "and causal=True", bold)]
    causal, top = visible_keys(TOKENS, TOKENS, causal=True), TOP
    for name, call, key_ranges, with_causal in rows():
        body += [text(MARGIN, top + 14, name, bold), text(MARGIN, top + 32, call, code)]
        seen = in_key_ranges(key_ranges, TOKENS)[0, 0]
        body += cells(seen.int() - 1, lefts[0], top)
        if with_causal:
            body += cells((seen & causal).int() - 1, lefts[1], top)
        top += TOKENS * CELL + 20
    width, height = lefts[1] + TOKENS * CELL + MARGIN, top - 20 + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
