"""The custom ops ``flash_attn_mini::_flash_attn_forward`` and ``_flash_attn_backward``, and autograd between them.

What torch.compile, export and opcheck see. flash_attn_interface.py enters here; the ops pick the backend and enter it.
Shapes for tracing come from the fake implementations, which allocate as the backends do and compute nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import tracing
from .backends import Gradients, select_backend, settle_backend, settled_name

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

SEQLEN_Q_MULTIPLE = 128  # softmax_d has seqlen_q rounded up to it

_library = torch.library.Library("flash_attn_mini", "DEF")
_library.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, float dropout_p, float softmax_scale,"
    " bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, bool return_softmax,"
    " bool deterministic=False, str? backend=None)"
    " -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dsoftmax_lse, Tensor? alibi_slopes, float dropout_p, float softmax_scale, bool causal,"
    " SymInt window_size_left, SymInt window_size_right, float softcap, bool deterministic, Tensor? rng_state=None,"
    " bool[3] output_mask=[True, True, True], str? backend=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor softmax_d)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# ---- the ops: one turn through the registry of backends -------------------------------------------------------------


def _forward(
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
    deterministic: bool = False,  # for the backward
    backend: str | None = None,
) -> Outputs:
    chosen = select_backend(q.device, backend)
    if tracing.enabled():
        tracing.trace("_flash_attn_forward", q=q, k=k, v=v, backend=chosen.name)
    return chosen.forward(
        q,
        k,
        v,
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        return_softmax,
    )


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    backend: str | None = None,
    into: Gradients = (None, None, None),
) -> Outputs:
    chosen = select_backend(q.device, backend)
    if tracing.enabled():
        tracing.trace("_flash_attn_backward", dout=dout, q=q, k=k, output_mask=output_mask, backend=chosen.name)
    return chosen.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dsoftmax_lse,
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        rng_state,
        output_mask,
        into=into,
    )


for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("_flash_attn_forward", _forward, _dispatch_key)
    _library.impl("_flash_attn_backward", _backward, _dispatch_key)


@torch.library.register_fake("flash_attn_mini::_flash_attn_forward", lib=_library)
def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    return (
        torch.empty_like(q),
        q.new_empty((batch, nheads, seqlen_q), dtype=_lse_dtype(q)),
        q.new_empty((0,)),
        q.new_empty((0,), dtype=torch.int64),
    )


@torch.library.register_fake("flash_attn_mini::_flash_attn_backward", lib=_library)
def _backward_fake(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    backend: str | None = None,
) -> Outputs:
    dq, dk, dv = (
        torch.empty_like(x) if wanted else x.new_empty((0,)) for x, wanted in zip((q, k, v), output_mask, strict=True)
    )
    batch, seqlen_q, nheads, _ = q.shape
    rounded = (seqlen_q + SEQLEN_Q_MULTIPLE - 1) // SEQLEN_Q_MULTIPLE * SEQLEN_Q_MULTIPLE
    return dq, dk, dv, q.new_empty((batch, nheads, rounded), dtype=_lse_dtype(q))


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


flash_attn_forward = torch.ops.flash_attn_mini._flash_attn_forward.default
flash_attn_backward = torch.ops.flash_attn_mini._flash_attn_backward.default


# ---- autograd -------------------------------------------------------------------------------------------------------


class FlashAttnFunc(torch.autograd.Function):
    """Attention as autograd sees it: softmax_lse is an output like any other, with a gradient of its own.

    Inputs: what runs the forward op, q, k, v, alibi_slopes, and the op's other arguments as one tuple. Saved are q, k,
    v, out and softmax_lse, nothing of seqlen_q x seqlen_k. The backward runs on the forward's backend, whatever
    ``use_backend`` says by then, and computes the gradients of those inputs alone that need one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Outputs],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> Outputs:
        """Run the forward op and keep what the backward reads."""
        out, softmax_lse, S_dmask, rng_state = run(q, k, v, alibi_slopes, *options)
        dropout_p = options[0]
        ctx.save_for_backward(q, k, v, out, softmax_lse, alibi_slopes, rng_state if dropout_p > 0 else None)
        ctx.options = options
        ctx.mark_non_differentiable(S_dmask, rng_state)
        ctx.set_materialize_grads(False)
        return out, softmax_lse, S_dmask, rng_state

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dsoftmax_lse: torch.Tensor | None, *unused: None) -> Any:
        """None for dout or dsoftmax_lse where nothing arrived."""
        if dout is None and dsoftmax_lse is None:
            return (None,) * 6
        q, k, v, out, softmax_lse, alibi_slopes, rng_state = ctx.saved_tensors
        *scalars, _return_softmax, deterministic, backend = ctx.options
        wanted = ctx.needs_input_grad[1:4]
        if dout is None:
            dout = torch.zeros_like(out)
        run: Callable[..., Outputs] = flash_attn_backward
        if not torch.is_grad_enabled() and not _overheard(q, dout):
            run = _backward
        dq, dk, dv, _ = run(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            dsoftmax_lse,
            alibi_slopes,
            *scalars,
            deterministic,
            rng_state,
            wanted,
            settled_name(backend),
        )
        return None, dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None, None, None


