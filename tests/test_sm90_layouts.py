"""The layouts of the sm90 kernels, checked on the host: the elements that each thread holds. Needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import kernels
from third_party.fetch_cutlass import CutlassError, cutlass_include_dir

SOURCE = Path(__file__).with_name("sm90_layouts.cpp")


@pytest.mark.slow
def test_elements_of_threads_agree_between_layouts(tmp_path: Path) -> None:
    try:
        cuda, cutlass = kernels.cuda_home() / "include", cutlass_include_dir()
    except (SystemExit, CutlassError) as error:
        pytest.skip(f"needs the CUDA toolkit and CUTLASS: {error}")
    program = tmp_path / "layouts"
    includes = [f"-I{directory}" for directory in (kernels.CSRC, cutlass, cuda, cuda / "cccl")]
    command = ["g++", "-std=c++17", *kernels.SM90_DEFINES, *includes, SOURCE, "-o", program]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 4
    assert [line for line in lines if not line.endswith(" wrong=0")] == []
