"""Masks of transformers that take key_ranges: chunks, prefixes, blocks, documents, any with at most two runs of keys.

The models are compared with eager attention in float64, as in test_transformers_batches.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils  # noqa: E402

from flash_attn_mini.integrations import transformers as integration  # noqa: E402
from flash_attn_mini.integrations import transformers_masks  # noqa: E402
from flash_attn_mini.integrations.transformers_masks import Layout  # noqa: E402
from flash_attn_mini.reference.masks import in_key_ranges  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import DECODER, LENGTH, tokens  # noqa: E402
from ..support.versions import TORCH  # noqa: E402
from .test_transformers_batches import (  # noqa: E402
    MODELS,
    POSITIONS,
    _eager_in_float64,  # noqa: F401
    assert_like_eager,
    make,
    padding,
    result,
)

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PALIGEMMA = {
    "text_config": {"model_type": "gemma", **DECODER, "head_dim": 16},
    "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 28, "patch_size": 14},
    "projection_dim": 64,
    "image_token_index": 98,
}
KEPT = torch.ones(3, LENGTH, dtype=torch.bool)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


def dense(layout: Layout) -> Tensor:
    """bool [batch, 1, q_length, kv_length] of a layout that has key_ranges."""
    assert isinstance(layout, Layout)
    assert layout.key_ranges is not None
    assert (layout.left, layout.right, layout.lengths, layout.is_decoding) == (-1, -1, None, False)
    return in_key_ranges(layout.key_ranges, layout.kv_length)


def drawn(function: Any, q_length: int, kv_length: int, q_offset: int, kv_offset: int, kept: Tensor | None) -> Tensor:
    """transformers' own mask tensor."""
    mask: Tensor = masking_utils.sdpa_mask(
        batch_size=3,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=kept,
        allow_is_causal_skip=False,
    )
    return mask


def most_runs(mask: Tensor) -> int:
    """The most runs of visible keys that a query has."""
    begins = mask.clone()
    begins[..., 1:] &= ~mask[..., :-1]
    return int(begins.sum(-1).max())


def padding_with_holes(number: int, draw: torch.Generator) -> Tensor:
    """bool [3, LENGTH]: padding on the left and the right, and `number` holes of a token or more in each row."""
    kept = torch.ones(3, LENGTH, dtype=torch.bool)
    for row in range(3):
        begin, end = torch.randint(0, 3, (2,), generator=draw).tolist()
        kept[row, :begin] = kept[row, LENGTH - end :] = False
        for place in torch.randint(0, LENGTH, (number,), generator=draw).tolist():
            kept[row, place] = False
    return kept


# ---- mask functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", [None, 0, 1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_chunks_are_those_of_transformers(window: int | None, holes: int | None, draw: torch.Generator) -> None:
    """Of all places in a sequence, with the offsets of a cache, and of chunks that begin behind padding."""
    for _ in range(10):
        kept = None if holes is None else padding_with_holes(holes, draw)
        left = torch.zeros(3, dtype=torch.long) if kept is None else (kept.cumsum(1) == 0).sum(1)
        function = masking_utils.chunked_causal_mask_function(int(torch.randint(2, 6, (), generator=draw)), left)
        if window is not None:
            function = masking_utils.and_masks(masking_utils.sliding_window_overlay(window), function)
        q_offset = int(torch.randint(0, LENGTH - 2, (), generator=draw))
        kv_offset = int(torch.randint(0, q_offset + 1, (), generator=draw))
        place = (LENGTH - q_offset, LENGTH - kv_offset, q_offset, kv_offset)
        layout = integration.attention_mask(3, *place, mask_function=function, attention_mask=kept)
        expected = drawn(function, *place, kept)
        if most_runs(expected) <= 2:
            assert torch.equal(dense(layout), expected)
        else:  # two holes in a chunk of five
            assert layout.key_ranges is None
            assert layout.attn_bias is not None
            assert torch.equal(layout.attn_bias.expand_as(expected), expected)


