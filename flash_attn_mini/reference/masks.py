"""The keys that a query sees, and the distance between a query and a key. Used by `attention_scores`.

The last query has the position of the last key, as when a few new tokens attend to a long cache. Query i therefore has
the key position i + seqlen_k - seqlen_q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def query_positions(seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> Tensor:
    """The key position of each query, int64 ``[seqlen_q]``. Negative for a query before the first key."""
    return torch.arange(seqlen_q, device=device) + (seqlen_k - seqlen_q)


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    device: torch.device | str | None = None,
) -> Tensor:
    """True where query i sees key j: ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``.

    Args:
        seqlen_q, seqlen_k: numbers of queries and keys.
        causal: a query sees no key after its own position; the same as ``right = 0``, which it overrides.
        window_size: ``(left, right)``, in keys; -1 = unbounded.

    Returns:
        bool ``[seqlen_q, seqlen_k]``.

    >>> visible_keys(2, 3, causal=True).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be (left, right), each -1 (unbounded) or more; given {window_size}")
    if causal:
        right = 0
    position = query_positions(seqlen_q, seqlen_k, device)[:, None]
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    return visible


def in_key_ranges(key_ranges: Tensor, seqlen_k: int) -> Tensor:
    """True where key j is in a range ``[begin, end)`` of query i.

    Args:
        key_ranges: integers ``[1 or batch, 1 or nheads, seqlen_q, 2]``, or ``[..., 2, 2]`` for two ranges of a query.

    Returns:
        bool ``[1 or batch, 1 or nheads, seqlen_q, seqlen_k]``.
    """
    key = torch.arange(seqlen_k, device=key_ranges.device)
    ranges = key_ranges if key_ranges.dim() == 5 else key_ranges.unsqueeze(-2)
    return ((key >= ranges[..., 0, None]) & (key < ranges[..., 1, None])).any(-2)


def alibi_bias(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """ALiBi (Press et al., "Train Short, Test Long", arXiv 2108.12409): ``-slope * |i + seqlen_k - seqlen_q - j|``.

    Args:
        slopes: ``[nheads]`` or ``[batch, nheads]``.

    Returns:
        ``[1 or batch, nheads, seqlen_q, seqlen_k]`` in the dtype of `slopes`.
    """
    if slopes.dim() not in (1, 2):
        raise ValueError(f"slopes must be [nheads] or [batch, nheads]; given {list(slopes.shape)}")
    position = query_positions(seqlen_q, seqlen_k, slopes.device)[:, None]
    key = torch.arange(seqlen_k, device=slopes.device)[None, :]
    distance = (position - key).abs().to(slopes.dtype)
    per_head = slopes.reshape(-1, slopes.shape[-1], 1, 1)
    return -per_head * distance
