"""Wrong calls of flash_attn_with_kvcache: each is named. Wrong values in GPU memory write nowhere else.

Every call leaves the caches as they were if it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_with_kvcache

from ..support.gpu_calls import each_gpu_backend
from ..support.kvcache_cases import BY_NAME, CacheCall, make_call
from ..support.kvcache_checks import bits, copied, run
from ..support.op_calls import FWD_KVCACHE, check_call, kvcache_arguments
from ..support.wrong_calls import (
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
    numbers,
    ranges,
    shape,
    slopes,
    strided,
    valid_kvcache_call,
    valid_paged_kvcache_call,
)

CACHES = ("k_cache", "v_cache")
ROTARY = ("rotary_cos", "rotary_sin")
ALL = ("q", "k", "v", *ROTARY, *CACHES)


def without(*arguments: str) -> Callable[[Call], object]:
    return given(**dict.fromkeys(arguments))


def changed(*changes: Callable[[Call], object]) -> Callable[[Call], object]:
    def change(call: Call) -> None:
        for one in changes:
            one(call)

    return change


def inside(argument: str, cache: str) -> Callable[[Call], object]:
    """The same values, in the memory of a cache."""

    def change(call: Call) -> None:
        values = call[argument]
        place = call[cache].view(-1).view(torch.uint8)[: values.numel() * values.element_size()].view(values.dtype)
        call[argument] = place.view(values.shape).copy_(values)

    return change


def spread(argument: str) -> Callable[[Call], object]:
    """The same values, not contiguous."""
    return lambda call: call.update({argument: call[argument].repeat_interleave(2, -1)[..., ::2]})


def requiring_grad(argument: str) -> Callable[[Call], object]:
    return lambda call: call[argument].requires_grad_()


# Types, shapes, dtypes and options: checked without reading any values in memory.
WRONG_CALLS = [
    # q and the caches
    WrongCall("q_rank_3", shape("q", 3, 6, 16), V, r"\bq\b", r"\[3, 6, 16\]", "4 dim.*seqlen_q, nheads, headdim"),
    WrongCall("k_cache_rank_3", shape("k_cache", 20, 3, 16), V, "k_cache", r"\[20, 3, 16\]", "batch_cache, capacity"),
    WrongCall("v_cache_rank_5", shape("v_cache", 1, 5, 20, 3, 16), V, "v_cache", r"\[1, 5, 20, 3, 16\]", "4 dim"),
    WrongCall("v_cache_rows", shape("v_cache", 4, 20, 3, 16), V, "v_cache.*batch_cache", "4", "of k_cache, 5"),
    WrongCall("v_cache_capacity", shape("v_cache", 5, 21, 3, 16), V, "v_cache.*capacity", "21", "of k_cache, 20"),
    WrongCall("k_cache_headdim", shape("k_cache", 5, 20, 3, 8), V, "k_cache.*headdim", "8", "headdim of q, 16"),
    WrongCall("v_cache_heads", shape("v_cache", 5, 20, 6, 16), V, "v_cache.*heads", "6", "heads of k_cache, 3"),
    WrongCall("heads_no_multiple", shape("q", 3, 5, 7, 16), V, r"\bq\b.*7 heads", r"k_cache.*\b3\b", "multiple"),
    WrongCall("headdim_0", lambda c: c.update({n: c[n][..., :0] for n in ("q", "k", "v", *CACHES)}), V,
              r"\bq\b.*headdim", r"headdim 0", "1 to 576"),
    WrongCall("headdim_577", shape("q", 3, 5, 6, 577), V, r"\bq\b.*headdim", "577", "1 to 576"),
    WrongCall("few_rows", changed(without("cache_batch_idx"), lambda c: c.update({n: c[n][:2] for n in CACHES})), V,
              "k_cache.*batch_cache", "2", "at least the batch of q, 3"),
    WrongCall("q_strided", strided("q"), V, r"\bq\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("k_cache_strided", strided("k_cache"), V, "k_cache.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("k_cache_dtype", cast(torch.bfloat16, "k_cache"), T, "k_cache.*dtype", "(?i)bfloat16", "(?i)that of q"),
    WrongCall("int32", cast(torch.int32, *ALL), T, r"\bq\b.*dtype", "(?i)int", "float16, bfloat16"),
    WrongCall("v_cache_elsewhere", meta("v_cache"), V, "v_cache", "meta", "device of q"),
    WrongCall("k_cache_none", given(k_cache=None), T, "k_cache", "None", "torch.Tensor"),
    WrongCall("q_list", given(q=[1.0]), T, r"\bq\b", r"\[1.0\].*list", "torch.Tensor"),
    WrongCall("k_cache_gradient", requiring_grad("k_cache"), V, "k_cache", "requires a gradient", "requires none"),
    WrongCall("v_cache_gradient", requiring_grad("v_cache"), V, "v_cache", "requires a gradient", "requires none"),
    *(
        WrongCall(f"{name}_in_the_cache", inside(name, "v_cache"), V, name, "v_cache", "memory of its own")
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", *ROTARY)
    ),
    WrongCall("caches_are_one", lambda c: c.update(v_cache=c["k_cache"]), V, "k_cache", "v_cache", "memory of its own"),
    WrongCall("cache_expanded", lambda c: c.update(k_cache=c["k_cache"][:1].expand_as(c["v_cache"])), V, "k_cache",
              r"\[0, ", "of its own"),
    WrongCall("k_in_the_cache", lambda c: c.update(k=c["k_cache"][:3, :2]), V, "k_cache", r"\bk\b", "of its own"),
    # the new keys and values
    WrongCall("k_alone", without("v", *ROTARY), V, r"\bv is None", r"\bk is given", "both or neither"),
    WrongCall("v_alone", without("k", *ROTARY), V, r"\bk is None", r"\bv is given", "both or neither"),
    WrongCall("k_rank", shape("k", 6, 3, 16), V, r"\bk\b", r"\[6, 3, 16\]", "seqlen_new"),
    WrongCall("k_batch", shape("k", 5, 2, 3, 16), V, r"\bk\b.*batch", "5", "batch of q, 3"),
    WrongCall("k_heads", shape("k", 3, 2, 6, 16), V, r"\bk\b.*heads", "6", "heads of k_cache, 3"),
    WrongCall("v_headdim", shape("v", 3, 2, 3, 8), V, r"\bv\b.*headdim", "8", "headdim of v_cache, 16"),
    WrongCall("v_seqlen", shape("v", 3, 3, 3, 16), V, r"\bv\b.*seqlen_new", "3", "seqlen_new of k, 2"),
    WrongCall("v_dtype", cast(torch.float32, "v"), T, r"\bv\b.*dtype", "(?i)float", "(?i)that of q"),
    WrongCall("k_elsewhere", meta("k"), V, r"\bk\b", "meta", "device of q"),
    WrongCall("k_number", given(k=1.0), T, r"\bk\b", "1.0.*float", "torch.Tensor, or None"),
    WrongCall("k_strided", strided("k"), V, r"\bk\b.*strides", r", 2\]", "contiguous last dimension"),
    WrongCall("k_too_long", lambda c: c.update({n: c[n].new_zeros(3, 21, 3, 16) for n in "kv"}), V, r"\bk\b", "21 new",
              "capacity of the cache, 20"),
    # lengths, rows, paddings
    WrongCall("lengths_none", without("cache_seqlens"), V, "cache_seqlens is None", "k is given", "keys in the cache"),
    WrongCall("lengths_negative", given(cache_seqlens=-1), V, "cache_seqlens", "is -1", "0 to the capacity"),
    WrongCall("lengths_past_the_cache", given(cache_seqlens=21), V, "cache_seqlens", "is 21", "0 to .*cache, 20"),
    WrongCall("no_room", given(cache_seqlens=19), V, "k has 2 new keys", "after 19", "capacity of the cache, 20"),
    WrongCall("lengths_huge", given(cache_seqlens=2**40), V, "cache_seqlens", str(2**40), "cache, 20"),
    WrongCall("lengths_float", given(cache_seqlens=3.0), T, "cache_seqlens", "3.0", "integer.*int32 tensor"),
    WrongCall("lengths_bool", given(cache_seqlens=True), T, "cache_seqlens", "True", "integer.*int32 tensor"),
    WrongCall("lengths_list", given(cache_seqlens=[3, 0, 18]), T, "cache_seqlens", r"\[3, 0, 18\]", "int32 tensor"),
    WrongCall("lengths_dtype", cast(torch.int64, "cache_seqlens"), T, "cache_seqlens.*dtype", "(?i)long", "int32"),
    WrongCall("lengths_shape", numbers("cache_seqlens", [3, 0]), V, "cache_seqlens", r"\[2\]", r"\[batch\].*3"),
    WrongCall("lengths_rank", numbers("cache_seqlens", [[3, 0, 18]]), V, "cache_seqlens", r"\[1, 3\]", r"\[batch\]"),
    WrongCall("lengths_spread", spread("cache_seqlens"), V, "cache_seqlens", r"strides \[2\]", "contiguous"),
    WrongCall("lengths_elsewhere", meta("cache_seqlens"), V, "cache_seqlens", "meta", "device of q"),
    WrongCall("rows_dtype", cast(torch.int64, "cache_batch_idx"), T, "cache_batch_idx.*dtype", "(?i)long", "int32"),
    WrongCall("rows_shape", numbers("cache_batch_idx", [3]), V, "cache_batch_idx", r"\[1\]", "batch 3"),
    WrongCall("rows_list", given(cache_batch_idx=[0, 1, 2]), T, "cache_batch_idx", r"\[0, 1, 2\]", "Tensor, or None"),
    WrongCall("leftpad_dtype", cast(torch.float32, "cache_leftpad"), T, "cache_leftpad.*dtype", "(?i)float", "int32"),
    WrongCall("leftpad_shape", numbers("cache_leftpad", [0] * 5), V, "cache_leftpad", r"\[5\]", "batch 3"),
    WrongCall("leftpad_spread", spread("cache_leftpad"), V, "cache_leftpad", r"strides \[2\]", "contiguous"),
    WrongCall("leftpad_number", given(cache_leftpad=3), T, "cache_leftpad", "3.*int", "Tensor, or None"),
    WrongCall("leftpad_elsewhere", meta("cache_leftpad"), V, "cache_leftpad", "meta", "device of q"),
    # rotary
    WrongCall("cos_alone", without("rotary_sin"), V, "rotary_sin is None", "rotary_cos is given", "both or neither"),
    WrongCall("sin_alone", without("rotary_cos"), V, "rotary_cos is None", "rotary_sin is given", "both or neither"),
    WrongCall("rotary_without_k", without("k", "v"), V, "rotary_cos is given", "k is None", "together with k"),
    WrongCall("cos_rank", shape("rotary_cos", 30, 1, 8), V, "rotary_cos", r"\[30, 1, 8\]", "positions, rotary_dim / 2"),
    WrongCall("cos_and_sin", shape("rotary_sin", 31, 8), V, "rotary_sin", r"\[31, 8\]", r"rotary_cos, \[30, 8\]"),
    WrongCall("rotary_dim_12", lambda c: c.update({n: c[n][:, :6].contiguous() for n in ROTARY}), V,
              "rotary_cos.*rotary_dim", "12", "multiple of 16"),
    WrongCall("rotary_dim_32", lambda c: c.update({n: c[n].repeat(1, 2) for n in ROTARY}), V,
              "rotary_cos.*rotary_dim", "32", "headdim, 16"),
    WrongCall("few_positions", lambda c: c.update({n: c[n][:19] for n in ROTARY}), V, "rotary_cos",
              "19 positions", "capacity of the cache, 20"),
    WrongCall("few_positions_for_queries", changed(
        given(causal=True, cache_seqlens=18), lambda c: c.update({n: c[n][:22] for n in ROTARY})), V,
        "rotary_cos", "22 positions", "at least 23 for the queries"),
    WrongCall("cos_dtype", cast(torch.float32, "rotary_cos"), T, "rotary_cos.*dtype", "(?i)float", "(?i)that of q"),
    WrongCall("cos_strided", strided("rotary_cos"), V, "rotary_cos", r"strides \[16, 2\]", "contiguous"),
    WrongCall("sin_elsewhere", meta("rotary_sin"), V, "rotary_sin", "meta", "device of q"),
    WrongCall("interleaved_text", given(rotary_interleaved="yes"), T, "rotary_interleaved", "'yes'", "True or False"),
    # numbers
    WrongCall("scale_nan", given(softmax_scale=math.nan), V, "softmax_scale", "nan", "finite"),
    WrongCall("softcap_negative", given(softcap=-1.0), V, "softcap", "-1", "0.*positive"),
    WrongCall("window_left", given(window_size=(-2, 0)), V, "window_size", "-2", "-1.*unbounded"),
    WrongCall("window_number", given(window_size=5), T, "window_size", "5", r"\(left, right\)"),
    WrongCall("causal_text", given(causal="yes"), T, "causal", "'yes'", "True or False"),
    WrongCall("alibi_batch", slopes(torch.float32, 5, 6), V, "alibi_slopes", r"\[5, 6\]", r"batch, nheads.*3, 6"),
    WrongCall("alibi_in_the_cache", changed(slopes(torch.float32, 6), inside("alibi_slopes", "k_cache")), V,
              "alibi_slopes", "k_cache", "memory of its own"),
    WrongCall("alibi_dtype", slopes(torch.float16, 6), T, "alibi_slopes", "(?i)half|float16", "float32"),
    WrongCall("splits_negative", given(num_splits=-1), V, "num_splits", "-1", "0"),
    WrongCall("splits_float", given(num_splits=1.5), T, "num_splits", "1.5", "integer"),
    WrongCall("split_keys_negative", given(split_keys=-64), V, "split_keys", "-64", "0"),
    WrongCall("split_keys_text", given(split_keys="64"), T, "split_keys", "'64'", "integer"),
    WrongCall("splits_twice", given(num_splits=4, split_keys=64), V, "num_splits is 4", "split_keys is 64", "one of"),
    WrongCall("return_lse_text", given(return_softmax_lse="no"), T, "return_softmax_lse", "'no'", "True or False"),
    WrongCall("backend_number", given(backend=3), T, "backend", "3.*int", "name"),
]  # fmt: skip

WRONG_PAGED_CALLS = [
    WrongCall("table_and_rows", given(cache_batch_idx=torch.zeros(3)), V, "cache_batch_idx", "block_table", "one of"),
    WrongCall("table_list", given(block_table=[[0]]), T, "block_table", r"\[\[0\]\].*list", "torch.Tensor, or None"),
    WrongCall("table_dtype", cast(torch.int64, "block_table"), T, "block_table.*dtype", "(?i)long", "int32"),
    WrongCall("table_rank", numbers("block_table", [9, 3, 1]), V, "block_table", r"\[3\]", "batch 3"),
    WrongCall("table_batch", numbers("block_table", [[9] * 5] * 2), V, "block_table", r"\[2, 5\]", "batch 3"),
    WrongCall("table_elsewhere", meta("block_table"), V, "block_table", "meta", "device of q"),
    WrongCall("table_in_the_cache", inside("block_table", "k_cache"), V, "block_table", "k_cache", "memory of its own"),
    WrongCall("pages", shape("v_cache", 14, 4, 3, 16), V, "v_cache.*num_pages", "14", "num_pages of k_cache, 15"),
    WrongCall("page_size_0", lambda c: c.update({n: c[n][:, :0] for n in CACHES}), V, "k_cache",
              r"pages of 0 keys.*\[15, 0, 3, 16\]", "at least 1"),
    WrongCall("page_size", shape("v_cache", 15, 8, 3, 16), V, "v_cache.*page_size", "8", "page_size of k_cache, 4"),
    WrongCall("no_room", given(cache_seqlens=19), V, "k has 2 new keys", "after 19", "block_table, 20 .5 pages of 4"),
    WrongCall("lengths_past", given(cache_seqlens=30), V, "cache_seqlens", "30", "block_table, 20 .5 pages of 4"),
]  # fmt: skip

# Values in memory: read on the CPU, and on a GPU with FLASH_ATTN_MINI_CHECK=1.
LENGTHS, ROWS, PADDING, TABLE = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"
WRONG_VALUES = [
    WrongCall("length_negative", numbers(LENGTHS, [3, -1, 18]), V, LENGTHS, "-1 for sequence 1", "at least 0"),
    WrongCall("length_past", numbers(LENGTHS, [3, 0, 21]), V, LENGTHS, "21 for sequence 2", "the cache, 20"),
    WrongCall("length_no_room", numbers(LENGTHS, [3, 0, 19]), V, LENGTHS, "19 .*2 with 2 new keys", "the cache, 20"),
    WrongCall("length_huge", numbers(LENGTHS, [2**31 - 1, 0, 3]), V, LENGTHS, str(2**31 - 1), "the cache, 20"),
    WrongCall("row_past", numbers(ROWS, [4, 5, 2]), V, ROWS, "5 for sequence 1", "0 to 4"),
    WrongCall("row_negative", numbers(ROWS, [4, 0, -1]), V, ROWS, "-1 for sequence 2", "0 to 4"),
    WrongCall("row_twice", numbers(ROWS, [4, 0, 4]), V, ROWS, "4 for sequences 0 and 2", "a cache row of its own"),
    WrongCall("padding_negative", numbers(PADDING, [1, 0, -7]), V, PADDING, "-7 for sequence 2", "0 to .*20"),
    WrongCall("padding_past", numbers(PADDING, [6, 0, 7]), V, PADDING, "6 for sequence 0", "0 to .*5"),
    WrongCall("padding_huge", numbers(PADDING, [1, 2**31 - 1, 7]), V, PADDING, str(2**31 - 1), "0 to .*2"),
    WrongCall("few_positions_for_queries", changed(
        given(causal=True), lambda c: c.update({n: c[n][:22] for n in ROTARY})), V,
        "rotary_cos", "22 positions", "at least 23.*sequence 2"),
]  # fmt: skip
WRONG_PAGES = [
    WrongCall("page_past", numbers(TABLE, [[9, 15, 0, 0, 0], [14, 0, 0, 0, 0], [0, 1, 2, 8, 11]]), V, TABLE,
              r"page 15 at \[0, 1\]", "0 to 14"),
    WrongCall("page_negative", numbers(TABLE, [[9, 3, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 1, 2, 8, 11]]), V, TABLE,
              r"page -1 at \[1, 0\]", "0 to 14"),
    WrongCall("page_huge", numbers(TABLE, [[9, 3, 0, 0, 0], [14, 0, 0, 0, 0], [0, 1, 2, 8, 2**31 - 1]]), V, TABLE,
              r"page 2147483647 at \[2, 4\]", "0 to 14"),
    WrongCall("page_of_none", lambda c: c.update({n: c[n][:0] for n in CACHES}), V, TABLE, r"page 9 at \[0, 0\]",
              "none, because the cache has no pages"),
    WrongCall("page_written_twice", numbers(TABLE, [[9, 14, 0, 0, 0], [3, 0, 0, 0, 0], [0, 1, 2, 8, 9]]), V, TABLE,
              r"block_table", "of its own"),
    WrongCall("length_past_the_table", numbers(LENGTHS, [3, 0, 19]), V, LENGTHS, "19 .*sequence 2", "block_table, 20"),
]  # fmt: skip


def assert_named(wrong: WrongCall, call: Call, backend: str) -> None:
    """The call raises the error, and the caches are as they were."""
    before = {name: x.clone() for name, x in call.items() if name in CACHES and isinstance(x, Tensor) and not x.is_meta}
    call.setdefault("backend", backend)
    with pytest.raises(wrong.error) as raised:
        flash_attn_with_kvcache(**call)
    assert_says(str(raised.value), wrong.argument, wrong.given, wrong.allowed)
    for name, x in before.items():
        assert torch.equal(call[name].nan_to_num(), x.nan_to_num()), f"{name} was written"


@pytest.mark.parametrize("valid", [valid_kvcache_call, valid_paged_kvcache_call])
def test_the_valid_calls_are_valid(
    valid: Callable[[str], Call], backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    out, lse = flash_attn_with_kvcache(**valid(device), return_softmax_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((3, SEQLEN_Q, NHEADS, HEADDIM), (3, NHEADS, SEQLEN_Q))


@pytest.mark.parametrize("wrong", WRONG_CALLS, ids=str)
def test_wrong_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_kvcache_call(device)
    wrong.change(call)
    assert_named(wrong, call, backend)


@pytest.mark.parametrize("wrong", WRONG_PAGED_CALLS, ids=str)
def test_wrong_paged_call_is_named(wrong: WrongCall, backend: str, device: str) -> None:
    call = valid_paged_kvcache_call(device)
    wrong.change(call)
    assert_named(wrong, call, backend)


@pytest.mark.parametrize("wrong", WRONG_VALUES + WRONG_PAGES, ids=str)
def test_wrong_values_are_named(wrong: WrongCall, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU without FLASH_ATTN_MINI_CHECK too."""
    if device == "cuda":
        monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    call = valid_paged_kvcache_call(device) if wrong in WRONG_PAGES else valid_kvcache_call(device)
    wrong.change(call)
    assert_named(wrong, call, backend)


