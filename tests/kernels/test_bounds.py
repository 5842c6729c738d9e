"""The bounds allow the rounding of a result where PyTorch's was small by chance, and nothing where PyTorch is exact."""

from __future__ import annotations

import pytest
import torch

from ..support.bounds import accuracy, half_unit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_a_unit_is_half_the_distance_to_the_next_number(dtype: torch.dtype, draw: torch.Generator) -> None:
    x = torch.exp2(28.0 * torch.rand(1000, generator=draw, dtype=torch.float64) - 13.5).to(dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    following = (x.view(integers) + 1).view(dtype)
    assert torch.equal(half_unit(-x.double(), dtype), (following.double() - x.double()) / 2.0)


def test_rounding_is_allowed_where_pytorch_was_lucky() -> None:
    """A float16 above 1 has an error of up to 4.9e-4 from rounding; here PyTorch's is 1e-4."""
    expected = torch.tensor([1.0001, 0.25], dtype=torch.float64)
    pytorch = torch.tensor([1.0, 0.25]).half()
    next_one = torch.tensor([1.0 + 2**-10, 0.25]).half()
    assert accuracy("out", next_one, expected, pytorch, 1e-5).passed
    one_further = torch.tensor([1.0 + 2**-9, 0.25]).half()
    assert not accuracy("out", one_further, expected, pytorch, 1e-5).passed


def test_nothing_is_allowed_for_elements_where_pytorch_is_exact() -> None:
    expected = torch.tensor([64.0, 0.1], dtype=torch.float64)
    pytorch = expected.half()
    assert not accuracy("out", torch.tensor([64.0625, 0.1]).half(), expected, pytorch, 1e-5).passed
    assert accuracy("out", pytorch, expected, pytorch, 1e-5).passed


def test_an_exact_zero_allows_no_rounding() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(half_unit(zero, torch.float16), zero)
    expected, pytorch = torch.tensor([0.0, 2**-10], dtype=torch.float64), torch.tensor([1e-6, 2**-10]).half()
    assert not accuracy("dq", torch.tensor([1e-4, 2**-10]).half(), expected, pytorch, 1e-5).passed
