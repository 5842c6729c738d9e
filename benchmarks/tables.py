"""Results as Markdown tables and as plots: one layout for each benchmark."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Drawing = Callable[[Any, Rows], Any]  # (matplotlib.pyplot, rows) -> figure

FASTEST = "the fastest other"
# Contenders as plots name them; tables have the names of the results.
LABELS = {
    "cuda": "flash_attn_mini",
    "cuda sm80": "flash_attn_mini, sm80",
    "cuda deterministic": "flash_attn_mini, deterministic",
    "triton": "flash_attn_mini, Triton",
    "cpu": "flash_attn_mini, CPU",
    "FLASH_ATTENTION": "PyTorch FA2",
    "MATH": "PyTorch math",
    "SDPA": "PyTorch SDPA",
}


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    from tabulate import tabulate  # here, because --stale needs no other package

    return str(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=("left",) * len(headers)))


def pivot(corner: list[str], cells: Mapping[Any, Mapping[Any, str]], columns: Iterable[Any]) -> str:
    """A table of `cells`, by names of a row and by column; `corner` are the headers of the names."""
    columns = list(columns)
    body = [[*names, *(of_row.get(column, "") for column in columns)] for names, of_row in cells.items()]
    return markdown_table([*corner, *map(str, columns)], body)


def kind_of(row: dict[str, Any]) -> str:
    """Head dims and mask, and the heads where the keys have fewer."""
    own = row.get("headdim_v", row["headdim"])
    headdims = f"d{row['headdim']}" if own == row["headdim"] else f"d{row['headdim']}, v {own}"
    kind = f"{headdims} {'causal' if row['causal'] else 'full'}"
    grouped = row.get("nheads_k", row.get("nheads")) != row.get("nheads")
    return f"{kind}, {row['nheads']} heads on {row['nheads_k']}" if grouped else kind


def speed_tables(data: Rows) -> list[str]:
    """Head dim and mask down, sequence length across, every contender in a cell; then the joules that were measured."""
    tables = []
    for ours in dict.fromkeys(name for row in data for name in row["ratio"]):
        rows = [row for row in data if ours in row["ratio"]]
        rivals = list(dict.fromkeys(name for row in rows for name in row["ratio"][ours]))
        if not rivals:
            continue
        names = [ours, *rivals]
        lengths = sorted({row["seqlen"] for row in rows})
        cells: dict[tuple[str], dict[int, str]] = {}
        for row in rows:
            tflops = " / ".join(f"{row['tflops'][name]:.3g}" if name in row["tflops"] else "–" for name in names)
            ratios = row["ratio"][ours].values()
            ratio = f" ({min(ratios):.2f})" if ratios else ""
            cells.setdefault((kind_of(row),), {})[row["seqlen"]] = tflops + ratio
        summary = "; ".join(
            f"against {rival}: lowest {min(ratios):.2f}, median {statistics.median(ratios):.2f}"
            for rival, ratios in ratios_by_rival(rows, ours).items()
        )
        fastest = rivals[0] if len(rivals) == 1 else FASTEST
        ratio_text = f"({ours} ÷ {fastest}, the median of the rounds' ratios)"
        caption = f"{' / '.join(names)}, TFLOP/s, and {ratio_text}, by sequence length:"
        tables.append(f"{caption}\n\n{pivot([''], cells, lengths)}\n\n{ours} {summary}.")
        tables += joule_tables(rows, names)
    return tables


def ratios_by_rival(rows: Rows, ours: str) -> dict[str, list[float]]:
    """The ratios to the fastest other of each row, if there are several others, then to each of them."""
    against = [row["ratio"][ours] for row in rows if row["ratio"].get(ours)]
    by_rival = {name: [ratios[name] for ratios in against if name in ratios] for ratios in against for name in ratios}
    return {FASTEST: [min(ratios.values()) for ratios in against], **by_rival} if len(by_rival) > 1 else by_rival


def joule_tables(rows: Rows, names: Sequence[str]) -> list[str]:
    """The joules of a call, one line for each shape that has them."""
    body = [
        [kind_of(row), str(row["seqlen"]), *(f"{used[name]:.3g}" if name in used else "–" for name in names)]
        for row in rows
        if (used := row.get("joules"))
    ]
    return [f"Joules a call:\n\n{markdown_table(['', 'sequence length', *names], body)}"] if body else []


def overhead_tables(data: Rows) -> list[str]:
    body = [
        [row["device"], row["shape"], row["name"], f"{row['microseconds']:.1f}", f"{row['ratio_to_sdpa']:.2f}"]
        for row in data
    ]
    return [markdown_table(["device", "q shape", "implementation", "µs a call", "× SDPA's"], body)]


def sanitize_tables(data: Rows) -> list[str]:
    fields = [name for name in ("tool", "cases_of", "cases", "dtypes", "errors") if all(name in row for row in data)]
    body = [[str(row[name]) for name in fields] for row in data]
    parts = [markdown_table([name.replace("_", " ") for name in fields], body)]
    races = [(row["cases_of"], files, n) for row in data for files, n in row.get("accesses", {}).items()]
    if races:
        body = [[of, files, str(n)] for of, files, n in sorted(races)]
        parts += ["Hazards of racecheck, by the source files of the accesses:"]
        parts += [markdown_table(["cases of", "accesses in", "hazards"], body)]
    return parts


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
        longest = max(row["kernels"].items(), key=lambda item: item[1], default=None)
        slowest = f"{len(row['kernels'])}, the slowest {longest[0]} in {longest[1]:.0f} s" if longest else "none"
        body.append([row["label"], f"{row['seconds']:.0f}", slowest, str(row["cores"]), row["machine"]])
    return [markdown_table(["build", "seconds", "kernel files compiled", "cores", "machine"], body)]


def dtype_of_object(name: str) -> str:
    """The dtype in the name of an object file of kernels."""
    found = re.search(r"_(fp16|bf16)(?:_|$)", name)
    return found[1] if found else "float32"


# Headers and fields of forward and backward kernels.
FORWARD_KEYS = {"head dim": "headdim", "kernels of": "family", "arch": "arch"}
BACKWARD_KEYS = {"head dim": "headdim", "kind": "kind", "tile": "tile", "arch": "arch"}


def resource_tables(data: Rows) -> list[str]:
    """The forward by kind, the backward by kind, tile and mode; other kernels in one line for all dtypes."""
    forward = [row for row in data if "kind" in row and "tile" not in row]
    backward = [row for row in data if "kind" in row and "tile" in row]
    keys = ("arch", "registers", "spill_bytes", "stack_bytes", "static_smem_bytes")
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for row in data:
        if "kind" not in row:
            kernel = re.sub(r"\(DType\)\d, |cutlass::\w+, |sm80::", "", row["kernel"]).replace("> >", ">>")
            line = (f"`{kernel}`", *(str(row[key]) for key in keys))
            dtypes.setdefault(line, []).append(dtype_of_object(row["object"]))
    body = [[kernel, ", ".join(dict.fromkeys(names)), *rest] for (kernel, *rest), names in dtypes.items()]
    headers = ["kernel", "dtypes", "arch", "registers", "spilled bytes", "stack bytes", "static shared memory"]
    return [
        *([register_table("forward", forward, FORWARD_KEYS, "kind")] if forward else []),
        *([register_table("backward", backward, BACKWARD_KEYS, "mode", "dQ's conversion")] if backward else []),
        *([markdown_table(headers, body)] if body else []),
    ]


def register_table(direction: str, data: Rows, keys: dict[str, str], across: str, other: str = "") -> str:
    """The fields `keys` down, the values of the field `across` across; `other` is the column of kernels without it."""
    cells: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in data:
        dtype, spilled = dtype_of_object(row["object"]), row["spill_bytes"]
        text = f"{row['registers']} ({spilled})" if spilled else str(row["registers"])
        of_kernel = cells.setdefault(tuple(str(row[key]) for key in keys.values()), {})
        of_kernel.setdefault(row.get(across, other), {})[dtype] = text
    columns = [*sorted({row[across] for row in data if across in row}), *([other] if other else [])]

    def joined(of_dtypes: dict[str, str]) -> str:
        return " / ".join(dict.fromkeys(text for _, text in sorted(of_dtypes.items(), reverse=True)))  # fp16 first

    texts = {key: {name: joined(x) for name, x in of_kernel.items()} for key, of_kernel in cells.items()}
    caption = f"The {direction}: registers and (bytes spilled, where there are any), fp16 / bf16 where they differ:"
    return f"{caption}\n\n{pivot([*keys], texts, columns)}"


def accuracy_tables(data: Rows) -> list[str]:
    """Backend and dtype down; the worst share of each tensor and its case across."""
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
    """The layout of other results: keys across, rows down."""
    headers = list(dict.fromkeys(key for row in data for key in row))
    return [markdown_table(headers, [[_plain(row.get(key, "")) for key in headers] for row in data])]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _three_digits(value: float) -> str:
    """Three significant digits, or all digits before the point: no exponent."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def cpu_tables(data: Rows) -> list[str]:
    """Threads, head dim and mask down, sequence length across: GFLOP/s of ours and of SDPA, and the ratio."""
    lengths = sorted({row["seqlen"] for row in data})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in data:
        rival = row["GFLOP/s"] * row["ms"] / row["SDPA ms"]
        text = f"{_three_digits(row['GFLOP/s'])} / {_three_digits(rival)} ({row['ratio']:.2f})"
        cells.setdefault((f"{row['dtype']}, {row['threads']}", kind_of(row)), {})[row["seqlen"]] = text
    shape = f"batch {data[0]['batch']}, {data[0]['nheads']} heads"
    caption = f"cpu / SDPA, GFLOP/s, and (cpu ÷ SDPA, median of the rounds' ratios), {shape}, by sequence length:"
    return [f"{caption}\n\n{pivot(['dtype, threads', ''], cells, lengths)}"]


