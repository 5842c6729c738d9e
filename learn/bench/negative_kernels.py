"""The Triton kernel of negative.py: rung 5 (learn/flash_v2.py) with the two ideas as options."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_attn_mini.backends.triton import interpreter  # noqa: F401  # loops in Triton's interpreter, recent NumPy

BLOCK_M = 128
BLOCK_N = 64


@triton.jit
def attend(
    q,  # [batch, seqlen, headdim], contiguous, as are v and out; seqlen is a multiple of BLOCK_M
    k,  # [batch, seqlen, headdim], or with K_TRANSPOSED [batch, headdim, seqlen]
    v,
    out,
    scale_log2,  # softmax_scale * log2(e), positive
    seqlen,
    HEAD_DIM: tl.constexpr,
    K_TRANSPOSED: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes BLOCK_M rows of one batch entry."""
    first = tl.program_id(1).to(tl.int64) * seqlen * HEAD_DIM
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    row_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + first + row_offsets)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in tl.range(0, seqlen, BLOCK_N, warp_specialize=SPECIALIZE):
        keys = start_n + cols
        v_tile = tl.load(v + first + keys[:, None] * HEAD_DIM + dims[None, :])
        if K_TRANSPOSED:
            k_tile = tl.load(k + first + dims[:, None] * seqlen + keys[None, :])  # (HEAD_DIM, BLOCK_N) as it lies
        else:
            k_tile = tl.trans(tl.load(k + first + keys[:, None] * HEAD_DIM + dims[None, :]))
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.math.exp2((scores - new_max[:, None]) * scale_log2)
        alpha = tl.math.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
        row_max = new_max
    acc = acc / row_sum[:, None]
    tl.store(out + first + row_offsets, acc.to(out.dtype.element_ty))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_transposed: bool = False,
    specialize: bool = False,
) -> torch.Tensor:
    """Attention of ``[batch, seqlen, headdim]``; with k_transposed, k is ``[batch, headdim, seqlen]``, contiguous."""
    batch, seqlen, headdim = q.shape
    if seqlen % BLOCK_M:
        raise ValueError(f"attention: seqlen is {seqlen}; allowed: multiples of {BLOCK_M}")
    out = torch.empty_like(q)
    attend[(seqlen // BLOCK_M, batch)](
        q,
        k,
        v,
        out,
        headdim**-0.5 * 1.4426950408889634,
        seqlen,
        HEAD_DIM=headdim,
        K_TRANSPOSED=k_transposed,
        SPECIALIZE=specialize,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
    return out
