"""The rungs that run in Python, the command, and verify()'s report. test_minimal_cuda.py tests the CUDA rung."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attn_mini.ladder import online_softmax_attention, verify
from flash_attn_mini.ladder.rungs import KEY_LENGTHS, RUNGS, measure
from flash_attn_mini.reference import attention_reference

from .conftest import SEED_VARIABLE
from .one_thread import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = torch.cuda.is_available()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(int(os.environ[SEED_VARIABLE]) + seed)).to(dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_k", KEY_LENGTHS)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name.replace(" ", "_"))
def test_rung_is_right(rung: object, seqlen_k: int, causal: bool) -> None:
    reason = rung.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    report = measure(rung, seqlen_k, causal)
    assert report.passed, str(report)


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
def test_online_softmax_is_exact(seqlen_q: int, seqlen_k: int, causal: bool, block_m: int, block_n: int) -> None:
    q, k, v = (draw(n, 24, seed=i).double() for i, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
    out, lse = online_softmax_attention(q, k, v, causal=causal, block_m=block_m, block_n=block_n)
    expected, expected_lse = attention_reference(*(t[None, :, None] for t in (q, k, v)), causal=causal)
    torch.testing.assert_close(out, expected[0, :, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse[0, 0], rtol=1e-12, atol=1e-12)


def test_online_softmax_does_not_overflow() -> None:
    q, k, v = 1e4 * draw(20, 16), 1e4 * draw(30, 16, seed=1), draw(30, 16, seed=2)
    out, lse = online_softmax_attention(q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("on", ["1", "true", "on", "yes"])
def test_the_triton_rung_runs_wherever_the_interpreter_does(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    (rung,) = (rung for rung in RUNGS if rung.name == "minimal Triton")
    monkeypatch.setenv("TRITON_INTERPRET", on)
    assert rung.unavailable_reason() is None
    assert rung.device() == "cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert rung.device() == "cuda"
    assert (rung.unavailable_reason() is None) == HAS_GPU


def run_the_command(start: list[str], environment: dict[str, str]) -> list[str]:
    """The printed lines."""
    command = [sys.executable, *start]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    return result.stdout.splitlines()


def passed(lines: list[str], name: str) -> int:
    return sum(line.startswith(name) and line.endswith("passed") for line in lines)


@pytest.mark.slow
def test_table_of_every_rung() -> None:
    """Without a GPU, Triton's interpreter runs a few lengths, because it is slow."""
    pytest.importorskip("triton")
    lengths = KEY_LENGTHS if HAS_GPU else (128, 500)
    start = f"from flash_attn_mini.ladder import __main__ as command; command.KEY_LENGTHS = {lengths}; command.main()"
    lines = run_the_command(["-c", start], {} if HAS_GPU else {"TRITON_INTERPRET": "1"})
    for name in ("naive attention", "online softmax", "minimal Triton"):
        assert passed(lines, name) == 2 * len(lengths), lines
    assert any("minimal CUDA" in line for line in lines)


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
runpy.run_module("flash_attn_mini.ladder", run_name="__main__", alter_sys=True)
"""


def test_the_command_needs_torch_alone() -> None:
    lines = run_the_command(["-c", WITHOUT_OTHER_PACKAGES], {})
    for name in ("naive attention", "online softmax"):
        assert passed(lines, name) == 2 * len(KEY_LENGTHS), lines
    skipped = [line for line in lines if line.startswith("skipped: ")]
    assert len(skipped) == 2
    assert skipped[0].startswith("skipped: minimal Triton (flash_attn_mini/ladder/minimal_triton.py): triton is not")
    assert skipped[1].startswith("skipped: minimal CUDA (csrc/minimal/flash_attn_minimal.cu): ")


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
def test_verify_rejects(change: object) -> None:
    ref = draw(16, 32)
    report = verify(change(ref), ref)
    assert not report.passed
    assert str(report).startswith("FAILED")


def test_verify_of_nothing_and_of_zeros_passes() -> None:
    assert verify(torch.empty(0, 8), torch.empty(0, 8)).passed
    assert verify(torch.zeros(3, 8), torch.zeros(3, 8)).passed


def test_verify_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[3, 2\]"):
        verify(torch.zeros(2, 3), torch.zeros(3, 2))
