"""softmax_scale and softcap at the ends of their ranges: accepted values give right results, others raise."""

from __future__ import annotations

import math

import pytest
import torch

from flash_attn_mini import flash_attn_func

from ..support.bounds import assert_forward_accurate
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.wrong_calls import assert_says

# (softmax_scale, softcap)
EXTREMES = [
    (1e20, 0.0),
    (-1e20, 0.0),
    (1e-20, 0.0),
    (0.0, 0.0),
    (0.0, 1e20),
    (0.0, 1e-20),
    (0.125, 1e19),
    (0.125, 1e-19),
    (-0.125, 1e10),
    (1.0, 1e20),
    (1e17, 1e-3),
    (1e-20, 1e-20),
    (1e-20, 1.0),
]
# Every row sees one key, and dq is the rounding of dP - delta times the scale.
ONE_HOT = {(1e20, 0.0), (-1e20, 0.0)}
MIN_GAP = 1e-3  # between the two largest scores of a row, before the scale; rounding in float32 is below 1e-5


def draw_without_ties(q: torch.Tensor, k: torch.Tensor, sign: float, draw: torch.Generator) -> torch.Tensor:
    """q with new queries where rounding may decide which of two keys has the larger score."""
    keys = sign * k.double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    q = q.clone()
    while True:
        largest = torch.einsum("bqhd,bkhd->bqhk", q.double(), keys).topk(2).values
        is_tie = largest[..., 0] - largest[..., 1] < MIN_GAP
        if not is_tie.any():
            return q
        new = torch.randn(int(is_tie.sum()), q.shape[3], generator=draw, dtype=torch.float64)
        q[is_tie] = new.to(q.device, q.dtype)


@pytest.mark.parametrize(("scale", "softcap"), EXTREMES)
def test_extreme_values_are_as_accurate_as_usual_ones(
    scale: float,
    softcap: float,
    backend: str,
    dtype: torch.dtype,
    device: str,
    draw: torch.Generator,
    described_seed: str,
) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)

    # Many rows: with few, the error of PyTorch that the bounds multiply may be small by chance.
    q, k, v, dout = randn(1, 150, 8, 32), randn(1, 70, 2, 32), randn(1, 70, 2, 32), randn(1, 150, 8, 32)
    if (scale, softcap) in ONE_HOT:
        q = draw_without_ties(q, k, math.copysign(1.0, scale), draw)
    options = {"softmax_scale": scale, "softcap": softcap}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_func(*leaves, **options, return_attn_probs=True, backend=backend)
    case = f"softmax_scale={scale} softcap={softcap} {dtype}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out.detach(), lse.detach(), case=case, **options)
    if (scale, softcap) not in ONE_HOT:
        out.backward(dout)
        dq, dk, dv = (x.grad for x in leaves)
        # With a scale of 1 some rows have one key that takes nearly all.
        assert_gradients_accurate_beside_flash(q, k, v, dout, (dq, dk, dv), case=case, **options)


SCALES, CAPS, QUOTIENTS = r"allowed: 0, .*1e-20 to 1e\+20", r"allowed: 0 .*positive.*1e-20 to 1e\+20", "quotient.*1e-20"
REFUSED = [
    (1.5e38, 0.0, "softmax_scale is 1.5e.38", SCALES),
    (-1.1e20, 0.0, r"softmax_scale is -1.1e\+20", SCALES),
    (1e-40, 0.0, "softmax_scale is 1e-40", SCALES),
    (0.125, 1e32, r"softcap is 1e\+32", CAPS),
    (0.125, 3.5e38, r"softcap is 3.5e\+38", CAPS),
    (0.125, 1e39, r"softcap is 1e\+39", CAPS),
    (0.125, 1e-40, "softcap is 1e-40", CAPS),
    (1e15, 1e-9, r"softmax_scale is 1e\+15 and softcap is 1e-09", QUOTIENTS),
    (1e-15, 1e9, r"softmax_scale is 1e-15 and softcap is 1e\+09", QUOTIENTS),
]


@pytest.mark.parametrize(("scale", "softcap", "was_given", "allowed"), REFUSED)
def test_values_out_of_range_are_refused(
    scale: float, softcap: float, was_given: str, allowed: str, backend: str, dtype: torch.dtype, device: str
) -> None:
    if dtype == torch.float64 and softcap == 0.0:
        return  # test_float64_takes_any_scale
    q = torch.zeros(1, 4, 2, 16, device=device, dtype=dtype)
    with pytest.raises(ValueError, match=was_given) as raised:
        flash_attn_func(q, q, q, softmax_scale=scale, softcap=softcap, backend=backend)
    assert_says(str(raised.value), allowed)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("scale", [1e-40, 1.5e38, 1e250])
def test_float64_takes_any_scale(scale: float, backend: str, draw: torch.Generator) -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 16, dtype=torch.float64, generator=draw)
    expected = flash_attn_func(q, k, v, softmax_scale=0.25, backend=backend)
    scaled = flash_attn_func(q * (0.25 / scale), k, v, softmax_scale=scale, backend=backend)
    torch.testing.assert_close(scaled, expected, rtol=1e-10, atol=1e-12)
