"""The checks in Python, for environments without the extension: every wrong call of the tables, through both checkers.

Both raise the same type with the same text. Calls with arguments of a wrong type raise before either checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_mini import kvcache
from flash_attn_mini.argument_checks import (
    as_flag,
    as_sequences,
    check_backward_tensors,
    check_tensor,
    checked_options,
)
from flash_attn_mini.backends import extension
from flash_attn_mini.backends.triton import checks, checks_kvcache
from flash_attn_mini.ops import EQUAL_LENGTHS
from flash_attn_mini.options import KvCache, Options, Sequences

from ..support.op_calls import BWD, FWD, FWD_KVCACHE, check_call
from ..support.wrong_calls import (
    Call,
    WrongCall,
    assert_says,
    cast,
    given,
    numbers,
    shape,
    valid_call,
    valid_kvcache_call,
    valid_paged_call,
    valid_paged_kvcache_call,
    valid_varlen_call,
)
from . import test_backward_errors, test_errors, test_kvcache_errors, test_varlen_errors

Arguments = tuple[Any, ...]
Checker = Callable[..., object]


def in_cpp_forward(q: Any, k: Any, v: Any, sequences: Sequences | None, options: Options) -> None:
    check_call(FWD, (q, k, v, *(sequences or EQUAL_LENGTHS), *for_triton(options), None))


def in_cpp_backward(*arguments: Any) -> None:
    """The op, which makes dq, dk and dv, and the extension's function, which writes to those of the caller."""
    *tensors, sequences, options, rng_state, into = arguments
    mask = (True, True, True)
    check_call(BWD, (*tensors, *(sequences or EQUAL_LENGTHS), *for_triton(options), rng_state, mask))
    extension.backward(*tensors, sequences, options, rng_state, mask, into)


def in_cpp_kvcache(q: Any, k_cache: Any, v_cache: Any, cache: KvCache, options: Options) -> None:
    check_call(FWD_KVCACHE, (q, k_cache, v_cache, *cache, *for_triton(options)))


def for_triton(options: Options) -> Options:
    return options._replace(backend="triton")


CHECKERS: dict[str, tuple[Checker, Checker]] = {
    "forward": (in_cpp_forward, checks.check_forward),
    "backward": (in_cpp_backward, checks.check_backward),
    "kvcache": (in_cpp_kvcache, checks_kvcache.check_kvcache),
}


# ---- calls by their public names, as the arguments of the checkers --------------------------------------------------


def options_of(call: Call, names: tuple[str, str, str] = ("q", "k", "v")) -> Options:
    """The options of a call of a public function, or of the extension."""
    window = call.get("window_size", (call.get("window_size_left", -1), call.get("window_size_right", -1)))
    return checked_options(
        *(call[name] for name in names),
        call.get("dropout_p", call.get("p_dropout", 0.0)),
        call.get("softmax_scale"),
        call.get("causal", call.get("is_causal", False)),
        window,
        call.get("softcap", 0.0),
        call.get("alibi_slopes"),
        call.get("deterministic", False),
        call.get("backend"),
        call.get("learnable_sink"),
        call.get("key_ranges"),
        call.get("attn_bias"),
        names=names,
    )


