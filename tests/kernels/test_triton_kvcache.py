"""The Triton kernels for a KV cache: cases of every option, what is the same bit for bit, splits, wrong tensors.

The first test runs the others in Triton's interpreter where there is no GPU. test_kvcache.py runs the full list of
cases and random ones on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import KvCache, Sequences
from flash_attn_mini.reference import attention_kvcache_reference

from ..support.bounds import assert_forward_accurate, forward_accuracy, refuse
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.kvcache_cases import BY_NAME, CacheCall, KvCacheCase, integers, make_call
from ..support.kvcache_checks import bits, check_results, copied, described, of_rows
from ..support.poison import Guard
from ..support.triton_calls import DEVICE, HAS_GPU, forward, gpu, make_options, runs_triton
from ..support.varlen_cases import VARLEN_CASES, expectation_options, make_batch

# The cases that the interpreter has time for.
IN_THE_INTERPRETER = (
    *("decode", "read_only", "full", "int_length", "no_keys", "to_the_end", "speculative", "more_queries"),
    *("fewer_queries", "no_new_keys", "one_row", "gqa_3", "gqa_chunk", "headdim_1", "headdim_33", "headdim_256"),
    *("leftpad", "leftpad_all", "leftpad_window", "batch_idx_leftpad", "pages_1", "pages_7", "pages_64"),
    *("pages_leftpad", "pages_shared", "pages_full", "pages_int", "window", "window_causal", "softcap", "alibi_batch"),
    *("rotary", "rotary_neox", "rotary_full", "rotary_window", "rotary_odd", "together", "splits_1", "splits_3"),
    *("splits_many", "split_keys", "split_keys_leftpad", "split_keys_pages", "layout_bhsd", "layout_packed"),
    *("layout_pages_bhsd", "no_queries", "negative_scale"),
)
IN_BFLOAT16 = ("rotary", "together")
PAGE_SIZES = (1, 3, 50)
thorough = pytest.mark.thorough


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def cases_and_dtypes() -> list[Any]:
    return [
        pytest.param(BY_NAME[name], dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for dtype, names in ((torch.float16, IN_THE_INTERPRETER), (torch.bfloat16, IN_BFLOAT16))
        for name in names
    ]


def run(call: CacheCall, **others: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the launcher, without the checks of arguments; ``others`` replace fields of KvCache."""
    from flash_attn_mini.backends.triton import kvcache

    case = call.case
    scale = case.headdim**-0.5 if case.softmax_scale is None else case.softmax_scale
    options = make_options(scale, case.causal, case.window_size, case.softcap, call.alibi_slopes)
    if case.causal:
        options = options._replace(window_size_right=0)
    lengths = call.lengths
    cache = KvCache(
        *call.new,
        *call.rotary,
        cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
        cache_seqlen=lengths if isinstance(lengths, int) else -1,
        cache_batch_idx=call.cache_batch_idx,
        cache_leftpad=call.cache_leftpad,
        block_table=call.block_table,
        rotary_interleaved=case.rotary_interleaved,
        num_splits=case.num_splits,
        split_keys=case.split_keys,
    )
    return kvcache.forward_kvcache(call.q, call.k_cache, call.v_cache, cache._replace(**others), options)


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), cases_and_dtypes())
def test_kvcache_case_is_as_accurate_as_pytorch(
    case: KvCacheCase, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    call = make_call(case, dtype, DEVICE, seed)
    guard = Guard(call.q, *(x for x in call.new if x is not None))
    before = copied(call.k_cache, call.v_cache)
    results = run(call)
    guard.check()
    check_results(call, before, results, described(case, dtype, "triton", described_seed))


@runs_triton
@pytest.mark.parametrize(
    "changes", [{"num_splits": 1}, {"num_splits": 2}, {"page_size": 16}, {"page_size": 7, "split_keys": 16}], ids=str
)
def test_keys_of_more_columns_than_a_tile(changes: dict[str, Any], seed: int, described_seed: str) -> None:
    """The columns past 512 have a tile of their own."""
    case = dataclasses.replace(BY_NAME["speculative"], headdim=576, own_headdim_v=48, rotary_dim=16, **changes)
    call = make_call(case, torch.float16, DEVICE, seed)
    before = copied(call.k_cache, call.v_cache)
    check_results(call, before, run(call), described(case, torch.float16, "triton", described_seed))


# ---- bit for bit ----------------------------------------------------------------------------------------------------


@runs_triton
@pytest.mark.parametrize(
    ("name", "paged"),
    [
        *(("speculative", False), ("pages_leftpad", False), ("window", False), ("batch_idx_leftpad", False)),
        *(("alibi_batch", False), ("alibi_batch", True), ("pages_shared", True)),
    ],
)
def test_one_split_gives_the_bits_of_variable_length(name: str, paged: bool, seed: int) -> None:
    """paged: the function of variable length reads the same pages, otherwise the same keys one after the other."""
    case = BY_NAME[name]
    call = make_call(case, torch.float16, DEVICE, seed)
    results = run(call, num_splits=1)
    starts = case.leftpad or (0,) * case.batch
    lengths = [total - start for total, start in zip(case.totals, starts, strict=True)]
    cu_q = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.seqlen_q
    cu_k = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    if paged:
        k, v, table = call.k_cache, call.v_cache, call.block_table
    else:
        slots = [torch.cat(parts) for parts in zip(*(call.visible(b) for b in range(case.batch)), strict=True)]
        k, v, table = call.k_cache[slots[0], slots[1]], call.v_cache[slots[0], slots[1]], None
    out, lse = forward(
        call.q.flatten(0, 1),
        k,
        v,
        sequences=Sequences(cu_q, cu_k, case.seqlen_q, max(lengths), table),
        softmax_scale=case.headdim**-0.5,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
        alibi_slopes=call.alibi_slopes,
    )
    lse = lse.view(case.nheads, case.batch, case.seqlen_q).transpose(0, 1)
    assert equal(results, (out.view(call.q.shape), lse))


@runs_triton
@pytest.mark.parametrize("name", ["split_keys", "split_keys_leftpad", "split_keys_pages", "window_causal"])
def test_a_row_with_split_keys_does_not_depend_on_the_batch(name: str, seed: int) -> None:
    case = dataclasses.replace(BY_NAME[name], seqlen_new=None)
    call = make_call(case, torch.float16, DEVICE, seed)
    out, lse = run(call, split_keys=48)
    for rows in ([2], [4, 0]):
        assert equal(run(of_rows(call, rows), split_keys=48), (out[rows], lse[rows]))


@runs_triton
@pytest.mark.parametrize(
    ("headdim", "page_size"),
    [
        pytest.param(64, 7, id="page_per_key"),
        pytest.param(64, 128, id="tiles_in_pages", marks=thorough),
        pytest.param(128, 16, id="page_per_key_d128", marks=thorough),
        pytest.param(128, 32, id="tiles_in_pages_d128"),
    ],
)
def test_pages_give_the_bits_of_a_cache_without_pages(headdim: int, page_size: int, seed: int) -> None:
    """A tile has 128 keys at head dim 64, and 32 keys at 128."""
    case = dataclasses.replace(BY_NAME["pages_7"], seqlen_new=None, page_size=page_size, headdim=headdim)
    if page_size != 7:
        case = dataclasses.replace(case, lengths=(300, 128, 200)[: case.batch], capacity=384)
    paged = make_call(case, torch.float16, DEVICE, seed)
    flat = dataclasses.replace(paged, block_table=None)
    flat.k_cache, flat.v_cache = (torch.zeros(case.batch, case.keys, *x.shape[2:]).to(x) for x in paged.tensors[1:3])
    for b in range(case.batch):
        slots = paged.visible(b)
        flat.k_cache[b, : case.totals[b]] = paged.k_cache[slots]
        flat.v_cache[b, : case.totals[b]] = paged.v_cache[slots]
    for num_splits in (0, 1, 3):
        assert equal(run(paged, num_splits=num_splits), run(flat, num_splits=num_splits))


# ---- splits ---------------------------------------------------------------------------------------------------------


def lengths_to_split(batch: int, draw: torch.Generator) -> Tensor:
    """Up to 300 keys; one sequence of 1000, one of 900, one of none."""
    lengths = torch.randint(0, 300, (batch,), generator=draw).int()
    lengths[7], lengths[18], lengths[19] = 1000, 900, 0
    return lengths.to(DEVICE)


@runs_triton
@pytest.mark.parametrize("window_left", [None, 500], ids=["all", "window"])
@pytest.mark.parametrize(("per_sequence", "split_keys"), [(3, 0), (4, 250)], ids=["num_splits", "split_keys"])
def test_splits_cover_every_key_once(
    per_sequence: int, split_keys: int, window_left: int | None, draw: torch.Generator
) -> None:
    from ..support import triton_probes

    batch, block_n, seqlen_q, capacity = 38, 64, 3, 1000
    lengths = lengths_to_split(batch, draw)
    units = batch * per_sequence
    found = torch.full((units, 5), -1, dtype=torch.int32, device=DEVICE)
    triton_probes.find_split_probe[(units,)](
        found, lengths, capacity, batch, seqlen_q, window_left, per_sequence, split_keys, block_n
    )
    parts: dict[int, list[list[int]]] = {}
    for sequence, *part in found.tolist():
        if part[0] < part[1]:
            parts.setdefault(sequence, []).append(part)
    assert sorted(parts) == list(range(batch))
    sizes = set()
    for b, length in enumerate(lengths.tolist()):
        _, counts, begins, ends = zip(*sorted(parts[b]), strict=True)
        first = 0 if window_left is None else max(length - seqlen_q - window_left, 0)
        step = split_keys or block_n
        assert begins == (first // step * step, *ends[:-1])
        assert ends[-1] == length
        assert set(counts) == {len(parts[b])}
        assert len(parts[b]) <= per_sequence
        sizes |= {end - begin for begin, end in zip(begins[:-1], ends[:-1], strict=True)}
    if split_keys:
        assert sizes == {split_keys}


@runs_triton
@pytest.mark.parametrize("window_left", [pytest.param(None, id="all", marks=thorough), pytest.param(500, id="window")])
@pytest.mark.parametrize(
    ("batch", "at_once", "most_pieces"),
    [(38, 64, 50), (38, 16, 50), (38, 16, 1), (20, 32, 1000)],
    ids=["read_once", "read_in_parts", "one_piece", "many_pieces"],
)
def test_pieces_cover_every_unit_once(
    batch: int, at_once: int, most_pieces: int, window_left: int | None, draw: torch.Generator
) -> None:
    """Their sizes differ by at most one unit, and the kernel finds the piece of each unit."""
    from ..support import triton_probes

    block_n, unit_keys, seqlen_q, capacity, nheads_k = 16, 32, 3, 1000, 3
    lengths = lengths_to_split(batch, draw)
    units = []  # of each sequence
    for length in lengths.tolist():
        first = 0 if window_left is None else max(length - seqlen_q - window_left, 0) // block_n * block_n
        units.append(max(1, -(-(length - first) // unit_keys)) * nheads_k)
    total = sum(units)
    found = torch.full((most_pieces, 6), -1, dtype=torch.int32, device=DEVICE)
    pieces_of = torch.full((total,), -1, dtype=torch.int32, device=DEVICE)
    triton_probes.find_piece_probe[(most_pieces,)](
        found, pieces_of, lengths, capacity, batch, nheads_k, seqlen_q, window_left, most_pieces,
        unit_keys, block_n, at_once, batch <= at_once,
    )  # fmt: skip
    used = [row for row in found.tolist() if row[3] > 0]
    assert len(used) == min(most_pieces, total // 2)
    end = 0
    expected = []
    for piece, (sequence, unit, begin, size, got_total, pieces) in enumerate(used):
        assert (begin, got_total, pieces) == (end, total, len(used))
        assert sum(units[:sequence]) + unit == begin
        assert 0 <= unit < units[sequence]
        end += size
        expected += [piece] * size
    assert end == total
    sizes = {row[3] for row in used}
    assert max(sizes) - min(sizes) <= 1
    assert pieces_of.tolist() == expected


@runs_triton
@pytest.mark.parametrize(
    "name",
    [
        *("more_queries", "leftpad_all", "pages_7"),
        *(pytest.param(name, marks=thorough) for name in ("decode", "pages_64", "window", "batch_idx_leftpad")),
    ],
)
def test_pieces_of_any_number_give_the_results_of_one_split(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of all heads, pieces of several heads and of parts of one, in tiles of 16 keys."""
    from flash_attn_mini.backends.triton import configs, kvcache
    from flash_attn_mini.backends.triton.recording import Recordings

    call = make_call(dataclasses.replace(BY_NAME[name], seqlen_new=None), torch.float16, DEVICE, seed)
    expected = run(call, num_splits=1)
    monkeypatch.setattr(kvcache, "_chosen", {})
    monkeypatch.setattr(kvcache, "splitkv_step", lambda *_, **__: 16)
    monkeypatch.setattr(kvcache, "splitkv_configs", lambda rows, *_, **__: [configs.tile(rows, 16, 4, 2, tma=False)])
    for most in (1, 2, 3, 7, 1000):
        monkeypatch.setattr(kvcache, "even_pieces", lambda *_, most=most: most)
        monkeypatch.setattr(kvcache, "RECORDINGS", Recordings())
        for got, right in zip(run(call), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3)


@runs_triton
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_every_first_configuration_has_the_step_of_its_tile(aligned: bool) -> None:
    """The launcher decides by splitkv_step whether the tiles of a kernel lie in pages."""
    from flash_attn_mini.backends.triton.configs import most_splitkv_rows, splitkv_configs, splitkv_step

    dims = [(d, d) for d in (16, 64, 128, 256, 512)] + [(256, 128), (16, 512), (512, 256)]
    for block_m, blocks, page_per_key in itertools.product((16, 32, 64, 128), dims, (True, False)):
        if block_m > most_splitkv_rows(*blocks):
            continue
        first, *_ = splitkv_configs(block_m, *blocks, 2, 232448, page_per_key=page_per_key, aligned=aligned)
        assert first.kwargs["BLOCK_N"] == splitkv_step(block_m, *blocks, aligned=aligned), (block_m, blocks)


@runs_triton
def test_even_pieces_cut_at_heads_of_equal_length() -> None:
    from flash_attn_mini.backends.triton.kvcache import even_pieces

    assert even_pieces(264, 128) == 256
    assert even_pieces(396, 8) == 392
    assert even_pieces(396, 512) == 396  # 256 pieces of two heads would leave a third of the programs out
    assert even_pieces(264, 512) == 256
    assert even_pieces(264, 256) == 256
    assert even_pieces(264, 200) == 264
    assert even_pieces(1, 3) == 1


@runs_triton
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_splits_of_large_scores_keep_their_weights(scale: float, seed: int, draw: torch.Generator) -> None:
    """Scores of 10^6 that differ by small integers. Float32 holds their maximum, but not its sum with a logarithm."""
    case = KvCacheCase("", "", (100,), 100, nheads=4, nheads_k=4, softmax_scale=scale, split_keys=48)
    call = make_call(case, torch.float16, DEVICE, seed)
    q, k, v = call.q, call.k_cache, call.v_cache
    q.fill_(128.0)
    k.fill_(128.0 * scale)
    q[..., -1] = 1.0
    k[..., -1] = torch.randint(-2, 3, k.shape[:-1], generator=draw).to(k)
    results = run(call)
    out, _ = forward_accuracy(q, k, v, *results, softmax_scale=scale)
    refuse([] if out.passed else [out], "")
    torch.testing.assert_close(results[1], torch.full_like(results[1], 63 * 128.0**2), rtol=1e-5, atol=0)


@runs_triton
@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        pytest.param({}, ["splitkv", "splitkv_combine"], id="chosen"),
        pytest.param({"num_splits": 1}, [""], id="one"),
        pytest.param({"num_splits": 2}, ["splitkv", "splitkv_combine"], id="two"),
        pytest.param({"split_keys": 1000}, ["splitkv"], id="one_by_size"),
    ],
)
def test_the_combine_kernel_runs_only_after_splits(
    options: dict[str, int], kernels: list[str], seed: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    call = make_call(BY_NAME["one_row"], torch.float16, DEVICE, seed)
    run(call, **options)
    capfd.readouterr()
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    run(call, **options)
    lines = capfd.readouterr().err.splitlines()
    names = [line.split()[1] for line in lines if "triton.flash_fwd" in line]
    assert names == [f"triton.flash_fwd_{kernel}_kernel".replace("__", "_") for kernel in kernels]


# ---- tensors on the device that are wrong: nothing outside of the tensors is read or written -------------------------


@runs_triton
@pytest.mark.parametrize("wrong", ["length", "page", "row"])
def test_new_keys_without_a_place_are_not_written(wrong: str, seed: int) -> None:
    """Sequence 1 has no place for all or some of its new keys. The others are appended as ever."""
    name = "batch_idx_leftpad" if wrong == "row" else "pages_chunk" if wrong == "page" else "fewer_queries"
    case = dataclasses.replace(BY_NAME[name], lengths=(50, 20), leftpad=None, seqlen_new=40, seqlen_q=3)
    call = make_call(case, torch.float16, DEVICE, seed)
    missing = range(40)
    if wrong == "length":
        call.lengths = integers((20, 40), DEVICE)  # the capacity is 64
        missing = range(24, 40)
        case = dataclasses.replace(case, lengths=(20, 40))
        call.case = case
    elif wrong == "page":
        assert call.block_table is not None
        call.block_table[1, 0] = call.k_cache.shape[0]  # keys 20 to 23; page_size is 24
        missing = range(4)
    else:
        assert call.cache_batch_idx is not None
        call.cache_batch_idx[1] = -1
    before = copied(call.k_cache, call.v_cache)
    for cache, new in zip(before, call.new, strict=True):
        assert new is not None
        for b in range(2):
            written = [i for i in range(40) if b == 0 or i not in missing]
            for i in written:
                slot = call.slots(b, case.lengths[b] + i, case.lengths[b] + i + 1)
                cache[slot] = new[b, i]
    run(call)
    for got, expected in zip((call.k_cache, call.v_cache), before, strict=True):
        assert torch.equal(bits(got._base), bits(expected._base))


@runs_triton
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_wrong_integers_read_inside_the_cache(num_splits: int, seed: int) -> None:
    """Lengths, paddings, cache rows and pages are clamped, as in csrc/common/sequence.h."""
    case = KvCacheCase("", "", (100, 100, 100, 100), 100, seqlen_q=3, lengths_as="tensor", spare_rows=1, causal=True)
    call = make_call(case, torch.float16, DEVICE, seed)
    call.k_cache.nan_to_num_(nan=1.0)
    call.v_cache.nan_to_num_(nan=1.0)
    huge = 2**31 - 1
    call.lengths, call.cache_leftpad = integers((huge, -5, 70, 60), DEVICE), integers((3, huge, 80, -huge), DEVICE)
    call.cache_batch_idx = integers((huge, 0, -huge, 2), DEVICE)
    given = [call.lengths, call.cache_leftpad, call.cache_batch_idx]
    results = run(call, num_splits=num_splits)
    call.lengths, call.cache_leftpad = integers((100, 0, 70, 60), DEVICE), integers((3, 0, 70, 0), DEVICE)
    call.cache_batch_idx = integers((4, 0, 0, 2), DEVICE)
    assert not any(torch.equal(x, y) for x, y in zip(given, (call.lengths, call.cache_leftpad), strict=False))
    assert equal(results, run(call, num_splits=num_splits))
    expected = attention_kvcache_reference(
        call.q, call.k_cache, call.v_cache, cache_seqlens=call.lengths, cache_batch_idx=call.cache_batch_idx,
        cache_leftpad=call.cache_leftpad, causal=True,
    )  # fmt: skip
    for got, true in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=2e-3, atol=2e-3)

    paged = make_call(
        dataclasses.replace(case, page_size=20, spare_rows=0, lengths=(100, 60), causal=False),
        torch.float16,
        DEVICE,
        seed,
    )
    assert paged.block_table is not None
    pool = paged.k_cache.shape[0]
    paged.block_table[:, 1], paged.block_table[:, 2] = huge, -huge
    paged.k_cache[[0, -1]], paged.v_cache[[0, -1]] = 0.5, 0.25
    results = run(paged, num_splits=num_splits)
    paged.block_table[:, 1], paged.block_table[:, 2] = pool - 1, 0
    assert equal(results, run(paged, num_splits=num_splits))
    assert results[0].isfinite().all()


@runs_triton
def test_empty_tensors(seed: int) -> None:
    """No sequence, no query, no capacity, no page: nothing is launched that could read them."""
    for lengths, capacity, changes in (
        ((), 8, {}),
        ((3, 0), 8, {"seqlen_q": 0}),
        ((0, 0), 0, {}),
    ):
        case = KvCacheCase("", "", lengths, capacity, **{"seqlen_q": 2, **changes})
        out, lse = run(make_call(case, torch.float16, DEVICE, seed))
        assert out.shape == (case.batch, case.seqlen_q, 4, 64)
        assert not out.any()
        assert (lse == -math.inf).all() or lse.numel() == 0


# ---- pages of any size, compilations --------------------------------------------------------------------------------


@runs_triton
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_variable_length_takes_pages_of_any_size(page_size: int, seed: int, described_seed: str) -> None:
    (case,) = (dataclasses.replace(c, page_size=page_size) for c in VARLEN_CASES if c.name == "pages_48")
    batch = make_batch(case, torch.float16, DEVICE, seed)
    sequences = Sequences(*batch.lengths, batch.block_table)
    out, lse = forward(batch.q, batch.k, batch.v, sequences=sequences, softmax_scale=case.headdim**-0.5)
    inputs = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
    expected = expectation_options(case, batch, torch.zeros(2, dtype=torch.int64))
    assert_forward_accurate(*inputs, out, lse, case=f"{case.shape}\n  {described_seed}", **expected)


@gpu
def test_no_length_compiles_another_kernel(seed: int) -> None:
    from flash_attn_mini.backends.triton import kvcache

    kernels = (
        kvcache.kvcache_append_kernel,
        kvcache.flash_fwd_splitkv_kernel,
        kvcache.flash_fwd_splitkv_combine_kernel,
    )
    assert HAS_GPU
    compiled = []
    for capacity, length, batch in ((1000, 900, 3), (1000, 1, 3), (4096, 16, 2), (777, 0, 7)):
        lengths = (length,) * batch
        case = dataclasses.replace(BY_NAME["int_length"], lengths=lengths, capacity=capacity, nheads=8)
        run(make_call(case, torch.float16, DEVICE, seed))
        compiled.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert compiled == compiled[:1] * 4
