# mypy: disable-error-code="no-untyped-def"
"""The option attn_bias in the kernels: added to the logits of a tile, or of type boolean, which keys a query sees.

With it the logits are natural, not in units of log 2: the smallest number of a dtype times log2(e) would overflow. A
hidden key has the logit -inf, whatever q and k hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .score_mod import LOG2_E

# ---- on the host ----------------------------------------------------------------------------------------------------


def bias_of_call(attn_bias: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int, int]:
    """``attn_bias`` as the kernels take it: the tensor, its strides, and the number of keys.

    A dimension of one element has a stride of 0: all share it. Triton specializes the numbers, so that loads of
    neighbouring keys are wide where these are multiples of 16.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(attn_bias.shape, attn_bias.stride(), strict=True)]
    batch_stride, head_stride, row_stride, key_stride = strides
    return attn_bias, batch_stride, head_stride, row_stride, key_stride, attn_bias.shape[3]


# ---- in kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def bias_of_rows(attn_bias, batch, head, rows, seqlen_q):
    """The bias of one head as `with_bias` takes it, for tiles (rows, keys)."""
    pointer, stride_b, stride_h, stride_m, stride_n, num_keys = attn_bias
    pointers = pointer + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h) + rows.to(tl.int64) * stride_m
    return pointers, rows < seqlen_q, stride_n, num_keys


@triton.jit
def bias_of_keys(attn_bias, batch, head, keys, seqlen_q):
    """The bias of one head as `with_bias` takes it, for tiles (keys, rows)."""
    pointer, stride_b, stride_h, stride_m, stride_n, num_keys = attn_bias
    pointers = pointer + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h) + keys.to(tl.int64) * stride_n
    return pointers, keys < num_keys, stride_m, seqlen_q


@triton.jit
def with_bias(
    logits,  # (M, N), natural
    bias,  # (pointers (M,), booleans (M,): true inside of the bias, stride and end along N)
    start,  # along N: a multiple of 16
    N: tl.constexpr,
):
    """The logits with the bias, -inf for a hidden key and outside of the bias."""
    pointers, is_inside, stride, end = bias
    columns = tl.multiple_of(start, 16) + tl.arange(0, N)
    pointers = pointers[:, None] + (columns.to(tl.int64) * stride)[None, :]
    is_inside = is_inside[:, None] & (columns < end)[None, :]
    if pointers.dtype.element_ty == tl.int1:
        result = tl.where(tl.load(pointers, mask=is_inside, other=False), logits, float("-inf"))
    else:
        added = tl.load(pointers, mask=is_inside, other=float("-inf")).to(tl.float32)
        # Not only logits + added: a row without keys may have NaN in q.
        result = tl.where(added == float("-inf"), float("-inf"), logits + added)
    return result


@triton.jit
def probabilities(logits, lse):
    """exp(logits - lse). At most 1: the rounding of large numbers in another order would make it large."""
    return tl.math.exp2(tl.minimum(logits - lse, 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)
