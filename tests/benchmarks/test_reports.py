"""Reports of results: tables, kernels' registers and spills, the result blocks of README and docs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_build, results, tables, tune_sm80

from ..sanitize import sanitize_driver, sanitize_gpu
from ..support.cases import Case
from ..support.kvcache_cases import SMALL_KVCACHE_CASES, SMALL_LATENT_CASES, CacheCall, KvCacheCase, make_call
from ..support.varlen_cases import VarlenCase


def test_ptxas_reports_are_read_kernel_by_kernel() -> None:
    report = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_80'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 112 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
"""
    first, second = bench_build.parse(report)
    assert (first["kernel"], first["arch"], first["registers"], first["spill_bytes"]) == ("_Z1av", "sm_80", 112, 0)
    assert (second["registers"], second["spill_bytes"], second["stack_bytes"]) == (255, 16, 8)
    assert (first["static_smem_bytes"], second["static_smem_bytes"]) == (0, 1024)


def cells_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its headers."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_tables_of_resources_join_kernels_that_differ_only_in_dtype() -> None:
    name = "sm80::flash_bwd_dot_do_o<cutlass::{}, 64>"
    row = {"arch": "sm_90a", "registers": 40, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    fp16 = row | {"object": "flash_bwd_hdim64_fp16_any_sm80", "kernel": name.format("half_t")}
    bf16 = row | {"object": "flash_bwd_hdim64_bf16_any_sm80", "kernel": name.format("bfloat16_t")}
    (table,) = tables.resource_tables([fp16, bf16, bf16 | {"registers": 41}])
    short = "`flash_bwd_dot_do_o<64>`"
    lines = [cells[:4] for cells in cells_of(table)]
    assert lines == [[short, "fp16, bf16", "sm_90a", "40"], [short, "bf16", "sm_90a", "41"]]


@pytest.mark.parametrize("order", [("fp16", "bf16"), ("bf16", "fp16")], ids=" ".join)
def test_tables_of_resources_name_fp16_first(order: tuple[str, str]) -> None:
    registers = {"fp16": 40, "bf16": 50}
    row = {"kernel": "any", "arch": "sm_90a", "headdim": 64, "family": "sm90", "kind": "full", "spill_bytes": 0}
    rows = [row | {"object": f"flash_fwd_hdim64_{dtype}_sm90", "registers": registers[dtype]} for dtype in order]
    (table,) = tables.resource_tables(rows)
    assert cells_of(table) == [["64", "sm90", "sm_90a", "40 / 50"]]


def test_resources_of_the_forward_are_listed_by_kind() -> None:
    rows, kinds = [], [(k, kind) for k, kind in enumerate(bench_build.KINDS) if kind != "split"]  # of sm80
    for (k, kind), (t, dtype) in itertools.product(kinds, enumerate(("fp16", "bf16"))):
        tile = f"sm80::TileSizesFwd<64, {'true' if kind in ('general', 'ranged', 'paged', 'biased') else 'false'}>"
        kernel = f"sm80::flash_fwd_kernel<sm80::Flash_fwd_kernel_traits<(DType){t}, 64, {tile} >, (Kind){k}>"
        fields = bench_build.fields_of(kernel, "sm_90a")
        assert fields == {"headdim": 64, "family": "sm80", "kind": kind}
        row = {"object": f"flash_fwd_hdim64_{dtype}_sm80", "kernel": kernel, "arch": "sm_90a"}
        rows.append({**row, **fields, "registers": 100 + 10 * k + t * k, "spill_bytes": 8 * (kind == "local")})
    (table,) = tables.resource_tables(rows)
    headers = next(line for line in table.splitlines() if line.startswith("|"))
    names = ["head", "dim", "kernels", "of", "arch", *sorted(kind for _, kind in kinds)]
    assert headers.replace("|", " ").split() == names
    cells = ["170 / 177", "100", "130 / 133", "110 (8) / 111 (8)", "150 / 155", "140 / 144", "120 / 122"]
    assert cells_of(table) == [["64", "sm80", "sm_90a", *cells]]


def test_resources_of_the_hopper_forward_name_the_kernels_of_short_sequences() -> None:
    for tile, kind, name in (
        ("TileSizesFwd<64, true>", 1, "local"),
        ("TileSizesFwdShort<64>", 1, "local of short sequences"),
        ("TileSizesFwd<64, true>", 3, "general"),
        ("TileSizesFwdLatent", 3, "general of latent attention"),
    ):
        traits = f"sm90::Flash_fwd_kernel_traits<(DType)1, 64, sm90::{tile}, 64>"
        fields = bench_build.fields_of(f"sm90::flash_fwd_kernel<{traits}, (Kind){kind}>", "sm_90a")
        assert fields == {"headdim": 64, "family": "sm90", "kind": name}


def test_the_second_pass_of_the_backward_has_fields() -> None:
    name = "sm90::flash_bwd_dq_kernel<sm90::Flash_bwd_dq_traits<(DType)1, 256>, (Kind)2>"
    fields = {"headdim": 256, "kind": "varlen, dQ", "tile": "sm90", "mode": "all"}
    assert bench_build.fields_of(name, "sm_90a") == fields


@pytest.mark.parametrize(
    ("tile", "kind"),
    [("<128, true>", "split, up to 64 rows"), ("<128, false>", "split"), ("Tall<128>", "split, 192 rows")],
)
def test_hoppers_kernels_of_many_rows_have_fields(tile: str, kind: str) -> None:
    traits = f"sm90::Flash_fwd_kernel_traits<(DType)1, 128, sm90::SplitTile<sm90::TileSizesSplit{tile} >, 128>"
    fields = bench_build.fields_of(f"sm90::flash_fwd_split_kernel<{traits} >", "sm_90a")
    assert fields == {"headdim": 128, "family": "sm90", "kind": kind}


@pytest.mark.parametrize(
    ("factors", "tile", "number", "kind"),
    [
        (3, "<96> ", 3, "general"),
        (2, "<96> ", 3, "general with dropout"),
        (1, "<96> ", 3, "general with softcap"),
        (0, "<96> ", 3, "general with ALiBi"),
        (0, "<96> ", 0, "full"),
        (0, "<96> ", 1, "local"),
        (0, "Latent", 0, "full of latent attention"),
    ],
)
def test_hoppers_backward_kernels_have_fields(factors: int, tile: str, number: int, kind: str) -> None:
    traits = f"sm90::Flash_bwd_kernel_traits<(DType)1, 96, (sm90::Factors){factors}, 96, sm90::TileSizesBwd{tile}>"
    fields = bench_build.fields_of(f"void sm90::flash_bwd_kernel<{traits}, (Kind){number}>", "sm_90a")
    assert fields == {"headdim": 96, "kind": kind, "tile": "sm90", "mode": "all"}


@pytest.mark.parametrize(
    ("tool", "summary", "errors"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "========= ERROR SUMMARY: 1 error", 1),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("racecheck", "========= RACECHECK SUMMARY: 12 hazards displayed (12 errors, 0 warnings)", 12),
        ("racecheck", "========= RACECHECK SUMMARY: 100 hazards displayed (134 errors, 1 warning)", 135),
    ],
)
def test_the_number_of_errors_of_the_sanitizer_is_read(tool: str, summary: str, errors: int) -> None:
    row = sanitize_gpu.row_of(tool, "kvcache", f"ran 38 cases in bfloat16, float16: 70 s\n{summary}\n")
    expected = {"tool": tool, "cases_of": "KV cache", "cases": 38, "dtypes": "bfloat16, float16", "errors": errors}
    assert row == expected | {"accesses": {}}


