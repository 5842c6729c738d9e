"""The choices of the build before it compiles: torch, kernels, CUTLASS, cached objects."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from build_tools import kernels, selection, target_torch

ROOT = Path(__file__).resolve().parents[2]
FETCH_CUTLASS = ROOT / "third_party" / "fetch_cutlass.py"
NO_WARNINGS = {"PYTHONWARNINGS": "ignore"}  # older versions of setuptools warn of their own beta features


@pytest.fixture(autouse=True)
def _no_selection_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARCHS", "HDIMS", "DTYPES", "CACHE", "PYTHON", "EXTENSION", "KERNELS"):
        monkeypatch.delenv(f"FLASH_ATTN_MINI_{name}", raising=False)
    for name in ("MAX_JOBS", "CUTLASS_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python_without_torch(tmp_path: Path) -> str:
    venv.create(tmp_path / "empty", with_pip=False)
    return str(tmp_path / "empty" / "bin" / "python")


def test_no_message_is_made_by_iostreams() -> None:
    """An extension that links libstdc++ statically crashes in them: csrc/common/message.h."""
    streams = re.compile(r"\bTORCH_(INTERNAL_ASSERT|CHECK)\w*\(|[io]stream|\bstd::c(out|err)\b")
    for path in sorted([*(ROOT / "csrc").rglob("*"), *(ROOT / "learn" / "csrc").rglob("*")]):
        if path.suffix in (".h", ".cpp", ".cu") and path.name != "message.h":
            code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
            found = streams.search(code)
            assert found is None, f"{path}: {found and found[0]}"


def test_torch_is_found_behind_a_build_isolation() -> None:
    hidden = "import importlib.util as u; assert u.find_spec('torch') is None"
    code = f"{hidden}; from build_tools import target_torch; print(target_torch.find_package('torch'))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
    command = [sys.executable, "-S", "-c", code]  # -S: without site-packages, as in an isolated build
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "AssertionError" in result.stderr:
        pytest.skip("this interpreter's torch lies outside site-packages")
    assert result.stdout.strip() == str(Path(torch.__file__).parent), result.stderr


def test_without_torch_the_build_ends_with_one_line_that_says_what_to_run(
    python_without_torch: str, tmp_path: Path
) -> None:
    environment = os.environ | {"FLASH_ATTN_MINI_PYTHON": python_without_torch, **NO_WARNINGS}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-temp", str(tmp_path)]
    wheel = [sys.executable, "-c", "from build_tools import backend; backend.get_requires_for_build_wheel()"]
    for command in (build, wheel):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stderr.strip() == target_torch.INSTALL_HINT.format(python=python_without_torch)
    assert "pip install torch" in target_torch.INSTALL_HINT


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["missing", "folder", "text", "other program"])
def test_an_interpreter_that_cannot_be_run_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    program(tmp_path / "other program", "exit 3")
    (tmp_path / "text").write_text("no program")
    environment = os.environ | {"FLASH_ATTN_MINI_PYTHON": str(tmp_path / name), **NO_WARNINGS}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-temp", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"FLASH_ATTN_MINI_PYTHON is '{tmp_path / name}'; allowed: a Python interpreter")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    base = ["egg_info", "--egg-base", str(folder)]  # outside of this checkout
    command = [sys.executable, "setup.py", "--quiet", *base, "sdist", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_an_sdist_and_metadata_need_no_torch(unpacked: Path, python_without_torch: str, tmp_path: Path) -> None:
    environment = os.environ | {"FLASH_ATTN_MINI_PYTHON": python_without_torch, **NO_WARNINGS}
    calls = (
        "get_requires_for_build_sdist()",
        f"build_sdist({str(tmp_path)!r})",
        f"prepare_metadata_for_build_wheel({str(tmp_path)!r})",
    )
    for call in calls:
        command = [sys.executable, "-c", f"from build_tools import backend; backend.{call}"]
        result = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("*.tar.gz"))) == len(list(tmp_path.glob("*.dist-info"))) == 1


def test_an_unpacked_sdist_has_everything_that_the_build_reads(unpacked: Path) -> None:
    for folder, suffixes in {"csrc": {".h", ".cpp", ".cu"}, "build_tools": {".py"}}.items():
        here, there = (
            {path.relative_to(root) for path in (root / folder).rglob("*") if path.suffix in suffixes}
            for root in (ROOT, unpacked)
        )
        assert there == here
    assert (unpacked / "third_party" / "cutlass.txt").is_file()
    assert not (unpacked / "learn").exists()
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
        ("MAX_JOBS", "", selection.max_jobs),
        ("MAX_JOBS", "²", selection.max_jobs),
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


def archs_by_object(*archs: str, hdims: tuple[int, ...] = (32, 128)) -> dict[str, tuple[str, ...]]:
    """The names of the objects that a build of these architectures compiles in bf16, and the architectures of each."""
    built = selection.Selection(archs, hdims, ("bf16",))
    return {kernel.name: kernel.archs for kernel in kernels.kernel_objects(built)}


def test_kernels_of_hopper_are_compiled_for_it_alone() -> None:
    archs = archs_by_object("80", "90a")
    kinds = ("sm90", "ranged_sm90", "biased_sm90", "split_sm90")
    forward = {f"flash_fwd_hdim128_bf16_{kernel}": ("90a",) for kernel in kinds}
    assert forward == {name: of for name, of in archs.items() if re.fullmatch("flash_fwd_.*_sm90", name)}
    backward = {f"flash_bwd_hdim128_bf16_{kind}_sm90": ("90a",) for kind in kernels.read_kinds().backward_sm90}
    assert backward == {name: of for name, of in archs.items() if re.fullmatch("flash_bwd_.*_sm90", name)}
    for others in ("80", "90"):  # plain sm_90 lacks the instructions
        assert not any(name.endswith("sm90") for name in archs_by_object(others))


# Kernels of any GPU, and those of sm80 for calls that have no kernel of Hopper's own: head dim 32, and pages.
WITHOUT_SM90 = {
    *(f"flash_bwd_hdim32_bf16_{kind}_sm80" for kind in ("any", *kernels.read_kinds().backward)),
    *(f"flash_fwd_hdim32_bf16_{kernel}" for kernel in ("sm80", "ranged_sm80", "biased_sm80", "paged_sm80")),
    "flash_fwd_hdim128_bf16_paged_sm80",
    *("flash_fwd_hdim32_bf16_splitkv", "flash_fwd_hdim128_bf16_splitkv", "append_kv_bf16", "device"),
    *("flash_single_tile_hdim32_bf16", "flash_single_tile_hdim128_bf16"),
    *("bias_gradient_hdim32_bf16", "bias_gradient_hdim128_bf16"),
    "row_mod_gradient",
    "key_ranges",
}
WITH_SM90 = {
    "flash_fwd_hdim128_bf16_sm80",
    "flash_fwd_hdim128_bf16_ranged_sm80",
    "flash_fwd_hdim128_bf16_biased_sm80",
    *(f"flash_bwd_hdim128_bf16_{kind}_sm80" for kind in ("any", *kernels.read_kinds().backward)),
}


@pytest.mark.parametrize(
    ("archs", "with_sm90", "without_sm90"),
    [
        (("90a",), (), ("90a",)),
        (("80", "90a"), ("80",), ("80", "90a")),
        (("90", "90a"), ("90",), ("90",)),  # code for 90 runs wherever code for 90a does
        (("80", "90", "90a"), ("80", "90"), ("80", "90")),
        (("80",), ("80",), ("80",)),
        (("90",), ("90",), ("90",)),
        (("80", "90a", "120"), ("80", "120"), ("80", "90a", "120")),
        (("120",), ("120",), ("120",)),
    ],
    ids=lambda value: ";".join(value) if isinstance(value, tuple) else None,
)
def test_hopper_gets_kernels_of_sm80_where_it_has_none_of_its_own(
    archs: tuple[str, ...], with_sm90: tuple[str, ...], without_sm90: tuple[str, ...]
) -> None:
    found = {name: of for name, of in archs_by_object(*archs).items() if not name.endswith("sm90")}
    expected = dict.fromkeys(WITHOUT_SM90, without_sm90)
    if with_sm90:
        expected |= dict.fromkeys(WITH_SM90, with_sm90)
    assert found == expected


@pytest.mark.parametrize(
    ("archs", "capabilities", "exact"),
    [
        (("100a",), (100,), (100,)),
        (("80", "90a", "120"), (80, 90, 120), (90,)),
        (("90", "90a"), (90,), ()),
        (("100f",), (100,), ()),
        (("120",), (120,), ()),
    ],
)
def test_code_of_an_a_architecture_runs_on_it_alone(
    archs: tuple[str, ...], capabilities: tuple[int, ...], exact: tuple[int, ...]
) -> None:
    chosen = selection.Selection(archs, (128,), ("bf16",))
    assert chosen.capabilities == capabilities
    assert chosen.exact_capabilities == exact


def test_kinds_are_those_of_the_header(tmp_path: Path) -> None:
    header = (kernels.CSRC / "dispatch" / "kind.h").read_text()
    enumerators = re.search(r"enum class Kind \{(.*?)\}", header, re.DOTALL)
    assert enumerators is not None
    kinds = kernels.read_kinds()
    assert list(kinds.all) == re.findall(r"^\s*(\w+),", enumerators[1], re.MULTILINE)
    built = selection.Selection(archs=("80",), hdims=(64,), dtypes=("bf16",))
    names = [kernel.name for kernel in kernels.kernel_objects(built) if "bwd" in kernel.name]
    assert names == [f"flash_bwd_hdim64_bf16_{kind}_sm80" for kind in ("any", *kinds.backward)]
    for old, new in (("X(full, 1, 1, 1, 1)", "X(full, 1, yes, 1, 1)"), ("kMinHeadDimSm90", "kMin")):
        assert old in header
        (tmp_path / "kind.h").write_text(header.replace(old, new))
        with pytest.raises(ValueError, match=r"kind\.h must define"):
            kernels.read_kinds(tmp_path / "kind.h")


def test_a_build_names_objects_whose_products_are_serialized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ptxas only informs, and the kernel is right but slow."""
    info = "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to registers"
    for text, expected in (("ptxas info : Used 168 registers", ""), (info, "; ptxas serializes the products of 1")):
        nvcc = program(tmp_path / "nvcc", f'echo "{text}"; touch "$2"')
        kernels._run_nvcc([str(nvcc)], "some_kernel", tmp_path / "some_kernel.o")
        (line,) = capsys.readouterr().out.splitlines()
        assert re.fullmatch(rf"kernels: some_kernel compiled in \d+ s{expected}( of its kernels)?", line)


