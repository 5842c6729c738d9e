"""The reference as the implementation of CPU calls where the extension is not built. No call can ask for it by name.

The functions have the arguments and results of the Triton launchers (backends/triton/launch.py), and the same ops call
them. They run in PyTorch's operators and form the whole score matrix.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..allocation import empty_contiguous_last, empty_max_logits, empty_out, lse_dtype
from ..options import ROWS_MULTIPLE, KvCache, Options, Sequences
from . import extension

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Part(NamedTuple):
    """What `attention_reference` computes at once: all sequences of equal length, or one of a variable-length batch."""

    rows: slice  # of q
    padded_rows: slice  # of softmax_d
    k: Tensor  # [batch, keys, nheads_k, headdim]
    v: Tensor
    keys: slice  # of k and v; not with pages
    options: dict[str, Any]  # of attention_reference and attention_reference_backward


@functools.cache
def warn_once() -> None:
    """Say what is missing, at the first call of the process."""
    warnings.warn(
        "flash_attn_mini: CPU tensors take the reference, which is slow and stores seqlen_q * seqlen_k scores for each "
        f"head: {extension.missing_reason()}",
        stacklevel=2,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, softmax_lse, max_logits or None) of checked arguments."""
    warn_once()
    out, softmax_lse, max_logits = empty_out(q, v), _empty_rows(q, q.shape[-3]), empty_max_logits(q, options)
    of_q, of_out, of_lse = (_as_batch(x, sequences) for x in (q, out, softmax_lse))
    if max_logits is not None:
        max_logits.fill_(-math.inf)
    for part in _parts(q, k, v, sequences, options, rng_state):
        of_out[:, part.rows], of_lse[..., part.rows] = reference.attention_reference(
            of_q[:, part.rows], part.k, part.v, sinks=options.learnable_sink, **part.options
        )
        if max_logits is not None:
            of_scores = {name: x for name, x in part.options.items() if not name.startswith("dropout")}
            of_part = reference.attention_max_logits(of_q[:, part.rows], part.k, **of_scores)
            torch.maximum(max_logits, of_part.view_as(max_logits).to(max_logits.dtype), out=max_logits)
    return out, softmax_lse, max_logits


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
    rng_state: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    into: Gradients = (None, None, None),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(dq, dk, dv, softmax_d) of checked arguments. A gradient that output_mask leaves out is None."""
    rows = q.shape[-3]
    if sequences is None:
        rows = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    else:
        rows = (rows // ROWS_MULTIPLE + sequences.cu_seqlens_q.shape[0] - 1) * ROWS_MULTIPLE
    softmax_d = _empty_rows(q, rows).zero_()
    gradients = [
        (empty_contiguous_last(x) if given is None else given) if wanted else None
        for x, wanted, given in zip((q, k, v), output_mask, into, strict=True)
    ]
    of_gradients = [None if x is None else _as_batch(x.zero_(), sequences) for x in gradients]
    of_dout, of_q, of_out, of_lse, of_softmax_d = (
        _as_batch(x, sequences) for x in (dout, q, out, softmax_lse, softmax_d)
    )
    of_dlse = torch.zeros_like(of_lse) if dsoftmax_lse is None else _as_batch(dsoftmax_lse, sequences)
    for part in _parts(q, k, v, sequences, options, rng_state):
        dout_, q_, out_ = (x[:, part.rows] for x in (of_dout, of_q, of_out))
        lse, dlse = of_lse[..., part.rows], of_dlse[..., part.rows]
        found = reference.attention_reference_backward(dout_, q_, part.k, part.v, out_, lse, dlse, **part.options)
        for to, gradient, where in zip(of_gradients, found, (part.rows, part.keys, part.keys), strict=True):
            if to is not None:
                to[:, where] = gradient
        wide = part.options["dtype"]
        of_softmax_d[..., part.padded_rows] = (dout_.to(wide) * out_.to(wide)).sum(-1).transpose(1, 2) - dlse
    dq, dk, dv = gradients
    return dq, dk, dv, softmax_d


def bias_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    options: Options,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The gradient of attn_bias of checked arguments."""
    attn_bias = options.attn_bias
    assert attn_bias is not None
    (part,) = _parts(q, k, v, None, options, rng_state)
    delta = softmax_d[..., : q.shape[1]]
    found = reference.attn_bias_reference_backward(dout, q, part.k, part.v, softmax_lse, delta, **part.options)
    return found.to(attn_bias.dtype)