def test_hazards_are_counted_by_the_source_files_of_their_accesses() -> None:
    copy, read = "copy(const void *)+0x10 in copy.hpp:14", "load(const float *)+0x20 in scores.h:5"
    race, end = "========= Error: Race reported between", "========= "
    report = "\n".join(
        [
            *("========= COMPUTE-SANITIZER", f"{race} Write access at {copy}"),
            *(f"=========     and Read access at {read} [64 hazards]",) * 2,
            *(end, f"{race} Write access at {copy}", f"=========     and Read access at {read} [32 hazards]", end),
            *(f"{race} Read access at {read}", "=========     and Write access at f()+0x1 [1 hazards]", end),
            "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)",
        ]
    )
    found = sanitize_gpu.accesses(report)
    unknown = "scores.h and a line unknown to the tool"
    assert found == {"copy.hpp and scores.h": 2, unknown: 1}
    rows = [{"tool": "racecheck", "cases_of": "attention", "cases": 9, "dtypes": "x", "errors": 3, "accesses": found}]
    _, _, table = tables.sanitize_tables(rows)
    shown = [[cell.strip() for cell in line.split("|")[2:4]] for line in table.splitlines()[2:]]
    assert shown == [["copy.hpp and scores.h", "2"], [unknown, "1"]]


