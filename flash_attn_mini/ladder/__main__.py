"""python -m flash_attn_mini.ladder: every rung that this machine can run, held against the float64 reference."""

from __future__ import annotations

from .rungs import HEADDIM, HEADERS, table


def _formatted(rows: list[list[str]]) -> str:
    try:
        from tabulate import tabulate
    except ImportError:  # it is an optional nicety
        widths = [max(map(len, column)) for column in zip(HEADERS, *rows, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in [HEADERS, *rows])
    return str(tabulate(rows, headers=HEADERS, disable_numparse=True))


def main() -> int:
    """Print the table; 1 when a rung is wrong."""
    rows, reasons = table()
    print(f"one head, head dim {HEADDIM}, float32, against the reference in float64\n")
    print(_formatted(rows))
    for reason in reasons:
        print(f"not run: {reason}")
    return 1 if any(row[-1] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
