"""The rungs in PyTorch, the command, its table and plot, and verify()'s report.

test_ladder_triton.py tests the Triton rungs, test_minimal_cuda.py those in CUDA.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import learn
from flash_attn_mini.backends import Backend
from flash_attn_mini.reference import attention_reference
from learn import __main__ as command
from learn import full_kernels, naive_attention, online_softmax_attention, verify, whole_row_attention
from learn.draw import text_plot
from learn.experiments import whole_row_limits
from learn.measure import extra_bytes
from learn.rungs import BY_NAME, RUNGS, Shape, measure, shape_on
from learn.whole_row import most_keys

from ..support.ladder_calls import assert_right, draw_poisoned
from ..support.one_thread import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "learn"
HAS_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")

ATTENTION = {
    "naive": naive_attention,
    "online": lambda q, k, v, causal=False: online_softmax_attention(q, k, v, causal=causal)[0],
    "whole_row": whole_row_attention,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 128), (100, 130), (1, 64)])
@pytest.mark.parametrize("name", ATTENTION)
def test_rungs_in_pytorch_are_right(
    name: str, seqlen_q: int, seqlen_k: int, dtype: torch.dtype, draw: torch.Generator, described_seed: str
) -> None:
    q, k, v = draw_poisoned(draw, 2, seqlen_q, seqlen_k, 64, dtype, "cpu")
    assert_right(ATTENTION[name], q, k, v, described_seed)


@pytest.mark.parametrize("name", ["naive", "online"])
def test_causal_rungs_in_pytorch_are_right(name: str, draw: torch.Generator, described_seed: str) -> None:
    q, k, v = draw_poisoned(draw, 2, 100, 130, 64, torch.float32, "cpu")
    assert_right(lambda *x: ATTENTION[name](*x, causal=True), q, k, v, described_seed, causal=True)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "block_m", "block_n"),
    [
        pytest.param(100, 100, True, 64, 64, id="ragged"),
        pytest.param(7, 50, True, 16, 8, id="more keys than queries"),
        pytest.param(50, 7, True, 16, 8, id="rows without keys"),
        pytest.param(5, 0, False, 16, 8, id="no keys"),
        pytest.param(0, 5, False, 16, 8, id="no queries"),
        pytest.param(33, 65, False, 1, 1, id="blocks of one"),
        pytest.param(33, 65, False, 1000, 1000, id="one block"),
    ],
)
def test_online_softmax_is_exact(
    seqlen_q: int, seqlen_k: int, causal: bool, block_m: int, block_n: int, draw: torch.Generator
) -> None:
    q, k, v = (torch.randn(n, 24, generator=draw, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = online_softmax_attention(q, k, v, causal=causal, block_m=block_m, block_n=block_n)
    expected, expected_lse = attention_reference(*(t[None, :, None] for t in (q, k, v)), causal=causal)
    torch.testing.assert_close(out, expected[0, :, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse[0, 0], rtol=1e-12, atol=1e-12)


def test_online_softmax_does_not_overflow(draw: torch.Generator) -> None:
    q, k, v = (torch.randn(n, 16, generator=draw) * factor for n, factor in ((20, 1e4), (30, 1e4), (30, 1.0)))
    out, lse = online_softmax_attention(q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_whole_rows_end_where_shared_memory_does() -> None:
    most = most_keys(headdim=64, itemsize=4, limit=48 * 1024)
    k = torch.zeros(most, 64)
    whole_row_attention(k, k, k, limit=48 * 1024)
    k = torch.zeros(most + 1, 64)
    with pytest.raises(MemoryError, match=rf"{most + 1} keys need 49,[0-9]+ bytes.*allowed: 49,152 bytes, {most} keys"):
        whole_row_attention(k, k, k, limit=48 * 1024)
    keys = [row["most keys, head dim 128"] for row in whole_row_limits()]
    assert keys == sorted(keys)
    assert keys[-1] < 1000


def test_extra_memory_of_naive_is_quadratic_and_that_of_online_softmax_is_not(draw: torch.Generator) -> None:
    taken: dict[str, list[int]] = {"naive": [], "online": []}
    for seqlen in (256, 512):
        q, k, v = (torch.randn(seqlen, 32, generator=draw) for _ in range(3))
        for name in taken:
            taken[name].append(extra_bytes(lambda f=ATTENTION[name], x=(q, k, v): f(*x), CPU))
    assert taken["naive"][1] == 4 * taken["naive"][0] == 2 * 4 * 512 * 512  # an operation's input and its output
    assert taken["online"][1] < 1.2 * taken["online"][0]


def test_extra_memory_counts_what_lives_at_once() -> None:
    x = torch.zeros(1000)

    def call() -> torch.Tensor:
        first = x + 1
        second = first + 1
        del first
        return second[:500] + 1

    assert extra_bytes(call, CPU) == 8000 - 2000  # the two temporaries, or the last one with the output
    assert extra_bytes(lambda: x.add_(1), CPU) == -4000  # an output that was there before is counted as returned


def imported_by(file: Path) -> set[str]:
    """Names of the ladder's modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("learn"):
            names.add(node.module.rpartition(".")[2])
    return names


