"""The cpu backend with a KV cache through `_C.fwd_kvcache`: which bits depend on what, splits over keys, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C

from ..conftest import CPU_DTYPES
from ..support.bounds import assert_forward_accurate
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.kvcache_calls import Call, filled_call, forward
from ..support.threads import number_of_threads_kept

THREADS = (1, 2, 5)
SPLITS: list[Call] = [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_keys": 64}, {"split_keys": 100}]
OPTIONS: dict[str, Call] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_size_left": 130, "window_size_right": 3},
    "softcap": {"softcap": 3.0},
    "negative_scale": {"softmax_scale": -0.2},
}
each_dtype = pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_accurate(call: Call, result: tuple[Tensor, Tensor], case: str) -> None:
    """Each sequence against the reference on its own keys."""
    out, lse = result
    window = (call.get("window_size_left", -1), call.get("window_size_right", -1))
    causal = call.get("is_causal", False)
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        k, v = (call[name][b : b + 1, :length] for name in ("k_cache", "v_cache"))
        assert_forward_accurate(
            *(call["q"][b : b + 1], k, v, out[b : b + 1], lse[b : b + 1]),
            case=f"{case} sequence {b} of {length} keys",
            causal=causal,
            window_size=(window[0], 0) if causal else window,
            softcap=call.get("softcap", 0.0),
            softmax_scale=call.get("softmax_scale"),
        )


@each_options
@each_dtype
def test_splits_over_keys_are_accurate(
    dtype: torch.dtype, options: Call, draw: torch.Generator, described_seed: str
) -> None:
    for q_shape, nheads_k in (((1, 4, 64), 4), ((1, 6, 40), 2), ((3, 5, 128), 1), ((50, 2, 16), 1)):
        call = {**filled_call([0, 1, 700], q_shape, nheads_k, 720, dtype, draw), **options}
        for splits in SPLITS:
            assert_accurate({**call, **splits}, forward(call, **splits), f"{q_shape} {splits} {described_seed}")


@each_options
@each_dtype
def test_one_split_has_the_bits_of_the_varlen_forward(dtype: torch.dtype, options: Call, draw: torch.Generator) -> None:
    lengths, pads = [0, 3, 97, 500], [0, 1, 90, 11]
    for seqlen_q, nheads, nheads_k in ((1, 4, 4), (1, 8, 1), (3, 4, 2), (40, 3, 1)):
        call = {**filled_call(lengths, (seqlen_q, nheads, 48), nheads_k, 512, dtype, draw), **options}
        call["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
        k, v = (
            torch.cat([call[name][b, pad:length] for b, (pad, length) in enumerate(zip(pads, lengths, strict=True))])
            for name in ("k_cache", "v_cache")
        )
        cu_k = torch.tensor([0, *(n - p for n, p in zip(lengths, pads, strict=True))]).cumsum(0).int()
        cu_q = torch.arange(5, dtype=torch.int32) * seqlen_q
        order = ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap")
        defaults = {"softmax_scale": 48**-0.5, "is_causal": False, "softcap": 0.0}
        scale, causal, left, right, softcap = ({**defaults, **options}.get(name, -1) for name in order)
        out, lse, *_ = _C.varlen_fwd(
            *(call["q"].flatten(0, 1), k, v, None, cu_q, cu_k, None, None, None, None, seqlen_q, 512, 0.0, scale),
            *(False, causal, left, right, softcap, False, None),
        )
        varlen = out.unflatten(0, (4, seqlen_q)), lse.unflatten(1, (4, seqlen_q)).transpose(0, 1)
        assert same_bits(forward(call, num_splits=1), varlen), (seqlen_q, nheads, nheads_k)


@each_dtype
@number_of_threads_kept()
def test_bits_depend_neither_on_threads_nor_on_the_other_sequences(dtype: torch.dtype, draw: torch.Generator) -> None:
    lengths = [1100, 30, 577]  # without a choice: 2, 1 and 1 splits
    for q_shape, nheads_k in (((1, 4, 64), 4), ((2, 6, 32), 1), ((40, 2, 24), 2)):
        call = filled_call(lengths, q_shape, nheads_k, 1200, dtype, draw)
        for splits in SPLITS:
            results = []
            for threads in THREADS:
                torch.set_num_threads(threads)
                results.append(forward(call, **splits))
                assert same_bits(results[0], results[-1]), (q_shape, splits, threads)
            for b in range(len(lengths)):
                alone = {name: x[b : b + 1] for name, x in call.items()}
                assert same_bits(forward(alone, **splits), tuple(x[b : b + 1] for x in results[0])), (splits, b)


# On AMX, groups of up to 8 rows run on other arithmetic than groups of more.
@pytest.mark.parametrize(("nheads", "alone"), [(64, 16), (8, 1), (7, 1)])
@each_dtype
def test_a_row_has_its_bits_whatever_the_number_of_rows(
    dtype: torch.dtype, nheads: int, alone: int, draw: torch.Generator
) -> None:
    """Blocks of many rows and of few run on different loops."""
    size = 1 if dtype != torch.bfloat16 else alone
    for headdim in (1, 17, 128, 200):
        call = filled_call([333], (1, nheads, headdim), 1, 333, dtype, draw)
        out, lse = forward(call)
        for head in range(0, nheads, size):
            heads = slice(head, head + size)
            part = forward({**call, "q": call["q"][:, :, heads]})
            assert same_bits(part, (out[:, :, heads], lse[:, heads])), (headdim, heads)


def test_more_splits_than_fit_in_memory_at_once(draw: torch.Generator, described_seed: str) -> None:
    """One state of 300 rows and 256 columns is 0.3 MB; splits of one key would need 700 of them."""
    call = filled_call([700], (100, 3, 256), 1, 700, torch.float32, draw)
    assert_accurate(call, forward(call, split_keys=1), described_seed)


@each_dtype
def test_infinite_values_stay_with_their_own_keys(dtype: torch.dtype, draw: torch.Generator) -> None:
    """A key outside the window of a query adds nothing to its output, even if its value is infinite."""
    call = filled_call([600], (3, 2, 32), 1, 600, dtype, draw)
    call.update(window_size_left=400, window_size_right=0)  # query i sees the keys from 197 + i on
    expected = [forward(call, **splits) for splits in SPLITS]
    call["v_cache"][0, :198] = torch.inf
    call["v_cache"][0, 5] = torch.nan
    for splits, (out, lse) in zip(SPLITS, expected, strict=True):
        out_now, lse_now = forward(call, **splits)
        assert same_bits((out_now[:, 1:], lse_now), (out[:, 1:], lse)), splits
        assert not out_now[:, 0].isfinite().any(), splits


@each_dtype
def test_a_query_has_its_bits_whatever_the_other_queries_see(dtype: torch.dtype, draw: torch.Generator) -> None:
    """With a window the first key of a block of rows is that of its first row.

    9 queries fill more than one vector of AVX2. In bfloat16 they run on another kernel than one query if there is AMX.
    """
    many = 8 if dtype == torch.bfloat16 else 9
    for headdim, length, queries in ((64, 333, 4), (40, 207, 4), (40, 207, many)):
        call = filled_call([length], (queries, 2, headdim), 2, 400, dtype, draw)
        call.update(window_size_left=37, window_size_right=0, num_splits=1)
        out, lse = forward(call)
        for query in range(queries):
            own_length = torch.tensor([length - queries + 1 + query]).int()
            alone = forward({**call, "q": call["q"][:, query : query + 1], "cache_seqlens": own_length})
            assert same_bits(alone, (out[:, query : query + 1], lse[:, :, query : query + 1])), (headdim, query)


@each_dtype
def test_keys_outside_the_window_may_be_infinite(dtype: torch.dtype, draw: torch.Generator) -> None:
    call = filled_call([600], (3, 2, 32), 1, 600, dtype, draw)
    call.update(window_size_left=400, window_size_right=0)
    expected = [forward(call, **splits) for splits in SPLITS]
    call["k_cache"][0, :197] = torch.nan
    call["k_cache"][0, 100:150] = torch.inf
    for splits, result in zip(SPLITS, expected, strict=True):
        assert same_bits(forward(call, **splits), result), splits


ISA_SCRIPT = """
import itertools
from tests.support.kvcache_calls import filled_call, forward
from tests.kernels.test_cpu_kvcache import OPTIONS, SPLITS, assert_accurate

