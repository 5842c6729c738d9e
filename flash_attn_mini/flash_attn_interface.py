"""The public functions, with the names, argument order and defaults of flash-attn 2.8: the top of the call chain.

Each checks types, fills in defaults and enters the custom op of ops.py; values, shapes and dtypes are checked once, in
csrc/checks.cpp, whatever the backend.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

import torch

from . import tracing
from .ops import flash_attn_backward_into, flash_attn_forward_eager

WindowSize = tuple[int, int]
MAX_WINDOW = 2**62  # keys: far past any sequence, and inside 64 bits


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
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact attention, ``softmax(softmax_scale * q @ k.T + mask) @ v``, in O(seqlen) memory, forward and backward.

    Follows "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (Dao, 2023).

    Differentiable in q, k and v, through out and through softmax_lse, once: a second derivative raises
    NotImplementedError. The backward computes nothing for inputs that need no gradient, and runs on the backend of the
    forward. In a torch.autocast region q, k and v are cast as those of scaled_dot_product_attention are.

    Args:
        q: Queries, ``[batch, seqlen_q, nheads, headdim]``; headdim 1 to 256; the last dimension contiguous. float16 or
            bfloat16; on the ``cpu`` backend also float32 and float64.
        k: Keys, ``[batch, seqlen_k, nheads_k, headdim]``, dtype and device of q. nheads is a multiple of nheads_k:
            query head h reads key head ``h // (nheads / nheads_k)`` (GQA; MQA when nheads_k is 1).
        v: Values, shaped like k.
        dropout_p: Probability of dropping an attention probability, in [0, 1). Default 0. Above 0 is not implemented
            in this version.
        softmax_scale: Factor on the scores ``q @ k.T``. Default ``1 / sqrt(headdim)``.
        causal: Mask aligned to the bottom right: query i sees key j when ``j <= i + seqlen_k - seqlen_q``.
        window_size: ``(left, right)`` in keys, -1 for unbounded. Only ``(-1, -1)`` is implemented in this version.
        softcap: Above 0, scores become ``softcap * tanh(score / softcap)``. Not implemented in this version.
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``. Not implemented in this version.
        deterministic: Makes the backward bitwise repeatable on ``cuda``, where dq otherwise depends on the order in
            which thread blocks finish; torch.use_deterministic_algorithms(True) asks for it too. dk, dv and the forward
            always are repeatable, and all of it on ``cpu`` and ``triton`` (there, for the configuration that was chosen
            when its kind of call was first tuned).
        return_attn_probs: Return ``(out, softmax_lse, S_dmask)`` in place of ``out``.
        backend: ``"cuda"``, ``"triton"`` or ``"cpu"``. Default: ``use_backend``, else FLASH_ATTN_MINI_BACKEND, else by
            the device of q.

    Returns:
        out, shaped like q in its dtype; or with ``return_attn_probs`` also softmax_lse, the natural logarithm of each
        row's sum of exponentials, float32 (float64 for float64 inputs) ``[batch, nheads, seqlen_q]``, and S_dmask,
        empty without dropout. A query with no key to attend to has out 0 and softmax_lse -inf.

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
    _check_types(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, backend)
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.ndim else 1.0
    if tracing.enabled():
        tracing.trace("flash_attn_func", q=q, k=k, v=v, causal=causal, softmax_scale=softmax_scale)
    window_size_left, window_size_right = window_size
    arguments = (
        q,
        k,
        v,
        alibi_slopes,
        _as_float(dropout_p),
        _as_float(softmax_scale),
        causal,
        window_size_left,
        0 if causal and window_size_right >= -1 else window_size_right,
        _as_float(softcap),
        return_attn_probs and dropout_p > 0,
        deterministic,
        backend,
    )
    out, softmax_lse, S_dmask, _ = flash_attn_forward_eager(*arguments)
    return (out, softmax_lse, S_dmask) if return_attn_probs else out


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
    """The forward as code written for the official package calls it, for one, to put its own autograd around it.

    Arguments, backend and errors as in `flash_attn_func`; ``return_softmax`` asks for S_dmask.

    Returns:
        out, softmax_lse and S_dmask as `flash_attn_func` returns them, and rng_state, empty without dropout.
    """
    window_size = (window_size_left, window_size_right)
    _check_types(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    _check_number("softmax_scale", softmax_scale, "a finite number")
    _check_flags(return_softmax=return_softmax)
    arguments = (
        q,
        k,
        v,
        alibi_slopes,
        _as_float(dropout_p),
        _as_float(softmax_scale),
        causal,
        window_size_left,
        0 if causal and window_size_right >= -1 else window_size_right,
        _as_float(softcap),
        return_softmax and dropout_p > 0,
        False,
        None,
    )
    out, softmax_lse, S_dmask, rng_state = flash_attn_forward_eager(*arguments)
    return out, softmax_lse, S_dmask, rng_state


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
    """The backward as code written for the official package calls it: writes dq, dk and dv in place.

    Args:
        dout: The gradient of out, like out, any strides.
        q: As in `flash_attn_func`, like the other arguments that are not named here.
        k: Likewise.
        v: Likewise.
        out: What the forward returned.
        softmax_lse: What the forward returned.
        dq: Where the gradient of q goes, like q, its last dimension contiguous; None when it is not wanted.
        dk: Likewise for k.
        dv: Likewise for v.
        dropout_p: As the forward had it, like the other arguments that are not named here.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size_left: Likewise.
        window_size_right: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: As in `flash_attn_func`.
        rng_state: What the forward returned; read only with dropout.

    Returns:
        softmax_d, the sum over headdim of ``dout * out``, in the dtype of softmax_lse, ``[batch, nheads, seqlen_q
        rounded up to a multiple of 128]``; what lies past seqlen_q means nothing.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As in `flash_attn_func`.
    """
    _check_types(
        q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, None
    )
    _check_number("softmax_scale", softmax_scale, "a finite number")
    _check_flags(deterministic=deterministic)
    for name, value in (("dout", dout), ("out", out), ("softmax_lse", softmax_lse)):
        _check_tensor(name, value)
    for name, optional in (("dq", dq), ("dk", dk), ("dv", dv), ("rng_state", rng_state)):
        if optional is not None:
            _check_tensor(name, optional, ", or None")
    return flash_attn_backward_into(
        (dq, dk, dv),
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        None,
        alibi_slopes,
        _as_float(dropout_p),
        _as_float(softmax_scale),
        causal,
        window_size_left,
        0 if causal and window_size_right >= -1 else window_size_right,
        _as_float(softcap),
        deterministic,
        rng_state,
    )


def flash_attn_kvpacked_func(*arguments: Any, **keywords: Any) -> NoReturn:
    """flash_attn_func with ``kv [batch, seqlen_k, 2, nheads_k, headdim]``. Not implemented in this version."""
    _not_implemented("flash_attn_kvpacked_func", "flash_attn_func(q, kv[:, :, 0], kv[:, :, 1])")


def flash_attn_qkvpacked_func(*arguments: Any, **keywords: Any) -> NoReturn:
    """flash_attn_func with ``qkv [batch, seqlen, 3, nheads, headdim]``. Not implemented in this version."""
    _not_implemented("flash_attn_qkvpacked_func", "flash_attn_func(*qkv.unbind(2))")


def flash_attn_varlen_func(*arguments: Any, **keywords: Any) -> NoReturn:
    """Attention over a batch of sequences of different lengths. Not implemented in this version."""
    _not_implemented("flash_attn_varlen_func", "flash_attn_func on each sequence")


def flash_attn_varlen_kvpacked_func(*arguments: Any, **keywords: Any) -> NoReturn:
    """flash_attn_varlen_func with packed keys and values. Not implemented in this version."""
    _not_implemented("flash_attn_varlen_kvpacked_func", "flash_attn_func on each sequence")


def flash_attn_varlen_qkvpacked_func(*arguments: Any, **keywords: Any) -> NoReturn:
    """flash_attn_varlen_func with packed queries, keys and values. Not implemented in this version."""
    _not_implemented("flash_attn_varlen_qkvpacked_func", "flash_attn_func on each sequence")


def flash_attn_with_kvcache(*arguments: Any, **keywords: Any) -> NoReturn:
    """Attention of new tokens over a key/value cache. Not implemented in this version."""
    _not_implemented("flash_attn_with_kvcache", "flash_attn_func on the filled part of the cache")


def _not_implemented(function: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"flash_attn_mini: {function} is not implemented in this version; backends that have it: none. "
        f"Available now: {instead}"
    )


def _check_types(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: object,
    softmax_scale: object,
    causal: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    backend: object,
) -> None:
    """Raise TypeError for arguments that the custom op could not even receive."""
    tensor = torch.Tensor
    if (  # the usual call, in a third of the time
        isinstance(q, tensor)
        and isinstance(k, tensor)
        and isinstance(v, tensor)
        and q.layout is k.layout is v.layout is torch.strided
        and q.device == k.device == v.device
        and type(dropout_p) is float
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(causal) is bool
        and type(window_size) is tuple
        and window_size == (-1, -1)
        and type(softcap) is float
        and alibi_slopes is None
        and (backend is None or type(backend) is str)
    ):
        return
    if not (isinstance(q, tensor) and isinstance(k, tensor) and isinstance(v, tensor)):
        for name, value in (("q", q), ("k", k), ("v", v)):
            if not isinstance(value, tensor):
                raise _wrong_type(name, value, "a torch.Tensor")
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.layout is not torch.strided:
            raise TypeError(f"flash_attn_mini: {name} has layout {value.layout}; allowed: torch.strided")
        if value.device != q.device:
            raise ValueError(f"flash_attn_mini: {name} is on {value.device}; allowed: the device of q, {q.device}")
    _check_number("dropout_p", dropout_p, "a number in [0, 1)")
    if softmax_scale is not None:
        _check_number("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(headdim)")
    if not isinstance(causal, bool):
        raise _wrong_type("causal", causal, "True or False")
    if not (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(isinstance(side, (numbers.Integral, torch.SymInt)) for side in window_size)
    ):
        raise _wrong_type("window_size", window_size, "a pair of integers (left, right), -1 for unbounded")
    for side, name in zip(window_size, ("left", "right"), strict=True):
        if isinstance(side, numbers.Integral) and abs(int(side)) > MAX_WINDOW:
            raise ValueError(f"flash_attn_mini: window_size has {name} {side}; allowed: -1 (unbounded) to {MAX_WINDOW}")
    _check_number("softcap", softcap, "a number, 0 for off")
    if alibi_slopes is not None and not isinstance(alibi_slopes, tensor):
        raise _wrong_type("alibi_slopes", alibi_slopes, "a float32 torch.Tensor, or None")
    if backend is not None and not isinstance(backend, str):
        raise _wrong_type("backend", backend, "the name of a backend, or None")


def _as_float(value: Any) -> Any:
    """NumPy's numbers and Python's integers as floats; a symbolic number as it is."""
    return value if isinstance(value, (float, torch.SymFloat, torch.SymInt)) else float(value)


def _check_number(name: str, value: object, allowed: str) -> None:
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    if type(value) is bool or not isinstance(value, numbers.Real):
        raise _wrong_type(name, value, allowed)
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"flash_attn_mini: {name} is too large for a float; allowed: {allowed}") from None


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise _wrong_type(name, value, "True or False")


def _check_tensor(name: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, torch.Tensor):
        raise _wrong_type(name, value, "a torch.Tensor" + otherwise)
    if value.layout is not torch.strided:
        raise TypeError(f"flash_attn_mini: {name} has layout {value.layout}; allowed: torch.strided")


def _wrong_type(name: str, value: object, allowed: str) -> TypeError:
    return TypeError(f"flash_attn_mini: {name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
