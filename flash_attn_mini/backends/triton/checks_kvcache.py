"""The checks of flash_attn_with_kvcache, for environments without the compiled extension.

The same as those of csrc/api/checks_kvcache.cpp: see checks.py.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ...options import KvCache, Options
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
    check_same_kind,
    check_same_shape,
    check_same_size,
    check_written,
    may_read,
    overlap,
    shape_of,
)
from .checks import MAX_HEAD_DIM_OF_CACHE, check_heads, check_options


def check_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options, backend: str = "triton"
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the backend can run flash_attn_with_kvcache."""
    check_dtype("q", q, backend)
    batch = _check_cache_shapes(q, k_cache, v_cache, cache)
    _check_rows(q, k_cache, cache, batch)
    _check_new_keys(q, k_cache, v_cache, cache)
    _check_lengths(q, k_cache, cache, batch)
    _check_rotary(q, k_cache, cache, options)
    _check_splits(cache)
    check_options(q, batch, options)
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
    if may_read(q):
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
    check_rank("q", q, 4, "[batch, seqlen_q, nheads, headdim]")
    for name, x in caches:
        check_same_kind(name, x, q)
        check_rank(name, x, 4, f"[{rows}, {keys}, nheads_k, headdim]")
    check_heads(q, "k_cache", k_cache, "v_cache", v_cache, MAX_HEAD_DIM_OF_CACHE)
    check_same_size("v_cache", v_cache, "k_cache", k_cache, 0, rows)
    check_same_size("v_cache", v_cache, "k_cache", k_cache, 1, keys)
    check_at_most("q", q, 0, MAX_INT, "batch")
    check_at_most("q", q, 1, MAX_ROWS, "seqlen_q")
    check_at_most("k_cache", k_cache, 0, MAX_INT, rows)
    check_at_most("k_cache", k_cache, 1, MAX_ROWS, keys)
    for name, x in (("q", q), *caches):
        check_last_dim_contiguous(name, x)
    for name, x in caches:
        _check_requires_no_gradient(name, x)
        if x.is_neg():
            raise ValueError(
                f"{name} is a lazily negated view; allowed: a KV cache in memory as it is, for example "
                f"{name}.resolve_neg()"
            )
    return q.shape[0]


def _check_per_sequence(name: str, x: Tensor, q: Tensor, batch: int) -> None:
    check_index(name, x, q)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {shape_of(x)}; allowed: [batch] with batch {batch}")
    check_contiguous(name, x)


def _check_rows(q: Tensor, k_cache: Tensor, cache: KvCache, batch: int) -> None:
    if cache.block_table is not None:
        if cache.cache_batch_idx is not None:
            raise ValueError("cache_batch_idx and block_table are both given; allowed: one of the two")
        check_block_table(cache.block_table, "k_cache", k_cache, q, batch)
    elif cache.cache_batch_idx is not None:
        _check_per_sequence("cache_batch_idx", cache.cache_batch_idx, q, batch)
    elif k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache has batch_cache {k_cache.shape[0]} (shape {shape_of(k_cache)}); allowed without cache_batch_idx: "
            f"at least the batch of q, {batch}"
        )


def _check_new_keys(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache) -> None:
    k, v = cache.k, cache.v
    if (k is None) != (v is None):
        missing, present = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {present} is given; allowed: both or neither")
    if k is None or v is None:
        return
    for name, x, cache_name, like in (("k", k, "k_cache", k_cache), ("v", v, "v_cache", v_cache)):
        check_same_kind(name, x, q)
        check_rank(name, x, 4, "[batch, seqlen_new, nheads_k, headdim]")
        check_same_size(name, x, "q", q, 0, "batch")
        check_same_size(name, x, cache_name, like, 2, "heads")
        check_same_size(name, x, cache_name, like, 3, "headdim")
        check_last_dim_contiguous(name, x)
    check_same_size("v", v, "k", k, 1, "seqlen_new")


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
        check_same_kind(name, x, q)
        check_rank(name, x, 2, "[positions, rotary_dim / 2]")
        check_contiguous(name, x)
        check_at_most(name, x, 0, MAX_ROWS, "positions")
    check_same_shape("rotary_sin", sin, "rotary_cos", cos)
    rotary_dim, headdim = 2 * cos.shape[1], q.shape[3]
    if rotary_dim % 16 != 0 or not 16 <= rotary_dim <= headdim:
        raise ValueError(
            f"rotary_cos has shape {shape_of(cos)}, so rotary_dim is {rotary_dim}; allowed: a multiple of 16, from 16 "
            f"to headdim, {headdim}"
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
        check_written(name, x, q)
        for other_name, other in read.items():
            if other is not None and overlap(x, other):
                raise ValueError(f"{name} shares memory with {other_name}; allowed: memory of its own")
    if _caches_overlap(k_cache, v_cache):
        raise ValueError("k_cache shares memory with v_cache; allowed: memory of its own")


def _caches_overlap(k_cache: Tensor, v_cache: Tensor) -> bool:
    """k_cache and v_cache may alternate in one tensor: compares elements where both have the same strides."""
    if not overlap(k_cache, v_cache):
        return False
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    dims = zip(k_cache.shape, v_cache.shape, k_cache.stride(), v_cache.stride(), strict=True)
    used = [dim for dim in dims if dim[:2] != (1, 1)]  # the stride of a dimension of size 1 has no effect
    if any(stride_k != stride_v for *_, stride_k, stride_v in used):
        return distance == 0
    itemsize = k_cache.element_size()
    in_bytes = [(size_k, size_v, stride * itemsize) for size_k, size_v, stride, _ in used]
    return _is_reached(sorted(in_bytes, key=lambda dim: -dim[2]), distance)


def _is_reached(dims: list[tuple[int, int, int]], distance: int) -> bool:
    """True if a sum over dims (size_k, size_v, stride) of i * stride is ``distance`` for some -size_v < i < size_k.

    Exact if every stride is at least the extent of the dims after it, as in views of one contiguous tensor.
    """
    if not dims:
        return distance == 0
    (size_k, size_v, stride), *rest = dims
    if stride == 0:
        return _is_reached(rest, distance)
    nearest = distance // stride if distance >= 0 else -(-distance // stride)
    near = range(nearest - 1, nearest + 2)
    return any(_is_reached(rest, distance - i * stride) for i in near if -size_v < i < size_k)


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
            check_page(page, bidb, column, num_pages)
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
