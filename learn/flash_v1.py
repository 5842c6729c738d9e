"""Rung 4: FlashAttention with the loop order of its first version: keys outside, queries inside, in Triton.

One program owns a batch entry. It loads a block of keys once and visits all blocks of queries with it, so the running
maximum, sum and output of every query lie in GPU memory: they are read and written again for each block of keys.
Loop order: Dao et al., arXiv 2205.14135, algorithm 1. Needs a GPU, or TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from flash_attn_mini.backends.triton import interpreter  # noqa: F401  # lets loops run in Triton's interpreter with a recent NumPy

BLOCK_M = 64
BLOCK_N = 64


@triton.jit
def flash_v1_kernel(
    q,  # [batch, seqlen_q, headdim], contiguous, as are k, v and out
    k,  # [batch, seqlen_k, headdim]
    v,  # [batch, seqlen_k, headdim]
    out,  # [batch, seqlen_q, headdim] float32, zeros at the start
    row_max,  # [batch, seqlen_q] float32, -inf at the start
    row_sum,  # [batch, seqlen_q] float32, zeros at the start
    scale,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,  # a power of two, at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes one batch entry."""
    batch = tl.program_id(0).to(tl.int64)
    q += batch * seqlen_q * HEAD_DIM
    k += batch * seqlen_k * HEAD_DIM
    v += batch * seqlen_k * HEAD_DIM
    out += batch * seqlen_q * HEAD_DIM
    row_max += batch * seqlen_q
    row_sum += batch * seqlen_q
    dims = tl.arange(0, HEAD_DIM)

    for start_n in range(0, seqlen_k, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        key_offsets = cols[:, None] * HEAD_DIM + dims[None, :]
        k_block = tl.load(k + key_offsets, mask=cols[:, None] < seqlen_k, other=0.0)  # read once
        v_block = tl.load(v + key_offsets, mask=cols[:, None] < seqlen_k, other=0.0)

        for start_m in range(0, seqlen_q, BLOCK_M):
            rows = start_m + tl.arange(0, BLOCK_M)
            is_row = rows < seqlen_q
            row_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
            q_block = tl.load(q + row_offsets, mask=is_row[:, None], other=0.0)
            old_max = tl.load(row_max + rows, mask=is_row, other=0.0)
            old_sum = tl.load(row_sum + rows, mask=is_row, other=1.0)
            old_out = tl.load(out + row_offsets, mask=is_row[:, None], other=0.0)

            scores = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
            scores = tl.where(cols[None, :] < seqlen_k, scores, float("-inf"))
            new_max = tl.maximum(old_max, tl.max(scores, 1))
            alpha = tl.exp(old_max - new_max)
            p = tl.exp(scores - new_max[:, None])
            new_sum = alpha * old_sum + tl.sum(p, 1)
            acc = (alpha * old_sum)[:, None] * old_out + tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")

            tl.store(out + row_offsets, acc / new_sum[:, None], mask=is_row[:, None])  # normalised in every step
            tl.store(row_max + rows, new_max, mask=is_row)
            tl.store(row_sum + rows, new_sum, mask=is_row)
        tl.debug_barrier()  # what one thread has stored, another may load in the next round


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention with keys outside and queries inside.

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
    check_shapes("flash_attention", q, k, v)
    batch, seqlen_q, headdim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    row_max = torch.full((batch, seqlen_q), -math.inf, dtype=torch.float32, device=q.device)
    row_sum = torch.zeros_like(row_max)
    flash_v1_kernel[(batch,)](
        q,
        k,
        v,
        out,
        row_max,
        row_sum,
        headdim**-0.5 if scale is None else scale,
        seqlen_q,
        k.shape[1],
        HEAD_DIM=headdim,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_stages=1 if q.dtype == torch.float32 else 3,  # float32 tiles of three stages exceed the shared memory
    )
    return out.to(q.dtype)


def check_shapes(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """ValueError unless the shapes are those of one attention call."""
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name}: q has shape {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; allowed: "
            "[batch, seqlen_q, headdim] and twice [batch, seqlen_k, headdim]"
        )
    if q.shape[2] not in (16, 32, 64, 128):
        raise ValueError(f"{name}: headdim is {q.shape[2]}; allowed: 16, 32, 64 and 128")
    if k.shape[1] == 0:
        raise ValueError(f"{name}: k has no keys; allowed: at least one")