ORDER = (
    "naive", "online_softmax", "whole_row", "minimal_triton", "flash_v1", "flash_v2", "minimal_cuda", "tensor_cores",
    "full_kernels",
)  # fmt: skip


def test_a_rung_imports_no_later_rung() -> None:
    found = {name: imported_by(FOLDER / f"{name}.py") for name in ORDER}
    assert found["flash_v2"] == {"flash_v1"}  # the imports are seen
    for number, name in enumerate(ORDER):
        assert not found[name] & set(ORDER[number + 1 :]), f"{name}.py imports a later rung"


def test_every_rung_has_its_source_and_lesson() -> None:
    shape = Shape(1, 2, 256, 64)
    for rung in RUNGS:
        assert (ROOT / rung.source).exists()
        assert rung.lesson.endswith(".")
        assert rung.bytes_moved(shape, 2) >= 2 * 3 * shape.tensor_elements
    assert len(BY_NAME) == len(RUNGS)


def test_every_exported_name_exists() -> None:
    for name in learn.__all__:
        if learn.LATE.get(name) in ("minimal_triton", "flash_v1", "flash_v2"):
            pytest.importorskip("triton", minversion="3.4")
        assert callable(getattr(learn, name))
    with pytest.raises(AttributeError, match="no_such_rung"):
        learn.no_such_rung  # noqa: B018


@pytest.mark.parametrize("name", ["naive", "online-softmax", "cpu"])
def test_a_measured_row_has_every_value(name: str) -> None:
    row = measure(BY_NAME[name], seconds=0.01)
    assert row["passed"]
    assert 0 < row["max_error"] < 1e-3
    flops = 4 * row["batch"] * row["heads"] * row["seqlen"] ** 2 * row["headdim"]
    assert math.isclose(row["tflops"] * 1e9 * row["ms"], flops, rel_tol=1e-2)
    assert math.isclose(row["gbps"] * 1e6 * row["ms"], row["bytes_moved"], rel_tol=1e-2)
    assert row["extra_bytes"] > 0
    assert math.isclose(row["matmul_percent"], 100 * row["tflops"] / row["matmul_tflops"], rel_tol=1e-2)
    itemsize = {"float16": 2, "float32": 4}[row["dtype"]]
    q_bytes = itemsize * row["batch"] * row["heads"] * row["seqlen"] * row["headdim"]
    assert math.isclose(row["extra_over_q"], row["extra_bytes"] / q_bytes, rel_tol=1e-2)
    if name == "cpu":
        assert row["extra_bytes"] == 4 * row["batch"] * row["heads"] * row["seqlen"]  # the log-sum-exp


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", ["minimal-cuda", "tensor-cores", "sm80", "sm90"])
def test_a_rung_that_needs_a_gpu_says_so(name: str) -> None:
    row = measure(BY_NAME[name])
    assert "needs a " in row["reason"]
    assert "ms" not in row
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        learn.minimal_cuda_attention(*(torch.zeros(1, 1, 4, 8) for _ in range(3)))
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        learn.tensor_core_attention(*(torch.zeros(1, 1, 4, 64) for _ in range(3)))


def run_the_command(start: list[str], environment: dict[str, str], *, status: int = 0) -> list[str]:
    """The printed lines."""
    command = [sys.executable, *start]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == status, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    return (result.stdout + result.stderr).splitlines()


