"""Counts the calls of PyTorch's attention ops that a function makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_attn_mini import sdpa


def ours_and_pytorchs(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, int, int]:
    """The function's result, and how many of its calls ran on our kernels and on PyTorch's."""
    before = totals()
    result = function(*arguments, **options)
    ours, pytorchs = (after - earlier for after, earlier in zip(totals(), before, strict=True))
    return result, ours, pytorchs


def totals() -> tuple[int, int]:
    counts = sdpa.counts().values()
    return sum(x.ours for x in counts), sum(x.pytorch for x in counts)