# The figures of bench_features: a caption, and the format of a value.
FEATURE_FIGURES: dict[str, tuple[str, str]] = {
    "window": ("Time ÷ (time of the plain full call × share of blocks that the window shows):", "{:.2f}"),
    "cost": ("Time added to the plain call's, in percent, forward on the kernels of sm80:", "{:+.1f}"),
    "hopper": ("Time on the kernels of sm80 ÷ time on those of Hopper:", "{:.2f}"),
    "varlen": ("Speedup over the padded batch ÷ (padded FLOPs ÷ tokens' FLOPs):", "{:.2f}"),
}


def feature_tables(data: Rows) -> list[str]:
    """A table for each figure: feature and direction down, heads and mask across."""
    tables = []
    for figure, (caption, style) in FEATURE_FIGURES.items():
        rows = [row for row in data if row["figure"] == figure]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in rows:
            kind = f"{row['nheads']} heads of {row['headdim']}, {'causal' if row['causal'] else 'full'}"
            cells.setdefault((row["feature"], row["direction"]), {})[kind] = style.format(row["value"])
        if rows:
            kinds = list(dict.fromkeys(kind for of_call in cells.values() for kind in of_call))
            where = f"Batch {rows[0]['batch']}, {rows[0]['seqlen']} tokens."
            tables.append(f"{where} {caption}\n\n{pivot(['', ''], cells, kinds)}")
    return tables


