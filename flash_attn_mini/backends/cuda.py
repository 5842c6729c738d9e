"""The CUDA backend: ``_C.fwd`` and ``_C.bwd``, and the compiled CuTe kernels behind them.

The kernels move 16 bytes at a time, so this module pads a head dim that is not a multiple of 8 with zeros, as the
official package does. Zeros change no score, and they are sliced off the output and the gradients. A KV cache is never
padded: its kernels take any head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..options import Options, Sequences
from . import extension
from .extension import FourTensors, Gradients

HEADDIM_MULTIPLE = 8  # 16 bytes of a 16-bit type

forward_kvcache = extension.forward_kvcache


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    if device.type != "cuda":
        return "it takes CUDA tensors"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    return extension.missing_reason() or _not_built_reason(device.index)


@functools.cache
def _not_built_reason(device_index: int | None) -> str | None:
    major, minor = torch.cuda.get_device_capability(device_index)
    return extension.load().cuda_unavailable_reason(major, minor) or None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """The forward of CUDA tensors: (out, softmax_lse, S_dmask, rng_state)."""
    if q.ndim == 0 or q.shape[-1] % HEADDIM_MULTIPLE == 0:
        return extension.forward(q, k, v, sequences, options)

    extension.check_forward(q, k, v, sequences, options, "cuda")
    headdim = q.shape[-1]
    padded_q, padded_k, padded_v = _padded(q, k, v)
    out, softmax_lse, S_dmask, rng_state = extension.forward(padded_q, padded_k, padded_v, sequences, options)
    return extension.stored(out[..., :headdim], q), softmax_lse, S_dmask, rng_state


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
    """The backward of CUDA tensors: (dq, dk, dv, softmax_d)."""
    rest = (softmax_lse, dsoftmax_lse, sequences, options)
    if q.ndim == 0 or q.shape[-1] % HEADDIM_MULTIPLE == 0:
        return extension.backward(dout, q, k, v, out, *rest, rng_state, output_mask, into)

    extension.check_backward(dout, q, k, v, out, *rest, rng_state, "cuda", into)
    headdim = q.shape[-1]
    padded_dout, *padded_qkv, padded_out = _padded(dout, q, k, v, out)
    padded_q, padded_k, padded_v = padded_qkv
    *gradients, softmax_d = extension.backward(
        padded_dout, padded_q, padded_k, padded_v, padded_out, *rest, rng_state, output_mask
    )
    dq, dk, dv = (
        extension.stored(gradient[..., :headdim], like, given) if is_wanted else gradient
        for gradient, like, given, is_wanted in zip(gradients, (q, k, v), into, output_mask, strict=True)
    )
    return dq, dk, dv, softmax_d


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with zeros up to the next multiple of HEADDIM_MULTIPLE in the last dimension."""
    return [F.pad(x, (0, -x.shape[-1] % HEADDIM_MULTIPLE)) for x in tensors]
