"""The build: how long it takes, and the registers and spills of the kernels that it makes.

  python -m benchmarks.bench_build --label "CPU part" --limit 120 -- python setup.py build_ext --inplace
  python -m benchmarks.bench_build --resources

The first form runs a build command and stores its time under a label in results/build.json. Each label has its own row
with the machine that it was timed on; timing a label again replaces its row. The kernel cache is empty at the start;
delete build/ first, so that the host files are compiled too.

--resources writes results/kernel_resources.json: registers, spills and shared memory of every CUDA kernel, from the
output of ptxas -v. It needs nvcc and no GPU, and compiles what the kernel cache lacks first. It names every spill,
known ones (docs/tuning) included, and exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from build_tools import kernels, selection

COMPILED = re.compile(r"^kernels: (\S+) compiled in ([\d.]+) s")  # what build_tools/kernels.py prints
SOURCES = ("setup.py", "build_tools", "csrc")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_and_listen(command: list[str]) -> dict[str, float]:
    """Runs the build with an empty kernel cache, shows its output, and returns the seconds of each kernel in it."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "FLASH_ATTN_MINI_CACHE": cache}
        process = subprocess.Popen(
            command, cwd=results.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            compiled = COMPILED.search(line)
            if compiled:
                seconds[compiled[1]] = float(compiled[2])
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
    return seconds


def time_command(label: str, command: list[str], limit: float | None) -> dict[str, Any]:
    """The row of one build. A command that fails is an error, and its time is not stored."""
    start = time.perf_counter()
    of_kernels = run_and_listen(command)
    seconds = time.perf_counter() - start
    return {
        "label": label,
        "kernels": of_kernels,
        "seconds": round(seconds, 1),
        "limit_seconds": limit,
        "cores": usable_cores(),
        "machine": results.stamp()["cpu"],
        "command": [Path(command[0]).name, *command[1:]],  # the program's folder is left out
    }


def merge(row: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier result, if its sources have not changed, with this label's row replaced."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        earlier = results.load(path)["data"]
        if results.last_change(path) is None:
            rows = [old for old in earlier if old["label"] != row["label"]]
    return sorted([*rows, row], key=lambda entry: str(entry["label"]))


_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_FORWARD = re.compile(
    r"(?P<family>sm\d+)::Flash_fwd_kernel_traits<[^<>]*?(?P<headdim>\d+), (?:sm\d+::)?(?P<tile>Tile\w*)[^()]*, "
    r"\([\w:]*Kind\)(?P<kind>\d)"
)
# Hopper's kernel for many rows of a KV cache.
_SPLIT_SM90 = re.compile(
    r"flash_fwd_split_kernel<sm90::Flash_fwd_kernel_traits<[^<>]*?(?P<headdim>\d+), "
    r"sm90::SplitTile<sm90::TileSizesSplit(?P<is_tall>Tall)?<\d+(?:, (?P<is_narrow>true|false))?>"
)
# flash_bwd_kernel, or flash_bwd_convert_dq, which has no mode.
_BACKWARD = re.compile(
    r"Flash_bwd_kernel_traits<[^<>]*?(?P<headdim>\d+), (?:sm80::)?TileBwd<(?P<tile>[^<>]+)>, (?P<bulk>true|false), "
    r"\([\w:]*Kind\)(?P<kind>\d)>(?:, \([\w:]*Kind\)\d, \([\w:]*BwdMode\)(?P<mode>\d))?"
)
# Hopper's: one kernel for every mode, which is decided at run time.
_BACKWARD_SM90 = re.compile(
    r"sm90::flash_bwd_kernel<sm90::Flash_bwd_kernel_traits<[^<>]*?(?P<headdim>\d+), \([\w:]*Factors\)(?P<factors>\d), "
    r"\d+, sm90::(?P<tile>TileSizesBwd\w*)(?:<[^<>]*>)? ?>, \([\w:]*Kind\)(?P<kind>\d)>"
)
# The second of two passes, for dQ.
_BACKWARD_DQ = re.compile(
    r"sm90::flash_bwd_dq_kernel<sm90::Flash_bwd_dq_traits<[^<>]*?(?P<headdim>\d+)>, \([\w:]*Kind\)(?P<kind>\d)>"
)
_HAS_FIELDS = re.compile(r"flash_(fwd|bwd)(_split|_dq|)_kernel<")
KINDS = kernels.read_kinds().all  # by enumerator
# Calls of the kinds general and biased that a kernel takes, by enum Factors of csrc/sm90/kernel_traits_bwd.h.
LATENT = " of latent attention"
CALLS_BY_FACTORS = (" with ALiBi", " with softcap", " with dropout", "", "", " with softcap or dropout")
BACKWARD_MODES = ("all", "deterministic", "general")  # enum BwdMode, csrc/sm80/tile_sizes_bwd.h
BULK_REDUCE_SINCE = 90  # least compute capability whose copy engine adds to global memory (dQ)


def parse(report: str) -> list[dict[str, Any]]:
    """One row for each kernel in the output of ptxas -v."""
    rows = []
    for match in _ENTRY.finditer(report):
        smem = _STATIC_SMEM.search(match["rest"])
        rows.append(
            {
                "kernel": match["symbol"],
                "arch": match["arch"],
                "registers": int(match["registers"]),
                "spill_bytes": int(match["stores"]) + int(match["loads"]),
                "stack_bytes": int(match["stack"]),
                "static_smem_bytes": int(smem[1]) if smem else 0,
            }
        )
    return rows


def readable(symbols: list[str]) -> list[str]:
    """The kernels' names without argument lists, as C++ writes them where c++filt is installed."""
    if not symbols or shutil.which("c++filt") is None:
        return symbols
    answer = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return [name.replace("(anonymous namespace)::", "").replace("flash::", "") for name in answer.stdout.splitlines()]


def fields_of(name: str, arch: str) -> dict[str, Any] | None:
    """The readable name of an attention kernel as fields, {} for other kernels; None for one that never runs on `arch`.

    A backward kernel exists with and without the copy engine's reductions; on each architecture one of them is empty.
    """
    forward = _FORWARD.search(name)
    if forward is not None:
        tile = forward["tile"]
        suffix = " of short sequences" if tile.endswith("Short") else LATENT if tile.endswith("Latent") else ""
        kind = KINDS[int(forward["kind"])] + suffix
        return {"headdim": int(forward["headdim"]), "family": forward["family"], "kind": kind}
    split = _SPLIT_SM90.search(name)
    if split is not None:
        rows = ", 192 rows" if split["is_tall"] else ", up to 64 rows" if split["is_narrow"] == "true" else ""
        kind = f"split{rows}"
        return {"headdim": int(split["headdim"]), "family": "sm90", "kind": kind}
    hopper = _BACKWARD_SM90.search(name)
    if hopper is not None:
        kind = KINDS[int(hopper["kind"])]
        if kind in ("general", "biased"):
            kind += CALLS_BY_FACTORS[int(hopper["factors"])]
        kind += LATENT if hopper["tile"] == "TileSizesBwdLatent" else ""
        return {"headdim": int(hopper["headdim"]), "kind": kind, "tile": "sm90", "mode": BACKWARD_MODES[0]}
    of_dq = _BACKWARD_DQ.search(name)
    if of_dq is not None:
        kind = f"{KINDS[int(of_dq['kind'])]}, dQ"
        return {"headdim": int(of_dq["headdim"]), "kind": kind, "tile": "sm90", "mode": BACKWARD_MODES[0]}
    found = _BACKWARD.search(name)
    if found is None:
        return {}
    if (found["bulk"] == "true") != (int(re.sub(r"\D", "", arch)) >= BULK_REDUCE_SINCE):
        return None
    number = {"true": "1", "false": "0"}
    fields = {
        "headdim": int(found["headdim"]),
        "kind": KINDS[int(found["kind"])],
        "tile": "x".join(number.get(x, x) for x in found["tile"].split(", ")),  # as tune_sm80 expects it
    }
    if found["mode"] is not None:
        fields["mode"] = BACKWARD_MODES[int(found["mode"])]
    return fields


def measure_resources(arguments: argparse.Namespace) -> None:
    """Saves the resources of every kernel. SystemExit where there is a spill."""
    chosen = selection.Selection(selection.select_archs(), selection.select_hdims(), selection.select_dtypes())
    compiled = []
    for path in kernels.build_kernels(chosen, selection.max_jobs()):
        name = path.stem.rpartition("-")[0]
        report = path.with_suffix(".ptxas.txt").read_text(encoding="utf-8")
        compiled += [{"object": name, **row} for row in parse(report)]
    data = []
    for row, label in zip(compiled, readable([row["kernel"] for row in compiled]), strict=True):
        fields = fields_of(label, row["arch"])
        if fields == {} and _HAS_FIELDS.search(label) is not None:
            raise SystemExit(f"bench_build: fields_of does not know the name of the kernel {label}")
        if fields is not None:
            data.append({**row, "kernel": label, **fields})
    title = "Registers, spills and static shared memory of the compiled kernels"
    name = "kernel_resources"
    results.finish(name, name, title, data, arguments, sources=[*results.CUDA, "build_tools"])
    spilling = [f"{row['object']} ({row['spill_bytes']} bytes)" for row in data if row["spill_bytes"]]
    if spilling:
        raise SystemExit(f"bench_build: registers are spilled in {', '.join(spilling)}")


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=0.0)
    parser.add_argument("--resources", action="store_true", help="registers and spills of the kernels")
    parser.add_argument("--label", help="what is built")
    parser.add_argument("--limit", type=float, help="seconds that the build may take; more is an error")
    parser.add_argument("command", nargs="*", help="the build, after --")
    arguments = parser.parse_args(argv)
    if arguments.resources:
        measure_resources(arguments)
        return
    if not arguments.label or not arguments.command:
        parser.error("give --resources, or --label and a command behind --")
    row = time_command(arguments.label, arguments.command, arguments.limit)
    rows = merge(row, arguments.out_dir / "build.json")
    results.finish("build", "bench_build", "Build times", rows, arguments, sources=SOURCES)
    if arguments.limit is not None and row["seconds"] > arguments.limit:
        raise SystemExit(f"{arguments.label}: {row['seconds']:.0f} s, the limit is {arguments.limit:.0f} s")


if __name__ == "__main__":
    main()
