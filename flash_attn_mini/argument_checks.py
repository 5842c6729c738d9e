"""Types of arguments, before the custom ops, which could not even receive some of them.

Values, shapes and dtypes are checked once, in csrc/checks.cpp, whatever the backend.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

WindowSize = tuple[int, int]
MAX_INTEGER = 2**62  # keys, queries: far past any sequence, and inside 64 bits


def check_types(
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
                raise wrong_type(name, value, "a torch.Tensor")
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.layout is not torch.strided:
            raise TypeError(f"flash_attn_mini: {name} has layout {value.layout}; allowed: torch.strided")
        if value.device != q.device:
            raise ValueError(f"flash_attn_mini: {name} is on {value.device}; allowed: the device of q, {q.device}")
    check_number("dropout_p", dropout_p, "a number in [0, 1 - 2^-17)")
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(headdim)")
    if not isinstance(causal, bool):
        raise wrong_type("causal", causal, "True or False")
    if not (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(isinstance(side, (numbers.Integral, torch.SymInt)) for side in window_size)
    ):
        raise wrong_type("window_size", window_size, "a pair of integers (left, right), -1 for unbounded")
    for side, name in zip(window_size, ("left", "right"), strict=True):
        if isinstance(side, numbers.Integral) and abs(int(side)) > MAX_INTEGER:
            raise ValueError(
                f"flash_attn_mini: window_size has {name} {side}; allowed: -1 (unbounded) to {MAX_INTEGER}"
            )
    check_number("softcap", softcap, "a number, 0 for off")
    if alibi_slopes is not None and not isinstance(alibi_slopes, tensor):
        raise wrong_type("alibi_slopes", alibi_slopes, "a float32 torch.Tensor, or None")
    if backend is not None and not isinstance(backend, str):
        raise wrong_type("backend", backend, "the name of a backend, or None")


def checked_options(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: Any,
    return_attn_probs: Any,
    backend: str | None,
) -> tuple[Any, ...]:
    """The types of the arguments that all public functions take, then those that all custom ops have at their end."""
    check_types(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, backend)
    if not (type(deterministic) is bool and type(return_attn_probs) is bool):
        check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.ndim else 1.0
    left, right = window_size
    return (
        as_float(dropout_p),
        as_float(softmax_scale),
        causal,
        left,
        0 if causal and right >= -1 else right,
        as_float(softcap),
        return_attn_probs and dropout_p > 0,
        deterministic,
        backend,
    )


def as_float(value: Any) -> Any:
    """NumPy's numbers and Python's integers as floats; a symbolic number as it is."""
    return value if isinstance(value, (float, torch.SymFloat, torch.SymInt)) else float(value)


def check_number(name: str, value: object, allowed: str) -> None:
    """Raise unless value is a number that a float can hold."""
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    if type(value) is bool or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, allowed)
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"flash_attn_mini: {name} is too large for a float; allowed: {allowed}") from None


def check_flags(**flags: object) -> None:
    """Raise TypeError for a flag that is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise wrong_type(name, value, "True or False")


def check_tensor(name: str, value: object, otherwise: str = "") -> None:
    """Raise TypeError unless value is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        raise wrong_type(name, value, "a torch.Tensor" + otherwise)
    if value.layout is not torch.strided:
        raise TypeError(f"flash_attn_mini: {name} has layout {value.layout}; allowed: torch.strided")


def wrong_type(name: str, value: object, allowed: str) -> TypeError:
    """The TypeError for an argument of a wrong type."""
    return TypeError(f"flash_attn_mini: {name} is {value!r} ({type(value).__name__}); allowed: {allowed}")


def check_backward_tensors(
    dout: object, out: object, softmax_lse: object, dq: object, dk: object, dv: object, rng_state: object
) -> None:
    """Raise TypeError for tensors of the backward functions that are none."""
    for name, value in (("dout", dout), ("out", out), ("softmax_lse", softmax_lse)):
        check_tensor(name, value)
    for name, optional in (("dq", dq), ("dk", dk), ("dv", dv), ("rng_state", rng_state)):
        if optional is not None:
            check_tensor(name, optional, ", or None")


def check_varlen(cu_seqlens_q: object, cu_seqlens_k: object, block_table: object) -> None:
    """Raise TypeError for tensors of the varlen functions that are none."""
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    if block_table is not None:
        check_tensor("block_table", block_table, ", or None")


def check_packed(name: str, value: object, parts: int, shape: str) -> None:
    """Raise unless value is a tensor of the rank of ``shape`` with ``parts`` in its third dimension from the end."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    rank = len(shape.split(","))
    if value.ndim != rank or value.shape[-3] != parts:
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")


def as_length(name: str, value: Any) -> Any:
    """An integer as the custom ops take it. Reading a tensor on a GPU waits for it."""
    length: Any
    if type(value) is int or isinstance(value, torch.SymInt):
        length = value
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in _INTEGERS:
        length = value.item()
    elif type(value) is not bool and isinstance(value, numbers.Integral):
        length = int(value)
    else:
        raise wrong_type(name, value, "an integer, or an integer tensor of one element")
    if type(length) is int and abs(length) > MAX_INTEGER:
        raise ValueError(f"flash_attn_mini: {name} is {length}; allowed: at most {MAX_INTEGER}")
    return length


_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
