"""The yardstick itself: flash_attn_mini.reference against SDPA in float64, loops over single scores, and gradcheck."""

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
    apply_rotary_reference,
    attention_kvcache_reference,
    attention_kvpacked_reference,
    attention_probabilities,
    attention_qkvpacked_reference,
    attention_reference,
    attention_varlen_kvpacked_reference,
    attention_varlen_qkvpacked_reference,
    attention_varlen_reference,
    visible_keys,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def qkv(draw: torch.Generator, seqlen_q: int, seqlen_k: int, nheads: int = 4, nheads_k: int = 2) -> tuple[Tensor, ...]:
    return (
        randn(draw, 2, seqlen_q, nheads, 8),
        randn(draw, 2, seqlen_k, nheads_k, 8),
        randn(draw, 2, seqlen_k, nheads_k, 8),
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    ratio = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)  # type: ignore[arg-type]


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """API.md read word by word, one score at a time, in Python floats; shares no code with the reference."""
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    out = torch.zeros(batch, seqlen_q, nheads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, nheads, seqlen_q), -math.inf, dtype=torch.float64)
    left, right = window_size
    for b in range(batch):
        for h in range(nheads):
            h_k = h * nheads_k // nheads
            for i in range(seqlen_q):
                weights = {}
                at = i + seqlen_k - seqlen_q
                for j in range(seqlen_k):
                    hidden = (causal and j > at) or (left >= 0 and j < at - left)
                    if hidden or (right >= 0 and j > at + right):
                        continue
                    score = float(q[b, i, h] @ k[b, j, h_k]) * softmax_scale
                    if softcap > 0:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
                        score -= float(slope) * abs(at - j)
                    if attn_bias is not None:
                        score += float(attn_bias.expand(batch, nheads, seqlen_q, seqlen_k)[b, h, i, j])
                    weights[j] = math.exp(score)
                total = sum(weights.values()) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                if total == 0.0:
                    continue
                lse[b, h, i] = math.log(total)
                for j, weight in weights.items():
                    kept = 1.0 if dropout_mask is None else float(dropout_mask[b, h, i, j]) / (1 - dropout_p)
                    out[b, i, h] += weight / total * kept * v[b, j, h_k]
    return out, lse


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
    v = torch.cat([v, v[..., :3]], dim=-1)  # a head dim of v of its own
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


