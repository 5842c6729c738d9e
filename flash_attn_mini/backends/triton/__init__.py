"""The Triton backend: forward, backward, and whether it runs on a device.

The chains: torch.ops.flash_attn_mini._flash_attn_forward -> forward (here) -> launch.forward -> flash_fwd_kernel;
torch.ops.flash_attn_mini._flash_attn_backward -> backward (here) -> launch_bwd.backward -> flash_bwd_dq_kernel, then
flash_bwd_dkv_kernel; torch.ops.flash_attn_mini._flash_attn_kvcache_forward -> forward_kvcache (here) -> kvcache.py. The
compiled extension checks the arguments, draws rng_state and computes S_dmask. The launchers
and kernels need only torch and Triton, which is imported at the first call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ...options import KvCache, Options, Sequences
from .. import extension
from ..extension import FourTensors, Gradients

__all__ = ["backward", "forward", "forward_kvcache", "unavailable_reason"]

MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 4)  # TensorDescriptor, and autotuning results kept on disk


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not. It needs no extension."""
    return _triton_missing_reason() or _device_reason(device)


def _device_reason(device: torch.device) -> str | None:
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
        return None
    if device.type != "cuda":
        return f"the triton backend needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the triton backend needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
    return None


@cache
def _triton_missing_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name, of unknown version
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"the triton backend needs triton 3.4 or newer; version {version} is installed"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """Check the arguments, then run the Triton kernel: (out, softmax_lse, S_dmask, rng_state).

    out has the strides of ``torch.empty_like(q)``. Nothing waits for the GPU.
    """
    extension.check_forward(q, k, v, sequences, options, "triton")
    from . import launch

    drops = options.dropout_p > 0
    rng_state = extension.load().draw_rng_state(q) if drops else q.new_empty((0,), dtype=torch.int64)
    q, k, v, options = q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), _readable(options)
    out, softmax_lse = launch.forward(q, k, v, sequences, options, rng_state)
    S_dmask = q.new_empty((0,))
    if options.return_softmax and drops:
        S_dmask = extension.s_dmask(q, k, rng_state, sequences, options)
    return out, softmax_lse, S_dmask, rng_state


def forward_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments, append to the caches in place, then run the Triton kernels: (out, softmax_lse).

    out has the strides of ``torch.empty_like(q)``. Nothing waits for the GPU. With split_keys the scratch for partial
    results grows with the capacity of the cache; without it, it does not.
    """
    extension.check_kvcache(q, k_cache, v_cache, cache, options, "triton")
    from . import kvcache

    readable: list[Any] = [x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in cache]
    return kvcache.forward_kvcache(q.resolve_neg(), k_cache, v_cache, KvCache(*readable), _readable(options))


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
    output_mask: Sequence[bool],
    into: Gradients = (None, None, None),
) -> FourTensors:
    """Check the arguments, then run the Triton kernels: (dq, dk, dv, softmax_d). Equal inputs give equal bits.

    P = exp(score - lse), delta = rowsum(dout * out) - dlse, dS = P * (dout v^T - delta); then dv = P^T dout,
    dq = scale * dS k and dk = scale * dS^T q (Dao 2023, arXiv:2307.08691, section 3.1.2; delta includes the gradient
    of the lse). Dropout sets P in dv and dout v^T to 0 or multiplies them by 1 / (1 - dropout_p); a cap multiplies dS
    by 1 - tanh^2.

    softmax_d is delta, float32 ``[batch, nheads, seqlen_q rounded up to a multiple of 128]`` and 0 past seqlen_q. With
    sequences it is ``[nheads, (total_q // 128 + batch) * 128]``: sequence b begins at
    ``(cu_seqlens_q[b] // 128 + b) * 128``, and zeros follow it.
    """
    tensors = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    extension.check_backward(*tensors, sequences, options, "triton", into)
    extension.load().check_rng_state(rng_state, options.dropout_p, q)
    from . import launch_bwd

    readable: list[Any] = [None if t is None else t.resolve_neg() for t in tensors]
    into_q, into_k, into_v = (None if t is None or t.stride(-1) != 1 or t.is_neg() else t for t in into)
    readable += [sequences, _readable(options), rng_state, output_mask, (into_q, into_k, into_v)]
    *gradients, softmax_d = launch_bwd.backward(*readable)
    dq, dk, dv = (
        q.new_empty((0,))
        if gradient is None
        else gradient
        if given is None or direct is given
        else given.copy_(gradient)
        for gradient, given, direct in zip(gradients, into, (into_q, into_k, into_v), strict=True)
    )
    return dq, dk, dv, softmax_d


def _readable(options: Options) -> Options:
    """The options with slopes that a kernel can read: without the lazy negation of torch."""
    slopes = options.alibi_slopes
    return options if slopes is None else options._replace(alibi_slopes=slopes.resolve_neg())
