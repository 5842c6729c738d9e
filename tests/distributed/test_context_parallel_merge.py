"""Merging partial results: PyTorch's operators and the Triton kernel against float64.

On a GPU the kernel runs. On a CPU the first test runs this file again in a process with Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_attn_mini.context_parallel import merge
from flash_attn_mini.context_parallel.merge import Part

from ..support.interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from ..support.one_thread import one_thread  # noqa: F401
from ..support.poison import PoisonIntact, poisoned

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
Combine = Callable[[list[Part], Tensor, Tensor | None], None]


def implementations() -> list[Combine]:
    if not (HAS_GPU or INTERPRETED):
        return [merge.combine_by_torch]
    from flash_attn_mini.context_parallel import merge_triton

    return [merge_triton.combine]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def part_of(shape: tuple[int, ...], row: int, rows: int, dtype: torch.dtype, draw: torch.Generator) -> Part:
    """A part in poison, with strides of larger tensors; a quarter of its log-sum-exp is -inf, with NaN around it."""
    batch, _, nheads, headdim = shape
    values = poisoned((batch, rows + 3, nheads + 1, headdim), dtype, DEVICE)[:, 2 : 2 + rows, :nheads]
    values.copy_(torch.randn(batch, rows, nheads, headdim, generator=draw))
    lse = poisoned((batch, nheads, rows + 3), torch.float32, DEVICE)[..., 1 : 1 + rows]
    drawn = torch.randn(batch, nheads, rows, generator=draw) * 5
    lse.copy_(drawn.masked_fill(torch.rand(drawn.shape, generator=draw) < 0.25, -math.inf))
    return Part(row, values, lse)


def expected_of(parts: list[Part], shape: tuple[int, ...], is_weighted: bool) -> tuple[Tensor, Tensor]:
    """In float64: every part on all rows, side by side."""
    batch, rows, nheads, _ = shape
    values = torch.zeros(len(parts), *shape, dtype=torch.float64)
    lses = torch.full((len(parts), batch, nheads, rows), -math.inf, dtype=torch.float64)
    for i, (row, x, lse) in enumerate(parts):
        assert lse is not None
        values[i, :, row : row + x.shape[1]] = x.double().cpu()
        lses[i, ..., row : row + x.shape[1]] = lse.double().cpu()
    total = lses.logsumexp(0) if parts else torch.full((batch, nheads, rows), -math.inf).double()
    weights = (lses - total).exp().nan_to_num(0.0).transpose(2, 3)[..., None] if is_weighted else 1.0
    return (weights * values).sum(0), total


ROWS = [[], [(0, 37)], [(5, 20)], [(0, 37), (18, 19)], [(0, 18), (0, 37), (18, 19)], [(30, 7), (0, 3), (10, 0)]]


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weighted", "sum"])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: "-".join(f"{row}+{count}" for row, count in rows) or "none")
@pytest.mark.parametrize("combine", implementations(), ids=lambda f: f.__module__.rsplit(".", 1)[-1])
def test_parts_become_one(
    combine: Combine, rows: list[tuple[int, int]], is_weighted: bool, draw: torch.Generator
) -> None:
    for nheads, headdim, dtypes, dtype in (
        (3, 40, (torch.float32, torch.bfloat16, torch.float16), torch.float32),
        (1, 128, (torch.bfloat16, torch.bfloat16, torch.float32), torch.bfloat16),
    ):
        shape = (2, 37, nheads, headdim)
        parts = [part_of(shape, *place, kind, draw) for place, kind in zip(rows, dtypes, strict=False)]
        expected, expected_lse = expected_of(parts, shape, is_weighted)
        out, lse = poisoned(shape, dtype, DEVICE), poisoned((2, nheads, 37), torch.float32, DEVICE)
        intact = [PoisonIntact(x) for x in (out, lse)]
        combine(
            parts if is_weighted else [part._replace(lse=None) for part in parts], out, lse if is_weighted else None
        )
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(out.double().cpu(), expected, rtol=rounding, atol=1e-5)
        if is_weighted:
            torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)
        for x in intact:
            x.check()


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weighted", "sum"])
@pytest.mark.parametrize("combine", implementations(), ids=lambda f: f.__module__.rsplit(".", 1)[-1])
def test_parts_are_added_in_the_memory_of_one_of_them(
    combine: Combine, is_weighted: bool, draw: torch.Generator
) -> None:
    shape = (2, 37, 3, 40)
    parts = [part_of(shape, *place, torch.bfloat16, draw) for place in ((0, 37), (20, 17), (3, 30))]
    expected, expected_lse = expected_of(parts, shape, is_weighted)
    (_, out, lse), *_ = parts
    assert lse is not None
    intact = [PoisonIntact(x) for x in (out, lse)]
    combine(parts if is_weighted else [part._replace(lse=None) for part in parts], out, lse if is_weighted else None)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2.0**-8, atol=1e-5)
    if is_weighted:
        torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)
    for x in intact:
        x.check()


PARTS = {  # first row and rows of each part; those of a second total, which the first one takes
    "parts of some rows": ([(0, 5), (5, 7), (2, 2), (0, 12), (3, 1)], []),
    "the first part has all rows": ([(0, 12), (5, 7), (0, 2), (5, 1), (6, 2)], []),
    "a total without a part": ([(0, 12)], []),
    "two totals": ([(0, 12)], [(5, 7), (0, 2), (3, 4), (5, 1), (6, 2)]),
    "two totals of some rows": ([(0, 4), (4, 8)], [(5, 7), (0, 2), (3, 4)]),
    "all parts in the other total": ([], [(0, 12), (3, 4)]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PARTS)
def test_a_total_is_the_sum_of_its_parts(name: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    like = torch.empty(1, 12, 3, 8, dtype=torch.bfloat16)
    expected = torch.zeros(like.shape, dtype=torch.float64)
    total, other = merge.Total(like, torch.float32), merge.Total(like, torch.float32)
    for of, parts in zip((total, other), PARTS[name], strict=True):
        for row, count in parts:
            values = torch.randint(-8, 8, (1, count, 3, 8), generator=draw).bfloat16()
            of.add(row, values.clone())
            expected.narrow(1, row, count).add_(values)
    total.take(other)
    result = total.result(dtype)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result.double(), expected)
    assert torch.equal(other.result(dtype), torch.zeros_like(result)), "its parts were taken"


@pytest.mark.parametrize("shape", [(2, 12, 3, 8), (12, 3, 8)], ids=["batch", "packed"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_total_of_several_tensors_is_that_of_each(number: int, shape: tuple[int, ...], draw: torch.Generator) -> None:
    like = torch.empty(shape, dtype=torch.bfloat16)
    together = merge.Total(like, torch.float32, number=number)
    alone = [merge.Total(like, torch.float32) for _ in range(number)]
    for row, rows in ((0, 12), (4, 8), (0, 5)):
        part = together.new(rows)
        views = together.of_each(part)
        assert len(views) == number
        for view, total in zip(views, alone, strict=True):
            view.copy_(torch.randint(-8, 8, view.shape, generator=draw))
            total.add(row, view.clone())
        together.add(row, part)
    results = together.results(torch.bfloat16)
    assert len(results) == number
    for result, total in zip(results, alone, strict=True):
        assert result.is_contiguous()
        assert torch.equal(result, total.result(torch.bfloat16))


def test_a_sum_of_two_parts_has_the_bits_of_the_kernel(draw: torch.Generator) -> None:
    base, part = (torch.randn(2, rows, 3, 8, generator=draw).bfloat16() for rows in (12, 7))
    expected = base.clone()
    merge.combine_by_torch([Part(0, base, None), Part(5, part, None)], expected, None)
    total = merge.Total(base, torch.float32)
    total.add(0, base)
    total.add(5, part)
    assert torch.equal(total.result(torch.bfloat16), expected)


def test_16_bit_parts_add_one_rounding_at_most(draw: torch.Generator) -> None:
    """The error of a merged result is at most that of its worst part, half a unit in the last place of bfloat16."""
    count, parts = 50, 16
    like = torch.empty(1, count, 1, 32, dtype=torch.bfloat16)
    total = merge.Total(like, torch.float32, (1, 1, count))
    exact: list[Part] = []
    largest = 0.0
    for _ in range(parts):
        part = torch.randn(1, count, 1, 32, generator=draw, dtype=torch.float64)
        part_lse = torch.randn(1, 1, count, generator=draw, dtype=torch.float64)
        exact.append(Part(0, part, part_lse))
        total.add(0, part.bfloat16(), part_lse.float())
        largest = max(largest, part.abs().max().item())
    out, _ = total.result_with_lse(torch.bfloat16)
    expected, _ = expected_of(exact, tuple(like.shape), True)
    unit = 2.0 ** (math.floor(math.log2(largest)) - 7)
    assert (out.double() - expected).abs().max() <= 0.5 * unit + 0.5 * 2.0**-7 * expected.abs().max() + 1e-5


def test_a_single_part_keeps_its_bits() -> None:
    part, lse = torch.randn(1, 4, 2, 8).bfloat16(), torch.randn(1, 2, 4)
    total = merge.Total(part, torch.float32, (1, 2, 4))
    total.add(0, part, lse)
    out, out_lse = total.result_with_lse(torch.bfloat16)
    assert torch.equal(out, part)
    assert torch.equal(out_lse, lse)
