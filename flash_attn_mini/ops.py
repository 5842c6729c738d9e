"""The custom ops ``flash_attn_mini::_flash_attn_forward``, ``_flash_attn_backward`` and their varlen versions.

torch.compile, export and opcheck see these ops. Each op selects the backend and calls it. The public functions enter
through autograd.py, which adds autograd and autocast. The fake implementations give the shapes for tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import tracing
from .allocation import empty_contiguous_last
from .backends import FourTensors, Gradients, backend_of_op, select_backend
from .options import ROWS_MULTIPLE, Options, Sequences

# The arguments beside the tensors of the official functions have the names of the fields of Options and Sequences.
_OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap"
)
_LENGTHS = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_FORWARD_END = (
    "bool return_softmax, bool deterministic=False, str? backend=None)"
    " -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)"
)
_BACKWARD_TENSORS = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dsoftmax_lse"
_BACKWARD_END = "bool deterministic, Tensor? rng_state=None, bool[3] output_mask=[True, True, True], str? backend=None"
_BACKWARD_RETURNS = " -> (Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)"

library = torch.library.Library("flash_attn_mini", "DEF")
# The mask of dropout comes from torch's generators: no two calls are the same call, and recomputation has to draw
# the same mask again.
_forward_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
_backward_tags = (torch.Tag.pt2_compliant_tag,)
library.define(
    f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, {_OPTIONS}, {_FORWARD_END}",
    tags=_forward_tags,
)
library.define(
    f"_flash_attn_backward({_BACKWARD_TENSORS}, Tensor? alibi_slopes, {_OPTIONS}, {_BACKWARD_END}){_BACKWARD_RETURNS}",
    tags=_backward_tags,
)
library.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    f" Tensor? block_table, Tensor? alibi_slopes, {_LENGTHS}, {_OPTIONS}, {_FORWARD_END}",
    tags=_forward_tags,
)
library.define(
    f"_flash_attn_varlen_backward({_BACKWARD_TENSORS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes,"
    f" {_LENGTHS}, {_OPTIONS}, {_BACKWARD_END}, Tensor? block_table=None){_BACKWARD_RETURNS}",
    tags=_backward_tags,
)


@dataclass(frozen=True)
class OpPair:
    """A forward op and its backward op: for sequences of equal length (dense) or of different lengths (varlen)."""

    forward: torch._ops.OpOverload[..., Any]
    backward: torch._ops.OpOverload[..., Any]
    is_varlen: bool

    def forward_call(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call of the forward op as q, k, v, sequences and options."""
        return self._call(_names(self.forward), arguments)

    def backward_call(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call of the backward op as dout to dsoftmax_lse, sequences, options and the others."""
        return self._call(_names(self.backward), arguments)

    def _call(self, names: tuple[str, ...], arguments: Sequence[Any]) -> dict[str, Any]:
        call = dict(zip(names, arguments, strict=False))  # the dispatcher leaves out trailing default values
        sequences = Sequences(**_take(call, Sequences._fields)) if self.is_varlen else None
        return {"sequences": sequences, "options": Options(**_take(call, Options._fields)), **call}


@functools.cache
def _names(operator: torch._ops.OpOverload[..., Any]) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


def _take(call: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: call.pop(name) for name in names if name in call}


_ops = torch.ops.flash_attn_mini

DENSE = OpPair(_ops._flash_attn_forward.default, _ops._flash_attn_backward.default, is_varlen=False)
VARLEN = OpPair(_ops._flash_attn_varlen_forward.default, _ops._flash_attn_varlen_backward.default, is_varlen=True)
OP_PAIRS = (DENSE, VARLEN)


def op_pair(sequences: Sequences | None) -> OpPair:
    """The ops of a call: varlen with sequences, else dense."""
    return DENSE if sequences is None else VARLEN


# ---- calls of the ops, through the dispatcher -----------------------------------------------------------------------


def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """Call the forward op."""
    keywords = {} if sequences is None else sequences._asdict()
    return op_pair(sequences).forward(q, k, v, **keywords, **options._asdict())  # type: ignore[no-any-return]


def backward_op(
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
) -> FourTensors:
    """Call the backward op."""
    keywords = {} if sequences is None else sequences._asdict()
    keywords.update(options._asdict(), rng_state=rng_state, output_mask=output_mask)
    del keywords["return_softmax"]
    tensors = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    return op_pair(sequences).backward(*tensors, **keywords)  # type: ignore[no-any-return]


# ---- the ops themselves: select the backend and call it -------------------------------------------------------------


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """The forward op without the dispatcher."""
    backend = select_backend(q.device, options.backend)
    if tracing.enabled():
        tracing.trace(op_pair(sequences).forward._opname, q=q, k=k, v=v, backend=backend.name)
    return backend.forward(q, k, v, sequences, options)


def run_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    into: Gradients = (None, None, None),
) -> FourTensors:
    """The backward op without the dispatcher. ``into``: the tensors that receive dq, dk and dv, None for new ones."""
    backend = select_backend(q.device, options.backend)
    if tracing.enabled():
        name = op_pair(sequences).backward._opname
        tracing.trace(name, dout=dout, q=q, k=k, output_mask=output_mask, backend=backend.name)
    if sequences is not None and sequences.block_table is not None:
        raise NotImplementedError(
            "flash_attn_mini: no backend implements gradients of paged keys and values (the backward of a call with "
            "block_table); backends that have it: none. Available: torch.no_grad(), or k and v without pages"
        )
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        options = options._replace(deterministic=True)
    tensors = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    return backend.backward(*tensors, sequences, options, rng_state, output_mask, into)


def _register(pair: OpPair) -> None:
    def forward(*arguments: Any) -> FourTensors:
        call = pair.forward_call(arguments)
        options = call["options"]
        backend = backend_of_op(options.backend)
        if backend is not options.backend:
            call["options"] = options._replace(backend=backend)
        return run_forward(**call)

    def backward(*arguments: Any) -> FourTensors:
        return run_backward(**pair.backward_call(arguments))

    for dispatch_key in ("CPU", "CUDA"):
        library.impl(pair.forward._opname, forward, dispatch_key)
        library.impl(pair.backward._opname, backward, dispatch_key)


for _pair in OP_PAIRS:
    _register(_pair)


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


def _rounded(rows: int) -> int:
    return (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of softmax_lse."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@functools.cache
def _never_merge_calls() -> None:
    """Tell PyTorch's compiler that the forward ops are random: two calls with equal arguments drop different elements.

    Where it compiles training (torch 2.13), its elimination of common subexpressions reads this list and not the tags
    of the operators. Called when such an op is traced, because the import takes half a second.
    """
    from torch._functorch import compile_utils

    random_operators: list[Any] = getattr(compile_utils, "rand_ops", [])
    random_operators.extend(pair.forward.overloadpacket for pair in OP_PAIRS)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    drops = options.dropout_p > 0
    if drops:
        _never_merge_calls()
    *batch, rows, nheads, _ = q.shape
    dmask_shape: tuple[int, ...] = (0,)
    if drops and options.return_softmax:
        lengths = (rows, k.shape[1]) if sequences is None else (sequences.max_seqlen_q, sequences.max_seqlen_k)
        number = batch[0] if sequences is None else sequences.cu_seqlens_q.shape[0] - 1
        dmask_shape = (number, nheads, _rounded(lengths[0]), _rounded(lengths[1]))
    return (
        empty_contiguous_last(q),
        q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q)),
        q.new_empty(dmask_shape),
        q.new_empty((2 if drops else 0,), dtype=torch.int64),
    )


def _backward_fake(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_results: torch.Tensor | None,
    sequences: Sequences | None,
    output_mask: Sequence[bool] = (True, True, True),
    **_others: Any,
) -> FourTensors:
    dq, dk, dv = (
        empty_contiguous_last(x) if wanted else x.new_empty((0,))
        for x, wanted in zip((q, k, v), output_mask, strict=True)
    )
    *batch, rows, nheads, _ = q.shape
    if sequences is None:
        rows = _rounded(rows)
    else:  # each sequence begins at a multiple of ROWS_MULTIPLE; this many rows hold any lengths
        rows = (rows // ROWS_MULTIPLE + sequences.cu_seqlens_q.shape[0] - 1) * ROWS_MULTIPLE
    return dq, dk, dv, q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))


def _register_fakes(pair: OpPair) -> None:
    def forward(*arguments: Any) -> FourTensors:
        return _forward_fake(**pair.forward_call(arguments))

    def backward(*arguments: Any) -> FourTensors:
        return _backward_fake(**pair.backward_call(arguments))

    for operator, fake in ((pair.forward, forward), (pair.backward, backward)):
        register: Callable[..., Any] = torch.library.register_fake
        register(operator._name.removesuffix(".default"), fake, lib=library)


for _pair in OP_PAIRS:
    _register_fakes(_pair)
