"""Runs scripts on instruction sets below the machine's, which environment variables select for a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from ..conftest import SEED_VARIABLE

LEVELS = ["DEFAULT", "AVX2", "AVX512"]
MACHINE = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")  # PyTorch 2.6 says "NO AVX"
# AVX512 is without AMX. Architectures other than x86 have one kernel.
LESSER = LEVELS[: LEVELS.index(MACHINE) + (MACHINE == "AVX512")] if MACHINE in LEVELS else []

PROLOGUE = """
import sys
import torch

level, seed = sys.argv[1], int(sys.argv[2])
assert torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT") == level
torch.set_num_threads(1)
"""


def run_on(level: str, script: str) -> None:
    """Run a script with the variables `level` and `seed`; it must print "checked" at its end."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script, level, os.environ[SEED_VARIABLE]],
        env={**os.environ, "ATEN_CPU_CAPABILITY": level.lower(), "FLASH_ATTN_MINI_NO_AMX": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("checked")