def mask_tables(data: Rows) -> list[str]:
    """Mask down; for a forward, and for a forward with its backward, TFLOP/s and the ratios that were measured."""
    figures = [("tflops", "TFLOP/s", "{:.0f}"), ("to_causal", "÷ causal", "{:.2f}")]
    if any(row["both_to_flex"] is not None for row in data):
        figures.append(("to_flex", "÷ FlexAttention", "{:.2f}"))
    cells: dict[tuple[str], dict[str, str]] = {}
    columns = []
    for direction, label in (("forward", "forward"), ("both", "forward and backward")):
        for key, caption, style in figures:
            column = f"{label}, {caption}"
            columns.append(column)
            for row in data:
                value = row[f"{direction}_{key}"]
                cells.setdefault((row["mask"],), {})[column] = "–" if value is None else style.format(value)
    first = data[0]
    where = f"{first['seqlen']} tokens, {first['nheads']} heads of {first['headdim']}, {first['dtype']}."
    return [f"{where} TFLOP/s of the pairs that the mask shows:\n\n{pivot(['mask'], cells, columns)}"]


def bias_tables(data: Rows) -> list[str]:
    """Bias down; for a forward, and for a forward with its backward, TFLOP/s and the ratios that were measured."""
    figures = [
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("to_efficient", "÷ EFFICIENT_ATTENTION", "{:.2f}"),
        ("to_flex", "÷ FlexAttention", "{:.2f}"),
        ("to_no_bias", "time ÷ without", "{:.2f}"),
    ]
    cells: dict[tuple[str], dict[str, str]] = {}
    columns = []
    for direction, label in (("forward", "forward"), ("both", "forward and backward")):
        for key, caption, style in figures:
            if all(row[f"{direction}_{key}"] is None for row in data):
                continue
            column = f"{label}, {caption}"
            columns.append(column)
            for row in data:
                value = row[f"{direction}_{key}"]
                cells.setdefault((row["bias"],), {})[column] = "–" if value is None else style.format(value)
    first = data[0]
    tokens, heads = f"{first['batch']} x {first['seqlen']} tokens", f"{first['nheads']} heads of {first['headdim']}"
    return [f"{tokens}, {heads}, {first['dtype']}.\n\n{pivot(['bias'], cells, columns)}"]