def test_blocks_are_those_of_transformers(draw: torch.Generator) -> None:
    """Causal text with blocks in which all tokens see each other (Gemma 3, PaliGemma), also under a window."""
    for window in (None, 4):
        begins, lengths = torch.randint(0, LENGTH, (2, 3, 2), generator=draw)
        blocks = torch.full((3, LENGTH), -1)
        for row in range(3):
            for block in range(2):
                blocks[row, begins[row, block] : begins[row, block] + lengths[row, block]] = block
        for row in range(3):  # a block that the other one cuts in two gives a query three runs
            blocks[row] = torch.where(blocks[row].diff(prepend=blocks[row, :1]) != 0, 1, 0).cumsum(0) * 10 + blocks[row]
        blocks[blocks % 10 == 9] = -1
        causal = masking_utils.sliding_window_causal_mask_function(window) if window else None
        function = masking_utils.or_masks(
            causal or masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks)
        )
        expected = drawn(function, LENGTH, LENGTH, 0, 0, None)
        layout = integration.attention_mask(3, LENGTH, LENGTH, mask_function=function)
        assert isinstance(layout, Layout)
        if layout.key_ranges is None:
            assert layout.right == 0
        else:
            assert torch.equal(dense(layout).expand_as(expected), expected)


def test_chunks_that_hide_nothing_take_no_ranges() -> None:
    """A prompt that is no longer than a chunk is causal, and is generated from as such."""
    for kept in (None, padding("left").bool()):
        left = torch.zeros(3, dtype=torch.long) if kept is None else LENGTH - kept.sum(1)
        function = masking_utils.chunked_causal_mask_function(LENGTH, left)
        layout = integration.attention_mask(3, LENGTH, LENGTH, mask_function=function, attention_mask=kept)
        expected = integration.attention_mask(3, LENGTH, LENGTH, attention_mask=kept)
        assert (layout.key_ranges, layout.right) == (None, 0)
        assert (layout.lengths is None) == (expected.lengths is None)
        layout = integration.attention_mask(3, 1, LENGTH, LENGTH - 1, mask_function=function, attention_mask=kept)
        assert layout.is_decoding
    behind = masking_utils.chunked_causal_mask_function(LENGTH, torch.tensor([0, 2, 0]))
    layout = integration.attention_mask(3, LENGTH, LENGTH, mask_function=behind)
    assert torch.equal(dense(layout), drawn(behind, LENGTH, LENGTH, 0, 0, None))