def test_results_of_the_sanitizer_are_shown_with_and_without_the_kind_of_cases() -> None:
    row = {"tool": "memcheck", "cases": 206, "dtypes": "bfloat16, float16", "errors": 0}
    (without,) = tables.sanitize_tables([row])
    (with_kind,) = tables.sanitize_tables([row | {"cases_of": of} for of in ("attention", "KV cache")])
    assert "cases of" not in without
    assert "206" in without
    assert [line.split("|")[2].strip() for line in with_kind.splitlines()[2:]] == ["attention", "KV cache"]


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_the_sanitizer_looks_for_races_in_every_kind_of_kernel(headdim: int) -> None:
    chosen = sanitize_driver.parser().parse_args(sanitize_gpu.TOOLS["racecheck"])
    cases = [case for case in sanitize_driver.choose(chosen.headdims, chosen.per_headdim) if case.headdim == headdim]
    dense = [case for case in cases if isinstance(case, Case)]
    plain = [case for case in dense if (case.softcap, case.alibi, case.dropout_p) == (0.0, None, 0.0)]
    assert {case.causal for case in plain} == {False, True}
    assert {case.softcap > 0 for case in dense} == {case.dropout_p > 0 for case in dense} == {False, True}
    varlen = [case for case in cases if isinstance(case, VarlenCase)]
    assert {case.softcap > 0 for case in varlen} == {case.dropout_p > 0 for case in varlen} == {False, True}
    assert any(isinstance(case, KvCacheCase) for case in cases)


def test_the_sanitizer_looks_for_races_in_every_form_of_the_kv_cache() -> None:
    chosen = sanitize_driver.parser().parse_args(sanitize_gpu.TOOLS["racecheck"])
    cases = sanitize_driver.choose(chosen.headdims, chosen.per_headdim, "kvcache")
    caches = [case for case in cases if isinstance(case, KvCacheCase)]
    assert len(caches) == len(cases)
    assert {sanitize_driver.kind_of(case)[-1] for case in caches} == {0, 1, 2, 3, 4}, "rows of a group"
    one_row = [case for case in caches if case.batch == 1]
    assert {case.page_size for case in one_row} >= {0, 7}
    assert {case.keys > 8192 for case in one_row} == {False, True}
    assert any(case.batch * case.nheads_k > 132 for case in caches), "several heads for a CTA"


