"""Combines the partial results of split-KV: one program computes one query of one head.

The chain: kvcache.forward_kvcache -> flash_fwd_splitkv_kernel -> flash_fwd_splitkv_combine_kernel. Split s has weight
exp(max_s - max), and out is the weighted sum of out_s over that of sum_s, always in the same order. Maxima and sums
stay apart: float32 cannot hold a large maximum plus the logarithm of a sum.
"""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seqlen_q", "nheads", "nheads_k", "heads_per_kv"])
def flash_fwd_splitkv_combine_kernel(
    partial_out,  # as in flash_fwd_splitkv_kernel
    statistics,
    plan,
    out,
    lse,
    max_scale,  # what a maximum is multiplied by to be in units of log 2
    seqlen_q,
    nheads,
    nheads_k,
    heads_per_kv,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # splits that are read at once
):
    """Grid: batch * nheads * seqlen_q programs. Those of a sequence with one split have nothing to do."""
    program = tl.program_id(0)
    num_rows = seqlen_q * heads_per_kv
    row = program % num_rows
    head_k = program // num_rows % nheads_k
    sequence = program // (num_rows * nheads_k)
    first_slot = tl.load(plan + 2 * sequence)
    num_splits = tl.load(plan + 2 * sequence + 1)
    if num_splits <= 1:
        return
    first_row = (first_slot.to(tl.int64) * nheads_k + head_k) * num_rows + row
    splits = tl.arange(0, BLOCK_SPLITS)
    slot_stride = (num_rows * nheads_k).to(tl.int64)
    row_at = first_row + splits * slot_stride
    cols = tl.arange(0, BLOCK_D)
    out_at = partial_out + row_at[:, None] * HEAD_DIM + cols[None, :]

    maxima = tl.full([BLOCK_SPLITS], float("-inf"), tl.float32)
    for s in tl.range(0, num_splits, BLOCK_SPLITS):
        max_at = statistics + 2 * (row_at + s * slot_stride)
        split_max = tl.load(max_at, mask=splits < num_splits - s, other=float("-inf"))
        maxima = tl.maximum(maxima, split_max)
    row_max = tl.max(maxima, 0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)

    sums = tl.zeros([BLOCK_SPLITS], tl.float32)
    acc = tl.zeros([BLOCK_SPLITS, BLOCK_D], tl.float32)
    for s in tl.range(0, num_splits, BLOCK_SPLITS):
        in_range = splits < num_splits - s
        max_at = statistics + 2 * (row_at + s * slot_stride)
        split_max = tl.load(max_at, mask=in_range, other=float("-inf"))
        split_sum = tl.load(max_at + 1, mask=in_range, other=0.0)
        mask = in_range[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (cols[None, :] < HEAD_DIM)
        split_out = tl.load(out_at + s * slot_stride * HEAD_DIM, mask=mask, other=0.0)
        weights = tl.math.exp2((split_max - shift) * max_scale)
        sums += weights * split_sum
        acc += weights[:, None] * split_out
    total = tl.sum(sums, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.sum(acc, 0) * (1.0 / divisor)

    head = head_k * heads_per_kv + row % heads_per_kv
    query = row // heads_per_kv
    row_lse = (row_max * max_scale + tl.math.log2(divisor)) * 0.6931471805599453
    tl.store(lse + (sequence.to(tl.int64) * nheads + head) * seqlen_q + query, row_lse)
    pointer, stride_b, stride_h, stride_s = out
    pointer += sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + query.to(tl.int64) * stride_s
    tl.store(pointer + cols, result.to(pointer.dtype.element_ty), mask=cols < HEAD_DIM)