def test_one_query_in_a_chunk_reads_the_cache(draw: torch.Generator) -> None:
    """The keys before the chunk are left padding of the cache, for a length that is a number or a tensor."""
    function = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2, 5]))
    q, k, v = (torch.randn(3, heads, n, 8, generator=draw) for heads, n in ((4, 1), (2, LENGTH), (2, LENGTH)))
    kept = torch.arange(LENGTH) >= torch.tensor([0, 2, 5])[:, None]
    for length in range(6, LENGTH + 1):
        expected = drawn(function, 1, LENGTH, length - 1, 0, kept)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected, enable_gqa=True)
        for offset in (length - 1, torch.tensor(length - 1)):
            layout = integration.attention_mask(3, 1, LENGTH, offset, mask_function=function, attention_mask=kept)
            assert layout.is_decoding
            found, _ = integration.attention(torch.nn.Module(), q, k, v, layout)
            torch.testing.assert_close(found, out.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_one_query_under_any_mask_reads_the_cache(rows: int, draw: torch.Generator) -> None:
    """One run of keys; with two runs, or gradients, the call has key_ranges."""
    q, k, v = (torch.randn(3, heads, n, 8, generator=draw) for heads, n in ((4, 1), (2, LENGTH), (2, LENGTH)))
    for runs in (1, 2):
        edges = torch.randint(0, LENGTH + 1, (rows, runs, 2), generator=draw).sort(-1).values
        edges[0] = torch.tensor([[2, 4], [7, 9]])[:runs]
        place = torch.arange(LENGTH)
        mask = ((place >= edges[..., :1]) & (place < edges[..., 1:])).any(1)[:, None, None]
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        layout = transformers_masks.layout_of_drawn(mask, 3, 1, LENGTH)
        assert layout.is_decoding == (runs == 1)
        for needs_gradients in (False, True):
            k.requires_grad_(needs_gradients)
            found, _ = integration.attention(torch.nn.Module(), q, k, v, layout)
            torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
            assert found.requires_grad == needs_gradients


@pytest.mark.parametrize("form", ["function", "bool", "float"])
def test_a_mask_of_three_runs_takes_attn_bias(form: str, draw: torch.Generator) -> None:
    function = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 3 > 0)
    layout = integration.attention_mask(3, LENGTH, LENGTH, mask_function=function)
    assert (layout.key_ranges, layout.lengths, layout.is_decoding) == (None, None, False)
    expected = drawn(function, LENGTH, LENGTH, 0, 0, None)
    assert torch.equal(layout.attn_bias, expected)
    mask = {
        "function": layout,
        "bool": expected,
        "float": torch.zeros(expected.shape).masked_fill(~expected, -torch.inf),
    }
    q, k, v = (torch.randn(3, heads, LENGTH, 8, generator=draw) for heads in (4, 2, 2))
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask[form])
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected, enable_gqa=True)
    torch.testing.assert_close(out, exact.transpose(1, 2), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q together with a position bias, or with a mask that"):
        integration.attention(torch.nn.Module(), q, k, v, mask[form], cu_seq_lens_q=torch.tensor([0, LENGTH]))


@pytest.mark.parametrize("name", ["key_ranges", "attn_bias"])
def test_masks_move_to_another_device(name: str) -> None:
    function = masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long))
    if name == "attn_bias":
        function = masking_utils.and_masks(function, lambda b, h, q, k: k % 2 > 0, lambda b, h, q, k: k != q - q % 3)
        function = masking_utils.or_masks(function, lambda b, h, q, k: k % 3 == 0)
    moved = integration.attention_mask(3, LENGTH, LENGTH, mask_function=function).to("meta")
    assert moved.device == getattr(moved, name).device == torch.device("meta")


# ---- mask tensors ----------------------------------------------------------------------------------------------------


def documents_4d(draw: torch.Generator) -> Tensor:
    segments = torch.randint(0, 2, (3, LENGTH), generator=draw).cumsum(1)
    return (segments[:, None, :, None] == segments[:, None, None]).tril()


def prefix_4d(draw: torch.Generator) -> Tensor:
    prefix = torch.arange(LENGTH) < torch.randint(0, LENGTH, (3, 1, 1, 1), generator=draw)
    return prefix | torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def first_and_window_4d(draw: torch.Generator) -> Tensor:
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-int(torch.randint(0, 5, (), generator=draw)))
    return (window | (torch.arange(LENGTH) < 2)).tril()[None, None].expand(3, 1, -1, -1)


MASKS = {"documents": documents_4d, "prefix": prefix_4d, "first_and_window": first_and_window_4d}


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("name", MASKS)
def test_a_model_takes_a_mask_tensor(name: str, form: str, draw: torch.Generator) -> None:
    mask = MASKS[name](draw)
    if form == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        assert_like_eager("llama", None, tokens(), attention_mask=mask)
        return
    with torch.no_grad():  # eager adds a mask to the scores, so it takes no bool mask
        ours = result(make("llama"), tokens(), attention_mask=mask)
        sdpa = result(make("llama", "sdpa"), tokens(), attention_mask=mask)
    torch.testing.assert_close(ours, sdpa, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 1, 1, 7), (1, 4, 5, 7), (2, 4, 1, 7), (2, 4, 5, 1)], ids=str)
def test_sizes_of_1_in_a_mask_tensor(shape: tuple[int, ...], draw: torch.Generator) -> None:
    q, k, v = (torch.randn(2, heads, n, 8, generator=draw) for heads, n in ((4, 5), (2, 7), (2, 7)))
    place = torch.arange(shape[-1])
    begin = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=draw)
    mask = (place >= begin) & (place < begin + 3)
    for is_causal in (True, False):
        out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=is_causal)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", ["-inf", "lowest"])
