"""Sequences of different lengths, packed end to end: `attention_reference` of each sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attention import attention_reference
from .paging import read_pages


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    dropout_masks: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention within each sequence of a batch without padding.

    Args:
        q: ``[total_q, nheads, headdim]``.
        k, v: ``[total_k, nheads_k, headdim]``; with a block table ``[num_blocks, page_size, nheads_k, headdim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, rising from 0; sequence b is rows cu[b] .. cu[b + 1] - 1.
            Empty sequences are legal. With a block table cu_seqlens_k gives the lengths only.
        alibi_slopes: ``[nheads]`` or ``[batch, nheads]``.
        key_ranges: ``[1 or nheads, total_q, 2]`` or ``[..., 2, 2]``, in keys of the query's sequence.
        dropout_masks: one bool ``[nheads, seqlen_q, seqlen_k]`` per sequence, True = kept.
        block_table: int32 ``[batch, max_blocks]``; see `page_slots`.
        dtype, options: as in `attention_reference`. Masks are aligned to the end of each sequence.

    Returns:
        out ``[total_q, nheads, headdim_v]`` and lse ``[nheads, total_q]``.
    """
    spans_q = list(pairwise(cu_seqlens_q.tolist()))
    spans_k = list(pairwise(cu_seqlens_k.tolist()))
    if len(spans_q) != len(spans_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length; given {len(spans_q) + 1} and {len(spans_k) + 1}"
        )
    nheads = q.shape[1]
    outs = [v.new_zeros(0, nheads, v.shape[-1], dtype=dtype)]  # an empty batch concatenates to empty results
    lses = [q.new_zeros(nheads, 0, dtype=dtype)]
    for b, ((q_start, q_stop), (k_start, k_stop)) in enumerate(zip(spans_q, spans_k, strict=True)):
        if block_table is None:
            k_b, v_b = k[k_start:k_stop], v[k_start:k_stop]
        else:
            k_b = read_pages(k, block_table, b, 0, k_stop - k_start)
            v_b = read_pages(v, block_table, b, 0, k_stop - k_start)
        out, lse = attention_reference(
            q[q_start:q_stop][None],
            k_b[None],
            v_b[None],
            alibi_slopes=alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            key_ranges=None if key_ranges is None else key_ranges[None, :, q_start:q_stop],
            dropout_mask=None if dropout_masks is None else dropout_masks[b][None],
            dtype=dtype,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)
