"""Which GPUs a build runs on: csrc/built.h, compiled on the host for several lists of architectures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# FLASH_ARCHS, FLASH_ARCHS_EXACT (None: not defined), the compute capabilities that run it, those that do not
BUILDS = [
    ("80,90", "90", ["8,0", "8,6", "8,9", "9,0"], ["7,5", "9,1", "10,0", "12,0"]),
    ("100", "100", ["10,0"], ["10,3", "10,1", "9,0", "11,0"]),
    ("100", "", ["10,0", "10,3"], ["9,0", "12,0"]),
    ("86,120", None, ["8,6", "8,9", "12,0", "12,1"], ["8,0", "10,0"]),
    ("80,103", "103", ["8,6", "10,3"], ["10,0", "10,4"]),
]


@pytest.mark.parametrize(("archs", "exact", "runs", "runs_not"), BUILDS)
def test_a_build_runs_on_its_architectures(
    archs: str, exact: str | None, runs: list[str], runs_not: list[str], tmp_path: Path
) -> None:
    """An 'a' build runs on its own compute capability alone; any other also on later minor versions."""
    lines = [f"static_assert(flash::runs_on({one}));" for one in runs]
    lines += [f"static_assert(!flash::runs_on({one}));" for one in runs_not]
    source = tmp_path / "archs.cpp"
    source.write_text("\n".join(['#include "built.h"', *lines, ""]))
    defines = ["-DFLASH_WITH_CUDA", f"-DFLASH_ARCHS={archs}", "-DFLASH_HDIMS=64", "-DFLASH_DTYPES="]
    defines += [] if exact is None else [f"-DFLASH_ARCHS_EXACT={exact}"]
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{CSRC}", *defines, str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
