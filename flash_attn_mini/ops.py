"""The custom ops ``flash_attn_mini::fwd``, ``bwd``, their packed forms, ``attn_bias_bwd`` and ``fwd_kvcache``.

csrc/api/ops.cpp defines the ops with their kernels, autograd and autocast. This file calls them and has their fake
implementations, which give the shapes for tracing; vmap.py has their vmap rules. Eager code enters an op through the
extension's functions with the official argument order, which takes half the host time of ``torch.ops``. Without the
extension, the Triton backend and the reference run under a separate autograd function (backends/triton/autograd.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from .allocation import empty_contiguous_last, empty_max_logits, empty_out, lse_dtype
from .backends import extension
from .backends.extension import Gradients
from .backends.triton import ops as triton_ops
from .namespace import CUSTOM_OPS, qualified
from .options import ROWS_MULTIPLE, KvCache, Options, Sequences
from .rng_state import draw_in_program
from .schemas import EQUAL_LENGTHS

TwoTensors = tuple[torch.Tensor, torch.Tensor]
# out, softmax_lse, rng_state, max_logits
ForwardResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
BackwardResults = tuple[Any, Any, Any, torch.Tensor]  # dq, dk and dv, None where not wanted; softmax_d

PACKED_DIM = -3  # of q, k, v in qkv [..., 3, nheads, headdim], and of k, v in kv [..., 2, nheads_k, headdim]
_NO_GRADIENTS: Gradients = (None, None, None)


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether a call has to enter the op through ``torch.ops``, where tracers and ``__torch_function__`` see it."""
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or is_tracing or has_torch_function(tensors)


# ---- calls ----------------------------------------------------------------------------------------------------------


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> ForwardResults:
    """Attention with its gradient: out, softmax_lse, with dropout rng_state, and if wanted max_logits."""
    if extension.MODULE is None:
        from .backends.triton import autograd

        return autograd.forward(q, k, v, sequences, options)
    if is_traced(q, k, v):
        rng_state = _traced_rng_state(options, q, k, v)
        return CUSTOM_OPS.fwd(q, k, v, *(sequences or EQUAL_LENGTHS), *options, rng_state)  # type: ignore[no-any-return]
    return extension.forward(q, k, v, sequences, options)


def packed_forward(
    q: torch.Tensor | None, packed: torch.Tensor, sequences: Sequences | None, options: Options
) -> ForwardResults:
    """`forward` of a packed qkv (q is None), or of q and a packed kv."""
    if extension.MODULE is None:
        from .backends.triton import autograd

        return autograd.packed_forward(q, packed, sequences, options)
    if is_traced(q, packed):
        inputs = (packed,) if q is None else (q, packed)
        function, rng_state = CUSTOM_OPS.packed_fwd, _traced_rng_state(options, *inputs)
    else:
        function, rng_state = extension.MODULE.packed_fwd, None
    return function(q, packed, *(sequences or EQUAL_LENGTHS), *options, rng_state)  # type: ignore[no-any-return]


def forward_without_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
) -> TwoTensors:
    """out and softmax_lse without a gradient, with the rng_state that the caller has drawn."""
    operator = triton_ops.FORWARD if extension.MODULE is None else CUSTOM_OPS.fwd
    with torch.no_grad():
        out, softmax_lse, *_ = operator(q, k, v, *(sequences or EQUAL_LENGTHS), *options, rng_state)
    return out, softmax_lse


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
    rng_state: torch.Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    into: Gradients = _NO_GRADIENTS,
) -> BackwardResults:
    """Only the backward: dq, dk, dv, None where output_mask is False, and softmax_d.

    ``into`` has the tensors that receive the gradients, None for new ones.
    """
    tensors = (dout, q, k, v, out, softmax_lse)
    given = [x for x in into if x is not None]
    if given and not is_traced(*tensors, *given):
        run = triton_ops.backward_into if extension.MODULE is None else extension.backward
        return run(*tensors, dsoftmax_lse, sequences, options, rng_state, output_mask, into)
    operator = triton_ops.BACKWARD if extension.MODULE is None else CUSTOM_OPS.bwd
    *gradients, softmax_d = operator(
        *tensors, dsoftmax_lse, *(sequences or EQUAL_LENGTHS), *options, rng_state, list(output_mask)
    )
    dq, dk, dv = (x if to is None or x is None else to.copy_(x) for x, to in zip(gradients, into, strict=True))
    return dq, dk, dv, softmax_d


def forward_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> TwoTensors:
    """Write the new keys and values to the caches, then attend: out and softmax_lse."""
    if extension.MODULE is None:
        from .backends.triton import autograd

        return autograd.forward_kvcache(q, k_cache, v_cache, cache, options)
    if is_traced(q, k_cache, v_cache, cache.k, cache.v):
        return CUSTOM_OPS.fwd_kvcache(q, k_cache, v_cache, *cache, *options)  # type: ignore[no-any-return]
    return extension.forward_kvcache(q, k_cache, v_cache, cache, options)


