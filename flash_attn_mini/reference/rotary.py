"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864). Used by kvcache.py."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rotate each pair (a, b) of the first rotary_dim features to ``(a cos - b sin, a sin + b cos)``.

    Args:
        x: ``[seqlen, nheads, headdim]``.
        cos, sin: ``[seqlen_ro, rotary_dim / 2]``; row p is for position p.
        positions: integer ``[seqlen]``, the absolute position of each token.
        interleaved: pairs are features (0, 1), (2, 3), ... (GPT-J); otherwise (0, rotary_dim/2), ... (GPT-NeoX).

    Returns:
        ``[seqlen, nheads, headdim]`` in `dtype`; features from rotary_dim on are unchanged.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(
            f"rotary_cos of {cos.shape[-1]} columns rotates {rotary_dim} features; headdim is {x.shape[-1]}"
        )
    if positions.numel() and int(positions.max()) >= cos.shape[0]:
        raise ValueError(f"rotary_cos has {cos.shape[0]} rows; position {int(positions.max())} needs one more than it")
    x = x.to(dtype)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    c = cos.to(dtype)[positions.long()][:, None, :]  # [seqlen, 1, rotary_dim / 2]
    s = sin.to(dtype)[positions.long()][:, None, :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return torch.cat([rotated, rest], dim=-1)
