"""Wrong backward calls: each raises a named exception that says what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import flash_attn_mini
from flash_attn_mini import _C
from flash_attn_mini.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

from ..support.op_calls import BWD, bwd_arguments
from ..support.wrong_calls import (
    BATCH,
    NHEADS,
    SEQLEN_Q,
    Call,
    T,
    V,
    WrongCall,
    assert_says,
    cast,
    given,
    meta,
    shape,
    slopes,
    strided,
    valid_call,
)


def valid_backward_call(device: str) -> Call:
    """Arguments of _flash_attn_backward, by their official names."""
    call = valid_call(device)
    like_q, like_k = call["q"], call["k"]
    lse = torch.zeros(BATCH, NHEADS, SEQLEN_Q, device=device)
    return {
        "dout": torch.ones_like(like_q),
        **call,
        "out": torch.zeros_like(like_q),
        "softmax_lse": lse,
        "dq": torch.zeros_like(like_q),
        "dk": torch.zeros_like(like_k),
        "dv": torch.zeros_like(like_k),
        "dropout_p": 0.0,
        "softmax_scale": 0.25,
        "causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "rng_state": None,
    }


def same_memory(argument: str, other: str) -> Callable[[Call], object]:
    return lambda call: call.update({argument: call[other]})


def overlapping(argument: str) -> Callable[[Call], object]:
    return lambda call: call.update({argument: call[argument][:, :1].expand_as(call[argument])})


def sparse(argument: str) -> Callable[[Call], object]:
    return lambda call: call.update({argument: call[argument].to_sparse()})


OF_Q, OF_K = r"shape of q.*, \[2, 5, 6, 16\]", r"shape of k, \[2, 7, 3, 16\]"
LSE = r"batch, nheads, seqlen_q\] = \[2, 6, 5\]"
WRONG_BACKWARD_CALLS = [
    # dout and out
    WrongCall("dout_shape", shape("dout", 2, 5, 6, 8), V, r"\bdout\b", r"\[2, 5, 6, 8\]", OF_Q),
    WrongCall("dout_seqlen", shape("dout", 2, 7, 6, 16), V, r"\bdout\b", r"\[2, 7, 6, 16\]", OF_Q),
    WrongCall("dout_rank", shape("dout", 5, 6, 16), V, r"\bdout\b", r"\[5, 6, 16\]", OF_Q),
    WrongCall("dout_scalar", shape("dout"), V, r"\bdout\b", r"\[\]", OF_Q),
    WrongCall("dout_dtype", cast(torch.float32, "dout"), T, r"\bdout\b.*dtype", "(?i)float", "that of q"),
    WrongCall("dout_elsewhere", meta("dout"), V, r"\bdout\b", "meta", "device of q"),
    WrongCall("dout_none", given(dout=None), T, r"\bdout\b", "None", "torch.Tensor"),
    WrongCall("dout_sparse", sparse("dout"), T, r"\bdout\b.*layout", "(?i)sparse", "strided"),
    WrongCall("out_shape", shape("out", 2, 5, 3, 16), V, r"\bout\b", r"\[2, 5, 3, 16\]", OF_Q),
    WrongCall("out_dtype", cast(torch.bfloat16, "out"), T, r"\bout\b.*dtype", "(?i)bfloat16", "that of q"),
    WrongCall("out_elsewhere", meta("out"), V, r"\bout\b", "meta", "device of q"),
    WrongCall("out_list", given(out=[1.0]), T, r"\bout\b", r"\[1.0\].*list", "torch.Tensor"),
    # softmax_lse
    WrongCall("lse_shape", shape("softmax_lse", 2, 5, 6), V, r"softmax_lse", r"\[2, 5, 6\]", LSE),
    WrongCall("lse_of_keys", shape("softmax_lse", 2, 3, 5), V, r"softmax_lse", r"\[2, 3, 5\]", LSE),
    WrongCall("lse_rank", shape("softmax_lse", 2, 6, 5, 1), V, r"softmax_lse", r"\[2, 6, 5, 1\]", LSE),
    WrongCall("lse_dtype", cast(torch.float16, "softmax_lse"), T, "softmax_lse.*dtype", "(?i)half", "(?i)float"),
    WrongCall("lse_dtype_64", cast(torch.float64, "softmax_lse"), T, "softmax_lse.*dtype", "(?i)double", "(?i)float"),
    WrongCall("lse_elsewhere", meta("softmax_lse"), V, "softmax_lse", "meta", "device of q"),
    WrongCall("lse_none", given(softmax_lse=None), T, "softmax_lse", "None", "torch.Tensor"),
    # dq, dk, dv
    WrongCall("dq_shape", shape("dq", 2, 5, 3, 16), V, r"\bdq\b", r"\[2, 5, 3, 16\]", OF_Q),
    WrongCall("dk_shape", shape("dk", 2, 7, 6, 16), V, r"\bdk\b", r"\[2, 7, 6, 16\]", OF_K),
    WrongCall("dv_rank", shape("dv", 7, 3, 16), V, r"\bdv\b", r"\[7, 3, 16\]", r"shape of v, \[2, 7, 3, 16\]"),
    WrongCall("dq_dtype", cast(torch.float32, "dq"), T, r"\bdq\b.*dtype", "(?i)float", "that of q"),
    WrongCall("dk_elsewhere", meta("dk"), V, r"\bdk\b", "meta", "device of q"),
    WrongCall("dq_strided", strided("dq"), V, r"\bdq\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("dv_strided", strided("dv"), V, r"\bdv\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("dk_expanded", overlapping("dk"), V, r"\bdk\b.*strides", r", 0, ", "memory of its own"),
    WrongCall("dq_is_q", same_memory("dq", "q"), V, r"\bdq\b", r"memory with q", "memory of its own"),
    WrongCall("dq_is_dout", same_memory("dq", "dout"), V, r"\bdq\b", r"memory with dout", "memory of its own"),
    WrongCall("dv_is_dk", same_memory("dv", "dk"), V, r"\bdv\b", r"memory with dk", "memory of its own"),
    WrongCall("dk_number", given(dk=0.0), T, r"\bdk\b", "0.0.*float", "torch.Tensor, or None"),
    WrongCall("dv_sparse", sparse("dv"), T, r"\bdv\b.*layout", "(?i)sparse", "strided"),
    # checks that the forward shares
    WrongCall("q_rank", shape("q", 5, 6, 16), V, r"\bq\b", r"\[5, 6, 16\]", "4 dimensions"),
    WrongCall("k_dtype", cast(torch.bfloat16, "k"), T, r"\bk\b.*dtype", "(?i)bfloat16", "(?i)that of q"),
    WrongCall("v_heads", shape("v", 2, 7, 6, 16), V, r"\bv\b.*heads", "6", "heads of k, 3"),
    WrongCall("k_strided", strided("k"), V, r"\bk\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("scale_nan", given(softmax_scale=math.nan), V, "softmax_scale", "nan", "finite"),
    WrongCall("scale_none", given(softmax_scale=None), T, "softmax_scale", "None", "finite"),
    WrongCall("dropout_1", given(dropout_p=1.0), V, "dropout_p", "1", "at least 0 and below 1"),
    WrongCall("causal_text", given(causal="yes"), T, "causal", "'yes'", "True or False"),
    WrongCall("window_left", given(window_size_left=-2), V, "window_size", "-2", "-1.*unbounded"),
    WrongCall("softcap_nan", given(softcap=math.nan), V, "softcap", "nan", "0.*positive"),
    WrongCall("deterministic_text", given(deterministic="no"), T, "deterministic", "'no'", "True or False"),
    WrongCall("rng_state_text", given(rng_state="seed"), T, "rng_state", "'seed'.*str", "torch.Tensor, or None"),
    WrongCall("alibi_shape", slopes(torch.float32, 5), V, "alibi_slopes", r"\[5\]", r"nheads.*6.*batch, nheads.*2, 6"),
]  # fmt: skip


def test_the_valid_backward_call_is_valid(backend: str, device: str) -> None:
    with flash_attn_mini.use_backend(backend):
        softmax_d = _flash_attn_backward(**valid_backward_call(device))
    assert softmax_d.shape == (BATCH, NHEADS, 128)


@pytest.mark.parametrize("wrong", WRONG_BACKWARD_CALLS, ids=str)
def test_wrong_backward_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_backward_call(device)
    wrong.change(call)
    with flash_attn_mini.use_backend(backend), pytest.raises(wrong.error) as raised:
        _flash_attn_backward(**call)
    assert_says(str(raised.value), wrong.argument, wrong.given, wrong.allowed)


@pytest.mark.parametrize("headdim", [16, 20])
def test_wrong_gradients_of_the_lse_are_named(headdim: int, backend: str, device: str) -> None:
    """Only the operator takes dsoftmax_lse."""
    q, k, v = (x.repeat(1, 1, 1, 2)[..., :headdim] for x in valid_call(device).values())
    lse = torch.zeros(BATCH, NHEADS, SEQLEN_Q, device=device)

    def call(dsoftmax_lse: torch.Tensor) -> None:
        BWD(*bwd_arguments(q, q, k, v, q, lse, dsoftmax_lse=dsoftmax_lse, backend=backend))

    call(lse)
    with pytest.raises(ValueError, match=r"dsoftmax_lse has shape \[2, 5, 6\]; allowed: .*\[2, 6, 5\]"):
        call(lse.transpose(1, 2))
    with pytest.raises(TypeError, match=r"dsoftmax_lse has dtype (?i:half); allowed: (?i:float)"):
        call(lse.half())


WRONG_RNG_STATES = {
    "missing": (lambda device: None, ValueError, "None", "rng_state that the forward returned"),
    "empty": (lambda device: torch.zeros(0, dtype=torch.int64, device=device), ValueError, r"\[0\]", r"\[2\]"),
    "shape": (lambda device: torch.zeros(2, 1, dtype=torch.int64, device=device), ValueError, r"\[2, 1\]", r"\[2\]"),
    "dtype": (lambda device: torch.zeros(2, device=device), TypeError, "(?i)float", "int64"),
    "elsewhere": (lambda device: torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "meta", "device of q"),
}


@pytest.mark.parametrize("wrong", WRONG_RNG_STATES)
def test_wrong_rng_state_is_named(wrong: str, backend: str, device: str) -> None:
    make, error, was_given, allowed = WRONG_RNG_STATES[wrong]
    call = {**valid_backward_call(device), "dropout_p": 0.1, "rng_state": make(device)}
    with flash_attn_mini.use_backend(backend), pytest.raises(error) as raised:
        _flash_attn_backward(**call)
    assert_says(str(raised.value), "rng_state", was_given, allowed)
    with flash_attn_mini.use_backend(backend):  # not read without dropout
        _flash_attn_backward(**{**call, "dropout_p": 0.0})


@pytest.mark.parametrize(
    ("change", "argument", "was_given", "allowed"),
    [
        (given(q=None), r"\bq\b", "None", "torch.Tensor"),
        (given(return_softmax="no"), "return_softmax", "'no'", "True or False"),
        (given(softmax_scale=None), "softmax_scale", "None", "finite"),
        (given(window_size_left=1.5), "window_size", "1.5", "integers"),
    ],
    ids=["q", "return_softmax", "softmax_scale", "window_size_left"],
)
def test_wrong_types_in_the_official_forward_are_named(
    change: Callable[[Call], object], argument: str, was_given: str, allowed: str
) -> None:
    call = valid_call("cpu")
    call.update(dropout_p=0.0, softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1)
    call.update(softcap=0.0, alibi_slopes=None, return_softmax=False)
    assert len(_flash_attn_forward(**call)) == 4
    change(call)
    with pytest.raises(TypeError) as raised:
        _flash_attn_forward(**call)
    assert_says(str(raised.value), argument, was_given, allowed)


@pytest.mark.backends("cpu", "cuda")
def test_extension_checks_the_backward_without_python(backend: str, device: str) -> None:
    """_C.bwd with the arguments of the official extension: C++ checks values, pybind11 checks types."""
    call = valid_backward_call(device)
    tensors = [call[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")]
    scalars = (None, 0.0, 0.25, False, -1, -1, 0.0, False, None, None)
    assert len(_C.bwd(*tensors, *scalars)) == 4
    with pytest.raises(
        ValueError,
        match=r"dout has shape \[1, 5, 6, 16\]; allowed: the shape of q with the headdim of v, \[2, 5, 6, 16\]",
    ):
        _C.bwd(tensors[0][:1], *tensors[1:], *scalars)
    with pytest.raises(TypeError, match="incompatible"):
        _C.bwd(*tensors, *scalars, None, [True, False])  # output_mask of two
    with pytest.raises(TypeError, match="incompatible"):
        _C.bwd(*tensors, *scalars, None, ["dq", "dk", "dv"])
    with pytest.raises(TypeError, match="incompatible"):
        _C.bwd(*tensors, *scalars[:-1], "rng_state")
    with pytest.raises(TypeError, match="incompatible"):
        _C.bwd(*tensors)
