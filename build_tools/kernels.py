"""Compiles the CUDA kernels, which know nothing of torch, into objects cached by content.

An object's name holds a hash over everything that it depends on: nvcc, the host compiler, flags, the text of CUTLASS,
the source and every file of csrc/ that it includes. So nothing unchanged is compiled twice, and the cache folder can be
copied to any machine with the same compilers.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from third_party.fetch_cutlass import LANDMARKS, CutlassError, cutlass_include_dir

from .selection import ALL_DTYPES, Selection

CSRC = Path(__file__).resolve().parent.parent / "csrc"
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC",
    "-Xptxas=-v",  # registers and spills, kept next to each object
    "-lineinfo",
    "-DNDEBUG",
)
NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # nvcc adds their flags to every command line
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_SERIALIZED = re.compile(r"\(C751\d\)[^\n]*serialized")  # of ptxas, once for each kernel
_KINDS = re.compile(r"#define FLASH_KINDS\(X\)((?:\s*\\\n\s*X\(\w+(?:, [01]){4}\))+)\n")
_KIND = re.compile(r"X\((\w+), ([01]), ([01]), ([01]), ([01])\)")
_SEPARATE_FORWARDS = ("ranged", "biased")  # kinds whose forward has an sm90 kernel, and object files of its own
# The kernels of csrc/sm90/backward/flash_bwd_dq.h.
_MIN_HEADDIM_DQ_PASS = 192
_DQ_PASS_KINDS = ("full", "local", "varlen")
_MIN_HEADDIM_SM90 = re.compile(r"constexpr int kMinHeadDimSm90 = (\d+);")
_MAX_HEADDIM_SINGLE_TILE = re.compile(r"constexpr int kMaxHeadDimSingleTile = (\d+);")
_HEADDIM_LATENT = re.compile(r"constexpr int kHeadDimLatent = (\d+),")


@dataclass(frozen=True)
class KernelObject:
    """One object file: a source compiled with a set of defines, for some architectures."""

    name: str
    source: Path
    defines: tuple[str, ...]
    archs: tuple[str, ...]


class Kinds(NamedTuple):
    """What dispatch/kind.h says: the kinds of kernel in the order of their enumerators; Hopper's smallest head dim."""

    all: tuple[str, ...]
    forward_sm90: tuple[str, ...]  # those whose forward has an sm90 kernel; all others have an sm80 kernel
    backward: tuple[str, ...]  # those with an sm80 backward kernel
    backward_sm90: tuple[str, ...]  # those with an sm90 backward kernel
    min_hdim_sm90: int
    hdim_latent: int  # the kernel of a cache of latent vectors comes with those of this head dim


def read_kinds(header: Path = CSRC / "dispatch" / "kind.h") -> Kinds:
    """Reads FLASH_KINDS, kMinHeadDimSm90 and kHeadDimLatent; ValueError where the header is not written as expected."""
    text = header.read_text()
    table, smallest, latent = (pattern.search(text) for pattern in (_KINDS, _MIN_HEADDIM_SM90, _HEADDIM_LATENT))
    if table is None or smallest is None or latent is None:
        raise ValueError(
            f"{header} must define FLASH_KINDS(X) as lines X(name, 0 or 1, 0 or 1, 0 or 1, 0 or 1), "
            "constexpr int kMinHeadDimSm90 and constexpr int kHeadDimLatent"
        )
    names, _, *columns = zip(*_KIND.findall(table[1]), strict=True)
    backward, forward_sm90, backward_sm90 = (
        tuple(name for name, value in zip(names, column, strict=True) if value == "1") for column in columns
    )
    return Kinds(names, forward_sm90, backward, backward_sm90, int(smallest[1]), int(latent[1]))


def read_max_hdim_single_tile(header: Path = CSRC / "single_tile" / "single_tile.h") -> int:
    """Reads kMaxHeadDimSingleTile; ValueError where the header is not written as expected."""
    found = _MAX_HEADDIM_SINGLE_TILE.search(header.read_text())
    if found is None:
        raise ValueError(f"{header} must define constexpr int kMaxHeadDimSingleTile")
    return int(found[1])


