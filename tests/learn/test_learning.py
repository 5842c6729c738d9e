"""The learning path: the commands of its documents, and its benchmarks as far as a CPU runs them."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import results
from benchmarks.methods import attention_flops
from learn import __main__ as ladder_command
from learn import rungs
from learn.bench import __main__ as bench
from learn.bench import choices, grid, ladder, negative, plots, report, roofline

from ..support.new_process import ROOT, run_python
from ..support.one_thread import one_thread  # noqa: F401

DOCUMENTS = [ROOT / "learn" / f"{name}.md" for name in ("tutorial", "roofline", "negative_results")]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRACE = re.compile(r"^```\n(\[flash_attn_mini\].*?)^```", re.MULTILINE | re.DOTALL)
HAS_GPU = torch.cuda.is_available()


def commands() -> list[str]:
    """Every command of the documents on one line, once."""
    blocks = [block for document in DOCUMENTS for block in BLOCK.findall(document.read_text())]
    return list(dict.fromkeys(line for block in blocks if "import torch" not in block for line in block.splitlines()))


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_documents_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules run in this process: the ladder without Triton's interpreter, benchmarks up to their options."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    words = shlex.split(line)
    if words[0] == "cuobjdump":
        assert words[-1] == "flash_attn_mini/_C*.so"
        return
    start = words.index("python")  # behind variables, compute-sanitizer or ncu
    assert all("=" in word or words[0] in ("ncu", "compute-sanitizer") for word in words[:start])
    assert words[start + 1] == "-m"
    module, arguments = words[start + 2], words[start + 3 :]
    if module == "learn":
        assert ladder_command.main([*arguments, "--seconds", "0"]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main([*arguments, "--help"])
        assert ended.value.code == 0


def test_the_documents_have_the_commands_that_make_their_results() -> None:
    text = "\n".join(commands())
    for name in bench.GPU:
        if name != "ladder":
            assert f"python -m learn.bench.{name}" in text
    assert "python -m learn" in commands()


def test_every_result_of_the_learning_path_is_shown() -> None:
    shown = {name for document in DOCUMENTS for name in re.findall(r"results:([\w.-]+) begin", document.read_text())}
    made = {f"choice_{name}" for name in choices.FIGURES} | {"bank_conflicts", "grid_cuda"}
    made |= {f"negative_{name}" for name in ("transposed_k", "warp_specialization")}
    for device in ("cpu", "cuda"):
        made |= {f"ladder{name}_{device}" for name in ("", "_lengths", "_errors", "_versions")}
        made |= {f"roofline{name}_{device}" for name in ("", "_lengths", "_memory")}
    assert {name.removesuffix(results.PLOT) for name in shown} == made | {"roofline_kernels"}


def test_the_trace_of_the_tutorial_is_that_of_its_command() -> None:
    tutorial = DOCUMENTS[0].read_text()
    (block,) = (block for block in BLOCK.findall(tutorial) if "import torch" in block)
    (shown,) = TRACE.findall(tutorial)
    variable, _, _, script = shlex.split(block)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **dict([variable.split("=")])}
    run = run_python("-c", script, environment=environment)
    assert run.returncode == 0, run.stderr
    pattern = r"isa=\w+|(?:row|key)_block=\d+|blocks=\d+|threads=\d+"  # of the machine
    assert re.sub(pattern, "", run.stderr) == re.sub(pattern, "", shown)
    links = {line.split()[1] for line in shown.splitlines()}
    table = tutorial.split("| link | file |")[1].split("\n\n")[0]
    for link in ("flash_attn_func", "flash_attn_mini::fwd", "mha_fwd", "set_params_fprop", "run_mha_fwd"):
        assert link in links
        assert f"`{link}`" in table


@pytest.mark.parametrize("module", [grid, negative, choices])
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_a_benchmark_that_needs_a_gpu_says_so(module: object) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        module.main([])


def test_one_command_runs_every_step_of_the_learning_path() -> None:
    modules = (ladder, grid, roofline, negative, choices)
    assert [f"learn.bench.{name}" for name in bench.GPU] == [module.__name__ for module in modules]
    assert set(bench.CPU) < set(bench.GPU)


def test_the_grid_runs_on_the_cpu_and_fills_twelve_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("FLASH_ATTN_MINI_TRITON_AUTOTUNE", "0")  # the benchmark sets it: not for the tests that follow
    grid.main(["--device", "cpu", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "grid_cpu.json")
    assert len(result["data"]) == 3 * 2 * 2 * 2  # passes, head dims, masks, lengths
    for row in result["data"]:
        assert set(row["tflops"]) == {"naive", "cpu", "SDPA"}
        work = {"forward": 1.0, "backward": 2.5, "forward + backward": 3.5}[row["pass"]]
        shape = (row["batch"], row["nheads"], row["seqlen"], row["seqlen"], row["headdim"], row["causal"])
        for name, ms in row["ms"].items():
            assert row["tflops"][name] == pytest.approx(work * attention_flops(*shape) / ms / 1e9, rel=1e-2)
    assert (tmp_path / "grid_cpu.png").stat().st_size > 10_000
    assert len(axes_of(result)) == 12


def axes_of(result: dict) -> list:
    """The panels that a result's plot has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plots.drawing_of(result)(plt, result["data"])
    plt.close(figure)
    return list(figure.axes)


