"""The layouts of the sm90 kernels, checked on the host. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.host_program import output_of


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "tiles"),
    [("sm90_layouts.cpp", 4), ("sm90_layouts_bwd.cpp", 7)],
)
def test_elements_agree_between_layouts(source: str, tiles: int, tmp_path: Path) -> None:
    result = output_of(Path(__file__).with_name(source), tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == tiles
    assert [line for line in lines if not line.endswith(" wrong=0")] == []
