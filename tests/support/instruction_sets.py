"""Runs scripts on instruction sets below the machine's, which environment variables select for a process."""

from __future__ import annotations

import os

import pytest
import torch

from ..conftest import SEED_VARIABLE
from .new_process import run_python

LEVELS = ["DEFAULT", "AVX2", "AVX512"]
MACHINE = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")  # PyTorch 2.6 says "NO AVX"
# AVX512 is without AMX. Architectures other than x86 have one kernel.
LESSER = LEVELS[: LEVELS.index(MACHINE) + (MACHINE == "AVX512")] if MACHINE in LEVELS else []
each_lesser_level = pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.thorough) for level in LESSER]
)
# The same, where the first level is not thorough.
each_lesser_level_always = pytest.mark.parametrize(
    "level", [level if level == LEVELS[0] else pytest.param(level, marks=pytest.mark.thorough) for level in LESSER]
)

PROLOGUE = """
import sys
import torch

level, seed = sys.argv[1], int(sys.argv[2])
assert torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT") == level
torch.set_num_threads(1)
"""


def run_on(level: str, script: str) -> None:
    """Run a script with the variables `level` and `seed`; it must print "checked" at its end."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level.lower(), "FLASH_ATTN_MINI_NO_AMX": "1"}
    done = run_python("-c", PROLOGUE + script, level, os.environ[SEED_VARIABLE], environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("checked")
