"""The benchmark of KV caches: it runs end to end on the CPU, and wrong results and other kernels are errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tabulate")

from benchmarks import bench_kvcache, results, tables
from benchmarks.bench_kvcache import Ours, Point
from benchmarks.rivals import FA3, RIVALS, Call, Rival, select
from flash_attn_mini import flash_attn_with_kvcache
from flash_attn_mini.reference import attention_kvcache_reference

from ..support.one_thread import one_thread  # noqa: F401

CPU = torch.device("cpu")
SMALL = Point(2, 64, nheads=4, nheads_k=2, headdim=16)
RAGGED = replace(SMALL, shortest=5, page_size=16)
TINY = {
    "decode": (SMALL, RAGGED, replace(SMALL, seqlen_q=3)),
    "pages": (replace(SMALL, seqlen_k=256),),
    "append": (replace(SMALL, causal=True), replace(SMALL, seqlen_q=3)),
    "queries": tuple(replace(SMALL, seqlen_q=n, causal=True) for n in (1, 2, 3, 5)),
    "lengths": tuple(replace(SMALL, batch=batch, seqlen_k=n) for batch in (1, 2) for n in (32, 64)),
    "latent": (replace(SMALL, nheads_k=1, headdim_v=8),),
    "official": (SMALL, RAGGED),
    "cpu": (SMALL,),
}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kvcache, "CPU_CACHE", 2**10)
    monkeypatch.setattr(bench_kvcache, "REP_MS", {"cuda": 0.1, "cpu": 0.1})
    for name, points in TINY.items():
        monkeypatch.setitem(bench_kvcache.FIGURES, name, replace(bench_kvcache.FIGURES[name], points=points))


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("figure", TINY)
def test_figure_runs_end_to_end(figure: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--out-dir", str(tmp_path)]
    bench_kvcache.main([*options, "--figure", figure])
    (path,) = tmp_path.glob("*.json")
    assert path.stem == ("kvcache_cpu_float32" if figure == "cpu" else f"kvcache_{figure}")
    rows = results.load(path)["data"]
    assert len(rows) == len(TINY[figure])
    for row, point in zip(rows, TINY[figure], strict=True):
        if point.shortest is None:
            tensors = 1 if point.headdim_v else 2
            size = tensors * point.batch * point.seqlen_k * point.nheads_k * point.headdim * 4
            for name, microseconds in row["us"].items():
                assert row["gbps"][name] == pytest.approx(size / microseconds / 1e3, rel=1e-2)
        assert "cpu" in row["us"]
    if figure in ("decode", "cpu", "lengths"):
        assert all(row["ratio"]["cpu"]["SDPA"] > 0 for row in rows if row["shortest"] is None)
    if figure == "decode":
        assert "different lengths" in rows[1]["unsupported"]["SDPA"]
    if figure == "pages":
        assert [*rows[0]["us"]] == ["cpu", *(f"cpu, pages of {n}" for n in (1, 16, 64, 256))]
    if figure == "latent":
        assert [*rows[0]["us"]] == ["cpu", "cpu, pages of 64"]
    if figure == "append":
        assert [*rows[0]["ratio"]] == ["cpu", "cpu, append", "cpu, append, rotary"]
    assert path.with_suffix(".png").exists() == (figure in ("queries", "lengths"))
    assert results.stale_results(tmp_path) == []


@pytest.mark.usefixtures("_tiny")
def test_figure_without_time_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="decode: cpu ran at no point; nothing is written"):
        bench_kvcache.main(["--device", "cpu", "--figure", "decode", "--seconds", "0", "--out-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_tiny")
def test_every_figure_out_of_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([1.0])
    monkeypatch.setattr(bench_kvcache.Budget, "left", lambda _: next(left, 0.0))
    options = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--out-dir", str(tmp_path)]
    message = "bench_kvcache: append: 1 of 2 points were left out.*; pages: cpu ran at no point; nothing is written"
    with pytest.raises(SystemExit, match=message):
        bench_kvcache.main([*options, "--figure", "append", "pages"])
    assert [path.name for path in tmp_path.iterdir()] == ["kvcache_append_partial.json"]


def test_official_calls_get_the_arguments_of_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its names. measure_point compares the results with the reference, contiguous and in pages."""

    def official(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor | None, causal: bool
    ) -> Tensor:
        options = {"cache_seqlens": cache_seqlens, "block_table": page_table, "causal": causal}
        return flash_attn_with_kvcache(q, k_cache, v_cache, **options, backend="cpu")

    module = SimpleNamespace(flash_attn_with_kvcache=official)
    monkeypatch.setitem(sys.modules, FA3[0], module)
    contenders = bench_kvcache.FIGURES["official"].contenders(["cpu"], [])
    for point in (SMALL, RAGGED, replace(SMALL, seqlen_q=3, causal=True)):
        row = bench_kvcache.measure_point(point, contenders, CPU, torch.float32, rounds=1, rep_ms=0.1)
        assert not row["unsupported"]
        assert row["ratio"]["cpu"]["FA3"] > 0