draw = torch.Generator().manual_seed(seed)
dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
checked = 0
for dtype, options in itertools.product(dtypes, OPTIONS.values()):
    for q_shape, nheads_k in (((1, 4, 64), 4), ((1, 2, 33), 2), ((2, 6, 33), 1)):
        call = {**filled_call([0, 700, 1111], q_shape, nheads_k, 1200, dtype, draw), **options}
        for splits in SPLITS:
            assert_accurate({**call, **splits}, forward(call, **splits), f"{q_shape} {splits} {level} {seed}")
            checked += 1
print("checked", checked)
"""


@each_lesser_level
def test_splits_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, ISA_SCRIPT)


# ---- append ----------------------------------------------------------------------------------------------------------


def appending_call(dtype: torch.dtype, draw: torch.Generator, **changes: Any) -> Call:
    call = filled_call([5, 0, 60], (2, 4, 32), 2, 64, dtype, draw)
    new = [torch.randn(3, 2, 2, 32, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2)]
    return {**call, "k": new[0], "v": new[1], **changes}


@each_dtype
def test_new_keys_are_attended_to_in_the_call_that_appends_them(dtype: torch.dtype, draw: torch.Generator) -> None:
    call = appending_call(dtype, draw, is_causal=True)
    appended = forward(call)
    lengths = call["cache_seqlens"] + 2
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(call["k_cache"][b, length - 2 : length], call["k"][b])
        assert torch.equal(call["v_cache"][b, length - 2 : length], call["v"][b])
        assert call["k_cache"][b, length:].isnan().all()
    again = {**call, "k": None, "v": None, "cache_seqlens": lengths}
    assert same_bits(appended, forward(again))


def test_new_keys_are_appended_without_queries(draw: torch.Generator) -> None:
    call = appending_call(torch.float32, draw)
    call["q"] = call["q"][:, :0]
    out, lse = forward(call)
    assert out.shape == (3, 0, 4, 32)
    assert lse.shape == (3, 4, 0)
    assert torch.equal(call["k_cache"][0, 5:7], call["k"][0])


def test_a_cache_of_capacity_0_gives_rows_without_keys(draw: torch.Generator) -> None:
    call = filled_call([0, 0], (3, 2, 8), 1, 0, torch.float32, draw)
    out, lse = forward(call, out=torch.full((2, 3, 2, 8), torch.nan))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
