"""flash_attn_mini in transformers' models: as accurate as PyTorch's SDPA; unsupported masks and features raise.

test_transformers_batches.py tests padded and packed batches, windows, and generation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_attn_mini.integrations import transformers as integration  # noqa: E402

from .one_thread import one_thread  # noqa: E402, F401
from .tiny_transformers import DECODER, LENGTH, SMALL, tokens  # noqa: E402

Model = torch.nn.Module
needs_replaceable_bert = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="BERT's attention cannot be replaced before transformers 5"
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    assert integration.register() == integration.ATTENTION_NAME


def bert(attention: str = integration.ATTENTION_NAME, **options: Any) -> Model:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, **options)
    return transformers.AutoModel.from_config(config, attn_implementation=attention).eval()


def causal_lm(kind: str, attention: str = integration.ATTENTION_NAME, **options: Any) -> Model:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**DECODER, **options)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def assert_as_accurate_as_sdpa(make: Callable[[str], Model], run: Callable[[Model], torch.Tensor]) -> None:
    ours, sdpa = make(integration.ATTENTION_NAME), make("sdpa")
    exact = run(copy.deepcopy(make("eager")).double())
    error, allowed = ((run(model).double() - exact).abs().max().item() for model in (ours, sdpa))
    assert error <= 2 * allowed + 1e-5, f"ours is {error:.2e} off, SDPA {allowed:.2e}"


@needs_replaceable_bert
def test_encoder_matches_sdpa() -> None:
    assert_as_accurate_as_sdpa(bert, lambda model: model(tokens()).last_hidden_state)


@needs_replaceable_bert
def test_encoder_takes_a_mask_without_padding() -> None:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    assert_as_accurate_as_sdpa(bert, lambda model: model(tokens(), attention_mask=mask).last_hidden_state)


def test_grouped_query_decoder_matches_sdpa() -> None:
    assert_as_accurate_as_sdpa(lambda name: causal_lm("Llama", name), lambda model: model(tokens()).logits)


def test_prompt_in_two_pieces_matches_sdpa() -> None:
    def run(model: Model) -> torch.Tensor:
        first = model(tokens()[:, :8], use_cache=True)
        return model(tokens()[:, 8:], past_key_values=first.past_key_values, use_cache=True).logits

    assert_as_accurate_as_sdpa(lambda name: causal_lm("Llama", name), run)


def test_generation_gives_the_tokens_of_sdpa() -> None:
    generate = {"max_new_tokens": 6, "do_sample": False}
    ours, theirs = (causal_lm("Llama", name).generate(tokens(), **generate) for name in ("attn_mini", "sdpa"))
    assert torch.equal(ours, theirs)


def test_window_that_hides_no_key_matches_sdpa() -> None:
    def make(name: str) -> Model:
        return causal_lm("Mistral", name, sliding_window=13)

    assert_as_accurate_as_sdpa(make, lambda model: model(tokens()).logits)


def test_heads_reach_the_kernel_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update(options, pointers=[t.data_ptr() for t in (q, k, v)], shapes=[tuple(t.shape) for t in (q, k, v)])
        return torch.empty(q.shape)

    monkeypatch.setattr(integration, "flash_attn_func", spy)
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    module = torch.nn.Module()
    out, weights = integration.attention(module, q, k, v, None, scaling=0.5, is_causal=False)
    assert out.shape == (2, 5, 4, 8)
    assert weights is None
    assert seen["shapes"] == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
    assert seen["pointers"] == [t.data_ptr() for t in (q, k, v)]
    assert (seen["softmax_scale"], seen["causal"]) == (0.5, False)

    integration.attention(module, q, k, v, None)
    assert seen["causal"] is True  # transformers' default for a module without is_causal
    integration.attention(module, q, k, v, torch.ones(2, 1, 5, 5, dtype=torch.bool))
    assert seen["causal"] is False
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    integration.attention(module, q, k, v, lower.expand(2, 1, 5, 5), is_causal=False)
    assert seen["causal"] is True
    added = torch.zeros(2, 1, 5, 5).masked_fill(~lower, torch.finfo(torch.float32).min)
    integration.attention(module, q, k, v, added, is_causal=False)
    assert seen["causal"] is True


def test_custom_mask_is_refused() -> None:
    mask = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.5
    with pytest.raises(NotImplementedError, match="attention mask"):
        causal_lm("Llama")(tokens(), attention_mask=mask)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "position bias"),
        ({"head_mask": torch.ones(4)}, "head mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "without cu_seq_lens_k"),
        ({"output_attentions": True}, "output_attentions"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_feature_is_refused(argument: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(NotImplementedError, match=message):
        integration.attention(torch.nn.Module(), q, q, q, None, **argument)


@pytest.mark.parametrize("kind", ["GPT2", "OPT", "Llama", "Bert"])
@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 5 records outputs by hooks")
def test_output_attentions_is_refused_by_every_model(kind: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 99, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, **({"ffn_dim": 96} if kind == "OPT" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=integration.ATTENTION_NAME)
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model(tokens(1), output_attentions=True)
    assert model(tokens(1), output_hidden_states=True).logits.isfinite().all()


def test_name_that_transformers_reserves_is_refused() -> None:
    with pytest.raises(ValueError, match="must not contain 'flash'"):
        integration.register("flash_attn_mini")
