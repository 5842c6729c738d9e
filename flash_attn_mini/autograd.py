"""Autograd and autocast around the custom ops of ops.py, and the way past the dispatcher where nobody listens to it.

The same for both kinds of op, dense and varlen. flash_attn_interface.py enters here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .backends import Gradients, select_backend, settle_backend, settled_name
from .ops import KINDS, Kind, Outputs, complete, library, run_backward, run_forward

# Where options are that all kinds of op have at their end: dropout_p, softmax_scale, causal, window_size_left,
# window_size_right, softcap, return_softmax, deterministic, backend.
DROPOUT_P, RETURN_SOFTMAX, DETERMINISTIC, BACKEND = -9, -3, -2, -1
PACKED_DIM = -3  # of q, k, v in qkv [..., 3, nheads, headdim], and of k, v in kv [..., 2, nheads_k, headdim]


class FlashAttnFunc(torch.autograd.Function):
    """Attention as autograd sees it: softmax_lse is an output like any other, with a gradient of its own.

    Inputs: the kind of op, what runs the forward, the op's options as one tuple, q, k, v, and its other tensors. Saved
    are q, k, v, out and softmax_lse, nothing of seqlen_q x seqlen_k. The backward runs on the forward's backend,
    whatever ``use_backend`` says by then, and computes the gradients of those inputs alone that need one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: Kind,
        run: Callable[..., Outputs],
        options: tuple[Any, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *others: torch.Tensor | None,
    ) -> Outputs:
        """Run the forward op and keep what the backward reads."""
        read_by_backward = kind.read_by_backward(*others)
        results = run(kind, q, k, v, *others, *options)
        return _keep(ctx, kind, options, results, read_by_backward, q, k, v)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dsoftmax_lse: torch.Tensor | None, *unused: None) -> Any:
        """None for dout or dsoftmax_lse where nothing arrived."""
        needs_input_grad = ctx.needs_input_grad
        if dout is None and dsoftmax_lse is None:
            return (None,) * len(needs_input_grad)
        saved = ctx.saved_tensors
        gradients = _gradients(ctx, dout, dsoftmax_lse, saved[:3], saved[3:], needs_input_grad[3:6])
        return (None, None, None, *gradients, *(None,) * (len(needs_input_grad) - 6))


class FlashAttnPackedFunc(torch.autograd.Function):
    """`FlashAttnFunc` of q, k and v in one tensor, or k and v in one beside q, whose gradient is one tensor too.

    Inputs: the kind of op, its options, q or None, the packed tensor, and the op's other tensors. Only for calls that
    nobody listens to: in front of the dispatcher the parts are tensors of their own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: Kind,
        options: tuple[Any, ...],
        q: torch.Tensor | None,
        packed: torch.Tensor,
        *others: torch.Tensor | None,
    ) -> Outputs:
        """Run the forward on views and keep the packed tensor."""
        read_by_backward = kind.read_by_backward(*others)
        results = run_forward(kind, *unpacked(q, packed), *others, *options)
        return _keep(ctx, kind, options, results, read_by_backward, q, packed)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dsoftmax_lse: torch.Tensor | None, *unused: None) -> Any:
        """The kernels write to views of the packed gradient, where they can be given tensors to write to."""
        needs_input_grad = ctx.needs_input_grad
        if dout is None and dsoftmax_lse is None:
            return (None,) * len(needs_input_grad)
        q, packed, *kept = ctx.saved_tensors
        needs_q, needs_packed = needs_input_grad[2:4]
        wanted = (needs_packed if q is None else needs_q, needs_packed, needs_packed)
        qkv = unpacked(q, packed)
        arriving = [x for x in (dout, dsoftmax_lse) if x is not None]
        dq = dpacked = None
        if torch.is_grad_enabled() or needs_dispatcher(packed, *arriving):
            gradients = _gradients(ctx, dout, dsoftmax_lse, qkv, kept, wanted)
            dq = None if q is None else gradients[0]
            if needs_packed:
                dpacked = torch.stack([x for x in gradients[q is not None :] if x is not None], PACKED_DIM)
        else:
            dq = torch.empty_like(q) if needs_q and q is not None else None
            dpacked = torch.empty_like(packed) if needs_packed else None
            _gradients(ctx, dout, dsoftmax_lse, qkv, kept, wanted, into=_parts(q, dq, dpacked))
        return (None, None, dq, dpacked, *(None,) * (len(needs_input_grad) - 4))


def unpacked(q: torch.Tensor | None, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v as views."""
    parts = packed.unbind(PACKED_DIM)
    return parts if q is None else (q, *parts)


