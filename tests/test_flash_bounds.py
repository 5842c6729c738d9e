"""The bound of flash_bounds.py allows a typical rounding error of delta, and no more."""

from __future__ import annotations

import pytest
import torch

from .bounds import InaccurateError
from .flash_bounds import assert_gradients_accurate_beside_flash, flash_gradients, rounded_delta

EPS = torch.finfo(torch.float16).eps


def test_delta_without_a_rounding_error_gets_a_typical_one() -> None:
    """An O that is exact in float16 has no rounding error; another O of the same size has one."""
    out, dout = torch.full((1, 1, 1, 64), 1.5), torch.ones(1, 1, 1, 64)
    assert rounded_delta(dout, out, out, EPS).item() == pytest.approx(96.0 + EPS / 2 / 3**0.5 * 12.0, rel=1e-6)


def test_delta_keeps_a_larger_error() -> None:
    out, dout = torch.full((1, 1, 1, 64), 1.5), torch.ones(1, 1, 1, 64)
    assert rounded_delta(dout, out, out * (1 - EPS), EPS).item() == pytest.approx(96.0 * (1 - EPS), rel=1e-6)


@pytest.mark.parametrize("times", [1.0, 30.0])
def test_one_key_may_be_off_by_the_rounding_of_its_out_and_no_more(times: float) -> None:
    """One key has probability 1, so dq and dk are 0; a backend may only add the rounding of delta."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 1, 64).half() for _ in range(4))
    v = v.sign()  # out has no rounding error
    dq, dk, dv = flash_gradients(q, k, v, dout)
    assert dq.abs().max() > 1e-4
    wrong = (dq * times, dk * times, dv)
    if times == 1.0:
        assert_gradients_accurate_beside_flash(q, k, v, dout, wrong, case="one key")
    else:
        with pytest.raises(InaccurateError, match="dq: error"):
            assert_gradients_accurate_beside_flash(q, k, v, dout, wrong, case="one key")
