"""The CUDA backend: ``_C.fwd`` and its siblings, and the compiled CuTe kernels behind them.

The kernels move 16 bytes at a time, so a head dim that is not a multiple of 8 is padded here with zeros, as the
official package does; zeros change neither the scores nor, once sliced off, the output and the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import extension

HEADDIM_MULTIPLE = 8  # 16 bytes of a 16-bit type


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else why not."""
    if device.type != "cuda":
        return "it takes CUDA tensors"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    return extension.missing_reason() or _not_built_reason(device.index)


@functools.cache
def _not_built_reason(device_index: int | None) -> str | None:
    major, minor = torch.cuda.get_device_capability(device_index)
    return extension.load().cuda_unavailable_reason(major, minor) or None


def forward(*arguments: Any) -> Any:
    """``_C.fwd`` on CUDA tensors; the arguments are those of the custom op up to return_softmax."""
    return _padded_forward(extension.fwd, "check_fwd", *arguments)


def varlen_forward(*arguments: Any) -> Any:
    """``_C.varlen_fwd`` likewise."""
    return _padded_forward(extension.varlen_fwd, "check_varlen_fwd", *arguments)


def _padded_forward(
    run: Callable[..., Any], check: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> Any:
    if q.ndim == 0 or q.shape[-1] % HEADDIM_MULTIPLE == 0:
        return run(q, k, v, *arguments)

    getattr(extension.load(), check)(q, k, v, *arguments, "cuda")
    headdim = q.shape[-1]
    pad = (0, -headdim % HEADDIM_MULTIPLE)
    out, softmax_lse, S_dmask, rng_state = run(*(F.pad(x, pad) for x in (q, k, v)), *arguments)
    return torch.empty_like(q).copy_(out[..., :headdim]), softmax_lse, S_dmask, rng_state


def backward(*arguments: Any, into: extension.Gradients = (None, None, None)) -> Any:
    """``_C.bwd`` on CUDA tensors; the arguments are those of the custom op, less ``backend``."""
    return _padded_backward(extension.bwd, extension.check_bwd, *arguments, into=into)


def varlen_backward(*arguments: Any, into: extension.Gradients = (None, None, None)) -> Any:
    """``_C.varlen_bwd`` likewise."""
    return _padded_backward(extension.varlen_bwd, extension.check_varlen_bwd, *arguments, into=into)


def _padded_backward(
    run: Callable[..., Any],
    check: Callable[..., None],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *arguments: Any,
    into: extension.Gradients,
) -> Any:
    if q.ndim == 0 or q.shape[-1] % HEADDIM_MULTIPLE == 0:
        return run(dout, q, k, v, out, *arguments, into=into)

    check(dout, q, k, v, out, *arguments, backend="cuda", into=into)
    headdim = q.shape[-1]
    pad = (0, -headdim % HEADDIM_MULTIPLE)
    *gradients, softmax_d = run(*(F.pad(x, pad) for x in (dout, q, k, v, out)), *arguments)
    wanted = arguments[-1]
    dq, dk, dv = (
        extension.stored(gradient[..., :headdim], like, given) if is_wanted else gradient
        for gradient, like, given, is_wanted in zip(gradients, (q, k, v), into, wanted, strict=True)
    )
    return dq, dk, dv, softmax_d
