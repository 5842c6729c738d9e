"""The repository that Hugging Face's kernels load: its layout, its metadata, and that the package names itself nowhere.

tests/integrations/test_hub_copy.py runs a copy.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import hub_repository

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / hub_repository.PACKAGE


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "build_tools.hub_repository", *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    result = command(str(folder))
    assert result.returncode == 0, result.stderr
    return folder


def test_a_variant_has_the_package_and_nothing_compiled(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == {"README.md", "LICENSE", "build"}
    assert {path.name for path in (repository / "build").iterdir()} == {"torch-cuda", "torch-cpu"}
    for variant in (repository / "build").iterdir():
        files = {path.relative_to(variant) for path in variant.rglob("*") if path.is_file()}
        python = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
        assert files == python | {Path("metadata.json"), Path("py.typed")}
        assert all((variant / path).read_bytes() == (PACKAGE / path).read_bytes() for path in python)


def test_the_metadata_names_the_variant(repository: Path) -> None:
    ids = set()
    for backend in ("cuda", "cpu"):
        metadata = json.loads((repository / "build" / f"torch-{backend}" / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert (metadata["name"], metadata["version"]) == ("flash-attn-mini", 1)
        assert metadata["id"].isidentifier(), "the id is the name of a module and of a namespace of ops"
        ids.add(metadata["id"])
    assert len(ids) == 2


def test_a_change_of_a_file_gives_another_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PACKAGE, tmp_path / hub_repository.PACKAGE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(hub_repository, "ROOT", tmp_path)
    files = hub_repository.package_files()
    before = hub_repository.digest(files)
    assert hub_repository.digest(files) == before
    with (tmp_path / hub_repository.PACKAGE / "options.py").open("a") as changed:
        changed.write("\n")
    assert hub_repository.digest(files) != before


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for given in (tmp_path, tmp_path / "file"):
        result = command(str(given))
        assert result.returncode == 1
        assert result.stderr.strip() == f"OUT_DIR is {str(given)!r}, which exists; allowed: a new or an empty folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_module_imports_the_package_by_its_name() -> None:
    """A copy has another name: an absolute import would load the installed package."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.flash_attn_mini":
                names = ["flash_attn_mini"]  # the ops of the installed package
            if any(name.partition(".")[0] == "flash_attn_mini" for name in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
