"""Checks and converts the Python types of arguments, before the custom ops, whose schemas do not accept all of them.

The functions convert what the official package accepts: Python and NumPy scalars, one-element tensors, any pair of
integers as a window, any truth value as a flag. csrc/api/checks.cpp checks values, shapes and dtypes once, for every
backend.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from .backends import backend_argument, check_backend
from .options import Options, Sequences

WindowSize = tuple[int, int]
MAX_INTEGER = 2**62  # keys, queries: longer than any sequence, and inside 64 bits
_REPR = reprlib.Repr()  # of values in messages, which may be large
_REPR.maxother = _REPR.maxstring = 120
_PAIR = "a pair of integers (left, right), -1 for unbounded"


def checked_options(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    backend: Any,
    learnable_sink: Any = None,
    key_ranges: Any = None,
    attn_bias: Any = None,
    return_max_logits: Any = False,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> Options:
    """Check and convert the arguments that all public functions take. Reading a CUDA tensor synchronises.

    ``names``: the names of q, k and v in error messages.
    """
    tensor = torch.Tensor
    # The usual call needs no conversion, and this test is faster than the checks below. While a program is traced, the
    # window may hold numbers that are not known yet.
    if torch.compiler.is_compiling() or not (
        isinstance(q, tensor)
        and isinstance(k, tensor)
        and isinstance(v, tensor)
        and q.layout is k.layout is v.layout is torch.strided
        and q.device == k.device == v.device
        and not (q.is_nested or k.is_nested or v.is_nested)
        and type(dropout_p) is float
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(causal) is bool
        and type(window_size) is tuple
        and len(window_size) == 2
        and type(window_size[0]) is type(window_size[1]) is int
        and max(window_size) <= MAX_INTEGER
        and type(softcap) is float
        and alibi_slopes is None
        and type(deterministic) is bool
        and backend is None
        and learnable_sink is None
        and key_ranges is None
        and attn_bias is None
        and type(return_max_logits) is bool
    ):
        _check_qkv((q, k, v), names)
        dropout_p = as_float("dropout_p", dropout_p, "a number in [0, 1 - 2^-17)")
        if softmax_scale is not None:
            softmax_scale = as_float("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(headdim)")
        causal = as_flag("causal", causal)
        window_size = as_window(window_size)
        softcap = as_float("softcap", softcap, "a number, 0 for off")
        if alibi_slopes is not None:
            check_tensor("alibi_slopes", alibi_slopes, ", float32, or None")
        if learnable_sink is not None:
            check_tensor("learnable_sink", learnable_sink, ", float32 or in the dtype of q, or None")
        if key_ranges is not None:
            check_tensor("key_ranges", key_ranges, ", int32, or None")
        if attn_bias is not None:
            check_tensor("attn_bias", attn_bias, ", bool, float32 or in the dtype of q, or None")
        deterministic = as_flag("deterministic", deterministic)
        return_max_logits = as_flag("return_max_logits", return_max_logits)
        if backend is not None:
            if not isinstance(backend, str):
                raise wrong_type("backend", backend, "the name of a backend, or None")
            check_backend(backend)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.ndim else 1.0
    left, right = window_size
    return Options(
        dropout_p,
        softmax_scale,
        causal,
        left,
        0 if causal and (torch.compiler.is_compiling() or right >= -1) else right,
        softcap,
        alibi_slopes,
        deterministic,
        backend_argument(q.device, backend),
        learnable_sink,
        key_ranges,
        attn_bias,
        return_max_logits,
    )


def _check_qkv(tensors: tuple[Any, Any, Any], names: tuple[str, str, str]) -> None:
    q = tensors[0]
    for name, value in zip(names, tensors, strict=True):
        check_tensor(name, value)
        if value.device != q.device:
            raise ValueError(f"flash_attn_mini: {name} is on {value.device}; allowed: the device of q, {q.device}")


# ---- conversions ----------------------------------------------------------------------------------------------------


def _item(value: Any) -> Any:
    """The element of a tensor or NumPy array of one element, as a Python number; any other value as it is."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if hasattr(value, "ndim") and hasattr(value, "item") and value.size == 1:
        return value.item()
    return value


def as_float(name: str, value: Any, allowed: str) -> Any:
    """A float from a Python or NumPy scalar or a one-element tensor; a symbolic number stays as it is."""
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    number = _item(value)
    if isinstance(number, (torch.SymFloat, torch.SymInt)):
        return number
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise wrong_type(name, value, allowed)
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"flash_attn_mini: {name} is too large for a float; allowed: {allowed}") from None


