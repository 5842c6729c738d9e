"""flash_attn_with_kvcache on a GPU: CUDA graphs, streams, no waiting, no copy of the cache."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_with_kvcache

from ..conftest import IS_HOPPER
from ..support.gpu_calls import capture, each_gpu_backend
from ..support.kvcache_cases import (
    BY_NAME,
    CLUSTER_SIZES,
    CLUSTERS,
    MANY_ROWS,
    PIECES,
    TALL_TILES,
    WIDE_CTAS,
    CacheCall,
    KvCacheCase,
    make_call,
)
from ..support.kvcache_checks import bits, check_kvcache, check_results, copied, described, run
from .test_gpu import assert_does_not_wait

pytestmark = pytest.mark.gpu


def refill(call: CacheCall, other: CacheCall) -> None:
    """Overwrite the tensors of a call in place, caches included, with those of another case of the same shapes."""
    for name in ("q", "lengths", "cache_batch_idx", "cache_leftpad", "block_table"):
        to, new = getattr(call, name), getattr(other, name)
        if isinstance(to, Tensor):
            to.copy_(new)
    for to, new in zip((*call.new, *call.rotary), (*other.new, *other.rotary), strict=True):
        if to is not None and new is not None:
            to.copy_(new)
    for to, new in ((call.k_cache, other.k_cache), (call.v_cache, other.v_cache)):
        to._base.copy_(new._base)
    call.case = other.case


def with_lengths(case: KvCacheCase, draw: torch.Generator) -> KvCacheCase:
    """The case with other lengths and paddings."""
    room = case.keys - (case.seqlen_new or 0)
    lengths = tuple(int(n) for n in torch.randint(0, room + 1, (case.batch,), generator=draw))
    leftpad = None
    if case.leftpad is not None:
        leftpad = tuple(int(torch.randint(0, n + 1, (), generator=draw)) for n in lengths)
    return dataclasses.replace(case, lengths=lengths, leftpad=leftpad)


@each_gpu_backend
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    "name",
    ["decode", "read_only", "chunk", "long", "mqa", "headdim_33", "batch_idx_leftpad", "pages_1", "pages_64",
     "pages_leftpad", "rotary_leftpad", "together", "split_keys", "many_rows", "many_rows_tiles",
     "many_rows_batch_idx", "many_rows_pages_64", "tall_260_128", "tall_pages_16", "pieces_whole_heads",
     "pieces_of_sequences", "pieces_fewer_than_heads", "cluster", "cluster_of_1", "cluster_of_2",
     "cluster_of_2_for_1", "cluster_of_4_pages_7", "wide_one_row", "wide_sequences"],
)  # fmt: skip
def test_a_graph_replays_with_other_lengths_rows_and_pages(
    name: str, num_splits: int, gpu_backend: str, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    """A captured call reads lengths, rows, paddings, pages and caches anew in each replay."""
    case = BY_NAME[name]
    if case.split_keys and num_splits:
        pytest.skip("one of num_splits and split_keys")
    case = dataclasses.replace(case, num_splits=num_splits)
    call = make_call(case, torch.bfloat16, "cuda", seed)
    graph, results = capture(lambda: run(call, gpu_backend))
    for replay in range(4):
        other = with_lengths(case, draw) if replay < 3 else case
        refill(call, make_call(other, torch.bfloat16, "cuda", seed + 3 * replay))
        before = copied(call.k_cache, call.v_cache)
        graph.replay()
        torch.cuda.synchronize()
        where = f"replay {replay}, " + described(other, torch.bfloat16, gpu_backend, described_seed)
        check_results(call, before, results, where)


@each_gpu_backend
@pytest.mark.parametrize(
    ("name", "num_splits"),
    [
        ("long", 4),
        ("long", 0),
        ("many_rows_long", 0),
        ("tall_long", 0),
        ("pieces_of_a_head", 0),
        ("cluster", 0),
        ("cluster_of_2", 0),
        ("wide_one_row", 0),
    ],
)
def test_two_graphs_share_nothing(name: str, num_splits: int, gpu_backend: str, seed: int) -> None:
    """Two captured calls replayed at the same time on two streams give the bits of one after the other."""
    case = BY_NAME[name]
    calls = [make_call(case, torch.float16, "cuda", seed + i) for i in range(2)]
    captured = [capture(lambda call=call: run(call, gpu_backend, num_splits=num_splits)) for call in calls]
    expected = []
    for graph, results in captured:
        graph.replay()
        torch.cuda.synchronize()
        expected.append([x.clone() for x in results])
    streams = [torch.cuda.Stream() for _ in captured]
    for _ in range(20):
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), wanted in zip(captured, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@each_gpu_backend
@pytest.mark.parametrize("name", ["decode", "together", "batch_idx_leftpad", "int_length"])
def test_does_not_wait_for_the_gpu(name: str, gpu_backend: str, seed: int) -> None:
    call = make_call(BY_NAME[name], torch.float16, "cuda", seed)
    assert_does_not_wait(lambda: run(call, gpu_backend))


@each_gpu_backend
def test_runs_on_the_current_stream(gpu_backend: str, seed: int) -> None:
    """The inputs arrive late on a side stream."""
    case = BY_NAME["decode"]
    call, source = make_call(case, torch.float16, "cuda", seed), make_call(case, torch.float16, "cuda", seed + 1)
    expected = run(make_call(case, torch.float16, "cuda", seed + 1), gpu_backend)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        refill(call, source)
        out, lse = run(call, gpu_backend)
    side.synchronize()
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@each_gpu_backend
@pytest.mark.parametrize("headdim", [33, 64, 100])
@pytest.mark.parametrize("page_size", [0, 16])
def test_the_cache_is_never_copied(page_size: int, headdim: int, gpu_backend: str) -> None:
    """The memory that a call takes is a small part of the cache, whatever the head dim."""
    rows, capacity = (256, 16384) if not page_size else (256 * 16384 // page_size, page_size)
    caches = [torch.zeros(rows, capacity, 1, headdim, device="cuda", dtype=torch.float16) for _ in range(2)]
    table = None
    if page_size:
        table = torch.arange(4 * 1024, device="cuda", dtype=torch.int32).view(4, 1024)
    q = torch.randn(4, 1, 8, headdim, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, 4, 1, 1, headdim, device="cuda", dtype=torch.float16)
    lengths = torch.tensor([16000, 5, 300, 0], device="cuda", dtype=torch.int32)

    def call() -> Tensor:
        return flash_attn_with_kvcache(
            *(q, *caches, k, v), cache_seqlens=lengths, block_table=table, causal=True, backend=gpu_backend
        )

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - start
    size = caches[0].nbytes
    assert taken < size / 16, f"the call took {taken} bytes in addition to caches of {size} bytes each"
    assert torch.equal(bits(caches[0].view(-1, 1, headdim)[16000]), bits(k[0, 0]))


@each_gpu_backend
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_q(gpu_backend: str, seed: int) -> None:
    case = BY_NAME["decode"]
    expected = run(make_call(case, torch.float16, "cuda:0", seed), gpu_backend)
    with torch.cuda.device(0):
        out, _ = run(make_call(case, torch.float16, "cuda:1", seed), gpu_backend)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to("cuda:0"), expected[0])


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_float32_on_triton(seqlen_q: int, seed: int, described_seed: str) -> None:
    case = dataclasses.replace(BY_NAME["decode"], seqlen_q=seqlen_q)
    check_kvcache(case, "triton", "cuda", torch.float32, seed, described_seed)


# ---- launches that overlap ------------------------------------------------------------------------------------------


def chained(call: CacheCall, waits: bool) -> list[Tensor]:
    """The outputs of calls whose queries are the output of the call before."""
    outs = []
    for _ in range(8):
        outs.append(run(call, "cuda")[0])
        call = dataclasses.replace(call, q=outs[-1])
        if waits:
            torch.cuda.synchronize()
    return outs


# One sequence whose cache has more than 1,024 keys for each of 16 thread blocks of a head, and with 256.
LONG_ROW = dataclasses.replace(
    BY_NAME["one_row"], name="long_row", lengths=(9001,), capacity=16500, nheads=32, nheads_k=8, headdim=128
)
SHORT_ROW = dataclasses.replace(LONG_ROW, name="short_row", lengths=(4003,), capacity=4096)
CHAINED = [
    BY_NAME[name]
    for name in ("one_row", "long", "decode", "mqa_32", "rotary", "chunk", "many_rows_causal", "tall_260_128")
]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("case", [*CHAINED, LONG_ROW, SHORT_ROW], ids=str)
def test_a_call_reads_what_the_call_before_it_writes(case: KvCacheCase, appends: bool, seed: int) -> None:
    """Kernels are scheduled before the kernel ahead of them ends, and wait for it: as clusters, with slots, with an
    append kernel, and in a graph."""
    case = case if appends else dataclasses.replace(case, seqlen_new=None, rotary_dim=0)
    call = make_call(case, torch.float16, "cuda", seed)
    expected = chained(call, waits=True)
    graph, captured = capture(lambda: chained(call, waits=False))
    for _ in range(20):
        eager = chained(call, waits=False)
        graph.replay()
        for outs in (eager, captured):
            assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize("before", ["copy", "join"])
@pytest.mark.parametrize("name", ["one_row", "decode"])
def test_a_graph_may_have_other_nodes_before_the_call(name: str, before: str, seed: int) -> None:
    """The lengths come from a copy, or from a kernel of another stream."""
    call = make_call(BY_NAME[name], torch.float16, "cuda", seed)
    expected, lengths = run(call, "cuda"), call.lengths
    assert isinstance(lengths, Tensor)
    source, side = lengths.clone(), torch.cuda.Stream()

    def prepare() -> None:
        if before == "copy":
            lengths.copy_(source)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.add(source, 0, out=lengths)
            torch.zeros(2**20, device="cuda").add_(1)
            torch.cuda.current_stream().wait_stream(side)

    def prepared() -> tuple[Tensor, Tensor]:
        prepare()
        return run(call, "cuda")

    graph, results = capture(prepared)
    for _ in range(20):
        lengths.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# ---- many rows on Hopper -------------------------------------------------------------------------------------------


NEEDS_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU on this machine")


@pytest.fixture
def kernels_of(
    seed: int, described_seed: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[[KvCacheCase, torch.dtype], str]:
    """Checks a case, and returns the trace, which names its kernels."""
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")

    def run(case: KvCacheCase, dtype: torch.dtype) -> str:
        check_kvcache(case, "cuda", "cuda", dtype, seed, described_seed)
        return capfd.readouterr().err

    return run


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*MANY_ROWS, *TALL_TILES], ids=str)
def test_many_rows_run_on_the_kernel_of_hopper(
    case: KvCacheCase, dtype: torch.dtype, kernels_of: Callable[[KvCacheCase, torch.dtype], str]
) -> None:
    """On tiles of 192 rows where these are much fewer."""
    assert rows_of_tile(kernels_of(case, dtype)) in ((192,) if case in TALL_TILES else (64, 128, 192))


@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (64, 64),
        (128, 128),
        (132, 192),
        (192, 192),
        (196, 128),
        (256, 128),
        (260, 192),
        (384, 192),
        (388, 128),
        (512, 128),
        (516, 192),
        (576, 192),
        (580, 128),
        (640, 128),
        (644, 192),
        (768, 192),
        (772, 128),
    ],
)
def test_rows_of_a_tile(rows: int, tile: int, kernels_of: Callable[[KvCacheCase, torch.dtype], str]) -> None:
    case = dataclasses.replace(BY_NAME["tall_132_128"], seqlen_q=rows // 4)
    assert rows_of_tile(kernels_of(case, torch.bfloat16)) == tile


@NEEDS_HOPPER
def test_a_group_of_one_head_runs_on_tiles_of_128_rows(
    kernels_of: Callable[[KvCacheCase, torch.dtype], str],
) -> None:
    """Queries of one tile of 192 rows would be too far apart."""
    case = dataclasses.replace(BY_NAME["tall_132_128"], nheads=4, seqlen_q=132)
    assert rows_of_tile(kernels_of(case, torch.bfloat16)) == 128


def rows_of_tile(trace: str) -> int:
    (rows,) = re.findall(r"flash_fwd_split_kernel +rows=(\d+) ", trace)
    return int(rows)


@each_gpu_backend
@pytest.mark.parametrize("headdim", [64, 128, 192])
@pytest.mark.parametrize("page_size", [1, 7, 16, 100])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_page_numbers_are_read_ahead(
    num_splits: int, page_size: int, headdim: int, gpu_backend: str, seed: int, described_seed: str
) -> None:
    """Tiles of 16 and of 32 keys; several of each warp, an odd number of them, and one with a single key."""
    changes = {"headdim": headdim, "page_size": page_size, "num_splits": num_splits, "leftpad": (13,)}
    case = dataclasses.replace(LONG_ROW, name="long_row_in_pages", seqlen_new=None, rotary_dim=0, **changes)
    check_kvcache(case, gpu_backend, "cuda", torch.bfloat16, seed, described_seed)


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("headdim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("case", [LONG_ROW, SHORT_ROW], ids=str)
def test_one_sequence_runs_on_clusters_or_wide_thread_blocks(
    case: KvCacheCase, headdim: int, dtype: torch.dtype, kernels_of: Callable[[KvCacheCase, torch.dtype], str]
) -> None:
    case, is_wide = dataclasses.replace(case, headdim=headdim), case is LONG_ROW and headdim <= 128
    assert_clusters_or_wide_ctas(case, is_wide, kernels_of(case, dtype))


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CLUSTERS, *WIDE_CTAS], ids=str)
def test_few_keys_run_on_clusters_or_wide_thread_blocks(
    case: KvCacheCase, dtype: torch.dtype, kernels_of: Callable[[KvCacheCase, torch.dtype], str]
) -> None:
    assert_clusters_or_wide_ctas(case, case in WIDE_CTAS, kernels_of(case, dtype))


def assert_clusters_or_wide_ctas(case: KvCacheCase, is_wide: bool, trace: str) -> None:
    """The trace names the wide form, or clusters and their size, or smaller ones if the GPU has no room for these.

    It skips a long cache, for which smaller clusters are too slow."""
    sms = torch.cuda.get_device_properties().multi_processor_count
    if sms < 128:
        pytest.skip("clusters of 16 thread blocks for 8 heads need 128 SMs")
    if is_wide:
        assert "form=wide " in trace
        return
    if sms != 132 and case.name in CLUSTER_SIZES and CLUSTER_SIZES[case.name] != 16:
        pytest.skip("the number of thread blocks of a cluster is that of a GPU with 132 SMs")
    heads, size = case.batch * case.nheads_k, CLUSTER_SIZES.get(case.name, 16)
    for ctas, at_once in re.findall(r"cluster_for +ctas=(\d+) clusters=\d+ at_once=(\d+)", trace):
        assert 0 < int(at_once) < heads
        assert case.headdim > 128, "up to head dim 128 an SM holds two CTAs, so there is room"
        size = min(size, int(ctas) // 2)  # the next smaller cluster
    if case.name not in CLUSTER_SIZES and size < 16 and "form=cluster " not in trace:
        pytest.skip(f"this GPU has no room for clusters of {2 * size} thread blocks for {heads} heads")
    assert re.search(f"flash_fwd_splitkv_cluster_kernel +form=cluster .* cluster={size} ", trace), trace


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PIECES, ids=str)
def test_pieces(case: KvCacheCase, dtype: torch.dtype, kernels_of: Callable[[KvCacheCase, torch.dtype], str]) -> None:
    """Keys cut in every way. On 132 SMs of Hopper the trace tells which one it is."""
    trace = kernels_of(case, dtype)
    if not IS_HOPPER or torch.cuda.get_device_properties().multi_processor_count != 132:
        return
    form, pieces = {  # also the pieces if lengths are equal
        "pieces_whole_heads": ("wide", "pieces=16 aligned_pieces=16"),
        "pieces_mixed_heads": ("wide", "pieces=16 aligned_pieces=16"),
        "pieces_of_a_head": ("wide", "pieces=16 aligned_pieces=16"),
        "pieces_of_heads": ("wide", "pieces=16 aligned_pieces=16"),
        "pieces_of_sequences": ("wide", "pieces=16 aligned_pieces=0"),
        "pieces_fewer_than_heads": ("few_rows", "pieces=49 aligned_pieces=49"),
        "pieces_of_40_heads": ("wide", "pieces=132 aligned_pieces=0"),
        "pieces_idle_sms": ("few_rows", "pieces=16 aligned_pieces=0"),
        "pieces_short": ("wide", "pieces=16 aligned_pieces=16"),
    }[case.name]
    assert re.search(f"flash_fwd_splitkv_kernel +form={form} .*{pieces} ", trace), trace


@NEEDS_HOPPER
def test_large_values_leave_partial_results_finite(
    draw: torch.Generator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Scores rise slowly from the last key to the first, so that sums grow far above 1: values still have room."""
    batch, keys, heads_k, power = 8, 4096, 8, 2.0**80
    q = torch.zeros(batch, 16, 4 * heads_k, 64)
    q[..., 0] = 1.0
    k = torch.zeros(batch, keys, heads_k, 64)
    k[..., 0] = torch.linspace(88.0, 0.0, keys)[None, :, None]
    v = torch.randn(batch, keys, heads_k, 64, generator=draw)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    small, small_lse = run_on_all_keys(q, k, v)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    large, large_lse = run_on_all_keys(q, k, v * power)
    (pieces,) = re.findall(r"flash_fwd_split_kernel.* pieces=(\d+)", capfd.readouterr().err)
    assert int(pieces) > batch * heads_k, "no head has partial results"
    assert torch.equal(large, small * power)
    assert torch.equal(large_lse, small_lse)
    visible = k[0, :, 0, 0].double()
    assert (small_lse.double() - visible.logsumexp(0)).abs().max() < 1e-4


