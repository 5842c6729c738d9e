"""Generation in transformers runs on flash_attn_with_kvcache, with dynamic and static caches, and gives eager's tokens.

test_transformers_batches.py has more padded batches and caches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from flash_attn_mini.integrations import transformers as integration  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import LENGTH, tokens  # noqa: E402
from ..support.versions import TORCH  # noqa: E402
from .test_transformers_batches import LENGTHS, make, padding  # noqa: E402

NEW = 7
each_cache = pytest.mark.parametrize("cache", ["dynamic", "static"])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """The arguments of flash_attn_with_kvcache; other functions may only see prompts."""
    seen: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
    attend = integration.flash_attn_with_kvcache

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        seen.append((tensors, options))
        return attend(*tensors, **options)

    monkeypatch.setattr(integration, "flash_attn_with_kvcache", spy)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        function = getattr(integration, name)

        def of_prompts(q: Tensor, *tensors: Any, function: Any = function, **options: Any) -> Tensor:
            assert q.shape[-3] > len(LENGTHS), "a decoding step did not take the KV cache's function"
            return function(q, *tensors, **options)

        monkeypatch.setattr(integration, name, of_prompts)
    return seen


def generated(name: str, attention: str, cache: str, mask: Tensor | None) -> Tensor:
    options = {"cache_implementation": "static"} if cache == "static" else {}
    model = make(name, attention)
    return model.generate(tokens(), attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)


@each_cache
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_generation_gives_the_tokens_of_eager(
    name: str, padded: bool, cache: str, calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]]
) -> None:
    mask = padding("left") if padded else torch.ones(len(LENGTHS), LENGTH, dtype=torch.long)
    ours = generated(name, integration.ATTENTION_NAME, cache, mask)
    assert len(calls) == 2 * (NEW - 1), "two layers in every step after the prompt"
    assert torch.equal(ours, generated(name, "eager", cache, mask))


def test_static_cache_gives_its_length_as_a_tensor_and_is_not_copied(
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]],
) -> None:
    model = make("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    mask = padding("left")
    with torch.no_grad():
        for begin, end in ((0, 11), (11, 12), (12, 13)):
            model(tokens()[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
    assert len(calls) == 4
    for (q, k, v), options in calls:
        layer = cache.layers[0 if k.data_ptr() == cache.layers[0].keys.data_ptr() else 1]
        assert (k.data_ptr(), v.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert (q.shape[1], k.shape[1]) == (1, 32)
        assert options["cache_leftpad"].tolist() == [0, 5, min(12, int(options["cache_seqlens"][2]))]
        assert options["cache_seqlens"].dtype == options["cache_leftpad"].dtype == torch.int32
    assert [options["cache_seqlens"].tolist() for _, options in calls] == [[12] * 3] * 2 + [[13] * 3] * 2


def test_a_static_cache_filled_with_gradients_on_serves_a_step_without() -> None:
    logits = []
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make("llama")
        model.set_attn_implementation(attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(tokens()[:, :8], past_key_values=cache, use_cache=True)
        with torch.no_grad():
            logits.append(model(tokens()[:, 8:9], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(*logits)


def test_mask_of_a_static_cache_reads_nothing_on_the_host() -> None:
    """A meta tensor has no values: to read one raises."""
    kept = torch.ones(3, LENGTH, dtype=torch.bool, device="meta")
    offset = torch.zeros((), dtype=torch.long, device="meta")
    mask = integration.attention_mask(3, 1, 32, offset, attention_mask=kept)
    assert isinstance(mask, integration.Layout)
    assert mask.cache_seqlens is not None
    assert mask.cache_leftpad is not None
    assert mask.cache_seqlens.shape == mask.cache_leftpad.shape == (3,)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):  # several queries: it waits
        integration.attention_mask(3, 2, 32, offset, attention_mask=kept)


@pytest.mark.gpu
def test_decoding_step_on_a_gpu_does_not_wait_for_it(draw: torch.Generator) -> None:
    q, k, v = (torch.randn(3, heads, n, 64, generator=draw) for heads, n in ((4, 1), (2, 32), (2, 32)))
    kept = padding("left").bool()
    expected, _ = integration.attention(
        torch.nn.Module(), q, k, v, integration.attention_mask(3, 1, 32, LENGTH - 1, attention_mask=kept)
    )
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    kept, offset = kept.cuda(), torch.tensor(LENGTH - 1, device="cuda")

    def step() -> Tensor:
        mask = integration.attention_mask(3, 1, 32, offset, attention_mask=kept)
        return integration.attention(torch.nn.Module(), q, k, v, mask)[0]

    step()  # compiles and loads
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padding_between_the_keys_of_a_static_cache(name: str) -> None:
    """The kernel cannot skip it: the keys are packed instead."""
    lengths, new = [13, 5, 1], tokens(3, 3)
    mask, positions = padding("right", lengths), torch.tensor(lengths)[:, None]
    logits = []
    for attention in (integration.ATTENTION_NAME, "eager"):
        model = make(name, attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(tokens(), attention_mask=mask, past_key_values=cache, use_cache=True)
        steps = []
        for step in range(3):
            output = model(
                new[:, step : step + 1],
                attention_mask=torch.cat([mask, torch.ones(3, step + 1, dtype=torch.long)], dim=1),
                position_ids=positions + step,
                past_key_values=cache,
                use_cache=True,
            )
            steps.append(output.logits[:, 0])
        logits.append(torch.stack(steps))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_queries_behind_cached_keys(padded: bool) -> None:
    """As in prefix tuning. The KV cache's function has no gradient."""
    q, k, v = (torch.randn(3, heads, n, 8, dtype=torch.float64) for heads, n in ((4, 4), (2, LENGTH), (2, LENGTH)))
    kept = padding("left").bool() if padded else torch.ones(3, LENGTH, dtype=torch.bool)
    mask = integration.attention_mask(3, 4, LENGTH, LENGTH - 4, attention_mask=kept)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = integration.attention(torch.nn.Module(), *inputs, mask)
    visible = torch.ones(4, LENGTH, dtype=torch.bool).tril(LENGTH - 4) & kept[:, None, None]
    computed = visible.any(-1)[..., None].transpose(1, 2)  # [batch, q, 1, 1]
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*others, attn_mask=visible, enable_gqa=True)
    expected = expected.transpose(1, 2).masked_fill(~computed, 0.0)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    gradients = [torch.autograd.grad((x * weights).sum(), leaves) for x, leaves in ((out, inputs), (expected, others))]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num())


def test_dropout_behind_cached_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        integration, "flash_attn_func", lambda q, k, v, **options: seen.update(options) or torch.empty(q.shape)
    )
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    integration.attention(torch.nn.Module(), q, k, k, None, dropout=0.25)
    assert seen["dropout_p"] == 0.25


@pytest.mark.skipif(TORCH < (2, 7), reason="PyTorch 2.6 cannot trace transformers 5")
def test_static_cache_is_compiled_once() -> None:
    """As on a GPU, where generate() compiles the model for a static cache: lengths that grow compile nothing anew."""
    from torch._dynamo.utils import counters
    from transformers.generation.configuration_utils import CompileConfig

    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    options = {"attention_mask": padding("left"), "max_new_tokens": NEW, "do_sample": False}
    ours = make("llama").generate(tokens(), cache_implementation="static", compile_config=compiled, **options)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(ours, make("llama", "eager").generate(tokens(), **options))
