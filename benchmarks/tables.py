"""Results as Markdown tables: one view for each kind of result, chosen by the benchmark that measured it.

Kept apart from the measuring code, so that a table can be laid out anew without measuring again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from benchmarks.provenance import describe

Rows = list[dict[str, Any]]


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    return str(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=("left",) * len(headers)))


def kind_of(row: dict[str, Any]) -> str:
    return f"d{row['headdim']} {'causal' if row['causal'] else 'full'}"


def forward_tables(data: Rows) -> list[str]:
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
    body = [
        [
            row["name"],
            kind_of(row),
            str(row["seqlen"]),
            f"{row['extra_bytes']:,}",
            f"{row['lse_bytes']:,}",
            f"{row['score_matrix_bytes']:,}",
        ]
        for row in data
    ]
    headers = ["implementation", "kind", "seqlen", "extra bytes", "the LSE's bytes", "a seqlen² buffer's bytes"]
    return [markdown_table(headers, body)]


def build_tables(data: Rows) -> list[str]:
    body = []
    for row in data:
        limit = "" if row.get("limit_seconds") is None else f"{row['limit_seconds']:.0f}"
        longest = max(row["kernels"].items(), key=lambda item: item[1], default=None)
        slowest = f"{len(row['kernels'])}, the slowest {longest[0]} in {longest[1]:.0f} s" if longest else "none"
        body.append([row["label"], f"{row['seconds']:.0f}", limit, slowest, str(row["cores"]), row["machine"]])
    return [markdown_table(["build", "seconds", "limit", "kernel files compiled", "cores", "machine"], body)]


def resource_tables(data: Rows) -> list[str]:
    keys = ("object", "kernel", "arch", "registers", "spill_bytes", "stack_bytes", "static_smem_bytes")
    body = [[f"`{row[key]}`" if key == "kernel" else str(row[key]) for key in keys] for row in data]
    headers = ["object", "kernel", "arch", "registers", "spilled bytes", "stack bytes", "static shared memory"]
    return [markdown_table(headers, body)]


def accuracy_tables(data: Rows) -> list[str]:
    body = [
        [
            row["backend"],
            row["dtype"],
            f"{row['cases']} of {row['all_cases']}",
            f"{row['out_share']:.2f} ({row['out_case']})",
            f"{row['lse_share']:.2f} ({row['lse_case']})",
        ]
        for row in data
    ]
    headers = ["backend", "dtype", "cases", "out: error ÷ allowed (case)", "softmax_lse: error ÷ allowed (case)"]
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
    "bench_forward": forward_tables,
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
