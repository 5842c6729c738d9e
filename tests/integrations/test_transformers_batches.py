"""Padded and packed batches in transformers' models, compared with transformers' eager attention in float64.

Small randomly initialised models: Llama (grouped heads), Gemma 2 (softcap, a sliding window in every other layer,
grouped heads), Mistral (a window in every layer), Llama 4 (chunks in every other layer), BERT (padding only),
ModernBERT (windows to both sides), BART (cross-attention). test_transformers_ranges.py has masks of other patterns.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils  # noqa: E402

from flash_attn_mini.integrations import transformers as integration  # noqa: E402
from flash_attn_mini.integrations import transformers_masks  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import DECODER, LENGTH, SMALL, tokens  # noqa: E402

Model = torch.nn.Module
LENGTHS = [13, 8, 1]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "AutoModelForCausalLM", DECODER),
    "gemma2": (
        "Gemma2Config",
        "AutoModelForCausalLM",
        {**DECODER, "head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 4, "query_pre_attn_scalar": 4},
    ),
    "mistral": ("MistralConfig", "AutoModelForCausalLM", {**DECODER, "sliding_window": 4}),
    "llama4": (
        "Llama4TextConfig",
        "AutoModelForCausalLM",
        {
            **DECODER,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "moe_layers": [],
            "attention_chunk_size": 4,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "bert": ("BertConfig", "AutoModel", SMALL),
    "deepseek_v3": (
        "DeepseekV3Config",
        "AutoModelForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,  # no layer has experts
        },
    ),
    "modernbert": (
        "ModernBertConfig",
        "AutoModel",
        {**SMALL, "local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
}
DECODERS = ("llama", "gemma2", "mistral", "llama4", "deepseek_v3")

each_side = pytest.mark.parametrize("side", ["left", "right"])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


@pytest.fixture(autouse=True)
def _eager_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention masks with the dtype's smallest number. In float64 this is -inf after its cast to float32."""
    masks = masking_utils.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(
        masks, "eager", lambda *args, **kwargs: masking_utils.eager_mask(*args, **kwargs | {"dtype": torch.float32})
    )


def make(name: str, attention: str = integration.ATTENTION_NAME, **options: Any) -> Model:
    """The same weights for every `attention`."""
    torch.manual_seed(0)
    config, auto, settings = MODELS[name]
    config = getattr(transformers, config)(**(settings | options))
    model = getattr(transformers, auto).from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)  # so that attention is far from uniform
    return model


def padding(side: str, lengths: list[int] = LENGTHS, length: int = LENGTH) -> Tensor:
    position = torch.arange(length)
    kept = torch.tensor(lengths)[:, None]
    return ((position < kept) if side == "right" else (position >= length - kept)).long()


def result(model: Model, *arguments: Any, **options: Any) -> Tensor:
    output = model(*arguments, **options)
    return output.logits if "logits" in output else output.last_hidden_state


def assert_like_eager(
    name: str, kept: Tensor | None, /, *arguments: Any, config: dict[str, Any] | None = None, **options: Any
) -> None:
    """Where `kept` is true: the error from eager float64 is at most twice that of eager float32."""
    config = config or {}
    with torch.no_grad():
        exact = result(copy.deepcopy(make(name, "eager", **config)).double(), *arguments, **options)
        theirs = result(make(name, "eager", **config), *arguments, **options)
        ours = result(make(name, **config), *arguments, **options)
    kept = torch.ones(exact.shape[:2], dtype=torch.bool) if kept is None else kept.bool()
    error, allowed = ((logits.double() - exact)[kept].abs().max().item() for logits in (ours, theirs))
    assert error <= 2 * allowed + 1e-5, f"ours is {error:.2e} off, eager {allowed:.2e}"


@each_side
@pytest.mark.parametrize("name", MODELS)
def test_padded_batch(name: str, side: str) -> None:
    mask = padding(side)
    assert_like_eager(name, mask, tokens(), attention_mask=mask)


def test_padding_rows_of_an_encoder_match_eager() -> None:
    """The mask describes only the keys, so every query is computed."""
    assert_like_eager("bert", None, tokens(), attention_mask=padding("right"))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_holes_in_a_mask(name: str) -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1]] * 2 + [[0, 1] * 6 + [1]])
    assert_like_eager(name, mask, tokens(), attention_mask=mask)


