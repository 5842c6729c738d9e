"""The order of the work tiles of the sm90 backward (work_tiles_bwd.h), checked on the host. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.host_program import output_of


@pytest.mark.slow
def test_every_work_tile_comes_once_and_after_those_that_it_waits_for(
    tmp_path: Path, seed: int, described_seed: str
) -> None:
    result = output_of(Path(__file__).with_name("sm90_work_order.cpp"), tmp_path, str(seed % 2**32))
    assert result.returncode == 0, f"{result.stdout}{result.stderr}{described_seed}"
