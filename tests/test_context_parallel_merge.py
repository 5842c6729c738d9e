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

from .interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from .one_thread import one_thread  # noqa: F401
from .poison import PoisonIntact, poisoned

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def implementations() -> list[Merge]:
    if not (HAS_GPU or INTERPRETED):
        return [merge.merge_into]
    import flash_attn_mini.backends.triton.interpreter  # noqa: F401
    from flash_attn_mini.context_parallel import merge_triton

    return [merge_triton.merge_into]


@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def rows(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """A tensor [batch, rows, nheads, headdim] in poison, with strides of a larger tensor."""
    batch, count, nheads, headdim = shape
    buffer = poisoned((batch, count + 3, nheads + 1, headdim), dtype, DEVICE)
    view = buffer[:, 2 : 2 + count, :nheads]
    view.copy_(torch.randn(shape, generator=draw))
    return view


def logs(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """A log-sum-exp [batch, nheads, rows] in poison; a quarter of it is -inf."""
    batch, count, nheads, _ = shape
    view = poisoned((batch, nheads, count + 3), torch.float32, DEVICE)[..., 1 : 1 + count]
    values = torch.randn(batch, nheads, count, generator=draw) * 5
    values[torch.rand(values.shape, generator=draw) < 0.25] = -math.inf
    view.copy_(values)
    return view


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 37, 3, 40), (1, 33, 2, 128), (1, 5, 2, 256), (1, 0, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", implementations(), ids=lambda f: f.__module__.rsplit(".", 1)[-1])
def test_weights_come_from_the_log_sum_exp(
    implementation: Merge, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator
) -> None:
    out, part = rows(shape, torch.float32, draw), rows(shape, dtype, draw)
    lse, part_lse = logs(shape, draw), logs(shape, draw)
    wide = [x.double().clone() for x in (out, lse, part, part_lse)]
    expected_lse = torch.logaddexp(wide[1], wide[3])
    weights = [(x - expected_lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for x in (wide[1], wide[3])]
    expected = weights[0] * wide[0] + weights[1] * wide[2]
    intact = [PoisonIntact(x) for x in (out, lse)]
    implementation(out, lse, part, part_lse)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for x in intact:
        x.check()


def test_16_bit_parts_add_one_rounding_at_most(draw: torch.Generator) -> None:
    """The error of a merged result is at most that of its worst part, half a unit in the last place of bfloat16."""
    count, parts = 50, 16
    exact, lse = torch.zeros(1, count, 1, 32, dtype=torch.float64), torch.full((1, 1, count), -math.inf).double()
    partial = merge.Partial(torch.empty(1, count, 1, 32, dtype=torch.bfloat16), (1, 1, count), torch.float32)
    largest = 0.0
    for _ in range(parts):
        part = torch.randn(1, count, 1, 32, generator=draw, dtype=torch.float64)
        part_lse = torch.randn(1, 1, count, generator=draw, dtype=torch.float64)
        merge.merge_into(exact, lse, part, part_lse)
        partial.add(0, part.bfloat16(), part_lse.float())
        largest = max(largest, part.abs().max().item())
    out, _ = partial.result()
    unit = 2.0 ** (math.floor(math.log2(largest)) - 7)
    assert (out.double() - exact).abs().max() <= 0.5 * unit + 0.5 * 2.0**-8 * exact.abs().max() + 1e-5


def test_a_single_part_keeps_its_bits() -> None:
    part, lse = torch.randn(1, 4, 2, 8).bfloat16(), torch.randn(1, 2, 4)
    partial = merge.Partial(part, (1, 2, 4), torch.float32)
    partial.add(0, part, lse)
    out, out_lse = partial.result()
    assert torch.equal(out, part)
    assert torch.equal(out_lse, lse)
