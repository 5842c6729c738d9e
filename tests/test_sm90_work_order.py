"""The order of the work tiles of the sm90 backward, on the CPU: csrc/sm90/work_tiles_bwd.h, compiled with g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import kernels
from third_party.fetch_cutlass import CutlassError, cutlass_include_dir

SOURCE = Path(__file__).with_name("sm90_work_order.cpp")


@pytest.mark.slow
def test_every_work_tile_comes_once_and_after_those_that_it_waits_for(
    tmp_path: Path, seed: int, described_seed: str
) -> None:
    try:
        cuda, cutlass = kernels.cuda_home() / "include", cutlass_include_dir()
    except (SystemExit, CutlassError) as error:
        pytest.skip(f"needs the CUDA toolkit and CUTLASS: {error}")
    program = tmp_path / "work_order"
    includes = [f"-I{directory}" for directory in (kernels.CSRC, cutlass, cuda, cuda / "cccl")]
    command = ["g++", "-std=c++17", "-O1", *includes, SOURCE, "-o", program]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    result = subprocess.run([program, str(seed % 2**32)], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}{described_seed}"