def sequences_of(call: Call) -> Sequences | None:
    if "cu_seqlens_q" not in call:
        return None
    lengths = [call[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    return as_sequences(*lengths, call.get("block_table"))


def forward_arguments(call: Call) -> Arguments:
    options = options_of(call)
    as_flag("return_attn_probs", call.get("return_attn_probs", False))
    return call["q"], call["k"], call["v"], sequences_of(call), options


def backward_arguments(call: Call) -> Arguments:
    into = tuple(call[name] for name in ("dq", "dk", "dv"))
    check_backward_tensors(call["dout"], call["out"], call["softmax_lse"], *into, call.get("rng_state"))
    options, sequences = options_of(call), sequences_of(call)
    tensors = (call[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
    return *tensors, call.get("dsoftmax_lse"), sequences, options, call.get("rng_state"), into


def kvcache_arguments(call: Call) -> Arguments:
    tensors = [call[name] for name in ("q", "k_cache", "v_cache")]
    options = options_of(call, ("q", "k_cache", "v_cache"))
    named = {name: call.get(name) for name in KvCache._fields}
    for name, x in named.items():
        if x is not None and name not in ("cache_seqlens", "rotary_interleaved", "num_splits", "split_keys"):
            check_tensor(name, x, ", or None")
    lengths, length = kvcache._as_lengths(call.get("cache_seqlens"))
    if call.get("cache_seqlens") is None and named["k"] is None:
        length = kvcache._capacity(call["k_cache"], named["block_table"])
    named.update(cache_seqlens=lengths, cache_seqlen=length, rotary_interleaved=True)
    for name in ("num_splits", "split_keys"):
        named[name] = kvcache.as_integer(name, call.get(name, 0), "an integer")
    return *tensors, KvCache(**named), options


# ---- the tables -----------------------------------------------------------------------------------------------------

NOT_OF_A_CHECKER = {"return_lse_text", "interleaved_text", "scale_none"}  # the public functions read these
EMPTY_STATE = torch.zeros(0, dtype=torch.int64)
MORE_WRONG_BACKWARD_CALLS = [
    WrongCall("no_rng_state", given(dropout_p=0.1), ValueError, "rng_state is None", "dropout_p 0.1", "the forward"),
    WrongCall("rng_state_empty", given(dropout_p=0.1, rng_state=EMPTY_STATE), ValueError, "rng_state", r"\[0\]", "2"),
    WrongCall("rng_state_float", given(dropout_p=0.1, rng_state=torch.zeros(2)), TypeError, "rng_state", "Float", "64"),
    WrongCall(
        "rng_state_elsewhere", given(dropout_p=0.1, rng_state=torch.zeros(2, dtype=torch.int64, device="meta")),
        ValueError, "rng_state", "meta", "device of q",
    ),
    WrongCall("dk_in_q", lambda c: c.update(dk=c["q"].view(-1)[99:771].view(2, 7, 3, 16)), ValueError, "dk", "q", "of"),
]  # fmt: skip
MORE_WRONG_CALLS = [
    WrongCall("float64", cast(torch.float64, "q", "k", "v"), TypeError, "q", "Double", "float16, bfloat16, float32"),
    WrongCall("scale_small", given(softmax_scale=1e-30), ValueError, "softmax_scale", "1e-30", "1e-20 to 1e"),
    WrongCall("quotient", given(softmax_scale=1e-10, softcap=1e15), ValueError, "scale", "softcap", "quotient"),
    WrongCall("slopes_spread", given(alibi_slopes=torch.zeros(6, 2)[:, 0]), ValueError, "alibi", r"\[2\]", "stride 1"),
]  # fmt: skip
MORE_WRONG_PAGED_CALLS = [
    WrongCall("page_size_0", lambda c: c.update({n: c[n][:, :0] for n in "kv"}), ValueError, "k", "0 keys", "1"),
    WrongCall("table_negated", lambda c: c.update(block_table=torch._neg_view(c["block_table"])), ValueError,
              "block_table", "negated", "memory as they are"),
]  # fmt: skip
MORE_WRONG_CACHE_CALLS = [
    WrongCall("cache_negated", lambda c: c.update(k_cache=torch._neg_view(c["k_cache"])), ValueError, "k_cache",
              "negated", "resolve_neg"),
    WrongCall("caches_overlap", lambda c: c.update(v_cache=c["k_cache"].view(-1)[4800 - 4 * 960 - 48 :].as_strided(
        (4, 20, 3, 16), (960, 48, 16, 1)), k_cache=c["k_cache"][:4], cache_batch_idx=numbers_of(0, 1, 2)), ValueError,
        "k_cache", "v_cache", "memory of its own"),
    WrongCall("k_cache_rows", shape("k_cache", 4, 20, 3, 16), ValueError, "v_cache", "5", "4"),
    WrongCall("k_length_0", lambda c: numbers("cache_seqlens", [0, 0, 99])(c), ValueError, "cache_seqlens", "99", "20"),
]  # fmt: skip


def numbers_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Table = tuple[str, Callable[[str], Call], Callable[[Call], Arguments], list[WrongCall]]
TABLES: list[Table] = [
    (
        "forward",
        valid_call,
        forward_arguments,
        test_errors.WRONG_CALLS + test_errors.WRONG_KEY_RANGES + test_errors.WRONG_BIASES + MORE_WRONG_CALLS,
    ),
    (
        "forward",
        valid_varlen_call,
        forward_arguments,
        test_varlen_errors.WRONG_SHAPES
        + test_varlen_errors.WRONG_SEQLENS
        + test_varlen_errors.WRONG_RANGES
        + test_varlen_errors.PUBLIC,
    ),
    (
        "forward",
        valid_paged_call,
        forward_arguments,
        test_varlen_errors.WRONG_PAGES + test_varlen_errors.WRONG_PAGE_NUMBERS + MORE_WRONG_PAGED_CALLS,
    ),
    (
        "backward",
        test_backward_errors.valid_backward_call,
        backward_arguments,
        test_backward_errors.WRONG_BACKWARD_CALLS + MORE_WRONG_BACKWARD_CALLS,
    ),
    (
        "backward",
        test_varlen_errors.valid_backward_call,
        backward_arguments,
        test_varlen_errors.WRONG_SHAPES + test_varlen_errors.WRONG_SEQLENS + test_varlen_errors.WRONG_BACKWARD_CALLS,
    ),
    (
        "kvcache",
        valid_kvcache_call,
        kvcache_arguments,
        test_kvcache_errors.WRONG_CALLS + test_kvcache_errors.WRONG_VALUES + MORE_WRONG_CACHE_CALLS,
    ),
    (
        "kvcache",
        valid_paged_kvcache_call,
        kvcache_arguments,
        test_kvcache_errors.WRONG_PAGED_CALLS + test_kvcache_errors.WRONG_PAGES,
    ),
]
CASES = [
    pytest.param(direction, valid, arguments_of, wrong, id=f"{valid.__module__}-{valid.__name__}-{wrong.name}")
    for direction, valid, arguments_of, wrongs in TABLES
    for wrong in wrongs
    if wrong.name not in NOT_OF_A_CHECKER
]


def error_of(check: Checker, arguments: Arguments) -> Exception | None:
    try:
        check(*arguments)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("direction", "valid", "arguments_of"), [table[:3] for table in TABLES])
def test_a_valid_call_passes_both(
    direction: str, valid: Callable[[str], Call], arguments_of: Callable[[Call], Arguments]
) -> None:
    arguments = arguments_of(valid("cpu"))
    for check in CHECKERS[direction]:
        check(*arguments)


@pytest.mark.parametrize(("direction", "valid", "arguments_of", "wrong"), CASES)
def test_both_checkers_say_the_same(
    direction: str, valid: Callable[[str], Call], arguments_of: Callable[[Call], Arguments], wrong: WrongCall
) -> None:
    call = valid("cpu")
    wrong.change(call)
    arguments: list[Any] = []
    raised = error_of(lambda: arguments.extend(arguments_of(call)), ())
    if raised is None:  # else before either checker
        in_cpp, raised = (error_of(check, tuple(arguments)) for check in CHECKERS[direction])
        assert (type(raised), str(raised)) == (type(in_cpp), str(in_cpp))
    assert isinstance(raised, wrong.error), repr(raised)
    assert_says(str(raised), wrong.argument, wrong.given, wrong.allowed)
