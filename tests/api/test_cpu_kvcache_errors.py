"""Wrong calls of `_C.fwd_kvcache` on the CPU: each has an error that says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ..support.kvcache_calls import ARGUMENTS, Call, check, forward
from ..support.wrong_calls import T, V, WrongCall, assert_says, cast, given, meta, numbers, shape, slopes, strided

BATCH, CAPACITY, NHEADS, NHEADS_K, HEADDIM = 3, 20, 4, 2, 32
PAGES, PAGE_SIZE, COLUMNS = 7, 5, 4  # of CAPACITY keys


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def valid_call() -> Call:
    """Two new keys for each of three sequences, with rotary."""
    return {
        "q": torch.zeros(BATCH, 2, NHEADS, HEADDIM, dtype=torch.float16),
        **{name: torch.zeros(BATCH, CAPACITY, NHEADS_K, HEADDIM, dtype=torch.float16) for name in CACHES},
        **{name: torch.zeros(BATCH, 2, NHEADS_K, HEADDIM, dtype=torch.float16) for name in ("k", "v")},
        **{name: torch.zeros(CAPACITY, 8, dtype=torch.float16) for name in ("rotary_cos", "rotary_sin")},
        "cache_seqlens": ints(0, 18, 7),
        "cache_leftpad": ints(0, 20, 3),
        "cache_batch_idx": ints(2, 0, 1),
    }


def valid_paged_call() -> Call:
    call = valid_call()
    del call["cache_batch_idx"]
    call.update({name: torch.zeros(PAGES, PAGE_SIZE, NHEADS_K, HEADDIM, dtype=torch.float16) for name in CACHES})
    # Entries without a key, or left of the padding, are not read.
    call["block_table"] = torch.tensor([[6, 99, 99, 99], [99, 99, 99, 3], [4, 0, 99, 99]], dtype=torch.int32)
    return call


CACHES = ("k_cache", "v_cache")
ROTARY = ("rotary_cos", "rotary_sin")


def without(*arguments: str) -> Callable[[Call], object]:
    return lambda call: [call.pop(name) for name in arguments]


def both(*changes: Callable[[Call], object]) -> Callable[[Call], object]:
    return lambda call: [change(call) for change in changes]


def one_tensor(name: str, source: str, *index: object) -> Callable[[Call], object]:
    """Makes one argument a view of another."""
    return lambda call: call.update({name: call[source][index]})


def expanded(*arguments: str) -> Callable[[Call], object]:
    return lambda call: call.update({name: call[name][:1].expand_as(call[name]) for name in arguments})


def halves_that_overlap(call: Call) -> None:
    memory = call["k_cache"].new_zeros(BATCH, CAPACITY, NHEADS_K, 2 * HEADDIM)
    call["k_cache"], call["v_cache"] = memory[..., :HEADDIM], memory[..., HEADDIM - 1 : -1]


def table(*rows: list[int]) -> Callable[[Call], object]:
    return numbers("block_table", rows)


WRONG_CALLS = [
    WrongCall("q_rank", shape("q", 3, 4, 32), V, "q has shape", r"\[3, 4, 32\]", "4 dimensions"),
    WrongCall("k_cache_rank", shape("k_cache", 3, 4, 32), V, "k_cache", r"\[3, 4, 32\]", "capacity, nheads_k, headdim"),
    WrongCall("k_rank", shape("k", 3, 4, 32), V, r"\bk has shape", r"\[3, 4, 32\]", "batch, seqlen_new"),
    WrongCall("headdim_577", shape("q", 3, 2, 4, 577), V, "q has headdim", "577", "1 to 576"),
    WrongCall("headdim_cache", shape("k_cache", 3, 20, 2, 16), V, "k_cache has headdim 16", "16", "headdim of q, 32"),
    WrongCall("headdim_v", shape("v", 3, 2, 2, 16), V, "v has headdim 16", "16", "headdim of v_cache, 32"),
    WrongCall("heads", shape("q", 3, 2, 5, 32), V, "q has 5 heads", "k_cache has 2", "multiple"),
    WrongCall("heads_v_cache", shape("v_cache", 3, 20, 4, 32), V, "v_cache has 4 heads", "3, 20, 4", "k_cache, 2"),
    WrongCall("heads_k", shape("k", 3, 2, 4, 32), V, "k has heads 4", "3, 2, 4, 32", "heads of k_cache, 2"),
    WrongCall("v_cache_capacity", shape("v_cache", 3, 19, 2, 32), V, "v_cache has capacity 19", "19", "k_cache, 20"),
    WrongCall("v_cache_rows", shape("v_cache", 4, 20, 2, 32), V, "v_cache has batch_cache 4", "4", "k_cache, 3"),
    WrongCall("k_batch", shape("k", 2, 2, 2, 32), V, "k has batch 2", "2, 2, 2, 32", "batch of q, 3"),
    WrongCall("v_seqlen", shape("v", 3, 1, 2, 32), V, "v has seqlen_new 1", "3, 1", "seqlen_new of k, 2"),
    WrongCall("q_int", cast(torch.int32, "q"), T, "q has dtype", "Int", "float16, bfloat16"),
    WrongCall("q_complex", cast(torch.complex64, "q"), T, "q has dtype", "ComplexFloat", "float16, bfloat16"),
    WrongCall("cache_dtype", cast(torch.float32, "v_cache"), T, "v_cache has dtype", "Float", "q, Half"),
    WrongCall("k_dtype", cast(torch.bfloat16, "k"), T, r"\bk has dtype", "BFloat16", "q, Half"),
    WrongCall("rotary_dtype", cast(torch.float32, *ROTARY), T, "rotary_cos has dtype", "Float", "q, Half"),
    WrongCall("lengths_dtype", cast(torch.int64, "cache_seqlens"), T, "cache_seqlens has dtype", "Long", "int32"),
    WrongCall("index_dtype", cast(torch.int64, "cache_batch_idx"), T, "cache_batch_idx has", "Long", "int32"),
    WrongCall("leftpad_dtype", cast(torch.int64, "cache_leftpad"), T, "cache_leftpad has dtype", "Long", "int32"),
    WrongCall("slopes_dtype", slopes(torch.float16, 4), T, "alibi_slopes", "Half", "float32"),
    WrongCall("slopes_shape", slopes(torch.float32, 3), V, "alibi_slopes", r"\[3\]", r"\[4\] or .*\[3, 4\]"),
    *(
        WrongCall(f"{name}_device", meta(name), V, f"{name} is on", "meta", "device of q, cpu")
        for name in ("k_cache", "v", "rotary_sin", "cache_seqlens", "cache_leftpad", "cache_batch_idx")
    ),
    *(
        WrongCall(f"{name}_strided", strided(name), V, f"{name} has strides", "2]", "contiguous last dimension")
        for name in ("q", "k_cache", "v_cache", "k", "v")
    ),
    WrongCall("rotary_strided", strided("rotary_cos"), V, "rotary_cos has strides", "2]", "contiguous"),
    WrongCall("lengths_shape", shape("cache_seqlens", 2), V, "cache_seqlens has shape", r"\[2\]", "batch 3"),
    WrongCall("leftpad_shape", shape("cache_leftpad", 3, 1), V, "cache_leftpad", r"\[3, 1\]", "batch 3"),
    WrongCall("index_shape", shape("cache_batch_idx", 4), V, "cache_batch_idx", r"\[4\]", "batch 3"),
    WrongCall(
        "few_rows", both(without("cache_batch_idx"), shape("q", 4, 2, 4, 32)), V, "k_cache", "3", "batch of q, 4"
    ),
    WrongCall("k_alone", without("v"), V, "v is None", "k is given", "both or neither"),
    WrongCall("v_alone", without("k"), V, "k is None", "v is given", "both or neither"),
    WrongCall("cos_alone", without("rotary_sin"), V, "rotary_sin is None", "rotary_cos is given", "both or neither"),
    WrongCall("rotary_alone", without("k", "v"), V, "rotary_cos is given", "k is None", "together with k"),
    WrongCall("k_without_lengths", without("cache_seqlens"), V, "cache_seqlens is None", "k is given", "before"),
    WrongCall("rotary_dim_12", both(*(shape(x, 20, 6) for x in ROTARY)), V, "rotary_dim is 12", "20, 6", "16"),
    WrongCall("rotary_dim_0", both(*(shape(x, 20, 0) for x in ROTARY)), V, "rotary_dim is 0", "20, 0", "16"),
    WrongCall("rotary_dim_48", both(*(shape(x, 20, 24) for x in ROTARY)), V, "rotary_dim is 48", "20, 24", "32"),
    WrongCall("rotary_short", both(*(shape(x, 19, 8) for x in ROTARY)), V, "rotary_cos has 19", "19", "cache, 20"),
    WrongCall("rotary_differ", shape("rotary_sin", 21, 8), V, "rotary_sin has shape", "21, 8", "rotary_cos, .20, 8"),
    WrongCall("causal_rotary", both(given(is_causal=True), shape("q", 3, 4, 4, 32)), V, "rotary_cos", "20", "22"),
    WrongCall("lengths_twice", given(cache_seqlen=3), V, "cache_seqlens is given as", "3", "one of the two"),
    WrongCall(
        "int_past_capacity",
        both(without("cache_seqlens", "k", "v", *ROTARY), given(cache_seqlen=21)),
        *(V, "cache_seqlens is 21", "21", "0 to the capacity of the cache, 20"),
    ),
    WrongCall(
        "int_negative",
        both(without("cache_seqlens", "k", "v", *ROTARY), given(cache_seqlen=-2)),
        *(V, "cache_seqlens is -2", "-2", "0 to the capacity of the cache, 20"),
    ),
    WrongCall(
        "int_and_new_keys",
        both(without("cache_seqlens"), given(cache_seqlen=19)),
        *(V, "k has 2 new keys after 19 in the cache", "2", "capacity of the cache, 20"),
    ),
    WrongCall("many_new_keys", both(shape("k", 3, 21, 2, 32), shape("v", 3, 21, 2, 32)), V, "21 new", "0", "cache, 20"),
    WrongCall("splits_negative", given(num_splits=-1), V, "num_splits", "-1", "0 .chosen"),
    WrongCall("split_keys_negative", given(split_keys=-1), V, "split_keys", "-1", "0 .chosen"),
    WrongCall("splits_twice", given(num_splits=2, split_keys=64), V, "num_splits is 2", "split_keys is 64", "one of"),
    WrongCall("scale_nan", given(softmax_scale=float("nan")), V, "softmax_scale", "nan", "finite"),
    WrongCall("softcap_negative", given(softcap=-1.0), V, "softcap", "-1", "positive"),
    WrongCall("window", given(window_size_left=-2), V, "window_size", "-2", "at least 0"),
    WrongCall("length_negative", numbers("cache_seqlens", [0, -1, 7]), V, "cache_seqlens is -1", "1 ", "at least 0"),
    WrongCall("length_past", numbers("cache_seqlens", [0, 19, 7]), V, "cache_seqlens is 19", "2 new", "cache, 20"),
    WrongCall(
        "leftpad_negative", numbers("cache_leftpad", [0, 20, -3]), V, "cache_leftpad is -3", "sequence 2", "0 to"
    ),
    WrongCall("leftpad_past", numbers("cache_leftpad", [3, 20, 3]), V, "cache_leftpad is 3", "sequence 0", "0 to .*2"),
    WrongCall("index_past", numbers("cache_batch_idx", [2, 3, 1]), V, "cache_batch_idx is 3", "sequence 1", "0 to 2"),
    WrongCall("index_negative", numbers("cache_batch_idx", [-1, 0, 1]), V, "cache_batch_idx is -1", "0", "0 to 2"),
    WrongCall("index_repeats", numbers("cache_batch_idx", [2, 0, 2]), V, "cache_batch_idx is 2", "0 and 2", "its own"),
    WrongCall("gradient", lambda call: call["v_cache"].requires_grad_(), V, "v_cache requires", "gradient", "none"),
    WrongCall(
        "negative_view",
        lambda call: call.update(k_cache=torch._neg_view(call["k_cache"])),
        V,
        "k_cache",
        "lazily",
        "neg",
    ),
    WrongCall("cache_expanded", expanded("v_cache"), V, "v_cache has strides", "0,", "memory of its own"),
    WrongCall("one_cache", one_tensor("v_cache", "k_cache"), V, "k_cache shares", "v_cache", "memory of its own"),
    WrongCall("caches_overlap", halves_that_overlap, V, "k_cache shares", "v_cache", "memory of its own"),
    WrongCall("k_in_the_cache", one_tensor("k", "k_cache", slice(None), slice(2)), V, "k_cache", "with k", "its own"),
    WrongCall(
        "out_shape", lambda call: call.update(out=call["q"][:2].clone()), V, "out has shape", "2, 2", "shape of q"
    ),
    WrongCall("out_is_q", one_tensor("out", "q"), V, "out shares memory", "with q", "memory of its own"),
    WrongCall(
        "out_in_the_cache",
        both(
            given(num_splits=1),
            lambda call: call.update(out=call["k_cache"].flatten()[: 3 * 2 * 4 * 32].view(3, 2, 4, 32)),
        ),
        *(V, "out shares memory", "with k_cache", "memory of its own"),
    ),
]
WRONG_PAGED_CALLS = [
    WrongCall("index", given(cache_batch_idx=ints(0, 1, 2)), V, "cache_batch_idx", "block_table are both", "one of"),
    WrongCall("table_dtype", cast(torch.int64, "block_table"), T, "block_table has dtype", "Long", "int32"),
    WrongCall("table_shape", shape("block_table", 2, 4), V, "block_table has shape", r"\[2, 4\]", "batch 3"),
    WrongCall("table_device", meta("block_table"), V, "block_table is on", "meta", "device of q"),
    WrongCall("page_size_0", both(*(shape(x, 7, 0, 2, 32) for x in CACHES)), V, "k_cache has pages of 0", "7, 0", "1"),
    WrongCall("v_cache_pages", shape("v_cache", 6, 5, 2, 32), V, "v_cache has num_pages 6", "6", "k_cache, 7"),
    WrongCall(
        "page_past", numbers("block_table", [[6, 0, 0, 0], [0, 0, 0, 3], [4, 7, 0, 0]]), V, "page 7", "2, 1", "6"
    ),
    WrongCall(
        "page_negative", numbers("block_table", [[-1] * 4, [0, 0, 0, 3], [4, 1, 0, 0]]), V, "page -1", "0, 0", "6"
    ),
    WrongCall("written_twice", table([6, 9, 9, 9], [9, 9, 9, 3], [4, 3, 9, 9]), V, "page 3", "2 and 1", "its own"),
    WrongCall("length_past", numbers("cache_seqlens", [0, 19, 7]), V, "cache_seqlens is 19", "2", "block_table, 20"),
    WrongCall(
        "int_and_new_keys",
        both(without("cache_seqlens"), given(cache_seqlen=19)),
        *(V, "2 new keys after 19", "2", "keys of block_table, 20 .4 pages of 5 keys"),
    ),
]


def contents(call: Call) -> list[Tensor]:
    return [call[name].clone() for name in CACHES if call[name].device.type == "cpu"]


def assert_refused(wrong: WrongCall, call: Call) -> None:
    wrong.change(call)
    before = contents(call)
    with pytest.raises(wrong.error) as raised:
        forward(call)
    assert_says(str(raised.value), wrong.argument, wrong.given, f"allowed.*{wrong.allowed}")
    assert all(torch.equal(a, b) for a, b in zip(before, contents(call), strict=True))
    if "out" not in call:
        with pytest.raises(wrong.error):
            check(call, "triton")


@pytest.mark.parametrize("wrong", WRONG_CALLS, ids=str)
def test_a_wrong_call_is_named(wrong: WrongCall) -> None:
    assert_refused(wrong, valid_call())


@pytest.mark.parametrize("wrong", WRONG_PAGED_CALLS, ids=str)
def test_a_wrong_paged_call_is_named(wrong: WrongCall) -> None:
    assert_refused(wrong, valid_paged_call())


@pytest.mark.parametrize("call", [valid_call, valid_paged_call])
def test_the_valid_calls_are_valid(call: Callable[[], Call]) -> None:
    for backend in ("cpu", "triton"):
        check(call(), backend)
    out, lse = forward(call())
    assert out.shape == (BATCH, 2, NHEADS, HEADDIM)
    assert lse.shape == (BATCH, NHEADS, 2)
    assert set(call()) <= set(ARGUMENTS)


@pytest.mark.parametrize(
    ("checked", "device"),
    [("triton", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)],
)
def test_dtypes_that_only_the_cpu_has(checked: str, device: str) -> None:
    call = valid_call()
    call.update({name: x.double() for name, x in call.items() if x.is_floating_point()})
    check(call, "cpu")
    with pytest.raises(TypeError, match=f"q has dtype Double; allowed on the {checked} backend"):
        check({name: x.to(device) for name, x in call.items()}, checked)


def test_what_is_legal_without_new_keys() -> None:
    """Cache rows that repeat, expanded caches, and one tensor as both caches are only read."""
    call = valid_call()
    without("k", "v", *ROTARY, "cache_leftpad")(call)
    call["cache_batch_idx"] = ints(1, 1, 1)
    forward(call)
    forward({**call, "v_cache": call["k_cache"]})
    expanded(*CACHES)(call)
    forward(call)


def test_caches_that_alternate_in_one_tensor_are_apart() -> None:
    for dim in (2, 3):  # [batch, capacity, 2, heads, headdim], [batch, capacity, heads, 2, headdim]
        memory = torch.zeros(BATCH, CAPACITY, NHEADS_K, HEADDIM, dtype=torch.float16)
        both_caches = torch.stack([memory, memory], dim=dim)
        k_cache, v_cache = both_caches.unbind(dim)
        forward({**valid_call(), "k_cache": k_cache, "v_cache": v_cache})
