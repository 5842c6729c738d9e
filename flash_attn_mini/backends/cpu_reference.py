"""The cpu backend of a copy of the package that cannot have the extension: the functions of ``reference``.

They compute in float64 and form the whole score matrix, so memory and time are quadratic in the sequence length. The
functions here have the arguments and the results of the Triton backend's launchers; triton/ops.py calls either.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..allocation import empty_contiguous_last
from ..options import ROWS_MULTIPLE, KvCache, Options, Sequences
from ..reference import (
    attention_kvcache_reference,
    attention_reference,
    attention_reference_backward,
    attention_varlen_reference,
    dropout_mask,
    dropout_masks_varlen,
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, rng_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse)."""
    settings = {**_settings(options), "sinks": options.learnable_sink, "dropout_p": options.dropout_p}
    masks = _dropout_masks(q, k, sequences, options, rng_state)
    if sequences is None:
        out, lse = attention_reference(q, k, v, dropout_mask=masks, **settings)
    else:
        lengths = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
        out, lse = attention_varlen_reference(
            q, k, v, *lengths, dropout_masks=masks, block_table=sequences.block_table, **settings
        )
    return _written(q, out), lse.float()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dsoftmax_lse: Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: Tensor | None,
    output_mask: Sequence[bool],
    into: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(dq, dk, dv, softmax_d), as `backward` of triton/ops.py defines them."""
    settings = {**_settings(options), "dropout_p": options.dropout_p}
    masks = _dropout_masks(q, k, sequences, options, rng_state)
    delta = torch.einsum("...ihd,...ihd->...hi", dout.double(), out.double())
    if dsoftmax_lse is not None:
        delta = delta - dsoftmax_lse
    if sequences is None:
        rows = -(-q.shape[1] // ROWS_MULTIPLE) * ROWS_MULTIPLE
        softmax_d = delta.new_zeros((*delta.shape[:-1], rows), dtype=torch.float32)
        softmax_d[..., : q.shape[1]] = delta
        tensors = (dout, q, k, v, out, softmax_lse)
        gradients = attention_reference_backward(*tensors, dsoftmax_lse, dropout_mask=masks, **settings)
    else:
        batch = sequences.cu_seqlens_q.shape[0] - 1
        rows = (q.shape[0] // ROWS_MULTIPLE + batch) * ROWS_MULTIPLE
        softmax_d = delta.new_zeros((q.shape[1], rows), dtype=torch.float32)
        gradients = (q.new_zeros(q.shape, dtype=delta.dtype), *k.new_zeros((2, *k.shape), dtype=delta.dtype))
        slopes = settings.pop("alibi_slopes")
        spans = zip(pairwise(sequences.cu_seqlens_q.tolist()), pairwise(sequences.cu_seqlens_k.tolist()), strict=True)
        for b, ((begin, end), (begin_k, end_k)) in enumerate(spans):
            of_q, of_k = slice(begin, end), slice(begin_k, end_k)
            padded = (begin // ROWS_MULTIPLE + b) * ROWS_MULTIPLE
            softmax_d[:, padded : padded + end - begin] = delta[:, of_q]
            dq_b, dk_b, dv_b = attention_reference_backward(
                dout[None, of_q],
                q[None, of_q],
                k[None, of_k],
                v[None, of_k],
                out[None, of_q],
                softmax_lse[None, :, of_q],
                None if dsoftmax_lse is None else dsoftmax_lse[None, :, of_q],
                alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
                dropout_mask=None if masks is None else masks[b][None],
                **settings,
            )
            gradients[0][of_q], gradients[1][of_k], gradients[2][of_k] = dq_b[0], dk_b[0], dv_b[0]
    dq, dk, dv = (
        None if not wanted else _written(x, gradient) if given is None else given.copy_(gradient)
        for x, gradient, wanted, given in zip((q, k, v), gradients, output_mask, into, strict=True)
    )
    return dq, dk, dv, softmax_d


def forward_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse); appends the new keys and values to the caches."""
    lengths = cache.cache_seqlens if cache.cache_seqlens is not None or cache.cache_seqlen < 0 else cache.cache_seqlen
    fields = ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table", "rotary_interleaved")
    out, lse = attention_kvcache_reference(
        q,
        k_cache,
        v_cache,
        cache.k,
        cache.v,
        cache_seqlens=lengths,
        sinks=options.learnable_sink,
        **{name: getattr(cache, name) for name in fields},
        **_settings(options),
    )
    return _written(q, out), lse.float()


def _settings(options: Options) -> dict[str, Any]:
    return {
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_size": (options.window_size_left, options.window_size_right),
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
    }


def _dropout_masks(
    q: Tensor, k: Tensor, sequences: Sequences | None, options: Options, rng_state: Tensor | None
) -> Any:
    """A mask, or a list with one for each sequence; None without dropout."""
    if options.dropout_p == 0 or rng_state is None:
        return None
    if sequences is None:
        return dropout_mask(rng_state, options.dropout_p, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    lengths = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    return dropout_masks_varlen(rng_state, options.dropout_p, q.shape[1], *lengths)


def _written(like: Tensor, result: Tensor) -> Tensor:
    return empty_contiguous_last(like).copy_(result)
