"""Combines the partial results of split-KV: one program computes one query of one head.

The chain: kvcache.forward_kvcache -> flash_fwd_splitkv_kernel -> flash_fwd_splitkv_combine_kernel. Split s has weight
exp(max_s - max), and out is the weighted sum of out_s over that of sum_s, always in the same order. Maxima and sums are
stored separately, because float32 cannot represent a large maximum plus the logarithm of a sum.
"""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .score_mod import join_row_mod


@triton.jit(do_not_specialize=["seqlen_q", "nheads", "nheads_k", "heads_per_kv", "slot_stride"])
def flash_fwd_splitkv_combine_kernel(
    partial_out,  # as in flash_fwd_splitkv_kernel
    statistics,
    plan,
    out,
    lse,
    row_mod,  # see score_mod.py
    max_scale,  # what a maximum is multiplied by to be in units of log 2
    seqlen_q,
    nheads,
    nheads_k,
    heads_per_kv,
    slot_stride,  # slots from one split to the next; without FIXED_UNITS the slots of splits.py
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # splits that are read at once
    FIXED_UNITS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,  # as in flash_fwd_splitkv_kernel
):
    """Grid: batch * nheads * seqlen_q programs. Programs of a head with one split return at once."""
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    num_rows = seqlen_q * heads_per_kv
    row = program % num_rows
    sequence_head = program // num_rows
    num_splits = tl.load(plan + 2 * sequence_head)
    planned = tl.load(plan + 2 * sequence_head + 1)
    if num_splits <= 1:
        return
    cols = tl.arange(0, BLOCK_DV)

    acc = tl.zeros([BLOCK_SPLITS, BLOCK_DV], tl.float32)
    sums = tl.zeros([BLOCK_SPLITS], tl.float32)
    row_max = tl.cast(float("-inf"), tl.float32)
    for start in tl.range(0, num_splits, BLOCK_SPLITS, num_stages=1):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        if FIXED_UNITS:
            slots = planned + splits * slot_stride
        else:
            slots = 2 * (planned + splits) + (splits == 0).to(tl.int32)
        in_range = splits < num_splits
        row_at = slots.to(tl.int64) * num_rows + row
        mask = in_range[:, None]
        if HEAD_DIM_V != BLOCK_DV:
            mask = mask & (cols[None, :] < HEAD_DIM_V)
        split_max = tl.load(statistics + 2 * row_at, mask=in_range, other=float("-inf"))
        split_sum = tl.load(statistics + 2 * row_at + 1, mask=in_range, other=0.0)
        split_out = tl.load(partial_out + row_at[:, None] * HEAD_DIM_V + cols[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2((split_max - shift) * max_scale)
        alpha = tl.math.exp2((row_max - shift) * max_scale)
        sums = sums * alpha + weights * split_sum
        acc = acc * alpha + weights[:, None] * split_out
        row_max = new_max
    total = tl.sum(sums, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.sum(acc, 0) * (1.0 / divisor)

    sequence = sequence_head // nheads_k
    head = sequence_head % nheads_k * heads_per_kv + row % heads_per_kv
    query = row // heads_per_kv
    row_lse = (row_max * max_scale + tl.math.log2(divisor)) * 0.6931471805599453
    if row_mod is not None:
        row_lse, factor = join_row_mod(row_mod, sequence, head, row_lse)
        result = result * factor
    tl.store(lse + (sequence.to(tl.int64) * nheads + head) * seqlen_q + query, row_lse)
    pointer, stride_b, stride_h, stride_s = out
    pointer += sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + query.to(tl.int64) * stride_s
    tl.store(pointer + cols, result.to(pointer.dtype.element_ty), mask=cols < HEAD_DIM_V)
