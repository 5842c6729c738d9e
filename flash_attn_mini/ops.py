"""The custom op ``flash_attn_mini::_flash_attn_forward``: what torch.compile, export and opcheck see.

flash_attn_interface.py calls it; it picks the backend and enters it. Shapes for tracing come from the fake
implementation, which allocates as the backends do and computes nothing.
"""

from __future__ import annotations

import torch

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


for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("_flash_attn_forward", _forward, _dispatch_key)


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
