"""A cache of latent vectors, as in DeepSeek's decoding: headdim 576, and v_cache is a view of 512 columns of k_cache.

On a Hopper GPU the cuda backend has a kernel for it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from flash_attn_mini import flash_attn_with_kvcache

from ..conftest import CPU_DTYPES, GPU_DTYPES, IS_HOPPER
from ..support.gpu_calls import capture
from ..support.kvcache_cases import SMALL_LATENT_CASES, KvCacheCase, make_call
from ..support.kvcache_checks import bits, check_kvcache, check_results, copied, described, run
from ..support.on_backends import gpu
from ..support.triton_calls import HAS_GPU

hopper = pytest.mark.skipif(HAS_GPU and not IS_HOPPER, reason="the kernel of latent caches needs a Hopper GPU")


def latent(name: str, why: str, lengths: tuple[int, ...] = (700, 5, 0, 130, 64), **options: Any) -> KvCacheCase:
    fixed = {"headdim": 576, "own_headdim_v": 512, "v_in_k": True}
    return KvCacheCase(name, why, lengths, **{"capacity": 720, "nheads": 16, "nheads_k": 1} | fixed | options)


CASES = [
    latent("heads_16", "16 heads are a tile of the narrow kernel"),
    latent("heads_17", "one row more than the narrow kernel takes", nheads=17),
    latent("heads_128", "two tiles of rows", nheads=128),
    latent("heads_5", "a number of heads that divides no tile", nheads=5),
    latent("heads_6_on_2", "two latent heads", nheads=6, nheads_k=2),
    latent("queries", "several queries", seqlen_q=3, causal=True),
    latent("rows_70", "the last tile of rows has six", nheads=10, seqlen_q=7, causal=True),
    latent("rows_16", "four queries of four heads", nheads=4, seqlen_q=4, causal=True),
    latent("window", "keys at both ends are hidden", seqlen_q=9, window_size=(100, 3)),
    latent("window_rows_15", "the same for few rows", nheads=3, seqlen_q=5, window_size=(100, 3)),
    latent("narrow", "windows of less than a key block", seqlen_q=5, window_size=(7, 0)),
    latent("narrow_rows_15", "the same for few rows", nheads=3, seqlen_q=5, window_size=(7, 0)),
    latent("softcap", "a cap", softcap=3.0),
    latent("scale", "a negative scale", softmax_scale=-0.1),
    latent("wide", "logits far from 0", softmax_scale=1.5),
    latent("wide_rows_64", "the same for many rows", softmax_scale=1.5, nheads=64),
    latent("pages_64", "a page is a key block", page_size=64),
    latent("pages_8", "eight pages in a key block", page_size=8, nheads=32),
    latent("pages_8_rows_16", "four pages in a key block", page_size=8),
    latent("pages_200", "key blocks across pages", page_size=200, seqlen_q=2, causal=True),
    latent("leftpad", "left padding", leftpad=(3, 5, 0, 129, 0)),
    latent("batch_idx", "rows of the cache in another order", spare_rows=3),
    latent("bhsd", "strides of another layout", nheads=4, nheads_k=2, cache_layout="bhsd"),
    latent("long", "one sequence on all SMs", (9_000,), capacity=9_001, nheads=8),
    latent("full", "lengths from the cache", (96, 96), capacity=96, lengths_as="none"),
    latent("int", "one length", (70, 70), capacity=96, lengths_as="int"),
    latent("no_keys", "rows without a key", (0, 0, 3), capacity=64, seqlen_q=5, causal=True),
    *SMALL_LATENT_CASES,
    latent("many", "more sequences than SMs", tuple(range(300)), capacity=300, nheads=4),
]  # fmt: skip
ON_CUDA = [pytest.param(case, "cuda", dtype, marks=[gpu, hopper]) for case in CASES for dtype in GPU_DTYPES]
ON_TRITON = [pytest.param(case, "triton", dtype, marks=gpu) for case in CASES[:-1:3] for dtype in GPU_DTYPES]
ON_CPU = [pytest.param(case, "cpu", dtype) for i, case in enumerate(CASES[:-1]) for dtype in (CPU_DTYPES[i % 4],)]


@pytest.mark.parametrize(("case", "kernels", "dtype"), ON_CPU + ON_CUDA + (ON_TRITON if HAS_GPU else []), ids=str)
def test_results(case: KvCacheCase, kernels: str, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_kvcache(case, kernels, "cpu" if kernels == "cpu" else "cuda", dtype, seed, described_seed)


def random_latent(draw: random.Random) -> KvCacheCase:
    """A case that the kernel takes, with any of its options."""
    page_size = draw.choice((0, 0, 8, 16, 64, 8 * draw.randint(1, 40)))
    capacity = draw.choice((draw.randint(1, 200), draw.randint(1, 3_000)))
    batch = draw.choice((1, 2, 3, draw.randint(1, 20)))
    nheads_k = draw.choice((1, 1, 1, 2, 3))
    lengths = tuple(draw.choice((0, capacity, draw.randint(0, capacity))) for _ in range(batch))
    side = (-1, 0, draw.randint(1, 20), draw.randint(20, 300))
    return latent(
        "random",
        "drawn at random",
        lengths,
        capacity=capacity,
        seqlen_q=draw.choice((1, 1, 2, draw.randint(1, 40))),
        nheads=nheads_k * draw.choice((1, 3, 4, 16, 20, 64, 128)),
        nheads_k=nheads_k,
        page_size=page_size,
        leftpad=None if page_size or draw.random() < 0.7 else tuple(draw.randint(0, n) for n in lengths),
        spare_rows=draw.randint(1, 4) if not page_size and draw.random() < 0.3 else 0,
        causal=draw.random() < 0.5,
        window_size=(draw.choice(side), draw.choice(side)) if draw.random() < 0.3 else (-1, -1),
        softcap=draw.choice((0.5, 5.0, 30.0)) if draw.random() < 0.25 else 0.0,
        softmax_scale=draw.choice((None, None, draw.uniform(-0.5, 0.5))),
        cache_layout=draw.choice((None, "bhsd")),
    )


@gpu
@hopper
@pytest.mark.parametrize("number", range(200))
def test_random(number: int, seed: int, described_seed: str) -> None:
    case = random_latent(random.Random(seed))
    check_kvcache(case, "cuda", "cuda", GPU_DTYPES[number % 2], seed, described_seed)


@gpu
@hopper
@pytest.mark.parametrize("page_size", [0, 64])
def test_a_graph_replays_with_other_lengths(page_size: int, seed: int, described_seed: str) -> None:
    case = latent("replay", "lengths change", (700, 5, 0, 130), page_size=page_size)
    call = make_call(case, torch.bfloat16, "cuda", seed)
    graph, results = capture(lambda: run(call, "cuda"))
    for lengths in ((700, 5, 0, 130), (0, 0, 700, 1), (64, 64, 64, 64)):
        other = dataclasses.replace(case, lengths=lengths)
        new = make_call(other, torch.bfloat16, "cuda", seed)
        for to, value in ((call.q, new.q), (call.lengths, new.lengths), (call.k_cache._base, new.k_cache._base)):
            to.copy_(value)
        if page_size:
            call.block_table.copy_(new.block_table)
        call.case = other
        before = copied(call.k_cache, call.v_cache)
        graph.replay()
        torch.cuda.synchronize()
        check_results(call, before, results, described(other, torch.bfloat16, "cuda", described_seed))


@gpu
@hopper
@pytest.mark.parametrize("nheads", [16, 64])
def test_repeated_calls_have_the_same_bits(nheads: int, seed: int) -> None:
    case = latent("repeated", "all SMs", (3_000, 1_000, 17), capacity=3_000, nheads=nheads)
    call = make_call(case, torch.bfloat16, "cuda", seed)
    first = run(call, "cuda")
    for _ in range(10_000):
        again = run(call, "cuda")
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(first, again, strict=True))


# ---- which calls the kernel takes -----------------------------------------------------------------------------------

REFUSED = [
    ("copy", {"v_in_k": False}, r"v_cache is not k_cache\[\.\.\., :512\]"),
    ("splits", {"num_splits": 3}, "num_splits or split_keys is given"),
    ("split_keys", {"split_keys": 64}, "num_splits or split_keys is given"),
    ("alibi", {"alibi": "heads"}, "alibi_slopes is given"),
    ("odd_pages", {"page_size": 7}, "no multiple of 8"),
    ("misaligned", {"layout": "misaligned"}, "multiples of 16 bytes"),
]


@gpu
@hopper
@pytest.mark.parametrize(("name", "options", "reason"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_other_calls_take_triton(
    name: str, options: dict[str, Any], reason: str, seed: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    call = make_call(latent(name, "the kernel refuses it", **options), torch.bfloat16, "cuda", seed)
    with pytest.raises(NotImplementedError, match=f"headdim 576 and v_cache 512.*{reason}.*the triton backend"):
        run(call, "cuda")
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    run(call, "triton")  # tunes, so that both calls have one configuration
    expected = run(call, "triton")
    capfd.readouterr()
    results = flash_attn_with_kvcache(*call.tensors, **call.arguments, return_softmax_lse=True)
    assert "flash_fwd_latent" not in capfd.readouterr().err
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(results, expected, strict=True))


@gpu
@hopper
@pytest.mark.parametrize(
    ("nheads", "kernel"), [(16, "flash_fwd_latent_narrow_kernel"), (17, "flash_fwd_latent_kernel")]
)
def test_the_kernels_are_the_default(
    nheads: int, kernel: str, seed: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    call = make_call(latent("default", "no backend is named", nheads=nheads), torch.bfloat16, "cuda", seed)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_with_kvcache(*call.tensors, **call.arguments)
    assert kernel in capfd.readouterr().err