def forward_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of checked arguments; writes the new keys and values to the caches."""
    warn_once()
    length = None if cache.cache_seqlen == -1 else cache.cache_seqlen
    of_reference = _options_of(options, q)
    del of_reference["dropout_p"]
    out, softmax_lse = reference.attention_kvcache_reference(
        *(q, k_cache, v_cache, cache.k, cache.v),
        rotary_cos=cache.rotary_cos,
        rotary_sin=cache.rotary_sin,
        cache_seqlens=length if cache.cache_seqlens is None else cache.cache_seqlens,
        cache_batch_idx=cache.cache_batch_idx,
        cache_leftpad=cache.cache_leftpad,
        block_table=cache.block_table,
        rotary_interleaved=cache.rotary_interleaved,
        sinks=options.learnable_sink,
        **of_reference,
    )
    return empty_out(q, v_cache).copy_(out), softmax_lse.to(lse_dtype(q))


def _parts(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, rng_state: Tensor | None
) -> Iterator[_Part]:
    of_reference, p, nheads = _options_of(options, q), options.dropout_p, q.shape[-2]
    key_ranges = options.key_ranges
    if sequences is None:
        of_reference.update(key_ranges=key_ranges, attn_bias=options.attn_bias)
        if rng_state is not None and p > 0:
            mask = reference.dropout_mask(rng_state, p, q.shape[0], nheads, q.shape[1], k.shape[1])
            of_reference["dropout_mask"] = mask
        yield _Part(slice(None), slice(q.shape[1]), k, v, slice(None), of_reference)
        return
    cu_seqlens_q, cu_seqlens_k, _, _, block_table = sequences
    masks = None
    if rng_state is not None and p > 0:
        masks = reference.dropout_masks_varlen(rng_state, p, nheads, cu_seqlens_q, cu_seqlens_k)
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for bidb, ((begin, end), (k_begin, k_end)) in enumerate(spans):
        keys = slice(k_begin, k_end)
        if block_table is None:
            of_k, of_v = k[keys], v[keys]
        else:
            of_k, of_v = (reference.read_pages(x, block_table, bidb, 0, k_end - k_begin) for x in (k, v))
        own = dict(of_reference)
        if masks is not None:
            own["dropout_mask"] = masks[bidb][None]
        if options.alibi_slopes is not None and options.alibi_slopes.ndim == 2:
            own["alibi_slopes"] = options.alibi_slopes[bidb]
        if key_ranges is not None:
            own["key_ranges"] = key_ranges[None, :, begin:end]
        padded = (begin // ROWS_MULTIPLE + bidb) * ROWS_MULTIPLE
        yield _Part(slice(begin, end), slice(padded, padded + end - begin), of_k[None], of_v[None], keys, own)


def _options_of(options: Options, q: Tensor) -> dict[str, Any]:
    return {
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_size": (options.window_size_left, options.window_size_right),
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "dropout_p": options.dropout_p,
        "dtype": torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else torch.float64,
    }


def _as_batch(x: Tensor, sequences: Sequences | None) -> Tensor:
    return x if sequences is None else x[None]


def _empty_rows(q: Tensor, rows: int) -> Tensor:
    """``[batch, nheads, rows]``; with sequences ``[nheads, rows]``."""
    *batch, _, nheads, _ = q.shape
    return q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))