def kernel_objects(selection: Selection) -> list[KernelObject]:
    """The objects of a selection, largest head dim first because its kernels compile longest.

    Where a call has a kernel in csrc/sm90, the kernel of csrc/sm80 is not compiled for "90a".
    """
    objects: list[KernelObject] = []
    kinds, others = read_kinds(), selection.archs_of_others
    max_hdim_single_tile = read_max_hdim_single_tile()

    def archs_of_sm80(is_in_sm90: bool) -> tuple[str, ...]:
        return selection.archs_beside_sm90 if is_in_sm90 else others

    def add(name: str, source: str, defines: tuple[str, ...], archs: tuple[str, ...]) -> None:
        if archs:
            objects.append(KernelObject(name, CSRC / source, defines, archs))

    for hdim, dtype in itertools.product(sorted(selection.hdims, reverse=True), selection.dtypes):
        name = f"hdim{hdim}_{dtype}"
        defines = (f"-DFLASH_HEADDIM={hdim}", f"-DFLASH_DTYPE={ALL_DTYPES[dtype]}")
        is_for_sm90 = selection.has_sm90 and hdim >= kinds.min_hdim_sm90
        if is_for_sm90:
            source = "sm90/forward/flash_fwd_instantiation.cu"
            add(f"flash_fwd_{name}_sm90", source, defines, ("90a",))
            for kind in _SEPARATE_FORWARDS:
                add(f"flash_fwd_{name}_{kind}_sm90", source, (*defines, f"-DFLASH_KIND={kind}"), ("90a",))
            add(f"flash_fwd_{name}_split_sm90", "sm90/decode/flash_fwd_split_instantiation.cu", defines, ("90a",))
            for kind in kinds.backward_sm90:
                extra = (*defines, f"-DFLASH_KIND={kind}")
                add(f"flash_bwd_{name}_{kind}_sm90", "sm90/backward/flash_bwd_instantiation.cu", extra, ("90a",))
                if hdim >= _MIN_HEADDIM_DQ_PASS and kind in _DQ_PASS_KINDS:
                    source = "sm90/backward/flash_bwd_dq_instantiation.cu"
                    add(f"flash_bwd_dq_{name}_{kind}_sm90", source, extra, ("90a",))
        source = "sm80/backward/flash_bwd_instantiation.cu"
        takes_all = set(kinds.backward) <= set(kinds.backward_sm90)
        add(f"flash_bwd_{name}_any_sm80", source, defines, archs_of_sm80(is_for_sm90 and takes_all))
        for kind in kinds.backward:
            archs = archs_of_sm80(is_for_sm90 and kind in kinds.backward_sm90)
            add(f"flash_bwd_{name}_{kind}_sm80", source, (*defines, f"-DFLASH_KIND={kind}"), archs)
        source = "sm80/forward/flash_fwd_instantiation.cu"
        add(f"flash_fwd_{name}_sm80", source, defines, archs_of_sm80(is_for_sm90))
        for kind in kinds.all:
            is_in_sm90 = kind in kinds.forward_sm90
            if not is_in_sm90 or kind in _SEPARATE_FORWARDS:
                archs = archs_of_sm80(is_for_sm90 and is_in_sm90)
                add(f"flash_fwd_{name}_{kind}_sm80", source, (*defines, f"-DFLASH_KIND={kind}"), archs)
        add(f"bias_gradient_{name}", "sm80/backward/bias_gradient_instantiation.cu", defines, others)
        add(f"flash_fwd_{name}_splitkv", "kvcache/splitkv_instantiation.cu", defines, others)
        if hdim <= max_hdim_single_tile:
            add(f"flash_single_tile_{name}", "single_tile/single_tile_instantiation.cu", defines, others)
    for dtype in selection.dtypes:
        if selection.has_sm90 and kinds.hdim_latent in selection.hdims:
            source = "sm90/decode/flash_fwd_latent_instantiation.cu"
            add(f"flash_fwd_latent_{dtype}_sm90", source, (f"-DFLASH_DTYPE={ALL_DTYPES[dtype]}",), ("90a",))
        add(f"append_kv_{dtype}", "kvcache/append_instantiation.cu", (f"-DFLASH_DTYPE={ALL_DTYPES[dtype]}",), others)
    add("row_mod_gradient", "common/row_mod_gradient.cu", (), others)
    add("key_ranges", "common/key_ranges.cu", (), others)
    add("device", "dispatch/device.cu", (), others)
    return objects


def cache_dir() -> Path:
    """FLASH_ATTN_MINI_CACHE, else flash_attn_mini/ in the user's cache folder."""
    configured = os.environ.get("FLASH_ATTN_MINI_CACHE")
    if configured:
        return Path(configured).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_attn_mini" / "kernels"


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, else around the nvcc on PATH, else /usr/local/cuda; None where there is no nvcc."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(str(Path(on_path).resolve().parent.parent))
    candidates.append("/usr/local/cuda")
    for candidate in candidates:
        if candidate and all((Path(candidate) / part).is_file() for part in ("bin/nvcc", "include/cuda_runtime.h")):
            return Path(candidate)
    return None


