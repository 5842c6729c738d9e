"""The examples in the docstrings of the public functions, and of the reference, run and give the documented results."""

from __future__ import annotations

import doctest
import importlib
import importlib.util

import pytest

PUBLIC = {
    "backends": 2,  # module: functions with an example
    "bert_padding": 2,
    "compat": 1,
    "context_parallel.functions": 2,
    "context_parallel.shards": 1,
    "flash_attn_interface": 1,
    "integrations.transformers": 1,
    "kvcache": 1,
    "masks": 7,
    "layers.rotary": 4,
    "packed": 4,
    "reference.attention": 1,
    "reference.backward": 1,
    "reference.masks": 1,
    "reference.philox": 2,
    "sdpa": 3,
    "varlen": 1,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples_run(name: str) -> None:
    if name == "integrations.transformers":
        pytest.importorskip("transformers")
    if name == "compat" and importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("the official package is installed, so compat.install() of the example raises")
    module = importlib.import_module(f"flash_attn_mini.{name}")
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert len(examples) >= PUBLIC[name]
    assert doctest.testmod(module).failed == 0
