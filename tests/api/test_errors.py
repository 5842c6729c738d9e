"""Wrong calls: each raises a named exception that says the argument, what was given and what is allowed.

Never a crash, never a wrong answer. All backends raise the same errors, since all checks are in csrc/api/checks.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import flash_attn_mini
from flash_attn_mini import _C, flash_attn_func

from ..support.wrong_calls import (
    ALL,
    BATCH,
    HEADDIM,
    NHEADS,
    SEQLEN_Q,
    Call,
    T,
    V,
    WrongCall,
    assert_says,
    bias,
    cast,
    given,
    meta,
    ranges,
    shape,
    shapes,
    slopes,
    strided,
    valid_call,
)

RANGES, BIAS = "key_ranges", "attn_bias"


def elsewhere(make: Callable[[Call], object], argument: str) -> Callable[[Call], object]:
    """The argument that `make` adds, on another device."""

    def change(call: Call) -> None:
        make(call)
        meta(argument)(call)

    return change


WRONG_CALLS = [
    # rank and shape
    WrongCall("q_rank_3", shape("q", 5, 6, 16), V, r"\bq\b", r"\[5, 6, 16\]", r"4 dim.*seqlen_q, nheads, headdim"),
    WrongCall("k_rank_5", shape("k", 1, 2, 7, 3, 16), V, r"\bk\b", r"\[1, 2, 7, 3, 16\]", r"4 dimensions"),
    WrongCall("v_rank_0", shape("v"), V, r"\bv\b", r"\[\]", r"4 dimensions"),
    WrongCall("q_rank_0", shape("q"), V, r"\bq\b", r"\[\]", r"4 dimensions"),
    WrongCall("k_batch", shape("k", 3, 7, 3, 16), V, r"\bk\b.*batch", "3", "batch of q, 2"),
    WrongCall("v_batch", shape("v", 3, 7, 3, 16), V, r"\bv\b.*batch", "3", "batch of q, 2"),
    WrongCall("v_seqlen", shape("v", 2, 8, 3, 16), V, r"\bv\b.*seqlen", "8", "seqlen of k, 7"),
    WrongCall("k_headdim", shape("k", 2, 7, 3, 8), V, r"\bk\b.*headdim", "8", "headdim of q, 16"),
    WrongCall("v_headdim", shape("v", 2, 7, 3, 513), V, r"\bv\b.*headdim", "513", "1 to 512"),
    WrongCall("v_heads", shape("v", 2, 7, 6, 16), V, r"\bv\b.*heads", "6", "heads of k, 3"),
    WrongCall("heads_no_multiple", shape("q", 2, 5, 7, 16), V, r"\bq\b.*7 heads", r"\bk\b.*\b3\b", "multiple"),
    WrongCall("more_key_heads", shape("q", 2, 5, 1, 16), V, r"\bq\b.*1 heads", r"\bk\b.*\b3\b", "multiple"),
    WrongCall("q_no_heads", shape("q", 2, 5, 0, 16), V, r"\bq\b", "0 heads", "at least 1"),
    WrongCall("k_no_heads", shapes((2, 5, 6, 16), (2, 7, 0, 16)), V, r"\bk\b", "0 heads", "at least 1"),
    WrongCall("headdim_0", shapes((2, 5, 6, 0), (2, 7, 3, 0)), V, r"\bq\b.*headdim", "0", "1 to 512"),
    WrongCall("headdim_513", shapes((2, 5, 6, 513), (2, 7, 3, 513)), V, r"\bq\b.*headdim", "513", "1 to 512"),
    WrongCall("headdim_520", shapes((2, 5, 6, 520), (2, 7, 3, 520)), V, r"\bq\b.*headdim", "520", "1 to 512"),
    WrongCall("headdim_576_empty", shapes((0, 5, 6, 576), (0, 7, 3, 576)), V, r"\bq\b.*headdim", "576", "1 to 512"),
    # layout
    WrongCall("q_strided", strided("q"), V, r"\bq\b.*strides", r"\[960, 192, 32, 2\]", "contiguous last dimension"),
    WrongCall("k_strided", strided("k"), V, r"\bk\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("v_strided", strided("v"), V, r"\bv\b.*strides", r", 2\]", "contiguous last dimension"),
    # dtypes, devices, types
    WrongCall("int32", cast(torch.int32, *ALL), T, r"\bq\b.*dtype", "(?i)int", "float16, bfloat16"),
    WrongCall("bool", cast(torch.bool, *ALL), T, r"\bq\b.*dtype", "(?i)bool", "float16, bfloat16"),
    WrongCall("complex64", cast(torch.complex64, *ALL), T, r"\bq\b.*dtype", "(?i)complex", "float16, bfloat16"),
    WrongCall("float8", cast(torch.float8_e4m3fn, *ALL), T, r"\bq\b.*dtype", "(?i)float8", "float16, bfloat16"),
    WrongCall("k_dtype", cast(torch.bfloat16, "k"), T, r"\bk\b.*dtype", "(?i)bfloat16", "(?i)that of q.*half|float16"),
    WrongCall("v_dtype", cast(torch.float32, "v"), T, r"\bv\b.*dtype", "(?i)float", "(?i)that of q.*half|float16"),
    WrongCall("k_elsewhere", meta("k"), V, r"\bk\b", "meta", "device of q"),
    WrongCall("v_elsewhere", meta("v"), V, r"\bv\b", "meta", "device of q"),
    WrongCall("q_no_tensor", given(q=[[1.0]]), T, r"\bq\b", r"\[\[1.0\]\].*list", "torch.Tensor"),
    WrongCall("k_none", given(k=None), T, r"\bk\b", "None", "torch.Tensor"),
    WrongCall("v_number", given(v=1.0), T, r"\bv\b", "1.0.*float", "torch.Tensor"),
    WrongCall("q_sparse", lambda c: c.update(q=c["q"].to_sparse()), (T, V), r"\bq\b", "(?i)sparse", "(?i)strided"),
    # numbers
    WrongCall("dropout_1", given(dropout_p=1.0), V, "dropout_p", "1", "at least 0 and below 1"),
    WrongCall("dropout_1_5", given(dropout_p=1.5), V, "dropout_p", "1.5", "at least 0 and below 1"),
    WrongCall("dropout_nearly_1", given(dropout_p=1 - 2.0**-17), V, "dropout_p", "0.99999", r"below 1 - 2\^-17"),
    WrongCall("dropout_negative", given(dropout_p=-0.1), V, "dropout_p", "-0.1", "at least 0 and below 1"),
    WrongCall("dropout_nan", given(dropout_p=math.nan), V, "dropout_p", "nan", "at least 0 and below 1"),
    WrongCall("dropout_text", given(dropout_p="0.1"), T, "dropout_p", "'0.1'.*str", "number"),
    WrongCall("scale_nan", given(softmax_scale=math.nan), V, "softmax_scale", "nan", "finite"),
    WrongCall("scale_inf", given(softmax_scale=-math.inf), V, "softmax_scale", "-inf", "finite"),
    WrongCall("scale_text", given(softmax_scale="auto"), T, "softmax_scale", "'auto'.*str", "number"),
    WrongCall("softcap_negative", given(softcap=-1.0), V, "softcap", "-1", "0.*positive"),
    WrongCall("softcap_nan", given(softcap=math.nan), V, "softcap", "nan", "0.*positive"),
    WrongCall("softcap_inf", given(softcap=math.inf), V, "softcap", "inf", "0.*positive"),
    WrongCall("softcap_none", given(softcap=None), T, "softcap", "None", "number"),
    WrongCall("softcap_and_dropout", given(softcap=30.0, dropout_p=0.1), V, "softcap", "30.*dropout_p", "not both"),
    WrongCall("causal_text", given(causal="yes"), T, "causal", "'yes'", "True or False"),
    # windows
    WrongCall("window_left", given(window_size=(-2, 0)), V, "window_size", "-2", "-1.*unbounded"),
    WrongCall("window_right", given(window_size=(0, -5)), V, "window_size", "-5", "-1.*unbounded"),
    WrongCall("window_right_causal", given(window_size=(-1, -5), causal=True), V, "window_size", "-5", "-1.*unbounded"),
    WrongCall("window_one", given(window_size=(1,)), T, "window_size", r"\(1,\)", r"\(left, right\)"),
    WrongCall("window_three", given(window_size=(1, 2, 3)), T, "window_size", r"\(1, 2, 3\)", r"\(left, right\)"),
    WrongCall("window_number", given(window_size=5), T, "window_size", "5", r"\(left, right\)"),
    WrongCall("window_float", given(window_size=(1.5, 2)), T, "window_size", "1.5", "integers"),
    # ALiBi
    WrongCall("alibi_shape", slopes(torch.float32, 5), V, "alibi_slopes", r"\[5\]", r"nheads.*6.*batch, nheads.*2, 6"),
    WrongCall("alibi_batch", slopes(torch.float32, 3, 6), V, "alibi_slopes", r"\[3, 6\]", r"batch, nheads.*2, 6"),
    WrongCall("alibi_rank", slopes(torch.float32, 1, 2, 6), V, "alibi_slopes", r"\[1, 2, 6\]", r"nheads.*6"),
    WrongCall("alibi_dtype", slopes(torch.float16, 6), T, "alibi_slopes", "(?i)half|float16", "float32"),
    WrongCall("alibi_list", given(alibi_slopes=[0.5]), T, "alibi_slopes", r"\[0.5\].*list", "float32"),
    # the rest of the signature
    WrongCall("backend_number", given(backend=3), T, "backend", "3.*int", "name"),
    WrongCall("return_attn_probs_text", given(return_attn_probs="no"), T, "return_attn_probs", "'no'", "True or False"),
    WrongCall("deterministic_text", given(deterministic="no"), T, "deterministic", "'no'", "True or False"),
]  # fmt: skip


WRONG_KEY_RANGES = [
    WrongCall("ranges_rank", ranges(5, 2), V, RANGES, r"\[5, 2\]", r"1 or batch, 1 or nheads, seqlen_q, 2\]"),
    WrongCall("ranges_rank_6", ranges(1, 1, 1, 5, 2, 2), V, RANGES, r"\[1, 1, 1, 5, 2, 2\]", "seqlen_q, 2, 2"),
    WrongCall("ranges_batch", ranges(3, 1, 5, 2), V, RANGES, r"\[3, 1, 5, 2\]", r"1 or batch.*batch 2"),
    WrongCall("ranges_heads", ranges(1, 3, 5, 2), V, RANGES, r"\[1, 3, 5, 2\]", r"1 or nheads.*nheads 6"),
    WrongCall("ranges_queries", ranges(1, 1, 7, 2), V, RANGES, r"\[1, 1, 7, 2\]", "seqlen_q 5"),
    WrongCall("ranges_of_three", ranges(1, 1, 5, 3), V, RANGES, r"\[1, 1, 5, 3\]", "seqlen_q, 2"),
    WrongCall("ranges_three", ranges(1, 1, 5, 3, 2), V, RANGES, r"\[1, 1, 5, 3, 2\]", "seqlen_q, 2, 2"),
    WrongCall("ranges_dtype", ranges(1, 1, 5, 2, dtype=torch.int64), T, f"{RANGES}.*dtype", "(?i)long", "int32"),
    WrongCall("ranges_float", ranges(1, 1, 5, 2, dtype=torch.float32), T, f"{RANGES}.*dtype", "(?i)float", "int32"),
    WrongCall("ranges_elsewhere", elsewhere(ranges(1, 1, 5, 2), RANGES), V, RANGES, "meta", "device of q"),
    WrongCall("ranges_list", given(key_ranges=[[0, 1]]), T, RANGES, r"\[\[0, 1\]\].*list", "int32"),
]  # fmt: skip


WRONG_BIASES = [
    WrongCall("bias_rank", bias(5, 7), V, BIAS, r"\[5, 7\]", r"1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k\]"),
    WrongCall("bias_rank_5", bias(1, 1, 1, 5, 7), V, BIAS, r"\[1, 1, 1, 5, 7\]", "seqlen_q, seqlen_k"),
    WrongCall("bias_batch", bias(3, 1, 5, 7), V, BIAS, r"\[3, 1, 5, 7\]", r"1 or batch.*batch 2"),
    WrongCall("bias_heads", bias(1, 3, 5, 7), V, BIAS, r"\[1, 3, 5, 7\]", r"1 or nheads.*nheads 6"),
    WrongCall("bias_queries", bias(1, 1, 7, 7), V, BIAS, r"\[1, 1, 7, 7\]", "seqlen_q 5"),
    WrongCall("bias_keys", bias(2, 6, 5, 5), V, BIAS, r"\[2, 6, 5, 5\]", "seqlen_k 7"),
    WrongCall("bias_one_key", bias(2, 6, 5, 1), V, BIAS, r"\[2, 6, 5, 1\]", "seqlen_k 7"),
    WrongCall("bias_int", bias(1, 1, 5, 7, dtype=torch.int32), T, f"{BIAS}.*dtype", "(?i)int", "bool.*float32"),
    WrongCall("bias_double", bias(1, 1, 5, 7, dtype=torch.float64), T, f"{BIAS}.*dtype", "(?i)double", "(?i)half"),
    WrongCall("bias_bfloat16", bias(1, 1, 5, 7, dtype=torch.bfloat16), T, f"{BIAS}.*dtype", "(?i)bfloat16", "(?i)half"),
    WrongCall("bias_elsewhere", elsewhere(bias(1, 1, 5, 7), BIAS), V, BIAS, "meta", "device of q"),
    WrongCall("bias_list", given(attn_bias=[[0.5]]), T, BIAS, r"\[\[0.5\]\].*list", "bool, float32"),
]  # fmt: skip


def test_the_valid_call_is_valid(backend: str, device: str) -> None:
    assert flash_attn_func(**valid_call(device), backend=backend).shape == (BATCH, SEQLEN_Q, NHEADS, HEADDIM)


@pytest.mark.parametrize("wrong", WRONG_CALLS + WRONG_KEY_RANGES + WRONG_BIASES, ids=str)
def test_wrong_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_call(device)
    wrong.change(call)
    call.setdefault("backend", backend)
    with pytest.raises(wrong.error) as raised:
        flash_attn_func(**call)
    assert_says(str(raised.value), wrong.argument, wrong.given, wrong.allowed)


WRONG_RANGES = [
    WrongCall("negative", ranges(2, 1, 5, 2, values=(-3, 7)), V, RANGES, "has -3", "0 to the number of keys, 7"),
    WrongCall("past", ranges(2, 1, 5, 2, values=(0, 8)), V, RANGES, "has 8", "0 to the number of keys, 7"),
    WrongCall("second", ranges(1, 6, 5, 2, 2, values=(0, 3, 4, 2**31 - 1)), V, RANGES, str(2**31 - 1), "keys, 7"),
    WrongCall("least", ranges(1, 6, 5, 2, 2, values=(-(2**31), 3, 4, 9)), V, RANGES, str(-(2**31)), "keys, 7"),
]


@pytest.mark.parametrize("wrong", WRONG_RANGES, ids=str)
def test_ranges_past_the_keys_are_named_if_asked(
    wrong: WrongCall, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = valid_call(device)
    wrong.change(call)
    flash_attn_func(**call, backend=backend)
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    with pytest.raises(wrong.error) as raised:
        flash_attn_func(**call, backend=backend)
    assert_says(str(raised.value), wrong.argument, wrong.given, wrong.allowed)
    ranges(2, 6, 5, 2, 2, values=(0, 7, 7, 0))(call)
    flash_attn_func(**call, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gpu_backend", "refused"),
    [("cuda", torch.float32), ("cuda", torch.float64), ("triton", torch.float64)],
    ids=["cuda-float32", "cuda-float64", "triton-float64"],
)
def test_gpu_backends_name_the_dtypes_they_take(gpu_backend: str, refused: torch.dtype) -> None:
    call = valid_call("cuda")
    cast(refused, *ALL)(call)
    with pytest.raises(TypeError) as raised:
        flash_attn_func(**call, backend=gpu_backend)
    assert_says(str(raised.value), r"\bq\b.*dtype", "(?i)float|double", f"{gpu_backend}.*float16, bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["k", "v"])
def test_tensors_on_cpu_and_gpu_together_are_refused(argument: str, backend: str, device: str) -> None:
    call = valid_call(device)
    call[argument] = call[argument].to("cuda" if device == "cpu" else "cpu")
    with pytest.raises(ValueError, match="device") as raised:
        flash_attn_func(**call, backend=backend)
    assert_says(str(raised.value), rf"\b{argument}\b", "cpu|cuda", "device of q")


# ---- the extension's own entry ------------------------------------------------------------------------------------

WRONG_OUTS = {
    "shape": (
        lambda q: q.new_zeros(2, 5, 6, 8),
        ValueError,
        r"\[2, 5, 6, 8\]",
        r"shape of q with the headdim of v, \[2, 5, 6, 16\]",
    ),
    "rank": (
        lambda q: q.new_zeros(5, 6, 16),
        ValueError,
        r"\[5, 6, 16\]",
        r"shape of q with the headdim of v, \[2, 5, 6, 16\]",
    ),
    "dtype": (lambda q: q.float(), TypeError, "(?i)float", "that of q"),
    "strided": (lambda q: q.repeat_interleave(2, -1)[..., ::2], ValueError, r", 2\]", "contiguous last dimension"),
    "elsewhere": (lambda q: q.to("meta"), ValueError, "meta", "device of q"),
    "q_itself": (lambda q: q, ValueError, r"\bq\b", "of its own"),
    "expanded": (lambda q: q[:1].expand_as(q), ValueError, r"\[0, ", "of its own"),
}


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("wrong", WRONG_OUTS)
def test_wrong_out_is_named(wrong: str, backend: str, device: str) -> None:
    make, error, was_given, allowed = WRONG_OUTS[wrong]
    q, k, v = valid_call(device).values()
    with pytest.raises(error) as raised:
        _C.fwd(q, k, v, make(q), None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    assert_says(str(raised.value), r"\bout\b", was_given, allowed)


@pytest.mark.backends("cpu", "cuda")
def test_extension_checks_without_python(backend: str, device: str) -> None:
    """_C.fwd with the arguments of the official extension makes the same checks."""
    q, k, v = valid_call(device).values()
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        _C.fwd(q, k, v, None, None, 0.0, math.nan, False, -1, -1, 0.0, False, None)
    with pytest.raises(ValueError, match="k has batch 1"):
        _C.fwd(q, k[:1], v, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    with pytest.raises(TypeError):
        _C.fwd(q, k, v)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"softmax_scale": 10**400}, ValueError, "softmax_scale is too large"),
        ({"softmax_scale": 1e39}, ValueError, r"softmax_scale is 1e\+39; allowed: 0, a finite number of magnitude"),
        ({"softmax_scale": True}, TypeError, "softmax_scale is True"),
        ({"dropout_p": True}, TypeError, "dropout_p is True"),
        ({"window_size": (10**30, -1)}, ValueError, r"window_size\[0\] is 10{30}; allowed"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_named(keywords: dict[str, object], error: type[Exception], message: str) -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(error, match=message):
        flash_attn_func(q, q, q, **keywords)


def test_available_backends_of_a_missing_device() -> None:
    assert isinstance(flash_attn_mini.available_backends("cuda"), list)
