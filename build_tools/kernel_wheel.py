"""The wheel flash_attn_mini_kernels: all CUDA kernels in one shared library that knows neither torch nor Python.

`build` makes it for `python setup.py kernel_wheel`. `installed` finds it in the target environment; setup.py then links
the host files with its library and needs no nvcc.

The library has its own copy of the CUDA runtime, and exports only the functions that host files call. They have a
symbol version, a hash of what host files and kernels have to agree on. So the dynamic linker refuses an extension whose
kernels were replaced by others.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import kernels, target_torch
from .selection import Selection, host_compiler

PACKAGE = "flash_attn_mini_kernels"
LIBRARY = f"lib{PACKAGE}.so"
DESCRIPTION = "build.json"
DEFAULT_ARCHS = ("80", "90a", "120")

# What the library exports, as the linker demangles it: names in quotes are exact; in others ? stands for a space.
_EXPORTS = (
    "void?flash::sm80::run_flash_*",
    "void?flash::sm80::run_bias_gradient*",
    "void?flash::sm90::run_flash_*",
    "long?flash::sm90::latent_scratch_floats*",
    "long?flash::sm90::split_scratch_floats*",
    "long?flash::splitkv_scratch_floats*",
    "void?flash::run_flash_fwd_splitkv*",
    "void?flash::run_flash_fwd_single_tile*",
    "void?flash::run_flash_bwd_single_tile*",
    "void?flash::run_append_kv*",
    '"flash::run_row_mod_gradient(flash::Flash_bwd_params const&, void*, CUstream_st*)"',
    '"flash::run_prepare_key_ranges(flash::Flash_fwd_params const&, CUstream_st*)"',
    '"flash::device_properties()"',
    '"flash::device_properties(int)"',
    '"flash::set_to_zero(void*, long, CUstream_st*)"',
    '"flash::cuda_version()"',
)
_COMMENT = re.compile(r"//[^\n]*")


@dataclass(frozen=True)
class KernelWheel:
    """A wheel of kernels: its description, and the folder that it is installed in."""

    folder: Path
    version: str
    cuda: str  # the toolkit's, such as "13.0"
    interface: str
    selection: Selection

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY


def interface_version(selection: Selection, cuda: str) -> str:
    """The symbol version of a library: a hash over the selection and the headers that host files and kernels share."""
    digest = hashlib.sha256(json.dumps([asdict(selection), cuda.split(".")[0]]).encode())
    for path in shared_headers():
        words = _COMMENT.sub("", path.read_text()).split()
        digest.update(f"{path.relative_to(kernels.CSRC)}\0{' '.join(words)}\0".encode())
    return f"FLASH_KERNELS_{digest.hexdigest()[:16]}"


def shared_headers() -> list[Path]:
    """The headers of csrc/ that both a host file and a kernel file include."""

    def included(sources: Iterable[Path]) -> set[Path]:
        return {path for source in sources for path in kernels.included_files(source)}

    return sorted(included(kernels.CSRC.glob("*/*.cpp")) & included(kernels.CSRC.rglob("*.cu")))


def installed() -> KernelWheel | None:
    """The wheel in the target environment; None where there is none."""
    folder = target_torch.find_package(PACKAGE)
    if folder is None:
        return None
    described = json.loads((folder / DESCRIPTION).read_text())
    chosen = {name: tuple(values) for name, values in described.pop("selection").items()}
    return KernelWheel(folder, selection=Selection(**chosen), **described)


def build(selection: Selection, jobs: int, version: str, dist_dir: Path) -> Path:
    """Compiles the kernels that the cache lacks, links them, and writes a wheel; returns its path."""
    objects, cuda = kernels.build_kernels(selection, jobs), _cuda_version()
    version += f"+cu{cuda.split('.')[0]}"
    wheel = KernelWheel(Path(), version, cuda, interface_version(selection, cuda), selection)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / PACKAGE
        folder.mkdir()
        link(objects, wheel.interface, folder / LIBRARY)
        described = {name: value for name, value in asdict(wheel).items() if name != "folder"}
        (folder / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n")
        (folder / "__init__.py").write_text('"""The CUDA kernels of flash_attn_mini: a library without torch."""\n')
        return _pack(folder.parent, version, dist_dir)


def link(objects: list[Path], interface: str, library: Path) -> None:
    """Links kernel objects with the static CUDA runtime into a library that exports _EXPORTS."""
    script = library.with_suffix(".map")
    exports = "\n".join(f"{name};" for name in _EXPORTS)
    script.write_text(f'{interface} {{\nglobal: extern "C++" {{\n{exports}\n}};\nlocal: *;\n}};\n')
    runtime = kernels.cuda_library_dir() / "libcudart_static.a"
    flags = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}", "-Wl,-z,defs", "-s"]
    libraries = [str(runtime), "-lrt", "-lpthread", "-ldl"]
    compiler = shlex.split(host_compiler() or "c++")
    subprocess.run([*compiler, "-shared", "-o", str(library), *flags, *map(str, objects), *libraries], check=True)
    script.unlink()


def _cuda_version() -> str:
    printed = subprocess.run([kernels.cuda_home() / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", printed.stdout)
    if release is None:
        raise SystemExit(f"nvcc --version names no release:\n{printed.stdout}{printed.stderr}")
    return release[1]


# A wheel for any Python 3 on this platform: it holds a library, but no module of an interpreter.
_SETUP = """\
from setuptools import Distribution, setup

class Platform(Distribution):
    def has_ext_modules(self):
        return True

class AnyPython(Distribution().get_command_class("bdist_wheel")):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

setup(distclass=Platform, cmdclass={{"bdist_wheel": AnyPython}}, **{arguments!r})
"""


def _pack(project: Path, version: str, dist_dir: Path) -> Path:
    """Writes the wheel of the package in the folder `project`."""
    arguments = {
        "name": PACKAGE,
        "version": version,
        "description": "The CUDA kernels of flash_attn_mini: one library, without torch and Python",
        "packages": [PACKAGE],
        "package_data": {PACKAGE: [LIBRARY, DESCRIPTION]},
    }
    (project / "setup.py").write_text(_SETUP.format(arguments=arguments))
    dist_dir.mkdir(parents=True, exist_ok=True)
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(dist_dir)]
    built = subprocess.run(command, cwd=project, capture_output=True, text=True)
    if built.returncode != 0:
        raise SystemExit(f"{PACKAGE} could not be packed:\n{built.stdout}{built.stderr}")
    return dist_dir / built.stdout.splitlines()[-1]
