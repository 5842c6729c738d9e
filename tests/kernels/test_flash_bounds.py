"""The bounds of gradients allow a typical rounding error of what cancels, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support.bounds import InaccurateError, assert_gradients_accurate
from ..support.flash_bounds import assert_gradients_accurate_beside_flash, flash_gradients, rounded_delta

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


def float32_sum(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, one term after the other."""
    total = terms[..., 0].clone()
    for i in range(1, terms.shape[-1]):
        total += terms[..., i]
    return total


@pytest.mark.parametrize("defect", [None, "rounding_times_10", "dp_in_float16", "one_row_off_by_1e-3"])
def test_rows_with_one_key_may_be_off_by_the_rounding_of_float32_and_no_more(
    defect: str | None, draw: torch.Generator
) -> None:
    """The exact dk is 0, and so is PyTorch's, because every row has dP = delta. Float32 sums in two orders differ."""
    q, dout = (torch.randn(1, 1290, 1, 64, generator=draw).half() for _ in range(2))
    k, v = (torch.randn(1, 1, 1, 64, generator=draw).half() for _ in range(2))
    kept = torch.rand(1, 1, 1290, 1, generator=draw) < 0.5
    products = dout[0, :, 0].float() * v[0, 0, 0].float() * 2.0 * kept[0, 0]
    dp, delta = float32_sum(products), float32_sum(products.flip(-1))
    ds = dp - delta
    if defect == "rounding_times_10":
        ds *= 10.0
    elif defect == "dp_in_float16":
        ds = dp.half() - delta
    elif defect == "one_row_off_by_1e-3":
        ds[kept.flatten().int().argmax()] += 1e-3
    dk = 0.125 * ds @ q[0, :, 0].float()
    dv = (2.0 * kept[0, 0] * dout[0, :, 0].double()).sum(0)
    gradients = torch.zeros_like(q), dk.half().view_as(k), dv.half().view_as(v)
    options: dict[str, Any] = {"dropout_p": 0.5, "dropout_mask": kept}
    if defect is None:
        assert dk.abs().max() > 1e-5
        assert_gradients_accurate(q, k, v, dout, gradients, case="one key", **options)
    else:
        with pytest.raises(InaccurateError, match="dk: error"):
            assert_gradients_accurate(q, k, v, dout, gradients, case="one key", **options)