def short_tables(data: Rows) -> list[str]:
    """Shape and direction down; our time, and speed and memory relative to each other contender."""
    names = list(dict.fromkeys(name for row in data for name in row["ms"]))
    ours, *others = names
    directions = {"forward": "forward", "both": "forward and backward"}
    has_memory = data[0]["peak"][ours] is not None
    headers = ["", f"{ours}, ms", *(f"÷ {name}" for name in others), *["memory ÷ q"] * has_memory]
    body = []
    for row in data:
        mask = ", causal" if row["causal"] else ""
        shape = f"{row['batch']} × {row['seqlen']} tokens, {row['nheads']} heads of {row['headdim']}{mask}"
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "–" for name in others]
        peaks = [", ".join(f"{row['peak'][name]:.1f}" for name in names if name in row["peak"])] if has_memory else []
        body.append([f"{shape}: {directions[row['direction']]}", f"{row['ms'][ours]:.3g}", *ratios, *peaks])
    return [markdown_table(headers, body)]


def value_tables(data: Rows) -> list[str]:
    """Head dim, mask and length down, values across: our speed ÷ the rival's, and that ÷ the first values' ratio."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in data:
        text = f"{row['ratio']:.2f} ({row['relative_ratio']:.2f})"
        cells.setdefault((kind_of(row), str(row["seqlen"])), {})[row["values"]] = text
    values = list(dict.fromkeys(row["values"] for row in data))
    ours, theirs = data[0]["ms"]
    lowest = min(data, key=lambda row: row["relative_ratio"])
    where = f"{kind_of(lowest)}, {lowest['seqlen']}, {lowest['values']}"
    caption = f"{ours} ÷ {theirs}, speed, and (that ÷ the value at {values[0]}):"
    table = pivot(["", "length"], cells, values)
    return [f"{caption}\n\n{table}\n\nLowest in brackets: {lowest['relative_ratio']:.2f} ({where})."]


def cache_shape(row: dict[str, Any]) -> str:
    """A shape of bench_kvcache, without its number of queries."""
    keys = f"{row['shortest']} to {row['seqlen_k']}" if row["shortest"] else str(row["seqlen_k"])
    pages = f", pages of {row['page_size']}" if row["page_size"] else ""
    return f"{row['batch']} × {keys} keys{pages}, {row['nheads']} heads on {row['nheads_k']}, d{row['headdim']}"


def kvcache_tables(data: Rows) -> list[str]:
    """The layout of each figure of bench_kvcache."""
    layouts = {
        "append": kvcache_time_tables,
        "pages": kvcache_time_tables,
        "queries": kvcache_query_tables,
        "latent": kvcache_latent_tables,
    }
    return layouts.get(data[0]["figure"], kvcache_speed_tables)(data)


def kvcache_speed_tables(data: Rows) -> list[str]:
    """Shape down; every contender's GB/s, as a share of the copy's where that was measured, and our ratios across."""
    names = list(dict.fromkeys(name for row in data for name in row["gbps"]))
    ratios = list(dict.fromkeys((mine, rival) for row in data for mine in row["ratio"] for rival in row["ratio"][mine]))
    body = []
    for row in data:
        ceiling = row.get("ceiling_gbps")
        speeds = {
            name: f"{speed:.4g}" + (f" ({speed / ceiling:.2f})" if ceiling else "")
            for name, speed in row["gbps"].items()
        }
        compared = [row["ratio"].get(mine, {}).get(rival) for mine, rival in ratios]
        threads = [str(row["threads"])] if "threads" in row else []
        shape = [cache_shape(row), str(row["seqlen_q"])]
        cells = [speeds.get(name, "–") for name in names]
        body.append([*threads, *shape, *cells, *("–" if r is None else f"{r:.2f}" for r in compared)])
    threads = ["threads"] if "threads" in data[0] else []
    headers = [*threads, "cache", "queries", *(f"{name}, GB/s" for name in names), *(f"{a} ÷ {b}" for a, b in ratios)]
    table = markdown_table(headers, body)
    return [f"GB/s of K and V, and (÷ the copy's):\n\n{table}" if data[0].get("ceiling_gbps") else table]


def kvcache_time_tables(data: Rows) -> list[str]:
    """Contender down, shape across: microseconds, and their multiple of the same call on a plain contiguous cache."""
    shapes = list(dict.fromkeys(map(cache_shape, data)))
    cells: dict[str, dict[str, str]] = {}
    for row in data:
        for name, microseconds in row["us"].items():
            plain = row["us"].get(name.partition(",")[0])
            times = f" ({microseconds / plain:.2f})" if plain and "," in name else ""
            cells.setdefault(name, {})[cache_shape(row)] = f"{microseconds:.1f}{times}"
    body = [[name, *(by_shape.get(shape, "–") for shape in shapes)] for name, by_shape in cells.items()]
    return [f"µs, and (as a multiple of the first):\n\n{markdown_table(['', *shapes], body)}"]


def kvcache_latent_tables(data: Rows) -> list[str]:
    """Shape down, contender across: TB/s of the keys, as a share of the copy's where that was measured, and TFLOP/s."""
    names = list(dict.fromkeys(name for row in data for name in row["us"]))
    body = []
    for row in data:
        ceiling = row.get("ceiling_gbps")
        columns = row["headdim"] + row["headdim_v"]
        flops = 2 * row["batch"] * row["seqlen_k"] * row["seqlen_q"] * row["nheads"] * columns
        cells = []
        for name in names:
            speed, microseconds = row["gbps"].get(name), row["us"].get(name)
            share = f" ({speed / ceiling:.2f})" if ceiling and speed else ""
            cells.append(f"{speed / 1e3:.2f}{share}, {flops / microseconds / 1e6:.0f}" if microseconds else "–")
        body.append([f"{row['batch']} × {row['seqlen_k']} keys", str(row["nheads"]), *cells])
    caption = "TB/s of the keys" + (" (÷ the copy's)" if data[0].get("ceiling_gbps") else "") + ", TFLOP/s"
    return [f"{caption}:\n\n{markdown_table(['cache', 'heads', *names], body)}"]


