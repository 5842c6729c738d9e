"""Results carry the commit that was measured, and are stale after a commit of their kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import results
from build_tools import kernels

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_history = pytest.mark.skipif(
    results.commit_of() is None, reason="these sources are no git repository, or git is not installed"
)


def git(folder: Path, *arguments: str, date: str = "2026-01-02T10:00:00Z") -> None:
    environment = {**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, env=environment, check=True, capture_output=True)


def commit(folder: Path, file: str, text: str, date: str = "2026-01-02T10:00:00Z") -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-m", f"change {file}", date=date)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one kernel, and a result measured at its first commit."""
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path, "csrc/sm80/kernel.cu", "int tile() { return 64; }\n")
    return tmp_path


def measured(project: Path, sources: tuple[str, ...], **changed: str | None) -> None:
    """Writes a result of the sources as they are."""
    stamp = {**results.stamp(sources, project), **changed}
    (project / "results").mkdir(exist_ok=True)
    (project / "results" / "forward.json").write_text(json.dumps({"name": "forward", "stamp": stamp}))


def stale(project: Path) -> list[str]:
    return [path.name for path, _ in results.stale_results(project / "results", project)]


@needs_git
@pytest.mark.parametrize("sources", [("csrc/sm80",), ()], ids=["its kernels", "any kernel"])
def test_a_result_is_stale_after_a_commit_of_its_kernels(project: Path, sources: tuple[str, ...]) -> None:
    measured(project, sources)
    assert stale(project) == []
    commit(project, "notes/text.md", "text")
    assert stale(project) == []
    commit(project, "csrc/sm80/kernel.cu", "int tile() { return 128; }\n")
    ((path, reason),) = results.stale_results(project / "results", project)
    assert path.name == "forward.json"
    assert reason.endswith("2026-01-02, change csrc/sm80/kernel.cu")


@needs_git
def test_a_result_outlives_commits_of_other_kernels(project: Path) -> None:
    measured(project, ("csrc/sm80", "setup.py"))
    commit(project, "csrc/cpu/kernel.cpp", "int tile();\n")
    assert stale(project) == []
    (project / "csrc/sm80/kernel.cu").unlink()
    commit(project, "csrc/cpu/more.cpp", "int more();\n")
    assert stale(project) == ["forward.json"]


@needs_git
def test_a_result_outlives_changes_of_comments_and_static_asserts(project: Path) -> None:
    commit(project, "csrc/sm80/host.py", "x = 1\n")
    measured(project, ("csrc",))
    commit(project, "csrc/sm80/kernel.cu", "// A tile.\nint tile() {\n    return /* of keys */ 64;\n}\n")
    check = 'static_assert(sizeof(int) == 4 &&\n              (true), "a; b");\n'
    commit(project, "csrc/sm80/kernel.cu", f"{check}int tile() {{\n    {check}    return 64;\n}}\n")
    commit(project, "csrc/sm80/host.py", "# One.\nx = 1  # again\n")
    assert stale(project) == []
    commit(project, "csrc/sm80/kernel.cu", 'const char *tile() { return "// a"; }\n')
    measured(project, ("csrc",))
    commit(project, "csrc/sm80/kernel.cu", 'const char *tile() { return "// b"; }\n')
    assert stale(project) == ["forward.json"]
    measured(project, ("csrc",))
    git(project, "mv", "csrc/sm80/kernel.cu", "csrc/sm80/moved.cu")
    git(project, "commit", "-m", "move")
    assert stale(project) == ["forward.json"]


@needs_git
def test_a_star_of_a_source_matches_one_folder(project: Path) -> None:
    measured(project, ("csrc/*.h",))
    commit(project, "csrc/sm80/more.h", "int more();\n")
    assert stale(project) == []
    commit(project, "csrc/flash.h", "int flash();\n")
    assert stale(project) == ["forward.json"]


@needs_git
@pytest.mark.parametrize(
    "known", [None, "0123456789abcdef0123456789abcdef01234567"], ids=["none", "of another history"]
)
def test_without_a_known_commit_a_result_counts_from_its_date(project: Path, known: str | None) -> None:
    measured(project, ("csrc",), commit=known, date="2026-01-03 10:00 UTC")
    assert stale(project) == []
    commit(project, "csrc/sm80/kernel.cu", "int tile();\n", date="2026-01-03T09:59:00Z")
    assert stale(project) == []
    commit(project, "csrc/sm80/kernel.cu", "int tiles();\n", date="2026-01-03T10:01:00Z")
    assert stale(project) == ["forward.json"]


@needs_git
def test_the_commit_of_changed_sources_is_marked(project: Path) -> None:
    clean = results.commit_of(["csrc"], project)
    assert clean is not None
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    (project / "notes.txt").write_text("not a source")
    assert results.commit_of(["csrc"], project) == clean
    (project / "csrc/sm80/kernel.cu").write_text("int tile() { return 32; }\n")
    assert results.commit_of(["csrc"], project) == f"{clean}+"
    measured(project, ("csrc",))
    assert stale(project) == []


