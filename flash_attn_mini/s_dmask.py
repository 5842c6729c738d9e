"""S_dmask: the mask of dropout as the signs of the probabilities, for tests.

S_dmask is as large as the scores. PyTorch's operators compute it on any device, for every backend, without a
synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .options import ROWS_MULTIPLE, Options, Sequences
from .reference.masks import in_key_ranges
from .transforms import autocast

MAX_ELEMENTS = 1 << 34  # of S_dmask: each float32 intermediate then takes 64 GiB
WORD = 0xFFFFFFFF  # 32 bits
PHILOX_ROUNDS = 7


def dropout_threshold(dropout_p: float) -> int:
    """A pair is dropped if its 16 random bits are below this: dropout_p rounded to a multiple of 2^-16."""
    return math.floor(dropout_p * 65536 + 0.5)


def s_dmask(q: Tensor, k: Tensor, rng_state: Tensor | None, sequences: Sequences | None, options: Options) -> Tensor:
    """exp(logit - largest logit of the row), negated where dropped (-0.0 too), without a gradient.

    The official package subtracts the largest logit of the key blocks that its kernel has processed so far, and its
    tests correct for this; here one block holds all keys (``_get_block_size_n`` of the interface).

    Args:
        q: As of a checked forward; its dtype is that of the result.
        k: As of the same forward.
        rng_state: int64 ``[2]``, as the forward drew it; read only with dropout.

    Returns:
        ``[batch, nheads, seqlen_q, seqlen_k]`` (varlen: the max_seqlens), both lengths rounded up to a multiple of 128;
        0 in the padding and where a query does not see a key.

    Raises:
        ValueError: For more than 2^34 elements.
    """
    nheads = q.shape[-2]
    if sequences is None:
        batch, rows, keys = q.shape[0], round_up(q.shape[1]), round_up(k.shape[1])
        has_keys = k.numel() > 0
    else:
        batch = sequences.cu_seqlens_q.shape[0] - 1
        rows, keys = round_up(sequences.max_seqlen_q), round_up(sequences.max_seqlen_k)
        has_keys = k.numel() > 0 and (sequences.block_table is None or sequences.block_table.shape[1] > 0)
    shape = (batch, nheads, rows, keys)
    if batch == 0:  # strides of 0, as contiguous ones could overflow
        return torch.empty_strided(shape, (0, 0, 0, 0), dtype=q.dtype, device=q.device)
    if batch * nheads * rows * keys > MAX_ELEMENTS:
        raise ValueError(
            f"flash_attn_mini: S_dmask has the shape [{batch}, {nheads}, {rows}, {keys}] (max_seqlen_q and "
            "max_seqlen_k, rounded up); allowed: at most 2^34 elements"
        )
    if q.numel() == 0 or not has_keys or rows == 0 or keys == 0:
        return torch.zeros(shape, dtype=q.dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        return _signed_probabilities(q.detach(), k.detach(), rng_state, sequences, options, shape)


def _signed_probabilities(
    q: Tensor,
    k: Tensor,
    rng_state: Tensor | None,
    sequences: Sequences | None,
    options: Options,
    shape: tuple[int, int, int, int],
) -> Tensor:
    batch, nheads, rows, keys = shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    indices = _SequenceIndices.of(q, k, sequences, batch, rows, keys)
    of_q = _rows_at(q, indices.index_q, wide).transpose(1, 2)  # [batch, nheads, rows, headdim]
    of_k = _rows_at(k, indices.index_k, wide).permute(0, 2, 3, 1)  # [batch, nheads_k, headdim, keys]
    groups = of_q.reshape(batch, k.shape[-2], -1, q.shape[-1])
    logits = groups.matmul(of_k).view(batch, nheads, rows, keys) * options.softmax_scale
    if options.softcap > 0:
        logits = (logits / options.softcap).tanh() * options.softcap
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.detach().to(wide).view(-1, nheads, 1, 1)
        distance = (indices.query + indices.seqlen_k - indices.seqlen_q - indices.key).abs().to(wide)
        logits = logits - slopes * distance
    visible = indices.is_visible(options)
    if options.attn_bias is not None:
        bias = _padded_bias(options.attn_bias.detach(), rows, keys)
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            logits, visible = logits + bias.to(wide), visible & (bias != -math.inf)
    hidden = ~visible
    largest = logits.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    probability = (logits - largest).exp()
    if options.dropout_p > 0:
        assert rng_state is not None
        dropped = _random_bits(rng_state, batch, nheads, rows, keys) < dropout_threshold(options.dropout_p)
        probability = torch.where(dropped, -probability, probability)
    return probability.masked_fill(hidden, 0.0).to(q.dtype)


def _padded_bias(attn_bias: Tensor, rows: int, keys: int) -> Tensor:
    """attn_bias of the rows and keys of S_dmask; any values past the end of the sequences."""
    index = [torch.arange(n, device=attn_bias.device) for n in (rows, keys)]
    of_rows = attn_bias.index_select(2, index[0].clamp(max=attn_bias.shape[2] - 1))
    padded: Tensor = of_rows.index_select(3, index[1].clamp(max=attn_bias.shape[3] - 1))
    return padded


def round_up(length: int) -> int:
    """The next multiple of 128."""
    return (length + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE


def _rows_at(x: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of ``[batch, seqlen, ...]``, ``[total, ...]`` or pages as ``[batch, rows, ...]``.

    An index past the end of a sequence gives any row; it is masked later.
    """
    flat = x.flatten(0, 1) if x.ndim == 4 else x
    in_range = index.clamp(0, flat.shape[0] - 1).flatten()
    rows: Tensor = flat.index_select(0, in_range).unflatten(0, index.shape)
    return rows.to(dtype)


