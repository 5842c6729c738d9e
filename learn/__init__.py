"""The ladder: the same attention in several rungs, each closer to the machine.

`python -m learn` measures every rung and compares it with the float64 reference (rungs.py lists them).
learn/tutorial.md walks through them. A rung's file imports no later rung. Triton's and CUDA's rungs are imported when
they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from .naive import naive_attention
from .online_softmax import online_softmax_attention
from .verify import VerifyReport, verify
from .whole_row import whole_row_attention

__all__ = [  # noqa: RUF022  # in the order of the rungs
    "naive_attention",
    "online_softmax_attention",
    "whole_row_attention",
    "minimal_triton_attention",
    "flash_attention",
    "flash_attention_v2",
    "minimal_cuda_attention",
    "tensor_core_attention",
    "VerifyReport",
    "verify",
]
LATE = {
    "minimal_triton_attention": "minimal_triton",
    "flash_attention": "flash_v1",
    "flash_attention_v2": "flash_v2",
    "minimal_cuda_attention": "minimal_cuda",
    "tensor_core_attention": "tensor_cores",
}


def __getattr__(name: str) -> Any:
    if name in LATE:
        return getattr(importlib.import_module(f"{__name__}.{LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
