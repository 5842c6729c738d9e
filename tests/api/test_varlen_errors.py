"""Wrong calls of the varlen functions: each raises a named exception that says what was given and what is allowed.

They call what leads to the checks of values in C++: the extension's varlen_fwd and varlen_bwd, the ops for each
backend, and the functions with the official signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_mini import _C, flash_attn_varlen_func, use_backend
from flash_attn_mini.flash_attn_interface import _flash_attn_varlen_backward
from flash_attn_mini.options import Sequences

from ..support.op_calls import BWD, FWD, bwd_arguments, check_call, fwd_arguments
from ..support.wrong_calls import (
    ALL,
    NHEADS,
    TOTAL_Q,
    Call,
    T,
    V,
    WrongCall,
    assert_says,
    bias,
    cast,
    given,
    meta,
    numbers,
    ranges,
    shape,
    slopes,
    strided,
    valid_paged_call,
    valid_varlen_call,
)

DEFAULTS: Call = {
    "out": None,
    "block_table": None,
    "alibi_slopes": None,
    "p_dropout": 0.0,
    "softmax_scale": 0.25,
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
}
RANGES = "key_ranges"


def forward(call: Call) -> Any:
    return _C.varlen_fwd(
        **{**DEFAULTS, "seqused_k": None, "leftpad_k": None, "zero_tensors": False, "generator": None, **call}
    )


def op_options(call: Call, backend: str) -> Call:
    """Sequences and options of a call of the extension, as tests/support/op_calls.py takes them."""
    call = {**DEFAULTS, **call}
    renamed = {"dropout_p": "p_dropout", "causal": "is_causal"}
    same = ("softmax_scale", "softcap", "alibi_slopes")
    return {
        "sequences": Sequences(*(call[name] for name in Sequences._fields)),
        "window_size": (call["window_size_left"], call["window_size_right"]),
        **{name: call[renamed.get(name, name)] for name in (*renamed, *same)},
        "key_ranges": call.get(RANGES),
        "attn_bias": call.get("attn_bias"),
        "backend": backend,
    }


def check_forward(call: Call, backend: str) -> None:
    """The checks of the op."""
    check_call(FWD, fwd_arguments(call["q"], call["k"], call["v"], **op_options(call, backend)))


def valid_backward_call(device: str) -> Call:
    call = valid_varlen_call(device)
    tensors = {
        "dout": torch.ones_like(call["q"]),
        "out": torch.zeros_like(call["q"]),
        "softmax_lse": torch.zeros(NHEADS, TOTAL_Q, device=device),
        "dsoftmax_lse": None,
        **{f"d{name}": torch.zeros_like(call[name]) for name in ALL},
    }
    options = {key: value for key, value in DEFAULTS.items() if key not in ("out", "block_table", "return_softmax")}
    return {**options, **call, **tensors}


def backward(call: Call) -> Any:
    return _C.varlen_bwd(
        **{"zero_tensors": False, "deterministic": False, "generator": None, "rng_state": None, **call},
    )


TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse")


def check_backward(call: Call, backend: str) -> None:
    """The checks of the op, which makes dq, dk and dv."""
    tensors = (call[name] for name in TENSORS)
    options = {**op_options(call, backend), "dsoftmax_lse": call["dsoftmax_lse"]}
    check_call(BWD, bwd_arguments(*tensors, **options))


def official_backward(call: Call, backend: str) -> None:
    """The function with the official signature, which has no dsoftmax_lse."""
    renamed = {"p_dropout": "dropout_p", "is_causal": "causal"}
    given = {renamed.get(name, name): value for name, value in call.items() if name != "dsoftmax_lse"}
    with use_backend(backend):
        _flash_attn_varlen_backward(**given, deterministic=False)


def index_dtype(argument: str) -> Callable[[Call], object]:
    return cast(torch.int64, argument)


def spread(argument: str) -> Callable[[Call], object]:
    """The same values, not contiguous."""
    return lambda call: call.update({argument: call[argument].repeat_interleave(2, -1)[..., ::2]})


# Shapes, dtypes and options: checked without reading any values.
WRONG_SHAPES = [
    WrongCall("q_rank_4", shape("q", 1, 9, 6, 16), V, r"\bq\b", r"\[1, 9, 6, 16\]", r"3 dim.*total_q, nheads, headdim"),
    WrongCall("k_rank_2", shape("k", 14, 48), V, r"\bk\b", r"\[14, 48\]", r"3 dimensions.*total_k"),
    WrongCall("v_rank_4", shape("v", 1, 14, 3, 16), V, r"\bv\b", r"\[1, 14, 3, 16\]", r"3 dimensions"),
    WrongCall("v_total", shape("v", 15, 3, 16), V, r"\bv\b.*total_k 15", r"\[15, 3, 16\]", "total_k of k, 14"),
    WrongCall("k_headdim", shape("k", 14, 3, 8), V, r"\bk\b.*headdim 8", r"\[14, 3, 8\]", "headdim of q, 16"),
    WrongCall("v_heads", shape("v", 14, 6, 16), V, r"\bv\b.*6 heads", r"\[14, 6, 16\]", "heads of k, 3"),
    WrongCall("heads_no_multiple", shape("q", 9, 7, 16), V, r"\bq\b.*7 heads", r"\bk\b.*\b3\b", "multiple"),
    WrongCall("k_dtype", cast(torch.bfloat16, "k"), T, r"\bk\b.*dtype", "(?i)bfloat16", "(?i)that of q"),
    WrongCall("int32", cast(torch.int32, *ALL), T, r"\bq\b.*dtype", "(?i)int", "float16, bfloat16"),
    WrongCall("v_elsewhere", meta("v"), V, r"\bv\b", "meta", "device of q"),
    WrongCall("q_strided", strided("q"), V, r"\bq\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("cu_q_dtype", index_dtype("cu_seqlens_q"), T, "cu_seqlens_q.*dtype", "(?i)long", "int32"),
    WrongCall("cu_k_dtype", cast(torch.float32, "cu_seqlens_k"), T, "cu_seqlens_k.*dtype", "(?i)float", "int32"),
    WrongCall("cu_q_elsewhere", meta("cu_seqlens_q"), V, "cu_seqlens_q", "meta", "device of q"),
    WrongCall("cu_q_rank", numbers("cu_seqlens_q", [[0, 4, 4, 9]]), V, "cu_seqlens_q", r"\[1, 4\]", r"\[batch \+ 1\]"),
    WrongCall("cu_k_empty", numbers("cu_seqlens_k", []), V, "cu_seqlens_k", r"\[0\]", r"\[batch \+ 1\]"),
    WrongCall("cu_strided", spread("cu_seqlens_q"), V, "cu_seqlens_q", r"strides \[2\]", "contiguous"),
    WrongCall(
        "cu_k_of_another_batch", numbers("cu_seqlens_k", [0, 14]), V, "cu_seqlens_k", r"\[2\]", r"cu_seqlens_q, \[4\]"
    ),
    WrongCall("max_q_negative", given(max_seqlen_q=-1), V, "max_seqlen_q", "-1", "0 to"),
    WrongCall("max_k_huge", given(max_seqlen_k=2**40), V, "max_seqlen_k", str(2**40), "0 to"),
    WrongCall("dropout_1", given(p_dropout=1.0), V, "dropout_p", "1", "at least 0 and below 1"),
    WrongCall("scale_nan", given(softmax_scale=math.nan), V, "softmax_scale", "nan", "finite"),
    WrongCall("softcap_and_dropout", given(softcap=9.0, p_dropout=0.1), V, "softcap", "9.*dropout_p", "not both"),
    WrongCall("window_left", given(window_size_left=-2), V, "window_size", "-2", "-1.*unbounded"),
    WrongCall("alibi_batch", slopes(torch.float32, 2, 6), V, "alibi_slopes", r"\[2, 6\]", r"batch, nheads\] = \[3, 6"),
    WrongCall("alibi_dtype", slopes(torch.float16, 6), T, "alibi_slopes", "(?i)half", "float32"),
]  # fmt: skip

# Values of cu_seqlens: read on the CPU, and on a GPU with FLASH_ATTN_MINI_CHECK=1.
WRONG_SEQLENS = [
    WrongCall("q_start", numbers("cu_seqlens_q", [1, 4, 4, 9]), V, "cu_seqlens_q", "starts at 1", "allowed: 0"),
    WrongCall("k_start", numbers("cu_seqlens_k", [-1, 7, 9, 14]), V, "cu_seqlens_k", "starts at -1", "allowed: 0"),
    WrongCall("q_falls", numbers("cu_seqlens_q", [0, 4, 3, 9]), V, "cu_seqlens_q", "4 to 3.*index 2", "never fall"),
    WrongCall("k_falls", numbers("cu_seqlens_k", [0, 7, 14, 9]), V, "cu_seqlens_k", "14 to 9.*index 3", "never fall"),
    WrongCall("q_end", numbers("cu_seqlens_q", [0, 4, 4, 8]), V, "cu_seqlens_q", "ends at 8", "rows of q, 9"),
    WrongCall("k_end", numbers("cu_seqlens_k", [0, 7, 9, 15]), V, "cu_seqlens_k", "ends at 15", "rows of k, 14"),
    WrongCall(
        "no_sequences", lambda c: c.update({n: c[n][:1] for n in ("cu_seqlens_q", "cu_seqlens_k")}), V, "cu_seqlens_q",
        "ends at 0", "rows of q, 9",
    ),
    WrongCall("max_q", given(max_seqlen_q=4), V, "max_seqlen_q", "is 4", "sequence 2 has length 5"),
    WrongCall("max_k", given(max_seqlen_k=6), V, "max_seqlen_k", "is 6", "sequence 0 has length 7"),
]  # fmt: skip

TABLE = "block_table"
WRONG_PAGES = [
    WrongCall("k_rank_3", shape("k", 96, 3, 16), V, r"\bk\b", r"\[96, 3, 16\]", "4 dimensions.*num_pages, page_size"),
    WrongCall("v_pages", shape("v", 5, 16, 3, 16), V, r"\bv\b.*num_pages 5", r"\[5, 16", "num_pages of k, 6"),
    WrongCall("v_page_size", shape("v", 6, 32, 3, 16), V, r"\bv\b.*page_size 32", r"\[6, 32", "page_size of k, 16"),
    WrongCall("dtype", index_dtype(TABLE), T, "block_table.*dtype", "(?i)long", "int32"),
    WrongCall("elsewhere", meta(TABLE), V, TABLE, "meta", "device of q"),
    WrongCall("rank", numbers(TABLE, [3, 0, 5]), V, TABLE, r"\[3\]", r"\[batch, max_blocks\] with batch 3"),
    WrongCall("batch", numbers(TABLE, [[3, 0, 1], [5, 2, 4]]), V, TABLE, r"\[2, 3\]", "batch 3"),
    WrongCall("strided", spread(TABLE), V, TABLE, r"strides \[6, 2\]", "contiguous last dimension"),
]  # fmt: skip
WRONG_PAGE_NUMBERS = [
    WrongCall(
        "past_the_pool", numbers(TABLE, [[3, 6, 0], [5, 0, 0], [1, 2, 4]]), V, TABLE, r"page 6 at \[0, 1\]", "0 to 5"
    ),
    WrongCall(
        "negative", numbers(TABLE, [[3, 0, 0], [-1, 0, 0], [1, 2, 4]]), V, TABLE, r"page -1 at \[1, 0\]", "0 to 5"
    ),
    WrongCall("too_few", numbers(TABLE, [[3, 0], [5, 0], [1, 2]]), V, TABLE, "2 pages of 16", "sequence 2 has 33"),
]  # fmt: skip


def assert_named(wrong: WrongCall, run: Callable[[], object]) -> None:
    with pytest.raises(wrong.error) as raised:
        run()
    assert_says(str(raised.value), wrong.argument, wrong.given, wrong.allowed)


@pytest.mark.backends("cpu", "cuda")
def test_the_valid_calls_are_valid(backend: str, device: str) -> None:
    out, lse, S_dmask, rng_state = forward(valid_varlen_call(device))
    assert (out.shape, lse.shape) == ((TOTAL_Q, NHEADS, 16), (NHEADS, TOTAL_Q))
    assert S_dmask is rng_state is None
    dq, dk, dv, softmax_d = backward(valid_backward_call(device))
    assert (dq.shape[0], dk.shape[0], dv.shape[0]) == (9, 14, 14)
    assert softmax_d.shape == (NHEADS, (9 // 128 + 3) * 128)
    assert forward(valid_paged_call(device))[0].shape == out.shape


@pytest.mark.parametrize("wrong", WRONG_SHAPES + WRONG_SEQLENS, ids=str)
def test_wrong_varlen_call_is_named(
    wrong: WrongCall, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    call = valid_varlen_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: check_forward(call, backend))
    if backend != "triton":
        assert_named(wrong, lambda: forward(call))
    call = valid_backward_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: check_backward(call, backend))
    assert_named(wrong, lambda: official_backward(call, backend))
    if backend != "triton":
        assert_named(wrong, lambda: backward(call))


WRONG_RANGES = [
    WrongCall("rank", ranges(9, 2), V, RANGES, r"\[9, 2\]", r"1 or nheads, total_q, 2\].*nheads 6, total_q 9"),
    WrongCall("of_dense", ranges(1, 1, 9, 2), V, RANGES, r"\[1, 1, 9, 2\]", r"1 or nheads, total_q, 2, 2\]"),
    WrongCall("heads", ranges(3, 9, 2), V, RANGES, r"\[3, 9, 2\]", "nheads 6"),
    WrongCall("total", ranges(1, 14, 2), V, RANGES, r"\[1, 14, 2\]", "total_q 9"),
    WrongCall("dtype", ranges(1, 9, 2, dtype=torch.int64), T, f"{RANGES}.*dtype", "(?i)long", "int32"),
]
# The sequences have (4, 0, 5) queries and (7, 2, 5) keys.
WRONG_RANGE_VALUES = [
    WrongCall("past_the_sequence", ranges(1, 9, 2, values=(0, 7)), V, RANGES, "has 7 in sequence 2", "keys, 5"),
    WrongCall(
        "negative", ranges(6, 9, 2, 2, values=(0, 5, -1, 2)), V, RANGES, "has -1 in sequence 0", "0 to .*keys, 7"
    ),
]


@pytest.mark.parametrize("wrong", WRONG_RANGES + WRONG_RANGE_VALUES, ids=str)
def test_wrong_ranges_are_named(wrong: WrongCall, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    call = valid_varlen_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: check_forward(call, backend))
    call = valid_backward_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: check_backward(call, backend))


def test_ranges_within_the_sequences_pass(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = valid_varlen_call(device)
    for wrong in WRONG_RANGE_VALUES:
        wrong.change(call)
        check_forward(call, backend)
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    ranges(1, 9, 2, 2, values=(0, 5, 5, 0))(call)
    check_forward(call, backend)


def test_ranges_with_pages_are_not_implemented(backend: str, device: str) -> None:
    call = valid_paged_call(device)
    ranges(1, 9, 2)(call)
    with pytest.raises(NotImplementedError, match="key_ranges is given together with block_table; allowed: one"):
        check_forward(call, backend)


def test_attn_bias_with_sequences_is_not_implemented(backend: str, device: str) -> None:
    call = valid_varlen_call(device)
    bias(1, 6, 9, 14)(call)
    with pytest.raises(NotImplementedError, match=r"attn_bias is not supported with sequences.*available.*key_ranges"):
        check_forward(call, backend)


@pytest.mark.parametrize("wrong", WRONG_PAGES + WRONG_PAGE_NUMBERS, ids=str)
def test_wrong_paged_call_is_named(
    wrong: WrongCall, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    call = valid_paged_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: check_forward(call, backend))


LSE, OF_Q, OF_K = r"nheads, total_q\] = \[6, 9\]", r"shape of q.*, \[9, 6, 16\]", r"shape of k, \[14, 3, 16\]"
WRONG_BACKWARD_CALLS = [
    WrongCall("dout_shape", shape("dout", 9, 3, 16), V, r"\bdout\b", r"\[9, 3, 16\]", OF_Q),
    WrongCall("out_rank", shape("out", 1, 9, 6, 16), V, r"\bout\b", r"\[1, 9, 6, 16\]", OF_Q),
    WrongCall("lse_of_dense", shape("softmax_lse", 3, 6, 5), V, "softmax_lse", r"\[3, 6, 5\]", LSE),
    WrongCall("lse_transposed", shape("softmax_lse", 9, 6), V, "softmax_lse", r"\[9, 6\]", LSE),
    WrongCall("lse_dtype", cast(torch.float16, "softmax_lse"), T, "softmax_lse.*dtype", "(?i)half", "(?i)float"),
    WrongCall("dlse", given(dsoftmax_lse=torch.zeros(6, 8)), V, "dsoftmax_lse", r"\[6, 8\]|cpu", f"{LSE}|device of q"),
    WrongCall("dq_shape", shape("dq", 10, 6, 16), V, r"\bdq\b", r"\[10, 6, 16\]", OF_Q),
    WrongCall("dk_shape", shape("dk", 14, 6, 16), V, r"\bdk\b", r"\[14, 6, 16\]", OF_K),
    WrongCall("dv_is_dk", lambda c: c.update(dv=c["dk"]), V, r"\bdv\b", "memory with dk", "memory of its own"),
    WrongCall("dq_strided", strided("dq"), V, r"\bdq\b.*strides", r", 2\]", "contiguous last dimension"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_BACKWARD_CALLS, ids=str)
def test_wrong_varlen_backward_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_backward_call(device)
    wrong.change(call)
    if not wrong.name.startswith(("dq", "dk", "dv")):
        assert_named(wrong, lambda: check_backward(call, backend))
    if call["dsoftmax_lse"] is None:
        assert_named(wrong, lambda: official_backward(call, backend))
    if backend != "triton":
        assert_named(wrong, lambda: backward(call))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", WRONG_SEQLENS + WRONG_PAGE_NUMBERS, ids=str)
def test_numbers_on_a_gpu_are_not_read_unless_asked(wrong: WrongCall) -> None:
    call = valid_paged_call("cuda") if wrong in WRONG_PAGE_NUMBERS else valid_varlen_call("cuda")
    wrong.change(call)
    check_forward(call, "cuda")


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("argument", ["seqused_k", "leftpad_k"])
def test_arguments_that_are_not_implemented_are_named(argument: str, backend: str, device: str) -> None:
    call = {**valid_varlen_call(device), argument: torch.zeros(3, dtype=torch.int32, device=device)}
    with pytest.raises(NotImplementedError, match=f"{argument} is not implemented.*None"):
        forward(call)


each_checked = pytest.mark.parametrize(
    ("checked", "device"), [("cpu", "cpu"), ("triton", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]
)


@each_checked
def test_a_page_holds_any_number_of_keys(checked: str, device: str) -> None:
    call = valid_paged_call(device)
    call.update({name: call[name].new_zeros(20, 5, 3, 16) for name in ("k", "v")})
    call["block_table"] = torch.arange(21, dtype=torch.int32, device=device).reshape(3, 7) % 20
    check_forward({**call, **{name: call[name].half() for name in ("q", "k", "v")}}, checked)


@pytest.mark.backends("cpu", "cuda")
def test_a_block_table_without_columns_holds_no_keys(backend: str, device: str) -> None:
    call = valid_paged_call(device)
    call["block_table"] = call["block_table"][:, :0]
    call["cu_seqlens_k"] = torch.zeros_like(call["cu_seqlens_k"])
    call["q"] = torch.ones_like(call["q"])
    out, lse, S_dmask, _ = forward({**call, "p_dropout": 0.5, "return_softmax": True})
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert S_dmask.shape == (3, NHEADS, 128, 128)
    assert (S_dmask == 0).all()


@each_checked
def test_strides_of_an_empty_tensor_do_not_matter(checked: str, device: str) -> None:
    call = valid_paged_call(device)
    call.update({name: call[name].half() for name in ALL})
    call.update({name: call[name][:1] for name in ("cu_seqlens_q", "cu_seqlens_k")})
    call["q"] = call["q"][:0]
    call["block_table"] = torch.zeros(7, 4, dtype=torch.int32, device=device).mT[:0]
    call["alibi_slopes"] = torch.zeros(NHEADS, 4, device=device).mT[:0]
    check_forward(call, checked)


@pytest.mark.backends("cpu", "cuda")
def test_a_batch_of_no_sequences_needs_no_memory(backend: str, device: str) -> None:
    """S_dmask of no sequences is empty; its indices would fill 16 GiB."""
    call = valid_varlen_call(device)
    call.update({name: call[name][:0] for name in ALL})
    call.update({name: call[name][:1] for name in ("cu_seqlens_q", "cu_seqlens_k")})
    call.update(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1, p_dropout=0.5, return_softmax=True)
    out, _, S_dmask, _ = forward(call)
    assert out.numel() == S_dmask.numel() == 0


@pytest.mark.backends("cpu", "cuda")
def test_an_s_dmask_beyond_all_memory_is_refused(backend: str, device: str) -> None:
    """Before its indices, which would fill 16 GiB each."""
    call = valid_varlen_call(device)
    call.update(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1, p_dropout=0.5, return_softmax=True)
    refused = r"S_dmask has the shape .* 2147483648, 2147483648\].*; allowed: at most 2\^34"
    with pytest.raises(ValueError, match=refused):
        forward(call)
    for empty in ("q", "k"):  # S_dmask has its size even where all of it is 0
        without = {**call, f"cu_seqlens_{empty}": torch.zeros_like(call[f"cu_seqlens_{empty}"])}
        without.update({name: call[name][:0] for name in (("q",) if empty == "q" else ("k", "v"))})
        with pytest.raises(ValueError, match=refused):
            forward(without)


def falling(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cu_seqlens_q", "cu_seqlens_k"),
    [
        ([0, 4000, 1000, 5000], [0, 3000, 500, 5000]),
        ([0, 5000, 0, 5000], [0, 5000, 0, 5000]),
        ([5000, 4000, -7, 2**31 - 1], [2**31 - 1, 0, 5000, -(2**31)]),
    ],
    ids=["falls", "falls_to_0", "anything"],
)
@pytest.mark.parametrize("headdim", [32, 64, 128, 256])  # on a Hopper GPU kernels of sm80, then of sm90
def test_a_deterministic_backward_ends_for_any_cu_seqlens(
    headdim: int, cu_seqlens_q: list[int], cu_seqlens_k: list[int]
) -> None:
    """CTAs wait for each other in the order of the key blocks. cu_seqlens on a GPU is not checked, so sequences may
    overlap, and some key blocks belong to no sequence."""
    call = valid_backward_call("cuda")
    for name in ("dout", "q", "out", "dq"):
        call[name] = torch.ones(5000, 2, headdim, device="cuda", dtype=torch.float16)
    for name in ("k", "v", "dk", "dv"):
        call[name] = torch.ones(5000, 2, headdim, device="cuda", dtype=torch.float16)
    call["softmax_lse"] = torch.zeros(2, 5000, device="cuda")
    call.update(cu_seqlens_q=falling(*cu_seqlens_q), cu_seqlens_k=falling(*cu_seqlens_k))
    call.update(max_seqlen_q=5000, max_seqlen_k=5000)
    given_q, given_k = call["cu_seqlens_q"].clone(), call["cu_seqlens_k"].clone()
    backward({**call, "deterministic": True})
    torch.cuda.synchronize()
    assert torch.equal(call["cu_seqlens_q"], given_q)
    assert torch.equal(call["cu_seqlens_k"], given_k)


def test_missing_arguments_are_named_by_the_bindings() -> None:
    call = valid_varlen_call("cpu")
    with pytest.raises(TypeError, match="incompatible"):
        _C.varlen_fwd(*call.values())
    with pytest.raises(TypeError, match="incompatible"):
        forward({**call, "cu_seqlens_q": None})
    with pytest.raises(TypeError, match="incompatible"):
        forward({**call, "max_seqlen_q": 1.5})


# Wrong calls of the public function: checked in Python or by the extension.
PUBLIC = [
    WrongCall("cu_list", given(cu_seqlens_q=[0, 4, 4, 9]), T, "cu_seqlens_q", r"\[0, 4, 4, 9\].*list", "torch.Tensor"),
    WrongCall("cu_none", given(cu_seqlens_k=None), T, "cu_seqlens_k", "None", "torch.Tensor"),
    WrongCall("max_text", given(max_seqlen_q="5"), T, "max_seqlen_q", "'5'", "int"),
    WrongCall("table_list", given(block_table=[[0]]), T, "block_table", r"\[\[0\]\].*list", "torch.Tensor, or None"),
    WrongCall("q_rank_4", shape("q", 1, 9, 6, 16), V, r"\bq\b", r"\[1, 9, 6, 16\]", r"3 dimensions"),
    WrongCall("cu_q_dtype", index_dtype("cu_seqlens_q"), T, "cu_seqlens_q.*dtype", "(?i)long", "int32"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", PUBLIC, ids=str)
def test_wrong_public_varlen_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_varlen_call(device)
    wrong.change(call)
    assert_named(wrong, lambda: flash_attn_varlen_func(**call, backend=backend))
