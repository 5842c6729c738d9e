"""Decoding with a KV cache: append the new keys and values in place, rotate, and attend to what the cache holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .attention import attention_reference
from .paging import page_slots
from .rotary import apply_rotary_reference


def attention_kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Append `k` and `v` to a KV cache that holds ``cache_seqlens`` tokens per sequence, then attend to it with `q`.

    `k_cache` and `v_cache` are written in place, in their own dtype; the attention reads the written values.

    Args:
        q: ``[batch, seqlen_q, nheads, headdim]``.
        k_cache, v_cache: ``[batch_cache, seqlen_cache, nheads_k, headdim]``, with a block table
            ``[num_blocks, page_size, nheads_k, headdim]``.
        k, v: ``[batch, seqlen_new, nheads_k, headdim]``, written to positions ``cache_seqlens .. + seqlen_new - 1``.
        rotary_cos, rotary_sin: ``[seqlen_ro, rotary_dim / 2]``. New key n is rotated at position cache_seqlens + n.
            Query i is rotated at cache_seqlens + i when causal or windowed, otherwise every query at cache_seqlens.
            Positions count from the start of the cache, left padding included. Needs `k`.
        cache_seqlens: int or int32 ``[batch]``, tokens in the cache before the call, left padding included; default:
            the capacity.
        cache_batch_idx: int32 ``[batch]``, the cache row of each sequence; default 0, 1, ...; not with a block table.
        cache_leftpad: int32 ``[batch]``, the index at which the sequence starts in its cache row; default 0.
        block_table: int32 ``[batch, max_blocks]``; see `page_slots`.
        rotary_interleaved: see `apply_rotary_reference`.
        causal, window_size, alibi_slopes, sinks, dtype, options: as in `attention_reference`, without dropout. Masks
            and ALiBi are aligned to the last key, appended ones included.

    Returns:
        out ``[batch, seqlen_q, nheads, headdim]`` and lse ``[batch, nheads, seqlen_q]``.
    """
    batch, seqlen_q, nheads, _ = q.shape
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if rotary_cos is not None and (k is None or rotary_sin is None):
        raise ValueError("rotary_cos needs rotary_sin, and the new k and v")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given when k and v are appended")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table and cache_batch_idx cannot be given together")

    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    lengths = _per_sequence(capacity if cache_seqlens is None else cache_seqlens, batch)
    starts = _per_sequence(0 if cache_leftpad is None else cache_leftpad, batch)
    cache_rows = list(range(batch)) if cache_batch_idx is None else _per_sequence(cache_batch_idx, batch)
    seqlen_new = 0 if k is None else k.shape[1]
    rotate = partial(apply_rotary_reference, interleaved=rotary_interleaved, dtype=dtype)

    out = q.new_zeros(batch, seqlen_q, nheads, v_cache.shape[-1], dtype=dtype)
    lse = q.new_zeros(batch, nheads, seqlen_q, dtype=dtype)
    for b in range(batch):
        used, total = lengths[b], lengths[b] + seqlen_new
        if total > capacity:
            raise ValueError(
                f"cache_seqlens of sequence {b} plus {seqlen_new} new tokens is {total}; allowed: {capacity}"
            )
        slots = _slots(k_cache, block_table, b, cache_rows[b], total)
        q_b = q[b].to(dtype)
        if k is not None and v is not None:
            k_new = k[b]
            if rotary_cos is not None and rotary_sin is not None:
                step = 1 if causal or window_size != (-1, -1) else 0
                at_q = used + step * torch.arange(seqlen_q, device=q.device)
                at_k = used + torch.arange(seqlen_new, device=q.device)
                q_b = rotate(q_b, rotary_cos, rotary_sin, at_q)
                k_new = rotate(k_new, rotary_cos, rotary_sin, at_k)
            new = (slots[0][used:], slots[1][used:])
            k_cache[new] = k_new.to(k_cache.dtype)
            v_cache[new] = v[b].to(v_cache.dtype)
        seen = (slots[0][starts[b] :], slots[1][starts[b] :])
        out_b, lse_b = attention_reference(
            q_b[None],
            k_cache[seen][None],
            v_cache[seen][None],
            causal=causal,
            window_size=window_size,
            alibi_slopes=alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            sinks=sinks[b] if sinks is not None and sinks.dim() == 2 else sinks,
            dtype=dtype,
            **options,
        )
        out[b], lse[b] = out_b[0], lse_b[0]
    return out, lse


def _per_sequence(value: int | Tensor, batch: int) -> list[int]:
    return [value] * batch if isinstance(value, int) else [int(x) for x in value.tolist()]


def _slots(cache: Tensor, block_table: Tensor | None, bidb: int, cache_row: int, total: int) -> tuple[Tensor, Tensor]:
    """First two indices into the cache of tokens 0 .. total-1 of a sequence: (page, row) or (cache row, token)."""
    if block_table is not None:
        return page_slots(block_table, bidb, 0, total, cache.shape[1])
    token = torch.arange(total, device=cache.device)
    return torch.full_like(token, cache_row), token
