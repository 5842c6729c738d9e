"""The checks of the arguments of a call, for environments without the compiled extension.

With the extension csrc/api/checks.cpp, csrc/api/key_ranges.cpp, csrc/api/attn_bias.cpp and csrc/api/checks_kvcache.cpp
check every call of every backend. The checks here and in checks_kvcache.py are the same: in the same order, with the
same exception types and texts. A failed check names the argument, what was given and what is allowed. cu_seqlens,
block_table and the like are read on the CPU; on a GPU only with FLASH_ATTN_MINI_CHECK=1, as reading them waits for the
GPU. key_ranges are read only with FLASH_ATTN_MINI_CHECK=1.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...allocation import lse_dtype
from ...options import ROWS_MULTIPLE, Options, Sequences
from .check_tensors import (
    MAX_INT,
    MAX_ROWS,
    check_at_most,
    check_block_table,
    check_contiguous,
    check_dtype,
    check_index,
    check_last_dim_contiguous,
    check_page,
    check_rank,
    check_same_device,
    check_same_kind,
    check_same_shape,
    check_same_size,
    check_shape_of_out,
    check_written,
    checks_values,
    dtype_of,
    may_read,
    shape_of,
    shares_memory,
)

MAX_HEAD_DIM = 512
MAX_HEAD_DIM_OF_CACHE = 576  # of q and k in a call with a KV cache


def check_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, backend: str = "triton"
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the backend can run the forward."""
    _check_inputs(q, k, v, sequences, backend)
    check_options(q, _batch_of(q, sequences), options)
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
        check_same_kind(name, x, q)
        check_shape_of_out(name, x, q, v)
    _check_lse("softmax_lse", softmax_lse, q, sequences)
    if dsoftmax_lse is not None:
        _check_lse("dsoftmax_lse", dsoftmax_lse, q, sequences)
    read = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)]
    for name, given, (like_name, like) in zip(("dq", "dk", "dv"), into, read, strict=False):
        if given is None:
            continue
        check_same_shape(name, given, like_name, like)
        check_written(name, given, q)
        for other_name, other in read:
            if shares_memory(given, other):
                raise ValueError(f"{name} shares memory with {other_name}; allowed: memory of its own")
        read.append((name, given))  # gradients share no memory with each other
    check_options(q, _batch_of(q, sequences), options)
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
            f"attn_bias has dtype {dtype_of(options.attn_bias)}; allowed where its gradient is wanted: a floating dtype"
        )
    check_same_kind("dout", dout, q)
    check_shape_of_out("dout", dout, q, v)
    batch, rows, nheads, _ = q.shape
    padded = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    for name, x, size in (("softmax_lse", softmax_lse, rows), ("softmax_d", softmax_d, padded)):
        _check_lse_dtype(name, x, q)
        if shape_of(x) != [batch, nheads, size]:
            raise ValueError(f"{name} has shape {shape_of(x)}; allowed: {[batch, nheads, size]}")
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
        raise TypeError(f"rng_state has dtype {dtype_of(rng_state)}; allowed: int64")
    if rng_state.shape != (2,):
        raise ValueError(
            f"rng_state has shape {shape_of(rng_state)}; allowed with dropout: [2], as the forward returned it"
        )
    check_same_device("rng_state", rng_state, q)


# ---- q, k, v and the sequences --------------------------------------------------------------------------------------


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, backend: str) -> None:
    check_dtype("q", q, backend)
    check_same_kind("k", k, q)
    check_same_kind("v", v, q)
    if sequences is None:
        _check_dense_shapes(q, k, v)
    else:
        _check_varlen_shapes(q, k, v, is_paged=sequences.block_table is not None)
    check_heads(q, "k", k, "v", v, MAX_HEAD_DIM)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_last_dim_contiguous(name, x)
    if sequences is not None:
        _check_sequences(q, k, sequences)


def _check_dense_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_rank("q", q, 4, "[batch, seqlen_q, nheads, headdim]")
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, 4, "[batch, seqlen_k, nheads_k, headdim]")
    check_same_size("k", k, "q", q, 0, "batch")
    check_same_size("v", v, "q", q, 0, "batch")
    check_at_most("q", q, 0, MAX_INT, "batch")
    check_same_size("v", v, "k", k, 1, "seqlen")
    check_at_most("q", q, 1, MAX_ROWS, "seqlen")
    check_at_most("k", k, 1, MAX_ROWS, "seqlen")


def _check_varlen_shapes(q: Tensor, k: Tensor, v: Tensor, *, is_paged: bool) -> None:
    check_rank("q", q, 3, "[total_q, nheads, headdim]")
    shape = "[num_pages, page_size, nheads_k, headdim]" if is_paged else "[total_k, nheads_k, headdim]"
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, 4 if is_paged else 3, shape)
    if is_paged:
        check_same_size("v", v, "k", k, 0, "num_pages")
    rows = "page_size" if is_paged else "total_k"
    check_same_size("v", v, "k", k, -3, rows)
    check_at_most("q", q, 0, MAX_ROWS, "total_q")
    check_at_most("k", k, -3, MAX_ROWS, rows)


