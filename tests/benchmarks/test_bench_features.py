"""The benchmark of features on the CPU: it runs end to end, computes shares of work, and refuses wrong results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as run_all
from benchmarks import bench_features, methods, results, tables
from benchmarks.bench_features import GRIDS, Point, contenders_of, reference_tail
from benchmarks.rivals import PLAIN, Feature, Mini, Rival
from flash_attn_mini.reference import visible_keys

FIGURES = ("window", "cost", "hopper", "varlen")


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 40, 2, 16) for _ in range(3)]


@pytest.mark.parametrize("seqlen", [512, 700])
@pytest.mark.parametrize(
    ("feature", "causal"),
    [
        (Feature("w", window_size=(1024, 0)), True),
        (Feature("w", window_size=(200, 0)), True),
        (Feature("w", window_size=(0, 0)), False),
        (Feature("w", window_size=(130, 5)), False),
        (Feature("w", window_size=(-1, 128)), False),
        (PLAIN, True),
        (PLAIN, False),
    ],
    ids=str,
)
def test_visible_blocks_are_those_of_the_mask(feature: Feature, causal: bool, seqlen: int) -> None:
    visible = visible_keys(seqlen, seqlen, causal=causal, window_size=feature.window_size)
    size = -(-seqlen // bench_features.BLOCK) * bench_features.BLOCK
    padded = torch.zeros(size, size, dtype=torch.bool)
    padded[:seqlen, :seqlen] = visible
    blocks = padded.unflatten(0, (-1, bench_features.BLOCK)).unflatten(2, (-1, bench_features.BLOCK)).any(3).any(1)
    assert bench_features.visible_share(feature, seqlen, causal) == blocks.double().mean().item()


def test_the_grid_holds_the_shapes_of_the_figures() -> None:
    window, cost, hopper, varlen = GRIDS["perf"].groups
    assert (window.batch, window.seqlen, window.heads) == (1, 16384, ((16, 128), (32, 64)))
    assert [(feature.window_size, causal) for feature, causal in window.calls] == [
        ((1024, 0), True),
        ((512, 512), False),
    ]
    assert (cost.batch, cost.seqlen, cost.heads) == (4, 4096, ((16, 128), (32, 64)))
    assert {causal for _, causal in cost.calls} == {False, True}
    assert set(cost.calls) < set(hopper.calls) == set(hopper.plain)
    ((packed, causal),) = varlen.calls
    assert causal
    assert len(packed.lengths) == varlen.batch == 32
    assert 256 <= min(packed.lengths) < max(packed.lengths) <= varlen.seqlen == 4096
    assert packed.lengths == bench_features.draw_lengths(32, 256, 4096)


def test_the_share_of_a_varlen_batch_counts_squares() -> None:
    group = bench_features.varlen_group(2, 3, 70, ((2, 16),))
    feature = Feature("varlen", lengths=(70, 35), is_packed=True)
    point = Point(group, 2, 16, "forward")
    assert bench_features.share_of_work(point, feature, True) == pytest.approx((1 + 0.25) / 2)


@pytest.mark.parametrize("direction", bench_features.DIRECTIONS)
@pytest.mark.parametrize("figure", FIGURES)
def test_every_call_is_compared_with_a_plain_one(figure: str, direction: str) -> None:
    (group,) = (group for group in GRIDS["perf"].groups if group.figure == figure)
    contenders = contenders_of(Point(group, 2, 16, direction), "cpu")
    names = [contender.rival.name for contender in contenders]
    assert len(names) == len(set(names)) == len(group.plain) + len(group.calls)
    for contender in contenders[len(group.plain) :]:
        assert contender.plain in contenders[: len(group.plain)]
        if figure != "window":
            assert contender.plain.causal == contender.causal
        assert figure != "varlen" or contender.plain.feature.lengths == contender.feature.lengths
        assert figure != "hopper" or contender.plain.feature == contender.feature


def test_hoppers_kernels_are_compared_with_those_of_sm80() -> None:
    (group,) = (group for group in GRIDS["perf"].groups if group.figure == "hopper")
    for contender in contenders_of(Point(group, 2, 16, "forward"), "cuda"):
        assert contender.rival.arch == (80 if contender.plain is None else None)


def test_figures_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    slowness = {"window": 0.5, "softcap": 1.2, "varlen": 0.5}

    def interleave(calls: dict[Rival, object], *_: object, **__: object) -> dict[str, methods.Timing]:
        return {rival.name: methods.Timing([4.0 * slowness.get(rival.name.split()[0], 1.0)]) for rival in calls}

    monkeypatch.setattr(bench_features, "interleave", interleave)
    monkeypatch.setattr(bench_features, "check", lambda *_: None)
    grid = GRIDS["tiny"]
    rows = [
        row
        for group in grid.groups
        for row in bench_features.measure_point(Point(group, 2, 16, "forward"), grid, "cpu", 1, 1.0)
    ]
    by_feature = {row["feature"].split()[0]: row for row in rows if row["figure"] != "hopper"}
    window, varlen = by_feature["window"], by_feature["varlen"]
    assert window["value"] == pytest.approx(0.5 / window["share_of_work"], rel=1e-3)
    assert by_feature["softcap"]["value"] == pytest.approx(20.0)
    assert by_feature["dropout"]["value"] == pytest.approx(0.0)
    assert varlen["value"] == pytest.approx(2.0 * varlen["share_of_work"], rel=1e-3)
    texts = tables.feature_tables(rows)
    assert len(texts) == len(FIGURES)
    assert "+20.0" in texts[1]


def test_the_benchmark_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_features.main(["--grid", "tiny", "--rounds", "2", "--out-dir", str(tmp_path)])
    result = results.load(tmp_path / "features_cpu.json")
    groups = GRIDS["tiny"].groups
    calls = sum(len(group.calls) * len(group.heads) * len(group.directions) for group in groups)
    assert len(result["data"]) == calls
    assert {row["figure"] for row in result["data"]} == set(FIGURES)
    assert all(row["ms"] > 0 and row["plain_ms"] > 0 for row in result["data"])
    printed = capsys.readouterr().out
    assert "window (64, 0)" in printed
    assert "2 heads of 16, causal" in printed
    assert set(result["stamp"]["sources"]) == set(results.CPU)
    assert results.stale_results(tmp_path) == []


def test_a_single_figure_has_its_own_name(tmp_path: Path) -> None:
    bench_features.main(["--grid", "tiny", "--figure", "window", "--rounds", "1", "--out-dir", str(tmp_path)])
    rows = results.load(tmp_path / "features_cpu_window.json")["data"]
    assert {row["figure"] for row in rows} == {"window"}


def test_without_time_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing was measured"):
        bench_features.main(["--grid", "tiny", "--seconds", "0", "--out-dir", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


class Wrong(Mini):
    """A forward with a wrong result."""

    def outputs(self, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (result * torch.nan,)


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch, inputs: list[torch.Tensor]) -> None:
    group = bench_features.cost_group(1, 40, ((2, 16),))
    point = Point(group, 2, 16, "forward")
    bench_features.check(contenders_of(point, "cpu"), "forward", inputs)
    with monkeypatch.context() as patch:
        patch.setattr(bench_features, "Mini", Wrong)
        wrong = contenders_of(point, "cpu")
    with pytest.raises(RuntimeError, match="plain full, forward, is not finite"):
        bench_features.check(wrong, "forward", inputs)
    monkeypatch.setattr("benchmarks.bench_features.reference_tail", lambda *a: 1.1 * reference_tail(*a))
    with pytest.raises(RuntimeError, match="cpu with plain and the reference disagree"):
        bench_features.check(contenders_of(point, "cpu"), "forward", inputs)


@pytest.mark.parametrize("backward", [False, True])
def test_packed_and_padded_batches_agree(backward: bool) -> None:
    lengths = (5, 40, 0, 17)
    inputs = [torch.randn(4, 40, 2, 16) for _ in range(3)]
    packed, padded = Feature("varlen", lengths=lengths, is_packed=True), Feature("padded", lengths=lengths)
    results = []
    for feature in (packed, padded):
        rival = Mini("cpu", feature, backward=backward)
        with rival.active():
            results.append(rival.outputs(rival.bind(*inputs, True)()))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, packed.packed(y), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message on a machine without a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="bench_features needs a CUDA GPU"):
        bench_features.main([])


def test_run_all_runs_it() -> None:
    assert "bench_features" in [step.label for step in run_all.GPU_STEPS]
