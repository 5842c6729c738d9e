"""The Triton backend behind the registry: the shared argument checks, then backends/triton/.

backends/triton/ itself imports only torch and Triton, so that its kernels can be read and tuned on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    dense = None, None, q.shape[1], k.shape[1]
    return _forward(q, k, v, dense, None, *arguments)


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *scalars: Any,
) -> Any:
    """The same for sequences of variable length."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    extension.load().check_varlen_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, *scalars, "triton"
    )
    return _forward(q, k, v, lengths, block_table, alibi_slopes, *scalars)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[Any, Any, int, int],  # cu_seqlens_q and cu_seqlens_k, None when dense; longest sequences
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
) -> Any:
    mask = causal, window_size_left, window_size_right
    rng_state = extension.load().draw_rng_state(q) if dropout_p > 0 else q.new_empty((0,), dtype=torch.int64)
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.resolve_neg()
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    scaled_q, scale = q, softmax_scale
    if abs(softmax_scale) < FLOAT32_TINY:  # 0 to the kernel: every visible key weighs the same, as q = 0 has it
        scaled_q, scale = torch.zeros_like(q), 1.0
    options = _options(alibi_slopes, dropout_p, scale, *mask, softcap, rng_state)
    if lengths[0] is None:
        out, softmax_lse = triton.forward(scaled_q, k, v, **options)
    else:
        out, softmax_lse = triton.varlen_forward(scaled_q, k, v, *lengths, **options, block_table=block_table)
    S_dmask = q.new_empty((0,))
    if return_softmax and dropout_p > 0:
        S_dmask = extension.load().s_dmask(
            q, k, rng_state, *lengths, alibi_slopes, dropout_p, softmax_scale, *mask, softcap, block_table
        )
    return out, softmax_lse, S_dmask, rng_state


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
    tensors = dout, q, k, v, out, softmax_lse, dsoftmax_lse
    extension.check_bwd(*tensors, *arguments, backend="triton", into=into)
    return _backward(tensors, (), *arguments, into=into)


def varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *scalars: Any,
    into: extension.Gradients = (None, None, None),
) -> Any:
    """The same for sequences of variable length."""
    tensors = dout, q, k, v, out, softmax_lse, dsoftmax_lse
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    arguments = cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, *scalars
    extension.check_varlen_bwd(*tensors, *arguments, backend="triton", into=into)
    return _backward(tensors, lengths, alibi_slopes, *scalars, into=into)


def _backward(
    tensors: tuple[torch.Tensor | None, ...],
    lengths: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    _deterministic: bool,
    rng_state: torch.Tensor | None,
    output_mask: Sequence[bool],
    *,
    into: extension.Gradients,
) -> Any:
    resolved: list[Any] = [None if t is None else t.resolve_neg() for t in tensors]
    q = resolved[1]
    extension.load().check_rng_state(rng_state, dropout_p, q)
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.resolve_neg()
    mask = causal, window_size_left, window_size_right
    options = _options(alibi_slopes, dropout_p, softmax_scale, *mask, softcap, rng_state)
    run: Any = triton.varlen_backward if lengths else triton.backward
    written = [None if t is None or t.stride(-1) != 1 or t.is_neg() else t for t in into]  # by the kernels themselves
    *gradients, softmax_d = run(*resolved, *lengths, **options, output_mask=tuple(output_mask), into=tuple(written))
    results = []
    for gradient, given, direct in zip(gradients, into, written, strict=True):
        if gradient is None:
            results.append(q.new_empty((0,)))
        elif given is None:
            results.append(gradient)
        else:
            results.append(given if direct is given else given.copy_(gradient))
    return (*results, softmax_d)


def _options(
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rng_state: torch.Tensor | None,
) -> dict[str, Any]:
    """The options as backends.triton takes them."""
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "rng_state": rng_state,
    }
