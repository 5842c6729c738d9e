"""The order of the work tiles of the sm90 backward, on the CPU: csrc/sm90/work_tiles_bwd.h, compiled with g++."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "sm90_work_order.cpp"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_every_work_tile_comes_once_and_after_those_that_it_waits_for(
    tmp_path: Path, seed: int, described_seed: str
) -> None:
    program = tmp_path / "sm90_work_order"
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", str(SOURCE), "-o", str(program)], check=True)
    result = subprocess.run([str(program), str(seed % 2**32)], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}{described_seed}"
