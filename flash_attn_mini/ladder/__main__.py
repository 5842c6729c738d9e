"""python -m flash_attn_mini.ladder: run every rung that this machine can run, and compare it with the reference.

Needs PyTorch alone: no compiled extension, no other package, no GPU.
"""

from __future__ import annotations

import torch

from .rungs import HEADDIM, HEADERS, KEY_LENGTHS, MAX_QUERIES, table

LESSON = f"""\
Attention is softmax(scale * q k^T) v. Every rung computes it for one head, at most {MAX_QUERIES} queries, head dim
{HEADDIM}, in float32. The last columns compare it with the reference in float64.

naive attention   forms all seqlen_q * seqlen_k scores: its memory grows with the number of keys.
online softmax    reads one block of keys at a time. It keeps a running maximum m, a running sum l and a running output
                  a for each query, and multiplies l and a by exp(m_old - m_new) when the maximum grows. The result is
                  exact, and the scores of one block are all that exists at a time. This is FlashAttention.
minimal Triton    the same loop as a GPU kernel: one program for each block of queries.
minimal CUDA      the same loop in CUDA C++.
"""


def _formatted(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(HEADERS, *rows, strict=True)]
    lines = [HEADERS, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def main() -> int:
    """Print the lesson, the table, and the reason for each rung that did not run. Returns 1 when a rung is wrong."""
    torch.set_num_threads(1)  # the blocks are small: more threads only wait for each other
    rows, reasons = table(KEY_LENGTHS)
    print(LESSON)
    print(_formatted(rows))
    print()
    for reason in reasons:
        print(f"skipped: {reason}")
    print("read next: flash_attn_mini/ladder/online_softmax.py, then docs/algorithm.md")
    return 1 if any(row[-1] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
