"""The values that travel through the call chain beside q, k and v: `Options` of a call and `Sequences` of a batch.

They are spelled out only where others prescribe it: in the public functions, in the schemas of the custom ops (ops.py)
and in the argument order of the official extension (backends/extension.py). All other code passes them on whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Options(NamedTuple):
    """Every option of an attention call, checked and with its defaults filled in.

    The fields have the names of the custom ops' arguments (ops.py).

    Attributes:
        dropout_p: Probability of dropping an attention probability, 0 for off.
        softmax_scale: Factor on the scores.
        causal: Mask aligned to the bottom right; window_size_right is then 0.
        window_size_left: Keys to the left that a query sees, -1 for all.
        window_size_right: Keys to the right that a query sees, -1 for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for off.
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``, or None. They get no gradient.
        return_softmax: Compute S_dmask.
        deterministic: Make the backward bitwise repeatable.
        backend: Name of the backend, or None for the usual choice.
    """

    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    return_softmax: bool = False
    deterministic: bool = False
    backend: str | None = None


class Sequences(NamedTuple):
    """Where the sequences of a variable-length batch begin. None in its place means sequences of equal length.

    The fields have the names of the varlen ops' arguments (ops.py).

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
