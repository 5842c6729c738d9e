"""flash_attn_mini.reference compared with SDPA in float64 and with loops over single scores; gradcheck."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_mini.reference import (
    alibi_bias,
    attention_probabilities,
    attention_reference,
    visible_keys,
)

from ..support.loops import CLOSE, loops, qkv, randn
from ..support.one_thread import one_thread  # noqa: F401


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    ratio = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)  # type: ignore[arg-type]


# ---- against SDPA -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.3])
def test_matches_sdpa(scale: float | None, draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 7, 11)
    out, lse = attention_reference(q, k, v, softmax_scale=scale)
    torch.testing.assert_close(out, sdpa(q, k, v, scale=scale), **CLOSE)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * (scale or 8**-0.5)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), **CLOSE)


def test_matches_sdpa_causal_when_square(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 9, 9)
    torch.testing.assert_close(attention_reference(q, k, v, causal=True)[0], sdpa(q, k, v, is_causal=True), **CLOSE)


def test_matches_sdpa_with_a_bias(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 5, 6)
    bias = randn(draw, 2, 4, 5, 6)
    torch.testing.assert_close(attention_reference(q, k, v, attn_bias=bias)[0], sdpa(q, k, v, attn_mask=bias), **CLOSE)


def test_matches_sdpa_gradients(draw: torch.Generator) -> None:
    inputs = [x.requires_grad_() for x in qkv(draw, 6, 6)]
    grad = randn(draw, 2, 6, 4, 8)
    ours = torch.autograd.grad(attention_reference(*inputs, causal=True)[0], inputs, grad)
    theirs = torch.autograd.grad(sdpa(*inputs, is_causal=True), inputs, grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# ---- against loops ------------------------------------------------------------------------------------------------

LENGTHS = [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1), (3, 0), (0, 3)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize(
    "feature", ["plain", "causal", "window", "causal_window", "softcap", "alibi", "bias", "sinks", "dropout"]
)
def test_matches_loops(feature: str, seqlen_q: int, seqlen_k: int, draw: torch.Generator) -> None:
    q, k, v = qkv(draw, seqlen_q, seqlen_k)
    v = torch.cat([v, v[..., :3]], dim=-1)  # v has another head dim
    options = {
        "plain": dict,
        "causal": lambda: {"causal": True},
        "window": lambda: {"window_size": (1, 2)},
        "causal_window": lambda: {"causal": True, "window_size": (2, 3)},
        "softcap": lambda: {"softcap": 0.7, "causal": True},
        "alibi": lambda: {"alibi_slopes": randn(draw, 2, 4).abs()},
        "bias": lambda: {"attn_bias": randn(draw, 1, 4, seqlen_q, seqlen_k), "softcap": 1.5},
        "sinks": lambda: {"sinks": randn(draw, 4), "causal": True},
        "dropout": lambda: {
            "dropout_p": 0.3,
            "dropout_mask": torch.rand(2, 4, seqlen_q, seqlen_k, generator=draw) > 0.3,
        },
    }[feature]()
    out, lse = attention_reference(q, k, v, softmax_scale=0.4, **options)  # type: ignore[arg-type]
    expected_out, expected_lse = loops(q, k, v, softmax_scale=0.4, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected_out, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)


@settings(max_examples=200, deadline=None, database=None, print_blob=True)
@given(
    seqlen_q=st.integers(0, 12),
    seqlen_k=st.integers(0, 12),
    causal=st.booleans(),
    left=st.integers(-1, 13),
    right=st.integers(-1, 13),
)
def test_mask_geometry(seqlen_q: int, seqlen_k: int, causal: bool, left: int, right: int) -> None:
    mask = visible_keys(seqlen_q, seqlen_k, causal=causal, window_size=(left, right))
    assert mask.shape == (seqlen_q, seqlen_k)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            ahead = j - (i + seqlen_k - seqlen_q)  # keys between the query's position and the key
            limit = 0 if causal else right
            assert bool(mask[i, j]) == ((left < 0 or -ahead <= left) and (limit < 0 or ahead <= limit))
    if causal and seqlen_q and seqlen_k and left < 0:
        assert mask[-1].all(), "the last query sees every key"
        assert int(mask.sum(1).diff().abs().max() if seqlen_q > 1 else 0) <= 1, "each query sees one key more"


def test_window_below_minus_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window_size"):
        visible_keys(2, 2, window_size=(-2, 0))


def test_alibi_is_zero_at_the_query_and_falls_both_ways() -> None:
    bias = alibi_bias(torch.tensor([0.5]), 2, 4)[0, 0]
    assert bias.tolist() == [[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]


# ---- rows without keys --------------------------------------------------------------------------------------------


def test_rows_without_keys_are_zero_with_zero_gradients(draw: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(draw, 6, 2))
    out, lse = attention_reference(q, k, v, causal=True)
    assert (out[:, :4] == 0).all()
    assert (lse[:, :, :4] == -math.inf).all()
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    grads = torch.autograd.grad(out.square().sum() + finite.square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :4] == 0).all()
    assert (grads[0][:, 4:] != 0).any()


def test_rows_masked_by_a_bias_of_minus_infinity(draw: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(draw, 3, 4))
    bias = torch.zeros(3, 4, dtype=torch.float64)
    bias[1] = -math.inf
    bias[2, :2] = -math.inf
    out, lse = attention_reference(q, k, v, attn_bias=bias)
    assert (out[:, 1] == 0).all()
    assert (lse[:, :, 1] == -math.inf).all()
    torch.testing.assert_close(out[:, 2:], attention_reference(q[:, 2:], k[:, 2:], v[:, 2:])[0], **CLOSE)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_no_keys_at_all(draw: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(draw, 3, 0))
    out, lse = attention_reference(q, k, v)
    assert out.shape == (2, 3, 4, 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


def test_a_sink_alone_takes_everything(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 3, 0)
    sinks = randn(draw, 4).requires_grad_()
    out, lse = attention_reference(q, k, v, sinks=sinks)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(2, 4, 3), **CLOSE)
    assert (torch.autograd.grad(lse.sum(), sinks)[0] == 6).all()


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 2, 1, 8), 1e4)
    out, lse = attention_reference(q, torch.cat([q, -q], 1), torch.arange(32.0).view(1, 4, 1, 8))
    assert out.isfinite().all()
    torch.testing.assert_close(lse, torch.full_like(lse, 8e8 / math.sqrt(8) + math.log(2)))


def test_nan_is_not_hidden(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 3, 4)
    q[0, 1, 2] = math.nan
    out, lse = attention_reference(q, k, v)
    assert out[0, 1, 2].isnan().all()
    assert lse[0, 2, 1].isnan()
    assert int(out.isnan().sum()) == 8


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_of_out_and_lse(causal: bool, draw: torch.Generator) -> None:
    q, k, v = randn(draw, 1, 3, 2, 4), randn(draw, 1, 4, 1, 4), randn(draw, 1, 4, 1, 4)
    bias, sinks = randn(draw, 2, 3, 4), randn(draw, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention_reference(q, k, v, causal=causal, softcap=2.0, attn_bias=bias, sinks=sinks)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v, bias, sinks)])


def test_probabilities_sum_to_one_less_the_sink(draw: torch.Generator) -> None:
    q, k, _ = qkv(draw, 3, 5)
    sinks = randn(draw, 4)
    p = attention_probabilities(q, k, sinks=sinks)
    _, lse = attention_reference(q, k, k, sinks=sinks)
    torch.testing.assert_close(p.sum(-1), 1 - torch.exp(sinks[None, :, None] - lse), **CLOSE)


def test_dropout_needs_its_mask(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 2, 2)
    with pytest.raises(ValueError, match="dropout_mask"):
        attention_reference(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match="dropout_p"):
        attention_reference(q, k, v, dropout_p=1.0)


def test_computes_in_the_dtype_asked_for(draw: torch.Generator) -> None:
    q, k, v = (x.half() for x in qkv(draw, 2, 3))
    assert [x.dtype for x in attention_reference(q, k, v)] == [torch.float64] * 2
    assert [x.dtype for x in attention_reference(q, k, v, dtype=torch.float32)] == [torch.float32] * 2
