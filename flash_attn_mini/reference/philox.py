"""Dropout: the probabilities to drop, as one function of (seed, offset, sequence, head, query, key).

The function is the same on every backend and for all tile sizes: csrc/common/philox.h has it for C++ and CUDA, this
file for the tests. Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
maps a counter to random bits. Seven rounds are the fewest that pass every test of the paper, and as many as flash-attn
has. Any bits can be computed at any time, so the backward computes those of the forward again.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as the paper has them
WORD = 0xFFFFFFFF  # 32 bits. Words are int64: the low 64 bits of a product of two words are exact

TILE = 16  # queries and keys of one tile of counters


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors of words below 2^32, broadcast against each other.
        key: two words.

    Returns:
        Four int64 tensors of words below 2^32.

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            _upper(product1) ^ x1 ^ key0,
            product1 & WORD,
            _upper(product0) ^ x3 ^ key1,
            product0 & WORD,
        )
        key0, key1 = (key0 + KEY_STEPS[0]) & WORD, (key1 + KEY_STEPS[1]) & WORD
    return x0, x1, x2, x3


def _upper(product: Tensor) -> Tensor:
    return (product >> 32) & WORD


def dropout_threshold(dropout_p: float) -> int:
    """A probability is dropped when its 16 random bits are below this: ``dropout_p`` to the next 2^-16."""
    return math.floor(dropout_p * 65536 + 0.5)


def random_bits(rng_state: Tensor | tuple[int, int], heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The 16 random bits of each (query, key).

    A counter gives the bits of eight pairs, those that one thread holds in the accumulator of a tensor-core product: in
    a tile of 16 x 16 queries and keys, the queries r and r + 8 and the keys 2c, 2c + 1, 2c + 8 and 2c + 9.

    Args:
        rng_state: the seed and the offset, 64 bits each, from the forward.
        heads: integers ``sequence * nheads + head``, any shape.
        seqlen_q, seqlen_k: the numbers of queries and keys.

    Returns:
        int64 ``[*heads.shape, seqlen_q, seqlen_k]``, below 2^16.
    """
    seed, offset = (int(x) for x in rng_state)
    key = (seed & WORD, (seed >> 32 & WORD) ^ (offset >> 32 & WORD))
    tiles_q, tiles_k = -(-seqlen_q // TILE), -(-seqlen_k // TILE)

    def count(stop: int, dim: int) -> Tensor:  # 0 .. stop - 1 along one of the dimensions [tile_q, r, tile_k, c]
        return torch.arange(stop, device=heads.device).reshape([-1 if d == dim else 1 for d in range(4)])

    tile_q, r, tile_k, c = count(tiles_q, 0), count(8, 1), count(tiles_k, 2), count(4, 3)
    lane = 4 * r + c
    head = heads.long().reshape(-1, 1, 1, 1, 1) & WORD
    words = philox4x32((32 * tile_q + lane, tile_k, head, torch.tensor(offset & WORD, device=heads.device)), key)

    # Word 2 * odd + far belongs to key 8 * far + 2c + odd, its lower half to query r, its upper half to query r + 8.
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    halves = halves.unflatten(-1, (2, 2, 2))  # [head, tile_q, r, tile_k, c, odd, far, half]
    bits: Tensor = halves.permute(0, 1, 7, 2, 3, 6, 4, 5)  # [head, tile_q, half, r, tile_k, far, c, odd]
    bits = bits.reshape(*heads.shape, tiles_q * TILE, tiles_k * TILE)
    return bits[..., :seqlen_q, :seqlen_k]


def dropout_mask(
    rng_state: Tensor | tuple[int, int],
    dropout_p: float,
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """The probabilities that dropout keeps: the ``dropout_mask`` of `attention_reference`.

    Args:
        rng_state: int64 ``[2]``, the seed and the offset from the forward; or a pair of integers.
        dropout_p: probability of dropping.

    Returns:
        bool ``[batch, nheads, seqlen_q, seqlen_k]``, True = kept.

    >>> dropout_mask((42, 0), 0.5, 1, 1, 3, 5).int()
    tensor([[[[1, 1, 1, 1, 0],
              [0, 1, 1, 0, 0],
              [0, 1, 0, 0, 0]]]], dtype=torch.int32)
    """
    heads = torch.arange(batch * nheads, device=device).reshape(batch, nheads)
    return random_bits(rng_state, heads, seqlen_q, seqlen_k) >= dropout_threshold(dropout_p)


def dropout_masks_varlen(
    rng_state: Tensor | tuple[int, int], dropout_p: float, nheads: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> list[Tensor]:
    """`dropout_mask` of each sequence of a varlen batch, bool ``[nheads, seqlen_q, seqlen_k]``.

    Queries and keys count within their sequence, so a sequence has the mask that it has in a padded batch.
    """
    lengths = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    masks = []
    for bidb, ((q_start, q_stop), (k_start, k_stop)) in enumerate(lengths):
        heads = bidb * nheads + torch.arange(nheads, device=cu_seqlens_q.device)
        bits = random_bits(rng_state, heads, q_stop - q_start, k_stop - k_start)
        masks.append(bits >= dropout_threshold(dropout_p))
    return masks
