"""The custom ops ``flash_attn_mini::_flash_attn_forward``, ``_flash_attn_backward`` and their varlen siblings.

What torch.compile, export and opcheck see. flash_attn_interface.py enters through autograd.py, which lies around them;
they pick the backend and enter it. Shapes for tracing come from the fake implementations, which allocate as the
backends do and compute nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import tracing
from .backends import Backend, Gradients, select_backend

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

ROWS_MULTIPLE = 128  # softmax_d has the rows of a sequence rounded up to it, S_dmask its rows and columns

library = torch.library.Library("flash_attn_mini", "DEF")
# The mask of dropout comes from torch's generators: no two calls are the same call, and recomputation has to draw
# again what was drawn.
_forward_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
_backward_tags = (torch.Tag.pt2_compliant_tag,)
library.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, float dropout_p, float softmax_scale,"
    " bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, bool return_softmax,"
    " bool deterministic=False, str? backend=None)"
    " -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)",
    tags=_forward_tags,
)
library.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dsoftmax_lse, Tensor? alibi_slopes, float dropout_p, float softmax_scale, bool causal,"
    " SymInt window_size_left, SymInt window_size_right, float softcap, bool deterministic, Tensor? rng_state=None,"
    " bool[3] output_mask=[True, True, True], str? backend=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)",
    tags=_backward_tags,
)
library.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " Tensor? block_table, Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p,"
    " float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap,"
    " bool return_softmax, bool deterministic=False, str? backend=None)"
    " -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)",
    tags=_forward_tags,
)
library.define(
    "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dsoftmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left,"
    " SymInt window_size_right, float softcap, bool deterministic, Tensor? rng_state=None,"
    " bool[3] output_mask=[True, True, True], str? backend=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)",
    tags=_backward_tags,
)


@dataclass(frozen=True)
class Kind:
    """What sequences of one length (dense) and those of lengths of their own (varlen) have each for themselves.

    Both take q, k, v, other tensors, and options; the options end alike: dropout_p, softmax_scale, causal, the two
    sides of the window, softcap, return_softmax, deterministic, backend.

    Attributes:
        forward: The forward op.
        backward: The backward op.
        run_forward: The forward on a backend: its entry in the registry.
        run_backward: The backward likewise.
        tensors: How many tensors the forward takes, q, k and v included.
        read_by_backward: Those of the other tensors that the backward takes.
    """

    forward: torch._ops.OpOverload[..., Any]
    backward: torch._ops.OpOverload[..., Any]
    run_forward: Callable[[Backend], Callable[..., Outputs]]
    run_backward: Callable[[Backend], Callable[..., Outputs]]
    tensors: int
    read_by_backward: Callable[..., tuple[torch.Tensor | None, ...]]


def _read_by_varlen_backward(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn_mini: no backend implements gradients of paged keys and values (block_table, with an input "
            "that requires a gradient); backends that have it: none. Available: torch.no_grad(), or k and v without "
            "pages"
        )
    return cu_seqlens_q, cu_seqlens_k, alibi_slopes


_ops = torch.ops.flash_attn_mini

DENSE = Kind(
    forward=_ops._flash_attn_forward.default,
    backward=_ops._flash_attn_backward.default,
    run_forward=lambda backend: backend.forward,
    run_backward=lambda backend: backend.backward,
    tensors=4,
    read_by_backward=lambda alibi_slopes: (alibi_slopes,),
)
VARLEN = Kind(
    forward=_ops._flash_attn_varlen_forward.default,
    backward=_ops._flash_attn_varlen_backward.default,
    run_forward=lambda backend: backend.varlen_forward,
    run_backward=lambda backend: backend.varlen_backward,
    tensors=7,
    read_by_backward=_read_by_varlen_backward,
)
KINDS = (DENSE, VARLEN)


# ---- the ops: one turn through the registry of backends -------------------------------------------------------------


def complete(operator: torch._ops.OpOverload[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call with those trailing ones that the dispatcher left out, as they are the defaults."""
    return (*arguments, *(x.default_value for x in operator._schema.arguments[len(arguments) :]))


