"""The library of the kernel wheel: what it needs, what it exports, and which extensions the dynamic linker refuses.

Small objects stand in for the kernels: they define functions that host files call, and others.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from build_tools import kernel_wheel, kernels, selection

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = selection.Selection(("80", "90a"), (64,), ("bf16",))

KERNELS = """
#include <cuda_runtime_api.h>
#include <stdexcept>
#include "dispatch/device.h"
#include "dispatch/run_flash.h"
#include "kvcache/splitkv.h"
namespace flash {
int helper() { int count = 0; return cudaGetDeviceCount(&count) == cudaSuccess ? count : -1; }
template <typename> int &counter() { static int value = 0; return value; }  // one in a process, unless it is hidden
const DeviceProperties &device_properties(int) { throw std::runtime_error("no GPU"); }
const DeviceProperties &device_properties() { return device_properties(helper()); }
void set_to_zero(void *, int64_t, cudaStream_t) { counter<int>() = helper(); }
int cuda_version() { return CUDART_VERSION; }
template <DType, int> int64_t splitkv_scratch_floats(const Flash_fwd_params &, int) { return counter<int>(); }
template int64_t splitkv_scratch_floats<DType::bfloat16, 64>(const Flash_fwd_params &, int);
template <DType> void run_append_kv(const Flash_fwd_params &, cudaStream_t) {}
template void run_append_kv<DType::bfloat16>(const Flash_fwd_params &, cudaStream_t);
namespace sm90 {
template <DType, int, Kind> void launch(const Flash_fwd_params &) { ++counter<int>(); }
template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, int *, cudaStream_t) { launch<kDType, kHeadDim, kKind>(params); }
template void run_flash_fwd<DType::bfloat16, 64, Kind::full>(const Flash_fwd_params &, int *, cudaStream_t);
template <DType, int> int64_t split_scratch_floats(const Flash_fwd_params &) { return 1; }
template int64_t split_scratch_floats<DType::bfloat16, 64>(const Flash_fwd_params &);
}  // namespace sm90
namespace sm80 {
template <DType, int> void run_flash_bwd_general(const Flash_bwd_params &, cudaStream_t) {}
template void run_flash_bwd_general<DType::bfloat16, 64>(const Flash_bwd_params &, cudaStream_t);
}  // namespace sm80
}  // namespace flash
"""
EXPORTED = {
    "flash::device_properties()",
    "flash::device_properties(int)",
    "flash::set_to_zero",
    "flash::cuda_version()",
    "flash::splitkv_scratch_floats",
    "flash::run_append_kv",
    "flash::sm90::run_flash_fwd",
    "flash::sm90::split_scratch_floats",
    "flash::sm80::run_flash_bwd_general",
}
HOST = """
#include "dispatch/device.h"
int main() {
    try {
        flash::device_properties(0);
    } catch (const std::exception &error) {
        return flash::cuda_version() / 1000;
    }
}
"""


def run(*command: object) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if kernels.find_cuda_home() is None:
        pytest.skip("needs the CUDA toolkit")
    folder = tmp_path_factory.mktemp("objects")
    (folder / "kernels.cpp").write_text(KERNELS)
    includes = [f"-I{kernels.CSRC}", f"-I{kernels.cuda_home() / 'include'}"]
    run("g++", "-std=c++17", "-fPIC", *includes, "-c", folder / "kernels.cpp", "-o", folder / "kernels.o")
    return [folder / "kernels.o"]


def test_the_library_needs_neither_torch_nor_python_nor_cuda(objects: list[Path], tmp_path: Path) -> None:
    library = tmp_path / kernel_wheel.LIBRARY
    kernel_wheel.link(objects, "FLASH_KERNELS_1", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\.so", run("readelf", "-d", library)))
    assert {name.split("-")[0] for name in needed} <= {"libstdc++", "libgcc_s", "libm", "libc", "ld"}


def test_the_library_exports_what_host_files_call_and_nothing_else(objects: list[Path], tmp_path: Path) -> None:
    library = tmp_path / kernel_wheel.LIBRARY
    kernel_wheel.link(objects, "FLASH_KERNELS_1", library)
    lines = run("nm", "--dynamic", "--demangle", "--defined-only", library).splitlines()
    assert {line.split()[1] for line in lines} <= set("ATW")  # no unique symbol (u), which a process has once
    names = [line.split(maxsplit=2)[2] for line in lines]
    assert all(name.partition("@")[2] in ("", "@FLASH_KERNELS_1") for name in names)
    short = {re.sub(r"^(void|long) |<.*|@.*", "", name) for name in names} - {"FLASH_KERNELS_1"}
    assert {re.sub(r"\((?!\)|int\)).*", "", name) for name in short} == EXPORTED


def test_every_kernel_function_that_host_files_name_is_exported() -> None:
    """The functions declared in the headers of the interface, against the patterns."""
    declared = set()
    headers = {path: path.read_text() for path in kernel_wheel.shared_headers()}
    with_launches = {path.name: text for path, text in headers.items() if "cudaStream_t stream);" in text}
    assert {"run_flash.h", "splitkv.h", "device.h", "flash_fwd_latent.h", "single_tile.h"} <= set(with_launches)
    for whole in with_launches.values():
        text = re.sub(r"//[^\n]*|^#[^\n]*|inline [^\n]*\{.*?^\}", "", whole, flags=re.M | re.S)
        declared |= set(re.findall(r"^(?:void|int64_t|int|const DeviceProperties &)\s?(\w+)\(", text, re.MULTILINE))
    declared -= {name for name in declared if name.endswith("_cpu")}  # in host files
    declared -= {"run_combine_splits"}  # called only by kernel files
    assert len(declared) > 8
    beginnings = [re.split(r"\W+", pattern[:-1])[-1] for pattern in kernel_wheel._EXPORTS if pattern.endswith("*")]
    for name in declared:
        is_exact = any(re.search(rf"\b{name}\(", pattern) for pattern in kernel_wheel._EXPORTS)
        assert is_exact or any(name.startswith(beginning) for beginning in beginnings), name


def test_the_dynamic_linker_refuses_other_kernels(objects: list[Path], tmp_path: Path) -> None:
    library, program = tmp_path / kernel_wheel.LIBRARY, tmp_path / "host"
    (tmp_path / "host.cpp").write_text("#include <stdexcept>" + HOST)
    kernel_wheel.link(objects, "FLASH_KERNELS_1", library)
    flags = [f"-I{kernels.CSRC}", f"-Wl,-rpath,{tmp_path}", "-std=c++17"]
    run("g++", *flags, tmp_path / "host.cpp", library, "-o", program)
    toolkit = int(kernel_wheel._cuda_version().split(".")[0])
    assert subprocess.run([program]).returncode == toolkit  # an exception passes from the library to its caller
    kernel_wheel.link(objects, "FLASH_KERNELS_2", library)
    refused = subprocess.run([program], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "version `FLASH_KERNELS_1' not found" in refused.stderr


def test_the_interface_follows_code_and_selection_but_no_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel_wheel.interface_version(CHOSEN, "13.0")
    assert kernel_wheel.interface_version(CHOSEN, "13.1") == before
    assert kernel_wheel.interface_version(CHOSEN, "12.8") != before
    other = selection.Selection(("80",), CHOSEN.hdims, CHOSEN.dtypes)
    assert kernel_wheel.interface_version(other, "13.0") != before
    shared = {path.relative_to(kernels.CSRC).as_posix() for path in kernel_wheel.shared_headers()}
    assert {"flash.h", "dispatch/run_flash.h", "dispatch/device.h", "kvcache/splitkv.h"} <= shared
    run("cp", "-r", kernels.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(kernels, "CSRC", tmp_path / "csrc")
    header = tmp_path / "csrc" / "flash.h"
    text = header.read_text()
    header.write_text("// one more line\n" + text)
    assert kernel_wheel.interface_version(CHOSEN, "13.0") == before
    header.write_text(text.replace("int page_size = 0;", "int64_t page_size = 0;"))
    assert kernel_wheel.interface_version(CHOSEN, "13.0") != before


def test_the_wheel_is_for_any_python(objects: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "build_kernels", lambda selection, jobs: objects)
    path = kernel_wheel.build(CHOSEN, 1, "1.2", tmp_path)
    cuda = kernel_wheel._cuda_version()
    assert re.fullmatch(rf"flash_attn_mini_kernels-1\.2\+cu{cuda.split('.')[0]}-py3-none-linux_\w+\.whl", path.name)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "site" / kernel_wheel.PACKAGE
    monkeypatch.setattr(kernel_wheel.target_torch, "find_package", lambda name: folder)
    found = kernel_wheel.installed()
    assert found is not None
    assert found.library.is_file()
    assert (found.selection, found.cuda) == (CHOSEN, cuda)
    assert found.interface == kernel_wheel.interface_version(CHOSEN, cuda)