def test_figures_hold_the_shapes_of_the_documents() -> None:
    figures = bench_kvcache.FIGURES
    decode = set(figures["decode"].points)
    assert {Point(1, 65536), Point(8, 16384), Point(64, 4096), Point(1, 1024)} <= decode
    assert {(p.headdim, p.nheads_k) for p in decode} >= {(128, 8), (64, 8), (256, 8), (128, 32), (128, 1)}
    assert {p.seqlen_q for p in decode} == {1, 4, 16, 128}
    (uniform,) = (p for p in decode if p.shortest)
    assert (uniform.batch, uniform.shortest, uniform.seqlen_k, uniform.page_size) == (32, 100, 8192, 64)
    assert {p.seqlen_k for p in figures["lengths"].points} == {1024 * 2**i for i in range(8)}
    assert {p.seqlen_q for p in figures["queries"].points} == {*range(1, 37), *range(60, 69), *range(124, 133)}
    for figure in figures.values():
        names = [contender.name for contender in figure.contenders(["cuda", "triton"], select(["cuDNN"]))]
        assert len(names) == len(set(names))


def test_bytes_count_the_keys_that_are_there() -> None:
    problem = bench_kvcache.draw(RAGGED, CPU, torch.bfloat16)
    assert problem.bytes == 2 * int(problem.seqlens.sum()) * 2 * 16 * 2
    assert all(5 <= length <= 64 for length in problem.lengths)
    assert problem.lengths == bench_kvcache.draw(RAGGED, CPU, torch.bfloat16).lengths