# ---- variable length, packed --------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 2), (4, 2, 0, 6)


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_varlen_is_each_sequence_alone(draw: torch.Generator) -> None:
    q, k, v = randn(draw, 10, 4, 8), randn(draw, 12, 2, 8), randn(draw, 12, 2, 8)
    slopes = randn(draw, 4, 4).abs()
    cu_q, cu_k = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)
    options = {"causal": True, "window_size": (3, -1), "softcap": 2.0, "softmax_scale": 0.4}
    out, lse = attention_varlen_reference(q, k, v, cu_q, cu_k, alibi_slopes=slopes, **options)  # type: ignore[arg-type]
    assert out.shape == (10, 4, 8)
    assert lse.shape == (4, 10)
    for b in range(4):
        at_q, at_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected = loops(q[None, at_q], k[None, at_k], v[None, at_k], alibi_slopes=slopes[b], **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out[at_q], expected[0][0], **CLOSE)
        torch.testing.assert_close(lse[:, at_q], expected[1][0], **CLOSE)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_varlen_block_table_is_the_same_in_pages(page_size: int, draw: torch.Generator) -> None:
    q, k, v = randn(draw, 10, 4, 8), randn(draw, 12, 2, 8), randn(draw, 12, 2, 8)
    cu_q, cu_k = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)
    table, (k_pages, v_pages) = paged(draw, [(k, v)], cu_k, page_size)
    expected = attention_varlen_reference(q, k, v, cu_q, cu_k, causal=True)
    got = attention_varlen_reference(q, k_pages, v_pages, cu_q, cu_k, causal=True, block_table=table)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def paged(
    draw: torch.Generator, pairs: list[tuple[Tensor, Tensor]], cu_k: Tensor, page_size: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The sequences of k and v in shuffled pages, NaN wherever no token lies."""
    (k, v), lengths = pairs[0], cu_k.diff().tolist()
    per_sequence = max(-(-max(lengths) // page_size), 1) + 1
    shuffled = torch.randperm(len(lengths) * per_sequence, generator=draw)
    table = shuffled.view(len(lengths), per_sequence).int()
    pages = k.new_full((2, shuffled.numel(), page_size, *k.shape[1:]), math.nan)
    for b, length in enumerate(lengths):
        for t in range(length):
            page = table[b, t // page_size]
            pages[0, page, t % page_size], pages[1, page, t % page_size] = k[cu_k[b] + t], v[cu_k[b] + t]
    return table, (pages[0], pages[1])


def test_an_empty_batch_is_legal(draw: torch.Generator) -> None:
    nothing, zero = randn(draw, 0, 2, 8), torch.zeros(1, dtype=torch.int32)
    out, lse = attention_varlen_reference(nothing, nothing, nothing, zero, zero)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


def test_packed_forms_unpack(draw: torch.Generator) -> None:
    qkv_ = randn(draw, 2, 5, 3, 4, 8)
    expected = attention_reference(*qkv_.unbind(2), causal=True)
    assert torch.equal(attention_qkvpacked_reference(qkv_, causal=True)[0], expected[0])
    assert torch.equal(attention_kvpacked_reference(qkv_[:, :, 0], qkv_[:, :, 1:], causal=True)[1], expected[1])
    cu = cumulative((5, 5))
    flat = qkv_.flatten(0, 1)
    for got in (
        attention_varlen_qkvpacked_reference(flat, cu, causal=True),
        attention_varlen_kvpacked_reference(flat[:, 0], flat[:, 1:], cu, cu, causal=True),
    ):
        torch.testing.assert_close(got[0].view(2, 5, 4, 8), expected[0], **CLOSE)


# ---- KV cache -----------------------------------------------------------------------------------------------------


def test_kvcache_decoding_step_by_step_is_causal_attention(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 7, 7)
    expected, expected_lse = attention_reference(q, k, v, causal=True)
    k_cache, v_cache = (torch.full((2, 9, 2, 8), math.nan, dtype=torch.float64) for _ in range(2))
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        at = slice(start, stop)
        out, lse = attention_kvcache_reference(
            q[:, at], k_cache, v_cache, k[:, at], v[:, at], cache_seqlens=start, causal=True
        )
        torch.testing.assert_close(out, expected[:, at], **CLOSE)
        torch.testing.assert_close(lse, expected_lse[:, :, at], **CLOSE)
    assert torch.equal(k_cache[:, :7], k)
    assert k_cache[:, 7:].isnan().all()


def test_kvcache_leftpad_batch_idx_and_lengths(draw: torch.Generator) -> None:
    q = randn(draw, 2, 3, 4, 8)
    k_cache, v_cache = randn(draw, 2, 5, 9, 2, 8).unbind()
    k, v = randn(draw, 2, 2, 2, 2, 8).unbind()
    before = k_cache.clone()
    lengths, pads, rows = torch.tensor([4, 7]), torch.tensor([2, 0]), torch.tensor([3, 1])
    out, lse = attention_kvcache_reference(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_leftpad=pads, cache_batch_idx=rows, window_size=(2, 1)
    )
    for b in range(2):
        row, pad, length = int(rows[b]), int(pads[b]), int(lengths[b])
        assert torch.equal(k_cache[row, length : length + 2], k[b])
        k_b = torch.cat([before[row, pad:length], k[b]])[None]
        v_b = v_cache[row, pad : length + 2][None]
        expected = loops(q[b : b + 1], k_b, v_b, softmax_scale=8**-0.5, window_size=(2, 1))
        torch.testing.assert_close(out[b], expected[0][0], **CLOSE)
        torch.testing.assert_close(lse[b], expected[1][0], **CLOSE)
        before[row, length : length + 2] = k[b]
    assert torch.equal(k_cache, before), "nothing else is written"


def test_kvcache_pages_equal_a_flat_cache(draw: torch.Generator) -> None:
    lengths = torch.tensor([5, 2])
    tokens_k, tokens_v = randn(draw, 14, 2, 8), randn(draw, 14, 2, 8)
    cu = torch.tensor([0, 7, 14])
    table, (k_pages, v_pages) = paged(draw, [(tokens_k, tokens_v)], cu, 4)
    k_flat, v_flat = tokens_k.view(2, 7, 2, 8).clone(), tokens_v.view(2, 7, 2, 8).clone()
    q, k, v = randn(draw, 2, 2, 4, 8), randn(draw, 2, 2, 2, 8), randn(draw, 2, 2, 2, 8)
    flat = attention_kvcache_reference(q, k_flat, v_flat, k, v, cache_seqlens=lengths, causal=True)
    pages = attention_kvcache_reference(
        q, k_pages, v_pages, k, v, cache_seqlens=lengths, causal=True, block_table=table
    )
    for a, b in zip(pages, flat, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(k_pages[table[0, 1], 1:3], k[0])  # tokens 5 and 6 of sequence 0


def rotate_by_complex(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [seqlen, heads, dim], angles [seqlen, dim / 2]: a pair is a complex number, a rotation its product."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    back = torch.view_as_real(turned)
    return back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_product(interleaved: bool, draw: torch.Generator) -> None:
    x, angles = randn(draw, 5, 2, 8), randn(draw, 11, 3)
    positions = torch.tensor([0, 10, 3, 3, 7])
    got = apply_rotary_reference(x, angles.cos(), angles.sin(), positions, interleaved=interleaved)
    expected = rotate_by_complex(x[..., :6], angles[positions], interleaved)
    torch.testing.assert_close(got[..., :6], expected, **CLOSE)
    assert torch.equal(got[..., 6:], x[..., 6:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotary_positions(causal: bool, interleaved: bool, draw: torch.Generator) -> None:
    """New keys at their place in the cache; queries too when causal, else all at the first new place."""
    q, k, v = qkv(draw, 3, 3)
    k_cache, v_cache = randn(draw, 2, 2, 8, 2, 8).unbind()
    angles = randn(draw, 8, 4)
    lengths = torch.tensor([4, 1])
    expected_k = k_cache.clone()
    expected_q = q.clone()
    for b, n in enumerate(lengths.tolist()):
        expected_k[b, n : n + 3] = rotate_by_complex(k[b], angles[n : n + 3], interleaved)
        expected_q[b] = rotate_by_complex(q[b], angles[n : n + 3] if causal else angles[[n] * 3], interleaved)
    out, _ = attention_kvcache_reference(
        q, k_cache, v_cache, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=lengths,
        causal=causal, rotary_interleaved=interleaved,
    )  # fmt: skip
    torch.testing.assert_close(k_cache, expected_k, **CLOSE)
    for b, n in enumerate(lengths.tolist()):
        seen = slice(0, n + 3)
        expected = attention_reference(
            expected_q[b, None], expected_k[b, None, seen], v_cache[b, None, seen], causal=causal
        )
        torch.testing.assert_close(out[b], expected[0][0], **CLOSE)


def test_kvcache_refuses_to_run_past_the_cache(draw: torch.Generator) -> None:
    q, k, v = qkv(draw, 1, 1)
    cache = randn(draw, 2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"cache_seqlens.*room for 4"):
        attention_kvcache_reference(q, cache, cache.clone(), k, v, cache_seqlens=4)
