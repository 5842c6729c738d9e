"""flash_attn_mini in transformers' models: as accurate as PyTorch's SDPA; unsupported masks and features raise.

test_transformers_batches.py tests padded and packed batches, windows, and generation; test_transformers_bias.py tests
position biases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_attn_mini.integrations import transformers as integration  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import DECODER, LENGTH, SMALL, tokens  # noqa: E402

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


def heads(draw: torch.Generator, seqlen_q: int = 5, seqlen_k: int = 5, dtype: torch.dtype = torch.float64) -> Any:
    """q, k and v of 2 rows, 4 query heads and 2 key heads."""
    shapes = ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    return tuple(torch.randn(2, *shape, 8, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    added = mask if mask.dtype == torch.bool else mask.double()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True)
    return out.transpose(1, 2)


HIDDEN = pytest.mark.parametrize("hidden", ["-inf", "lowest"])
FLOATS = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda x: str(x).removeprefix("torch.")
)


def number_that_hides(hidden: str, dtype: torch.dtype) -> float:
    return -torch.inf if hidden == "-inf" else torch.finfo(dtype).min


@HIDDEN
@FLOATS
@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_that_add_zero_or_hide_give_the_result_of_sdpa(
    is_causal: bool, dtype: torch.dtype, hidden: str, draw: torch.Generator
) -> None:
    q, k, v = heads(draw, 3, 5)
    module = torch.nn.Module()
    lowest = number_that_hides(hidden, dtype)
    causal = torch.zeros(1, 1, 3, 5, dtype=dtype).masked_fill(~torch.ones(3, 5, dtype=torch.bool).tril(2), lowest)
    for mask in (causal, torch.zeros(2, 1, 1, 5, dtype=dtype)):
        out, _ = integration.attention(module, q, k, v, mask, is_causal=is_causal)
        torch.testing.assert_close(out, sdpa(q, k, v, mask))
    kept = torch.tensor([[True, True, True, False, False], [False, True, False, True, True]])
    padding = torch.zeros(2, 5, dtype=dtype).masked_fill(~kept, lowest)
    for mask in (padding, kept, kept.int(), kept.long(), kept.byte()):
        out, _ = integration.attention(module, q, k, v, mask, is_causal=False)
        torch.testing.assert_close(out, sdpa(q, k, v, kept[:, None, None]))
        layout = integration.attention_mask(2, 5, 5, attention_mask=mask)
        assert layout.indices_k.tolist() == kept.flatten().nonzero().flatten().tolist()


@FLOATS
def test_soft_masks(dtype: torch.dtype, draw: torch.Generator) -> None:
    """Added to the scores, also where a causal or padding mask would hide. A soft padding mask is refused."""
    q, k, v = heads(draw)
    above = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = -(10 ** (6 * torch.rand((), generator=draw) - 2))  # -0.01 to -10,000
    causal = torch.zeros(5, 5, dtype=dtype).masked_fill(above, float(bias))
    hidden = torch.zeros(5, 5, dtype=dtype).masked_fill(above, -torch.inf)
    hidden[4, 1] = float(bias)
    below = torch.zeros(5, 5, dtype=dtype).masked_fill(above, -torch.inf).masked_fill(~above, 1.0)
    for mask in (causal[None, None], hidden.expand(2, 1, 5, 5), below[None, None], causal[None, None, 4:]):
        for is_causal in (True, False):
            out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=is_causal)
            torch.testing.assert_close(out, sdpa(q, k, v, mask))
    for mask in (causal[:2], hidden[3:], below[:2]):
        for is_causal in (True, False):
            with pytest.raises(NotImplementedError, match=r"attention_mask holds .*; allowed: 0, -inf and -.* added"):
                integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=is_causal)
    for padding in (causal[:2], torch.full((2, 5), torch.nan, dtype=dtype), torch.ones(2, 5, dtype=dtype)):
        with pytest.raises(NotImplementedError, match=r"attention_mask holds (-.*|nan|1\.0); allowed: 0, -inf"):
            integration.attention_mask(2, 5, 5, attention_mask=padding)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_integer_masks_other_than_a_padding_mask_of_0_and_1_are_refused(
    dtype: torch.dtype, draw: torch.Generator
) -> None:
    q, k, v = heads(draw)
    lengths = torch.tensor([[2, 3, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=dtype)
    for call in (
        lambda mask: integration.attention(torch.nn.Module(), q, k, v, mask),
        lambda mask: integration.attention_mask(2, 5, 5, attention_mask=mask),
    ):
        with pytest.raises(ValueError, match=r"attention_mask holds 2; allowed: 0 and 1 in a torch.* 1 for the tokens"):
            call(lengths)
    for mask in (torch.ones(5, 5, dtype=dtype).tril()[None, None], torch.zeros(2, 1, 5, 5, dtype=dtype)):
        with pytest.raises(ValueError, match=r"attention_mask is torch.*int.* of shape .*; allowed: bool or"):
            integration.attention(torch.nn.Module(), q, k, v, mask)


def test_masks_of_other_shapes_are_refused(draw: torch.Generator) -> None:
    q, k, v = heads(draw)
    square = torch.ones(5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask has shape \[5, 5\]; allowed: \[2, n\]"):
        integration.attention(torch.nn.Module(), q, k, v, square)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[5, 5\]; allowed: \[2, n\]"):
        integration.attention_mask(2, 5, 5, attention_mask=square)
    for shape in ((5,), (2, 5, 5), (3, 1, 5, 5), (2, 1, 5, 7), (2, 3, 5, 5)):
        with pytest.raises(NotImplementedError, match="this attention mask, of shape"):
            integration.attention(torch.nn.Module(), q, k, v, torch.ones(shape, dtype=torch.bool))


@HIDDEN
def test_queries_without_a_key(hidden: str, draw: torch.Generator) -> None:
    """Hidden by -inf, their output is 0. Hidden by finite numbers, it is the average of the values."""
    q, k, v = heads(draw, 5, 3)
    above = ~torch.ones(5, 3, dtype=torch.bool).tril(-2)
    mask = torch.zeros(5, 3).masked_fill(above, number_that_hides(hidden, torch.float32))[None, None]
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask)
    if hidden == "lowest":
        assert out[:, :2].any()
        torch.testing.assert_close(out, sdpa(q, k, v, mask))
        return
    assert not out[:, :2].any()
    torch.testing.assert_close(out, sdpa(q, k, v, ~above))


def test_a_mask_of_any_pattern_matches_sdpa() -> None:
    mask = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert_as_accurate_as_sdpa(
        lambda name: causal_lm("Llama", name), lambda model: model(tokens(), attention_mask=added).logits
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"position_bias": torch.zeros(1, 3, 5, 5)},
            r"a position bias of shape \(1, 3, 5, 5\); allowed: \(1, 4, 5, 5\)",
        ),
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


def test_models_with_attention_in_code_of_their_own_are_refused() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "n_head": 4, "n_layer": 1}
    config = transformers.BloomConfig(**sizes)
    bloom = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=integration.ATTENTION_NAME)
    for mask in (None, torch.ones(3, LENGTH), torch.ones(3, LENGTH).tril(3)):
        with pytest.raises(NotImplementedError, match="code of its own and takes no attention implementation"):
            bloom(tokens(), attention_mask=mask)
    config = transformers.FalconConfig(vocab_size=99, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with pytest.raises(KeyError, match=integration.ATTENTION_NAME):  # from transformers
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=integration.ATTENTION_NAME)
    mask = integration.attention_mask(2, 5, 5)
    q = torch.randn(2, 2, 5, 8)
    for use in (
        lambda: q + mask,
        lambda: mask[:, :, :, :5],
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask),
    ):
        with pytest.raises(NotImplementedError, match=r"takes no attention implementation; allowed: .*'eager'"):
            use()


def test_name_that_transformers_reserves_is_refused() -> None:
    with pytest.raises(ValueError, match="must not contain 'flash'"):
        integration.register("flash_attn_mini")