def test_a_contender_out_of_memory_is_named_in_plot_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    naive = grid.naive

    def short_of_memory(q: torch.Tensor, *others: object) -> torch.Tensor:
        if q.requires_grad and torch.is_grad_enabled():
            raise torch.cuda.OutOfMemoryError("no memory")
        return naive(q, *others)

    monkeypatch.setattr(grid, "naive", short_of_memory)
    rows = grid.measure_point(grid.GRIDS["cpu"], 32, 16, True, rep_ms=1.0)
    for row in rows:
        assert row["unsupported"] == {"naive": grid.OUT_OF_MEMORY}
        assert set(row["tflops"]) == {"cpu", "SDPA"}
    result = {"benchmark": "grid", "data": rows}
    texts = [text.get_text() for axis in axes_of(result) for text in axis.texts]
    assert texts == ["naive: out of memory"] * 3
    assert report.grid_tables(rows)[-1] == "–: out of memory."


def test_a_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    naive = grid.naive
    monkeypatch.setattr(grid, "naive", lambda *arguments: naive(*arguments) + 0.5)
    with pytest.raises(RuntimeError, match="naive and SDPA disagree"):
        grid.measure_point(grid.GRIDS["cpu"], 32, 16, False, rep_ms=1.0)


def test_intensities_follow_the_formulas() -> None:
    for seqlen in (256, 4096, 65536):
        flops = attention_flops(32, 8, seqlen, seqlen, 64, False)
        standard, flash = (
            roofline.bytes_of_standard(256, seqlen, 64),
            roofline.bytes_of_flash(256, seqlen, 64),
        )
        assert flops / standard < 32 < flops / flash
        assert flops / flash == pytest.approx(seqlen / 2, rel=0.02)
    assert roofline.seconds_on(100.0, 1000.0, 1e14, 1e10) == 1.0  # arithmetic
    assert roofline.seconds_on(100.0, 1000.0, 1e12, 1e12) == 1.0  # memory


def test_the_roofline_measures_lengths_and_memory_on_the_cpu() -> None:
    cpu = torch.device("cpu")
    rows = roofline.length_rows(cpu, peak=0.05, gbps=20.0, lengths=(64, 128))
    assert [(row["head dim"], row["seqlen"]) for row in rows] == [(64, 64), (64, 128), (128, 64), (128, 128)]
    assert all(row["speed-up measured"] > 0 and row["speed-up by the roofline"] >= 1 for row in rows)
    (row,) = roofline.memory_rows(cpu, (128,))
    scores = roofline.BATCH * roofline.NHEADS * 128 * 128 * 4 / 2**20
    assert float(row["naive"]) == pytest.approx(2 * scores, abs=0.01 + 1.0)  # and copies of q, k or v
    assert float(row["cpu"]) < 0.1


