"""flash_attn_with_kvcache: decoding with a KV cache. The public function checks types and enters the op (ops.py).

csrc/api/checks.cpp checks values, shapes and dtypes, for every backend. `flash_attn_mini.reference` defines the result.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops, tracing
from .argument_checks import WindowSize, as_flag, as_integer, check_tensor, checked_options
from .backends import chosen_backend, extension
from .options import KvCache


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    split_keys: int = 0,
    learnable_sink: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries over a KV cache; with k and v, the new keys and values are first written to the cache.

    One call does the work of a decoding step: it rotates q and k, writes k and v in place behind the keys that the
    cache holds, and attends to all of them. Every other byte of the caches stays as it was. The keys of a row may be
    split among thread blocks, whose results are then combined (Flash-Decoding, Dao et al., 2023).

    Nothing waits for the GPU: only the kernels read the tensors of lengths, rows, paddings and pages. The exception is
    a 0-d CUDA tensor where a number is expected, cache_seqlens for example: the host reads it. A call captured in a
    CUDA graph reads the tensors anew in each replay. They are checked on the host for CPU tensors, and on a GPU if
    FLASH_ATTN_MINI_CHECK=1. Without that check, wrong values on a GPU give wrong rows, and no access outside of the
    tensors: new keys that do not fit are dropped.

    Args:
        q: Queries, ``[batch, seqlen_q, nheads, headdim]``; headdim 1 to 576; the last dimension contiguous. float16 or
            bfloat16; on the ``triton`` backend also float32, on ``cpu`` also float32 and float64. The ``cuda`` backend
            has head dims up to 256.
        k_cache: ``[batch_cache, capacity, nheads_k, headdim]``, or with a block_table ``[num_pages, page_size,
            nheads_k, headdim]``; dtype and device of q, any strides with a contiguous last dimension. nheads is a
            multiple of nheads_k. Never copied.
        v_cache: Like k_cache, with a head dim of its own, headdim_v, 1 to 512. The ``cuda`` backend needs that of q.
            With another one, CUDA tensors take ``triton`` by default.
        k: New keys, ``[batch, seqlen_new, nheads_k, headdim]``, which need v and cache_seqlens. Key i of sequence b is
            written at ``cache_seqlens[b] + i`` of its cache row. Default None: the cache is only read.
        v: New values, shaped like k, with the head dim of v_cache.
        rotary_cos: ``[positions, rotary_dim / 2]``, in the dtype of q, for at least the capacity of positions;
            rotary_dim is a multiple of 16 up to headdim. Rotates key i of sequence b at position
            ``cache_seqlens[b] + i``; and query i at ``cache_seqlens[b] + i`` if causal or with a window, else at
            ``cache_seqlens[b]``. Positions count from the start of the cache row, left padding included. Needs k and
            rotary_sin. Default None: no rotation.
        rotary_sin: Like rotary_cos.
        cache_seqlens: Keys in each cache row before this call, left padding included: int32 ``[batch]``, or one integer
            for all rows, which starts no kernel. Default None: the cache is full; k must not be given.
        cache_batch_idx: int32 ``[batch]``: the cache row of each sequence. No two are equal if k is given. Copied if
            not contiguous. Not with a block_table. Default None: row b for sequence b.
        cache_leftpad: int32 ``[batch]``: the first valid key of each cache row. Default None: 0.
        block_table: int32 ``[batch, max_pages]``: key n of sequence b is row ``n % page_size`` of page
            ``block_table[b, n // page_size]``. Any page_size from 1; the capacity is ``max_pages * page_size``. Entries
            past the last key of a sequence may hold any number. Copied if its last dimension is not contiguous. Default
            None: no pages.
        softmax_scale: Factor on the scores ``q @ k.T``. Default ``1 / sqrt(headdim)``.
        causal: Mask aligned to the bottom right of the filled cache, new keys included: the last query sees all keys.
        window_size: ``(left, right)`` in keys, -1 for unbounded, aligned like causal; see `flash_attn_func`.
        softcap: Above 0, scores become ``softcap * tanh(score / softcap)`` after the scale.
        rotary_interleaved: Rotate features 2i and 2i + 1 together (GPT-J); if False, features i and
            i + rotary_dim / 2 (GPT-NeoX).
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``; see `flash_attn_func`.
        num_splits: The most splits of the keys of a row. 0 lets the kernels choose from the lengths that they find; 1
            gives the bits that `flash_attn_varlen_func` gives for the same keys (with a block_table for the same
            pages; on ``cuda`` for q and caches whose rows begin at multiples of 16 bytes).
        return_softmax_lse: Return ``(out, softmax_lse)`` in place of ``out``.
        split_keys: Split the keys of each row at multiples of this number, counted from its first valid key. The bits
            of a row then do not depend on the other rows of the batch. Default 0: off.
        learnable_sink: ``[nheads]`` or ``[batch, nheads]``, without a gradient; see `flash_attn_func`. It counts once,
            in however many splits the keys are read.
        backend: ``"cuda"``, ``"triton"`` or ``"cpu"``. Default: ``use_backend``, else FLASH_ATTN_MINI_BACKEND, else by
            the device of q.

    Numbers and flags are accepted as in `flash_attn_func`. torch.autocast casts nothing here.

    Returns:
        out, ``[batch, seqlen_q, nheads, headdim_v]`` in the dtype of q; or with ``return_softmax_lse`` also
        softmax_lse, the natural logarithm of each row's sum of exponentials, float32 (float64 for float64 inputs)
        ``[batch, nheads, seqlen_q]``. A query without a key has out 0 and softmax_lse -inf. There is no gradient: q, k
        and v may require one, and the backward then raises NotImplementedError.

    Raises:
        TypeError: For an argument of a wrong type or dtype.
        ValueError: For a wrong shape, device, stride or value; for new keys that do not fit in the cache, where the
            host knows their number; for a cache that requires a gradient.
        NotImplementedError: For a feature that the backend lacks, and under torch.vmap.
        RuntimeError: When the machine lacks what a backend needs.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 3, 1024, 2, 64)  # three rows for up to 1,024 keys
        >>> q, k, v = torch.randn(3, 1, 8, 64), torch.randn(3, 1, 2, 64), torch.randn(3, 1, 2, 64)
        >>> lengths = torch.tensor([5, 0, 700], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True).shape
        torch.Size([3, 1, 8, 64])
        >>> torch.equal(k_cache[2, 700], k[2, 0])
        True
    """
    cache_batch_idx, block_table = _contiguous(cache_batch_idx), _contiguous(block_table)
    # Arguments of the usual types enter the extension, which checks all values. Other types are converted below.
    if (
        type(softcap) is float
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(window_size) is tuple
        and len(window_size) == 2
        and type(num_splits) is type(split_keys) is int
        and type(return_softmax_lse) is bool
        and not ops.is_traced(q, k_cache, v_cache, k, v)
        and chosen_backend() is None
        and extension.MODULE is not None
        and not extension.MODULE.trace_enabled()
    ):
        lengths, length = _as_lengths(cache_seqlens) if cache_seqlens is not None else (None, -1)
        try:
            left, right = window_size
            if type(left) is type(right) is int:
                out, softmax_lse = extension.MODULE.fwd_kvcache(
                    q,
                    k_cache,
                    v_cache,
                    k,
                    v,
                    lengths,
                    rotary_cos,
                    rotary_sin,
                    cache_batch_idx,
                    cache_leftpad,
                    block_table,
                    alibi_slopes,
                    None,
                    softmax_scale,
                    causal,
                    left,
                    right,
                    softcap,
                    rotary_interleaved,
                    num_splits,
                    split_keys,
                    length,
                    backend,
                    learnable_sink,
                )
                return (out, softmax_lse) if return_softmax_lse else out
        except TypeError:  # raised again below, unless the conversion changes an argument
            pass
    options = checked_options(
        q,
        k_cache,
        v_cache,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        False,
        backend,
        learnable_sink,
        names=("q", "k_cache", "v_cache"),
    )
    for name, value in (
        ("k", k),
        ("v", v),
        ("rotary_cos", rotary_cos),
        ("rotary_sin", rotary_sin),
        ("cache_batch_idx", cache_batch_idx),
        ("cache_leftpad", cache_leftpad),
        ("block_table", block_table),
    ):
        if value is not None:
            check_tensor(name, value, ", or None")
    lengths, length = _as_lengths(cache_seqlens)
    if cache_seqlens is None and k is None:
        length = _capacity(k_cache, block_table)
    cache = KvCache(
        k,
        v,
        rotary_cos,
        rotary_sin,
        lengths,
        length,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        as_flag("rotary_interleaved", rotary_interleaved),
        as_integer("num_splits", num_splits, "an integer, 0 to let the kernels choose"),
        as_integer("split_keys", split_keys, "an integer, 0 for off"),
    )
    return_softmax_lse = as_flag("return_softmax_lse", return_softmax_lse)
    if tracing.enabled():
        tracing.trace("flash_attn_with_kvcache", q=q, k_cache=k_cache, k=k, cache_seqlens=cache_seqlens, causal=causal)
    out, softmax_lse = ops.forward_kvcache(q, k_cache, v_cache, cache, options)
    return (out, softmax_lse) if return_softmax_lse else out


