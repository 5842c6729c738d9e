"""Autograd and autocast around the Triton backend's ops, for environments without the compiled extension.

The public functions enter here. With the extension its ops have both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import schemas
from ...options import KvCache, Options, Sequences
from ...s_dmask import draw_rng_state
from . import checks, ops

PACKED_DIM = -3  # of q, k, v in qkv [..., 3, nheads, headdim], and of k, v in kv [..., 2, nheads_k, headdim]
NUM_TENSORS = 3  # q, k and v, before the other inputs of FlashAttnFunc
ALIBI_SLOPES = NUM_TENSORS + len(Sequences._fields) + Options._fields.index("alibi_slopes")

NO_DOUBLE_BACKWARD = (
    "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that have it: "
    "none. Where second derivatives are needed, compute attention with PyTorch's own operators "
    "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)"
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, softmax_lse, rng_state) with the gradient of q, k and v. rng_state is None without dropout."""
    refuse_forward_mode(q, k, v)
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        q, k, v = (autocast(x, device_type) for x in (q, k, v))
    rng_state = DRAW(q, k, v, _call_number()) if options.dropout_p > 0 else None
    arguments = (q, k, v, *(sequences or schemas.EQUAL_LENGTHS), *options, rng_state)
    if torch.compiler.is_compiling():  # the compiler takes no Function that has one tensor twice
        out, softmax_lse = ATTENTION(*arguments)
    elif torch.is_grad_enabled():  # whether a tensor requires a gradient or not: torch.vmap may hide it
        out, softmax_lse = FlashAttnFunc.apply(*arguments)
    else:
        out, softmax_lse = ops.FORWARD(*arguments)
    return out, softmax_lse, rng_state


