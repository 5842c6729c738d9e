"""The public functions, with the names, argument order and defaults of flash-attn 2.8: the top of the call chain.

This file has the functions for sequences of equal length; varlen.py has those for sequences of different lengths,
packed.py those for q, k and v in one tensor, kvcache.py the function for a KV cache. Each checks types, fills in
defaults and enters its custom op (ops.py). csrc/api/checks.cpp checks values, shapes and dtypes, for every backend.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops, tracing
from .argument_checks import WindowSize, as_flag, as_float, check_backward_tensors, checked_options
from .backends import chosen_backend, extension
from .kvcache import flash_attn_with_kvcache
from .official import backward_into, empty_rng_state, results_of
from .packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .s_dmask import s_dmask_or_empty
from .varlen import _flash_attn_varlen_backward, _flash_attn_varlen_forward, flash_attn_varlen_func

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False  # code written for the official package imports it


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exact attention, ``softmax(softmax_scale * q @ k.T + mask) @ v``, in O(seqlen) memory, forward and backward.

    Follows "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (Dao, 2023).

    Differentiable in q, k and v, through out and through softmax_lse, once: a second derivative raises
    NotImplementedError. The backward computes nothing for inputs that need no gradient, and runs on the backend of the
    forward. In a torch.autocast region q, k and v are cast as the inputs of scaled_dot_product_attention are.

    Accepts Python or NumPy scalars and one-element tensors as numbers; a CUDA tensor synchronises. A flag may be any
    value with a truth value, such as 1, ``numpy.bool_`` or a one-element tensor.

    Args:
        q: Queries, ``[batch, seqlen_q, nheads, headdim]``; headdim 1 to 512; the last dimension contiguous. float16 or
            bfloat16; on the ``triton`` backend also float32, on ``cpu`` also float32 and float64. The ``cuda`` backend
            has head dims up to 256. Above 256, CUDA tensors take ``triton`` by default.
        k: Keys, ``[batch, seqlen_k, nheads_k, headdim]``, dtype and device of q. nheads is a multiple of nheads_k:
            query head h reads key head ``h // (nheads / nheads_k)`` (GQA; MQA when nheads_k is 1).
        v: Values, ``[batch, seqlen_k, nheads_k, headdim_v]``; headdim_v 1 to 512. Where it differs from headdim, or
            where one of them is no multiple of 8, the ``cuda`` backend works on copies padded with zeros.
        dropout_p: Probability of dropping an attention probability after the softmax, in [0, 1 - 2^-17), rounded to a
            multiple of 2^-16. The others are scaled by ``1 / (1 - dropout_p)``. torch's generator of q's device draws a
            seed and an offset (``rng_state``), which determine the mask on every backend: ``torch.manual_seed`` repeats
            it, checkpointing draws the same mask again, and each replay of a CUDA graph draws a new one. torch.vmap
            obeys its ``randomness``. Not together with softcap.
        softmax_scale: Factor on the scores ``q @ k.T``. Default ``1 / sqrt(headdim)``.
        causal: Mask aligned to the bottom right: query i sees key j when ``j <= i + seqlen_k - seqlen_q``.
        window_size: ``(left, right)`` in keys, -1 for unbounded: query i sees key j when
            ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``. causal means a right of 0. Any
            sequence of two integers: a tuple, a list, an array, a tensor.
        softcap: Above 0, scores become ``softcap * tanh(score / softcap)`` after the scale (Gemma 2).
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``: adds ``-slope * |i + seqlen_k - seqlen_q - j|`` to
            the score of query i and key j (ALiBi). The slopes get no gradient.
        deterministic: Makes dq bitwise repeatable on ``cuda``, where its last bits otherwise depend on the order in
            which thread blocks finish; torch.use_deterministic_algorithms(True) enables it too. The forward, dk and dv
            are always repeatable. On ``cpu`` dq is too; on ``triton`` it is for one tuned configuration.
        return_attn_probs: Return ``(out, softmax_lse, S_dmask)`` in place of ``out``.
        learnable_sink: ``[nheads]`` or ``[batch, nheads]``, float32 or in the dtype of q: a logit of each head that has
            no value. It adds ``exp(learnable_sink)`` to each row's sum of exponentials (gpt-oss). softmax_scale and
            softcap leave it as it is. It has a gradient.
        key_ranges: int32 ``[1 or batch, 1 or nheads, seqlen_q, 2]``: query i sees the keys from ``key_ranges[..., i,
            0]`` up to, not including, ``key_ranges[..., i, 1]``, as far as causal and window_size let it see them; or
            ``[1 or batch, 1 or nheads, seqlen_q, 2, 2]``, the union of two such ranges. The ranges may be empty and in
            any order. Values are clamped to 0 and seqlen_k; with FLASH_ATTN_MINI_CHECK=1 a value out of range is an
            error. Blocks of keys that no query of a block sees take no time. `flash_attn_mini.masks` builds
            key_ranges for documents, prefixes, chunks and padding. They have no gradient.
        attn_bias: ``[1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k]``, any strides; it is never copied, and a
            dimension that `expand` made takes no memory. In the dtype of q or float32 (float64 for a float64 q): added
            to the scores after the scale and softcap; -inf hides a key. It has a gradient, summed in float32 over the
            dimensions of size 1 and always bitwise repeatable. Or bool: query i sees key j where it is True. A query
            that sees no key has out 0, as without any key.
        backend: ``"cuda"``, ``"triton"`` or ``"cpu"``. Default: ``use_backend``, else FLASH_ATTN_MINI_BACKEND, else by
            the device of q.
        return_max_logits: Return max_logits too, as the last of a tuple: the largest logit of each head, for QK-clip
            and monitoring.

    Returns:
        out, ``[batch, seqlen_q, nheads, headdim_v]`` in the dtype of q; or with ``return_attn_probs`` also softmax_lse,
        the natural logarithm of each row's sum of exponentials, float32 (float64 for float64 inputs)
        ``[batch, nheads, seqlen_q]``, and S_dmask.
        S_dmask is for tests: with dropout the probabilities before dropout, divided by the largest of their row,
        ``[batch, nheads, seqlen_q, seqlen_k]``, both lengths rounded up to a multiple of 128, with the sign bit set
        where dropped; without dropout it is empty. A query without a key has out 0 and softmax_lse -inf (with a sink:
        the sink), and gets no gradient. With ``return_max_logits`` the last result is max_logits, in the dtype of
        softmax_lse, ``[batch, nheads]``: the largest score after softmax_scale, softcap and ALiBi of a query and a key
        that it sees; -inf for a head without such a pair. A sink, dropout and scores that are NaN do not count. It has
        no gradient.

    Raises:
        TypeError: For an argument of a wrong type or dtype.
        ValueError: For a wrong shape, device, stride or value.
        NotImplementedError: For a feature that the backend lacks.
        RuntimeError: When the machine lacks what a backend needs.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_func
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 2, 256, 2, 64)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    # Arguments of the usual types enter the extension, which checks all values. Other types are converted below.
    if (
        type(dropout_p) is type(softcap) is float
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(window_size) is tuple
        and len(window_size) == 2
        and not ops.is_traced(q, k, v)
        and chosen_backend() is None
        and extension.MODULE is not None
        and not extension.MODULE.trace_enabled()
    ):
        try:
            left, right = window_size
            if type(left) is type(right) is int:
                out, softmax_lse, S_dmask, _, *max_logits = extension.MODULE.fwd(
                    q,
                    k,
                    v,
                    None,
                    alibi_slopes,
                    dropout_p,
                    softmax_scale,
                    causal,
                    left,
                    right,
                    softcap,
                    return_attn_probs,
                    None,
                    deterministic,
                    backend,
                    learnable_sink,
                    key_ranges,
                    attn_bias,
                    return_max_logits,
                )
                if not return_attn_probs:
                    return (out, *max_logits) if max_logits else out
                return out, softmax_lse, q.new_empty((0,)) if S_dmask is None else S_dmask, *max_logits
        except TypeError:  # raised again below, unless the conversion changes an argument
            pass
    options = checked_options(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        backend,
        learnable_sink,
        key_ranges,
        attn_bias,
        return_max_logits,
    )
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    if tracing.enabled():
        tracing.trace("flash_attn_func", q=q, k=k, v=v, causal=causal, softmax_scale=options.softmax_scale)
    out, softmax_lse, rng_state, max_logits = ops.forward(q, k, v, None, options)
    probs = (softmax_lse, s_dmask_or_empty(q, k, rng_state, None, options)) if return_attn_probs else None
    return results_of(out, probs, max_logits)


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The number of keys in a block of S_dmask: all keys, because one largest logit scales a whole row.

    Tests of the official package multiply S_dmask by ``exp(largest logit of the block - softmax_lse)`` to get
    probabilities.
    """
    return 1 << 30


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward with the official signature, for code that defines its own autograd function.

    Arguments, backend and errors are those of `flash_attn_func`; ``return_softmax`` requests S_dmask.

    Returns:
        out, softmax_lse and S_dmask as `flash_attn_func` returns them, and rng_state, int64 ``[2]``: the seed and the
        offset that determine the mask of dropout; empty without dropout.
    """
    window_size = (window_size_left, window_size_right)
    softmax_scale = as_float("softmax_scale", softmax_scale, "a finite number")
    return_softmax = as_flag("return_softmax", return_softmax)
    options = checked_options(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, False, None
    )
    out, softmax_lse, rng_state, _ = ops.forward(q, k, v, None, options)
    S_dmask = s_dmask_or_empty(q, k, rng_state if return_softmax else None, None, options)
    return out, softmax_lse, S_dmask, empty_rng_state(q) if rng_state is None else rng_state


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backward with the official signature: writes dq, dk and dv in place.

    Args:
        dout: The gradient of out, shaped like out, any strides.
        out: As the forward returned it.
        softmax_lse: As the forward returned it.
        dq: The tensor that receives the gradient of q, shaped like q, its last dimension contiguous; None if the
            gradient is not wanted.
        dk: The tensor that receives the gradient of k, or None.
        dv: The tensor that receives the gradient of v, or None.
        rng_state: As the forward returned it; needed and read only with dropout.

    The other arguments are those of the forward, and of `flash_attn_func`.

    Returns:
        softmax_d, the sum over headdim of ``dout * out``, in the dtype of softmax_lse, ``[batch, nheads, seqlen_q
        rounded up to a multiple of 128]``. Elements past seqlen_q are undefined.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As in `flash_attn_func`.
    """
    window_size = (window_size_left, window_size_right)
    softmax_scale = as_float("softmax_scale", softmax_scale, "a finite number")
    check_backward_tensors(dout, out, softmax_lse, dq, dk, dv, rng_state)
    options = checked_options(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None
    )
    return backward_into((dq, dk, dv), dout, q, k, v, out, softmax_lse, None, options, rng_state)