def test_the_cache_key_covers_the_host_compiler_and_nvccs_own_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in place of nvcc preprocesses with the host compiler, as nvcc -E does."""
    for name in ("NVCC_CCBIN", *kernels.NVCC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    other = program(tmp_path / "other-g++", 'echo "\\"99.9\\""')
    preprocess = 'exec "${NVCC_CCBIN:-g++}" -E -x c++ "$2"'
    nvcc = program(tmp_path / "nvcc", f'if [ "$1" = --version ]; then echo nvcc 13; else {preprocess}; fi')
    before = kernels._compilers(nvcc)
    assert kernels._compilers(nvcc) == before
    found = [before]
    for name, value in (("NVCC_CCBIN", str(other)), *((name, "-lineinfo") for name in kernels.NVCC_VARIABLES)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found.append(kernels._compilers(nvcc))
    assert len({tuple(key) for key in found}) == 4
    monkeypatch.setenv("NVCC_CCBIN", str(tmp_path / "missing"))
    with pytest.raises(SystemExit, match="nvcc needs a host compiler"):
        kernels._compilers(nvcc)


def test_the_cache_key_covers_the_text_of_cutlass(tmp_path: Path) -> None:
    for landmark in ("cute/tensor.hpp", "cutlass/version.h", "cutlass/gemm/gemm.h"):
        (tmp_path / landmark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / landmark).write_text("#pragma once\n")
    before = kernels._hash_of_cutlass(tmp_path)
    assert kernels._hash_of_cutlass(tmp_path) == before
    (tmp_path / "cutlass" / "gemm" / "gemm.h").write_text("#pragma once // changed\n")
    assert kernels._hash_of_cutlass(tmp_path) != before


def test_kernel_objects_are_compiled_again_when_an_included_file_changes(tmp_path: Path) -> None:
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


@pytest.fixture
def fetcher(tmp_path: Path) -> list[str]:
    """The command that unpacks a small wheel; its pin is next to a copy of fetch_cutlass.py."""
    shutil.copy(FETCH_CUTLASS, tmp_path)
    wheel = tmp_path / "nvidia_cutlass-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("cute/tensor.hpp", "cutlass/version.h", *(f"cute/{i}.hpp" for i in range(200))):
            archive.writestr(f"cutlass_library/source/include/{name}", "#pragma once\n")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "cutlass.txt").write_text(f"nvidia-cutlass==1.0 --hash=sha256:{sha256}\n")
    return [sys.executable, str(tmp_path / FETCH_CUTLASS.name), "--wheel", str(wheel)]


def test_builds_that_fetch_cutlass_at_once_all_use_the_first_ones(fetcher: list[str], tmp_path: Path) -> None:
    runs = [subprocess.Popen(fetcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(4)]
    assert [run.communicate()[0].strip() for run in runs] == [str(tmp_path / "cutlass" / "include")] * 4
    assert [run.returncode for run in runs] == [0] * 4
    assert not [path for path in tmp_path.glob(".cutlass-*") if path.is_dir()]
    folder = (tmp_path / "cutlass").stat().st_ino
    subprocess.run(fetcher, check=True, capture_output=True)  # a compiler may be reading the headers
    assert (tmp_path / "cutlass").stat().st_ino == folder
    (tmp_path / "cutlass" / "PIN").write_text("another version")
    subprocess.run(fetcher, check=True, capture_output=True)
    assert (tmp_path / "cutlass").stat().st_ino != folder


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