def test_caches_in_turn_exceed_the_cache_of_the_processor() -> None:
    assert bench_kvcache.number_of_caches(bench_kvcache.CPU_CACHE * 8, CPU) == 2
    assert bench_kvcache.number_of_caches(bench_kvcache.CPU_CACHE // 8, CPU) == 32


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_hold_the_same_keys(page_size: int) -> None:
    problem = bench_kvcache.draw(SMALL, CPU, torch.float32)
    k, v, block_table = problem.pages(page_size)
    assert torch.equal(k[block_table.long()].flatten(1, 2), problem.k)
    assert torch.equal(v[block_table.long()].flatten(1, 2), problem.v)
    assert not torch.equal(block_table.flatten(), torch.arange(block_table.numel(), dtype=torch.int32))


class Wrong(Ours):
    """The reference's result, scaled; the new keys are appended, or not."""

    def __init__(self, factor: float, writes: bool) -> None:
        super().__init__("wrong", append=True)
        self.factor, self.writes = factor, writes

    def bind_problem(self, problem: bench_kvcache.Problem) -> Call:
        return partial(self.compute, problem)

    def compute(self, problem: bench_kvcache.Problem) -> Tensor:
        caches = (problem.k, problem.v) if self.writes else (problem.k.clone(), problem.v.clone())
        out, _ = attention_kvcache_reference(problem.q, *caches, **self.options(problem))
        return out.float() * self.factor


def check(rival: Rival) -> None:
    problems = [bench_kvcache.draw(SMALL, CPU, torch.float32) for _ in range(2)]
    turns = bench_kvcache.in_turn(rival, problems, CPU)
    bench_kvcache.check_result(rival, problems[-1], rival.outputs(turns.result[0])[0])


def test_wrong_results_are_errors() -> None:
    check(Wrong(1.0, writes=True))
    check(RIVALS["SDPA"])
    with pytest.raises(RuntimeError, match=r"wrong, append differs from the reference: out by 0\.1 of the largest"):
        check(Wrong(1.1, writes=True))
    with pytest.raises(RuntimeError, match="wrong, append differs from the reference: out by nan"):
        check(Wrong(float("nan"), writes=True))
    with pytest.raises(RuntimeError, match="wrong, append differs from the reference: k_cache by"):
        check(Wrong(1.0, writes=False))


def test_another_kernel_than_asked_for_is_an_error() -> None:
    class Renamed(Rival):
        name = "cuDNN"

    problem = bench_kvcache.draw(SMALL, CPU, torch.float32)
    call = bench_kvcache.bind(RIVALS["SDPA"], problem)
    bench_kvcache.check_kernel(RIVALS["SDPA"], call)
    with pytest.raises(RuntimeError, match=r"cuDNN was asked for; PyTorch ran .*(flash_attention_for_cpu|softmax)"):
        bench_kvcache.check_kernel(Renamed(), call)


def rows_of(figure: str, times: Sequence[dict[str, float]], **fields: Any) -> list[dict[str, Any]]:
    plain = {"figure": figure, "batch": 8, "seqlen_k": 64, "shortest": None, "page_size": 0, "nheads": 4, "nheads_k": 2}
    return [{**plain, "headdim": 16, "seqlen_q": n, "us": us, **fields} for n, us in enumerate(times, start=1)]


def test_table_of_queries_names_the_largest_step() -> None:
    rows = rows_of("queries", [{"cuda": us} for us in (10.0, 11.0, 22.0, 23.0)])
    (table,) = tables.kvcache_tables([*rows, {**rows[0], "seqlen_q": 9, "us": {"cuda": 99.0}}])
    assert "2.00 (2 to 3)" in table
    assert "9 queries" not in table


def test_table_of_pages_compares_with_the_contiguous_cache() -> None:
    (table,) = tables.kvcache_tables(rows_of("pages", [{"cuda": 10.0, "cuda, pages of 16": 10.4, "triton": 12.0}]))
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in line] for line in lines[1:]] == [
        ["cuda", "10.0"],
        ["cuda, pages of 16", "10.4 (1.04)"],
        ["triton", "12.0"],
    ]


def test_table_of_speed_says_the_share_of_the_ceiling_and_what_did_not_run() -> None:
    fields = {"ceiling_gbps": 4000, "ratio": {"cuda": {"cuDNN": 1.25}}, "unsupported": {}}
    first, second = rows_of("decode", [{}, {}], **fields, gbps={"cuda": 3000.0, "cuDNN": 2400.0})
    second = {**second, "gbps": {"cuda": 3600.0}, "ratio": {"cuda": {}}}
    (table,) = tables.kvcache_tables([first, second])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert lines[0] == ["cache", "queries", "cuda, GB/s", "cuDNN, GB/s", "cuda ÷ cuDNN"]
    assert lines[1][1:] == ["1", "3000 (0.75)", "2400 (0.60)", "1.25"]
    assert lines[2][1:] == ["2", "3600 (0.90)", "–", "–"]


def test_plot_shows_the_ceiling(tmp_path: Path) -> None:
    rows = rows_of("lengths", [{"cuda": 1.0}], gbps={"cuda": 3000.0}, ceiling_gbps=4300)
    result = {"benchmark": "bench_kvcache", "title": "Decoding", "stamp": {"gpu": "H200"}, "data": rows}
    assert tables.plot(result, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert not tables.plot({**result, "data": rows_of("pages", [{"cuda": 1.0}])}, tmp_path / "pages.png")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message on a machine without a GPU")
def test_gpu_figures_say_that_they_need_a_gpu() -> None:
    with pytest.raises(SystemExit, match="bench_kvcache needs a CUDA GPU"):
        bench_kvcache.main([])
