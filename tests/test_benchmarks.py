"""The benchmarks' own machinery on the CPU: they run end to end, results carry stamps that go stale, reports fill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    accuracy,
    bench_build,
    bench_forward,
    bench_overhead,
    kernel_resources,
    methods,
    provenance,
    report,
    run_all,
    tables,
)
from benchmarks.rivals import RIVALS, select


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small tree with one C++ and one Python source."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernel.cu").write_text("// a kernel\nint tile() { return 64; }\n")
    (tmp_path / "call.py").write_text('"""A call."""\n\nSCALE = 2\n\n\ndef f():\n    """Doc."""\n    return SCALE\n')
    return tmp_path


GLOBS = ("csrc/**/*", "call.py")


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        pytest.param("csrc/kernel.cu", "64", "128", False, id="C++ code"),
        pytest.param("csrc/kernel.cu", "a kernel", "the kernel", True, id="C++ comment"),
        pytest.param("csrc/kernel.cu", "{ return", "{\n    return", True, id="C++ layout"),
        pytest.param("call.py", "SCALE = 2", "SCALE = 3", False, id="Python code"),
        pytest.param("call.py", "A call.", "Another call.\n\nIn full.", True, id="Python docstring"),
        pytest.param("call.py", "\n\n\ndef", "\n# note\ndef", True, id="Python comment"),
    ],
)
def test_hash_follows_code_and_nothing_else(project: Path, file: str, old: str, new: str, same: bool) -> None:
    before = provenance.hash_sources(GLOBS, project)
    path = project / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert (provenance.hash_sources(GLOBS, project) == before) is same


def test_hash_follows_files_that_come_and_go(project: Path) -> None:
    before = provenance.hash_sources(GLOBS, project)
    (project / "csrc" / "more.h").write_text("int more();\n")
    assert provenance.hash_sources(GLOBS, project) != before
    (project / "csrc" / "more.h").unlink()
    (project / "csrc" / "build.o").write_text("not a source")
    assert provenance.hash_sources(GLOBS, project) == before


def test_comment_marks_inside_strings_are_code() -> None:
    assert provenance.normalise('char *url = "a//b"; // x', ".cu") == 'char*url="a//b";'
    assert provenance.normalise("int a = b /* c\n d */ / e;", ".cpp") == "inta=b/e;"


def test_every_source_glob_of_the_benchmarks_finds_files() -> None:
    for name, globs in provenance.SOURCES_OF_BACKEND.items():
        assert provenance.find_sources(globs), name
    for group in (provenance.HOST, provenance.MINIMAL, provenance.METHOD):
        for pattern in group:
            assert provenance.find_sources([pattern]), pattern


def test_stale_results_are_found(project: Path) -> None:
    results = project / "results"
    results.mkdir()
    stamp = provenance.stamp(GLOBS, project)
    (results / "forward.json").write_text(json.dumps({"name": "forward", "stamp": stamp}))
    assert provenance.stale_results(results, project) == []
    (project / "call.py").write_text("SCALE = 4\n")
    assert provenance.stale_results(results, project) == [(results / "forward.json", stamp["date"])]


def test_a_failed_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    provenance.write_atomically(path, "first")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        provenance.write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing was measured"):
        provenance.save("x", benchmark="accuracy", title="", data=[], sources=(), out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interleave_alternates_and_ratios_cancel_drift() -> None:
    order: list[str] = []
    slowdown = {"MATH": iter([2.0, 4.0, 8.0]), "SDPA": iter([4.0, 8.0, 16.0])}
    rivals = select(["MATH", "SDPA"])

    def measure(call: object, rep_ms: float) -> float:
        name = call()  # type: ignore[operator]
        order.append(name)
        return next(slowdown[name])

    calls = {rival: (lambda name=rival.name: name) for rival in rivals}
    timings = methods.interleave(calls, measure, rounds=3, rep_ms=0.0)
    assert order == ["MATH", "SDPA"] * 3
    assert timings["MATH"].ms == 4.0
    assert methods.ratio(timings["MATH"], timings["SDPA"]) == 2.0


def test_flops_count_two_products_and_half_of_them_when_causal() -> None:
    assert methods.attention_flops(2, 3, 5, 7, 11, causal=False) == 4 * 2 * 3 * 5 * 7 * 11
    assert methods.attention_flops(2, 3, 5, 7, 11, causal=True) == 2 * 2 * 3 * 5 * 7 * 11


def test_grid_of_the_figures_holds_16384_tokens_and_2048_columns() -> None:
    points = bench_forward.GRIDS["perf"].points(quick=False)
    assert len(points) == 36
    assert all(point.batch * point.seqlen == 16384 and point.nheads * point.headdim == 2048 for point in points)


def test_unknown_rival_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: cuda, triton, cpu, FLASH_ATTENTION, cuDNN, MATH, SDPA"):
        select(["fa9"])


def test_rivals_that_cannot_run_say_why() -> None:
    q = torch.randn(1, 8, 2, 16)
    k = torch.randn(1, 12, 2, 16)
    assert "equal lengths" in str(RIVALS["SDPA"].unsupported(q, k, k, True))
    assert RIVALS["SDPA"].unsupported(q, k, k, False) is None


@pytest.mark.parametrize("ours", ["MATH", "cpu"])
def test_forward_benchmark_runs_end_to_end(ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_forward.main(["--grid", "tiny", "--backend", ours, "--rounds", "2", "--out-dir", str(tmp_path)])
    result = provenance.load(tmp_path / f"forward_{ours}.json")
    assert len(result["data"]) == len(bench_forward.GRIDS["tiny"].points(quick=False))
    for row in result["data"]:
        assert row["ratio"][ours]["SDPA"] > 0
        assert row["tflops"][ours] > 0
    assert result["stamp"]["torch"] == torch.__version__
    assert f"({ours} ÷ SDPA, the median of the rounds' ratios)" in (tmp_path / f"forward_{ours}.md").read_text()
    assert "d16 causal" in capsys.readouterr().out
    assert provenance.stale_results(tmp_path) == []


def test_forward_benchmark_without_time_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing is written"):
        bench_forward.main(["--grid", "tiny", "--backend", "MATH", "--seconds", "0", "--out-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_overhead_benchmark_runs_on_cpu_tensors(tmp_path: Path) -> None:
    bench_overhead.main(["--device", "cpu", "--backend", "cpu", "--quick", "--out-dir", str(tmp_path)])
    rows = provenance.load(tmp_path / "overhead_cpu_quick.json")["data"]
    assert {row["name"] for row in rows} == {"cpu", "SDPA"}
    assert all(row["microseconds"] > 0 for row in rows)


def test_accuracy_runs_over_the_cases(tmp_path: Path) -> None:
    accuracy.main(["--backend", "cpu", "--quick", "--out-dir", str(tmp_path)])
    (path,) = tmp_path.glob("accuracy*.json")
    rows = provenance.load(path)["data"]
    assert [row["dtype"] for row in rows] == ["float16", "bfloat16", "float32", "float64"]
    assert all(row["cases"] == row["all_cases"] for row in rows)
    assert all(0 <= row["out_share"] <= 1 for row in rows)


def test_build_times_keep_one_row_for_each_label(tmp_path: Path) -> None:
    command = ["--", sys.executable, "-c", "print('kernels: hdim64 compiled in 31 s')"]
    for label in ("B", "A", "B"):
        bench_build.main(["--label", label, "--limit", "60", "--out-dir", str(tmp_path), *command])
    rows = provenance.load(tmp_path / "build.json")["data"]
    assert [row["label"] for row in rows] == ["A", "B"]
    assert rows[0]["kernels"] == {"hdim64": 31.0}


def test_a_build_that_fails_keeps_no_time(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        bench_build.main(["--label", "A", "--out-dir", str(tmp_path), "--", sys.executable, "-c", "exit(3)"])
    assert list(tmp_path.iterdir()) == []


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
    first, second = kernel_resources.parse(report)
    assert (first["kernel"], first["arch"], first["registers"], first["spill_bytes"]) == ("_Z1av", "sm_80", 112, 0)
    assert (second["registers"], second["spill_bytes"], second["stack_bytes"]) == (255, 16, 8)
    assert (first["static_smem_bytes"], second["static_smem_bytes"]) == (0, 1024)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_gpu_benchmarks_say_that_they_need_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench_forward.main(["--grid", "perf"])


def test_run_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run_step(step: run_all.Step, seconds: float, limit: float, passed_on: list[str]) -> bool:
        seen.append(step.label)
        return len(seen) > 1

    monkeypatch.setattr(run_all, "run_step", run_step)
    with pytest.raises(SystemExit, match="failed: "):
        run_all.main(["--out-dir", str(tmp_path)])
    assert len(seen) > 1


def saved_result(results: Path) -> None:
    provenance.save("speed", benchmark="other", title="Speed", data=[{"x": 1, "y": 0.5}], sources=(), out_dir=results)


def test_report_fills_blocks_and_filling_again_changes_nothing(tmp_path: Path) -> None:
    saved_result(tmp_path)
    text = "a\n<!-- results:speed begin -->\nold\n<!-- results:speed end -->\nb\n"
    once = report.fill(text, tmp_path)
    assert "| 1   | 0.5 |" in once
    assert "old" not in once
    assert once.startswith("a\n")
    assert once.endswith("-->\nb\n")
    assert report.fill(once, tmp_path) == once


def test_report_check_fails_until_the_blocks_are_filled(tmp_path: Path) -> None:
    saved_result(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:speed begin -->\n<!-- results:speed end -->\n")
    arguments = ["--results", str(tmp_path), str(readme)]
    with pytest.raises(SystemExit):
        report.main(["--check", *arguments])
    report.main(arguments)
    report.main(["--check", *arguments])


def test_report_without_a_result_says_so(tmp_path: Path) -> None:
    assert "Not measured yet." in report.fill("<!-- results:x begin -->\n<!-- results:x end -->\n", tmp_path)


def test_report_refuses_a_mark_without_its_partner(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no partner"):
        report.fill("<!-- results:x begin -->\n<!-- results:y end -->\n", tmp_path)


def test_readme_and_docs_quote_the_committed_results() -> None:
    assert report.outdated(report.documents(), provenance.RESULTS) == []


def test_committed_results_render() -> None:
    for path in provenance.RESULTS.glob("*.json"):
        assert tables.render(provenance.load(path))
