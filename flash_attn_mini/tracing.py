"""Prints one line per link of the call chain on stderr when FLASH_ATTN_MINI_TRACE=1.

csrc/common/trace.h prints the links of the C++ code in the same format.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

VARIABLE = "FLASH_ATTN_MINI_TRACE"


def enabled() -> bool:
    """Whether FLASH_ATTN_MINI_TRACE is set to something other than 0.

    False while torch.compile traces, because a print breaks its graph. The compiled program prints the links below the
    custom ops.
    """
    if torch.compiler.is_compiling():
        return False
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def trace(link: str, **fields: Any) -> None:
    """Print one link of the chain; tensors are shown as ``dtype[shape]@device``."""
    shown = " ".join(f"{name}={_show(value)}" for name, value in fields.items())
    print(f"[flash_attn_mini] {link:<26} {shown}".rstrip(), file=sys.stderr, flush=True)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}@{value.device}".replace(" ", "")
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value).replace(" ", "")
