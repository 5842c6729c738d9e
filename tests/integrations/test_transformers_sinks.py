"""Models with attention sinks (gpt-oss) in transformers: forward, training and generation give eager's results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from flash_attn_mini.integrations import transformers as integration  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import tokens  # noqa: E402
from ..support.versions import TORCH  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """gpt-oss on this package and on eager attention, with the same parameters and sinks that count."""
    integration.register()
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES)
    ours = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=integration.ATTENTION_NAME)
    for name, parameter in ours.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    return ours.eval(), eager.eval()


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_forward_and_gradients(is_padded: bool) -> None:
    ids = tokens(3, 13)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, :4] = mask[2, :7] = 0
    results = []
    for model in models():
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        results.append((logits, {name: x.grad for name, x in model.named_parameters()}))
    (logits, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    sinks = [name for name in gradients if name.endswith("sinks")]
    assert len(sinks) == SIZES["num_hidden_layers"]
    assert all(gradients[name].abs().min() > 0 for name in sinks)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    attend = integration.flash_attn_with_kvcache

    def spy(*tensors: Any, **options: Any) -> Any:
        steps.append(options["learnable_sink"])
        return attend(*tensors, **options)

    monkeypatch.setattr(integration, "flash_attn_with_kvcache", spy)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    found, expected = (model.generate(ids, attention_mask=mask, **options, disable_compile=True) for model in models())
    assert torch.equal(found, expected)
    assert steps
    assert all(sinks is not None for sinks in steps)


@pytest.mark.skipif(TORCH < (2, 13), reason="PyTorch 2.6 cannot trace transformers 5, others are untested")
def test_compiled_training_of_packed_rows() -> None:
    """The program cannot know the sequences: the sinks join after its op for packed rows."""
    ids = tokens(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    ours, eager = models()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for run, model in ((compiled, ours), (eager, eager)):
        logits = run(ids, position_ids=positions, use_cache=False).logits
        logits.square().sum().backward()
        results.append((logits.detach(), {name: x.grad for name, x in model.named_parameters() if "attn" in name}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    for name, gradient in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], gradient, rtol=1e-3, atol=1e-4)