def check_heads(q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor, most: int) -> None:
    """Raise ValueError unless heads and head dims of q, k and v fit. most: the largest head dim of q and k."""
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    for name, x, largest in (("q", q, most), (v_name, v, MAX_HEAD_DIM)):
        headdim = x.shape[-1]
        if not 1 <= headdim <= largest:
            raise ValueError(f"{name} has headdim {headdim} (shape {shape_of(x)}); allowed: 1 to {largest}")
    check_same_size(k_name, k, "q", q, -1, "headdim")
    if v.shape[-2] != nheads_k:
        raise ValueError(
            f"{v_name} has {v.shape[-2]} heads (shape {shape_of(v)}); allowed: the heads of {k_name}, {nheads_k}"
        )
    if nheads < 1:
        raise ValueError(f"q has 0 heads (shape {shape_of(q)}); allowed: at least 1")
    if nheads_k < 1:
        raise ValueError(f"{k_name} has 0 heads (shape {shape_of(k)}); allowed: at least 1")
    if nheads % nheads_k != 0:
        raise ValueError(
            f"q has {nheads} heads and {k_name} has {nheads_k}; allowed: nheads of q a multiple of nheads of {k_name}"
        )
    check_at_most("q", q, -2, MAX_INT, "heads")


def _check_lse_dtype(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != lse_dtype(q):
        allowed = "Double" if q.dtype == torch.float64 else "Float"
        raise TypeError(f"{name} has dtype {dtype_of(x)}; allowed: {allowed} for inputs of {dtype_of(q)}")
    check_same_device(name, x, q)


def _check_lse(name: str, x: Tensor, q: Tensor, sequences: Sequences | None) -> None:
    _check_lse_dtype(name, x, q)
    if sequences is None:
        form, shape = "[batch, nheads, seqlen_q]", [q.shape[0], q.shape[2], q.shape[1]]
    else:
        form, shape = "[nheads, total_q]", [q.shape[1], q.shape[0]]
    if shape_of(x) != shape:
        raise ValueError(f"{name} has shape {shape_of(x)}; allowed: {form} = {shape}")


def _check_sequences(q: Tensor, k: Tensor, sequences: Sequences) -> None:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = sequences
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_index(name, x, q)
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} has shape {shape_of(x)}; allowed: [batch + 1], one dimension of at least 1")
        check_contiguous(name, x)
    check_same_shape("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not 0 <= length <= MAX_INT:
            raise ValueError(f"{name} is {length}; allowed: 0 to {MAX_INT}")
    if block_table is not None:
        check_block_table(block_table, "k", k, q, cu_seqlens_q.shape[0] - 1)
    if may_read(q):
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
            check_page(pages[column], bidb, column, num_pages)


# ---- options --------------------------------------------------------------------------------------------------------


def _batch_of(q: Tensor, sequences: Sequences | None) -> int:
    return int(q.shape[0] if sequences is None else sequences.cu_seqlens_q.shape[0] - 1)


def check_options(q: Tensor, batch: int, options: Options) -> None:
    """Raise unless the values and tensors among the options are allowed."""
    if options.alibi_slopes is not None:
        _check_alibi_slopes(options.alibi_slopes, q, batch)
    if options.learnable_sink is not None:
        _check_learnable_sink(options.learnable_sink, q, batch)
    _check_scalars(options)


def _check_learnable_sink(sink: Tensor, q: Tensor, batch: int) -> None:
    if sink.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"learnable_sink has dtype {dtype_of(sink)}; allowed: float32 or that of q, {dtype_of(q)}")
    check_same_device("learnable_sink", sink, q)
    nheads, is_varlen = q.shape[-2], q.ndim == 3
    if shape_of(sink) != [nheads] and (is_varlen or shape_of(sink) != [batch, nheads]):
        or_per_batch = "" if is_varlen else f" or [batch, nheads] = {[batch, nheads]}"
        raise ValueError(f"learnable_sink has shape {shape_of(sink)}; allowed: [nheads] = {[nheads]}{or_per_batch}")


def _check_alibi_slopes(slopes: Tensor, q: Tensor, batch: int) -> None:
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {dtype_of(slopes)}; allowed: float32")
    check_same_device("alibi_slopes", slopes, q)
    nheads = q.shape[-2]
    if shape_of(slopes) not in ([nheads], [batch, nheads]):
        raise ValueError(
            f"alibi_slopes has shape {shape_of(slopes)}; allowed: [nheads] = {[nheads]} or [batch, nheads] = "
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
    check_index("key_ranges", key_ranges, q)
    *leading, rows, nheads, _ = q.shape
    dims, shape = len(leading) + 2, shape_of(key_ranges)
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
    if not checks_values():
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
            f"attn_bias has dtype {dtype_of(attn_bias)}; allowed: bool, {'' if is_wide else 'float32, '}or that of q, "
            f"{dtype_of(q)}"
        )
    check_same_device("attn_bias", attn_bias, q)
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, shape = k.shape[1], shape_of(attn_bias)
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
