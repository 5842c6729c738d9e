"""The Triton backend behind the registry: the shared argument checks, then backends/triton/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..options import Options, Sequences
from . import extension, triton

FLOAT32_TINY = torch.finfo(torch.float32).tiny


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not."""
    return extension.missing_reason() or triton.unavailable_reason(device)


def _keywords(options: Options, rng_state: torch.Tensor | None, softmax_scale: float) -> dict[str, Any]:
    slopes = options.alibi_slopes
    return {
        "softmax_scale": softmax_scale,
        "causal": options.causal,
        "window_size": (options.window_size_left, options.window_size_right),
        "softcap": options.softcap,
        "alibi_slopes": None if slopes is None else slopes.resolve_neg(),
        "dropout_p": options.dropout_p,
        "rng_state": rng_state,
    }


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> extension.FourTensors:
    """Check the arguments, then run the Triton kernel."""
    extension.check_forward(q, k, v, sequences, options, "triton")
    drops = options.dropout_p > 0
    rng_state = extension.load().draw_rng_state(q) if drops else q.new_empty((0,), dtype=torch.int64)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    scaled_q, scale = q, options.softmax_scale
    if abs(scale) < FLOAT32_TINY:  # a scale of 0 weighs all visible keys alike, as q = 0 does
        scaled_q, scale = torch.zeros_like(q), 1.0
    keywords = _keywords(options, rng_state, scale)
    if sequences is None:
        out, softmax_lse = triton.forward(scaled_q, k, v, **keywords)
    else:
        keywords["block_table"] = sequences.block_table
        out, softmax_lse = triton.varlen_forward(scaled_q, k, v, *sequences[:4], **keywords)
    S_dmask = q.new_empty((0,))
    if options.return_softmax and drops:
        S_dmask = extension.s_dmask(q, k, rng_state, sequences, options)
    return out, softmax_lse, S_dmask, rng_state


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
    into: extension.Gradients = (None, None, None),
) -> extension.FourTensors:
    """Check the arguments, then run the Triton kernels, which always give the same bits for the same inputs."""
    tensors = dout, q, k, v, out, softmax_lse, dsoftmax_lse
    extension.check_backward(*tensors, sequences, options, "triton", into)
    extension.load().check_rng_state(rng_state, options.dropout_p, q)
    resolved: list[Any] = [None if t is None else t.resolve_neg() for t in tensors]
    keywords = _keywords(options, rng_state, options.softmax_scale)
    run: Any = triton.backward if sequences is None else triton.varlen_backward
    lengths = () if sequences is None else sequences[:4]
    written = tuple(None if t is None or t.stride(-1) != 1 or t.is_neg() else t for t in into)
    *gradients, softmax_d = run(*resolved, *lengths, **keywords, output_mask=tuple(output_mask), into=written)
    dq, dk, dv = (
        q.new_empty((0,))
        if gradient is None
        else gradient
        if given is None or direct is given
        else given.copy_(gradient)
        for gradient, given, direct in zip(gradients, into, written, strict=True)
    )
    return dq, dk, dv, softmax_d
