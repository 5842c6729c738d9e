"""What the build decides before it compiles: which torch, which kernels, which CUTLASS, and what is compiled anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

from build_tools import kernels, selection, target_torch

ROOT = Path(__file__).resolve().parent.parent
FETCH_CUTLASS = ROOT / "third_party" / "fetch_cutlass.py"


@pytest.fixture(autouse=True)
def _no_selection_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARCHS", "HDIMS", "DTYPES", "CACHE", "PYTHON"):
        monkeypatch.delenv(f"FLASH_ATTN_MINI_{name}", raising=False)
    for name in ("MAX_JOBS", "CUTLASS_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python_without_torch(tmp_path: Path) -> str:
    venv.create(tmp_path / "empty", with_pip=False)
    return str(tmp_path / "empty" / "bin" / "python")


def test_torch_is_found_behind_a_build_isolation() -> None:
    hidden = "import importlib.util as u; assert u.find_spec('torch') is None"
    code = f"{hidden}; from build_tools import target_torch; print(target_torch.find_torch())"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
    command = [sys.executable, "-S", "-c", code]  # -S: without site-packages, as in an isolated build
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "AssertionError" in result.stderr:
        pytest.skip("this interpreter's torch lies outside site-packages")
    assert result.stdout.strip() == str(Path(torch.__file__).parent), result.stderr


def test_without_torch_the_build_ends_with_one_line_that_says_what_to_run(python_without_torch: str) -> None:
    environment = os.environ | {"FLASH_ATTN_MINI_PYTHON": python_without_torch}
    command = [sys.executable, "setup.py", "build", "--help"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert message == target_torch.INSTALL_HINT.format(python=python_without_torch)
    assert "pip install torch" in message


def test_an_unpacked_sdist_has_everything_that_the_build_reads(tmp_path: Path) -> None:
    base = ["egg_info", "--egg-base", str(tmp_path)]  # elsewhere than in this checkout
    command = [sys.executable, "setup.py", "--quiet", *base, "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    for folder, suffixes in {"csrc": {".h", ".cpp", ".cu"}, "build_tools": {".py"}}.items():
        here, there = (
            {path.relative_to(root) for path in (root / folder).rglob("*") if path.suffix in suffixes}
            for root in (ROOT, unpacked)
        )
        assert there == here
    assert (unpacked / "third_party" / "cutlass.txt").is_file()
    command = [sys.executable, "setup.py", "--version"]
    result = subprocess.run(command, cwd=unpacked, capture_output=True, text=True)
    assert re.fullmatch(r"\d+(\.\d+)+", result.stdout.strip()), result.stderr


def test_default_selection_is_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selection.select_hdims() == (32, 64, 96, 128, 192, 256)
    assert selection.select_dtypes() == ("fp16", "bf16")
    monkeypatch.setenv("PATH", "")  # no nvidia-smi: no GPU to look at
    assert selection.select_archs() == selection.DEFAULT_ARCHS


@pytest.mark.parametrize(
    ("variable", "value", "select", "expected"),
    [
        ("ARCHS", "80;90a", selection.select_archs, ("80", "90a")),
        ("ARCHS", "89,80,89", selection.select_archs, ("89", "80")),
        ("ARCHS", "none", selection.select_archs, ()),
        ("HDIMS", "128;64", selection.select_hdims, (64, 128)),
        ("DTYPES", "bf16", selection.select_dtypes, ("bf16",)),
    ],
)
def test_selection_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, select: object, expected: tuple[object, ...]
) -> None:
    monkeypatch.setenv(f"FLASH_ATTN_MINI_{variable}", value)
    assert callable(select)
    assert select() == expected


@pytest.mark.parametrize(
    ("variable", "value", "select"),
    [
        ("FLASH_ATTN_MINI_ARCHS", "75", selection.select_archs),
        ("FLASH_ATTN_MINI_ARCHS", "sm_80", selection.select_archs),
        ("FLASH_ATTN_MINI_HDIMS", "100", selection.select_hdims),
        ("FLASH_ATTN_MINI_DTYPES", "fp32", selection.select_dtypes),
        ("MAX_JOBS", "0", selection.max_jobs),
        ("MAX_JOBS", "many", selection.max_jobs),
    ],
)
def test_wrong_selection_names_the_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, select: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert callable(select)
    with pytest.raises(SystemExit, match=rf"{variable}.*'{value}'.*allowed: "):
        select()


def test_number_of_jobs_follows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_free_memory", lambda: selection.MEMORY_PER_JOB // 2)
    assert selection.max_jobs() == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert selection.max_jobs() == 7


def test_kernels_of_hopper_are_compiled_for_it_alone() -> None:
    built = selection.Selection(archs=("80", "90a"), hdims=(32, 128), dtypes=("bf16",))
    archs = {kernel.name: kernel.archs for kernel in kernels.kernel_objects(built)}
    assert archs["flash_fwd_hdim128_bf16_sm90"] == ("90a",)
    assert archs["flash_fwd_hdim128_bf16_sm80"] == ("80", "90a")
    assert "flash_fwd_hdim32_bf16_sm90" not in archs
    for others in (("80",), ("90",)):  # plain sm_90 lacks the instructions
        without = selection.Selection(archs=others, hdims=(128,), dtypes=("bf16",))
        assert not any(kernel.name.endswith("sm90") for kernel in kernels.kernel_objects(without))


def test_kernel_objects_are_compiled_anew_when_an_included_file_changes(tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text("int value = 1;")
    (tmp_path / "outer.h").write_text('#include "inner.h"')
    source = tmp_path / "kernel.cu"
    source.write_text('#include "outer.h"')
    kernel = kernels.KernelObject("kernel", source, ("-DA=1",), ("80",))
    before = kernels._content_hash(kernel, ["nvcc 13"])
    assert kernels._content_hash(kernel, ["nvcc 13"]) == before
    assert kernels._content_hash(kernel, ["nvcc 14"]) != before
    for defines, archs in ((("-DA=2",), ("80",)), (("-DA=1",), ("80", "90a"))):
        assert kernels._content_hash(kernels.KernelObject("kernel", source, defines, archs), ["nvcc 13"]) != before
    (tmp_path / "inner.h").write_text("int value = 2;")
    assert kernels._content_hash(kernel, ["nvcc 13"]) != before


def test_cutlass_wheel_that_is_not_the_pinned_one_is_refused() -> None:
    command = [sys.executable, FETCH_CUTLASS, "--wheel", __file__]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "is not nvidia-cutlass==4.2.0.0: its sha256 is" in result.stderr


def test_cutlass_path_without_headers_is_an_error(tmp_path: Path) -> None:
    environment = os.environ | {"CUTLASS_PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, FETCH_CUTLASS], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert str(tmp_path) in result.stderr


def test_cutlass_path_is_taken_as_it_is(tmp_path: Path) -> None:
    for landmark in ("cute/tensor.hpp", "cutlass/version.h"):
        (tmp_path / "include" / landmark).parent.mkdir(parents=True)
        (tmp_path / "include" / landmark).touch()
    for path in (tmp_path, tmp_path / "include"):
        environment = os.environ | {"CUTLASS_PATH": str(path)}
        result = subprocess.run([sys.executable, FETCH_CUTLASS], env=environment, capture_output=True, text=True)
        assert result.stdout.strip() == str(tmp_path / "include"), result.stderr