@pytest.mark.parametrize("name", ["mistral", "modernbert", "llama4"])
def test_holes_in_a_mask_under_a_window(name: str) -> None:
    """Each query sees at most two runs of keys, also where the mask of the row has three."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1], [1] * 6 + [0] + [1] * 6])
    assert_like_eager(name, mask, tokens(2), attention_mask=mask)


def test_more_than_two_runs_of_keys_under_a_window() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert_like_eager("modernbert", mask, tokens(1), attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_row_of_padding_only(name: str) -> None:
    mask = padding("right", [13, 0, 4])
    output = result(make(name), tokens(), attention_mask=mask)
    assert output.isfinite().all()
    alone = result(make(name), tokens()[:1])
    torch.testing.assert_close(output[:1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_window_and_softcap_without_padding(name: str) -> None:
    assert_like_eager(name, None, tokens())


@pytest.mark.parametrize("name", ["modernbert"])
def test_window_to_both_sides_without_padding(name: str) -> None:
    assert_like_eager(name, None, tokens())


@each_side
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_padded_batch(name: str, side: str) -> None:
    mask = padding(side)
    weights = torch.randn(len(LENGTHS), LENGTH, 1, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    gradients = []
    for attention, dtype in ((integration.ATTENTION_NAME, None), ("eager", None), ("eager", torch.float64)):
        model = make(name, attention).to(dtype)
        (result(model, tokens(), attention_mask=mask).square().mean(-1, keepdim=True) * weights).sum().backward()
        gradients.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
    ours, theirs, exact = gradients
    assert ours.keys() == exact.keys()
    assert len(ours) > 10
    for parameter, expected in exact.items():
        scale = expected.abs().max().item()
        error, allowed = ((g[parameter] - expected).abs().max().item() for g in (ours, theirs))
        assert error <= 3 * allowed + 1e-5 * max(scale, 1), f"{parameter}: {error:.2e} off, eager {allowed:.2e}"


@pytest.mark.parametrize("name", DECODERS)
def test_generation_from_a_batch_padded_on_the_left(name: str) -> None:
    options = {"attention_mask": padding("left"), "max_new_tokens": 7, "do_sample": False}
    ours, theirs = (make(name, attention).generate(tokens(), **options) for attention in ("attn_mini", "eager"))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_with_a_static_cache(name: str) -> None:
    """generate() makes the masks and passes them to the model."""
    options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": "static"}
    outputs = []
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make(name, attention)
        outputs.append(model.generate(tokens(), attention_mask=padding("left"), **options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("headdim_v", [16, 32])
def test_values_of_another_head_dim(headdim_v: int) -> None:
    """With 16, as in DeepSeek's models."""
    q, k, v = torch.randn(2, 4, 5, 24), torch.randn(2, 4, 5, 24), torch.randn(2, 4, 5, headdim_v)
    mask = integration.attention_mask(2, 5, 5, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]).bool())
    for layout in (None, mask):
        out, _ = integration.attention(torch.nn.Module(), q, k, v, layout)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        torch.testing.assert_close(out[1], expected[1], rtol=1e-4, atol=1e-5)
        assert out.shape == (2, 5, 4, headdim_v)


