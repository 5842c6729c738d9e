"""Rung 5: FlashAttention with the loop order of its second version: queries outside, keys inside, in Triton.

One program owns a block of queries. Their running maximum, sum and output stay in registers from the first key to the
last; the output is divided by the sum and written once. There is a program for each block of queries, so one long
sequence fills the GPU too. Loop order: Dao, arXiv 2307.08691. Needs a GPU, or TRITON_INTERPRET=1 set before Triton is
imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .flash_v1 import check_shapes

BLOCK_M = 64
BLOCK_N = 64


@triton.jit
def flash_v2_kernel(
    q,  # [batch, seqlen_q, headdim], contiguous, as are k, v and out
    k,  # [batch, seqlen_k, headdim]
    v,  # [batch, seqlen_k, headdim]
    out,  # [batch, seqlen_q, headdim]
    scale,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,  # a power of two, at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes BLOCK_M rows of one batch entry."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q += batch * seqlen_q * HEAD_DIM
    k += batch * seqlen_k * HEAD_DIM
    v += batch * seqlen_k * HEAD_DIM
    out += batch * seqlen_q * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    row_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    q_block = tl.load(q + row_offsets, mask=rows[:, None] < seqlen_q, other=0.0)  # read once
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    for start_n in range(0, seqlen_k, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        key_offsets = cols[:, None] * HEAD_DIM + dims[None, :]
        k_block = tl.load(k + key_offsets, mask=cols[:, None] < seqlen_k, other=0.0)
        v_block = tl.load(v + key_offsets, mask=cols[:, None] < seqlen_k, other=0.0)

        scores = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
        scores = tl.where(cols[None, :] < seqlen_k, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        alpha = tl.exp(row_max - new_max)
        p = tl.exp(scores - new_max[:, None])
        row_sum = alpha * row_sum + tl.sum(p, 1)
        acc = alpha[:, None] * acc + tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        row_max = new_max

    acc = acc / row_sum[:, None]  # normalised once
    tl.store(out + row_offsets, acc.to(out.dtype.element_ty), mask=rows[:, None] < seqlen_q)


def flash_attention_v2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention with queries outside and keys inside.

    Args:
        q: ``[batch, seqlen_q, headdim]``, float16 or float32 (bfloat16 too on a GPU); headdim 16, 32, 64 or 128.
        k: ``[batch, seqlen_k, headdim]``, at least one key.
        v: ``[batch, seqlen_k, headdim]``.
        scale: The factor on the scores; default ``1 / sqrt(headdim)``.

    Returns:
        out like q.

    Raises:
        ValueError: For other shapes.
    """
    check_shapes("flash_attention_v2", q, k, v)
    batch, seqlen_q, headdim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    grid = (triton.cdiv(seqlen_q, BLOCK_M), batch)
    flash_v2_kernel[grid](
        q,
        k,
        v,
        out,
        headdim**-0.5 if scale is None else scale,
        seqlen_q,
        k.shape[1],
        HEAD_DIM=headdim,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_stages=1 if q.dtype == torch.float32 else 3,  # float32 tiles of three stages exceed the shared memory
    )
    return out