def check_number(name: str, value: Any, allowed: str) -> None:
    """Raise unless value is a number that a float can represent."""
    as_float(name, value, allowed)


def as_length(name: str, value: Any) -> Any:
    """A length as an int, from a Python or NumPy integer or a one-element integer tensor."""
    return as_integer(name, value, "an integer, or an integer tensor of one element")


def as_integer(name: str, value: Any, allowed: str) -> Any:
    """An int from a Python or NumPy integer or a one-element integer tensor; a symbolic one stays as it is."""
    if type(value) is int or isinstance(value, torch.SymInt):
        number: Any = value
    else:
        number = _item(value)
        if isinstance(number, bool) or not isinstance(number, (numbers.Integral, torch.SymInt)):
            raise wrong_type(name, value, allowed)
        if not isinstance(number, torch.SymInt):
            number = int(number)
    # A traced program may have a number that is not known yet: the op checks it when the program runs.
    if type(number) is int and not torch.compiler.is_compiling() and abs(number) > MAX_INTEGER:
        raise ValueError(f"flash_attn_mini: {name} is {number}; allowed: at most {MAX_INTEGER}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """True or False from a value that defines a truth value: a bool, a number, a one-element tensor, None.

    A string or a list is not accepted, as in the official package: ``"False"`` would be true.
    """
    if type(value) is bool:
        return value
    if value is None or hasattr(type(value), "__bool__"):
        try:
            return bool(value)
        except (RuntimeError, ValueError):  # a tensor or an array of several elements
            pass
    raise wrong_type(name, value, "True or False, or a value of one element that is true or false")


def as_window(window_size: Any) -> WindowSize:
    """(left, right) from any sequence of two integers: a tuple, a list, a NumPy array, a tensor."""
    try:
        if isinstance(window_size, (Mapping, str, bytes, bytearray)) or len(window_size) != 2:
            raise wrong_type("window_size", window_size, _PAIR)
        left, right = window_size[0], window_size[1]
    except (TypeError, KeyError, IndexError):
        raise wrong_type("window_size", window_size, _PAIR) from None
    allowed = "-1 (unbounded), or an integer: window_size is " + _PAIR
    return as_integer("window_size[0]", left, allowed), as_integer("window_size[1]", right, allowed)


def as_sequences(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, block_table: Any = None
) -> Sequences:
    """The arguments of the varlen functions that locate the sequences. Reading a CUDA tensor synchronises."""
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    if block_table is not None:
        check_tensor("block_table", block_table, ", or None")
    longest_q, longest_k = as_length("max_seqlen_q", max_seqlen_q), as_length("max_seqlen_k", max_seqlen_k)
    return Sequences(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, block_table)


# ---- tensors --------------------------------------------------------------------------------------------------------


def wrong_type(name: str, value: object, allowed: str) -> TypeError:
    """The TypeError for an argument of a wrong type."""
    return TypeError(f"flash_attn_mini: {name} is {_REPR.repr(value)} ({type(value).__name__}); allowed: {allowed}")


def check_tensor(name: str, value: object, otherwise: str = "") -> None:
    """Raise TypeError unless value is a strided tensor that is not nested."""
    if not isinstance(value, torch.Tensor):
        raise wrong_type(name, value, "a torch.Tensor" + otherwise)
    if value.is_nested:
        raise TypeError(
            f"flash_attn_mini: {name} is a nested tensor; allowed: a plain torch.Tensor (for sequences of different "
            "lengths, flash_attn_varlen_func takes the values and the offsets of a jagged tensor)"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"flash_attn_mini: {name} has layout {value.layout}; allowed: torch.strided")


def check_backward_tensors(
    dout: object, out: object, softmax_lse: object, dq: object, dk: object, dv: object, rng_state: object
) -> None:
    """Raise TypeError unless the tensors of the official backward functions are tensors."""
    for name, value in (("dout", dout), ("out", out), ("softmax_lse", softmax_lse)):
        check_tensor(name, value)
    for name, optional in (("dq", dq), ("dk", dk), ("dv", dv), ("rng_state", rng_state)):
        if optional is not None:
            check_tensor(name, optional, ", or None")


def check_packed(name: str, value: object, parts: int, shape: str) -> None:
    """Raise unless value is a tensor of the rank of ``shape`` with ``parts`` in its third dimension from the end."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    rank = len(shape.split(","))
    if value.ndim != rank or value.shape[-3] != parts:
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")
