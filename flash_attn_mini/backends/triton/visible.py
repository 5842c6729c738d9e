# mypy: disable-error-code="no-untyped-def"
"""The keys that a block of queries sees, and the queries that see a block of keys: ranges with and without a mask.

Query i sees key j when i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right. Without a
window (window_left is None) a query sees all keys, or under CAUSAL those with j <= i + seqlen_k - seqlen_q.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_keys(
    start_m,
    rows,  # (BLOCK_M,) int32: start_m + arange
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first_key, last_key, n_begin, full_begin, full_end, n_end) of a block of queries.

    Each row sees keys first_key to last_key; first_key counts only with a window. Blocks of [n_begin, full_begin) and
    [full_end, n_end) need a mask. Every row of the block sees all keys of [full_begin, full_end). Without a window
    n_begin and full_begin are 0.
    """
    diagonal = seqlen_k - seqlen_q
    first_key = rows
    n_begin = 0
    full_begin = 0
    if window_left is not None:
        left = tl.minimum(window_left, seqlen_k)  # a wider window sees no more, and no sum below overflows
        right = tl.minimum(window_right, seqlen_q)
        first_key = rows + (diagonal - left)
        last_key = tl.minimum(rows + (diagonal + right), seqlen_k - 1)
        end_m = tl.minimum(start_m + BLOCK_M, seqlen_q)
        n_begin = tl.maximum(start_m + diagonal - left, 0) // BLOCK_N * BLOCK_N
        n_end = tl.maximum(tl.minimum(end_m + diagonal + right, seqlen_k), 0)
        full_begin = tl.minimum(tl.cdiv(tl.maximum(end_m - 1 + diagonal - left, 0), BLOCK_N) * BLOCK_N, n_end)
        full_end = tl.maximum(tl.minimum(start_m + diagonal + right + 1, seqlen_k), 0) // BLOCK_N * BLOCK_N
        full_end = tl.maximum(full_end, full_begin)
    elif CAUSAL:
        last_key = tl.minimum(rows + diagonal, seqlen_k - 1)
        full_end = tl.maximum(tl.minimum(start_m + diagonal + 1, seqlen_k), 0) // BLOCK_N * BLOCK_N
        n_end = tl.minimum(start_m + BLOCK_M + diagonal, seqlen_k)
    else:
        last_key = tl.full([BLOCK_M], 0, tl.int32) + (seqlen_k - 1)
        full_end = seqlen_k // BLOCK_N * BLOCK_N
        n_end = seqlen_k
    return first_key, last_key, n_begin, full_begin, full_end, n_end


@triton.jit
def visible_keys_of_split(
    queries,  # (ROWS,) int32: the query of each row of a tile
    first_query,
    last_query,
    seqlen_q,
    seqlen_k,
    begin,
    end,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `visible_keys`, for queries first_query to last_query and keys [begin, end), in blocks counted from begin."""
    diagonal = seqlen_k - seqlen_q
    first_key = queries
    n_begin = begin
    full_begin = begin
    if window_left is not None:
        left = tl.minimum(window_left, seqlen_k)
        right = tl.minimum(window_right, seqlen_q)
        first_key = queries + (diagonal - left)
        last_key = tl.minimum(queries + (diagonal + right), end - 1)
        n_end = tl.minimum(last_query + diagonal + right + 1, end)
        n_begin += tl.maximum(first_query + diagonal - left - begin, 0) // BLOCK_N * BLOCK_N
        full_begin += tl.cdiv(tl.maximum(last_query + diagonal - left - begin, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.maximum(tl.minimum(full_begin, n_end), n_begin)
        last_full = tl.minimum(first_query + diagonal + right + 1, end)
    elif CAUSAL:
        last_key = tl.minimum(queries + diagonal, end - 1)
        n_end = tl.minimum(last_query + diagonal + 1, end)
        last_full = tl.minimum(first_query + diagonal + 1, end)
    else:
        last_key = tl.zeros_like(queries) + (end - 1)
        n_end = end
        last_full = end
    full_end = begin + tl.maximum(last_full - begin, 0) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)
    return first_key, last_key, n_begin, full_begin, full_end, n_end


@triton.jit
def first_seeing_row(seqlen_q, seqlen_k, window_left, window_right):
    """The first row that sees a key, with a window or the causal mask. All rows after it see one, if there is a key."""
    begin = seqlen_q - seqlen_k
    if window_left is not None:
        begin -= tl.minimum(window_right, seqlen_q)
    return tl.maximum(begin, 0)


@triton.jit
def visible_queries(
    start_n,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first_row, last_row, m_begin, full_begin, full_end, m_end) of a block of keys, as in `visible_keys`.

    Rows first_row to last_row see each key; last_row counts only with a window. Without a window full_end is seqlen_q:
    the probabilities of rows beyond it are 0.
    """
    diagonal = seqlen_k - seqlen_q
    if window_left is not None:
        left = tl.minimum(window_left, seqlen_k)
        right = tl.minimum(window_right, seqlen_q)
        keys = start_n + tl.arange(0, BLOCK_N)
        first_row = keys - (diagonal + right)
        last_row = keys - (diagonal - left)
        end_n = tl.minimum(start_n + BLOCK_N, seqlen_k)
        m_begin = tl.maximum(start_n - diagonal - right, 0) // BLOCK_M * BLOCK_M
        m_end = tl.maximum(tl.minimum(end_n - diagonal + left, seqlen_q), 0)
        full_begin = tl.minimum(tl.cdiv(tl.maximum(end_n - 1 - diagonal - right, 0), BLOCK_M) * BLOCK_M, m_end)
        full_end = tl.maximum(tl.minimum(start_n - diagonal + left + 1, seqlen_q), 0) // BLOCK_M * BLOCK_M
        full_end = tl.maximum(full_end, full_begin)
    elif CAUSAL:
        first_row = start_n + tl.arange(0, BLOCK_N) - diagonal
        last_row = first_row
        m_begin = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        full_begin = tl.minimum(full_begin, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M)
        full_end = seqlen_q
        m_end = seqlen_q
    else:
        first_row = tl.full([BLOCK_N], 0, tl.int32)
        last_row = first_row
        m_begin = 0
        full_begin = 0
        full_end = seqlen_q
        m_end = seqlen_q
    return first_row, last_row, m_begin, full_begin, full_end, m_end