def _parts(
    q: torch.Tensor | None, dq: torch.Tensor | None, dpacked: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if q is None:
        assert dpacked is not None
        dq, dk, dv = dpacked.unbind(PACKED_DIM)
        return dq, dk, dv
    if dpacked is None:
        return dq, None, None
    dk, dv = dpacked.unbind(PACKED_DIM)
    return dq, dk, dv


def _keep(
    ctx: Any,
    kind: Kind,
    options: tuple[Any, ...],
    results: Outputs,
    read_by_backward: tuple[torch.Tensor | None, ...],
    *inputs: torch.Tensor | None,
) -> Outputs:
    """Save what the backward reads; returns the results."""
    out, softmax_lse, S_dmask, rng_state = results
    drops = options[DROPOUT_P] > 0
    ctx.save_for_backward(*inputs, out, softmax_lse, rng_state if drops else None, *read_by_backward)
    ctx.kind = kind
    ctx.options = options
    ctx.mark_non_differentiable(S_dmask, rng_state)
    ctx.set_materialize_grads(False)
    return out, softmax_lse, S_dmask, rng_state


def _gradients(
    ctx: Any,
    dout: torch.Tensor | None,
    dsoftmax_lse: torch.Tensor | None,
    qkv: tuple[torch.Tensor, ...],
    kept: Sequence[Any],
    wanted: tuple[bool, ...],
    into: Gradients | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk and dv, None for those that are not wanted; ``kept`` is what `_keep` saved after the inputs."""
    out, softmax_lse, rng_state, *others = kept
    options = ctx.options
    arriving = [x for x in (dout, dsoftmax_lse) if x is not None]
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (
        dout,
        *qkv,
        out,
        softmax_lse,
        dsoftmax_lse,
        *others,
        *options[:RETURN_SOFTMAX],
        options[DETERMINISTIC],
        rng_state,
        wanted,
        settled_name(options[BACKEND]),
    )
    if into is not None:
        dq, dk, dv, _ = run_backward(ctx.kind, *arguments, into=into)
    elif torch.is_grad_enabled() or needs_dispatcher(qkv[0], *arriving):
        dq, dk, dv, _ = ctx.kind.backward(*arguments)
    else:
        dq, dk, dv, _ = run_backward(ctx.kind, *arguments)
    return dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None


class FlashAttnBackwardFunc(torch.autograd.Function):
    """The backward as autograd sees it under create_graph: complete, and without a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, *arguments: Any) -> Outputs:
        """Run the backward op."""
        return _in_forward(kind.backward, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(
            "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that "
            "have it: none. Where second derivatives are needed, compute attention with PyTorch's own operators "
            "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)"
        )


# ---- the ops' own autograd ------------------------------------------------------------------------------------------


def _below_autograd(operator: Callable[..., Outputs], *arguments: Any) -> Outputs:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _in_forward(operator: Callable[..., Outputs], *arguments: Any) -> Outputs:
    """`_below_autograd` within a Function's forward. That switches grad mode off, for enclosing transforms too."""
    with torch.set_grad_enabled(_is_transformed()):
        return _below_autograd(operator, *arguments)


def _forward_op(kind: Kind, *arguments: Any) -> Outputs:
    return _in_forward(kind.forward, *arguments)


def _is_transformed() -> bool:
    """Whether torch.func.grad, vmap or another transform is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _record(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` inside an autograd kernel: each torch.func.grad around it passes here, one level at a time."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def _refuse_forward_mode(arguments: tuple[Any, ...]) -> None:
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(
            "flash_attn_mini: no backend implements forward-mode automatic differentiation; backends that have it: none"
        )


def _needs_grad(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)


def _register_autograd(kind: Kind) -> None:
    def forward(*arguments: Any) -> Any:
        tensors = arguments[: kind.tensors]
        _refuse_forward_mode(tensors)
        if not _needs_grad(tensors[:3]):  # alibi_slopes get no gradient
            return _below_autograd(kind.forward, *arguments)
        *scalars, backend = complete(kind.forward, arguments)[kind.tensors :]
        options = (*scalars, settle_backend(tensors[0].device, backend))
        return _record(FlashAttnFunc, kind, _forward_op, options, *tensors)

    def backward(*arguments: Any) -> Any:
        _refuse_forward_mode(arguments)
        if _needs_grad(arguments):
            return _record(FlashAttnBackwardFunc, kind, *arguments)
        return _below_autograd(kind.backward, *arguments)

    library.impl(kind.forward._opname, forward, "Autograd")
    library.impl(kind.backward._opname, backward, "Autograd")


# ---- autocast -------------------------------------------------------------------------------------------------------


def _autocast(x: torch.Tensor, device_type: str) -> torch.Tensor:
    """As PyTorch treats the inputs of scaled_dot_product_attention: all floating dtypes but float64 are cast."""
    if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def _register_autocast(kind: Kind, device_type: str, dispatch_key: str) -> None:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (_autocast(x, device_type) for x in (q, k, v))
            return kind.forward(q, k, v, *arguments)

    library.impl(kind.forward._opname, forward, dispatch_key)


for _kind in KINDS:
    _register_autograd(_kind)
    _register_autocast(_kind, "cpu", "AutocastCPU")
    _register_autocast(_kind, "cuda", "AutocastCUDA")


# ---- the way past the dispatcher ------------------------------------------------------------------------------------

# FlashAttnFunc.apply without the layer that torch.func needs, which costs more host time than the kernel's launch.
_apply: Callable[..., Outputs] = super(torch.autograd.Function, FlashAttnFunc).apply
_apply_packed: Callable[..., Outputs] = super(torch.autograd.Function, FlashAttnPackedFunc).apply


def needs_dispatcher(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether anybody listens to the dispatcher: a tensor subclass, a mode, a tracer, a transform or a third device.

    Batched gradients (is_grads_batched, vectorize) come by a vmap that is no transform of torch.func: their tensors say
    so themselves.
    """
    if torch.compiler.is_compiling():
        return True
    for x in (q, *others):
        if type(x) is not torch.Tensor or is_legacy_batchedtensor(x):
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _is_transformed()
        or not (q.is_cuda or q.is_cpu)
    )


def forward_eager(
    kind: Kind,
    options: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor | None,
) -> Any:
    """The forward op, without the dispatcher where nobody listens to it.

    The dispatcher's turns through Python cost more host time than all below them (benchmarks/bench_overhead.py).
    """
    if needs_dispatcher(q, k, v):
        return kind.forward(q, k, v, *others, *options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        q, k, v = (_autocast(x, q.device.type) for x in (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        options = (*options[:BACKEND], select_backend(q.device, options[BACKEND]).name)
        return _apply(kind, run_forward, options, q, k, v, *others)
    return run_forward(kind, q, k, v, *others, *options)


def packed_forward_eager(
    kind: Kind, options: tuple[Any, ...], q: torch.Tensor | None, packed: torch.Tensor, *others: torch.Tensor | None
) -> Any:
    """`forward_eager` of a packed qkv (q is None) or of q and a packed kv."""
    if needs_dispatcher(packed if q is None else q, packed):
        return kind.forward(*unpacked(q, packed), *others, *options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(packed.device.type):
        q = None if q is None else _autocast(q, packed.device.type)
        packed = _autocast(packed, packed.device.type)
    if torch.is_grad_enabled() and (packed.requires_grad or (q is not None and q.requires_grad)):
        options = (*options[:BACKEND], select_backend(packed.device, options[BACKEND]).name)
        return _apply_packed(kind, options, q, packed, *others)
    return run_forward(kind, *unpacked(q, packed), *others, *options)


@torch.no_grad()
def backward_into(kind: Kind, gradients: Gradients, *arguments: Any) -> torch.Tensor:
    """The backward op, up to its rng_state, into tensors of the caller, None where a gradient is not wanted.

    Returns softmax_d. The op itself allocates: autograd knows nothing of operators that write to their arguments.
    """
    wanted = tuple(x is not None for x in gradients)
    given = [x for x in gradients if x is not None]
    softmax_d: torch.Tensor
    dout, *qkv = arguments[:4]
    if needs_dispatcher(*qkv, dout, *given):
        *computed, softmax_d = kind.backward(*arguments, wanted)
        for to, gradient in zip(gradients, computed, strict=True):
            if to is not None:
                to.copy_(gradient)
    else:
        backend = None
        *_, softmax_d = run_backward(kind, *arguments, wanted, backend, into=gradients)
        for x in given:
            torch.autograd.graph.increment_version(x)
    return softmax_d
