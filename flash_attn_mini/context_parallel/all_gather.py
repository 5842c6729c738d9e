"""Strategy ``all_gather``: every rank gathers all keys and values and works on them in global order.

Two messages a direction, but memory for K, V, dK and dV of all ranks, and nothing hides the communication. Gradients of
keys are summed over the ranks in float32, in the order of the ranks.
"""

from __future__ import annotations

import torch

from . import blocks, kernels, transport
from .kernels import Attention, BackwardInputs
from .merge import Total
from .ring import ThreeTensors

NAME = "all_gather"


def forward(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and log-sum-exp of the local queries."""
    calls = blocks.plan_of_gathered(attention.shards, attention.mask, attention.is_packed)
    partial = kernels.partial_of(q)
    all_k, all_v = _gathered(attention, k, v, "forward")
    kernels.forward(attention, calls, q, all_k, all_v, partial)
    return partial.result_with_lse(q.dtype)


def backward(attention: Attention, inputs: BackwardInputs) -> ThreeTensors:
    """dq, dk and dv of the local tensors, None for those not wanted."""
    calls = blocks.plan_of_gathered(attention.shards, attention.mask, attention.is_packed)
    q, wanted = inputs.q, inputs.wanted
    all_k, all_v = _gathered(attention, inputs.k, inputs.v, "backward")
    wide = kernels.sums_dtype(q)
    dq, dkv = Total(q, wide), Total(all_k, wide, number=sum(wanted[1:]))
    kernels.backward(attention, calls, inputs._replace(k=all_k, v=all_v), dq, dkv)
    shards = attention.shards
    sums = iter(dkv.results(wide))
    results: list[torch.Tensor | None] = [dq.result(q.dtype) if wanted[0] else None]
    for name, is_wanted in zip(("dK", "dV"), wanted[1:], strict=True):
        if not is_wanted:
            results.append(None)
            continue
        by_rank = shards.to_ranks(tokens_first(next(sums)))
        where = attention.where(NAME, "backward", f"sum of {name}")
        mine = transport.sum_of_rows(by_rank, shards.tokens, shards.group, where).to(q.dtype)
        results.append(mine if attention.is_packed else mine.transpose(0, 1).contiguous())
    return results[0], results[1], results[2]


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """A view with the tokens in dimension 0."""
    return x.transpose(0, 1) if x.ndim == 4 else x


def _gathered(attention: Attention, k: torch.Tensor, v: torch.Tensor, direction: str) -> list[torch.Tensor]:
    """K and V of all ranks, in global order."""
    shards = attention.shards
    where = attention.where(NAME, direction, "K and V of all ranks")
    kv = torch.stack([tokens_first(k), tokens_first(v)], dim=-3)  # [tokens_local, (batch,) 2, nheads_k, headdim]
    gathered = shards.to_global(transport.all_gather_rows(kv, shards.tokens, shards.group, where))
    return [x if attention.is_packed else x.transpose(0, 1) for x in gathered.unbind(-3)]
