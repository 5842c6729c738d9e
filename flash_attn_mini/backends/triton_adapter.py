"""The Triton backend behind the registry: the shared argument checks, then backends/triton/.

backends/triton/ itself imports only torch and Triton, so that its kernels can be read and tuned on their own.
"""

from __future__ import annotations

from typing import Any

import torch

from . import extension, triton

FLOAT32_TINY = torch.finfo(torch.float32).tiny


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else why not."""
    return extension.missing_reason() or triton.unavailable_reason(device)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
    """Check as every backend does, then run the Triton kernel; ``arguments`` are those of the custom op."""
    extension.load().check_fwd(q, k, v, *arguments, "triton")
    _, _, softmax_scale, causal, *_ = arguments
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if abs(softmax_scale) < FLOAT32_TINY:  # 0 to the kernel: every visible key weighs the same, as q = 0 has it
        q, softmax_scale = torch.zeros_like(q), 1.0
    out, softmax_lse = triton.forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
    return out, softmax_lse, q.new_empty((0,)), q.new_empty((0,), dtype=torch.int64)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *arguments: Any,
    into: extension.Gradients = (None, None, None),
) -> Any:
    """Check likewise, then run the Triton kernels, which always give the same bits for the same inputs."""
    extension.check_bwd(dout, q, k, v, out, softmax_lse, dsoftmax_lse, *arguments, backend="triton", into=into)
    _, _, softmax_scale, causal, *_, output_mask = arguments
    *gradients, softmax_d = triton.backward(
        dout.resolve_neg(),
        q.resolve_neg(),
        k.resolve_neg(),
        v.resolve_neg(),
        out.resolve_neg(),
        softmax_lse.resolve_neg(),
        None if dsoftmax_lse is None else dsoftmax_lse.resolve_neg(),
        softmax_scale=softmax_scale,
        causal=causal,
        output_mask=output_mask,
    )
    dq, dk, dv = (
        q.new_empty((0,)) if gradient is None else gradient if given is None else given.copy_(gradient)
        for gradient, given in zip(gradients, into, strict=True)
    )
    return dq, dk, dv, softmax_d