def _traced_rng_state(options: Options, *inputs: torch.Tensor) -> torch.Tensor | None:
    """rng_state as an argument of a compiled call: no two calls then have equal arguments, so that none are merged."""
    return draw_in_program(*inputs) if options.dropout_p > 0 and torch.compiler.is_compiling() else None


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


# Compiled autograd traces a node with stand-ins for them: empty tensors on the CPU.
_ARRIVING = ("dout", "dsoftmax_lse")


def _check_devices(names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raise ValueError unless all tensors are on one device: PyTorch calls a fake for any tensor on "meta"."""
    tensors = {name: x for name, x in zip(names, arguments, strict=False) if isinstance(x, torch.Tensor)}
    first = "q" if "q" in tensors else "packed"
    device = tensors[first].device
    for name, x in tensors.items():
        is_stand_in = name in _ARRIVING and x.numel() == 0
        if x.device != device and not is_stand_in:
            raise ValueError(f"{name} is on {x.device}; allowed: the device of {first}, {device}")


_QKV = ("q", "k", "v")
_FORWARD_END = (*Sequences._fields, *Options._fields, "rng_state")
_RESULTS = ("out", "softmax_lse", "dsoftmax_lse")


def _forward_fake(*arguments: Any) -> ForwardResults:
    _check_devices((*_QKV, *_FORWARD_END), arguments)
    q, _, v, *others = arguments
    return _forward_results(q, v, *others)


def _packed_forward_fake(q: torch.Tensor | None, packed: torch.Tensor, *arguments: Any) -> ForwardResults:
    _check_devices(("q", "packed", *_FORWARD_END), (q, packed, *arguments))
    parts = packed.unbind(PACKED_DIM)
    return _forward_results(parts[0] if q is None else q, parts[-1], *arguments)


def _forward_results(q: torch.Tensor, v: torch.Tensor, *arguments: Any) -> ForwardResults:
    options = Options(*arguments[len(EQUAL_LENGTHS) : -1])
    rng_state = q.new_empty((2,), dtype=torch.int64) if options.dropout_p > 0 else None
    return empty_out(q, v), _empty_lse(q), rng_state, empty_max_logits(q, options)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    *batch, rows, nheads, _ = q.shape
    return q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))


def _backward_fake(*arguments: Any) -> BackwardResults:
    _check_devices(("dout", *_QKV, *_RESULTS, *_FORWARD_END), arguments)
    qkv, cu_seqlens_q, output_mask = arguments[1:4], arguments[7], arguments[-1]
    dq, dk, dv = (empty_contiguous_last(x) if wanted else None for x, wanted in zip(qkv, output_mask, strict=True))
    return dq, dk, dv, _empty_softmax_d(qkv[0], cu_seqlens_q)


def _packed_backward_fake(*arguments: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    _check_devices(("dout", "q", "packed", *_RESULTS, *_FORWARD_END), arguments)
    _, q, packed, out, _, _, cu_seqlens_q, *_ = arguments
    needs_q, needs_packed = arguments[-1]
    dq = empty_contiguous_last(q) if needs_q and q is not None else None
    dpacked = empty_contiguous_last(packed) if needs_packed else None
    return dq, dpacked, _empty_softmax_d(out, cu_seqlens_q)


_BIAS_BACKWARD = ("dout", *_QKV, "softmax_lse", "softmax_d", *Options._fields, "rng_state")


def _attn_bias_backward_fake(*arguments: Any) -> torch.Tensor:
    _check_devices(_BIAS_BACKWARD, arguments)
    attn_bias: torch.Tensor = arguments[_BIAS_BACKWARD.index("attn_bias")]
    return attn_bias.new_empty(attn_bias.shape)


def _empty_softmax_d(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
    *batch, rows, nheads, _ = q.shape
    if cu_seqlens_q is None:
        rows = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    else:  # each sequence begins at a multiple of ROWS_MULTIPLE; this many rows hold any lengths
        rows = (rows // ROWS_MULTIPLE + cu_seqlens_q.shape[0] - 1) * ROWS_MULTIPLE
    return q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))


def _forward_kvcache_fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments: Any) -> TwoTensors:
    names = ("q", "k_cache", "v_cache", *KvCache._fields, *Options._fields)
    _check_devices(names, (q, k_cache, v_cache, *arguments))
    return empty_out(q, v_cache), _empty_lse(q)


def _forward_kvcache_backward_fake(dout: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return dout.new_empty(size)


if extension.MODULE is not None:
    for _name, _fake in {
        "fwd": _forward_fake,
        "bwd": _backward_fake,
        "packed_fwd": _packed_forward_fake,
        "packed_bwd": _packed_backward_fake,
        "attn_bias_bwd": _attn_bias_backward_fake,
        "fwd_kvcache": _forward_kvcache_fake,
        "fwd_kvcache_backward": _forward_kvcache_backward_fake,
    }.items():
        torch.library.register_fake(qualified(_name))(_fake)
