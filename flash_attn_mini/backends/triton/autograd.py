"""Autograd and autocast around the Triton backend's ops, for environments without the compiled extension.

The public functions enter here. With the extension its ops have both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import schemas
from ...namespace import CUSTOM_OPS, qualified
from ...options import KvCache, Options, Sequences
from ...rng_state import draw_in_program
from ...score_mod import GRADIENTS
from ...transforms import autocast, refuse_forward_mode
from . import checks_kvcache, ops

Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # out, softmax_lse, rng_state, max_logits

PACKED_DIM = -3  # of q, k, v in qkv [..., 3, nheads, headdim], and of k, v in kv [..., 2, nheads_k, headdim]
NUM_TENSORS = 3  # q, k and v, before the other inputs of FlashAttnFunc
OPTIONS = NUM_TENSORS + len(Sequences._fields)  # before the options among these inputs

# Whether torch.vmap passes None as the gradient of an unused output: 2.6 does not, 2.11 does.
VMAP_PASSES_NONE = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 11)

ATTN_BIAS = "attn_bias"  # its gradient has an op; score_mod.GRADIENTS has those of other options

NO_DOUBLE_BACKWARD = (
    "flash_attn_mini: no backend implements the derivative of the backward (double backward); backends that have it: "
    "none. Where second derivatives are needed, compute attention with PyTorch's own operators "
    "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH)"
)


def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options) -> Results:
    """(out, softmax_lse, rng_state, max_logits) with the gradient of q, k and v.

    rng_state is None without dropout, max_logits unless the options ask for them.
    """
    refuse_forward_mode((q, k, v))
    q, k, v = autocast(q), autocast(k), autocast(v)
    attn_bias = options.attn_bias
    if attn_bias is not None and attn_bias.dtype != torch.float32:
        options = options._replace(attn_bias=autocast(attn_bias))
    rng_state = draw_in_program(q, k, v) if options.dropout_p > 0 else None
    arguments = (q, k, v, *(sequences or schemas.EQUAL_LENGTHS), *options, rng_state)
    if torch.compiler.is_compiling():  # the compiler takes no Function that has one tensor twice
        out, softmax_lse, max_logits = ATTENTION(*arguments)
    elif torch.is_grad_enabled():  # whether a tensor requires a gradient or not: torch.vmap may hide it
        out, softmax_lse, max_logits = FlashAttnFunc.apply(*arguments)
    else:
        out, softmax_lse, max_logits = ops.FORWARD(*arguments)
    return out, softmax_lse, rng_state, max_logits


def packed_forward(q: Tensor | None, packed: Tensor, sequences: Sequences | None, options: Options) -> Results:
    """`forward` of a packed qkv (q is None), or of q and a packed kv."""
    parts = packed.unbind(PACKED_DIM)
    q, k, v = parts if q is None else (q, *parts)
    return forward(q, k, v, sequences, options)


def forward_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of flash_attn_with_kvcache. Inputs may require a gradient; the backward then raises."""
    checks_kvcache.check_no_gradient(k_cache, v_cache)
    inputs = (q, cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    refuse_forward_mode(inputs)
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
    def forward(*inputs: Any) -> ops.ForwardResults:
        """Run the forward."""
        results: ops.ForwardResults = ops.FORWARD(*inputs)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: ops.ForwardResults) -> None:
        """Save what the backward reads."""
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None, _: None) -> tuple[Any, ...]:
        """dout or dsoftmax_lse is None if no gradient reaches that output."""
        return _gradients(FlashAttnBackwardFunc.apply, AttnBiasBackwardFunc.apply, ctx, dout, dsoftmax_lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: ops.ForwardResults) -> None:
    """Save what `_gradients` reads: all tensors through save_for_backward."""
    is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if saved else x for x, saved in zip(inputs, is_tensor, strict=True)]
    ctx.places = [place for place, saved in enumerate(is_tensor) if saved]
    out, softmax_lse, max_logits = output
    if max_logits is not None:
        ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(out, softmax_lse, *(inputs[place] for place in ctx.places))
    ctx.set_materialize_grads(not VMAP_PASSES_NONE)


