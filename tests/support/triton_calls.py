"""Calls of the Triton launchers with explicit rng_state, for the tests of the Triton backend.

On a GPU the compiled kernels run. Otherwise they run in Triton's interpreter, in a new process (interpreter.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import Options

from .cases import Case
from .interpreter import INTERPRETED

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

runs_triton = pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="runs in the interpreter's process")
gpu = pytest.mark.gpu


def make_options(
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> Options:
    options = Options(dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes)
    return options._replace(learnable_sink=learnable_sink)


def softmax_scale(case: Case) -> float:
    return case.headdim**-0.5 if case.softmax_scale is None else case.softmax_scale


def forward(q: Tensor, k: Tensor, v: Tensor, *, sequences: Any = None, rng_state: Any = None, **options: Any) -> Any:
    """(out, lse) of the Triton kernel."""
    from flash_attn_mini.backends.triton import launch

    return launch.forward(q, k, v, sequences, make_options(**options), rng_state)[:2]


def backward(
    *tensors: Any,
    sequences: Any = None,
    rng_state: Any = None,
    output_mask: Any = (True, True, True),
    into: Any = (None, None, None),
    **options: Any,
) -> Any:
    """(dq, dk, dv, softmax_d) of the Triton kernels, from dout, q, k, v, out, lse and dlse."""
    from flash_attn_mini.backends.triton import launch_bwd

    return launch_bwd.backward(*tensors, sequences, make_options(**options), rng_state, output_mask, into)