@needs_git
def test_a_result_of_sources_that_are_committed_with_it_counts_from_that_commit(project: Path) -> None:
    (project / "csrc/sm80/kernel.cu").write_text("int tile() { return 32; }\n")
    measured(project, ("csrc",), date="2026-01-02 10:30 UTC")
    git(project, "add", "-A")
    git(project, "commit", "-m", "the kernel and its result", date="2026-01-02T11:00:00Z")
    assert stale(project) == []
    path = project / "results" / "forward.json"
    path.write_text(path.read_text().replace("forward", "Forward"))
    commit(project, "csrc/sm80/kernel.cu", "int tile() { return 16; }\n", date="2026-01-02T12:00:00Z")
    assert stale(project) == ["forward.json"]


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.stamp(("csrc",), tmp_path)["commit"] is None
    measured(tmp_path, ("csrc",))
    assert stale(tmp_path) == []


def files_of(sources: tuple[str, ...]) -> set[Path]:
    paths = [f":(top,glob){source}" for source in sources]
    command = ["git", "ls-files", "--full-name", "--", *paths]
    listed = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, check=True).stdout
    return {results.ROOT / name for name in listed.splitlines()}


@needs_history
def test_host_time_goes_stale_with_every_module_between_the_call_and_the_backend() -> None:
    package = results.ROOT / "flash_attn_mini"
    found, waiting = set(), {package / "flash_attn_interface.py"}
    while waiting:
        path = waiting.pop()
        found.add(path)
        names = re.findall(r"^from \.(?: import )?(\w+)", path.read_text(), re.MULTILINE)
        waiting |= {package / f"{name}.py" for name in names if (package / f"{name}.py").is_file()} - found
    assert {"argument_checks", "ops", "options", "packed", "rng_state", "varlen"} <= {path.stem for path in found}
    csrc = results.ROOT / "csrc"
    of_cpp = {path for folder in (csrc, csrc / "api") for path in (*folder.glob("*.cpp"), *folder.glob("*.h"))}
    assert found | of_cpp <= files_of(results.HOST)


@needs_history
def test_every_source_of_the_benchmarks_exists() -> None:
    backends = (*results.SOURCES_OF_BACKEND.values(), *results.SOURCES_OF_CACHE.values())
    for group in (*backends, results.HOST, results.KERNELS):
        for source in group:
            assert files_of((source,)), source


@needs_history
def test_every_kernel_is_a_source_of_a_backend() -> None:
    of_backends = files_of(tuple(x for sources in results.SOURCES_OF_CACHE.values() for x in sources))
    left = files_of(results.KERNELS) - of_backends
    assert {path for path in left if path.suffix in {".cu", ".h", ".cpp", ".py"}} == set()


@needs_history
def test_kernels_without_a_cache_include_no_file_of_those_with_one() -> None:
    csrc, of_attention = results.ROOT / "csrc", files_of(results.ATTENTION)
    for source in csrc.glob("**/*.cu"):
        if not {"kvcache", "decode"} & set(source.relative_to(csrc).parts):
            assert set(kernels.included_files(source)) <= of_attention, source.name


def test_a_failed_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    results.write_atomically(path, "first")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_is_saved_with_a_line_for_each_row(tmp_path: Path) -> None:
    rows = [{"x": 1, "ratio": {"a": 0.5}}, {"x": 2, "ratio": {}}]
    path = results.save("x", benchmark="accuracy", title="8³", data=rows, sources=(), out_dir=tmp_path)
    assert json.loads(path.read_text())["data"] == results.load(path)["data"] == rows
    assert path.read_text().splitlines()[-5:] == [
        ' "data": [',
        '  {"x": 1, "ratio": {"a": 0.5}},',
        '  {"x": 2, "ratio": {}}',
        " ]",
        "}",
    ]
    assert '"title": "8³"' in path.read_text()


def test_committed_results_are_written_as_results_are_saved() -> None:
    for path in results.RESULTS.glob("*.json"):
        assert path.read_text(encoding="utf-8") == results.as_json(results.load(path)), path.name


def test_committed_results_name_gpu_driver_torch_date_and_commit() -> None:
    for path in results.RESULTS.glob("*.json"):
        stamp = results.load(path)["stamp"]
        assert stamp["torch"], path.name
        assert stamp["date"], path.name
        assert (stamp["gpu"] is None) == (stamp["driver"] is None), path.name
        if "sources_sha256" not in stamp:
            assert re.fullmatch(r"[0-9a-f]{40}\+?", stamp["commit"]), path.name


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing was measured"):
        results.save("x", benchmark="accuracy", title="", data=[], sources=(), out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