def _as_lengths(cache_seqlens: Any) -> tuple[torch.Tensor | None, int]:
    """cache_seqlens as a tensor ``[batch]`` or None, and as one integer or -1. A 0-d tensor is an integer."""
    if cache_seqlens is None:
        return None, -1
    if isinstance(cache_seqlens, torch.Tensor) and (cache_seqlens.is_nested or cache_seqlens.ndim > 0):
        check_tensor("cache_seqlens", cache_seqlens)
        return cache_seqlens, -1
    length = as_integer("cache_seqlens", cache_seqlens, "an integer, an int32 tensor [batch], or None")
    if torch.compiler.is_compiling():
        torch._check(length >= 0)  # when the program runs, if the number is not known yet; -1 would mean a full cache
    elif length < 0:
        raise ValueError(f"flash_attn_mini: cache_seqlens is {length}; allowed: 0 to the capacity of the cache")
    return None, length


def _contiguous(integers: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or a copy if its last dimension is not contiguous, as the official package makes it."""
    if not isinstance(integers, torch.Tensor) or integers.ndim == 0 or integers.layout is not torch.strided:
        return integers
    if integers.stride(-1) == 1:
        return integers
    return integers.contiguous()


def _capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Keys that a row of the cache holds; -1 for tensors of a wrong rank, which csrc/api/checks.cpp names."""
    if k_cache.ndim != 4 or (block_table is not None and block_table.ndim != 2):
        return -1
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
