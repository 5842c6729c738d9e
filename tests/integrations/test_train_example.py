"""examples/train_char_gpt.py: gradients of a whole model, and a comparison of loss curves that can fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from examples import train_char_gpt as example

from ..support.new_process import run_python
from ..support.one_thread import one_thread  # noqa: F401

TIMES_PYTORCH = 3.0
SMALL = replace(example.SIZES["cpu"], layers=1, width=64, heads=2, context=64, batch=3)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(example.SIZES, "cpu", SMALL)


def gradients(attend: example.Attention, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Gradients of the loss for every parameter of a small model, in float64 on the CPU."""
    torch.manual_seed(3)
    model = example.GPT(40, SMALL, attend)
    nn.init.normal_(model.embedding.weight, std=0.5)  # so that logits and gradients are not tiny
    model.to(device, dtype)
    sequences = torch.randint(40, (SMALL.batch, SMALL.context + 1)).to(device)
    example.loss_of(model, sequences).backward()
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_a_model_are_as_exact_as_with_sdpa(backend: str, device: str) -> None:
    exact = gradients(example.attend_with_sdpa, "cpu", torch.float64)
    sdpa = gradients(example.attend_with_sdpa, device)
    ours = gradients(example.attend_with_flash_attn_mini(backend), device)
    assert ours.keys() == sdpa.keys() == exact.keys()
    assert len(exact) == 2 + 2 + 12 * SMALL.layers - 1, "every parameter, the embedding's once"
    for name, truth in exact.items():
        error, allowed = ((x[name] - truth).norm().item() for x in (ours, sdpa))
        assert math.isfinite(allowed)
        assert error <= TIMES_PYTORCH * allowed, f"{name}: ours is {error:.2e} off, SDPA {allowed:.2e}"


@pytest.mark.usefixtures("_small")
def test_a_short_run_agrees_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert example.main(["--device", "cpu", "--steps", "15", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "agree within noise" in printed
    assert str(out) in printed
    result = json.loads((out / "losses.json").read_text())
    losses = {name: run["losses"] for name, run in result["runs"].items()}
    assert result["agrees"]
    assert [len(curve) for curve in losses.values()] == [15, 15, 15]
    assert losses[example.OURS] == pytest.approx(losses[example.SDPA], abs=1e-4)
    assert losses[example.OURS][-1] < losses[example.OURS][0] - 0.5, "the loss did not fall"
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_small")
def test_a_gradient_that_is_two_percent_off_does_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return example.attend_with_sdpa(q, k + 0.02 * (k - k.detach()), v)

    monkeypatch.setattr(example, "attend_with_flash_attn_mini", lambda backend: attend)
    assert example.main(["--device", "cpu", "--steps", "25", "--out", str(tmp_path)]) == 1
    assert not json.loads((tmp_path / "losses.json").read_text())["agrees"]


MISSING = """
import runpy, sys
sys.modules[{missing!r}] = None  # import raises ImportError
runpy.run_module("examples.{example}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("example", "missing"),
    [("train_char_gpt", "tqdm"), ("semantic_search", "transformers"), ("generate_char_gpt", "tabulate")],
)
def test_a_missing_package_is_named_with_the_command_to_run(example: str, missing: str) -> None:
    result = run_python("-c", MISSING.format(example=example, missing=missing))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert missing in result.stderr
    assert 'pip install ".[examples]"' in result.stderr


def test_a_difference_may_be_a_multiple_of_the_noise_so_far() -> None:
    sdpa, noise = [4.0, 3.0, 2.0], [4.0, 3.0, 2.01]
    assert example.compare([4.0, 3.0, 2.05], sdpa, noise).passed
    assert not example.compare([4.0, 3.0, 2.2], sdpa, noise).passed
    early = example.compare([4.0, 3.05, 2.0], sdpa, noise)
    assert not early.passed, "later noise does not excuse an earlier difference"
    assert early.worst == 1
    assert example.compare([4.0, 3.05, 2.0], sdpa, noise, [4.0, 3.01, 2.0]).passed, "the largest noise counts"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_never_agrees(bad: float) -> None:
    fine, broken = [4.0, 3.0], [4.0, bad]
    assert not example.compare(broken, fine, fine).passed
    assert not example.compare(fine, broken, fine).passed
    assert not example.compare(fine, fine, broken).passed
    assert not example.compare(broken, broken, broken).passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "--backend cuda: allowed on cpu: cpu"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--text", "no such file"], "--text no such file: "),
        (["--text", "{tmp}/short"], "has 100 characters; at least"),
        (["--text", "{tmp}/binary"], "--text {tmp}/binary: "),
        (["--out", "{tmp}/taken"], "{tmp}/taken/losses.json exists"),
        (["--out", "{tmp}/short"], "--out {tmp}/short: not a folder"),
        (["--context-parallel"], "--context-parallel: start it with torchrun"),
    ],
)
@pytest.mark.usefixtures("_small")
def test_a_wrong_option_ends_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("x" * 100)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 9000)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "losses.json").write_text("mine")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit) as end:
        example.main(["--device", "cpu", *arguments])
    assert end.value.code == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert (tmp_path / "taken" / "losses.json").read_text() == "mine"