def packed_forward(
    q: Tensor | None, packed: Tensor, sequences: Sequences | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`forward` of a packed qkv (q is None), or of q and a packed kv."""
    parts = packed.unbind(PACKED_DIM)
    q, k, v = parts if q is None else (q, *parts)
    return forward(q, k, v, sequences, options)


def backward_into(
    gradients: ops.Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: Tensor | None,
) -> Tensor:
    """The backward with its results in tensors of the caller, None where a gradient is not wanted: softmax_d."""
    softmax_d: Tensor
    wanted = [x is not None for x in gradients]
    tensors = (dout, q, k, v, out, softmax_lse, None)
    with torch.no_grad():
        if torch.compiler.is_compiling() or type(q) is not Tensor:
            fields = (*(sequences or schemas.EQUAL_LENGTHS), *options)
            *computed, softmax_d = ops.BACKWARD(*tensors, *fields, rng_state, wanted)
            for given, gradient in zip(gradients, computed, strict=True):
                if given is not None:
                    given.copy_(gradient)
        else:
            *_, softmax_d = ops.backward(*tensors, sequences, options, rng_state, wanted, into=gradients)
            for given in gradients:
                if given is not None:
                    torch.autograd.graph.increment_version(given)
    return softmax_d


def forward_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of flash_attn_with_kvcache. Inputs may require a gradient; the backward then raises."""
    checks.check_no_gradient(k_cache, v_cache)
    inputs = (q, cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    refuse_forward_mode(*inputs)
    fields = dict(zip(KvCache._fields, cache, strict=True))
    fields.update({name: x.detach() for name, x in fields.items() if isinstance(x, Tensor)})
    out, softmax_lse = ops.KVCACHE_FORWARD(q.detach(), k_cache, v_cache, *fields.values(), *options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        out, softmax_lse = _NoBackwardFunc.apply(out, softmax_lse, *inputs)
    return out, softmax_lse


# ---- the gradient ---------------------------------------------------------------------------------------------------


class FlashAttnFunc(torch.autograd.Function):
    """Attention with its gradient in eager code. softmax_lse is an output like any other and has a gradient too.

    Inputs: those of the op ``triton_fwd``. It saves q, k, v, out and softmax_lse, and nothing of size seqlen_q x
    seqlen_k. The backward computes only the gradients that are needed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the forward."""
        out, softmax_lse = ops.FORWARD(*inputs)
        return out, softmax_lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward reads."""
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None) -> tuple[Any, ...]:
        """dout or dsoftmax_lse is None if no gradient reaches that output."""
        return _gradients(FlashAttnBackwardFunc.apply, ctx, dout, dsoftmax_lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what `_gradients` reads: all tensors through save_for_backward."""
    is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if saved else x for x, saved in zip(inputs, is_tensor, strict=True)]
    ctx.places = [place for place, saved in enumerate(is_tensor) if saved]
    ctx.save_for_backward(*output, *(inputs[place] for place in ctx.places))
    ctx.set_materialize_grads(False)


def _gradients(
    run: Callable[..., tuple[Tensor | None, ...]], ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of the inputs, from a backward with the inputs of FlashAttnBackwardFunc."""
    if ctx.needs_input_grad[ALIBI_SLOPES]:
        raise NotImplementedError(
            "flash_attn_mini: alibi_slopes requires a gradient, which is not supported; backends that have it: none. "
            "Allowed: slopes that require none, for example alibi_slopes.detach()"
        )
    if dout is None and dsoftmax_lse is None:
        return (None,) * len(ctx.others)
    out, softmax_lse, *saved = ctx.saved_tensors
    inputs = list(ctx.others)
    for place, x in zip(ctx.places, saved, strict=True):
        inputs[place] = x
    if dout is None:
        dout = torch.zeros_like(out)
    qkv, rest = inputs[:NUM_TENSORS], inputs[NUM_TENSORS:]
    dq, dk, dv = run(dout, *qkv, out, softmax_lse, dsoftmax_lse, *rest, *ctx.needs_input_grad[:NUM_TENSORS])
    return dq, dk, dv, *(None for _ in rest)


class FlashAttnBackwardFunc(torch.autograd.Function):
    """The backward, without a derivative. Inputs: those of the op ``triton_bwd``, output_mask as three flags."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        """Run the backward."""
        *call, want_dq, want_dk, want_dv = inputs
        dq, dk, dv, _ = ops.BACKWARD(*call, [want_dq, want_dk, want_dv])
        return dq, dk, dv

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(NO_DOUBLE_BACKWARD)


class _NoBackwardFunc(torch.autograd.Function):
    """out and softmax_lse as they are, of inputs that may require a gradient, which does not exist."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, softmax_lse: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Copy nothing."""
        return out.view_as(out), softmax_lse.view_as(softmax_lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep only shapes."""
        ctx.shapes = [None if x is None else x.shape for x in inputs[2:]]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dsoftmax_lse: Tensor) -> tuple[Any, ...]:
        """Call the op that raises."""
        needed = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(NO_BACKWARD(dout, shape) if is_needed else None for shape, is_needed in needed)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor has a tangent. A compiler that traces the call refuses by itself."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_attn_mini: forward-mode automatic differentiation is not supported; backends that have it: none"
        )


def autocast(x: Tensor, device_type: str) -> Tensor:
    """Cast as PyTorch casts the inputs of scaled_dot_product_attention: all floating dtypes but float64."""
    if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


# ---- ops that only these functions need -----------------------------------------------------------------------------

_calls = itertools.count()


@torch.compiler.assume_constant_result
def _call_number() -> int:
    """A number for each dropout call of a traced program, so that the compiler never takes two for the same."""
    return next(_calls)


def _draw(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    return draw_rng_state(q)


def _draw_fake(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    return q.new_empty((2,), dtype=torch.int64)


def _draw_in_vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, call: int) -> tuple[Tensor, int | None]:
    if info.randomness == "error":
        raise RuntimeError(
            "flash_attn_mini: attention with dropout is called in torch.vmap with randomness='error', its default; "
            "allowed: torch.vmap(..., randomness='different') or 'same', or dropout_p=0"
        )
    if info.randomness == "same":
        return DRAW(q, k, v, call), None
    return torch.stack([DRAW(q, k, v, _call_number()) for _ in range(info.batch_size)]), 0


def _no_backward(dout: Tensor, size: Sequence[int]) -> Tensor:
    raise NotImplementedError(
        "flash_attn_mini: no backend implements the backward of flash_attn_with_kvcache; backends that have it: none. "
        "Available: torch.no_grad(), or flash_attn_func for training"
    )


def _no_backward_fake(dout: Tensor, size: Sequence[int]) -> Tensor:
    return dout.new_empty(size)


def _compiled_backward(ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None) -> tuple[Any, ...]:
    return _gradients(FlashAttnBackwardFunc.forward, ctx, dout, dsoftmax_lse)


# `triton_fwd` with its gradient in compiled code.
ops.define_forward("triton_attention")
torch.library.register_autograd(
    "flash_attn_mini::triton_attention", _compiled_backward, setup_context=_save, lib=ops.library
)
ATTENTION = torch.ops.flash_attn_mini.triton_attention.default

# Recomputation has to draw the same state again.
ops.library.define(
    "triton_draw_rng_state(Tensor q, Tensor k, Tensor v, int call) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
# A compiled program may contain it: it raises when it runs, not when it is traced.
ops.library.define("triton_no_backward(Tensor dout, SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _dispatch_key in ("CPU", "CUDA"):
    ops.library.impl("triton_draw_rng_state", _draw, _dispatch_key)
    ops.library.impl("triton_no_backward", _no_backward, _dispatch_key)
_register_fake: Callable[..., Any] = torch.library.register_fake
_register_fake("flash_attn_mini::triton_draw_rng_state", _draw_fake, lib=ops.library)
_register_fake("flash_attn_mini::triton_no_backward", _no_backward_fake, lib=ops.library)
torch.library.register_vmap("flash_attn_mini::triton_draw_rng_state", _draw_in_vmap, lib=ops.library)
DRAW = torch.ops.flash_attn_mini.triton_draw_rng_state.default
NO_BACKWARD = torch.ops.flash_attn_mini.triton_no_backward.default