def run_forward(kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Outputs:
    """The forward op without the dispatcher; all its arguments."""
    chosen = select_backend(q.device, arguments[-1])
    if tracing.enabled():
        tracing.trace(kind.forward._opname, q=q, k=k, v=v, backend=chosen.name)
    return kind.run_forward(chosen)(q, k, v, *arguments[:-2])  # deterministic is for the backward


def run_backward(
    kind: Kind, dout: torch.Tensor, q: torch.Tensor, *arguments: Any, into: Gradients = (None, None, None)
) -> Outputs:
    """The backward op without the dispatcher; all its arguments, and tensors for the gradients to be written to."""
    deterministic, rng_state, output_mask, backend = arguments[-4:]
    chosen = select_backend(q.device, backend)
    if tracing.enabled():
        name = kind.backward._opname
        tracing.trace(name, dout=dout, q=q, k=arguments[0], output_mask=output_mask, backend=chosen.name)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return kind.run_backward(chosen)(dout, q, *arguments[:-4], deterministic, rng_state, output_mask, into=into)


def _register(kind: Kind) -> None:
    def forward(*arguments: Any) -> Outputs:
        return run_forward(kind, *complete(kind.forward, arguments))

    def backward(*arguments: Any) -> Outputs:
        return run_backward(kind, *complete(kind.backward, arguments))

    for dispatch_key in ("CPU", "CUDA"):
        library.impl(kind.forward._opname, forward, dispatch_key)
        library.impl(kind.backward._opname, backward, dispatch_key)


for _kind in KINDS:
    _register(_kind)


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


def _rounded(rows: int) -> int:
    return (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@functools.cache
def _never_merge_calls() -> None:
    """Two calls with equal arguments drop other elements. PyTorch's compiler would make one of them where it compiles
    training (torch 2.13): its elimination of common subexpressions goes by this list, not by the operators' tags.

    Called when one is traced, as the import takes half a second.
    """
    from torch._functorch import compile_utils

    random_operators: list[Any] = getattr(compile_utils, "rand_ops", [])
    random_operators.extend(kind.forward.overloadpacket for kind in KINDS)


def _forward_results(
    q: torch.Tensor, lse_shape: tuple[int, ...], dmask_shape: tuple[int, ...], dropout_p: float, return_softmax: bool
) -> Outputs:
    drops = dropout_p > 0
    if drops:
        _never_merge_calls()
    return (
        torch.empty_like(q),
        q.new_empty(lse_shape, dtype=_lse_dtype(q)),
        q.new_empty(dmask_shape if drops and return_softmax else (0,)),
        q.new_empty((2 if drops else 0,), dtype=torch.int64),
    )


@torch.library.register_fake("flash_attn_mini::_flash_attn_forward", lib=library)
def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    deterministic: bool = False,
    backend: str | None = None,
) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    dmask_shape = (batch, nheads, _rounded(seqlen_q), _rounded(k.shape[1]))
    return _forward_results(q, (batch, nheads, seqlen_q), dmask_shape, dropout_p, return_softmax)


@torch.library.register_fake("flash_attn_mini::_flash_attn_varlen_forward", lib=library)
def _varlen_forward_fake(
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
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    deterministic: bool = False,
    backend: str | None = None,
) -> Outputs:
    total_q, nheads, _ = q.shape
    dmask_shape = (cu_seqlens_q.shape[0] - 1, nheads, _rounded(max_seqlen_q), _rounded(max_seqlen_k))
    return _forward_results(q, (nheads, total_q), dmask_shape, dropout_p, return_softmax)


def _backward_results(arguments: tuple[Any, ...], operator: Any, softmax_d_shape: tuple[int, ...]) -> Outputs:
    _dout, q, k, v, *_, output_mask, _backend = complete(operator, arguments)
    dq, dk, dv = (
        torch.empty_like(x) if wanted else x.new_empty((0,)) for x, wanted in zip((q, k, v), output_mask, strict=True)
    )
    return dq, dk, dv, q.new_empty(softmax_d_shape, dtype=_lse_dtype(q))


@torch.library.register_fake("flash_attn_mini::_flash_attn_backward", lib=library)
def _backward_fake(dout: torch.Tensor, q: torch.Tensor, *arguments: Any) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    return _backward_results((dout, q, *arguments), DENSE.backward, (batch, nheads, _rounded(seqlen_q)))


@torch.library.register_fake("flash_attn_mini::_flash_attn_varlen_backward", lib=library)
def _varlen_backward_fake(dout: torch.Tensor, q: torch.Tensor, *arguments: Any) -> Outputs:
    total_q, nheads, _ = q.shape
    cu_seqlens_q = arguments[5]
    # Each sequence begins at a multiple of 128 rows; the room for that is known without the lengths.
    rows = (total_q // ROWS_MULTIPLE + cu_seqlens_q.shape[0] - 1) * ROWS_MULTIPLE
    return _backward_results((dout, q, *arguments), VARLEN.backward, (nheads, rows))