def _gradients(
    run: Callable[..., tuple[Tensor | None, ...]],
    run_attn_bias: Callable[..., Tensor],
    ctx: Any,
    dout: Tensor | None,
    dsoftmax_lse: Tensor | None,
) -> tuple[Any, ...]:
    """The gradients of the inputs, from backwards with the inputs of FlashAttnBackwardFunc and AttnBiasBackwardFunc."""
    wanted = {name: OPTIONS + i for i, name in enumerate(Options._fields) if ctx.needs_input_grad[OPTIONS + i]}
    for name in wanted:
        if name not in GRADIENTS and name != ATTN_BIAS:
            raise NotImplementedError(
                f"flash_attn_mini: {name} requires a gradient, which is not supported; backends that have it: none. "
                f"Allowed: one that requires none, for example {name}.detach()"
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
    dq, dk, dv, softmax_d = run(dout, *qkv, out, softmax_lse, dsoftmax_lse, *rest, *ctx.needs_input_grad[:NUM_TENSORS])
    gradients: list[Tensor | None] = [dq, dk, dv, *(None for _ in rest)]
    for name, place in wanted.items():
        assert softmax_d is not None
        if name == ATTN_BIAS:
            gradients[place] = run_attn_bias(dout, *qkv, softmax_lse, softmax_d, *inputs[OPTIONS:])
            continue
        gradients[place] = GRADIENTS[name](inputs[place], softmax_lse, softmax_d, dsoftmax_lse, inputs[NUM_TENSORS])
    return tuple(gradients)


class FlashAttnBackwardFunc(torch.autograd.Function):
    """The backward, without a derivative. Inputs: those of the op ``triton_bwd``, output_mask as three flags."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        """Run the backward."""
        *call, want_dq, want_dk, want_dv = inputs
        gradients: tuple[Tensor | None, ...] = ops.BACKWARD(*call, [want_dq, want_dk, want_dv])
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(NO_DOUBLE_BACKWARD)


class AttnBiasBackwardFunc(torch.autograd.Function):
    """The gradient of attn_bias, without a derivative. Inputs: those of the op ``triton_attn_bias_bwd``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Run the backward."""
        gradient: Tensor = ops.ATTN_BIAS_BACKWARD(*inputs)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
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


# ---- ops that only these functions need -----------------------------------------------------------------------------


def _no_backward(dout: Tensor, size: Sequence[int]) -> Tensor:
    raise NotImplementedError(
        "flash_attn_mini: no backend implements the backward of flash_attn_with_kvcache; backends that have it: none. "
        "Available: torch.no_grad(), or flash_attn_func for training"
    )


def _no_backward_fake(dout: Tensor, size: Sequence[int]) -> Tensor:
    return dout.new_empty(size)


def _compiled_backward(ctx: Any, dout: Tensor | None, dsoftmax_lse: Tensor | None, _: None) -> tuple[Any, ...]:
    return _gradients(FlashAttnBackwardFunc.forward, AttnBiasBackwardFunc.forward, ctx, dout, dsoftmax_lse)


# `triton_fwd` with its gradient in compiled code.
ops.define_forward("triton_attention")
torch.library.register_autograd(qualified("triton_attention"), _compiled_backward, setup_context=_save, lib=ops.library)
ATTENTION = CUSTOM_OPS.triton_attention.default

# A compiled program may contain it: it raises when it runs, not when it is traced.
ops.library.define("triton_no_backward(Tensor dout, SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _dispatch_key in ("CPU", "CUDA"):
    ops.library.impl("triton_no_backward", _no_backward, _dispatch_key)
_register_fake: Callable[..., Any] = torch.library.register_fake
_register_fake(qualified("triton_no_backward"), _no_backward_fake, lib=ops.library)
NO_BACKWARD = CUSTOM_OPS.triton_no_backward.default