def kvcache_query_tables(data: Rows) -> list[str]:
    """Shape down, some numbers of queries across: µs. Last the steps from n to n + 1 above 1.3, or the largest one."""
    shown = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if any(row["seqlen_q"] == n for row in data)]
    times: dict[tuple[str, str], dict[int, float]] = {}
    for row in data:
        for name, microseconds in row["us"].items():
            times.setdefault((name, cache_shape(row)), {})[row["seqlen_q"]] = microseconds
    body = []
    for names, of_queries in times.items():
        steps = {n: of_queries[n + 1] / of_queries[n] for n in of_queries if n + 1 in of_queries}
        large = [n for n in steps if steps[n] > 1.3] or sorted(steps, key=lambda n: -steps[n])[:1]
        listed = ", ".join(f"{steps[n]:.2f} ({n} to {n + 1})" for n in large) or "–"
        body.append([*names, *(f"{of_queries[n]:.1f}" if n in of_queries else "–" for n in shown), listed])
    return [markdown_table(["", "cache", *(f"{n} queries, µs" for n in shown), "largest steps"], body)]


def context_parallel_tables(data: Rows) -> list[str]:
    """Mask, tokens and heads down, contenders across: TFLOP/s of each GPU, and relative to a single GPU."""
    from benchmarks.bench_context_parallel import predicted  # here, because that module needs this one

    names = list(dict.fromkeys(name for row in data for name in row["tflops"]))
    body = []
    for row in data:
        heads = f"{row['nheads']}" if row["nheads"] == row["nheads_k"] else f"{row['nheads']} on {row['nheads_k']}"
        cells = [
            f"{row['tflops'][name]:.0f}"
            + (f" ({row['share'][name]:.2f}; {row['share_with_host'][name]:.2f})" if name in row["share"] else "")
            if name in row["tflops"]
            else "–"
            for name in names
        ]
        model = ", ".join(f"{name} {share:.2f}" for name, share in predicted(row).items())
        body.append([row["kind"], f"{row['tokens']:,}", heads, *cells, row["auto"], model or "–"])
    rates = ", ".join(f"{rate:.0f} GB/s at {size} MiB" for size, rate in data[0]["message_gbps"].items())
    caption = (
        f"TFLOP/s of each of {data[0]['gpus']} GPUs, forward and backward, head dim {data[0]['headdim']}. In brackets: "
        "relative to one GPU on the whole sequence, with steps enqueued ahead; then without:"
    )
    most = data[0].get("max_ctas")
    groups = f" Our group: {most} CTAs for messages, no clusters; PyTorch's: NCCL's defaults." if most else ""
    waiting = sorted({name for row in data for name in row["waiting"]})
    notes = [f"The host was not ahead of the GPU in every round: {', '.join(waiting)}."] if waiting else []
    table = markdown_table(["mask", "tokens a GPU", "heads", *names, "auto takes", "the model"], body)
    messages = f"Messages from each GPU to the next one: {rates}.{groups}"
    return ["\n\n".join([f"{caption}\n\n{table}", *notes, messages])]


