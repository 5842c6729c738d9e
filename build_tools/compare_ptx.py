"""Which kernels a change alters: compiles every kernel file to PTX at a commit and in the working tree, and compares.

  python -m build_tools.compare_ptx HEAD~3
  FLASH_ATTN_MINI_ARCHS=90a FLASH_ATTN_MINI_HDIMS=128 python -m build_tools.compare_ptx HEAD

A tool for developers. It reads the same variables as the build, and needs nvcc and no GPU. ptxas makes the machine code
only from the PTX, so a kernel whose PTX is the same is the same kernel: its test results and figures hold. Files whose
text is the same are not compiled. The exit status is 1 if the PTX of a kernel differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import re
import subprocess
import tarfile
import tempfile
from functools import partial
from pathlib import Path

from third_party.fetch_cutlass import CutlassError, cutlass_include_dir

from . import kernels, selection

ROOT = kernels.CSRC.parent
# Both leave the code as it is: the one adds line numbers to the PTX, the other is for ptxas.
FLAGS = tuple(flag for flag in kernels.NVCC_FLAGS if flag not in ("-lineinfo", "-Xptxas=-v"))
# Comments, and constants of one byte whose names hold a hash of the file's path.
_UNIMPORTANT = re.compile(r"^(?://.*|\s*\.global \.align 1 \.b8 \w*_INTERNAL_\w*\[1\];)\n", re.MULTILINE)

SAME_TEXT, SAME_PTX, DIFFERENT, NEW = "same text", "same PTX", "DIFFERENT PTX", "new"


def extract(commit: str, folder: Path, root: Path = ROOT) -> None:
    """Writes csrc/ as it was at `commit` into `folder`.

    Raises:
        SystemExit: If git knows no such commit.
    """
    archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=root, capture_output=True)
    if archive.returncode != 0:
        raise SystemExit(f"git archive {commit} failed: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def normalise(ptx: str) -> str:
    """The PTX without what does not reach the machine code."""
    return _UNIMPORTANT.sub("", ptx)


def has_same_text(kernel: kernels.KernelObject, old: Path) -> bool:
    """True if the folder `old` has the same text of a kernel file and of all that it includes from csrc/."""
    for path in kernels.included_files(kernel.source):
        before = old / path.relative_to(kernels.CSRC)
        if not before.is_file() or before.read_bytes() != path.read_bytes():
            return False
    return True


def source_in(csrc: Path, kernel: kernels.KernelObject) -> Path | None:
    """The source of a kernel file in the folder `csrc`: at its path, or the only file of its name in sm90/, for one.

    So a kernel file is found that a change moved within sm90/.
    """
    path = kernel.source.relative_to(kernels.CSRC)
    if (csrc / path).is_file():
        return csrc / path
    found = [*(csrc / path.parts[0]).rglob(path.name)]
    return found[0] if len(found) == 1 else None


def compile_ptx(kernel: kernels.KernelObject, arch: str, source: Path, csrc: Path, nvcc: Path, cutlass: Path) -> str:
    """The normalised PTX of a kernel file, whose source is in the folder `csrc`."""
    with tempfile.TemporaryDirectory() as scratch:
        ptx = Path(scratch) / "kernel.ptx"
        includes = [f"-I{csrc}", f"-I{cutlass}"]
        command = [str(nvcc), "-ptx", str(source), *kernel.defines, f"-arch=sm_{arch}", *FLAGS, *includes]
        result = subprocess.run([*command, "-o", str(ptx)], capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(f"nvcc failed on {kernel.name}: {' '.join(command)}\n{result.stderr}")
        return normalise(ptx.read_text())


def compare(kernel: kernels.KernelObject, old: Path, nvcc: Path, cutlass: Path) -> str:
    """What a change did to a kernel file; `old` is csrc/ before the change."""
    source = source_in(old, kernel)
    if source is None:
        return NEW
    if has_same_text(kernel, old):
        return SAME_TEXT
    for arch in kernel.archs:
        before = compile_ptx(kernel, arch, source, old, nvcc, cutlass)
        after = compile_ptx(kernel, arch, kernel.source, kernels.CSRC, nvcc, cutlass)
        if before != after:
            return DIFFERENT
    return SAME_PTX


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare the working tree with")
    parser.add_argument("--only", default="", help="only kernel files whose name contains this, such as bwd or sm90")
    arguments = parser.parse_args(argv)
    chosen = selection.Selection(selection.select_archs(), selection.select_hdims(), selection.select_dtypes())
    objects = [kernel for kernel in kernels.kernel_objects(chosen) if arguments.only in kernel.name]
    try:
        cutlass = cutlass_include_dir()
    except CutlassError as error:
        raise SystemExit(str(error)) from None
    nvcc, outcomes = kernels.cuda_home() / "bin" / "nvcc", []
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(selection.max_jobs()) as pool:
        extract(arguments.commit, Path(scratch))
        judge = partial(compare, old=Path(scratch) / "csrc", nvcc=nvcc, cutlass=cutlass)
        for kernel, outcome in zip(objects, pool.map(judge, objects), strict=True):
            print(f"{kernel.name}: {outcome}", flush=True)
            outcomes.append(outcome)
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in (SAME_TEXT, SAME_PTX, DIFFERENT, NEW))
    print(f"{len(outcomes)} kernel files: {counts}")
    if DIFFERENT in outcomes:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
