"""Restores torch's number of threads, which is global, after a test that changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def number_of_threads_kept() -> Iterator[None]:
    """Restores torch's number of threads; also usable as a decorator."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