def run_on_all_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flash_attn_with_kvcache(q, k, v, softmax_scale=1.0, return_softmax_lse=True, backend="cuda")


@NEEDS_HOPPER
@pytest.mark.parametrize(
    "changes",
    [
        {"alibi": "heads"},
        {"page_size": 20},
        {"page_size": 16, "leftpad": (3, 0, 0, 0, 0)},
        {"headdim": 60},
        {"headdim": 32},
        {"split_keys": 64},
        {"num_splits": 3},
    ],
    ids=str,
)
def test_other_calls_run_on_the_kernel_of_all_gpus(
    changes: dict[str, Any], kernels_of: Callable[[KvCacheCase, torch.dtype], str]
) -> None:
    traced = kernels_of(dataclasses.replace(BY_NAME["many_rows"], **changes), torch.bfloat16)
    if changes == {"headdim": 32} and "kHeadDim=32" not in traced:
        pytest.skip("the build has no kernels of head dim 32, and runs it on larger ones")
    assert "flash_fwd_splitkv_kernel" in traced


# ---- GPUs with less shared memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("smem", [163 * 1024, 99 * 1024])
@pytest.mark.parametrize("name", ["one_row", "mqa_32", "mqa_32_256", "headdim_192", "headdim_256"])
def test_tiles_of_gpus_with_less_shared_memory(
    name: str, smem: int, kernels_of: Callable[[KvCacheCase, torch.dtype], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clusters, and with tiles of 64 rows where those of fewer rows do not fit."""
    monkeypatch.setenv("FLASH_ATTN_MINI_MAX_SMEM", str(smem))
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCH", "80")  # Hopper's own kernels need all shared memory of a Hopper
    (taken,) = {int(x) for x in re.findall(r" smem=(\d+)", kernels_of(BY_NAME[name], torch.float16))}
    assert taken <= smem