def test_the_parts_of_the_sanitizer_have_every_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {tool: sanitize_driver.parser().parse_args(extra) for tool, extra in sanitize_gpu.TOOLS.items()}
    counts = {
        (tool, of): len(sanitize_driver.choose(a.headdims, a.per_headdim, of))
        for tool, a in every.items()
        for of in sanitize_gpu.CASES_OF
    }
    for tool, a in every.items():
        together = sanitize_driver.choose(a.headdims, a.per_headdim)
        assert len(together) == sum(counts[tool, of] for of in sanitize_gpu.CASES_OF)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--print-limit" in command, "by default the tool counts all hazards, but prints a hundred"
        chosen = sanitize_driver.parser().parse_args(command[command.index("tests.sanitize.sanitize_driver") + 1 :])
        part, parts = chosen.part
        cases = sanitize_driver.choose(chosen.headdims, chosen.per_headdim, chosen.of)[part::parts]
        summary = f"ran {len(cases)} cases in bfloat16: 1 s\n========= ERROR SUMMARY: {part} errors\n"
        return subprocess.CompletedProcess(command, 0, stdout=summary, stderr="")

    monkeypatch.setattr(sanitize_gpu, "compute_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize_gpu.subprocess, "run", run)
    rows = sanitize_gpu.run_tools(list(sanitize_gpu.CASES_OF), 3)
    assert [(row["tool"], row["cases_of"], row["cases"], row["errors"]) for row in rows] == [
        (tool, shown, counts[tool, of], 0 + 1 + 2)
        for of, shown in sanitize_gpu.CASES_OF.items()
        for tool in ("memcheck", "racecheck")
    ]


@pytest.mark.parametrize("has_sm80", [True, False])
def test_the_sanitizer_runs_wrong_values_on_every_kernel_that_takes_the_case(
    has_sm80: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after cases whose last one ran on the kernels of sm80."""
    cases = [SMALL_LATENT_CASES[0], SMALL_KVCACHE_CASES[0]]
    ran: set[tuple[str, str]] = set()

    def run_call(call: CacheCall, _: str) -> tuple[Tensor, Tensor]:
        ran.add((call.case.name, os.environ.get("FLASH_ATTN_MINI_ARCH", "")))
        return call.q, call.q

    monkeypatch.delenv("FLASH_ATTN_MINI_ARCH", raising=False)
    monkeypatch.setattr(sanitize_driver, "make_call", lambda case, dtype, _, seed: make_call(case, dtype, "cpu", seed))
    monkeypatch.setattr(sanitize_driver, "run_call", run_call)
    monkeypatch.setattr(sanitize_driver, "sm80_unavailable_reason", lambda: None if has_sm80 else "not built")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for case in cases:
        sanitize_driver.run(case, torch.float16)
    ran.clear()
    sanitize_driver.run_wrong_cache_values(cases)
    latent, plain = (case.name for case in cases)
    assert ran == {(latent, ""), (plain, ""), *([(plain, "80")] if has_sm80 else [])}
    assert "FLASH_ATTN_MINI_ARCH" not in os.environ


@pytest.mark.parametrize("errors", [0, 3])
@pytest.mark.parametrize("kinds", [("attention", "kvcache"), ("kvcache",)], ids=str)
def test_the_sanitizer_saves_its_rows_before_it_fails(
    kinds: tuple[str, ...], errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize_gpu, "require_gpu", lambda _: None)
    monkeypatch.setattr(sanitize_gpu, "sm80_unavailable_reason", lambda: None)
    monkeypatch.setattr(sanitize_gpu.learning_kernels, "load", lambda: None)
    output = f"ran 9 cases in x: 1 s\n========= ERROR SUMMARY: {errors} errors"
    rows = {of: sanitize_gpu.row_of("memcheck", of, output) for of in kinds}
    monkeypatch.setattr(sanitize_gpu, "run_tools", lambda chosen, parts: [rows[of] for of in chosen])
    with pytest.raises(SystemExit, match="there are errors") if errors else contextlib.nullcontext():
        sanitize_gpu.main(["--out-dir", str(tmp_path), *(f"--of={of}" for of in kinds if len(kinds) == 1)])
    assert {path.name for path in tmp_path.iterdir()} == {f"sanitize_{of}.json" for of in kinds}
    for of in kinds:
        result = results.load(tmp_path / f"sanitize_{of}.json")
        assert result["data"] == [rows[of]]
        assert all((results.ROOT / source).exists() for source in result["stamp"]["sources"])


@pytest.mark.parametrize("part", [("4", "4"), ("-1", "4"), ("0", "0")])
def test_a_part_of_the_sanitizer_that_does_not_exist_is_an_error(
    part: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sanitize_driver.main(["--part", *part])
    assert f"--part is {part[0]} {part[1]}; allowed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sanitize_gpu.main(["--parts", "0"])
    assert "--parts is 0; allowed" in capsys.readouterr().err


def test_a_sanitizer_that_did_not_finish_is_an_error() -> None:
    for output in ("========= ERROR SUMMARY: 0 errors\n", "ran 38 cases in bfloat16: 70 s\n"):
        with pytest.raises(SystemExit, match="memcheck did not finish"):
            sanitize_gpu.row_of("memcheck", "attention", output)


def ptxas_reports(folder: Path) -> list[Path]:
    """Objects of backward kernels for two kinds and two dtypes, with reports of ptxas: local kernels spill."""
    paths = []
    for (k, kind), (t, dtype) in itertools.product(enumerate(("full", "local")), enumerate(("fp16", "bf16"))):
        symbols = [f"flash_bwd_dot_do_oIN7cutlass{('6half_t', '10bfloat16_t')[t]}ELi32EEEv"]
        for bulk in (0, 1):
            tile = f"NS0_7TileBwdILi128ELi64ELi4ELi4ELi4ELi4ELi2ELi2ELb{bulk}ELi4ELb0ELb0EEE"
            traits = f"INS0_23Flash_bwd_kernel_traitsILNS_5DTypeE{t}ELi32E{tile}Lb{bulk}ELNS_4KindE{k}EEE"
            symbols += [f"flash_bwd_kernel{traits}LNS_4KindE{k}ELNS0_7BwdModeE{mode}EEEv" for mode in range(3)]
            symbols += [f"flash_bwd_convert_dq{traits}EEv"]
        text = ""
        for i, symbol in enumerate(symbols):
            mangled = f"_ZN5flash4sm80{len(symbol.partition('I')[0])}{symbol}NS_16Flash_bwd_paramsE"
            spilled = 4 * k if "flash_bwd_kernel" in symbol else 0
            text += f"""\
ptxas info    : Compiling entry function '{mangled}' for 'sm_90a'
ptxas info    : Function properties for {mangled}
    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used {100 + 10 * t + i} registers, used 1 barriers
"""
        paths.append(folder / f"flash_bwd_hdim32_{dtype}_{kind}_sm80-0123.o")
        paths[-1].with_suffix(".ptxas.txt").write_text(text)
    return paths


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="the names stay mangled")
def test_resources_of_the_backward_say_kind_and_mode_and_leave_out_what_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_build.kernels, "build_kernels", lambda *_: ptxas_reports(tmp_path))
    with pytest.raises(SystemExit, match=r"registers are spilled in flash_bwd_hdim32_fp16_local_sm80 \(8 bytes\)"):
        bench_build.main(["--resources", "--out-dir", str(tmp_path)])
    rows = results.load(tmp_path / "kernel_resources.json")["data"]
    assert len(rows) == 4 * 5  # of each object 3 modes, a preprocessing and a conversion; not the 4 without bulk
    backward, others = tables.resource_tables(rows)
    assert [cells[:2] for cells in cells_of(others)] == [
        ["`flash_bwd_dot_do_o<32>`", dtype] for dtype in ("fp16", "bf16")
    ]
    tile = "128x64x4x4x4x4x2x2x1x4x0x0"
    assert cells_of(backward) == [
        ["32", "full", tile, "sm_90a", "105 / 115", "106 / 116", "107 / 117", "108 / 118"],
        ["32", "local", tile, "sm_90a", "105 (8) / 115 (8)", "106 (8) / 116 (8)", "107 (8) / 117 (8)", "108 / 118"],
    ]


def test_names_of_modes_are_those_of_the_kernels() -> None:
    text = (tune_sm80.CSRC / "sm80" / "backward" / "kernel_traits_bwd.h").read_text()
    enumerators = re.search(r"enum class BwdMode \{(.*?)\}", text, re.DOTALL)
    assert enumerators is not None
    assert tuple(re.findall(r"^\s*(\w+),", enumerators[1], re.MULTILINE)) == bench_build.BACKWARD_MODES


def test_tuning_reports_the_registers_of_each_kernel_of_a_candidate(tmp_path: Path) -> None:
    report = ptxas_reports(tmp_path)[0].with_suffix(".ptxas.txt").read_text()
    found = tune_sm80.registers_and_spills(report, "90a")
    assert found[0] == "all, full: 105 registers, 0 bytes spilled"
    assert [text.split(":")[0] for text in found] == ["all, full", "deterministic, full", "general, full"]


def saved_result(folder: Path) -> None:
    results.save("speed", benchmark="other", title="Speed", data=[{"x": 1, "y": 0.5}], sources=(), out_dir=folder)


def test_report_fills_blocks_and_filling_again_changes_nothing(tmp_path: Path) -> None:
    saved_result(tmp_path)
    text = "a\n<!-- results:speed begin -->\nold\n<!-- results:speed end -->\nb\n"
    once = results.fill(text, tmp_path)
    assert "| 1   | 0.5 |" in once
    assert "old" not in once
    assert once.startswith("a\n")
    assert once.endswith("-->\nb\n")
    assert results.fill(once, tmp_path) == once


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, the headers first."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_summary_of_models_has_the_first_of_ours() -> None:
    rows = [
        {
            "workload": "training",
            "ratio": {"activated": {"SDPA": 1.25, "other": 1.5}, "registered": {"SDPA": 9}},
        },
        {"workload": "encoder", "ratio": {"activated": {"SDPA": 2.0}}},
    ]
    expected = [["activated ÷", "SDPA", "other"], ["training", "1.25", "1.50"], ["encoder", "2.00", ""]]
    assert cells(tables.models_summary(rows)) == expected


def test_the_summary_of_a_kv_cache_has_one_query_and_several_apart(tmp_path: Path) -> None:
    rows = [
        {"seqlen_q": 1, "ratio": {"ours": {"rival": 0.5}, "second": {"rival": 9.0}}},
        {"seqlen_q": 1, "ratio": {"ours": {"rival": 1.5}}},
        {"seqlen_q": 1, "ratio": {"ours": {}}},  # pages: no rival has them
        {"seqlen_q": 4, "ratio": {"ours": {"rival": 3.0, "other": 2.0}}},
        {"seqlen_q": 16, "ratio": {"ours": {"rival": 5.0}}},
    ]
    results.save("decode", benchmark="bench_kvcache", title="Speed", data=rows, sources=(), out_dir=tmp_path)
    result = results.load(tmp_path / "decode.json")
    summary = tables.summarize(result)
    assert cells(summary) == [
        ["ours ÷ ..., median and lowest", "the fastest other", "rival", "other"],
        ["1 query, 2 shapes", "", "1.00, 0.50", ""],
        ["4 to 16 queries, 2 shapes", "3.50, 2.00", "4.00, 3.00", "2.00, 2.00"],
    ]
    assert summary.endswith(f"\n\n{tables.describe(result['stamp'])}.")


def test_a_summary_of_several_results_has_a_line_for_each(tmp_path: Path) -> None:
    for name, value in (("forward_x", 1.5), ("backward_x", 0.5)):
        rows = [{"ratio": {"ours": {"rival": value}}}]
        results.save(name, benchmark="bench_speed", title="Speed", data=rows, sources=(), out_dir=tmp_path)
    mark = "<!-- results:forward_x+backward_x.summary {} -->\n"
    filled = results.fill(mark.format("begin") + mark.format("end"), tmp_path)
    assert cells(filled) == [
        ["ours ÷ ..., median and lowest", "rival"],
        ["forward, 1 shapes", "1.50, 1.50"],
        ["backward, 1 shapes", "0.50, 0.50"],
    ]
    stamps = [results.load(tmp_path / f"{name}_x.json")["stamp"] for name in ("forward", "backward")]
    where = tables.describe(stamps[0]).rpartition("; ")[0]
    assert f"\n{where}; forward {stamps[0]['date']}, backward {stamps[1]['date']}.\n" in filled
    (tmp_path / "backward_x.json").unlink()
    assert results.NOT_MEASURED in results.fill(mark.format("begin") + mark.format("end"), tmp_path)


def test_report_check_fails_until_the_blocks_are_filled(tmp_path: Path) -> None:
    saved_result(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:speed begin -->\n<!-- results:speed end -->\n")
    arguments = ["--results", str(tmp_path), str(readme)]
    with pytest.raises(SystemExit):
        results.main(["--check", *arguments])
    results.main(arguments)
    results.main(["--check", *arguments])


def test_report_without_a_result_says_so(tmp_path: Path) -> None:
    assert "Not measured yet." in results.fill("<!-- results:x begin -->\n<!-- results:x end -->\n", tmp_path)


def test_report_refuses_a_mark_without_its_partner(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no partner"):
        results.fill("<!-- results:x begin -->\n<!-- results:y end -->\n", tmp_path)


def test_readme_and_docs_quote_the_committed_results() -> None:
    assert results.outdated(results.documents(), results.RESULTS) == []


def test_committed_results_render() -> None:
    for path in results.RESULTS.glob("*.json"):
        assert tables.render(results.load(path))
