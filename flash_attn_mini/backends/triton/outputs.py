"""Allocates the output of a call, real or fake."""

from __future__ import annotations

import torch

from ...allocation import empty_contiguous_last


def empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for out: ``empty_contiguous_last(q)``, or contiguous where v has another head dim.

    The extension's function of the same name (csrc/api/allocation.h) has the same rule.
    """
    if v.shape[-1] == q.shape[-1]:
        return empty_contiguous_last(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))
