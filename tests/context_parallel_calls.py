"""What the processes of test_context_parallel.py run: each function takes the group first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import cp_flash_attn_func, cp_flash_attn_varlen_func, packed_shards, zigzag_shards
from flash_attn_mini.context_parallel import Shards

Lengths = int | tuple[int, ...]  # of one sequence, or of packed documents


def shards_of(lengths: Lengths, group: Any) -> Shards:
    if isinstance(lengths, int):
        return zigzag_shards(lengths, group)
    return packed_shards(torch.tensor([0, *lengths]).cumsum(0), group)


def draw(
    lengths: Lengths, batch: int, heads: tuple[int, int], headdim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, ...]:
    """q, k, v, dout and the gradient of the log-sum-exp: global tensors, packed if the lengths are."""
    generator = torch.Generator().manual_seed(seed)
    before = (batch, lengths) if isinstance(lengths, int) else (sum(lengths),)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, dout = (normal(*before, count, headdim) for count in (heads[0], heads[1], heads[1], heads[0]))
    lse_shape = (batch, heads[0], lengths) if isinstance(lengths, int) else (heads[0], sum(lengths))
    dlse = torch.randn(lse_shape, generator=generator, dtype=torch.float64)
    return q, k, v, dout, dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def attend(
    group: Any, lengths: Lengths, tensors: tuple[Tensor, ...], strategy: str, options: dict[str, Any]
) -> tuple[Tensor, ...] | None:
    """out, log-sum-exp, dq, dk and dv, merged; from the first rank alone."""
    shards = shards_of(lengths, group)
    is_packed = not isinstance(lengths, int)
    function = cp_flash_attn_varlen_func if is_packed else cp_flash_attn_func
    rows = 0 if is_packed else 1
    q, k, v, dout, dlse = tensors
    leaves = [shards.split(x, rows).requires_grad_() for x in (q, k, v)]
    out, lse, _ = function(*leaves, shards, **options, strategy=strategy, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), leaves, (shards.split(dout, rows), shards.split(dlse, -1)))
    merged = [shards.merge(out.detach(), rows), shards.merge(lse.detach(), -1)]
    merged += [shards.merge(x, rows) for x in gradients]
    return tuple(merged) if shards.rank == 0 else None
