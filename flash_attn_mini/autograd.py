"""Autograd and autocast around the custom ops of ops.py, and the direct way past the dispatcher.

The public functions enter here, through `forward_eager`, `packed_forward_eager` and `backward_into`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .backends import FourTensors, Gradients, extension, name_of_traced, select_backend, traced_backend
from .backends.triton import autograd as without_extension
from .ops import OP_PAIRS, OpPair, backward_op, forward_op, library, run_backward, run_forward
from .options import Options, Sequences
from .s_dmask import s_dmask

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PACKED_DIM = -3  # of q, k, v in qkv [..., 3, nheads, headdim], and of k, v in kv [..., 2, nheads_k, headdim]


class FlashAttnFunc(torch.autograd.Function):
    """Attention with its gradient. softmax_lse is an output like any other and has a gradient of its own.

    Inputs: the function that runs the forward, sequences, options, q, k and v. It saves q, k, v, out and softmax_lse,
    and nothing of size seqlen_q x seqlen_k. The backward runs on the backend ``options.backend`` and computes only the
    gradients that are needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., FourTensors],
        sequences: Sequences | None,
        options: Options,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> FourTensors:
        """Run the forward and save what the backward reads."""
        return _save(ctx, run(q, k, v, sequences, options), sequences, options, q, k, v)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dsoftmax_lse: torch.Tensor | None, *unused: None) -> Any:
        """dout or dsoftmax_lse is None if no gradient reaches that output."""
        if dout is None and dsoftmax_lse is None:
            return (None,) * 6
        q, k, v, *saved = ctx.saved_tensors
        return (None, None, None, *_gradients(ctx, dout, dsoftmax_lse, (q, k, v), saved, ctx.needs_input_grad[3:]))