def test_queries_without_a_key_in_a_mask_tensor(hidden: str, draw: torch.Generator) -> None:
    """Hidden by -inf, their output is 0, also for NaN in q. Hidden by finite numbers, it is an average."""
    q, k, v = (torch.randn(2, 2, 5, 8, generator=draw) for _ in range(3))
    kept = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None]  # the last query sees nothing
    mask = torch.zeros(1, 1, 5, 5)
    mask[~kept] = -torch.inf if hidden == "-inf" else torch.finfo(torch.float32).min
    if hidden == "lowest":
        out, _ = integration.attention(torch.nn.Module(), q, k, v, mask)
        torch.testing.assert_close(out[:, 4], v.mean(2), rtol=1e-4, atol=1e-5)
        return
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept).transpose(1, 2)
    q[:, :, 4] = torch.nan
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask)
    assert not out[:, 4].any()
    torch.testing.assert_close(out[:, :4], expected[:, :4], rtol=1e-4, atol=1e-5)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_a_model_with_a_mask_tensor(name: str, draw: torch.Generator) -> None:
    mask = torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~MASKS[name](draw), -torch.inf)
    weights = torch.randn(3, LENGTH, 1, generator=draw)
    gradients = []
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make("llama", attention)
        (result(model, tokens(), attention_mask=mask).square().mean(-1, keepdim=True) * weights).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, theirs.abs().max().item()))


def paligemma(attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(**PALIGEMMA)
    model = transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_prefix_that_sees_itself(side: str | None) -> None:
    """PaliGemma: an image and its prompt, then causal text."""
    kept = KEPT if side is None else padding(side, [13, 9, 6])
    types = torch.zeros(3, LENGTH, dtype=torch.long)  # the text begins at the fifth token that is no padding
    types[kept.cumsum(1) > 4] = 1
    options: dict[str, Any] = {"token_type_ids": types, "attention_mask": kept.long()}
    ids = tokens().clamp(max=97)
    with torch.no_grad():
        exact = result(paligemma("eager").double(), ids, **options)
        theirs, ours = (result(paligemma(name), ids, **options) for name in ("eager", integration.ATTENTION_NAME))
    error, allowed = ((x.double() - exact)[kept.bool()].abs().max().item() for x in (ours, theirs))
    assert error <= 2 * allowed + 1e-5, f"ours is {error:.2e} off, eager {allowed:.2e}"
    is_seen = (result(paligemma("eager"), ids, attention_mask=kept.long()) - theirs)[kept.bool()].abs().max()
    assert is_seen > 1e-3, "the prefix changes nothing"


def test_chunks_change_the_result() -> None:
    """So that the tests of Llama 4 in test_transformers_batches.py see its chunks."""
    with torch.no_grad():
        chunks, whole = (result(make("llama4", attention_chunk_size=size), tokens()) for size in (4, LENGTH))
    assert (chunks - whole)[:, :4].abs().max() < 1e-4
    assert (chunks - whole).abs().max() > 1e-2


def test_collators_lengths_with_chunks_are_refused() -> None:
    cu_seqlens = torch.tensor([0, 13, 26, 39], dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match="cu_seq_lens_q together with a mask that is neither causal, nor full"
    ):
        make("llama4")(tokens(), cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)


@pytest.mark.skipif(TORCH < (2, 13), reason="not tested before PyTorch 2.13")
def test_a_compiled_model_takes_a_mask_tensor(draw: torch.Generator) -> None:
    """One program serves all masks; a mask of three runs is an error when it runs."""
    torch._dynamo.reset()
    model = make("llama", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for name in MASKS:
            mask = MASKS[name](draw).expand(3, 1, LENGTH, LENGTH)
            ours, expected = (result(x, tokens(), attention_mask=mask, use_cache=False) for x in (compiled, model))
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        mask = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)
        mask[..., 2::3] = False
        with pytest.raises(NotImplementedError, match="a query sees more than two runs of neighbouring keys"):
            compiled(tokens(), attention_mask=mask, use_cache=False)


def test_the_models_of_the_other_file_have_chunks() -> None:
    assert MODELS["llama4"][2]["attention_chunk_size"] < LENGTH
    assert POSITIONS.shape[1] == LENGTH
