"""Rung 3: the loop of online_softmax.py as a minimal Triton kernel for a single head.

Plain loads, one tile size, a mask in every block. backends/triton/ has the full kernels. Needs a GPU, or
TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

BLOCK_M = 64
BLOCK_N = 64


@triton.jit
def minimal_kernel(
    q,  # [seqlen_q, headdim], contiguous, as are k, v and out
    k,  # [seqlen_k, headdim]
    v,  # [seqlen_k, headdim]
    out,  # [seqlen_q, headdim]
    scale,
    seqlen_q,
    SEQLEN_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # a power of two, at least 16
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes BLOCK_M rows of out."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_block = tl.load(q + rows[:, None] * HEAD_DIM + dims[None, :], mask=rows[:, None] < seqlen_q, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    for start_n in range(0, SEQLEN_K, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        in_range = cols[:, None] < SEQLEN_K
        k_block = tl.load(k + cols[:, None] * HEAD_DIM + dims[None, :], mask=in_range, other=0.0)
        v_block = tl.load(v + cols[:, None] * HEAD_DIM + dims[None, :], mask=in_range, other=0.0)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
        last_key = tl.full([BLOCK_M], SEQLEN_K - 1, tl.int32)
        if CAUSAL:
            last_key = tl.minimum(rows + SEQLEN_K - seqlen_q, last_key)
        scores = tl.where(cols[None, :] <= last_key[:, None], scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp(scores - shift[:, None])
        alpha = tl.exp(row_max - shift)
        row_sum = alpha * row_sum + tl.sum(p, 1)
        acc = alpha[:, None] * acc + tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        row_max = new_max

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_pointers = out + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=rows[:, None] < seqlen_q)


def minimal_triton_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of a single head.

    Args:
        q: ``[seqlen_q, headdim]``, float16 or float32 (bfloat16 too on a GPU); headdim 16, 32, 64 or 128.
        k: ``[seqlen_k, headdim]``, at least one key.
        v: ``[seqlen_k, headdim]``.
        softmax_scale: The factor on the scores; default ``1 / sqrt(headdim)``.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.

    Returns:
        out like q; 0 for a query that sees no key.

    Raises:
        ValueError: For any other head dim.
    """
    seqlen_q, headdim = q.shape
    if headdim not in (16, 32, 64, 128):
        raise ValueError(f"minimal_triton_attention: headdim is {headdim}; allowed: 16, 32, 64 and 128")
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    minimal_kernel[(triton.cdiv(seqlen_q, BLOCK_M),)](
        q,
        k,
        v,
        out,
        scale,
        seqlen_q,
        SEQLEN_K=k.shape[0],
        HEAD_DIM=headdim,
        CAUSAL=causal,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
    return out
