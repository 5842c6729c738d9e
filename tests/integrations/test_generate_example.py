"""examples/generate_char_gpt.py: the same text with a KV cache and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from examples import generate_char_gpt as example
from examples import train_char_gpt

from ..support.one_thread import one_thread  # noqa: F401

SMALL = replace(train_char_gpt.SIZES["cpu"], layers=2, width=64, heads=2, context=64, batch=3)


def random_model(draw: torch.Generator) -> train_char_gpt.GPT:
    model = train_char_gpt.GPT(40, SMALL, train_char_gpt.attend_with_flash_attn_mini("cpu"))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3, generator=draw)  # so that attention is far from uniform
    return model.double().eval()


def written(model: train_char_gpt.GPT, prompt: Tensor, length: int) -> tuple[Tensor, ...]:
    """The texts with the cache and without."""
    return tuple(example.generate(model, prompt, length, SMALL, "cpu", with_cache=choice) for choice in (True, False))


@pytest.mark.parametrize("prompt_length", [1, 10])
def test_text_with_the_cache_equals_text_without(prompt_length: int, draw: torch.Generator) -> None:
    """In float64, where rounding does not decide between two characters."""
    for _ in range(10):
        prompt = torch.randint(40, (3, prompt_length), generator=draw)
        cached, plain = written(random_model(draw), prompt, SMALL.context - prompt_length)
        assert cached.shape == (3, SMALL.context)
        assert torch.equal(cached[:, :prompt_length], prompt)
        assert torch.equal(cached, plain)
        if len(cached.unique()) > 5:
            return
    pytest.fail("each text is one character over and over")


def test_text_without_rotation_of_the_cache_differs(monkeypatch: pytest.MonkeyPatch, draw: torch.Generator) -> None:
    """The comparison above can fail."""
    attend = example.flash_attn_with_kvcache

    def unrotated(*tensors: Tensor, rotary_cos: Tensor, rotary_sin: Tensor, **options: Any) -> Tensor:
        return attend(*tensors, **options)

    monkeypatch.setattr(example, "flash_attn_with_kvcache", unrotated)
    cached, plain = written(random_model(draw), torch.randint(40, (3, 10), generator=draw), 50)
    assert not torch.equal(cached, plain)


def test_example_runs_and_reports_characters_per_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(train_char_gpt.SIZES, "cpu", SMALL)
    assert example.main(["--device", "cpu", "--steps", "5", "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    assert "characters per second" in printed
    assert f"of {SMALL.context - example.PROMPT} new characters are equal; backend cpu, batch 2" in printed


def test_wrong_batch_ends_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        example.main(["--device", "cpu", "--batch", "0"])
    assert end.value.code == 2
    assert "--batch 0: at least 1" in capsys.readouterr().err
