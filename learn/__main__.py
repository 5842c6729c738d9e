"""python -m learn: measure every rung that this machine can run, and compare it with float64.

Needs only PyTorch: no compiled extension, no other package, no GPU. Without a GPU the Triton rungs run in Triton's
interpreter, if Triton is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

HEADERS = ["rung", "on", "dtype", "ms", "TFLOP/s", "% matmul", "GB/s", "extra bytes", "÷ q", "max error", "verdict"]
COLUMNS = """\
% matmul     TFLOP/s ÷ those of a matrix product of the same dtype on the same device, measured after each rung
GB/s         bytes that the loops read and write, repeated reads included, ÷ time
extra bytes  measured: tensors that a call allocates beyond q, k, v and the output; ÷ q: as a multiple of q's bytes"""


def set_up_triton() -> str | None:
    """Without a GPU: has Triton start in its interpreter, before it is imported; a sentence that says so."""
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return None
    os.environ["TRITON_INTERPRET"] = "1"
    return "There is no GPU: Triton's kernels run in its interpreter (TRITON_INTERPRET=1), which is slow and exact."


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    if "reason" in row:
        return [row["rung"], f"– {row['reason']}", *[""] * (len(HEADERS) - 2)]
    return [
        row["rung"],
        row["device"] + (", interpreted" if row["interpreted"] else ""),
        row["dtype"],
        f"{row['ms']:.4g}",
        f"{row['tflops']:.3g}",
        "–" if row["matmul_percent"] is None else f"{row['matmul_percent']:.3g}",
        f"{row['gbps']:.3g}",
        f"{row['extra_bytes']:,}",
        f"{row['extra_over_q']:.3g}",
        f"{row['max_error']:.1e}",
        "passed" if row["passed"] else "FAILED",
    ]


def line(texts: list[str]) -> str:
    """The cells in columns. A rung that does not run has its reason across the columns."""
    widths = (14, 16, 8, 9, 9, 9, 9, 13, 7, 9, 7)
    if texts[1].startswith("– "):
        return f"{texts[0]:<{widths[0]}}  {texts[1]}"
    return "  ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()


def machine() -> dict[str, Any]:
    """What the rows were measured on."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table and the plot. Returns 1 when a rung is wrong."""
    from .draw import save_plot, text_plot
    from .reports import REPORTS
    from .rungs import BY_NAME, RUNGS, fastest_device, measure, shape_on

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=list(BY_NAME), help="only this rung, with the experiments that belong to it")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the experiments of --rung (default: 10)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    arguments = parser.parse_args(argv)

    note = set_up_triton()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the blocks are small: more threads only wait for each other
    print(f"softmax(scale · q kᵀ) v: {shape_on(fastest_device())}, random normal, against float64.")
    print(note or "", line(HEADERS), line(["-" * len(header) for header in HEADERS]), sep="\n", flush=True)
    rows = []
    for rung in [BY_NAME[arguments.rung]] if arguments.rung else RUNGS:
        rows.append(measure(rung))
        print(line(cells(rows[-1])), flush=True)
    print(f"\n{COLUMNS}")
    print(f"\n{text_plot(rows)}\n")
    print("What changed, and why it matters:")
    for number, row in enumerate(rows, start=1):
        print(f"  {'' if arguments.rung else f'{number}. '}{row['rung']} ({row['source']})")
        print(textwrap.fill(row["lesson"], 110, initial_indent="     ", subsequent_indent="     "))
    if arguments.rung in REPORTS:
        for text in REPORTS[arguments.rung](arguments.seconds):
            print(f"\n{text}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    if arguments.plot:
        try:
            save_plot(rows, f"The ladder on {machine()['device']}", arguments.plot)
        except ImportError as error:
            print(f"ladder: --plot needs matplotlib ({error}): pip install matplotlib", file=sys.stderr)
            return 2
    print("\nRead next: learn/tutorial.md")
    return 1 if any(row.get("passed") is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
