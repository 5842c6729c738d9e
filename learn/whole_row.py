"""Rung 2, the tempting scheme: keep a whole row of scores on chip, and take its softmax at once.

It writes no scores to memory and needs no running maximum. But the scores of a block of queries take 4 * block_m bytes
for each key, and an SM has 99 to 227 KB of shared memory: the scheme ends at a few hundred keys.
"""

from __future__ import annotations

import math

import torch

DEFAULT_LIMIT = 99 * 1024  # bytes of shared memory of a thread block on a GPU of compute capability 8.6 or 8.9
BLOCK = 64  # queries, and keys of a tile of K or V
FLOAT_BYTES = 4


def on_chip_bytes(seqlen_k: int, headdim: int, itemsize: int) -> dict[str, int]:
    """Bytes of shared memory by what they hold: a tile of Q, one of K or V, and the scores of 64 whole rows."""
    return {
        "tile of q": BLOCK * headdim * itemsize,
        "tile of k or v": BLOCK * headdim * itemsize,
        "scores": BLOCK * seqlen_k * FLOAT_BYTES,
    }


def most_keys(headdim: int, itemsize: int, limit: int = DEFAULT_LIMIT) -> int:
    """The largest number of keys whose scores fit on chip."""
    tiles = sum(on_chip_bytes(0, headdim, itemsize).values())
    return max(0, limit - tiles) // (BLOCK * FLOAT_BYTES)


def whole_row_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, limit: int = DEFAULT_LIMIT
) -> torch.Tensor:
    """Attention with whole rows of scores on chip; the shared memory is simulated.

    Args:
        q: ``[..., seqlen_q, headdim]``, any floating dtype.
        k: ``[..., seqlen_k, headdim]``.
        v: ``[..., seqlen_k, headdim]``.
        limit: Bytes of shared memory of a thread block.

    Returns:
        out like q.

    Raises:
        MemoryError: If the tiles and the scores of 64 queries take more than ``limit`` bytes.
    """
    seqlen_k, headdim = k.shape[-2:]
    needed = on_chip_bytes(seqlen_k, headdim, q.element_size())
    total = sum(needed.values())
    if total > limit:
        parts = ", ".join(f"{name} {size:,}" for name, size in needed.items())
        raise MemoryError(
            f"whole_row_attention: {seqlen_k} keys need {total:,} bytes of shared memory ({parts}); "
            f"allowed: {limit:,} bytes, {most_keys(headdim, q.element_size(), limit)} keys"
        )
    out = torch.empty_like(q)
    for start_m in range(0, q.shape[-2], BLOCK):  # on a GPU: one thread block each
        q_tile = q[..., start_m : start_m + BLOCK, :].float()
        scores = q_tile.new_empty(*q_tile.shape[:-1], seqlen_k)  # in shared memory
        for start_n in range(0, seqlen_k, BLOCK):
            k_tile = k[..., start_n : start_n + BLOCK, :].float()
            scores[..., start_n : start_n + BLOCK] = q_tile @ k_tile.mT / math.sqrt(headdim)
        p = torch.softmax(scores, dim=-1)
        acc = torch.zeros_like(q_tile)
        for start_n in range(0, seqlen_k, BLOCK):
            acc += p[..., start_n : start_n + BLOCK] @ v[..., start_n : start_n + BLOCK, :].float()
        out[..., start_m : start_m + BLOCK, :] = acc.to(q.dtype)
    return out