@pytest.mark.parametrize(
    ("hdims", "dtypes", "is_enough"), [([64, 128], ["bf16"], False), ([64], ["fp16"], False), ([192], ["fp16"], True)]
)
def test_a_rung_needs_kernels_for_its_tensors(
    hdims: list[int], dtypes: list[str], is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Extension:
        def build_info(self) -> dict[str, list[Any]]:
            return {"hdims": hdims, "dtypes": dtypes}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(full_kernels.BACKENDS, "cuda", Backend("cuda", lambda device: None))
    monkeypatch.setattr(full_kernels.extension, "load", Extension)
    reason = full_kernels.unavailable_reason("cuda")
    assert (reason is None) == is_enough
    if reason is not None:
        assert reason == "needs kernels for fp16 and head dim 128; build them all with: pip install ."
    assert shape_on(torch.device("cuda")).headdim == full_kernels.HEADDIM


def test_the_command_sets_up_the_interpreter_and_writes_rows_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.4")
    pytest.importorskip("matplotlib")
    rows_file, plot = tmp_path / "rows.json", tmp_path / "ladder.png"
    lines = run_the_command(["-m", "learn", "--json", str(rows_file), "--plot", str(plot)], {})
    rows = {row["rung"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert list(rows) == list(BY_NAME)
    for name in ("naive", "online-softmax", "minimal-triton", "flash-v1", "flash-v2", "triton", "cpu"):
        assert rows[name]["passed"], rows[name]
    assert rows["naive"]["matmul_percent"] > 0
    if not HAS_GPU and "TRITON_INTERPRET" not in os.environ:
        assert rows["flash-v1"]["matmul_percent"] is None
        assert any("run in its interpreter" in line for line in lines)
        assert rows["flash-v1"]["interpreted"]
        state = rows["flash-v1"]["extra_bytes"]
        assert state == rows["flash-v1"]["heads"] * rows["flash-v1"]["seqlen"] * (64 + 2) * 4  # float32 out, m and l
        assert rows["flash-v2"]["extra_bytes"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, run in this process, must not set the variable for the tests that follow."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


@pytest.mark.usefixtures("no_interpreter")
def test_a_single_rung_has_its_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rung", "online-softmax"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("online-softmax ") and line.endswith("passed") for line in lines) == 1
    assert not any(line.startswith("naive ") for line in lines)
    assert any("1000 keys need 288,768 bytes of shared memory" in line for line in lines)


@pytest.mark.usefixtures("no_interpreter")
def test_a_wrong_rung_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    naive = BY_NAME["naive"]
    monkeypatch.setitem(BY_NAME, "naive", dataclasses.replace(naive, run=lambda q, k, v: naive.run(q, k, v) + 0.1))
    assert command.main(["--rung", "naive"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_an_unknown_rung_names_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rung", "flash-v3"])
    assert "flash-v2" in capsys.readouterr().err


@pytest.mark.usefixtures("no_interpreter")
def test_a_plot_without_matplotlib_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--rung", "naive", "--plot", str(tmp_path / "plot.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


WITHOUT_OTHER_PACKAGES = """
import importlib.util, runpy, sys, sysconfig

class Missing:
    NAMES = {"triton", "tabulate", "matplotlib", "tqdm", "transformers", "hypothesis", "flash_attn_mini._C"}
    def find_spec(self, name, path=None, target=None):
        if name in self.NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in Missing.NAMES else find_spec(name, *rest)
sys.meta_path.insert(0, Missing())
sys.argv = ["ladder", *sys.argv[1:]]
runpy.run_module("learn", run_name="__main__", alter_sys=True)
"""


def test_the_command_needs_torch_alone_and_a_few_seconds() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    lines = run_the_command(["-c", WITHOUT_OTHER_PACKAGES], {"OMP_NUM_THREADS": "1"})
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before  # does not count waits for a busy machine
    rows = {line.split()[0]: line for line in lines if line.startswith(tuple(BY_NAME))}
    for name in ("naive", "online-softmax"):
        assert rows[name].endswith("passed"), rows[name]
        assert len(rows[name].split()) == len(command.HEADERS)
    for name in ("minimal-triton", "flash-v1", "flash-v2", "triton"):
        assert "triton is not installed" in rows[name]
    assert "flash_attn_mini._C" in rows["cpu"]
    assert taken < 20, f"the command took {taken:.0f} s of a CPU"  # 5 alone; a shared core is up to twice as slow


def test_text_plot_has_longer_bars_for_faster_rungs() -> None:
    rows = [{"rung": name, "tflops": speed, "ms": 1.0} for name, speed in (("a", 0.1), ("b", 10.0), ("c", 100.0))]
    lines = text_plot([*rows, {"rung": "d", "reason": "needs a GPU"}]).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["a", "b", "c"]
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[2]


def test_verify_reports_the_errors() -> None:
    ref = torch.tensor([1.0, -2.0, 4.0, 0.0])
    report = verify(ref + torch.tensor([0.0, 0.002, 0.0, 0.0002]), ref)
    assert report.passed
    assert math.isclose(report.max_abs, 0.002, rel_tol=1e-3)
    assert math.isclose(report.mean_abs, 0.00055, rel_tol=1e-3)
    assert math.isclose(report.max_rel, 0.2, rel_tol=1e-3)  # against the floor of 1e-3, not against 0
    assert report.cosine > 0.999
    assert str(report).startswith("passed: max abs 2.00e-03")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t + 0.05, id="too far"),
        pytest.param(lambda t: -t, id="other direction"),
        pytest.param(lambda t: t.index_fill(0, torch.tensor([3]), math.nan), id="one row NaN"),
        pytest.param(torch.zeros_like, id="all zero"),
    ],
)
def test_verify_rejects(change: object, draw: torch.Generator) -> None:
    ref = torch.randn(16, 32, generator=draw)
    report = verify(change(ref), ref)
    assert not report.passed
    assert str(report).startswith("FAILED")


def test_verify_of_nothing_and_of_zeros_passes() -> None:
    assert verify(torch.empty(0, 8), torch.empty(0, 8)).passed
    assert verify(torch.zeros(3, 8), torch.zeros(3, 8)).passed


def test_verify_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[3, 2\]"):
        verify(torch.zeros(2, 3), torch.zeros(3, 2))
