"""Every check of the arguments of a call, for environments without the compiled extension.

With the extension csrc/api/checks.cpp, csrc/api/key_ranges.cpp, csrc/api/attn_bias.cpp and csrc/api/checks_kvcache.cpp
check every call of every backend. The checks here are the same: in the same order, with the same exception types and
texts. A failed check names the argument, what was given and what is allowed. cu_seqlens, block_table and the like are
read on the CPU; on a GPU only with FLASH_ATTN_MINI_CHECK=1, as reading them waits for the GPU. key_ranges are read only
with FLASH_ATTN_MINI_CHECK=1.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import Tensor

from ...allocation import lse_dtype
from ...options import ROWS_MULTIPLE, KvCache, Options, Sequences

DTYPES = {
    "triton": (torch.float16, torch.bfloat16, torch.float32),
    "reference": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
MAX_HEAD_DIM = 256
MAX_INT = 2**31 - 1
MAX_ROWS = MAX_INT // 4  # rows of a tensor: no distance of two positions overflows in a kernel


def check_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, backend: str = "triton"
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the backend can run the forward."""
    _check_inputs(q, k, v, sequences, backend)
    _check_options(q, _batch_of(q, sequences), options)
    _check_key_ranges(q, k, sequences, options.key_ranges)
    _check_attn_bias(q, k, sequences, options.attn_bias)


def check_backward(
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
    into: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    backend: str = "triton",
) -> None:
    """The same for the backward. ``into``: the tensors that receive dq, dk and dv, None for new ones."""
    _check_inputs(q, k, v, sequences, backend)
    for name, x in (("dout", dout), ("out", out)):
        _check_same_kind(name, x, q)
        _check_same_shape(name, x, "q", q)
    _check_lse("softmax_lse", softmax_lse, q, sequences)
    if dsoftmax_lse is not None:
        _check_lse("dsoftmax_lse", dsoftmax_lse, q, sequences)
    read = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)]
    for name, given, (like_name, like) in zip(("dq", "dk", "dv"), into, read, strict=False):
        if given is None:
            continue
        _check_written(name, given, like_name, like, q)
        for other_name, other in read:
            if _shares_memory(given, other):
                raise ValueError(f"{name} shares memory with {other_name}; allowed: memory of its own")
        read.append((name, given))  # gradients share no memory with each other
    _check_options(q, _batch_of(q, sequences), options)
    _check_key_ranges(q, k, sequences, options.key_ranges)
    _check_attn_bias(q, k, sequences, options.attn_bias)
    check_rng_state(rng_state, options.dropout_p, q)


def check_attn_bias_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    options: Options,
    rng_state: Tensor | None,
    backend: str = "triton",
) -> None:
    """The same for the gradient of attn_bias."""
    check_forward(q, k, v, None, options, backend)
    if options.attn_bias is None:
        raise ValueError("attn_bias is None; allowed: a tensor")
    if not options.attn_bias.is_floating_point():
        raise TypeError(
            f"attn_bias has dtype {_dtype(options.attn_bias)}; allowed where its gradient is wanted: a floating dtype"
        )
    _check_same_kind("dout", dout, q)
    _check_same_shape("dout", dout, "q", q)
    batch, rows, nheads, _ = q.shape
    padded = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    for name, x, size in (("softmax_lse", softmax_lse, rows), ("softmax_d", softmax_d, padded)):
        _check_lse_dtype(name, x, q)
        if _shape(x) != [batch, nheads, size]:
            raise ValueError(f"{name} has shape {_shape(x)}; allowed: {[batch, nheads, size]}")
    check_rng_state(rng_state, options.dropout_p, q)


def check_rng_state(rng_state: Tensor | None, dropout_p: float, q: Tensor) -> None:
    """Raise unless the backward can read rng_state; without dropout it does not."""
    if dropout_p == 0:
        return
    if rng_state is None:
        raise ValueError(
            f"rng_state is None and dropout_p {dropout_p:g}; "
            "allowed with dropout: the rng_state that the forward returned"
        )
    if rng_state.dtype != torch.int64:
        raise TypeError(f"rng_state has dtype {_dtype(rng_state)}; allowed: int64")
    if rng_state.shape != (2,):
        raise ValueError(
            f"rng_state has shape {_shape(rng_state)}; allowed with dropout: [2], as the forward returned it"
        )
    _check_same_device("rng_state", rng_state, q)


