"""Helpers of the functions that have the official signatures. Some of them write gradients to given tensors."""

from __future__ import annotations

import torch

from . import ops
from .backends.extension import Gradients
from .options import Options, Sequences


@torch.no_grad()
def backward_into(
    gradients: Gradients,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """Run the backward into tensors of the caller, None where a gradient is not wanted. Returns softmax_d."""
    wanted = tuple(x is not None for x in gradients)
    tensors = (dout, q, k, v, out, softmax_lse)
    return ops.backward(*tensors, None, sequences, options, rng_state, wanted, gradients)[3]


def results_of(
    out: torch.Tensor, probs: tuple[torch.Tensor, torch.Tensor] | None, max_logits: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What a public function returns. probs: softmax_lse and S_dmask, with return_attn_probs."""
    results = (out, *(probs or ()), *(() if max_logits is None else (max_logits,)))
    return out if len(results) == 1 else results


def empty_rng_state(q: torch.Tensor) -> torch.Tensor:
    """The rng_state of a forward without dropout."""
    return q.new_empty((0,), dtype=torch.int64)