def models_tables(data: Rows) -> list[str]:
    """Workloads down, contenders across: units per second, and the ratio of ours to each of PyTorch's."""
    names = list(data[0]["per_second"])
    pairs = [(mine, rival) for mine, against in data[0]["ratio"].items() for rival in against]
    body = [
        [
            row["workload"],
            *(f"{row['per_second'][name]:,.{0 if row['per_second'][name] >= 100 else 1}f}" for name in names),
            *(f"{row['ratio'][mine][rival]:.2f}" for mine, rival in pairs),
        ]
        for row in data
    ]
    headers = [f"{data[0]['unit']}/s", *names, *(f"{mine} ÷ {rival}" for mine, rival in pairs)]
    return [markdown_table(headers, body)]


VIEWS: dict[str, Callable[[Rows], list[str]]] = {
    "bench_speed": speed_tables,
    "bench_overhead": overhead_tables,
    "bench_memory": memory_tables,
    "bench_build": build_tables,
    "bench_cpu": cpu_tables,
    "bench_values": value_tables,
    "bench_features": feature_tables,
    "bench_kvcache": kvcache_tables,
    "bench_masks": mask_tables,
    "bench_bias": bias_tables,
    "bench_short": short_tables,
    "bench_models": models_tables,
    "bench_context_parallel": context_parallel_tables,
    "accuracy": accuracy_tables,
    "kernel_resources": resource_tables,
    "sanitize": sanitize_tables,
}