def test_the_roofline_leaves_out_what_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rung: rungs.Rung, seconds: float) -> dict[str, object]:
        if rung.name == "sm90":
            return {"rung": rung.name, "reason": "needs a GPU"}
        return {"rung": rung.name, "ms": 1.0, "tflops": 2.0, "gbps": 10.0, "interpreted": "triton" in rung.name}

    monkeypatch.setattr(rungs, "measure", measured)
    rows = roofline.rung_rows(4.0, 15.0, quick=True)
    assert rows[0]["rung"] == "1. naive"
    assert rows[-1]["rung"] == f"{len(rungs.RUNGS)}. cpu"
    assert not {"sm90", "triton", "minimal-triton"} & {row["rung"].split()[1] for row in rows}
    assert all((row["intensity"], row["roof_tflops"], row["ridge"]) == (200.0, 3.0, 266.7) for row in rows)


def test_plots_of_the_roofline_have_every_rung_and_length() -> None:
    pytest.importorskip("matplotlib")
    row = {
        "rung": "1. naive",
        "intensity": 9.0,
        "tflops": 2.0,
        "peak_tflops": 100.0,
        "copy_gbps": 1000.0,
        "ridge": 100.0,
    }
    (axis,) = axes_of({"benchmark": "roofline", "data": [row, {**row, "rung": "8. sm80", "intensity": 500.0}]})
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels[-2:] == ["1. naive", "8. sm80"]
    rows = [
        {
            "head dim": 64,
            "seqlen": seqlen,
            plots.STANDARD: 20.0,
            plots.FLASH: seqlen / 2,
            plots.BY_ROOFLINE: 3.0,
            plots.MEASURED: 4.0 if seqlen < 1000 else "out of memory",
        }
        for seqlen in (512, 1024)
    ]
    _, speed_up = axes_of({"benchmark": "roofline", "data": rows})
    assert [len(line.get_xdata()) for line in speed_up.lines] == [2, 1]
    assert plots.drawing_of({"benchmark": "roofline", "data": [{"seqlen": 512, "naive": "1.0"}]}) is None


@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "words", "ms"),
    [
        ('{"share": 0.001, "ms": 2.5}\n', "", 0, "right", 2.5),
        ('{"share": NaN, "ms": 2.5}\n', "", 0, "compiled; the output is NaN", None),
        ('{"share": 0.5, "ms": 2.5}\n', "", 0, "compiled; off by 0.5 of the largest value", None),
        (
            "",
            "line\nRuntimeError: PassManager::run failed\n",
            1,
            "ended with status 1: RuntimeError: PassManager::run",
            None,
        ),
        ("", "", -11, "ended with status -11: no message", None),
    ],
)
def test_what_became_of_an_attempt_is_said(stdout: str, stderr: str, status: int, words: str, ms: float | None) -> None:
    said, measured = negative.outcome(subprocess.CompletedProcess([], status, stdout, stderr))
    assert said.startswith(words)
    assert measured == ms


def test_a_picture_is_linked_from_the_folder_of_the_document(tmp_path: Path) -> None:
    text = "<!-- results:speed.plot begin -->\n<!-- results:speed.plot end -->\n"
    folder = tmp_path / "results"
    assert results.NOT_MEASURED in report.fill(text, folder, tmp_path)
    results.save("speed", benchmark="other", title="Speed", data=[{"x": 1}], out_dir=folder)
    assert results.NOT_MEASURED in report.fill(text, folder, tmp_path)
    (folder / "speed.png").write_bytes(b"")
    assert "![Speed](results/speed.png)" in report.fill(text, folder, tmp_path)


def test_a_rung_without_values_has_its_reason_in_the_table() -> None:
    row = {"rung": "sm90", "reason": "needs a Hopper GPU"}
    (table,) = report.ladder_tables([row])
    assert "| 1. sm90 | needs a Hopper GPU |" in table
