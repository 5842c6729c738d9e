"""Results as Markdown tables: one view for each kind of result, chosen by the benchmark that measured it.

Kept apart from the measuring code, so that a table can be laid out anew without measuring again.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from benchmarks.provenance import describe

Rows = list[dict[str, Any]]


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    return str(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=("left",) * len(headers)))


def kind_of(row: dict[str, Any]) -> str:
    """Head dim and mask, and the heads where the keys have fewer."""
    kind = f"d{row['headdim']} {'causal' if row['causal'] else 'full'}"
    grouped = row.get("nheads_k", row.get("nheads")) != row.get("nheads")
    return f"{kind}, {row['nheads']} heads on {row['nheads_k']}" if grouped else kind


def speed_tables(data: Rows) -> list[str]:
    """Head dim and mask down, sequence length across, every contender in a cell."""
    tables = []
    for ours in dict.fromkeys(name for row in data for name in row["ratio"]):
        rows = [row for row in data if ours in row["ratio"]]
        rivals = list(dict.fromkeys(name for row in rows for name in row["ratio"][ours]))
        if not rivals:
            continue
        base, names = rivals[0], [ours, *rivals]
        lengths = sorted({row["seqlen"] for row in rows})
        cells: dict[str, dict[int, str]] = {}
        for row in rows:
            tflops = " / ".join(f"{row['tflops'][name]:.3g}" if name in row["tflops"] else "–" for name in names)
            ratio = f" ({row['ratio'][ours][base]:.2f})" if base in row["ratio"][ours] else ""
            cells.setdefault(kind_of(row), {})[row["seqlen"]] = tflops + ratio
        body = [[kind, *(by_length.get(length, "") for length in lengths)] for kind, by_length in cells.items()]
        summary = "; ".join(
            f"against {rival}: lowest {min(ratios):.2f}, median {statistics.median(ratios):.2f}"
            for rival in rivals
            if (ratios := [row["ratio"][ours][rival] for row in rows if rival in row["ratio"][ours]])
        )
        ratio_text = f"({ours} ÷ {base}, the median of the rounds' ratios)"
        caption = f"{' / '.join(names)}, TFLOP/s, and {ratio_text}, by sequence length:"
        tables.append(f"{caption}\n\n{markdown_table(['', *map(str, lengths)], body)}\n\n{ours} {summary}.")
    return tables


def overhead_tables(data: Rows) -> list[str]:
    body = [
        [row["device"], row["shape"], row["name"], f"{row['microseconds']:.1f}", f"{row['ratio_to_sdpa']:.2f}"]
        for row in data
    ]
    return [markdown_table(["device", "q shape", "implementation", "µs a call", "× SDPA's"], body)]


def memory_tables(data: Rows) -> list[str]:
    needed, header = "lse_bytes", "the LSE's bytes"
    if data and needed not in data[0]:
        needed, header = "dq_and_delta_bytes", "bytes of a float32 dQ and delta"
    body = [
        [
            row["name"],
            kind_of(row),
            str(row["seqlen"]),
            f"{row['extra_bytes']:,}",
            f"{row[needed]:,}",
            f"{row['score_matrix_bytes']:,}",
        ]
        for row in data
    ]
    headers = ["implementation", "kind", "seqlen", "extra bytes", header, "a seqlen² buffer's bytes"]
    return [markdown_table(headers, body)]


def build_tables(data: Rows) -> list[str]:
    body = []
    for row in data:
        limit = "" if row.get("limit_seconds") is None else f"{row['limit_seconds']:.0f}"
        longest = max(row["kernels"].items(), key=lambda item: item[1], default=None)
        slowest = f"{len(row['kernels'])}, the slowest {longest[0]} in {longest[1]:.0f} s" if longest else "none"
        body.append([row["label"], f"{row['seconds']:.0f}", limit, slowest, str(row["cores"]), row["machine"]])
    return [markdown_table(["build", "seconds", "limit", "kernel files compiled", "cores", "machine"], body)]


def dtype_of_object(name: str) -> str:
    """The dtype that the name of an object file of kernels holds."""
    found = re.search(r"_(fp16|bf16)_", name)
    return found[1] if found else "float32"


def resource_tables(data: Rows) -> list[str]:
    """One line for kernels that differ in dtype alone, then those of the backward by tile and mask."""
    keys = ("arch", "registers", "spill_bytes", "stack_bytes", "static_smem_bytes")
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for row in data:
        if "tile" not in row:
            kernel = re.sub(r"\(DType\)\d, |cutlass::\w+, |sm80::", "", row["kernel"]).replace("> >", ">>")
            line = (f"`{kernel}`", *(str(row[key]) for key in keys))
            dtypes.setdefault(line, []).append(dtype_of_object(row["object"]))
    body = [[kernel, ", ".join(dict.fromkeys(names)), *rest] for (kernel, *rest), names in dtypes.items()]
    headers = ["kernel", "dtypes", "arch", "registers", "spilled bytes", "stack bytes", "static shared memory"]
    backward = [row for row in data if "tile" in row]
    return [markdown_table(headers, body), *([backward_resource_table(backward)] if backward else [])]


def backward_resource_table(data: Rows) -> str:
    """Head dim, mask and tile of the backward down; what the kernel is asked for across, and the conversion of dQ."""
    modes = sorted({row["mode"] for row in data if "mode" in row})
    cells: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in sorted(data, key=lambda row: "mode" not in row):  # the conversion, which knows no mask, joins others
        dtype, spilled = dtype_of_object(row["object"]), row["spill_bytes"]
        text = f"{row['registers']} ({spilled})" if spilled else str(row["registers"])
        for causal in (row["causal"],) if "mode" in row else (False, True):
            key = (str(row["headdim"]), "causal" if causal else "full", row["tile"], row["arch"])
            if "mode" in row or key in cells:
                cells.setdefault(key, {}).setdefault(row.get("mode", "dQ's conversion"), {})[dtype] = text
    headers = ["head dim", "mask", "tile", "arch", *modes, "dQ's conversion"]
    body = [
        [*key, *(" / ".join(dict.fromkeys(of_dtype.get(name, {}).values())) for name in headers[4:])]
        for key, of_dtype in cells.items()
    ]
    caption = "The backward: registers and (bytes spilled, where there are any), fp16 / bf16 where they differ:"
    return f"{caption}\n\n{markdown_table(headers, body)}"


def accuracy_tables(data: Rows) -> list[str]:
    """Backend and dtype down; the worst share and its case of each tensor that was compared across."""
    names = {"out": "out", "lse": "softmax_lse", "dq": "dq", "dk": "dk", "dv": "dv"}
    compared = [key for key in names if f"{key}_share" in data[0]]
    body = [
        [
            row["backend"],
            row["dtype"],
            f"{row['cases']} of {row['all_cases']}",
            *(f"{row[f'{key}_share']:.2f} ({row[f'{key}_case']})" for key in compared),
        ]
        for row in data
    ]
    headers = ["backend", "dtype", "cases", *(f"{names[key]}: error ÷ allowed (case)" for key in compared)]
    return [markdown_table(headers, body)]


def plain_tables(data: Rows) -> list[str]:
    """Any result without a view of its own: its keys across, its rows down."""
    headers = list(dict.fromkeys(key for row in data for key in row))
    return [markdown_table(headers, [[_plain(row.get(key, "")) for key in headers] for row in data])]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cpu_tables(data: Rows) -> list[str]:
    """Threads, head dim and mask down, sequence length across: GFLOP/s of ours and of SDPA, and the ratio."""
    lengths = sorted({row["seqlen"] for row in data})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in data:
        rival = row["GFLOP/s"] * row["ms"] / row["SDPA ms"]
        text = f"{row['GFLOP/s']:.3g} / {rival:.3g} ({row['ratio']:.2f})"
        cells.setdefault((f"{row['dtype']}, {row['threads']}", kind_of(row)), {})[row["seqlen"]] = text
    body = [[*names, *(by_length.get(length, "") for length in lengths)] for names, by_length in cells.items()]
    shape = f"batch {data[0]['batch']}, {data[0]['nheads']} heads"
    caption = f"cpu / SDPA, GFLOP/s, and (cpu ÷ SDPA, median of the rounds' ratios), {shape}, by sequence length:"
    return [f"{caption}\n\n{markdown_table(['dtype, threads', '', *map(str, lengths)], body)}"]


VIEWS: dict[str, Callable[[Rows], list[str]]] = {
    "bench_forward": speed_tables,
    "bench_backward": speed_tables,
    "bench_overhead": overhead_tables,
    "bench_memory": memory_tables,
    "bench_build": build_tables,
    "bench_cpu": cpu_tables,
    "accuracy": accuracy_tables,
    "kernel_resources": resource_tables,
}


def render(result: dict[str, Any]) -> str:
    """A result's tables, its notes and the line that says where its figures come from."""
    parts = VIEWS.get(result["benchmark"], plain_tables)(result["data"])
    source = f"`benchmarks/results/{result['name']}.json`"
    return "\n\n".join([*parts, *result["notes"], f"Measured on {describe(result['stamp'])} ({source})."])