@each_gpu_backend
@pytest.mark.gpu
@pytest.mark.parametrize("wrong", WRONG_VALUES + WRONG_PAGES, ids=str)
def test_values_on_a_gpu_are_not_read_unless_asked(wrong: WrongCall, gpu_backend: str) -> None:
    call = valid_paged_kvcache_call("cuda") if wrong in WRONG_PAGES else valid_kvcache_call("cuda")
    wrong.change(call)
    flash_attn_with_kvcache(**call, backend=gpu_backend)
    torch.cuda.synchronize()


def test_key_ranges_are_not_implemented(backend: str, device: str) -> None:
    call = valid_kvcache_call(device)
    ranges(1, 1, SEQLEN_Q, 2)(call)
    tensors = [call.pop(name) for name in ("q", *CACHES)]
    arguments = kvcache_arguments(*tensors, **call, backend=backend)
    with pytest.raises(NotImplementedError, match=r"key_ranges is not supported with a KV cache.*available"):
        check_call(FWD_KVCACHE, arguments)


def test_attn_bias_is_not_implemented(backend: str, device: str) -> None:
    call = valid_kvcache_call(device)
    bias(1, 1, SEQLEN_Q, 20)(call)
    tensors = [call.pop(name) for name in ("q", *CACHES)]
    arguments = kvcache_arguments(*tensors, **call, backend=backend)
    with pytest.raises(NotImplementedError, match=r"attn_bias is not supported with a KV cache.*available"):
        check_call(FWD_KVCACHE, arguments)


