"""The compiled extension ``flash_attn_mini._C``, shared by the backends that it serves."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_module: ModuleType | None = None
_error: str | None = None

try:
    _module = importlib.import_module("flash_attn_mini._C")
except ImportError as error:
    _error = f"the extension flash_attn_mini._C does not load ({error}); build it with: pip install ."


def missing_reason() -> str | None:
    """None when the extension is loaded, else why not and what to do."""
    return _error


def load() -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: If it is not built or does not load.
    """
    if _module is None:
        raise RuntimeError(f"flash_attn_mini: {_error}")
    return _module


def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alibi_slopes: torch.Tensor | None, *scalars: Any) -> Any:
    """``_C.fwd`` with the arguments of the custom op up to return_softmax."""
    out = generator = None
    return load().fwd(q, k, v, out, alibi_slopes, *scalars, generator)


def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    *scalars: Any,
) -> Any:
    """``_C.varlen_fwd`` with the arguments of the custom op up to return_softmax."""
    out = seqused_k = leftpad_k = generator = None
    zero_tensors = False
    return load().varlen_fwd(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        zero_tensors,
        *scalars,
        generator,
    )


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    *arguments: Any,
    into: Gradients = (None, None, None),
) -> Any:
    """``_C.bwd`` with the arguments of the custom op; ``into`` are dq, dk, dv to write to, None for new ones."""
    *scalars, rng_state, output_mask = arguments
    generator = None
    return load().bwd(
        dout, q, k, v, out, softmax_lse, *into, alibi_slopes, *scalars, generator, rng_state, dsoftmax_lse, output_mask
    )


def varlen_bwd(
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
    dropout_p: float,
    softmax_scale: float,
    *arguments: Any,
    into: Gradients = (None, None, None),
) -> Any:
    """``_C.varlen_bwd`` likewise."""
    *scalars, rng_state, output_mask = arguments
    zero_tensors, generator = False, None
    return load().varlen_bwd(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *into,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        zero_tensors,
        *scalars,
        generator,
        rng_state,
        dsoftmax_lse,
        output_mask,
    )


def check_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *arguments: Any,
    backend: str,
    into: Gradients,
) -> None:
    """The checks of `bwd` alone, as ``backend`` is to make them."""
    *options, _deterministic, _rng_state, _output_mask = arguments
    load().check_bwd(dout, q, k, v, out, softmax_lse, *options, dsoftmax_lse, backend, *into)


def check_varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *arguments: Any,
    backend: str,
    into: Gradients,
) -> None:
    """The checks of `varlen_bwd` alone, likewise."""
    *options, _deterministic, _rng_state, _output_mask = arguments
    load().check_varlen_bwd(dout, q, k, v, out, softmax_lse, *options, dsoftmax_lse, backend, *into)


def stored(gradient: torch.Tensor, like: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """``gradient`` in the tensor that the caller gave, or in a new one like ``like``."""
    return (torch.empty_like(like) if into is None else into).copy_(gradient)
