"""Position biases of transformers' models: T5 against eager attention in training and generation; sums with masks.

A small T5 with random weights has an encoder, a causal decoder and cross-attention.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from flash_attn_mini.integrations import transformers as integration  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import LENGTH, tokens  # noqa: E402
from ..support.versions import TORCH  # noqa: E402
from .test_transformers_batches import _eager_in_float64, each_side, padding  # noqa: E402, F401

Model = torch.nn.Module
TARGETS = 7
takes_position_biases = pytest.mark.skipif(
    not hasattr(transformers.models.t5.modeling_t5, "eager_attention_forward"),
    reason="this transformers has T5's attention in code of its own",
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


def t5(attention: str = integration.ATTENTION_NAME) -> Model:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
    # T5 does not scale its scores. Larger weights would saturate the softmax and magnify rounding errors.
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=2.0 if "relative" in name else 0.15)
    return model


def batch(side: str | None) -> dict[str, Tensor]:
    kept = torch.ones(3, LENGTH, dtype=torch.long) if side is None else padding(side)
    kept_targets = torch.ones(3, TARGETS, dtype=torch.long)
    if side is not None:
        kept_targets = padding(side, [7, 4, 1], TARGETS)
    return {
        "input_ids": tokens(),
        "attention_mask": kept,
        "decoder_input_ids": tokens(3, TARGETS),
        "decoder_attention_mask": kept_targets,
    }


@takes_position_biases
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_results_and_gradients_of_t5(side: str | None, draw: torch.Generator) -> None:
    """The error from eager float64 is at most three times that of eager float32, also of the biases' gradients."""
    weights = torch.randn(3, TARGETS, 99, generator=draw, dtype=torch.float64)
    inputs = batch(side)
    weights = weights * inputs["decoder_attention_mask"][..., None]

    def run(model: Model) -> dict[str, Tensor]:
        logits = model(**inputs, use_cache=False).logits
        (logits * weights).sum().backward()
        kept = inputs["decoder_attention_mask"].bool()
        gradients = {name: x.grad.double() for name, x in model.named_parameters() if x.grad is not None}
        return {"logits": logits.detach().double()[kept], **gradients}

    exact, theirs, ours = run(copy.deepcopy(t5("eager")).double()), run(t5("eager")), run(t5())
    assert sum("relative_attention_bias" in name for name in exact) == 2
    for name, x in exact.items():
        error, allowed = ((y[name] - x).abs().max().item() for y in (ours, theirs))
        assert error <= 3 * allowed + 1e-5 * max(1.0, x.abs().max().item()), f"{name}: {error:.2e}, {allowed:.2e}"
        assert "relative" not in name or x.abs().max() > 1e-2, f"{name} has no effect"


@takes_position_biases
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}], ids=str
)
def test_generation_with_t5_gives_the_tokens_of_sdpa(options: dict[str, Any], side: str | None) -> None:
    inputs = {name: x for name, x in batch(side).items() if not name.startswith("decoder")}
    ours, theirs = (
        t5(name).generate(**inputs, max_new_tokens=8, do_sample=False, **options)
        for name in (integration.ATTENTION_NAME, "sdpa")
    )
    assert torch.equal(ours, theirs)


@takes_position_biases
@pytest.mark.skipif(TORCH < (2, 13), reason="not tested before PyTorch 2.13")
def test_compiled_t5() -> None:
    torch._dynamo.reset()
    model = t5()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for side in (None, "left", "right"):
            ours, expected = (x(**batch(side), use_cache=False).logits for x in (compiled, model))
            kept = batch(side)["decoder_attention_mask"].bool()
            torch.testing.assert_close(ours[kept], expected[kept], rtol=1e-3, atol=1e-3)


# ---- one layer -------------------------------------------------------------------------------------------------------

MASKS = ("none", "causal", "bool", "three_runs", "float", "padding", "layout")


def mask_of(name: str, draw: torch.Generator) -> tuple[Any, Tensor, Tensor | None]:
    """attention_mask, what is seen [3, 1, LENGTH, LENGTH], and a number for each pair or None."""
    every = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)
    if name in ("none", "causal"):
        return None, every if name == "none" else every.tril(), None
    if name == "bool":
        return every.tril(2), every.tril(2), None
    if name == "three_runs":
        seen = (torch.rand(every.shape, generator=draw) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
        return seen, seen, None
    if name == "float":
        added = torch.randn(3, 1, 1, LENGTH, generator=draw)
        return added, every, added
    kept = padding("left").bool()
    if name == "padding":
        return kept, kept[:, None, None] & every, None
    return integration.attention_mask(3, LENGTH, LENGTH, attention_mask=kept), kept[:, None, None] & every.tril(), None


@pytest.mark.parametrize(
    "shape", [(1, 4, LENGTH, LENGTH), (3, 1, 1, LENGTH), (4, 1, LENGTH), (3, 4, LENGTH, 1)], ids=str
)
@pytest.mark.parametrize("name", MASKS)
def test_a_position_bias_with_a_mask(name: str, shape: tuple[int, ...], draw: torch.Generator) -> None:
    mask, seen, added = mask_of(name, draw)
    q, k, v = (torch.randn(3, heads, LENGTH, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    bias = torch.randn(shape, generator=draw).requires_grad_()
    leaves = [q, k, v, bias]
    if added is not None:
        leaves.append(mask.requires_grad_())
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=name == "causal", position_bias=bias)
    number = bias if added is None else bias + mask
    number = number.expand(3, 4, LENGTH, LENGTH).masked_fill(~seen, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=number, enable_gqa=True)
    rows = seen.any(-1).transpose(1, 2)[..., None]
    expected = torch.where(rows, expected.transpose(1, 2), 0.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(out.shape, generator=draw)
    for ours, theirs in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0), rtol=1e-3, atol=1e-4)


@each_side
def test_all_layers_share_the_ranges_of_one_mask(side: str) -> None:
    """They are made once in a forward, as a padding mask is read on the host."""
    layout = integration.attention_mask(3, LENGTH, LENGTH, attention_mask=padding(side).bool())
    assert layout.lengths is not None
    first = layout.unpacked(torch.device("cpu"))
    assert first.key_ranges is not None
    assert layout.unpacked(torch.device("cpu")) is first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_biases_of_another_dtype(dtype: torch.dtype, draw: torch.Generator) -> None:
    q = torch.randn(1, 2, 5, 8, generator=draw)
    bias = torch.randn(1, 2, 5, 5, generator=draw).to(dtype)
    out, _ = integration.attention(torch.nn.Module(), q, q, q, None, is_causal=False, position_bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias.float())
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_collators_lengths_with_a_position_bias_are_refused(draw: torch.Generator) -> None:
    q = torch.randn(1, 2, 5, 8, generator=draw)
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q together with a position bias"):
        integration.attention(
            torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(1, 1, 5, 5), cu_seq_lens_q=lengths,
            cu_seq_lens_k=lengths,
        )  # fmt: skip
