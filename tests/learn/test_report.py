"""Results of learn/: what is saved with them, the documents that quote them, and the command that measures them all."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

from benchmarks import results
from learn.bench import __main__ as bench
from learn.bench import report

EMPTY = "<!-- results:speed begin -->\n<!-- results:speed end -->\n"


def saved(folder: Path) -> Path:
    return results.save("speed", benchmark="other", title="Speed", data=[{"x": 1, "y": 0.5}], out_dir=folder)


def test_a_result_has_its_rows_and_where_they_come_from(tmp_path: Path) -> None:
    result = results.load(saved(tmp_path))
    assert result["data"] == [{"x": 1, "y": 0.5}]
    assert {"date", "commit", "gpu", "driver", "torch"} <= set(result["stamp"])
    assert result["stamp"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
    with pytest.raises(RuntimeError, match="nothing was measured"):
        results.save("none", benchmark="other", title="", data=[], out_dir=tmp_path)


def test_a_failed_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path).read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path)
    assert (tmp_path / "speed.json").read_text() == before


def test_the_machine_is_described_in_one_line() -> None:
    stamp = {"gpu": "a GPU", "driver": "1.2", "cudnn": 91900, "torch": "2.13", "date": "today", "cpu": "a CPU"}
    assert report.describe(stamp) == "a GPU, driver 1.2, torch 2.13, cuDNN 9.19.0; today"
    assert report.describe({**stamp, "commit": "abc"}).endswith("; today, commit abc")
    assert report.describe({**stamp, "gpu": None, "cudnn": None, "cpu_threads": 2}).startswith(
        "a CPU, 2 threads, torch"
    )


def test_every_source_of_a_result_exists() -> None:
    for source in {source for sources in (report.LEARN, *report.SOURCES.values()) for source in sources}:
        assert list(report.ROOT.glob(source)), source


def test_blocks_are_filled_and_filling_again_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    once = report.fill(f"a\n{EMPTY}b\n", tmp_path)
    assert "| 1   | 0.5 |" in once
    assert once.startswith("a\n")
    assert once.endswith("-->\nb\n")
    assert report.fill(once, tmp_path) == once
    assert results.NOT_MEASURED in report.fill(EMPTY, tmp_path / "none")
    with pytest.raises(ValueError, match="has no partner"):
        report.fill("<!-- results:x begin -->\n<!-- results:y end -->\n", tmp_path)


def test_the_documents_quote_the_committed_results() -> None:
    assert report.outdated() == []


def test_the_check_names_the_documents_that_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(EMPTY)
    monkeypatch.setattr(report, "documents", lambda: [document])
    with pytest.raises(SystemExit):
        report.main(["--check"])
    assert document.read_text() == EMPTY
    report.main([])
    report.main(["--check"])


def test_every_result_of_the_folder_is_shown_and_names_its_measurement() -> None:
    shown = set(
        re.findall(r"results:([\w-]+)(?:\.plot)? begin", "".join(path.read_text() for path in report.documents()))
    )
    assert shown == {path.stem for path in report.RESULTS.glob("*.json")}
    for path in report.RESULTS.glob("*.json"):
        result = results.load(path)
        assert result["name"] == path.stem
        assert result["benchmark"] in bench.GPU


def test_extra_memory_is_a_multiple_of_q() -> None:
    row = {"dtype": "float16", "batch": 2, "heads": 3, "seqlen": 10, "headdim": 8, "extra_bytes": 2 * 480 * 5}
    assert report.over_q(row) == 5.0
    assert report.over_q({**row, "dtype": "float32"}) == 2.5


def test_all_measurements_go_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run(name: str, *_: object) -> bool:
        seen.append(name)
        return len(seen) > 1

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="failed: ladder"):
        bench.main(["--out-dir", str(tmp_path)])
    assert seen == list(bench.GPU)


@pytest.mark.parametrize("name", ["naive", "online_softmax", "verify"])
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(f"learn.{name}")
    assert [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert doctest.testmod(module).failed == 0