class FlashAttnBackwardFunc(torch.autograd.Function):
    """The backward as autograd sees it under create_graph: complete, and without a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Outputs:
        """Run the backward op."""
        return _in_forward(flash_attn_backward, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(
            "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that "
            "have it: none. Where second derivatives are needed, compute attention with PyTorch's own operators "
            "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)"
        )


def _below_autograd(operator: Callable[..., Outputs], *arguments: Any) -> Outputs:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _in_forward(operator: Callable[..., Outputs], *arguments: Any) -> Outputs:
    """`_below_autograd` within a Function's forward. That switches grad mode off, for enclosing transforms too."""
    with torch.set_grad_enabled(_is_transformed()):
        return _below_autograd(operator, *arguments)


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


def _forward_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    *options: Any,
) -> Any:
    tensors = (q, k, v, alibi_slopes)
    _refuse_forward_mode(tensors)
    if not _needs_grad(tensors):
        return _below_autograd(flash_attn_forward, *tensors, *options)
    options = (*options, *(False, None)[len(options) - 7 :])  # the dispatcher leaves out trailing defaults
    options = (*options[:-1], settle_backend(q.device, options[-1]))
    return _record(FlashAttnFunc, functools.partial(_in_forward, flash_attn_forward), *tensors, options)


def _backward_autograd(*arguments: Any) -> Any:
    _refuse_forward_mode(arguments)
    if _needs_grad(arguments):
        return _record(FlashAttnBackwardFunc, *arguments)
    return _below_autograd(flash_attn_backward, *arguments)


_library.impl("_flash_attn_forward", _forward_autograd, "Autograd")
_library.impl("_flash_attn_backward", _backward_autograd, "Autograd")


# ---- autocast -------------------------------------------------------------------------------------------------------


def _autocast(x: torch.Tensor, device_type: str) -> torch.Tensor:
    """As PyTorch treats the inputs of scaled_dot_product_attention: all floating dtypes but float64 are cast."""
    if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def _register_autocast(device_type: str, dispatch_key: str) -> None:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (_autocast(x, device_type) for x in (q, k, v))
            return flash_attn_forward(q, k, v, *arguments)

    _library.impl("_flash_attn_forward", forward, dispatch_key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# ---- the way past the dispatcher ------------------------------------------------------------------------------------

# FlashAttnFunc.apply without the layer that torch.func needs, which costs more host time than the kernel's launch.
_apply: Callable[..., Outputs] = super(torch.autograd.Function, FlashAttnFunc).apply


def _overheard(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether anybody listens to the dispatcher: a tensor subclass, a mode, a tracer, a transform or a third device."""
    for x in (q, *others):
        if type(x) is not torch.Tensor:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _is_transformed()
        or q.device.type not in ("cpu", "cuda")
    )


def flash_attn_forward_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alibi_slopes: torch.Tensor | None, *options: Any
) -> Any:
    """The forward op, without the dispatcher where nobody listens to it.

    The dispatcher's turns through Python cost more host time than all below them (benchmarks/bench_overhead.py).
    """
    if _overheard(q, k, v):
        return flash_attn_forward(q, k, v, alibi_slopes, *options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        q, k, v = (_autocast(x, q.device.type) for x in (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        *others, backend = options
        return _apply(_forward, q, k, v, alibi_slopes, (*others, select_backend(q.device, backend).name))
    return _forward(q, k, v, alibi_slopes, *options)


@torch.no_grad()
def flash_attn_backward_into(gradients: Gradients, *arguments: Any) -> torch.Tensor:
    """The backward op, up to its rng_state, into tensors of the caller, None where a gradient is not wanted.

    Returns softmax_d. The op itself allocates: autograd knows nothing of operators that write to their arguments.
    """
    wanted = tuple(x is not None for x in gradients)
    given = [x for x in gradients if x is not None]
    softmax_d: torch.Tensor
    dout, *qkv = arguments[:4]
    if _overheard(*qkv, dout, *given):
        *computed, softmax_d = flash_attn_backward(*arguments, wanted)
        for to, gradient in zip(gradients, computed, strict=True):
            if to is not None:
                to.copy_(gradient)
    else:
        backward: Callable[..., Outputs] = _backward
        *_, softmax_d = backward(*arguments, output_mask=wanted, into=gradients)
        for x in given:
            torch.autograd.graph.increment_version(x)
    return softmax_d
