"""Tests of a list of cases on every backend, Triton's kernels in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from ..conftest import CPU_DTYPES, GPU_DTYPES
from .interpreter import INTERPRETED
from .triton_calls import HAS_GPU, runs_triton

here = pytest.mark.skipif(INTERPRETED, reason="this process runs the Triton backend")
gpu = pytest.mark.gpu


def on_backends(cases: list[Any], small: Collection[str]) -> Any:
    """Parametrizes ``case``, ``kernels`` and ``dtype``; in Triton's interpreter, only the cases named in ``small``."""
    params = [pytest.param(case, "cpu", dtype, marks=here) for case in cases for dtype in CPU_DTYPES]
    params += [pytest.param(case, "cuda", dtype, marks=gpu) for case in cases for dtype in GPU_DTYPES]
    if HAS_GPU:
        params += [pytest.param(case, "triton", dtype, marks=gpu) for case in cases for dtype in GPU_DTYPES]
    else:
        few = [case for case in cases if str(case) in small]
        params += [pytest.param(case, "triton", torch.float16, marks=runs_triton) for case in few]
    return pytest.mark.parametrize(("case", "kernels", "dtype"), params, ids=str)
