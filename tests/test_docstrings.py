"""The examples in the docstrings of the public functions, and of the reference, run and show what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from flash_attn_mini import backends, flash_attn_interface, packed, varlen
from flash_attn_mini.reference import attention, backward, masks, philox

PUBLIC = {
    backends: 1,  # with how many functions that have an example
    flash_attn_interface: 1,
    packed: 4,
    varlen: 1,
    attention: 1,
    backward: 1,
    masks: 1,
    philox: 2,
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_docstring_examples_run(module: ModuleType) -> None:
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert len(examples) >= PUBLIC[module]
    assert doctest.testmod(module).failed == 0
