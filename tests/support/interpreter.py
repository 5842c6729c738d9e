"""Runs a test file in Triton's interpreter, in a new process: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os

import pytest
import torch

from flash_attn_mini.backends.triton import missing_reason

from .new_process import run_pytest

TRITON_IS_MISSING = missing_reason()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import flash_attn_mini.backends.triton.interpreter  # noqa: F401  # corrections, for the tests' own kernels too
starts_the_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or INTERPRETED or TRITON_IS_MISSING is not None,
    reason=TRITON_IS_MISSING or "the kernels run in this process",
)
needs_triton = pytest.mark.skipif(TRITON_IS_MISSING is not None, reason=str(TRITON_IS_MISSING))


def run_in_the_interpreter(file: str) -> None:
    """Run the tests of a file in a new process."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no plugin is needed; to import them takes as long as torch
    run_pytest(file, environment=environment)
