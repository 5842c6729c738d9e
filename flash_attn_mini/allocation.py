"""New memory in Python code: outputs and gradients, real or fake, and copies that kernels can read."""

from __future__ import annotations

import torch


def empty_contiguous_last(like: torch.Tensor) -> torch.Tensor:
    """Unset memory for an output or a gradient. The last dimension is contiguous, as the kernels require.

    The strides are those of ``torch.empty_like`` where these have that, else those of a contiguous tensor. A head dim
    of 1 gives a contiguous tensor too: ``empty_like`` and its fake implementation do not agree there. The extension's
    function of the same name (csrc/api/allocation.h) has the same rule.
    """
    x = torch.empty_like(like)
    return x if x.stride(-1) == 1 and x.shape[-1] != 1 else like.new_empty(like.shape)


def without_neg(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a contiguous copy if it is a lazily negated view: kernels read memory as it is."""
    return x.clone(memory_format=torch.contiguous_format) if x.is_neg() else x


def contiguous_float(x: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy, or ``x`` if it is one."""
    return x.to(torch.float32, memory_format=torch.contiguous_format)