def cuda_home() -> Path:
    """`find_cuda_home`.

    Raises:
        SystemExit: If there is no nvcc.
    """
    found = find_cuda_home()
    if found is not None:
        return found
    raise SystemExit(
        "CUDA kernels are to be built, but there is no nvcc: install the CUDA toolkit or set CUDA_HOME, or build "
        "only the CPU backend with: FLASH_ATTN_MINI_ARCHS=none pip install ."
    )


def cuda_library_dir() -> Path:
    """The toolkit's folder of libraries: lib in a toolkit of conda."""
    folder = cuda_home() / "lib64"
    return folder if folder.is_dir() else cuda_home() / "lib"


def build_kernels(selection: Selection, jobs: int) -> list[Path]:
    """Compiles what the cache lacks, `jobs` at a time; returns the object files to link."""
    nvcc = cuda_home() / "bin" / "nvcc"
    try:
        include_dirs = (CSRC, cutlass_include_dir())
    except CutlassError as error:
        raise SystemExit(str(error)) from None
    fingerprint = [*_compilers(nvcc), _hash_of_cutlass(include_dirs[1]), *NVCC_FLAGS]

    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        kernel: folder / f"{kernel.name}-{_content_hash(kernel, fingerprint)}.o" for kernel in kernel_objects(selection)
    }
    missing = [(kernel, path) for kernel, path in wanted.items() if not path.is_file()]
    print(f"kernels: {len(wanted)} objects, {len(missing)} to compile, {jobs} at a time, cache {folder}", flush=True)

    def compile_one(item: tuple[KernelObject, Path]) -> None:
        kernel, path = item
        includes = [f"-I{directory}" for directory in include_dirs]
        command = [str(nvcc), "-c", str(kernel.source), *_flags_of(kernel), *NVCC_FLAGS, *includes]
        _run_nvcc(command, kernel.name, path)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, missing))  # list(): raise the first failure
    return list(wanted.values())


def _run_nvcc(command: list[str], name: str, path: Path) -> None:
    """Compiles into a temporary file and moves it into place: an interrupted build leaves no broken object."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        result = subprocess.run(
            [*command, "-o", str(unfinished)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode != 0:
            print(result.stdout, file=sys.stderr)
            raise SystemExit(f"nvcc failed on {name}: {' '.join(command)}")
        path.with_suffix(".ptxas.txt").write_text(result.stdout)
        unfinished.replace(path)
    serialized = len(_SERIALIZED.findall(result.stdout))
    note = f"; ptxas serializes the products of {serialized} of its kernels" if serialized else ""
    print(f"kernels: {name} compiled in {time.monotonic() - start:.0f} s{note}", flush=True)


def _flags_of(kernel: KernelObject) -> list[str]:
    return [*kernel.defines, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in kernel.archs)]


def _compilers(nvcc: Path) -> list[str]:
    """nvcc's version, the version of the host compiler that nvcc calls, and the flags that nvcc takes by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch) / "probe.cu"
        probe.write_text("__VERSION__")  # nvcc knows which host compiler it calls: -ccbin, NVCC_CCBIN, its profile
        versions = [
            subprocess.run(command, capture_output=True, text=True)
            for command in ([str(nvcc), "--version"], [str(nvcc), "-E", str(probe)])
        ]
    for result in versions:
        if result.returncode != 0:
            command = " ".join(result.args[:2])
            raise SystemExit(f"{command} failed; nvcc needs a host compiler:\n{result.stderr.strip()}")
    flags = [f"{name}={os.environ.get(name, '')}" for name in NVCC_VARIABLES]
    return [versions[0].stdout, versions[1].stdout.rstrip().rpartition("\n")[2], *flags]


def _hash_of_cutlass(include_dir: Path) -> str:
    """A hash over the names and the text of CUTLASS's headers; takes about 0.3 s."""
    digest = hashlib.sha256()
    for folder in dict.fromkeys(Path(landmark).parts[0] for landmark in LANDMARKS):
        for path in sorted(path for path in (include_dir / folder).rglob("*") if path.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(include_dir).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _content_hash(kernel: KernelObject, fingerprint: list[str]) -> str:
    digest = hashlib.sha256()
    for text in (*fingerprint, *_flags_of(kernel), *(path.read_text() for path in included_files(kernel.source))):
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def included_files(source: Path) -> list[Path]:
    """`source` and every file of csrc/ that it includes, directly or not, in a stable order."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text()):
            for candidate in (path.parent / name, CSRC / name):
                if candidate.is_file():
                    waiting.append(candidate.resolve())
                    break
    return sorted(found)
