"""The values that travel through the call chain with q, k and v: `Options`, `Sequences` and `KvCache`.

Their fields have the names and the order of the ops' arguments (csrc/api/options.h): a call passes a value on whole, as
``op(q, k, v, *sequences, *options, rng_state)``. They are spelled out only in the public functions and where the
official extension prescribes the order.
"""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import torch

# softmax_d has the rows of each sequence rounded up to this multiple, S_dmask its rows and columns. The same number is
# Flash_bwd_params::kRowsRounded in csrc/flash.h.
ROWS_MULTIPLE = 128


class Options(NamedTuple):
    """Every option of an attention call, checked and with its defaults filled in.

    Attributes:
        dropout_p: Probability of dropping an attention probability, 0 for off.
        softmax_scale: Factor on the scores.
        causal: Mask aligned to the bottom right; window_size_right is then 0.
        window_size_left: Keys to the left that a query sees, -1 for all.
        window_size_right: Keys to the right that a query sees, -1 for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for off.
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``, or None. They get no gradient.
        deterministic: Make the backward bitwise repeatable.
        backend: Name of the backend, or None: FLASH_ATTN_MINI_BACKEND, else by device.
        learnable_sink: ``[nheads]``, equal lengths also ``[batch, nheads]``, or None. It has a gradient.
        key_ranges: int32 ``[1 or batch, 1 or nheads, seqlen_q, 2]`` or ``[..., 2, 2]``, varlen ``[1 or nheads, total_q,
            2]`` or ``[..., 2, 2]``: one or two ranges of keys ``[begin, end)`` that each query sees; or None.
        attn_bias: ``[1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k]``: floating, added to the scores, with a
            gradient; or bool, True where the query sees the key; or None. Equal lengths only.
        return_max_logits: The forward also returns the largest logit of each head. The backward ignores it.
    """

    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool = False
    backend: str | None = None
    learnable_sink: torch.Tensor | None = None
    key_ranges: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None
    return_max_logits: bool = False


TENSOR_OPTIONS = [name for name, type_ in get_type_hints(Options).items() if type_ == torch.Tensor | None]
NUM_OFFICIAL_OPTIONS = Options._fields.index("backend")  # the others are ours, and come last in the extension


class Sequences(NamedTuple):
    """Where the sequences of a variable-length batch begin. None in its place means sequences of equal length.

    Attributes:
        cu_seqlens_q: int32 ``[batch + 1]``, the first row of each sequence in q, and the end of the last.
        cu_seqlens_k: int32 ``[batch + 1]``, the same for k and v.
        max_seqlen_q: Queries of the longest sequence.
        max_seqlen_k: Keys of the longest sequence.
        block_table: int32 ``[batch, max_pages]``, the pages of each sequence, or None without pages.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor | None = None


class KvCache(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` other than q, the two caches and the options.

    Attributes:
        k: New keys ``[batch, seqlen_new, nheads_k, headdim]``, written to the cache; None: nothing is appended.
        v: New values, shaped like k.
        rotary_cos: ``[positions, rotary_dim / 2]``, or None: no rotation.
        rotary_sin: Like rotary_cos.
        cache_seqlens: int32 ``[batch]``, keys in each cache row before the call, left padding included; or None.
        cache_seqlen: The same number of keys for all rows, known to the host; -1: none. Set where cache_seqlens is None
            unless the call has k.
        cache_batch_idx: int32 ``[batch]``, the cache row of each sequence, or None: its own number.
        cache_leftpad: int32 ``[batch]``, the first valid key of each row, or None: 0.
        block_table: int32 ``[batch, max_pages]``, the pages of each sequence, or None: no pages.
        rotary_interleaved: Features 2i and 2i + 1 are a pair; else i and i + rotary_dim / 2.
        num_splits: The most splits of a row's keys; 0: chosen by the backend.
        split_keys: Keys of every split but a row's last; 0: chosen by the backend.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    cache_seqlen: int
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    block_table: torch.Tensor | None
    rotary_interleaved: bool
    num_splits: int
    split_keys: int
