"""Programs that check the headers of the sm90 kernels on the host, compiled with g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import kernels
from third_party.fetch_cutlass import CutlassError, cutlass_include_dir


def output_of(source: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Compiles `source` in `folder` and runs it. Skips the test without CUDA's headers or CUTLASS."""
    try:
        cuda, cutlass = kernels.cuda_home() / "include", cutlass_include_dir()
    except (SystemExit, CutlassError) as error:
        pytest.skip(f"needs the CUDA toolkit and CUTLASS: {error}")
    program = folder / source.stem
    includes = [f"-I{directory}" for directory in (kernels.CSRC, cutlass, cuda, cuda / "cccl")]
    command = ["g++", "-std=c++17", "-O1", *includes, source, "-o", program]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    return subprocess.run([program, *arguments], capture_output=True, text=True)