def describe(stamp: dict[str, Any]) -> str:
    """The stamp in one line of prose, for captions under tables."""
    where = [stamp.get("gpu") or f"{stamp.get('cpu')}, {stamp.get('cpu_threads')} threads"]
    if stamp.get("instruction_set"):
        where.append(f"instruction set {stamp['instruction_set']}")
    for key, label in (("driver", "driver"), ("cuda", "CUDA"), ("torch", "torch"), ("triton", "triton")):
        if stamp.get(key) and (stamp.get("gpu") or key == "torch"):
            where.append(f"{label} {stamp[key]}")
    if stamp.get("cudnn"):
        major, minor, patch = stamp["cudnn"] // 10000, stamp["cudnn"] // 100 % 100, stamp["cudnn"] % 100
        where.append(f"cuDNN {major}.{minor}.{patch}")
    return f"{', '.join(where)}; {stamp['date']}"


def render(result: dict[str, Any]) -> str:
    """A result's tables, its notes and the line that says where its figures come from."""
    parts = VIEWS.get(result["benchmark"], plain_tables)(result["data"])
    source = f"`benchmarks/results/{result['name']}.json`"
    return "\n\n".join([*parts, *result["notes"], f"Measured on {describe(result['stamp'])} ({source})."])


def summarize(*several: dict[str, Any]) -> str:
    """A table of the first contender's speed relative to each of the others, and where the figures come from.

    Several results have a line each, of all their rows. Rows of a KV cache that have a rival have two: one query, and
    several. A result of models has its own summary, with a line for each workload.
    """
    if several[0]["benchmark"] == "bench_models":
        return f"{models_summary(several[0]['data'])}\n\n{describe(several[0]['stamp'])}."
    groups: dict[str, Rows] = {}
    dates: dict[str, list[str]] = {}
    for result in several:
        name = "decoding" if result["benchmark"] == "bench_kvcache" else result["name"].partition("_")[0]
        names = [name] if len(several) > 1 else []
        groups |= {", ".join([*names, label]): rows for label, rows in groups_of(result).items()}
        date = result["stamp"]["date"]
        where = describe(result["stamp"]).removesuffix(f"; {date}")
        dates.setdefault(where, []).append(" ".join([*names, date]))
    measured = "; ".join(f"{where}; {', '.join(of_place)}" for where, of_place in dates.items())
    return f"{ratio_summary(groups)}\n\n{measured}."


def groups_of(result: dict[str, Any]) -> dict[str, Rows]:
    """The rows that a summary takes together."""
    data: Rows = result["data"]
    if result["benchmark"] != "bench_kvcache":
        return {f"{len(data)} shapes": data}
    compared = [row for row in data if any(row["ratio"].values())]
    one = [row for row in compared if row["seqlen_q"] == 1]
    several = [row for row in compared if row["seqlen_q"] > 1]
    groups = {f"1 query, {len(one)} shapes": one}
    if several:
        numbers = [row["seqlen_q"] for row in several]
        groups[f"{min(numbers)} to {max(numbers)} queries, {len(several)} shapes"] = several
    return groups


def models_summary(rows: Rows) -> str:
    """For each workload the speed of the first of ours relative to each of PyTorch's."""
    ours = next(iter(rows[0]["ratio"]))
    rivals = list(dict.fromkeys(name for row in rows for name in row["ratio"][ours]))
    body = [
        [row["workload"], *(f"{row['ratio'][ours][name]:.2f}" if name in row["ratio"][ours] else "" for name in rivals)]
        for row in rows
    ]
    return markdown_table([f"{ours} ÷", *rivals], body)


