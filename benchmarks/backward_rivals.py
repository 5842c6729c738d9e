"""The implementations of the backward that benchmarks compare, each called as the op that autograd would call.

`bind` runs the implementation's own forward; the call that it returns is the backward op alone, so that every kernel of
a backward is inside the clock (delta, zeroing, the main kernel, conversion, sums over heads) and autograd is not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals import Call, Rival, as_sdpa_takes_them

aten = torch.ops.aten


def upstream_gradient(q: Tensor) -> Tensor:
    """dO: random normal, laid out like q, the same for every rival."""
    return torch.empty_like(q).normal_(generator=torch.Generator(q.device).manual_seed(0))


class MiniBackward(Rival):
    """flash_attn_mini's backward op with one of its backends."""

    def __init__(self, backend: str, *, deterministic: bool = False) -> None:
        self.name = f"{backend} deterministic" if deterministic else backend
        self.baseline = backend if deterministic else None
        self.backend = backend
        self.deterministic = deterministic

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from flash_attn_mini import flash_attn_func

        with torch.no_grad():
            out, softmax_lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, backend=self.backend)
        return partial(
            torch.ops.flash_attn_mini._flash_attn_backward.default,
            upstream_gradient(q),
            q,
            k,
            v,
            out,
            softmax_lse,
            None,  # dsoftmax_lse
            None,  # alibi_slopes
            0.0,  # dropout_p
            q.shape[-1] ** -0.5,
            causal,
            -1,
            0 if causal else -1,
            0.0,  # softcap
            self.deterministic,
            None,  # rng_state
            [True, True, True],
            self.backend,
        )

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        dq, dk, dv, _ = result
        return dq, dk, dv


class AtenBackward(Rival):
    """One of PyTorch's backward ops, on [batch, heads, seqlen, headdim] views."""

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        inputs = as_sdpa_takes_them(q, k, v, causal)
        with torch.no_grad():
            return self.bind_op(upstream_gradient(q).transpose(1, 2), *inputs, causal)

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        """The backward op with the results of its forward op."""
        raise NotImplementedError

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in result)
        return dq, dk, dv


class FlashAttention(AtenBackward):
    """FlashAttention-2 as PyTorch has it."""

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        out, lse, cum_q, cum_k, max_q, max_k, *rng, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        lengths = (cum_q, cum_k, max_q, max_k)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        return partial(backward, dout, q, k, v, out, lse, *lengths, 0.0, causal, *rng)


class CuDnn(AtenBackward):
    """cuDNN's kernels as PyTorch calls them."""

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        results = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, *rng, _ = results
        lengths = (cum_q, cum_k, max_q, max_k)
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        return partial(backward, dout, q, k, v, out, lse, *rng, None, *lengths, 0.0, causal)


class CpuSdpa(AtenBackward):
    """What scaled_dot_product_attention's autograd runs on CPU tensors."""

    def bind_op(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("PyTorch's CPU kernel takes as many key heads as query heads")
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return partial(backward, dout, q, k, v, out, lse, 0.0, causal)


BACKWARD_RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        MiniBackward("cuda"),
        MiniBackward("cuda", deterministic=True),
        MiniBackward("triton"),
        MiniBackward("cpu"),
        FlashAttention("FLASH_ATTENTION"),
        CuDnn("cuDNN"),
        CpuSdpa("SDPA"),
    )
}
