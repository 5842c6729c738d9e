"""The references of variable length, packed forms, rotary and KV cache, compared with loops and with each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn_mini.reference import (
    apply_rotary_reference,
    attention_kvcache_reference,
    attention_kvpacked_reference,
    attention_qkvpacked_reference,
    attention_reference,
    attention_varlen_kvpacked_reference,
    attention_varlen_qkvpacked_reference,
    attention_varlen_reference,
)

from ..support.loops import CLOSE, loops, qkv, randn
from ..support.one_thread import one_thread  # noqa: F401

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
    """The sequences of k and v in shuffled pages, NaN where there is no token."""
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
    assert torch.equal(k_cache, before), "other rows of the cache are written"


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
    """New keys rotate by their position in the cache. Causal queries do too; others by the first new position."""
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
    with pytest.raises(ValueError, match=r"cache_seqlens.*allowed: 4"):
        attention_kvcache_reference(q, cache, cache.clone(), k, v, cache_seqlens=4)