# ---- q, k, v and the sequences --------------------------------------------------------------------------------------


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, backend: str) -> None:
    _check_dtype("q", q, backend)
    _check_same_kind("k", k, q)
    _check_same_kind("v", v, q)
    if sequences is None:
        _check_dense_shapes(q, k, v)
    else:
        _check_varlen_shapes(q, k, v, is_paged=sequences.block_table is not None)
    _check_heads(q, "k", k, "v", v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_last_dim_contiguous(name, x)
    if sequences is not None:
        _check_sequences(q, k, sequences)


def _check_dense_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_rank("q", q, 4, "[batch, seqlen_q, nheads, headdim]")
    for name, x in (("k", k), ("v", v)):
        _check_rank(name, x, 4, "[batch, seqlen_k, nheads_k, headdim]")
    _check_same_size("k", k, "q", q, 0, "batch")
    _check_same_size("v", v, "q", q, 0, "batch")
    _check_at_most("q", q, 0, MAX_INT, "batch")
    _check_same_size("v", v, "k", k, 1, "seqlen")
    _check_at_most("q", q, 1, MAX_ROWS, "seqlen")
    _check_at_most("k", k, 1, MAX_ROWS, "seqlen")


def _check_varlen_shapes(q: Tensor, k: Tensor, v: Tensor, *, is_paged: bool) -> None:
    _check_rank("q", q, 3, "[total_q, nheads, headdim]")
    shape = "[num_pages, page_size, nheads_k, headdim]" if is_paged else "[total_k, nheads_k, headdim]"
    for name, x in (("k", k), ("v", v)):
        _check_rank(name, x, 4 if is_paged else 3, shape)
    if is_paged:
        _check_same_size("v", v, "k", k, 0, "num_pages")
    rows = "page_size" if is_paged else "total_k"
    _check_same_size("v", v, "k", k, -3, rows)
    _check_at_most("q", q, 0, MAX_ROWS, "total_q")
    _check_at_most("k", k, -3, MAX_ROWS, rows)


def _check_heads(q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    nheads, headdim = q.shape[-2:]
    nheads_k = k.shape[-2]
    if not 1 <= headdim <= MAX_HEAD_DIM:
        raise ValueError(f"q has headdim {headdim} (shape {_shape(q)}); allowed: 1 to {MAX_HEAD_DIM}")
    _check_same_size(k_name, k, "q", q, -1, "headdim")
    _check_same_size(v_name, v, "q", q, -1, "headdim")
    if v.shape[-2] != nheads_k:
        raise ValueError(
            f"{v_name} has {v.shape[-2]} heads (shape {_shape(v)}); allowed: the heads of {k_name}, {nheads_k}"
        )
    if nheads < 1:
        raise ValueError(f"q has 0 heads (shape {_shape(q)}); allowed: at least 1")
    if nheads_k < 1:
        raise ValueError(f"{k_name} has 0 heads (shape {_shape(k)}); allowed: at least 1")
    if nheads % nheads_k != 0:
        raise ValueError(
            f"q has {nheads} heads and {k_name} has {nheads_k}; allowed: nheads of q a multiple of nheads of {k_name}"
        )
    _check_at_most("q", q, -2, MAX_INT, "heads")


def _check_lse_dtype(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != lse_dtype(q):
        allowed = "Double" if q.dtype == torch.float64 else "Float"
        raise TypeError(f"{name} has dtype {_dtype(x)}; allowed: {allowed} for inputs of {_dtype(q)}")
    _check_same_device(name, x, q)


def _check_lse(name: str, x: Tensor, q: Tensor, sequences: Sequences | None) -> None:
    _check_lse_dtype(name, x, q)
    if sequences is None:
        form, shape = "[batch, nheads, seqlen_q]", [q.shape[0], q.shape[2], q.shape[1]]
    else:
        form, shape = "[nheads, total_q]", [q.shape[1], q.shape[0]]
    if _shape(x) != shape:
        raise ValueError(f"{name} has shape {_shape(x)}; allowed: {form} = {shape}")


def _check_sequences(q: Tensor, k: Tensor, sequences: Sequences) -> None:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_index(name, x, q)
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} has shape {_shape(x)}; allowed: [batch + 1], one dimension of at least 1")
        _check_contiguous(name, x)
    _check_same_shape("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not 0 <= length <= MAX_INT:
            raise ValueError(f"{name} is {length}; allowed: 0 to {MAX_INT}")
    if block_table is not None:
        _check_block_table(block_table, "k", k, q, cu_seqlens_q.shape[0] - 1)
    if _may_read(q):
        _check_cu_seqlens_values("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        _check_cu_seqlens_values("k", cu_seqlens_k, None if block_table is not None else k.shape[0], max_seqlen_k)
        if block_table is not None:
            _check_block_table_values(block_table, cu_seqlens_k, k)


def _check_cu_seqlens_values(side: str, cu_seqlens: Tensor, rows: int | None, max_seqlen: int) -> None:
    """cu_seqlens of ``side`` starts at 0, never falls, and ends at ``rows``; no sequence is longer than max_seqlen."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens_{side} starts at {values[0]}; allowed: 0")
    for i, (begin, end) in enumerate(pairwise(values)):
        if end < begin:
            raise ValueError(
                f"cu_seqlens_{side} falls from {begin} to {end} at index {i + 1}; allowed: values that never fall"
            )
        if end - begin > max_seqlen:
            raise ValueError(
                f"max_seqlen_{side} is {max_seqlen}; allowed: at least the length of every sequence; sequence {i} has "
                f"length {end - begin}"
            )
    if rows is not None and values[-1] != rows:
        raise ValueError(f"cu_seqlens_{side} ends at {values[-1]}; allowed: the rows of {side}, {rows}")


def _check_block_table_values(block_table: Tensor, cu_seqlens_k: Tensor, k: Tensor) -> None:
    """Every page that holds a key of a sequence is in the pool."""
    num_pages, page_size, columns = k.shape[0], k.shape[1], block_table.shape[1]
    lengths = [end - begin for begin, end in pairwise(cu_seqlens_k.tolist())]
    for bidb, (pages, length) in enumerate(zip(block_table.tolist(), lengths, strict=True)):
        if length > columns * page_size:
            raise ValueError(
                f"block_table has {columns} pages of {page_size} keys for each sequence; allowed: enough for every "
                f"sequence, sequence {bidb} has {length} keys"
            )
        for column in range(-(-length // page_size)):
            _check_page(pages[column], bidb, column, num_pages)


# ---- options --------------------------------------------------------------------------------------------------------


def _batch_of(q: Tensor, sequences: Sequences | None) -> int:
    return int(q.shape[0] if sequences is None else sequences.cu_seqlens_q.shape[0] - 1)


def _check_options(q: Tensor, batch: int, options: Options) -> None:
    if options.alibi_slopes is not None:
        _check_alibi_slopes(options.alibi_slopes, q, batch)
    if options.learnable_sink is not None:
        _check_learnable_sink(options.learnable_sink, q, batch)
    _check_scalars(options)


def _check_learnable_sink(sink: Tensor, q: Tensor, batch: int) -> None:
    if sink.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"learnable_sink has dtype {_dtype(sink)}; allowed: float32 or that of q, {_dtype(q)}")
    _check_same_device("learnable_sink", sink, q)
    nheads, is_varlen = q.shape[-2], q.ndim == 3
    if _shape(sink) != [nheads] and (is_varlen or _shape(sink) != [batch, nheads]):
        or_per_batch = "" if is_varlen else f" or [batch, nheads] = {[batch, nheads]}"
        raise ValueError(f"learnable_sink has shape {_shape(sink)}; allowed: [nheads] = {[nheads]}{or_per_batch}")


def _check_alibi_slopes(slopes: Tensor, q: Tensor, batch: int) -> None:
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {_dtype(slopes)}; allowed: float32")
    _check_same_device("alibi_slopes", slopes, q)
    nheads = q.shape[-2]
    if _shape(slopes) not in ([nheads], [batch, nheads]):
        raise ValueError(
            f"alibi_slopes has shape {_shape(slopes)}; allowed: [nheads] = {[nheads]} or [batch, nheads] = "
            f"{[batch, nheads]}"
        )
    if slopes.stride(-1) != 1 and slopes.shape[-1] != 1:
        raise ValueError(
            f"alibi_slopes has strides {list(slopes.stride())}; allowed: a contiguous last dimension (stride 1), for "
            "example alibi_slopes.contiguous()"
        )


def _check_scalars(options: Options) -> None:
    for side, size in (("left", options.window_size_left), ("right", options.window_size_right)):
        if size < -1:
            raise ValueError(f"window_size has {side} {size}; allowed: -1 (unbounded) or at least 0 keys")
    scale, softcap, dropout_p = options.softmax_scale, options.softcap, options.dropout_p
    if not _is_in_range(scale):
        raise ValueError(
            f"softmax_scale is {scale:g}; allowed: 0, a finite number of magnitude {MIN_FACTOR:g} to {MAX_FACTOR:g}, "
            "or None for 1/sqrt(headdim)"
        )
    if not (softcap >= 0 and _is_in_range(softcap)):
        raise ValueError(
            f"softcap is {softcap:g}; allowed: 0 (off) or a positive number from {MIN_FACTOR:g} to {MAX_FACTOR:g}"
        )
    if softcap != 0 and not _is_in_range(scale / softcap):
        raise ValueError(
            f"softmax_scale is {scale:g} and softcap is {softcap:g}; allowed: a quotient softmax_scale / softcap of 0 "
            f"or of magnitude {MIN_FACTOR:g} to {MAX_FACTOR:g}"
        )
    if not 0 <= dropout_p < 1 - 2**-17:  # from here on dropout_threshold says to drop all
        raise ValueError(f"dropout_p is {dropout_p:g}; allowed: at least 0 and below 1 - 2^-17")
    if softcap != 0 and dropout_p != 0:
        raise ValueError(f"softcap is {softcap:g} and dropout_p is {dropout_p:g}; allowed: one of the two, not both")


def _check_key_ranges(q: Tensor, k: Tensor, sequences: Sequences | None, key_ranges: Tensor | None) -> None:
    if key_ranges is None:
        return
    if sequences is not None and sequences.block_table is not None:
        raise NotImplementedError(
            "flash_attn_mini: key_ranges is given together with block_table; allowed: one of the two, not both"
        )
    _check_index("key_ranges", key_ranges, q)
    *leading, rows, nheads, _ = q.shape
    dims, shape = len(leading) + 2, _shape(key_ranges)
    is_right = len(shape) == dims + 1 or (len(shape) == dims + 2 and shape[dims] == 2)
    is_right = is_right and shape[-1] == 2 and shape[dims - 1] == rows and shape[dims - 2] in (1, nheads)
    if not (is_right and all(shape[0] in (1, batch) for batch in leading)):
        if sequences is not None:
            allowed = "[1 or nheads, total_q, 2] or [1 or nheads, total_q, 2, 2] with "
        else:
            allowed = (
                "[1 or batch, 1 or nheads, seqlen_q, 2] or [1 or batch, 1 or nheads, seqlen_q, 2, 2] with batch "
                f"{leading[0]}, "
            )
        name = "total_q" if sequences is not None else "seqlen_q"
        raise ValueError(f"key_ranges has shape {shape}; allowed: {allowed}nheads {nheads}, {name} {rows}")
    if not _checks_values():
        return
    if sequences is None:
        _check_range_values(key_ranges, k.shape[1], "")
        return
    spans = zip(pairwise(sequences.cu_seqlens_q.tolist()), sequences.cu_seqlens_k.diff().tolist(), strict=True)
    for bidb, ((begin, end), keys) in enumerate(spans):
        _check_range_values(key_ranges[:, begin:end], keys, f" in sequence {bidb}")


def _check_range_values(key_ranges: Tensor, keys: int, where: str) -> None:
    if key_ranges.numel() == 0:
        return
    low, high = int(key_ranges.min()), int(key_ranges.max())
    if low < 0 or high > keys:
        raise ValueError(f"key_ranges has {low if low < 0 else high}{where}; allowed: 0 to the number of keys, {keys}")


def _check_attn_bias(q: Tensor, k: Tensor, sequences: Sequences | None, attn_bias: Tensor | None) -> None:
    if attn_bias is None:
        return
    if sequences is not None:
        raise NotImplementedError(
            "flash_attn_mini: attn_bias is not supported with sequences of different lengths (cu_seqlens); available: "
            "flash_attn_func with padded sequences, or key_ranges, causal, window_size and alibi_slopes"
        )
    is_wide = q.dtype == torch.float64
    if attn_bias.dtype not in (torch.bool, q.dtype) and (is_wide or attn_bias.dtype != torch.float32):
        raise TypeError(
            f"attn_bias has dtype {_dtype(attn_bias)}; allowed: bool, {'' if is_wide else 'float32, '}or that of q, "
            f"{_dtype(q)}"
        )
    _check_same_device("attn_bias", attn_bias, q)
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, shape = k.shape[1], _shape(attn_bias)
    is_right = len(shape) == 4 and shape[3] == seqlen_k
    if not (is_right and all(n in (1, whole) for n, whole in zip(shape, (batch, nheads, seqlen_q), strict=False))):
        raise ValueError(
            f"attn_bias has shape {shape}; allowed: [1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k] with batch "
            f"{batch}, nheads {nheads}, seqlen_q {seqlen_q}, seqlen_k {seqlen_k}"
        )


# This range keeps every factor that a kernel derives from softmax_scale and softcap, and its products with q.k of
# float16 inputs, inside float32.
MIN_FACTOR, MAX_FACTOR = 1e-20, 1e20


def _is_in_range(x: float) -> bool:
    return x == 0 or MIN_FACTOR <= abs(x) <= MAX_FACTOR  # False for NaN


# ---- the KV cache ---------------------------------------------------------------------------------------------------


def check_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options, backend: str = "triton"
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the backend can run flash_attn_with_kvcache."""
    _check_dtype("q", q, backend)
    batch = _check_cache_shapes(q, k_cache, v_cache, cache)
    _check_rows(q, k_cache, cache, batch)
    _check_new_keys(q, k_cache, cache)
    _check_lengths(q, k_cache, cache, batch)
    _check_rotary(q, k_cache, cache, options)
    _check_splits(cache)
    _check_options(q, batch, options)
    if options.return_max_logits:
        raise NotImplementedError(
            "flash_attn_mini: no backend implements return_max_logits with a KV cache; backends that have it: none. "
            "Available: flash_attn_func"
        )
    if options.key_ranges is not None:
        raise NotImplementedError(
            "flash_attn_mini: key_ranges is not supported with a KV cache; available: flash_attn_func, or causal, "
            "window_size and cache_leftpad"
        )
    if options.attn_bias is not None:
        raise NotImplementedError(
            "flash_attn_mini: attn_bias is not supported with a KV cache; available: flash_attn_func, or causal, "
            "window_size, alibi_slopes and cache_leftpad"
        )
    if _seqlen_new(cache) > 0:
        _check_memory(q, k_cache, v_cache, cache, options)
    if _may_read(q):
        keys = _check_length_values(q, k_cache, cache, options)
        if cache.block_table is not None:
            _check_page_values(cache.block_table, k_cache, keys, has_new=_seqlen_new(cache) > 0)
        elif cache.cache_batch_idx is not None:
            _check_batch_idx_values(cache.cache_batch_idx, k_cache, has_new=_seqlen_new(cache) > 0)


def check_no_gradient(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError if a cache requires a gradient. A traced program runs with detached caches."""
    _check_requires_no_gradient("k_cache", k_cache)
    _check_requires_no_gradient("v_cache", v_cache)


def _check_requires_no_gradient(name: str, cache: Tensor) -> None:
    if cache.requires_grad:
        raise ValueError(
            f"{name} requires a gradient; allowed: a KV cache that requires none, for example {name}.detach()"
        )


def _seqlen_new(cache: KvCache) -> int:
    return 0 if cache.k is None else cache.k.shape[1]


def _capacity(k_cache: Tensor, cache: KvCache) -> int:
    """Keys of a cache row, or of all pages of a sequence."""
    return k_cache.shape[1] if cache.block_table is None else cache.block_table.shape[1] * k_cache.shape[1]


def _capacity_text(k_cache: Tensor, cache: KvCache) -> str:
    capacity = _capacity(k_cache, cache)
    if cache.block_table is None:
        return f"the capacity of the cache, {capacity}"
    return f"the keys of block_table, {capacity} ({cache.block_table.shape[1]} pages of {k_cache.shape[1]} keys)"


def _check_cache_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache) -> int:
    """Returns the batch."""
    is_paged = cache.block_table is not None
    rows, keys = ("num_pages", "page_size") if is_paged else ("batch_cache", "capacity")
    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    _check_rank("q", q, 4, "[batch, seqlen_q, nheads, headdim]")
    for name, x in caches:
        _check_same_kind(name, x, q)
        _check_rank(name, x, 4, f"[{rows}, {keys}, nheads_k, headdim]")
    _check_heads(q, "k_cache", k_cache, "v_cache", v_cache)
    _check_same_size("v_cache", v_cache, "k_cache", k_cache, 0, rows)
    _check_same_size("v_cache", v_cache, "k_cache", k_cache, 1, keys)
    _check_at_most("q", q, 0, MAX_INT, "batch")
    _check_at_most("q", q, 1, MAX_ROWS, "seqlen_q")
    _check_at_most("k_cache", k_cache, 0, MAX_INT, rows)
    _check_at_most("k_cache", k_cache, 1, MAX_ROWS, keys)
    for name, x in (("q", q), *caches):
        _check_last_dim_contiguous(name, x)
    for name, x in caches:
        _check_requires_no_gradient(name, x)
        if x.is_neg():
            raise ValueError(
                f"{name} is a lazily negated view; allowed: a KV cache in memory as it is, for example "
                f"{name}.resolve_neg()"
            )
    return q.shape[0]


def _check_per_sequence(name: str, x: Tensor, q: Tensor, batch: int) -> None:
    _check_index(name, x, q)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {_shape(x)}; allowed: [batch] with batch {batch}")
    _check_contiguous(name, x)


def _check_rows(q: Tensor, k_cache: Tensor, cache: KvCache, batch: int) -> None:
    if cache.block_table is not None:
        if cache.cache_batch_idx is not None:
            raise ValueError("cache_batch_idx and block_table are both given; allowed: one of the two")
        _check_block_table(cache.block_table, "k_cache", k_cache, q, batch)
    elif cache.cache_batch_idx is not None:
        _check_per_sequence("cache_batch_idx", cache.cache_batch_idx, q, batch)
    elif k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache has batch_cache {k_cache.shape[0]} (shape {_shape(k_cache)}); allowed without cache_batch_idx: "
            f"at least the batch of q, {batch}"
        )


def _check_new_keys(q: Tensor, k_cache: Tensor, cache: KvCache) -> None:
    k, v = cache.k, cache.v
    if (k is None) != (v is None):
        missing, present = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {present} is given; allowed: both or neither")
    if k is None or v is None:
        return
    for name, x in (("k", k), ("v", v)):
        _check_same_kind(name, x, q)
        _check_rank(name, x, 4, "[batch, seqlen_new, nheads_k, headdim]")
        _check_same_size(name, x, "q", q, 0, "batch")
        _check_same_size(name, x, "k_cache", k_cache, 2, "heads")
        _check_same_size(name, x, "k_cache", k_cache, 3, "headdim")
        _check_last_dim_contiguous(name, x)
    _check_same_size("v", v, "k", k, 1, "seqlen_new")


def _check_lengths(q: Tensor, k_cache: Tensor, cache: KvCache, batch: int) -> None:
    capacity, length = _capacity(k_cache, cache), cache.cache_seqlen
    if cache.cache_leftpad is not None:
        _check_per_sequence("cache_leftpad", cache.cache_leftpad, q, batch)
    if cache.cache_seqlens is not None:
        _check_per_sequence("cache_seqlens", cache.cache_seqlens, q, batch)
        if length != -1:
            raise ValueError(f"cache_seqlens is given as a tensor and as the number {length}; allowed: one of the two")
    elif length == -1 and cache.k is not None:
        raise ValueError("cache_seqlens is None and k is given; allowed with k: the keys in the cache before the call")
    if not -1 <= length <= capacity:
        raise ValueError(f"cache_seqlens is {length}; allowed: 0 to {_capacity_text(k_cache, cache)}")
    least = max(length, 0)
    if _seqlen_new(cache) > capacity - least:
        raise ValueError(
            f"k has {_seqlen_new(cache)} new keys after {least} in the cache; allowed: together at most "
            f"{_capacity_text(k_cache, cache)}"
        )


def _check_rotary(q: Tensor, k_cache: Tensor, cache: KvCache, options: Options) -> None:
    cos, sin = cache.rotary_cos, cache.rotary_sin
    if (cos is None) != (sin is None):
        missing, present = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{missing} is None and {present} is given; allowed: both or neither")
    if cos is None or sin is None:
        return
    if cache.k is None:
        raise ValueError("rotary_cos is given and k is None; allowed: rotary_cos together with k")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check_same_kind(name, x, q)
        _check_rank(name, x, 2, "[positions, rotary_dim / 2]")
        _check_contiguous(name, x)
        _check_at_most(name, x, 0, MAX_ROWS, "positions")
    _check_same_shape("rotary_sin", sin, "rotary_cos", cos)
    rotary_dim, headdim = 2 * cos.shape[1], q.shape[3]
    if rotary_dim % 16 != 0 or not 16 <= rotary_dim <= headdim:
        raise ValueError(
            f"rotary_cos has shape {_shape(cos)}, so rotary_dim is {rotary_dim}; allowed: a multiple of 16, from 16 to "
            f"headdim, {headdim}"
        )
    if cos.shape[0] < _capacity(k_cache, cache):
        raise ValueError(f"rotary_cos has {cos.shape[0]} positions; allowed: at least {_capacity_text(k_cache, cache)}")
    if cache.cache_seqlen != -1 and q.shape[0] > 0:
        _check_positions(q, cos, options, cache.cache_seqlen, 0)  # the same for all sequences


def _check_positions(q: Tensor, rotary_cos: Tensor | None, options: Options, length: int, bidb: int) -> None:
    """With a mask each query has another rotary position; the last may lie past the keys."""
    seqlen_q = q.shape[1]
    if rotary_cos is None or seqlen_q == 0:
        return
    is_stepwise = options.causal or options.window_size_left >= 0 or options.window_size_right >= 0
    position, positions = length + (seqlen_q - 1 if is_stepwise else 0), rotary_cos.shape[0]
    if position >= positions:
        raise ValueError(
            f"rotary_cos has {positions} positions; allowed: at least {position + 1} for the queries of sequence {bidb}"
        )


def _check_splits(cache: KvCache) -> None:
    for name, number in (("num_splits", cache.num_splits), ("split_keys", cache.split_keys)):
        if not 0 <= number <= MAX_INT:
            raise ValueError(f"{name} is {number}; allowed: 0 (chosen) to {MAX_INT}")
    if cache.num_splits != 0 and cache.split_keys != 0:
        raise ValueError(
            f"num_splits is {cache.num_splits} and split_keys is {cache.split_keys}; allowed: one of the two, the "
            "other 0"
        )


# ---- the memory of the KV cache -------------------------------------------------------------------------------------


def _interval(x: Tensor) -> tuple[int, int]:
    """The bytes from the first to the last element."""
    begin = x.data_ptr()
    if x.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def _overlap(x: Tensor, y: Tensor) -> bool:
    (x_begin, x_end), (y_begin, y_end) = _interval(x), _interval(y)
    return x_begin < y_end and y_begin < x_end


def _check_memory(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options) -> None:
    read = {
        "q": q,
        "k": cache.k,
        "v": cache.v,
        "cache_seqlens": cache.cache_seqlens,
        "cache_batch_idx": cache.cache_batch_idx,
        "cache_leftpad": cache.cache_leftpad,
        "block_table": cache.block_table,
        "rotary_cos": cache.rotary_cos,
        "rotary_sin": cache.rotary_sin,
        "alibi_slopes": options.alibi_slopes,
    }
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_written(name, x, "k_cache", k_cache, q)
        for other_name, other in read.items():
            if other is not None and _overlap(x, other):
                raise ValueError(f"{name} shares memory with {other_name}; allowed: memory of its own")
    if _caches_overlap(k_cache, v_cache):
        raise ValueError("k_cache shares memory with v_cache; allowed: memory of its own")


def _caches_overlap(k_cache: Tensor, v_cache: Tensor) -> bool:
    """k_cache and v_cache may alternate in one tensor: compares elements where both have the same strides."""
    if not _overlap(k_cache, v_cache):
        return False
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    if k_cache.stride() != v_cache.stride():
        return distance == 0
    itemsize = k_cache.element_size()
    dims = [(size, stride * itemsize) for size, stride in zip(k_cache.shape, k_cache.stride(), strict=True)]
    return _is_reached(sorted(dims, key=lambda dim: -dim[1]), distance)


def _is_reached(size_and_stride: list[tuple[int, int]], distance: int) -> bool:
    """True if a sum over dims of i * stride is ``distance`` for some \\|i\\| < size.

    Exact if every stride is at least the extent of the dims after it, as in views of one contiguous tensor.
    """
    if not size_and_stride:
        return distance == 0
    (size, stride), *rest = size_and_stride
    if stride == 0:
        return _is_reached(rest, distance)
    nearest = distance // stride if distance >= 0 else -(-distance // stride)
    return any(_is_reached(rest, distance - i * stride) for i in range(nearest - 1, nearest + 2) if abs(i) < size)


# ---- values in tensors of the KV cache ------------------------------------------------------------------------------


def _check_length_values(q: Tensor, k_cache: Tensor, cache: KvCache, options: Options) -> list[tuple[int, int, int]]:
    """Returns for each sequence its left padding, its keys before the call, and its keys with the new ones."""
    batch, capacity, seqlen_new = q.shape[0], _capacity(k_cache, cache), _seqlen_new(cache)
    same = capacity if cache.cache_seqlen == -1 else cache.cache_seqlen
    lengths = [same] * batch if cache.cache_seqlens is None else cache.cache_seqlens.tolist()
    leftpads = [0] * batch if cache.cache_leftpad is None else cache.cache_leftpad.tolist()
    keys = []
    for bidb, (length, leftpad) in enumerate(zip(lengths, leftpads, strict=True)):
        end = length + seqlen_new
        if length < 0 or end > capacity:
            raise ValueError(
                f"cache_seqlens is {length} for sequence {bidb} with {seqlen_new} new keys; allowed: at least 0, and "
                f"with the new keys at most {_capacity_text(k_cache, cache)}"
            )
        if not 0 <= leftpad <= end:
            raise ValueError(
                f"cache_leftpad is {leftpad} for sequence {bidb}; allowed: 0 to its length in the cache, {end}"
            )
        _check_positions(q, cache.rotary_cos, options, length, bidb)
        keys.append((leftpad, length, end))
    return keys


def _check_batch_idx_values(cache_batch_idx: Tensor, k_cache: Tensor, *, has_new: bool) -> None:
    rows = cache_batch_idx.tolist()
    for bidb, row in enumerate(rows):
        if not 0 <= row < k_cache.shape[0]:
            raise ValueError(f"cache_batch_idx is {row} for sequence {bidb}; allowed: 0 to {k_cache.shape[0] - 1}")
    if not has_new:
        return
    for (row, a), (next_row, b) in pairwise(sorted(zip(rows, range(len(rows)), strict=True))):
        if row == next_row:
            raise ValueError(
                f"cache_batch_idx is {row} for sequences {a} and {b}; allowed with k: a cache row of its own for each "
                "sequence"
            )


def _check_page_values(
    block_table: Tensor, k_cache: Tensor, keys: list[tuple[int, int, int]], *, has_new: bool
) -> None:
    """Every page with a key that is read or written is in the pool; no two sequences write one place of a page."""
    num_pages, page_size = k_cache.shape[:2]
    written = []  # page, first key of the page, end, sequence
    for bidb, (pages, (leftpad, before, end)) in enumerate(zip(block_table.tolist(), keys, strict=True)):
        first = min(leftpad, before) if has_new else leftpad
        for column in range(first // page_size, -(-end // page_size)):
            page = pages[column]
            _check_page(page, bidb, column, num_pages)
            begin_in_page = max(before - column * page_size, 0)
            end_in_page = min(end - column * page_size, page_size)
            if begin_in_page < end_in_page and has_new:
                written.append((page, begin_in_page, end_in_page, bidb))
    for (page, _, end, a), (next_page, begin, _, b) in pairwise(sorted(written)):
        if page == next_page and end > begin:
            raise ValueError(
                f"block_table has page {page} for the new keys of sequences {a} and {b}; allowed: a place of its own "
                "for each new key"
            )


# ---- one tensor -----------------------------------------------------------------------------------------------------


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _dtype(x: Tensor) -> str:
    """The name of the dtype that C++ has: Half, Float, Long."""
    return torch.empty(0, dtype=x.dtype).type().removeprefix("torch.").removesuffix("Tensor")


def _check_rank(name: str, x: Tensor, rank: int, shape: str) -> None:
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {_shape(x)} ({x.ndim} dimensions); allowed: {rank} dimensions {shape}")


def _check_dtype(name: str, x: Tensor, backend: str) -> None:
    if x.dtype not in DTYPES[backend]:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[backend])
        raise TypeError(f"{name} has dtype {_dtype(x)}; allowed on the {backend} backend: {allowed}")


def _check_same_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; allowed: the device of q, {q.device}")


def _check_same_kind(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {_dtype(x)}; allowed: that of q, {_dtype(q)}")
    _check_same_device(name, x, q)


def _check_same_size(name: str, x: Tensor, like_name: str, like: Tensor, dim: int, dim_name: str) -> None:
    if x.shape[dim] != like.shape[dim]:
        raise ValueError(
            f"{name} has {dim_name} {x.shape[dim]} (shape {_shape(x)}); allowed: the {dim_name} of {like_name}, "
            f"{like.shape[dim]}"
        )


def _check_same_shape(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    if x.shape != like.shape:
        raise ValueError(f"{name} has shape {_shape(x)}; allowed: the shape of {like_name}, {_shape(like)}")


def _check_at_most(name: str, x: Tensor, dim: int, most: int, dim_name: str) -> None:
    if x.shape[dim] > most:
        raise ValueError(f"{name} has shape {_shape(x)}; allowed: {dim_name} up to {most}")


def _check_last_dim_contiguous(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel() > 0:
        raise ValueError(
            f"{name} has strides {list(x.stride())}; allowed: a contiguous last dimension (stride 1), for example "
            f"{name}.contiguous()"
        )


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {list(x.stride())}; allowed: contiguous")


def _check_index(name: str, x: Tensor, q: Tensor) -> None:
    """A tensor of lengths or indices."""
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {_dtype(x)}; allowed: int32")
    if x.is_neg():
        raise ValueError(f"{name} is a lazily negated view; allowed: numbers in memory as they are")
    _check_same_device(name, x, q)


def _check_block_table(table: Tensor, pages_name: str, pages: Tensor, q: Tensor, batch: int) -> None:
    _check_index("block_table", table, q)
    page_size = pages.shape[1]
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table has shape {_shape(table)}; allowed: [batch, max_blocks] with batch {batch}")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(
            f"block_table has strides {list(table.stride())}; allowed: a contiguous last dimension (stride 1), for "
            "example block_table.contiguous()"
        )
    if page_size < 1:
        raise ValueError(f"{pages_name} has pages of 0 keys (shape {_shape(pages)}); allowed: at least 1")
    if table.shape[1] > MAX_ROWS // page_size:
        raise ValueError(
            f"block_table has shape {_shape(table)}; allowed: up to {MAX_ROWS // page_size} pages of {page_size} keys "
            "for each sequence"
        )


def _check_page(page: int, bidb: int, column: int, num_pages: int) -> None:
    if not 0 <= page < num_pages:
        pages = "none, because the cache has no pages" if num_pages == 0 else f"0 to {num_pages - 1}"
        raise ValueError(f"block_table has page {page} at [{bidb}, {column}]; allowed: {pages}")


def _check_written(name: str, x: Tensor, like_name: str, like: Tensor, q: Tensor) -> None:
    """A tensor that a kernel writes."""
    _check_same_kind(name, x, q)
    _check_same_shape(name, x, like_name, like)
    _check_last_dim_contiguous(name, x)
    if x.numel() > 0 and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{name} has strides {list(x.stride())} (shape {_shape(x)}); allowed: every element in memory of its own"
        )


def _is_dense(x: Tensor) -> bool:
    """True if the elements fill an interval of memory and none shares its memory with another."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    """True for one tensor, and for dense ones whose memory overlaps; other tensors are not compared."""
    return x is y or (x.numel() > 0 and y.numel() > 0 and _is_dense(x) and _is_dense(y) and _overlap(x, y))


def _may_read(x: Tensor) -> bool:
    """True if values of x may be read on the host."""
    return x.is_cpu or _checks_values()


def _checks_values() -> bool:
    return os.environ.get("FLASH_ATTN_MINI_CHECK", "0") not in ("", "0")