@dataclass(frozen=True)
class _SequenceIndices:
    """Positions, lengths and row indices of the sequences; int64."""

    query: Tensor  # [rows, 1]: within the sequence
    key: Tensor  # [1, keys]
    seqlen_q: Tensor  # [batch, 1, 1, 1]
    seqlen_k: Tensor
    index_q: Tensor  # [batch, rows]: rows of q, its first two dimensions merged
    index_k: Tensor  # [batch, keys]
    is_equal_length: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, sequences: Sequences | None, batch: int, rows: int, keys: int
    ) -> _SequenceIndices:
        """The indices of a call. rows, keys: of S_dmask."""
        row, column = torch.arange(rows, device=q.device), torch.arange(keys, device=q.device)
        if sequences is None:
            sequence = torch.arange(batch + 1, device=q.device)
            begin_q, begin_k = sequence * q.shape[1], sequence * k.shape[1]
        else:
            begin_q, begin_k = sequences.cu_seqlens_q.long(), sequences.cu_seqlens_k.long()
        index_q, index_k = begin_q[:-1, None] + row, begin_k[:-1, None] + column
        if sequences is not None and sequences.block_table is not None:
            table, page_size = sequences.block_table, k.shape[1]
            page = table.index_select(1, (column // page_size).clamp(max=table.shape[1] - 1))
            index_k = page.long() * page_size + column % page_size
        seqlen_q, seqlen_k = begin_q.diff().view(-1, 1, 1, 1), begin_k.diff().view(-1, 1, 1, 1)
        return cls(row[:, None], column[None, :], seqlen_q, seqlen_k, index_q, index_k, sequences is None)

    def is_visible(self, options: Options) -> Tensor:
        """bool ``[batch, 1 or nheads, rows, keys]``: True where a query sees a key."""
        ahead = self.key - self.query - (self.seqlen_k - self.seqlen_q)  # keys to the right of the diagonal
        visible = (self.query < self.seqlen_q) & (self.key < self.seqlen_k)
        right = 0 if options.causal else options.window_size_right
        if right >= 0:
            visible = visible & (ahead <= right)
        if options.window_size_left >= 0:
            visible = visible & (ahead >= -options.window_size_left)
        if options.key_ranges is not None:
            visible = visible & in_key_ranges(self._ranges_of_rows(options.key_ranges), self.key.shape[1])
        return visible

    def _ranges_of_rows(self, key_ranges: Tensor) -> Tensor:
        """key_ranges of the rows of S_dmask, ``[1 or batch, 1 or nheads, rows, 2]`` or ``[..., 2, 2]``.

        Rows past the end of a sequence have any ranges.
        """
        if self.is_equal_length:
            return key_ranges.index_select(2, self.query[:, 0].clamp(max=key_ranges.shape[2] - 1))
        ranges = key_ranges.index_select(1, self.index_q.flatten().clamp(0, key_ranges.shape[1] - 1))
        of_sequences: Tensor = ranges.unflatten(1, self.index_q.shape).transpose(0, 1)
        return of_sequences


# ---- the generator of csrc/common/philox.h, in int64 ----------------------------------------------------------------


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & WORD


def _philox4x32(
    x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, key0: Tensor, key1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            _upper(product1) ^ x1 ^ key0,
            product1 & WORD,
            _upper(product0) ^ x3 ^ key1,
            product0 & WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return x0, x1, x2, x3


def _random_bits(rng_state: Tensor, batch: int, nheads: int, rows: int, keys: int) -> Tensor:
    """The 16 random bits of each (query, key): int64 ``[batch, nheads, rows, keys]``; rows, keys: multiples of 16.

    A counter gives the bits of 8 pairs; csrc/common/philox.h says which.
    """
    device = rng_state.device
    seed, offset = rng_state[0], rng_state[1]
    head = torch.arange(batch * nheads, device=device).view(-1, 1, 1)
    row = torch.arange(rows // 2, device=device).view(1, -1, 1)  # the first 8 of every 16 rows
    column = torch.arange(keys // 4, device=device).view(1, 1, -1)
    counter = row // 8 * 32 + row % 8 * 4 + column % 4
    words = _philox4x32(counter, column // 4, head & WORD, offset & WORD, seed & WORD, _upper(seed) ^ _upper(offset))

    # Words 2 * (key & 1) + (key / 8 & 1), then their halves: query / 8 & 1.
    word = torch.stack(words, -1)  # [batch * nheads, rows / 2, keys / 4, 4]
    halves = torch.stack((word & 0xFFFF, word >> 16), -1)
    halves = halves.view(batch, nheads, rows // 16, 8, keys // 16, 4, 2, 2, 2)
    # batch, head, query: 16s, 8, 1s; key: 16s, 8, pairs, 1s
    return halves.permute(0, 1, 2, 8, 3, 4, 7, 5, 6).reshape(batch, nheads, rows, keys)


def s_dmask_or_empty(
    q: Tensor, k: Tensor, rng_state: Tensor | None, sequences: Sequences | None, options: Options
) -> Tensor:
    """`s_dmask` of q and k as the call casts them, or an empty tensor without dropout, where rng_state is None."""
    q, k = autocast(q), autocast(k)
    return q.new_empty((0,)) if rng_state is None else s_dmask(q, k, rng_state, sequences, options)


def s_dmask_of_call(
    q: Tensor, k: Tensor, rng_state: Tensor, sequences: tuple[Any, ...], options: tuple[Any, ...]
) -> Tensor:
    """`s_dmask` for the extension, which passes the fields of `Sequences` and `Options`."""
    has_sequences = sequences[0] is not None
    return s_dmask_or_empty(q, k, rng_state, Sequences(*sequences) if has_sequences else None, Options(*options))
