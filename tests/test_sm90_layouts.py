"""The layouts of the sm90 kernels, checked on the host: the elements that each thread holds. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from .host_program import output_of


@pytest.mark.slow
def test_elements_of_threads_agree_between_layouts(tmp_path: Path) -> None:
    result = output_of(Path(__file__).with_name("sm90_layouts.cpp"), tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert [line for line in lines if not line.endswith(" wrong=0")] == []
