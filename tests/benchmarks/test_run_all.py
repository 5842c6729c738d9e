"""`make bench`: which benchmarks run, and what they leave."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as run_all
from benchmarks import results

BY_HAND = {
    *("build", "context_parallel_2", "context_parallel_model", "kvcache_official"),
    *("sanitize_attention", "sanitize_kvcache", "values_cuda"),
}


def test_run_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run_step(step: run_all.Step, seconds: float, limit: float, passed_on: list[str]) -> bool:
        seen.append(step.label)
        return len(seen) > 1

    monkeypatch.setattr(run_all, "run_step", run_step)
    with pytest.raises(SystemExit, match="failed: "):
        run_all.main(["--out-dir", str(tmp_path)])
    assert len(seen) > 1


def test_run_all_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run_step(step: run_all.Step, seconds: float, limit: float, passed_on: list[str]) -> bool:
        seen.append(step.label)
        assert passed_on == ["--out-dir", str(tmp_path), "--quick", "--commit", "0123abc"]
        return True

    monkeypatch.setattr(run_all, "run_step", run_step)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_all.main(["--only", "backward", "--out-dir", str(tmp_path), "--quick", "--commit", "0123abc"])
    assert seen[0] == "bench_speed --backward --grid perf"
    assert len(seen) > 1
    assert all("backward" in label for label in seen)
    with pytest.raises(SystemExit, match="no step contains 'sideways'"):
        run_all.main(["--only", "sideways", "--out-dir", str(tmp_path)])


def test_every_result_is_that_of_one_step_of_run_all_or_made_by_hand() -> None:
    steps = (*run_all.GPU_STEPS, *run_all.CPU_STEPS)
    for path in results.RESULTS.glob("*.json"):
        name = path.stem.removesuffix("_partial")
        made_by = [step.label for step in steps if any(fnmatch.fnmatch(name, x) for x in step.results)]
        assert len(made_by) == (name not in BY_HAND), f"{name}: {made_by}"


def test_run_all_finds_the_steps_whose_results_are_missing_or_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def run_step(step: run_all.Step, *_: object) -> bool:
        seen.append(step.module)
        return True

    steps = tuple(run_all.Step(name, (f"{name}_*", "both")) for name in ("fresh", "stale", "missing"))
    monkeypatch.setattr(run_all, "run_step", run_step)
    monkeypatch.setattr(run_all, "CPU_STEPS", steps)
    monkeypatch.setattr(run_all, "GPU_STEPS", steps)
    for name in ("fresh_1", "fresh_2", "stale_1", "stale_2", "both"):
        results.save(name, benchmark="x", title="", data=[{}], sources=[name], out_dir=tmp_path)
    monkeypatch.setattr(results, "last_change", lambda path, root: "abc" if path.stem == "stale_2" else None)
    run_all.main(["--stale", "--out-dir", str(tmp_path)])
    assert seen == []
    assert re.findall(r"stale: (\S+),.*changed since: abc", capsys.readouterr().out) == ["stale_2.json"]
    run_all.main(["--renew", "--out-dir", str(tmp_path)])
    assert seen == ["stale", "missing"]
    assert "stale: stale_2.json" in capsys.readouterr().out


def test_stale_results_of_the_learning_path_are_listed_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.save("ladder", benchmark="x", title="", data=[{}], out_dir=tmp_path)
    monkeypatch.setattr(results, "LEARN_RESULTS", tmp_path)
    monkeypatch.setattr(results, "last_change", lambda path, root: "abc" if path.parent == tmp_path else None)
    run_all.main(["--stale"])
    assert re.findall(r"stale: (\S+),.*changed since: abc", capsys.readouterr().out) == ["ladder.json"]


def test_stale_results_are_listed_without_any_package() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(('torch', 'tabulate', 'matplotlib'))\n"
    script = f"{blocked}from benchmarks.__main__ import main\nmain(['--stale'])"
    run = subprocess.run([sys.executable, "-c", script], cwd=results.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(line.startswith("stale: ") for line in run.stdout.splitlines())


def test_every_step_of_run_all_has_arguments_that_its_benchmark_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, argv: list[str]) -> None:
        parse_args(self, argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for step in (*run_all.GPU_STEPS, *run_all.CPU_STEPS):
        with pytest.raises(Parsed):
            importlib.import_module(f"benchmarks.{step.module}").main([*step.arguments, "--seconds", "1"])
