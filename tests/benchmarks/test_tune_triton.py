"""The tuner of the Triton kernels: candidates, checks, lists. Kernels run on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
import subprocess
from typing import Any

import pytest
import torch

from benchmarks import bench_kvcache, tune_triton
from benchmarks.bench_kvcache import Point
from benchmarks.methods import Timing
from benchmarks.tune_triton import Tile

from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.triton_calls import runs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tile(32, 32, 4, 2, tma=False)
CHECKS = ((40, 70, 2, 1, True), (33, 20, 2, 2, False))
CACHES = (Point(2, 64, 1, 4, 2, 64), Point(2, 64, 2, 4, 2, 64, causal=True, shortest=3, page_size=16))


@pytest.mark.thorough
@starts_the_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@runs_triton
@pytest.mark.parametrize("kernel", ["forward", pytest.param("dq", marks=pytest.mark.thorough), "dkv"])
def test_a_right_candidate_passes_and_a_wrong_one_is_named(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point(1, 1, headdim=64)
    assert tune_triton.check_one(kernel, point, SMALL, CHECKS) == ""
    cls = tune_triton.Forward if kernel == "forward" else tune_triton.Backward
    run = cls.run

    def scaled(*arguments: Any) -> Any:
        return tuple(x * 1.1 for x in run(*arguments))

    monkeypatch.setattr(cls, "run", staticmethod(scaled) if kernel == "forward" else scaled)
    what = {"forward": "out", "dq": "dq", "dkv": "dk"}[kernel]
    assert tune_triton.check_one(kernel, point, SMALL, CHECKS).startswith(f"WRONG: {what} is off by")


@runs_triton
@pytest.mark.parametrize("point", CACHES, ids=["contiguous", "pages"])
def test_a_candidate_for_a_kv_cache_is_checked(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(0, 32, 4, 2, tma=False, waves=2)
    assert tune_triton.check_one("kvcache", point, tile) == ""
    run = tune_triton.Cache.run
    monkeypatch.setattr(tune_triton.Cache, "run", staticmethod(lambda *arguments: run(*arguments) * 1.1))
    assert tune_triton.check_one("kvcache", point, tile).startswith("WRONG: tile(0, 32, 4, 2, tma=False) in 2 waves")


@runs_triton
@pytest.mark.parametrize(
    "kernel", [*(pytest.param(x, marks=pytest.mark.thorough) for x in ("forward", "dkv")), "dq", "kvcache"]
)
def test_candidates_are_timed_and_what_fails_is_named(
    kernel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kvcache, "CPU_CACHE", 2**10)
    point = CACHES[0] if kernel == "kvcache" else Point(1, 64, 64, 2, 2, 64)
    good = Tile(0, 32, 4, 2, tma=False) if kernel == "kvcache" else SMALL
    broken = Tile(0, 24, 4, 2, tma=False) if kernel == "kvcache" else Tile(24, 32, 4, 2, tma=False)
    row = tune_triton.time_point(kernel, point, [good, broken], DEVICE, 2, 0.1)
    assert row["ms"][str(good)] > 0
    assert row["speed"][str(good)] > 0
    assert str(broken) in row["failed"]
    assert str(broken) not in row["speed"]
    tune_triton.show(row, 8)
    printed = capsys.readouterr().out
    assert str(good) in printed
    assert "failed: " in printed


def test_the_short_form_of_a_tile() -> None:
    assert tune_triton.tiles("128x64w8s3pr168 64x32w4s2 0x64w4s4pv2") == [
        Tile(128, 64, 8, 3, tma=False, maxnreg=168),
        Tile(64, 32, 4, 2),
        Tile(0, 64, 4, 4, tma=False, waves=2),
    ]
    assert str(Tile(128, 64, 8, 3, tma=False, maxnreg=168)) == "tile(128, 64, 8, 3, tma=False, maxnreg=168)"
    with pytest.raises(AssertionError, match="128x64"):
        tune_triton.tiles("128x64")


@pytest.mark.parametrize("direction", tune_triton.KERNELS)
def test_every_problem_has_different_candidates(direction: str) -> None:
    points = tune_triton.points_of(direction, [64, 128, 256], [4096])
    assert {point.headdim for point in points} == {64, 128, 256}
    for kernel in tune_triton.KERNELS[direction]:
        for point in points:
            found = tune_triton.tiles_for(kernel, tune_triton.kind_of(point))
            assert len(found) == len(set(found)) > 3
            assert (kernel == "kvcache") == all(tile.block_m == 0 for tile in found)


def test_the_kept_tiles_are_among_the_candidates() -> None:
    pytest.importorskip("triton")
    from flash_attn_mini.backends.triton import configs

    for kernel, name in tune_triton.TABLES.items():
        for headdim, kept in getattr(configs, name).hopper.items():
            candidates = [str(tile.config()) for tile in tune_triton.TILES[kernel][headdim]]
            assert [str(config) for config in kept if str(config) not in candidates] == []


def test_the_shortest_list_is_near_the_best_of_every_problem() -> None:
    problems = [{"a": 1.0, "b": 1.01, "c": 3.0}, {"a": 2.0, "b": 1.5, "c": 1.49}, {"b": 4.0, "c": 1.0, "a": 5.0}]
    assert tune_triton.shortest_list(problems) == ["c", "a"]
    assert tune_triton.shortest_list(problems[:2]) == ["b"]
    assert tune_triton.shortest_list([]) == []
    assert tune_triton.shortest_list([{"a": 1.0}, {"b": 1.0}]) == []


def test_a_summary_ranks_candidates_and_compares_them_with_the_rival() -> None:
    timings = {"rival": Timing([2.0, 2.0]), "slow": Timing([4.0, 4.0]), "fast": Timing([1.0, 1.0])}
    dense = tune_triton.summary("dkv", Point(2, 512, 512, 4, 4, 64, causal=True), timings, "rival", 0)
    assert dense["ratio"] == {"fast": 2.0, "slow": 0.5}
    assert list(dense["ms"]) == ["fast", "slow", "rival"]
    flops = 4 * 2 * 2 * 512 * 512 * 64 * 4 / 2  # four products of 2 x 512 x 512 x 64 in 2 x 4 heads, half of them
    assert dense["speed"]["fast"] == pytest.approx(flops / 1e-3 / 1e12, rel=1e-3)
    cache = tune_triton.summary("kvcache", CACHES[0], timings, "rival", 3 * 10**9)
    assert cache["speed"] == {"fast": 3000.0, "slow": 750.0}
    without = tune_triton.summary("dq", CACHES[0], {"fast": timings["fast"]}, "rival", 0)
    assert without["ratio"] == {}


def test_a_check_runs_in_a_process_and_its_failure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ("forward", Point(1, 1, headdim=64), SMALL)
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> Any:
        seen.append(command)
        return subprocess.CompletedProcess(command, 3, "", "line\nRuntimeError: PassManager::run failed\n")

    monkeypatch.setattr(tune_triton.subprocess, "run", run)
    assert tune_triton.check_in_process(math.inf, task).endswith("RuntimeError: PassManager::run failed")
    assert tune_triton.check_in_process(0.0, task) == "not checked: out of time"
    (command,) = seen
    checked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tune_triton, "check_one", lambda *candidate: checked.append(candidate) or "")
    assert tune_triton.main(command[command.index("benchmarks.tune_triton") + 1 :]) == 0
    assert checked == [task]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message on a machine without a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="tune_triton needs a CUDA GPU"):
        tune_triton.main(["backward"])