class FlashAttnPackedFunc(torch.autograd.Function):
    """`FlashAttnFunc` of q, k and v in one tensor, or of q, and k and v in one tensor. Its gradient is one tensor too.

    Inputs: sequences, options, q or None, and the packed tensor. Only for the direct way past the dispatcher: the ops
    take q, k and v as separate tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, sequences: Sequences | None, options: Options, q: torch.Tensor | None, packed: torch.Tensor
    ) -> FourTensors:
        """Run the forward on views and save the packed tensor."""
        results = run_forward(*unpacked(q, packed), sequences, options)
        return _save(ctx, results, sequences, options, q, packed)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dsoftmax_lse: torch.Tensor | None, *unused: None) -> Any:
        """Let the kernels write to views of the packed gradient, unless the call needs the dispatcher."""
        if dout is None and dsoftmax_lse is None:
            return (None,) * 4
        q, packed, *saved = ctx.saved_tensors
        needs_q, needs_packed = ctx.needs_input_grad[2:]
        wanted = (needs_packed if q is None else needs_q, needs_packed, needs_packed)
        qkv = unpacked(q, packed)
        arriving = [x for x in (dout, dsoftmax_lse) if x is not None]
        dq = dpacked = None
        if torch.is_grad_enabled() or needs_dispatcher(packed, *arriving):
            gradients = _gradients(ctx, dout, dsoftmax_lse, qkv, saved, wanted)
            dq = None if q is None else gradients[0]
            if needs_packed:
                dpacked = torch.stack([x for x in gradients[q is not None :] if x is not None], PACKED_DIM)
        else:
            dq = torch.empty_like(q) if needs_q and q is not None else None
            dpacked = torch.empty_like(packed) if needs_packed else None
            _gradients(ctx, dout, dsoftmax_lse, qkv, saved, wanted, into=_parts(q, dq, dpacked))
        return None, None, dq, dpacked


def unpacked(q: torch.Tensor | None, packed: torch.Tensor) -> QKV:
    """q, k and v, with those in the packed tensor as views of it."""
    if q is None:
        q, k, v = packed.unbind(PACKED_DIM)
    else:
        k, v = packed.unbind(PACKED_DIM)
    return q, k, v


def _parts(q: torch.Tensor | None, dq: torch.Tensor | None, dpacked: torch.Tensor | None) -> Gradients:
    if q is None:
        assert dpacked is not None
        dq, dk, dv = dpacked.unbind(PACKED_DIM)
        return dq, dk, dv
    if dpacked is None:
        return dq, None, None
    dk, dv = dpacked.unbind(PACKED_DIM)
    return dq, dk, dv


def _save(
    ctx: Any, results: FourTensors, sequences: Sequences | None, options: Options, *inputs: torch.Tensor | None
) -> FourTensors:
    """Save what `_gradients` reads, all tensors through save_for_backward; returns the results as a tuple."""
    out, softmax_lse, S_dmask, rng_state = results
    if sequences is None:
        lengths: tuple[torch.Tensor | None, ...] = ()
        ctx.max_seqlens = None
    else:
        cu_seqlens_q, cu_seqlens_k, *max_seqlens, block_table = sequences
        lengths = (cu_seqlens_q, cu_seqlens_k, block_table)
        ctx.max_seqlens = max_seqlens
    kept_rng_state = rng_state if options.dropout_p > 0 else None
    ctx.save_for_backward(*inputs, out, softmax_lse, kept_rng_state, options.alibi_slopes, *lengths)
    ctx.options = options if options.alibi_slopes is None else options._replace(alibi_slopes=None)
    ctx.mark_non_differentiable(S_dmask, rng_state)
    ctx.set_materialize_grads(False)
    return out, softmax_lse, S_dmask, rng_state


def _gradients(
    ctx: Any,
    dout: torch.Tensor | None,
    dsoftmax_lse: torch.Tensor | None,
    qkv: QKV,
    saved: list[Any],
    wanted: tuple[bool, ...],
    into: Gradients | None = None,
) -> Gradients:
    """dq, dk and dv, None for those that are not wanted. ``saved`` is what `_save` saved after the inputs."""
    out, softmax_lse, rng_state, alibi_slopes, *lengths = saved
    options: Options = ctx.options
    if alibi_slopes is not None:
        options = options._replace(alibi_slopes=alibi_slopes)
    sequences = None
    if ctx.max_seqlens is not None:
        cu_seqlens_q, cu_seqlens_k, block_table = lengths
        max_seqlen_q, max_seqlen_k = ctx.max_seqlens
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    arriving = [x for x in (dout, dsoftmax_lse) if x is not None]
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (dout, *qkv, out, softmax_lse, dsoftmax_lse, sequences, options, rng_state, wanted)
    if into is not None:
        dq, dk, dv, _ = run_backward(*arguments, into=into)
    elif torch.is_grad_enabled() or needs_dispatcher(qkv[0], *arriving):
        dq, dk, dv, _ = backward_op(*arguments)
    else:
        dq, dk, dv, _ = run_backward(*arguments)
    return dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None


class FlashAttnBackwardFunc(torch.autograd.Function):
    """The backward under create_graph: complete, and without a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, pair: OpPair, *arguments: Any) -> FourTensors:
        """Run the backward op."""
        return in_forward(pair.backward, *arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(
            "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that "
            "have it: none. Where second derivatives are needed, compute attention with PyTorch's own operators "
            "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)"
        )


# ---- the ops' own autograd ------------------------------------------------------------------------------------------


def below_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an op below its autograd kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def in_forward(operator: Callable[..., Any], *arguments: Any) -> Any:
    """`below_autograd` in a Function's forward, which switches both grad modes off, for enclosing transforms too."""
    enabled = is_transformed()
    with torch.set_grad_enabled(enabled), forward_ad._set_fwd_grad_enabled(enabled):
        return below_autograd(operator, *arguments)


def _traced_forward(
    backend: str | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
) -> FourTensors:
    """The forward op with the backend argument that `traced_backend` chose."""
    options = options._replace(backend=backend)
    return in_forward(forward_op, q, k, v, sequences, options)  # type: ignore[no-any-return]


def is_transformed() -> bool:
    """Whether torch.func.grad, vmap or another transform is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def record(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` inside an autograd kernel: each torch.func.grad around it calls that kernel for one level."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def refuse_forward_mode(arguments: tuple[Any, ...]) -> None:
    """Raise NotImplementedError if a tensor among the arguments has a tangent."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(
            "flash_attn_mini: no backend implements forward-mode automatic differentiation; backends that have it: none"
        )


