"""Rotary position embedding as a Triton kernel. rotary_op.py calls it for CUDA tensors, with checked arguments.

Tokens are numbered through the whole batch. A program rotates a block of tokens in a block of heads. Each token looks
up its own position, so no program is empty for any lengths of the sequences.
"""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 16
ELEMENTS = 4096  # of x in one program: 32 for each of 128 threads


@triton.jit
def rotary_kernel(
    x_ptr,  # [batch, seqlen, nheads, headdim], or [total, nheads, headdim] with cu_seqlens
    out_ptr,  # like x; may be x
    cos_ptr,  # [rows, half]
    sin_ptr,
    offsets_ptr,  # integers [batch], contiguous, to add to `offset`; None = 0
    cu_seqlens_ptr,  # int32 [batch + 1], contiguous, or None
    offset,
    tokens,
    seqlen,  # not read with cu_seqlens
    batch,
    nheads,
    rows,
    half,  # rotary_dim / 2
    x_batch_stride,  # 0 with cu_seqlens
    x_row_stride,
    x_head_stride,
    x_stride,
    out_batch_stride,
    out_row_stride,
    out_head_stride,
    out_stride,
    cos_row_stride,
    cos_stride,
    sin_row_stride,
    sin_stride,
    SEARCH_STEPS: tl.constexpr,  # steps of the binary search for the sequence of a token
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,  # rotate by the negative angle, for gradients
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_M tokens in BLOCK_H heads."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    column = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    is_token = token < tokens

    if cu_seqlens_ptr is not None:
        low = tl.zeros([BLOCK_M], tl.int32)  # cu_seqlens[low] <= token < cu_seqlens[high]
        high = low + batch
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            begins_before = tl.load(cu_seqlens_ptr + middle) <= token
            low = tl.where(begins_before, middle, low)
            high = tl.where(begins_before, high, middle)
        sequence = low
        row = token.to(tl.int64)
        position = token - tl.load(cu_seqlens_ptr + low)
    else:
        sequence = token // seqlen
        position = token % seqlen
        row = position.to(tl.int64)
    position = position.to(tl.int64) + offset
    if offsets_ptr is not None:
        position += tl.load(offsets_ptr + sequence, mask=is_token, other=0)

    is_column = column < half
    in_table = (is_token & (position >= 0) & (position < rows))[:, None] & is_column[None, :]
    cos_at = position[:, None] * cos_row_stride + column[None, :] * cos_stride
    sin_at = position[:, None] * sin_row_stride + column[None, :] * sin_stride
    cos = tl.load(cos_ptr + cos_at, mask=in_table, other=1.0).to(COMPUTE)[:, None, :]  # [BLOCK_M, 1, BLOCK_HALF]
    sin = tl.load(sin_ptr + sin_at, mask=in_table, other=0.0).to(COMPUTE)[:, None, :]
    if CONJUGATE:
        sin = -sin

    sequence = sequence.to(tl.int64)
    head = head.to(tl.int64)
    x_at = (
        x_ptr + (sequence * x_batch_stride + row * x_row_stride)[:, None, None] + (head * x_head_stride)[None, :, None]
    )
    out_at = out_ptr + (sequence * out_batch_stride + row * out_row_stride)[:, None, None]
    out_at += (head * out_head_stride)[None, :, None]
    is_head = is_token[:, None, None] & (head < nheads)[None, :, None]
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)
        mask = is_head & (both < 2 * half)[None, None, :]
        pairs = tl.load(x_at + (both * x_stride)[None, None, :], mask=mask, other=0.0).to(COMPUTE)
        a, b = tl.split(pairs.reshape([BLOCK_M, BLOCK_H, BLOCK_HALF, 2]))
        rotated = tl.join(a * cos - b * sin, a * sin + b * cos).reshape([BLOCK_M, BLOCK_H, 2 * BLOCK_HALF])
        tl.store(out_at + (both * out_stride)[None, None, :], rotated, mask=mask)
    else:
        mask = is_head & is_column[None, None, :]
        first = (column * x_stride)[None, None, :]
        a = tl.load(x_at + first, mask=mask, other=0.0).to(COMPUTE)
        b = tl.load(x_at + first + half * x_stride, mask=mask, other=0.0).to(COMPUTE)
        first = (column * out_stride)[None, None, :]
        tl.store(out_at + first, a * cos - b * sin, mask=mask)
        tl.store(out_at + first + half * out_stride, a * sin + b * cos, mask=mask)


def block_sizes(half: int, nheads: int) -> dict[str, int]:
    """BLOCK_M, BLOCK_H and BLOCK_HALF for a rotary_dim of ``2 * half``."""
    block_half = max(triton.next_power_of_2(half), 2)
    block_h = min(triton.next_power_of_2(nheads), max(ELEMENTS // (BLOCK_TOKENS * 2 * block_half), 1))
    return {"BLOCK_M": BLOCK_TOKENS, "BLOCK_H": block_h, "BLOCK_HALF": block_half}


def rotate(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Write the first ``2 * cos.shape[1]`` features of `x`, rotated, to `out`, which may be `x`. No checks."""
    *_, nheads, _ = x.shape
    half = cos.shape[1]
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        tokens = batch * seqlen
        x_strides, out_strides = x.stride(), out.stride()
    else:
        batch, seqlen, tokens = cu_seqlens.shape[0] - 1, 0, x.shape[0]
        x_strides, out_strides = (0, *x.stride()), (0, *out.stride())
    if 0 in (tokens, batch, nheads, half):
        return
    offsets = None if offsets is None else offsets.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    blocks = block_sizes(half, nheads)
    grid = (triton.cdiv(tokens, blocks["BLOCK_M"]), triton.cdiv(nheads, blocks["BLOCK_H"]))
    with torch.cuda.device_of(x):
        rotary_kernel[grid](
            x,
            out,
            cos,
            sin,
            offsets,
            cu_seqlens,
            offset,
            tokens,
            seqlen,
            batch,
            nheads,
            cos.shape[0],
            half,
            *x_strides,
            *out_strides,
            *cos.stride(),
            *sin.stride(),
            SEARCH_STEPS=(batch - 1).bit_length(),
            INTERLEAVED=interleaved,
            CONJUGATE=conjugate,
            COMPUTE=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **blocks,
        )