@pytest.mark.parametrize("name", DECODERS)
def test_generation_from_a_batch_padded_on_the_right(name: str) -> None:
    """transformers continues a padded row from its last token, which is padding; rows without padding are right."""
    options = {"attention_mask": padding("right", [13, 13, 8]), "max_new_tokens": 5, "do_sample": False}
    ours, theirs = (make(name, attention).generate(tokens(), **options) for attention in ("attn_mini", "eager"))
    assert torch.equal(ours[:2], theirs[:2])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tokens_after_padding_on_the_right(name: str) -> None:
    """During generation, the cache of a row has padding between the prompt and the new tokens."""
    lengths, new = [13, 5, 1], tokens(3, 3)
    mask, positions = padding("right", lengths), torch.tensor(lengths)[:, None]
    logits = {}
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make(name, attention, **({"sliding_window": 8} if name == "mistral" else {}))
        output = model(tokens(), attention_mask=mask, use_cache=True)
        steps = [output.logits[torch.arange(3), positions[:, 0] - 1]]
        for step in range(3):
            output = model(
                new[:, step : step + 1],
                attention_mask=torch.cat([mask, torch.ones(3, step + 1, dtype=torch.long)], dim=1),
                position_ids=positions + step,
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            steps.append(output.logits[:, 0])
        logits[attention] = torch.stack(steps)
    torch.testing.assert_close(logits[integration.ATTENTION_NAME], logits["eager"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_prompt_in_pieces_with_padding_on_the_left(name: str) -> None:
    mask = padding("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = {}
    for attention in (integration.ATTENTION_NAME, "eager"):
        model, cache, pieces = make(name, attention), None, []
        for begin, end in ((0, 6), (6, 12), (12, 13)):
            output = model(
                tokens()[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            pieces.append(output.logits)
        logits[attention] = torch.cat(pieces, dim=1)[mask.bool()]
    torch.testing.assert_close(logits[integration.ATTENTION_NAME], logits["eager"], rtol=1e-3, atol=1e-4)


@each_side
def test_static_cache(side: str) -> None:
    mask = padding(side)
    logits = {}
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make("llama", attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        options = {"past_key_values": cache, "use_cache": True}
        first = model(tokens()[:, :8], attention_mask=mask[:, :8], **options).logits
        rest = model(tokens()[:, 8:], attention_mask=mask, **options).logits
        logits[attention] = torch.cat([first, rest], dim=1)[mask.bool()]
    torch.testing.assert_close(logits[integration.ATTENTION_NAME], logits["eager"], rtol=1e-3, atol=1e-4)


def test_attention_to_another_sequence_of_the_same_length() -> None:
    """The encoder is padded. The decoder's queries are other tokens, and all of them are computed."""
    small = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=99, d_model=32, max_position_embeddings=32, **small, **heads)
    outputs = []
    for attention in (integration.ATTENTION_NAME, "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval()
        output = model(tokens(), attention_mask=padding("right"), decoder_input_ids=tokens())
        outputs.append(output.last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


POSITIONS = torch.tensor(
    [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2], list(range(13)), [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2]]
)


@pytest.mark.parametrize("name", DECODERS)
def test_sequences_packed_into_rows_by_their_positions(name: str) -> None:
    assert_like_eager(name, None, tokens(), position_ids=POSITIONS, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("with_positions", [False, True])
def test_sequences_packed_by_a_collator(name: str, with_positions: bool) -> None:
    """DataCollatorWithFlattening gives these lengths, with or without position_ids."""
    cu_seqlens = torch.tensor([0, 5, 9, 13], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 5, "max_length_k": 5}
    positions = torch.cat([torch.arange(n) for n in (5, 4, 4)])[None]
    model = make(name)
    options = {"position_ids": positions} if with_positions else {}
    packed = model(tokens(1), **options, **lengths, use_cache=False).logits
    apart = [model(part, use_cache=False).logits for part in tokens(1).split([5, 4, 4], dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-4, atol=1e-4)  # rotation is relative


def test_collators_lengths_with_padding_are_refused() -> None:
    cu_seqlens = torch.tensor([0, 13, 26, 39], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="together with padding"):
        make("llama")(tokens(), attention_mask=padding("left"), cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)


def test_padding_mask_is_read_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = transformers_masks._tokens
    monkeypatch.setattr(transformers_masks, "_tokens", lambda kept: calls.append(kept.shape) or original(kept))
    make("llama", num_hidden_layers=4)(tokens(), attention_mask=padding("left"))
    assert len(calls) == 2  # queries and keys, for 4 layers


def test_padding_between_the_keys_copies_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query for each sequence, different numbers of keys with padding between them."""
    seen: dict[str, Any] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
        seen.update(q=q, k=k, lengths=lengths, options=options)
        return torch.empty(q.shape)

    monkeypatch.setattr(integration, "flash_attn_varlen_func", spy)
    kept = padding("left")
    kept[1, :2] = 1
    mask = integration.attention_mask(3, 1, LENGTH, LENGTH - 1, attention_mask=kept.bool())
    q, k = torch.randn(3, 4, 1, 8), torch.randn(3, 2, LENGTH, 8)
    out, _ = integration.attention(torch.nn.Module(), q, k, k, mask, softcap=30.0, sliding_window=LENGTH)
    assert out.shape == (3, 1, 4, 8)
    assert seen["q"].data_ptr() == q.data_ptr()
    assert seen["k"].shape == (sum(LENGTHS) + 2, 2, 8)
    assert torch.equal(seen["k"][13:23], k[1][:, kept[1].bool()].transpose(0, 1))
    cu_seqlens_q, cu_seqlens_k, *longest = seen["lengths"]
    assert cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert cu_seqlens_k.tolist() == [0, 13, 23, 24]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert longest == [1, 13]
    assert seen["options"]["causal"] is True
    assert seen["options"]["softcap"] == 30.0


def test_a_layers_window_is_kept_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        integration, "flash_attn_func", lambda q, k, v, **options: seen.update(options) or torch.empty(q.shape)
    )
    q = torch.randn(1, 2, 9, 8)
    integration.attention(torch.nn.Module(), q, q, q, None, sliding_window=4)
    assert (seen["causal"], seen["window_size"]) == (True, (3, 0))
    integration.attention(torch.nn.Module(), q, q, q, None, sliding_window=4, is_causal=False)
    assert (seen["causal"], seen["window_size"]) == (False, (3, 3))
    integration.attention(torch.nn.Module(), q, q, q, None, sliding_window=9)
    assert seen["window_size"] == (-1, 0)
    integration.attention(torch.nn.Module(), q, q, q, integration.attention_mask(1, 9, 9), sliding_window=4)
    assert seen["window_size"] == (-1, 0)  # the mask overrides the layer


def test_padding_mask_that_a_model_passes_on_as_it_is() -> None:
    q, k, v = torch.randn(3, 3, 2, LENGTH, 8)
    for side, window in (("left", None), ("right", 4)):
        mask = padding(side)
        out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, sliding_window=window)
        for row, kept in enumerate(mask.bool()):
            part = tuple(x[row : row + 1, :, kept] for x in (q, k, v))
            alone, _ = integration.attention(torch.nn.Module(), *part, None, sliding_window=window)
            torch.testing.assert_close(out[row, kept], alone[0])
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, sliding_window=3)
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band & mask[:, None, None].bool())
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    mask[1, 3:9:2] = 0
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, sliding_window=7)  # three runs for some queries
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-6)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band & mask[:, None, None].bool())
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_mask_that_moves_to_another_device() -> None:
    mask = integration.attention_mask(3, LENGTH, LENGTH, attention_mask=padding("left").bool())
    moved = mask.to("meta")
    assert moved.lengths[0].device.type == moved.indices_k.device.type == "meta"
    assert (moved.q_length, moved.right) == (LENGTH, 0)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_dropout_in_training(name: str) -> None:
    """The same seed gives the same loss and gradients, another seed others. In eval mode there is no dropout."""
    option = (
        {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
        if name == "bert"
        else {"attention_dropout": 0.5}
    )
    model, mask = make(name, **option), padding("right")
    plain = result(model, tokens(), attention_mask=mask)
    torch.testing.assert_close(result(make(name), tokens(), attention_mask=mask), plain)
    model.train()
    losses, gradients = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = result(model, tokens(), attention_mask=mask).relu().mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert losses[0] == losses[1] != losses[2]
    for first, second in zip(gradients[0], gradients[1], strict=True):
        torch.testing.assert_close(first, second)


def test_mask_functions_of_other_patterns_are_unknown() -> None:
    from transformers import masking_utils as masks

    known = transformers_masks.seen_of
    assert known(masks.causal_mask_function) == transformers_masks.Seen(right=0)
    assert known(masks.sliding_window_causal_mask_function(5)) == transformers_masks.Seen(left=4, right=0)
    assert known(masks.sliding_window_bidirectional_mask_function(5)) == transformers_masks.Seen(left=5, right=5)
    chunks_begin = torch.zeros(1, dtype=torch.int)
    chunked = masks.chunked_causal_mask_function(4, chunks_begin)
    assert known(chunked) == transformers_masks.Seen(right=0, chunk=4, chunks_begin=chunks_begin)
    assert known(masks.and_masks(chunked, masks.chunked_overlay(3, chunks_begin))) is None
    assert known(masks.or_masks(masks.causal_mask_function, masks.sliding_window_overlay(3))) is None
    assert known(masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k > 2)) is None
    assert known(lambda b, h, q, k: k <= q) is None
