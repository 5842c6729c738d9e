"""The compiled extension ``flash_attn_mini._C``: the one place that spells out the official argument order.

Backends pass `Sequences` (None for sequences of equal length), `KvCache` and `Options` whole.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ..allocation import empty_contiguous_last
from ..options import KvCache, Options, Sequences

TwoTensors = tuple[torch.Tensor, torch.Tensor]
FourTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_module: ModuleType | None = None
_error: str | None = None

try:
    _module = importlib.import_module("flash_attn_mini._C")
except ImportError as error:
    _error = f"the extension flash_attn_mini._C does not load ({error}); build it with: pip install ."


def missing_reason() -> str | None:
    """None when the extension is loaded, else why not and what to do."""
    return _error


def load() -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: If it is not built or does not load.
    """
    if _module is None:
        raise RuntimeError(f"flash_attn_mini: {_error}")
    return _module


@contextlib.contextmanager
def reserved_sms(count: int) -> Iterator[None]:
    """A context in which the Hopper forwards of this thread leave ``count`` SMs to kernels of other streams.

    A forward has a CTA on each SM until it ends, so a kernel of another stream waits unless some SMs are left free.
    Kernels that split the keys of a KV cache do not read the number.
    """
    before = load().reserve_sms(count)
    try:
        yield
    finally:
        load().reserve_sms(before)


def _scalars(options: Options, *zero_tensors: bool) -> tuple[Any, ...]:
    """p_dropout to softcap in the official order; the varlen entries have zero_tensors among them."""
    return (
        options.dropout_p,
        options.softmax_scale,
        *zero_tensors,
        options.causal,
        options.window_size_left,
        options.window_size_right,
        options.softcap,
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """``_C.fwd``, or ``_C.varlen_fwd`` with sequences: (out, softmax_lse, S_dmask, rng_state)."""
    out = seqused_k = leftpad_k = generator = None
    alibi_slopes, return_softmax = options.alibi_slopes, options.return_softmax
    results: FourTensors
    if sequences is None:
        results = load().fwd(q, k, v, out, alibi_slopes, *_scalars(options), return_softmax, generator)
        return results
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences
    results = load().varlen_fwd(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        *_scalars(options, False),
        return_softmax,
        generator,
    )
    return results


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
    output_mask: Sequence[bool],
    into: Gradients = (None, None, None),
) -> FourTensors:
    """``_C.bwd``, or ``_C.varlen_bwd`` with sequences: (dq, dk, dv, softmax_d)."""
    tensors = (dout, q, k, v, out, softmax_lse, *into)
    generator = None
    rest = (options.deterministic, generator, rng_state, dsoftmax_lse, output_mask)
    results: FourTensors
    if sequences is None:
        results = load().bwd(*tensors, options.alibi_slopes, *_scalars(options), *rest)
        return results
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _ = sequences
    results = load().varlen_bwd(
        *tensors,
        cu_seqlens_q,
        cu_seqlens_k,
        options.alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        *_scalars(options, False),
        *rest,
    )
    return results


def forward_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> TwoTensors:
    """``_C.fwd_kvcache``: writes the new keys and values to the caches, then attends: (out, softmax_lse)."""
    out, softmax_lse = load().fwd_kvcache(*_kvcache_arguments(q, k_cache, v_cache, cache, options))
    return out, softmax_lse


def _kvcache_arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> tuple[Any, ...]:
    """The arguments of ``_C.fwd_kvcache``: the official ones in the official order, then two of ours."""
    out = None
    return (
        q,
        k_cache,
        v_cache,
        cache.k,
        cache.v,
        cache.cache_seqlens,
        cache.rotary_cos,
        cache.rotary_sin,
        cache.cache_batch_idx,
        cache.cache_leftpad,
        cache.block_table,
        options.alibi_slopes,
        out,
        options.softmax_scale,
        options.causal,
        options.window_size_left,
        options.window_size_right,
        options.softcap,
        cache.rotary_interleaved,
        cache.num_splits,
        cache.split_keys,
        cache.cache_seqlen,
    )


def check_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options, backend: str
) -> None:
    """Make the checks of `forward_kvcache` for ``backend``, and nothing more."""
    load().check_kvcache(*_kvcache_arguments(q, k_cache, v_cache, cache, options), backend)


def check_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options, backend: str
) -> None:
    """Make the checks of `forward` for ``backend``, and nothing more."""
    rest = (*_scalars(options), options.return_softmax, backend)
    if sequences is None:
        load().check_fwd(q, k, v, options.alibi_slopes, *rest)
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, options.alibi_slopes)
        load().check_varlen_fwd(*tensors, max_seqlen_q, max_seqlen_k, *rest)


def check_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
    backend: str,
    into: Gradients = (None, None, None),
) -> None:
    """Make the checks of `backward` for ``backend``, and nothing more."""
    tensors = (dout, q, k, v, out, softmax_lse)
    rest = (*_scalars(options), dsoftmax_lse, backend, *into, rng_state)
    if sequences is None:
        load().check_bwd(*tensors, options.alibi_slopes, *rest)
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _ = sequences
        load().check_varlen_bwd(
            *tensors, cu_seqlens_q, cu_seqlens_k, options.alibi_slopes, max_seqlen_q, max_seqlen_k, *rest
        )


def s_dmask(
    q: torch.Tensor, k: torch.Tensor, rng_state: torch.Tensor, sequences: Sequences | None, options: Options
) -> torch.Tensor:
    """``_C.s_dmask``: the S_dmask of a forward with dropout that drew rng_state."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences or (
        None,
        None,
        q.shape[1],
        k.shape[1],
        None,
    )
    result: torch.Tensor = load().s_dmask(
        q,
        k,
        rng_state,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options.alibi_slopes,
        *_scalars(options),
        block_table,
    )
    return result


def stored(result: torch.Tensor, like: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of ``result`` in the tensor that the caller gave, or in a new one like ``like``."""
    return (empty_contiguous_last(like) if into is None else into).copy_(result)
