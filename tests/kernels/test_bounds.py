"""The bounds allow the rounding of a result where PyTorch's was small by chance, and nothing where PyTorch is exact."""

from __future__ import annotations

import types

import pytest
import torch

from ..conftest import pytest_pyfunc_call
from ..support.bounds import accuracy, half_unit
from ..support.inaccurate import InaccurateError

SEEDS: list[int] = []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_a_unit_is_half_the_distance_to_the_next_number(dtype: torch.dtype, draw: torch.Generator) -> None:
    x = torch.exp2(28.0 * torch.rand(1000, generator=draw, dtype=torch.float64) - 13.5).to(dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    following = (x.view(integers) + 1).view(dtype)
    assert torch.equal(half_unit(-x.double(), dtype), (following.double() - x.double()) / 2.0)


def test_rounding_is_allowed_where_pytorch_was_lucky() -> None:
    """A float16 above 1 has an error of up to 4.9e-4 by rounding alone; here PyTorch's is 1e-4."""
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


@pytest.mark.parametrize(
    ("excess", "elements", "times"),
    [(1.01, 20, 8), (99.0, 1, 8), (101.0, 20, 1), (1.01, 30, 3), (4.1, 30, 1), (1.01, 0, 3)],
)
def test_how_often_an_error_must_occur(excess: float, elements: int, times: int) -> None:
    assert InaccurateError("inaccurate", excess, elements).times_to_fail == times


def test_a_test_runs_again_with_other_values(seed: int, draw: torch.Generator) -> None:
    SEEDS.append(seed)
    assert draw.initial_seed() == seed
    if len(SEEDS) < 8:
        raise InaccurateError("inaccurate by chance", 2.0, 20)
    assert list(range(seed - 7, seed + 1)) == SEEDS


def test_a_test_fails_if_its_results_are_always_inaccurate() -> None:
    seeds = []

    def test(seed: int) -> None:
        seeds.append(seed)
        raise InaccurateError("inaccurate", 2.0, 20)

    item = types.SimpleNamespace(
        obj=test, funcargs={"seed": 7, "backend": "cpu"}, _fixtureinfo=types.SimpleNamespace(argnames=("seed",))
    )
    with pytest.raises(InaccurateError):
        pytest_pyfunc_call(item)
    assert seeds == list(range(7, 15))
