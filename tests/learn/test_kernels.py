"""The compilation of the teaching kernels: what is missing is said, and the package has none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flash_attn_mini.backends import extension
from learn import kernels


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    compiled = kernels._compiled
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, a CUDA build of torch, ninja, and a toolkit, none of which has to work."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "ninja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_nothing_is_missing_on_a_complete_machine(complete: Path) -> None:
    assert kernels.missing_reason() is None


def test_without_a_gpu_nothing_is_compiled(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "_compiled", lambda: pytest.fail("compiles"))
    assert kernels.unavailable_reason() == "needs a CUDA GPU"


def test_a_build_of_torch_without_cuda_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kernels.unavailable_reason() == f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"


def test_a_missing_nvcc_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> Path:
        raise SystemExit("no nvcc")

    monkeypatch.setattr(kernels, "cuda_home", ends)
    reason = kernels.unavailable_reason()
    assert reason is not None
    assert "there is no nvcc" in reason
    with pytest.raises(RuntimeError, match="there is no nvcc"):
        kernels.load()


def test_a_missing_ninja_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (complete / "ninja").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = kernels.unavailable_reason()
    assert reason is not None
    assert "pip install ninja" in reason


def test_a_compilation_that_fails_is_a_reason_and_its_message_is_shown(
    complete: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**options: object) -> None:
        assert options["sources"] == [str(kernels.CSRC / name) for name in kernels.SOURCES]
        raise RuntimeError("ptxas: no")

    monkeypatch.setattr(kernels, "cutlass_include_dir", lambda: complete)
    monkeypatch.setattr("torch.utils.cpp_extension.load", fails)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    reason = kernels.unavailable_reason()
    assert reason is not None
    assert "do not compile or load" in reason
    assert "ptxas: no" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="do not compile or load"):
        kernels.load()


def test_every_source_is_compiled_and_binds_the_functions_that_the_rungs_call() -> None:
    assert set(kernels.SOURCES) == {path.name for path in kernels.CSRC.iterdir() if path.suffix in (".cpp", ".cu")}
    bound = re.findall(r'module\.def\("(\w+)"', (kernels.CSRC / "bindings.cpp").read_text())
    called = [
        name
        for file in ("minimal_cuda.py", "tensor_cores.py")
        for name in re.findall(r"kernels\.load\(\)\.(\w+)\(", (kernels.CSRC.parent / file).read_text())
    ]
    assert bound == called == ["minimal_fwd", "tensor_cores_fwd"]


def test_the_extension_of_the_package_has_none_of_them() -> None:
    bindings = kernels.CSRC.parents[1] / "csrc" / "api" / "bindings.cpp"
    assert "minimal" not in bindings.read_text()
    assert not {"minimal_fwd", "tensor_cores_fwd"} & set(dir(extension.MODULE))


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA")
def test_the_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU too: code for 8.0 is compiled then."""
    if (reason := kernels.missing_reason()) is not None:
        pytest.skip(reason)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    x = torch.zeros(1, 1, 4, 64)
    for name in ("minimal_fwd", "tensor_cores_fwd"):
        with pytest.raises(ValueError, match=f"{name} takes contiguous"):
            getattr(kernels.load(), name)(x, x, x, 0.1, False)
