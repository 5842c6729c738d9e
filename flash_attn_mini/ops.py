"""The custom op ``flash_attn_mini::_flash_attn_forward``: what torch.compile, export and opcheck see.

flash_attn_interface.py calls it; it picks the backend and enters it. Shapes for tracing come from the fake
implementation, which allocates as the backends do and computes nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from . import tracing
from .backends import select_backend

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_library = torch.library.Library("flash_attn_mini", "DEF")
_library.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, float dropout_p, float softmax_scale,"
    " bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, bool return_softmax,"
    " str? backend=None) -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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


class FlashAttnFunc(torch.autograd.Function):
    """Attention as autograd sees it. The forward is complete; the backward says that it is not there yet."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Run the custom op below autograd; nothing is saved, as no backward will read it."""
        out, softmax_lse, S_dmask, rng_state = _forward_below_autograd(*arguments)
        ctx.mark_non_differentiable(S_dmask, rng_state)
        return out, softmax_lse, S_dmask, rng_state

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        """Refuse: a silent zero would be worse."""
        raise NotImplementedError(
            "flash_attn_mini: no backend implements the backward in this version; backends that have it: none. "
            "Call flash_attn_func under torch.no_grad() for inference, or "
            "torch.nn.functional.scaled_dot_product_attention for training."
        )


def _forward_below_autograd(*arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return flash_attn_forward(*arguments)


def _forward_autograd(*arguments: Any) -> Any:
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_attn_mini: no backend implements forward-mode automatic differentiation; backends that have it: none"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return FlashAttnFunc.apply(*arguments)
    return _forward_below_autograd(*arguments)


for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("_flash_attn_forward", _forward, _dispatch_key)
_library.impl("_flash_attn_forward", _forward_autograd, "Autograd")


@torch.library.register_fake("flash_attn_mini::_flash_attn_forward", lib=_library)
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
    backend: str | None = None,
) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        torch.empty_like(q),
        q.new_empty((batch, nheads, seqlen_q), dtype=lse_dtype),
        q.new_empty((0,)),
        q.new_empty((0,), dtype=torch.int64),
    )


flash_attn_forward = torch.ops.flash_attn_mini._flash_attn_forward.default


def flash_attn_forward_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
    """The custom op, without the dispatcher where nobody listens to it: plain tensors, no gradient, no mode.

    The dispatcher's two turns through Python cost more host time than all below them (benchmarks/bench_overhead.py).
    """
    if (
        torch.compiler.is_compiling()
        or type(q) is not torch.Tensor
        or type(k) is not torch.Tensor
        or type(v) is not torch.Tensor
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or q.device.type not in ("cpu", "cuda")
    ):
        return flash_attn_forward(q, k, v, *arguments)
    return _forward(q, k, v, *arguments)
