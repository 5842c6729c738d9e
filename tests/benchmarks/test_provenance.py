"""Results carry a hash of the measured sources, and are out of date when these change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import provenance


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small tree with one C++ and one Python source."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernel.cu").write_text("// a kernel\nint tile() { return 64; }\n")
    (tmp_path / "call.py").write_text('"""A call."""\n\nSCALE = 2\n\n\ndef f():\n    """Doc."""\n    return SCALE\n')
    return tmp_path


GLOBS = ("csrc/**/*", "call.py")


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        pytest.param("csrc/kernel.cu", "64", "128", False, id="C++ code"),
        pytest.param("csrc/kernel.cu", "a kernel", "the kernel", True, id="C++ comment"),
        pytest.param("csrc/kernel.cu", "{ return", "{\n    return", True, id="C++ layout"),
        pytest.param("call.py", "SCALE = 2", "SCALE = 3", False, id="Python code"),
        pytest.param("call.py", "A call.", "Another call.\n\nIn full.", True, id="Python docstring"),
        pytest.param("call.py", "\n\n\ndef", "\n# note\ndef", True, id="Python comment"),
    ],
)
def test_hash_follows_code_and_nothing_else(project: Path, file: str, old: str, new: str, same: bool) -> None:
    before = provenance.hash_sources(GLOBS, project)
    path = project / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert (provenance.hash_sources(GLOBS, project) == before) is same


def test_hash_follows_files_that_come_and_go(project: Path) -> None:
    before = provenance.hash_sources(GLOBS, project)
    (project / "csrc" / "more.h").write_text("int more();\n")
    assert provenance.hash_sources(GLOBS, project) != before
    (project / "csrc" / "more.h").unlink()
    (project / "csrc" / "build.o").write_text("not a source")
    assert provenance.hash_sources(GLOBS, project) == before


def test_hash_follows_what_a_cuda_source_includes(project: Path) -> None:
    kernel = project / "csrc" / "kernel.cu"
    kernel.write_text('#include "step.h"\nint tile() { return 64; }\n')
    step = project / "csrc" / "step.h"
    step.write_text("int step();\n")
    before = provenance.hash_sources(["csrc/*.cu"], project)
    step.write_text("int step(int);\n")
    assert provenance.hash_sources(["csrc/*.cu"], project) != before


def test_forward_results_outlive_edits_of_the_backward_kernel_and_the_other_way_round() -> None:
    forward = set(provenance.find_sources(provenance.SOURCES_OF_BACKEND["cuda"]))
    backward = set(provenance.find_sources(provenance.BACKWARD_SOURCES_OF_BACKEND["cuda"]))
    sm80 = provenance.ROOT / "csrc" / "sm80"
    assert {sm80 / "forward" / "mainloop_fwd.h", sm80 / "forward" / "kernel_traits.h"} <= forward - backward
    assert {sm80 / "backward" / "mainloop_bwd.h", sm80 / "backward" / "kernel_traits_bwd.h"} <= backward - forward
    assert {sm80 / "copy.h", provenance.ROOT / "csrc" / "flash.h"} <= forward & backward
    assert set(sm80.rglob("*.h")) | set(sm80.rglob("*.cu")) <= forward | backward
    common = {sm80.parent / "common" / f"{name}.h" for name in ("sequence", "score_mod", "dropout", "philox")}
    assert {sm80.parent / "dispatch" / "kind.h", *common} <= forward & backward


def test_host_time_goes_stale_with_every_module_between_the_call_and_the_backend() -> None:
    package = provenance.ROOT / "flash_attn_mini"
    found, waiting = set(), {package / "flash_attn_interface.py"}
    while waiting:
        path = waiting.pop()
        found.add(path)
        names = re.findall(r"^from \.(?: import )?(\w+)", path.read_text(), re.MULTILINE)
        waiting |= {package / f"{name}.py" for name in names if (package / f"{name}.py").is_file()} - found
    assert {"argument_checks", "ops", "options", "packed", "rng_state", "varlen"} <= {path.stem for path in found}
    csrc = provenance.ROOT / "csrc"
    of_cpp = {path for folder in (csrc, csrc / "api") for path in (*folder.glob("*.cpp"), *folder.glob("*.h"))}
    assert found | of_cpp <= set(provenance.find_sources(provenance.HOST))


def test_comment_marks_inside_strings_are_code() -> None:
    assert provenance.normalise('char *url = "a//b"; // x', ".cu") == 'char*url="a//b";'
    assert provenance.normalise("int a = b /* c\n d */ / e;", ".cpp") == "inta=b/e;"


def test_every_source_glob_of_the_benchmarks_finds_files() -> None:
    backends = (*provenance.SOURCES_OF_BACKEND.values(), *provenance.BACKWARD_SOURCES_OF_BACKEND.values())
    for group in (*backends, provenance.HOST, provenance.METHOD):
        for pattern in group:
            assert provenance.find_sources([pattern]), pattern


def test_stale_results_are_found(project: Path) -> None:
    results = project / "results"
    results.mkdir()
    stamp = provenance.stamp(GLOBS, project)
    (results / "forward.json").write_text(json.dumps({"name": "forward", "stamp": stamp}))
    assert provenance.stale_results(results, project) == []
    (project / "call.py").write_text("SCALE = 4\n")
    assert provenance.stale_results(results, project) == [(results / "forward.json", stamp["date"])]


def test_a_failed_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    provenance.write_atomically(path, "first")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        provenance.write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_is_saved_with_a_line_for_each_row(tmp_path: Path) -> None:
    rows = [{"x": 1, "ratio": {"a": 0.5}}, {"x": 2, "ratio": {}}]
    path = provenance.save("x", benchmark="accuracy", title="8³", data=rows, sources=(), out_dir=tmp_path)
    assert json.loads(path.read_text())["data"] == provenance.load(path)["data"] == rows
    assert path.read_text().splitlines()[-5:] == [
        ' "data": [',
        '  {"x": 1, "ratio": {"a": 0.5}},',
        '  {"x": 2, "ratio": {}}',
        " ]",
        "}",
    ]
    assert '"title": "8³"' in path.read_text()


def test_committed_results_are_written_as_results_are_saved() -> None:
    for path in provenance.RESULTS.glob("*.json"):
        assert path.read_text(encoding="utf-8") == provenance.as_json(provenance.load(path)), path.name


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing was measured"):
        provenance.save("x", benchmark="accuracy", title="", data=[], sources=(), out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