def ratio_summary(groups: Mapping[str, Rows]) -> str:
    """The median and the lowest of the first contender's ratios to the fastest other, and to each. Rows of bench_cpu
    have one ratio, to SDPA."""
    first = next(iter(groups.values()))
    if isinstance(first[0]["ratio"], dict):
        ours = next(name for row in first for name in row["ratio"])
        by_group = {name: ratios_by_rival(rows, ours) for name, rows in groups.items()}
    else:
        ours, by_group = "cpu", {name: {"SDPA": [row["ratio"] for row in rows]} for name, rows in groups.items()}
    rivals = dict.fromkeys(rival for by_rival in by_group.values() for rival in by_rival)
    columns = [FASTEST, *(name for name in rivals if name != FASTEST)] if FASTEST in rivals else list(rivals)

    def cell(ratios: list[float] | None) -> str:
        return f"{statistics.median(ratios):.2f}, {min(ratios):.2f}" if ratios else ""

    body = [[name, *(cell(by_rival.get(rival)) for rival in columns)] for name, by_rival in by_group.items()]
    return markdown_table([f"{ours} ÷ ..., median and lowest", *columns], body)


# ---- plots -----------------------------------------------------------------------------------------------------------

KVCACHE = {"lengths": ("seqlen_k", "gbps", "keys", "GB/s of K and V"), "queries": ("seqlen_q", "us", "queries", "µs")}


def drawing_of(result: dict[str, Any]) -> Drawing | None:
    """The function that draws the rows of a result, None for a result without a plot."""
    benchmark, row = result["benchmark"], result["data"][0]
    if benchmark == "bench_speed":
        return draw_speed
    if benchmark == "bench_kvcache" and row.get("figure") in KVCACHE:
        return draw_kvcache
    return None


def plot(
    result: dict[str, Any], path: Path, drawing_of: Callable[[dict[str, Any]], Drawing | None] = drawing_of
) -> bool:
    """Draws a result to `path`. False when there is nothing to draw or matplotlib is not installed."""
    draw = drawing_of(result)
    if draw is None:
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False

    drawing = draw(plt, result["data"])
    drawing.suptitle(f"{result['title']}\n{result['stamp'].get('gpu') or result['stamp'].get('cpu')}", fontsize=10)
    drawing.savefig(path, dpi=110)
    plt.close(drawing)
    return True


def draw_speed(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """A panel for each head dim, number of key heads and mask."""
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
            if "ceiling_tflops" in here[0]:  # before draw_lines, which fixes the limits of the axis
                axis.axhline(here[0]["ceiling_tflops"], color="gray", linestyle="--", label="matrix product")
            draw_lines(axis, here, "seqlen", "tflops")
            axis.set_title(kind_of(here[0]), fontsize=10)
    axes[-1][0].set_xlabel("sequence length")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=8)
    return figure


def draw_kvcache(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """A panel for each batch size."""
    x, y, x_label, y_label = KVCACHE[rows[0]["figure"]]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure, axes = plt.subplots(1, len(batches), figsize=(5 * len(batches), 4), squeeze=False, layout="constrained")
    for axis, batch in zip(axes[0], batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        if y == "gbps" and "ceiling_gbps" in here[0]:
            axis.axhline(here[0]["ceiling_gbps"], color="gray", linestyle="--", label="copy")
        draw_lines(axis, here, x, y)
        axis.set_title(f"batch {batch}", fontsize=10)
        axis.set_xlabel(x_label)
    axes[0][0].set_ylabel(y_label)
    axes[0][0].legend(fontsize=8)
    return figure


def draw_lines(axis: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    """A line for each contender, over a logarithmic axis of lengths. It fixes the limits of the vertical axis."""
    for name in dict.fromkeys(name for row in rows for name in row[y]):
        points = sorted((row[x], row[y][name]) for row in rows if name in row[y])
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker="o", markersize=4, label=LABELS.get(name, name))
    values = sorted({row[x] for row in rows})
    ticks = [value for value in values if value & (value - 1) == 0]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(value) for value in ticks], fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
