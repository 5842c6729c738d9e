"""Registered models under torch.compile(fullgraph=True): results and gradients are those of the model without it.

test_transformers_batches.py compares the model without torch.compile with eager attention in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils as masks  # noqa: E402

from flash_attn_mini.integrations import transformers as integration  # noqa: E402
from flash_attn_mini.integrations import transformers_masks, transformers_op  # noqa: E402
from flash_attn_mini.integrations.transformers_masks import Mask, Seen  # noqa: E402
from flash_attn_mini.options import Options  # noqa: E402
from flash_attn_mini.rng_state import draw_rng_state  # noqa: E402

from ..support.one_thread import one_thread  # noqa: E402, F401
from ..support.tiny_transformers import LENGTH  # noqa: E402
from ..support.versions import TORCH  # noqa: E402
from .test_transformers_batches import make, result  # noqa: E402

# PyTorch 2.6 cannot trace transformers 5: SDPA does not compile either.
thorough = pytest.mark.thorough
needs_traceable_transformers = pytest.mark.skipif(TORCH < (2, 13), reason="not tested before PyTorch 2.13")

ONES = torch.ones(3, LENGTH, dtype=torch.long)
PADDED = ONES.clone()  # a whole row, a row padded on the left, a row padded on the right
PADDED[1, :5] = PADDED[2, 4:] = 0
HOLES = PADDED.clone()
HOLES[0, 3:5] = HOLES[1, 8] = 0
EMPTY_ROW = PADDED.clone()
EMPTY_ROW[1] = 0
POSITIONS = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) % 5, torch.arange(LENGTH) % 4])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


def outputs(model: Any, call: Any, ids: Tensor, weights: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The result, and the gradients of all parameters; 0 where there is none."""
    model.zero_grad()
    out = result(call, ids, **options)
    (out * weights[..., : out.shape[-1]]).sum().backward()
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return [out.detach(), *gradients]


@needs_traceable_transformers
@pytest.mark.parametrize(
    ("name", "compiler", "options"),
    [
        pytest.param("llama", "aot_eager", {}, id="llama", marks=thorough),
        pytest.param("gemma2", "eager", {}, id="gemma2", marks=thorough),
        pytest.param("modernbert", "eager", {}, id="modernbert"),
        pytest.param("llama4", "aot_eager", {}, id="llama4", marks=thorough),
        pytest.param("llama4", "eager", {"attention_mask": PADDED}, id="llama4-padded", marks=thorough),
        pytest.param("llama4", "eager", {"position_ids": POSITIONS}, id="llama4-packed"),
        pytest.param("llama", "eager", {"position_ids": POSITIONS}, id="llama-packed"),
        pytest.param("mistral", "eager", {"position_ids": POSITIONS}, id="mistral-packed", marks=thorough),
        pytest.param("llama", "aot_eager", {"attention_mask": PADDED}, id="llama-padded", marks=thorough),
        pytest.param("llama", "eager", {"attention_mask": PADDED, "use_cache": True}, id="llama-cache", marks=thorough),
        pytest.param("llama", "eager", {"attention_mask": EMPTY_ROW}, id="llama-empty-row", marks=thorough),
        pytest.param("gemma2", "eager", {"attention_mask": PADDED}, id="gemma2-padded", marks=thorough),
        pytest.param("mistral", "eager", {"attention_mask": ONES}, id="mistral-ones", marks=thorough),
        pytest.param("bert", "eager", {"attention_mask": HOLES}, id="bert-holes"),
        pytest.param("modernbert", "eager", {"attention_mask": PADDED}, id="modernbert-padded", marks=thorough),
    ],
)
def test_compiled_training_gives_the_results_of_the_model(
    name: str, compiler: str, options: dict[str, Any], draw: torch.Generator
) -> None:
    torch._dynamo.reset()
    if name in ("llama", "gemma2", "mistral", "llama4"):
        options = {"use_cache": False, **options}
    model = make(name, **({} if name in ("gemma2", "modernbert", "llama4") else {"num_hidden_layers": 1}))
    ids = torch.randint(1, 99, (3, LENGTH), generator=draw)
    weights = torch.randn(3, LENGTH, 99, generator=draw)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    ours, expected = (outputs(model, call, ids, weights, options) for call in (compiled, model))
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * max(1.0, wanted.abs().max().item()))


