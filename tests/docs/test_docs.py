"""The documents: Python snippets run, links and names exist, and the map lists every file."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import results, tables

from ..support.new_process import ROOT, run_python

OF_LEARN = sorted((ROOT / "learn").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *OF_LEARN, ROOT / "third_party" / "README.md"]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FILE = re.compile(
    r"\b(?:learn|csrc|flash_attn_mini|tests|benchmarks|docs|examples|third_party)/[\w./-]*\w\.(?:h|cpp|cu|py|md|txt)\b"
)
VARIABLE = re.compile(r"\bFLASH_ATTN_MINI_[A-Z_]+[A-Z]\b")
NAMED_DOCUMENT = re.compile(r"\bdocs/[\w/-]+(?:\.md)?\b|\blearn/\w+\.md\b")
README_LINES = 150
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
IDENTIFIER = re.compile(r"`((?:\w+(?:\.|::))*\w+)(?:\(\))?`")
FILE_ENDING = re.compile(r"\.(?:h|cpp|cu|py|md|txt|json)$")
OF_OTHERS = re.compile(r"(?:torch\.|at::|sgemm_$|nvjet_)")  # PyTorch's, MKL's and cuBLAS's
OF_TESTS_ALONE = {
    "FLASH_ATTN_MINI_SEED",
    "FLASH_ATTN_MINI_RANDOM_CASES",
    "FLASH_ATTN_MINI_STRESS_RUNS",
}

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if SNIPPET.search(path.read_text())], ids=lambda p: p.name
)
def test_snippets_run_one_after_the_other(document: Path, tmp_path: Path) -> None:
    if "import transformers" in document.read_text() or "from transformers" in document.read_text():
        pytest.importorskip("transformers")
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(SNIPPET.findall(document.read_text())))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = run_python(str(script), environment=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def anchors_of(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them: lower case, no punctuation, hyphens for blanks."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(document.read_text()):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert broken == []


def test_readme_is_short() -> None:
    lines = len((ROOT / "README.md").read_text().splitlines())
    assert lines <= README_LINES, f"README.md has {lines} lines, at most {README_LINES} are allowed"


COMMAND = re.compile(r"-m[ \n]((?:benchmarks|learn|examples|tests|build_tools|flash_attn_mini)(?:\.\w+)*)")


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "Makefile", ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_named_modules_exist(document: Path) -> None:
    files = {name: ROOT.joinpath(*name.split(".")) for name in COMMAND.findall(document.read_text())}
    there = {name for name, p in files.items() if p.with_suffix(".py").exists() or (p / "__main__.py").exists()}
    assert set(files) - there == set()


@every_document
def test_named_files_exist(document: Path) -> None:
    assert [name for name in FILE.findall(document.read_text()) if not (ROOT / name).exists()] == []


def test_documents_named_in_the_sources_exist() -> None:
    sources = [path for path in ROOT.glob("*") if path.suffix in {".py", ".toml"} or path.name == "Makefile"]
    for folder in ("build_tools", "csrc", "flash_attn_mini", "learn", "benchmarks", "tests", "examples"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".h", ".cpp", ".cu"}]
    missing = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path in sources
        for name in NAMED_DOCUMENT.findall(path.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


SOURCES = {".py", ".h", ".cpp", ".cu"}
DIVIDED = {"csrc", "flash_attn_mini", "tests"}  # the map lists their subfolders too


def names_in_the_map(heading: str) -> set[str]:
    """What the first column of a table in docs/layout.md lists."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / "docs/layout.md").read_text(), re.M | re.S)
    assert section is not None, f"docs/layout.md has no section {heading}"
    cells = [row.split("|")[1] for row in section[1].splitlines() if row.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([\w./]+)`", cell)}


def test_the_map_lists_every_folder_and_no_other() -> None:
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in {"build", "dist"}}
    there = set()
    for top in tops - {name for name in tops if name.startswith(".") or name.endswith(".egg-info")}:
        for path in (ROOT / top).rglob("*"):
            if path.suffix in SOURCES:
                parts = path.relative_to(ROOT).parts[:-1]
                there.add("/".join(parts[: 2 if top in DIVIDED else 1]) + "/")
    assert names_in_the_map("Folders") - {"tests/"} == there - {"tests/"}


def test_the_map_lists_every_file_of_the_package_and_no_other() -> None:
    there = {path.name for path in (ROOT / "flash_attn_mini").glob("*.py")} - {"__init__.py"}
    assert names_in_the_map("Files of flash_attn_mini") == there


@pytest.fixture(scope="module")
def words_of_the_sources() -> set[str]:
    """Every word of the code except this file, which lists the words to look for."""
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder in ("build_tools", "csrc", "flash_attn_mini", "learn", "benchmarks", "tests", "examples"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".h", ".cpp", ".cu"}]
    here = Path(__file__).resolve()
    return {word for path in sources if path != here for word in re.findall(r"\w+", path.read_text())}


@every_document
def test_named_identifiers_occur_in_the_sources(document: Path, words_of_the_sources: set[str]) -> None:
    names = [
        name
        for name in IDENTIFIER.findall(FENCED.sub("", document.read_text()))
        if ("_" in name or "::" in name)
        and not name.isupper()
        and not FILE_ENDING.search(name)
        and not OF_OTHERS.match(name)
    ]
    assert [name for name in names if not words_of_the_sources.issuperset(re.findall(r"\w+", name))] == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in OF_LEARN], ids=lambda path: path.name)
def test_result_blocks_are_paired(document: Path, tmp_path: Path) -> None:
    results.fill(document.read_text(), tmp_path)


def test_a_summary_has_the_ratios_of_the_first_contender(tmp_path: Path) -> None:
    rows = [
        {"ratio": {"ours": {"rival": 1.5, "other": 0.5}, "second": {"rival": 9.0}}},
        {"ratio": {"ours": {"rival": 1.25}}},
        {"ratio": {"ours": {"rival": 2.0}}},
    ]
    results.save("speed", benchmark="other", title="Speed", data=rows, sources=(), out_dir=tmp_path)
    summary = tables.summarize(results.load(tmp_path / "speed.json"))
    assert re.search(r"^\| ours ÷ ..., median and lowest +\| the fastest other +\| rival +\| other +\|$", summary, re.M)
    assert re.search(r"^\| 3 shapes +\| 1.25, 0.50 +\| 1.50, 1.25 +\| 0.50, 0.50 +\|$", summary, re.MULTILINE)
    assert "second" not in summary
    filled = results.fill("<!-- results:speed.summary begin -->\n<!-- results:speed.summary end -->\n", tmp_path)
    assert filled == f"<!-- results:speed.summary begin -->\n\n{summary}\n\n<!-- results:speed.summary end -->\n"


def test_every_environment_variable_is_documented_and_no_other() -> None:
    sources = [ROOT / "setup.py"]
    for folder in ("build_tools", "csrc", "flash_attn_mini", "learn", "benchmarks", "tests"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".h", ".cpp", ".cu"}]
    used: set[str] = set()
    for source in sources:
        if source != Path(__file__).resolve():
            used |= set(VARIABLE.findall(source.read_text()))
    table = {row for row in (ROOT / "docs" / "building.md").read_text().splitlines() if row.startswith("| `")}
    documented = set(VARIABLE.findall("\n".join(table)))
    assert documented == used - OF_TESTS_ALONE


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_lists_every_task_of_the_makefile() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "help"]
    listed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in listed.splitlines()} == set(phony[1].split()) - {"build"}


@pytest.mark.parametrize(
    "script", ["draw_masks.py", "draw_key_ranges.py", "draw_pipeline.py", "draw_pipeline_backward.py"]
)
def test_pictures_are_current(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = runpy.run_path(str(ROOT / "docs" / script))
    message = f"the drawing or its data changed; draw it again: python docs/{script}"
    assert drawing["PICTURE"].read_text(encoding="utf-8") == drawing["picture"](), message