def needs_grad(arguments: tuple[Any, ...]) -> bool:
    """Whether gradients are recorded and a tensor among the arguments requires one."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)


def _register_autograd(pair: OpPair) -> None:
    def forward(*arguments: Any) -> Any:
        refuse_forward_mode(arguments)
        if not needs_grad(arguments[:3]):  # alibi_slopes get no gradient
            return below_autograd(pair.forward, *arguments)
        call = pair.forward_call(arguments)
        options: Options = call["options"]
        backend = traced_backend(call["q"].device, options.backend)
        options = options._replace(backend=name_of_traced(backend))
        inputs = (call["q"], call["k"], call["v"])
        return record(FlashAttnFunc, partial(_traced_forward, backend), call["sequences"], options, *inputs)

    def backward(*arguments: Any) -> Any:
        refuse_forward_mode(arguments)
        if needs_grad(arguments):
            return record(FlashAttnBackwardFunc, pair, *arguments)
        return below_autograd(pair.backward, *arguments)

    library.impl(pair.forward._opname, forward, "Autograd")
    library.impl(pair.backward._opname, backward, "Autograd")


# ---- autocast -------------------------------------------------------------------------------------------------------


def _autocast(x: torch.Tensor, device_type: str) -> torch.Tensor:
    """Cast as PyTorch casts the inputs of scaled_dot_product_attention: all floating dtypes but float64."""
    if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def _register_autocast(pair: OpPair, device_type: str, dispatch_key: str) -> None:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (_autocast(x, device_type) for x in (q, k, v))
            return pair.forward(q, k, v, *arguments)

    library.impl(pair.forward._opname, forward, dispatch_key)


for _pair in OP_PAIRS:
    _register_autograd(_pair)
    _register_autocast(_pair, "cpu", "AutocastCPU")
    _register_autocast(_pair, "cuda", "AutocastCUDA")


# ---- the direct way past the dispatcher -----------------------------------------------------------------------------

# FlashAttnFunc.apply without the layer that torch.func needs, which costs more host time than the kernel's launch.
_apply: Callable[..., FourTensors] = super(torch.autograd.Function, FlashAttnFunc).apply
_apply_packed: Callable[..., FourTensors] = super(torch.autograd.Function, FlashAttnPackedFunc).apply


def needs_dispatcher(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a call must pass the dispatcher: for a tensor subclass, mode, tracer, transform or another device.

    The vmap of batched gradients (is_grads_batched, vectorize) is no transform of torch.func. Its tensors are of a type
    of their own.
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
        or is_transformed()
        or not (q.is_cuda or q.is_cpu)
    )


def forward_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """The forward op, without the dispatcher where possible.

    The dispatcher's Python kernels cost more host time than all code below them (benchmarks/bench_overhead.py).
    """
    if extension.missing_reason() is not None:
        return _forward_without_extension(q, k, v, sequences, options)
    if needs_dispatcher(q, k, v):
        return forward_op(q, k, v, sequences, options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        q, k, v = (_autocast(x, q.device.type) for x in (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply(run_forward, sequences, _with_backend(options, q.device), q, k, v)
    return run_forward(q, k, v, sequences, options)


def _forward_without_extension(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    out, softmax_lse, rng_state = without_extension.forward(q, k, v, sequences, options)
    S_dmask = q.new_empty((0,))
    if rng_state is None:
        return out, softmax_lse, S_dmask, q.new_empty((0,), dtype=torch.int64)
    if options.return_softmax:
        S_dmask = s_dmask(q.to(out.dtype), k.to(out.dtype), rng_state, sequences, options)
    return out, softmax_lse, S_dmask, rng_state


def packed_forward_eager(
    q: torch.Tensor | None, packed: torch.Tensor, sequences: Sequences | None, options: Options
) -> FourTensors:
    """`forward_eager` of a packed qkv (q is None), or of q and a packed kv."""
    if extension.missing_reason() is not None:
        return _forward_without_extension(*unpacked(q, packed), sequences, options)
    if needs_dispatcher(packed if q is None else q, packed):
        return forward_op(*unpacked(q, packed), sequences, options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(packed.device.type):
        q = None if q is None else _autocast(q, packed.device.type)
        packed = _autocast(packed, packed.device.type)
    if torch.is_grad_enabled() and (packed.requires_grad or (q is not None and q.requires_grad)):
        return _apply_packed(sequences, _with_backend(options, packed.device), q, packed)
    return run_forward(*unpacked(q, packed), sequences, options)


def _with_backend(options: Options, device: torch.device) -> Options:
    """The options with the name of the backend that is selected now, for the backward."""
    name = select_backend(device, options.backend).name
    return options if name == options.backend else options._replace(backend=name)


@torch.no_grad()
def backward_into(
    gradients: Gradients,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """The backward op with its results in tensors of the caller, None where a gradient is not wanted.

    Returns softmax_d. The op itself allocates, because autograd does not support operators that write to their
    arguments.
    """
    if extension.missing_reason() is not None:
        rest = (out, softmax_lse, sequences, options, rng_state)
        return without_extension.backward_into(gradients, dout, q, k, v, *rest)
    wanted = tuple(x is not None for x in gradients)
    given = [x for x in gradients if x is not None]
    arguments = (dout, q, k, v, out, softmax_lse, None, sequences, options, rng_state, wanted)
    if needs_dispatcher(q, k, v, dout, *given):
        *computed, softmax_d = backward_op(*arguments)
        for to, gradient in zip(gradients, computed, strict=True):
            if to is not None:
                to.copy_(gradient)
    else:
        *_, softmax_d = run_backward(*arguments, into=gradients)
        for x in given:
            torch.autograd.graph.increment_version(x)
    return softmax_d