def test_rows_may_repeat_if_nothing_is_appended(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    call = valid_kvcache_call(device)
    changed(without("k", "v", *ROTARY), numbers(ROWS, [4, 4, 4]))(call)
    assert flash_attn_with_kvcache(**call, backend=backend).shape == call["q"].shape


@pytest.mark.backends("cpu", "cuda")
def test_the_extension_makes_the_same_checks(backend: str, device: str) -> None:
    """_C.fwd_kvcache with the arguments of the official extension."""
    call = valid_kvcache_call(device)
    first = [call[name] for name in ("q", *CACHES, "k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")]
    official: list[Any] = [*first, call[ROWS], call[PADDING], None, None, None, 0.25, False, -1, -1, 0.0, True, 0]
    out, lse = _C.fwd_kvcache(*official)
    assert (out.shape, lse.shape) == (call["q"].shape, (3, NHEADS, SEQLEN_Q))
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        _C.fwd_kvcache(*official[:13], math.nan, *official[14:])
    with pytest.raises(TypeError):
        _C.fwd_kvcache(*official[:5])


# ---- wrong values in GPU memory -------------------------------------------------------------------------------------

HOSTILE = (-1, -(2**31), 2**31 - 1, 10**6, 1 << 16)


def assert_others_untouched(call: CacheCall, before: list[Tensor], victim: int, own: tuple[Tensor | int, ...]) -> None:
    """The buffers changed only where the other sequences append, and in the cache row or pages of the victim."""
    for cache, copy, new in zip((call.k_cache, call.v_cache), before, call.new, strict=True):
        for b in range(call.case.batch):
            if b != victim and new is not None:
                copy[call.appended(b)] = new[b]
        for index in own:
            copy[index] = cache[index]
        changed = (bits(cache._base) != bits(copy._base)).nonzero()
        assert len(changed) == 0, f"{len(changed)} elements written elsewhere, first at {changed[0].tolist()}"


HOSTILE_CASES = (
    "batch_idx_leftpad",
    "pages_leftpad",
    "many_rows_causal",
    "many_rows_pages_64",
    "tall_small",
    "tall_pages_16",
    "mqa_32",
    "wide_sequences",
)


def integer_arguments(name: str) -> list[str]:
    """The arguments of a case that hold lengths, rows or pages."""
    call = make_call(BY_NAME[name], torch.float16, "cpu", 0)
    names = ("lengths", "cache_batch_idx", "cache_leftpad", "block_table")
    return [argument for argument in names if getattr(call, argument) is not None]


@each_gpu_backend
@pytest.mark.gpu
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name in HOSTILE_CASES for argument in integer_arguments(name)]
)
def test_hostile_values_neither_crash_nor_write_elsewhere(
    name: str, num_splits: int, argument: str, value: int, gpu_backend: str, seed: int
) -> None:
    """Sequence 1 has a wrong value. The results of the others, and every byte that is not its own, are right."""
    case, victim = BY_NAME[name], 1
    call, good = (make_call(case, torch.float16, "cuda", seed) for _ in range(2))
    tensor = getattr(call, argument)
    row = call.cache_batch_idx
    own: tuple[Tensor | int, ...] = (victim if row is None else row[victim].long(),)
    if call.block_table is not None:
        pages = call.block_table[victim, : -(-case.totals[victim] // case.page_size)].long()
        own = (pages,)
    if argument in ("cache_batch_idx", "block_table"):
        own = ()  # no row or page is the victim's
    tensor[victim] = value
    before = copied(call.k_cache, call.v_cache)
    out, lse = run(call, gpu_backend, num_splits=num_splits)
    torch.cuda.synchronize()
    tensor[victim] = getattr(good, argument)[victim]
    assert_others_untouched(call, before, victim, own)
    expected = run(good, gpu_backend, num_splits=1)
    for b in range(case.batch):
        if b != victim:
            torch.testing.assert_close(out[b], expected[0][b], rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(lse[b], expected[1][b], rtol=1e-3, atol=1e-3)


@each_gpu_backend
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunk", "pages_chunk"])
def test_new_keys_that_do_not_fit_are_dropped(name: str, gpu_backend: str, seed: int) -> None:
    """Sequence 1 has place for two of its new keys. These two are written, and the others nowhere."""
    case = BY_NAME[name]
    call = make_call(case, torch.float16, "cuda", seed)
    fits = 2
    length = case.keys - fits
    assert isinstance(call.lengths, Tensor)
    if call.block_table is not None:  # a table of this sequence's own pages only
        spare = torch.arange(case.max_pages, dtype=torch.int32, device="cuda")
        used = set(call.block_table[0].tolist())
        free = [page for page in range(call.k_cache.shape[0]) if page not in used][: case.max_pages]
        call.block_table[1] = torch.tensor(free, dtype=torch.int32, device="cuda")[spare]
    call.lengths[1] = length
    before = copied(call.k_cache, call.v_cache)
    run(call, gpu_backend)
    for cache, copy, new in zip((call.k_cache, call.v_cache), before, call.new, strict=True):
        assert new is not None
        copy[call.appended(0)] = new[0]
        copy[call.slots(1, length, case.keys)] = new[1, :fits]
        assert torch.equal(bits(cache._base), bits(copy._base))
