"""flash_attn_with_kvcache: the curated cases, random cases, and what is the same bit for bit.

FLASH_ATTN_MINI_RANDOM_CASES sets the number of random cases per backend.
"""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_with_kvcache

from ..conftest import DTYPES
from ..support.kvcache_cases import (
    BY_NAME,
    KVCACHE_CASES,
    LARGE_KVCACHE_CASES,
    SMALL_KVCACHE_CASES,
    CacheCall,
    KvCacheCase,
    make_call,
)
from ..support.kvcache_checks import bits, check_kvcache, copied, of_rows, run, varlen_results
from ..support.poison import memory_shortage
from ..support.random_kvcache import TMA_LAYOUTS, random_kvcache, simpler_kvcache
from ..support.random_loop import check_random_cases, each_chunk

COUNT = {"cpu": 600, "cuda": 2000, "triton": 200}  # triton compiles for each combination of options


@pytest.mark.parametrize("case", KVCACHE_CASES, ids=str)
def test_kvcache_is_as_accurate_as_pytorch(
    case: KvCacheCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_kvcache(case, backend, device, dtype, seed, described_seed)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", SMALL_KVCACHE_CASES, ids=str)
def test_small_kvcache_case_runs_under_compute_sanitizer(case: KvCacheCase, seed: int, described_seed: str) -> None:
    check_kvcache(case, "cuda", "cuda", torch.float16, seed, described_seed)


@pytest.mark.parametrize("case", LARGE_KVCACHE_CASES, ids=str)
def test_kvcache_offsets_beyond_31_bits(
    case: KvCacheCase, backend: str, device: str, seed: int, described_seed: str
) -> None:
    shortage = memory_shortage(1.2 * case.memory_gib, device)
    if shortage:
        pytest.skip(shortage)
    check_kvcache(case, backend, device, torch.float16, seed, described_seed)


# ---- random cases ---------------------------------------------------------------------------------------------------


@each_chunk
def test_random_kvcache_cases(chunk: int, backend: str, device: str, seed: int, described_seed: str) -> None:
    def check(case: KvCacheCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
        call, results = check_kvcache(case, backend, device, dtype, seed, described_seed)
        if case.num_splits == 1 and not case.rotary_dim and not why_bits_may_differ(call, backend):
            assert_bits_of_varlen(call, results, backend)

    drawn = partial(random_kvcache, is_long=backend != "cpu", is_square=backend == "cuda")
    check_random_cases(drawn, simpler_kvcache, check, DTYPES[backend], COUNT[backend], seed, described_seed)


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_random_cases_have_every_option(is_long: bool) -> None:
    cases = [random_kvcache(random.Random(seed), is_long) for seed in range(300)]
    assert all(case.is_possible for case in cases)
    for field, values in {
        "lengths_as": {"tensor", "int", "none"},
        "seqlen_new": {None, 0, 1},
        "alibi": {None, "heads", "batch"},
        "page_size": {0, 1, 16, 64, 256},
        "num_splits": {0, 1},
        "causal": {True, False},
        "rotary_interleaved": {True, False},
    }.items():
        assert values <= {getattr(case, field) for case in cases}, field
    for field in ("leftpad", "spare_rows", "softcap", "rotary_dim", "split_keys", "softmax_scale"):
        assert any(getattr(case, field) for case in cases), field
        assert not all(getattr(case, field) for case in cases), field
    assert {0, 1} & {length for case in cases for length in case.lengths}
    assert any(case.rotary_dim and case.rotary_dim < case.headdim for case in cases)
    assert any(case.cache_layout not in (None, case.layout) for case in cases)
    scales = [case.softmax_scale for case in cases if case.softmax_scale is not None]
    assert min(scales) < 0.0 < max(scales)
    assert 0.0 in scales


def has_many_rows(case: KvCacheCase) -> bool:
    """True if cache_kernel of choose_kernel.h takes Hopper's kernel for many rows, given enough SMs."""
    return (
        case.headdim % 8 == 0
        and case.headdim > 32
        and case.group_rows >= (17 if case.headdim > 64 else 33)
        and case.alibi is None
        and case.num_splits == case.split_keys == 0
        and case.page_size % 8 == 0
        and not (case.page_size and case.leftpad)
        and {case.layout, case.cache_layout or case.layout} <= set(TMA_LAYOUTS)
    )


def test_random_cases_reach_every_kernel_of_hopper() -> None:
    cases = [random_kvcache(random.Random(seed)) for seed in range(300)]
    many = [case for case in cases if has_many_rows(case)]
    assert len(many) >= 60
    assert max(max(case.totals) for case in many) > 2000
    assert {case.page_size > 0 for case in many} == {False, True}
    one_row = [case for case in cases if (case.batch, case.nheads_k) == (1, 8) and case.group_rows <= 16]
    assert {case.keys > 16 * 512 for case in one_row} == {False, True}, "clusters, and wide CTAs"


# ---- the same, bit for bit ------------------------------------------------------------------------------------------


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for name, a, b in zip(("out", "softmax_lse"), got, expected, strict=True):
        different = (bits(a.contiguous()) != bits(b.contiguous())).nonzero()
        assert len(different) == 0, f"{name} of {what}: {len(different)} elements differ, first at {different[0]}"


def is_aligned(x: Tensor) -> bool:
    """True if each row begins at a multiple of 16 bytes."""
    return all(at * x.element_size() % 16 == 0 for at in (x.shape[-1], *x.stride()[:-1])) and x.data_ptr() % 16 == 0


def why_bits_may_differ(call: CacheCall, backend: str) -> str:
    """Why one split need not give the bits of flash_attn_varlen_func; empty where it must."""
    if backend != "cuda":
        return ""
    if not all(is_aligned(x) for x in (call.q, call.k_cache, call.v_cache)):
        return "flash_attn_varlen_func copies what is not aligned and a KV cache is never copied: other kernels"
    if call.case.page_size and call.case.leftpad is not None:
        return "pages have a kernel of their own, and flash_attn_varlen_func has no left padding in pages"
    return ""


def assert_bits_of_varlen(call: CacheCall, results: tuple[Tensor, Tensor], backend: str) -> None:
    is_paged = call.case.page_size > 0
    if backend != "cuda" or not is_paged:
        assert_equal(results, varlen_results(call, backend, paged=False), "flash_attn_varlen_func")
    if is_paged and call.case.leftpad is None:
        assert_equal(results, varlen_results(call, backend, paged=True), "flash_attn_varlen_func with a block_table")


@pytest.mark.parametrize("case", [case for case in KVCACHE_CASES if not case.rotary_dim], ids=str)
def test_one_split_gives_the_bits_of_varlen(
    case: KvCacheCase, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    call = make_call(case, dtype, device, seed)
    reason = why_bits_may_differ(call, backend)
    if reason:
        pytest.skip(reason)
    assert_bits_of_varlen(call, run(call, backend, num_splits=1, split_keys=0), backend)


@pytest.mark.parametrize("split_keys", [16, 64, 100])
@pytest.mark.parametrize(
    "name",
    ["decode", "chunk", "mqa", "headdim_33", "leftpad", "batch_idx", "pages_7", "pages_leftpad", "together", "long"],
)
def test_with_split_keys_a_row_does_not_depend_on_the_others(
    name: str, split_keys: int, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    case = BY_NAME[name]
    call = make_call(case, dtype, device, seed)
    keywords = {"num_splits": 0, "split_keys": split_keys}

    def of(rows: list[int]) -> tuple[Tensor, Tensor]:
        """The results of these rows as a batch, on fresh caches."""
        part = of_rows(call, rows)
        part.k_cache, part.v_cache = copied(call.k_cache, call.v_cache)
        return run(part, backend, **keywords)

    rows = list(range(case.batch))
    out, lse = of(rows)
    for b in rows:
        assert_equal(of([b]), (out[b : b + 1], lse[b : b + 1]), f"row {b} alone")
    backwards = of(rows[::-1])
    assert_equal(backwards, (out.flip(0), lse.flip(0)), "the batch in reverse order")


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("name", ["decode", "chunk", "long", "pages_7", "together", "many_rows_tiles"])
def test_a_call_is_repeatable(
    name: str, num_splits: int, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    call = make_call(BY_NAME[name], dtype, device, seed)
    expected = run(call, backend, num_splits=num_splits, split_keys=0)
    for _ in range(10):  # appends the same keys again
        assert_equal(run(call, backend, num_splits=num_splits, split_keys=0), expected, "the same call")


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_an_int_length_equals_a_tensor_of_it(
    num_splits: int, backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    for name in ("int_length", "int_zero", "pages_int"):
        case = BY_NAME[name]
        call, other = (make_call(case, dtype, device, seed) for _ in range(2))
        other.lengths = torch.full((case.batch,), case.lengths[0], dtype=torch.int32, device=device)
        assert_equal(run(call, backend, num_splits=num_splits), run(other, backend, num_splits=num_splits), name)
        assert torch.equal(bits(call.k_cache), bits(other.k_cache))


def test_one_call_is_append_then_attend(backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    """A call with new keys gives the bits of a copy into the cache and a call that only reads it."""
    case = BY_NAME["chunk"]
    call, other = (make_call(case, dtype, device, seed) for _ in range(2))
    got = run(call, backend, num_splits=1)
    for b in range(case.batch):
        for cache, new in zip((other.k_cache, other.v_cache), other.new, strict=True):
            cache[other.appended(b)] = new[b]
    totals = torch.tensor(case.totals, dtype=torch.int32, device=device)
    other.new = (None, None)
    assert_equal(got, run(other, backend, num_splits=1, cache_seqlens=totals), "the call that reads")
    assert torch.equal(bits(call.v_cache), bits(other.v_cache))


@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}, {"num_splits": 3}, {"split_keys": 64}], ids=str)
@pytest.mark.parametrize(("seqlen_q", "length"), [(1, 1), (1, 500), (3, 200), (40, 200)])
def test_no_nan_is_hidden(
    seqlen_q: int, length: int, splits: dict[str, int], backend: str, device: str, seed: int
) -> None:
    """A NaN of q or k reaches its rows, even where a part of the keys has no score but NaN, and no other row."""
    draw = torch.Generator().manual_seed(seed)
    dtype = DTYPES[backend][0]
    q, k, v = (
        torch.randn(2, s, h, 64, generator=draw).to(device, dtype) for s, h in ((seqlen_q, 4), (512, 2), (512, 2))
    )
    lengths = torch.tensor([length, 37], dtype=torch.int32, device=device)

    def attend(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, return_softmax_lse=True, backend=backend, **splits
        )
        return out.transpose(1, 2), lse

    expected = attend(q, k)
    row, head, key = (int(torch.randint(size, (), generator=draw)) for size in (seqlen_q, 4, length))
    bad_q, bad_k = q.clone(), k.clone()
    bad_q[0, row, head, 5] = math.nan
    bad_k[0, key, head // 2, 5] = math.nan
    spoiled = torch.zeros(2, 2, 4, seqlen_q, dtype=torch.bool, device=device)
    spoiled[0, 0, head, row] = True
    spoiled[1, 0, head // 2 * 2 : head // 2 * 2 + 2] = True
    for inputs, is_spoiled in (((bad_q, k), spoiled[0]), ((q, bad_k), spoiled[1])):
        for got, clean in zip(attend(*inputs), expected, strict=True):
            assert got[is_spoiled].isnan().all(), f"{int(got[is_spoiled].isfinite().sum())} elements hide NaN"
            torch.testing.assert_close(got[~is_spoiled], clean[~is_spoiled], rtol=1e-2, atol=1e-2)


def test_step_by_step_is_as_accurate_as_at_once(backend: str, device: str, seed: int, described_seed: str) -> None:
    """A sequence decoded key by key: each step sees what the steps before it wrote."""
    draw = torch.Generator().manual_seed(seed)
    dtype = DTYPES[backend][0]
    q, k, v = (torch.randn(2, 20, h, 64, generator=draw).to(device, dtype) for h in (4, 2, 2))
    k_cache, v_cache = (torch.full((2, 20, 2, 64), float("nan"), dtype=dtype, device=device) for _ in range(2))
    steps = [
        flash_attn_with_kvcache(
            *(q[:, i : i + 1], k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1]),
            cache_seqlens=i,
            causal=True,
            backend=backend,
        )
        for i in range(20)
    ]
    assert torch.equal(k_cache, k)
    assert torch.equal(v_cache, v)
    whole = flash_attn_with_kvcache(
        *(q, torch.zeros_like(k), torch.zeros_like(v), k, v), cache_seqlens=0, causal=True, backend=backend
    )
    torch.testing.assert_close(torch.cat(steps, 1).double(), whole.double(), rtol=1e-2, atol=1e-2)