@needs_traceable_transformers
def test_compiled_program_serves_other_masks(draw: torch.Generator) -> None:
    """The program of a mask depends on no value of it."""
    torch._dynamo.reset()
    model = make("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(1, 99, (3, LENGTH), generator=draw)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
        result(compiled, ids, attention_mask=ONES, use_cache=False)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for mask in (PADDED, HOLES, EMPTY_ROW):
                ours, expected = (result(x, ids, attention_mask=mask, use_cache=False) for x in (compiled, model))
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@needs_traceable_transformers
@pytest.mark.parametrize("name", ["mistral", pytest.param("modernbert", marks=thorough)])
def test_holes_under_a_window_are_refused_when_the_program_runs(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make(name), backend="aot_eager", fullgraph=True)  # it removes what has no effect
    options = {"use_cache": False} if name == "mistral" else {}
    with torch.no_grad():
        result(compiled, ONES, attention_mask=PADDED, **options)
        with pytest.raises(NotImplementedError, match="holes in a layer with a sliding window"):
            result(compiled, ONES, attention_mask=HOLES, **options)


@needs_traceable_transformers
def test_dropout_in_a_compiled_program(draw: torch.Generator) -> None:
    """The same seed gives the same gradients, another seed others; packed rows have an op of their own."""
    torch._dynamo.reset()
    model = make("llama", attention_dropout=0.5, num_hidden_layers=1).train()
    ids = torch.randint(1, 99, (3, LENGTH), generator=draw)
    weights = torch.randn(3, LENGTH, 99, generator=draw)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for options in ({"use_cache": False}, {"use_cache": False, "attention_mask": PADDED}):
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(outputs(model, compiled, ids, weights, options))
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
        assert not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("window", [None, 3], ids=["no-window", "window"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_guess_at_a_mask_function_is_compared_with_it(
    causal: bool, window: int | None, draw: torch.Generator
) -> None:
    """PyTorch before 2.14 cannot look into a mask function while it traces."""
    if causal:
        function = masks.sliding_window_causal_mask_function(window) if window else masks.causal_mask_function
    else:
        function = (
            masks.sliding_window_bidirectional_mask_function(window) if window else masks.bidirectional_mask_function
        )
    segments = torch.randint(0, 2, (3, LENGTH), generator=draw).cumsum(1)
    packed = masks.and_masks(function, masks.packed_sequence_mask_function(segments))
    expected = transformers_masks.seen_of(function)
    options = {"causal": causal, "device": "cpu"}
    padded = Mask(Seen(), 3, LENGTH, LENGTH, 0, 0, PADDED.bool())
    guess = transformers_masks.traced_mask(function, padded, window=window, **options)
    assert guess is not None
    assert guess.seen == expected
    assert torch.equal(guess.padding, padded.padding)

    of_rows = padded._replace(padding=None)
    guess = transformers_masks.traced_mask(packed, of_rows, window=window, **options)
    assert guess is not None
    assert (guess.seen.left, guess.seen.right) == (expected.left, expected.right)
    assert torch.equal(guess.seen.segments.diff() != 0, segments.diff() != 0)

    chunked = masks.and_masks(function, masks.chunked_overlay(4, torch.zeros(3, dtype=torch.long)))
    blocks = masks.or_masks(function, masks.blockwise_overlay(POSITIONS % 2))
    for unknown in (chunked, blocks) if causal or window else (chunked,):
        with pytest.raises(NotImplementedError, match="this model's mask: neither causal nor full"):
            transformers_masks.traced_mask(unknown, padded, window=window, **options)
    with pytest.raises(NotImplementedError, match="this model's mask"):
        transformers_masks.traced_mask(packed, padded, window=window, **options)
    assert transformers_masks.traced_mask(function, of_rows._replace(q_length=1), window=window, **options) is None


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_opcheck(dropout_p: float, draw: torch.Generator) -> None:
    begins = torch.randint(0, 2, (2, 6), generator=draw).bool()
    begins[:, 0] = True
    q, k, v = (torch.randn(12, heads, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    cu_seqlens, sizes = transformers_op.sequences_of(begins)
    assert cu_seqlens.tolist() == [*begins.flatten().nonzero().flatten().tolist(), *[12] * int((~begins).sum() + 1)]
    assert sizes.tolist() == [int(begins.sum()), int(cu_seqlens.diff().max())]
    rng_state = draw_rng_state(q) if dropout_p > 0 else None
    options = (*Options(dropout_p, 0.5, True, 2, 0, 0.0, None), rng_state)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(transformers_op.FORWARD, (q, k, v, cu_seqlens, sizes, *options), test_utils=tests)
    q, k, v = (x.detach() for x in (q, k, v))
    results = transformers_op.FORWARD(q, k, v, cu_seqlens, sizes, *options)
    dout, dsoftmax_lse = torch.randn(12, 4, 8, generator=draw), torch.randn(4, 12, generator=draw)
    for of_lse in (dsoftmax_lse, None):
        arguments = (dout, q, k, v, *results, of_lse, cu_seqlens, sizes, *options)
        torch.library.opcheck(transformers_op.BACKWARD, arguments, test_utils=tests[:3])
    ops = torch.ops.flash_attn_mini
    torch.library.opcheck(ops._sequences_of_rows.default, (begins,), test_utils=tests[:3])
    torch.library.opcheck(ops._check_mask.default, (q, begins.any(), "message"), test_utils=tests[:3])


def test_autocast_and_backend_of_packed_rows(draw: torch.Generator) -> None:
    lengths = transformers_op.sequences_of(torch.tensor([[True, False, True, False]]))
    q, k, v = (torch.randn(4, 2, 8, generator=draw, requires_grad=True) for _ in range(3))
    arguments = (q, k, v, lengths, Options(0.0, 8**-0.5, True, -1, 0, 0.0, None))
    with torch.autocast("cpu", torch.bfloat16):
        out = transformers_op.attend_to_sequences(*arguments)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), transformers_op.attend_to_sequences(*arguments), rtol=0.05, atol=0.05)
