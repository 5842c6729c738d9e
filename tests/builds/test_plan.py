"""What `pip install .` builds: no extension, the CPU backend only, kernels of a wheel, or kernels of nvcc."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from build_tools import backend, kernel_wheel, kernels, plan, selection
from build_tools.kernel_wheel import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = selection.Selection(("80", "90a"), (64, 128), ("bf16",))
TORCH = ("2.11.0+cu130", "13.0")
INSTALLED = kernel_wheel.installed


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables, no installed wheel of kernels, no CUDA toolkit."""
    for name in ("ARCHS", "HDIMS", "DTYPES", "EXTENSION", "KERNELS", "PYTHON"):
        monkeypatch.delenv(f"FLASH_ATTN_MINI_{name}", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(kernel_wheel, "installed", lambda: None)
    monkeypatch.setattr(kernels, "find_cuda_home", lambda: None)


def message_with(variable: str, value: str, function: Callable[[], object]) -> str:
    """What the build says when it ends because of a variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, value)
        with pytest.raises(SystemExit) as ended:
            function()
    return str(ended.value)


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


# ---- the extension or not -------------------------------------------------------------------------------------------


def test_the_extension_is_built_where_there_is_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not selection.wants_extension()
    program(tmp_path / "g++")  # one that fails is an error of the build, not a package without the extension
    assert selection.wants_extension()
    monkeypatch.setenv("FLASH_ATTN_MINI_EXTENSION", "0")
    assert not selection.wants_extension()


def test_a_compiler_that_is_asked_for_and_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for value, text in (
        ("1", r"EXTENSION is '1', but there is no C\+\+ compiler"),
        ("yes", "is 'yes'; allowed: 0, 1, or"),
    ):
        assert re.search(text, message_with("FLASH_ATTN_MINI_EXTENSION", value, selection.wants_extension))
    monkeypatch.setenv("CXX", "missing-g++ -m64")
    with pytest.raises(SystemExit, match=r"CXX is 'missing-g\+\+ -m64', which does not exist"):
        selection.wants_extension()
    program(tmp_path / "missing-g++")
    assert selection.wants_extension()


def test_without_a_compiler_the_wheel_is_of_python_only_and_needs_no_torch(tmp_path: Path) -> None:
    source, dist = tmp_path / "source", tmp_path / "dist"
    dist.mkdir()
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    python = program(tmp_path / "python")  # as the interpreter of the target environment: it fails if it is called
    environment = os.environ | {
        "PATH": str(tmp_path),
        "FLASH_ATTN_MINI_PYTHON": str(python),
        "PYTHONWARNINGS": "ignore",
    }
    code = "from build_tools import backend as b; b.get_requires_for_build_wheel(); print(b.build_wheel('../dist'))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = dist.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("flash_attn_mini: "))
    assert "has no extension, because there is no C++ compiler" in line
    assert "install g++" in line


def test_with_a_compiler_the_wheel_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.target_torch, "find_package", lambda name: None)
    with pytest.raises(SystemExit, match="pip install torch"):
        backend.get_requires_for_build_wheel()
    monkeypatch.setenv("FLASH_ATTN_MINI_EXTENSION", "0")
    backend.get_requires_for_build_wheel()


# ---- which kernels --------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_gets_the_cpu_backend() -> None:
    planned = plan.plan("2.13.0+cpu", None)
    assert planned.selection == plan.ONLY_CPU
    assert "torch 2.13.0+cpu has no CUDA" in planned.message
    for variable, value in (("FLASH_ATTN_MINI_ARCHS", "90a"), ("FLASH_ATTN_MINI_KERNELS", "wheel")):
        message = message_with(variable, value, lambda: plan.plan("2.13.0+cpu", None))
        assert message.startswith(f"{variable} is '{value}', but torch 2.13.0+cpu has no CUDA")


def test_cuda_without_nvcc_gets_the_cpu_backend_unless_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan.plan(*TORCH)
    assert planned.selection == plan.ONLY_CPU
    for text in ("neither nvcc nor", PACKAGE, "Triton backend", "CUDA 13", "install the CUDA toolkit"):
        assert text in planned.message
    for variable, value, text in (
        ("FLASH_ATTN_MINI_ARCHS", "90a", "there is no nvcc"),
        ("FLASH_ATTN_MINI_KERNELS", "nvcc", "there is no nvcc"),
        ("FLASH_ATTN_MINI_KERNELS", "wheel", f"{PACKAGE} is not installed"),
        ("FLASH_ATTN_MINI_KERNELS", "pip", "allowed: wheel, nvcc"),
    ):
        assert text in message_with(variable, value, lambda: plan.plan(*TORCH))
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCHS", "none")
    assert plan.plan(*TORCH).selection == plan.ONLY_CPU


def test_nvcc_compiles_where_there_is_no_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "find_cuda_home", lambda: tmp_path)
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCHS", "80;120")
    planned = plan.plan(*TORCH)
    assert planned.selection.archs == ("80", "120")
    assert planned.wheel is None


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs a wheel of kernels, without its library, into an environment."""

    def run(cuda: str = "13.0", interface: str | None = None) -> Path:
        folder = tmp_path / PACKAGE
        folder.mkdir(exist_ok=True)
        described = {
            "version": "0.1.0+cu13",
            "cuda": cuda,
            "interface": interface or kernel_wheel.interface_version(CHOSEN, cuda),
            "selection": asdict(CHOSEN),
        }
        (folder / kernel_wheel.DESCRIPTION).write_text(json.dumps(described))
        monkeypatch.setattr(kernel_wheel, "installed", INSTALLED)
        monkeypatch.setattr(kernel_wheel.target_torch, "find_package", lambda name: folder)
        return folder

    return run


def test_an_installed_wheel_is_taken_with_all_that_it_has(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install()
    monkeypatch.setenv("FLASH_ATTN_MINI_HDIMS", "64")
    monkeypatch.setattr(kernels, "find_cuda_home", lambda: folder)  # nvcc, too
    planned = plan.plan(*TORCH)
    assert planned.selection == CHOSEN
    assert planned.wheel is not None
    assert planned.wheel.library == folder / kernel_wheel.LIBRARY
    assert "0.1.0+cu13" in planned.message
    monkeypatch.setenv("FLASH_ATTN_MINI_KERNELS", "nvcc")
    assert plan.plan(*TORCH).wheel is None


def test_a_wheel_that_does_not_fit_is_an_error(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = rf"install the {PACKAGE} of this version for CUDA 13 .*KERNELS=nvcc"
    install(cuda="12.8")
    with pytest.raises(SystemExit, match=rf"is for CUDA 12.8, but torch 2.11.0\+cu130 for CUDA 13.0: {remedy}"):
        plan.plan(*TORCH)
    install(interface="FLASH_KERNELS_0")
    with pytest.raises(SystemExit, match=rf"does not fit this one: {remedy}"):
        plan.plan(*TORCH)
    install()
    for name, value, has in (("ARCHS", "80;120", "80, 90a"), ("HDIMS", "256", "64, 128"), ("DTYPES", "fp16", "bf16")):
        text = rf"FLASH_ATTN_MINI_{name} is '{value}', but {PACKAGE} 0.1.0\+cu13 has {has}: {remedy}"
        assert re.search(text, message_with(f"FLASH_ATTN_MINI_{name}", value, lambda: plan.plan(*TORCH)))
