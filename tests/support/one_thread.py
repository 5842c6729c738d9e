"""A fixture to import: torch runs on one thread, for tests of small tensors, where more threads wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .threads import number_of_threads_kept


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Set for every test of the importing file."""
    with number_of_threads_kept():
        torch.set_num_threads(1)
        yield
