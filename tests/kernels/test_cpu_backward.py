"""The cpu backend's backward through `_C.bwd`: threads, key blocks, strided gradients, memory."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_func

from ..conftest import CPU_DTYPES
from ..support.bounds import assert_gradients_accurate
from ..support.poison import LAYOUTS, Guard, PoisonIntact, poisoned
from ..support.threads import number_of_threads_kept

ROUNDS = 12
THREADS = (1, 2, 3, 8)
LAYOUT_NAMES = [name for name in LAYOUTS if not name.startswith(("far", "expanded"))]
each_dtype = pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dataclass
class Problem:
    """Inputs of one backward, and the forward's results. Every tensor is surrounded by NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    causal: bool
    softmax_scale: float
    layout: str = "bshd"

    def __post_init__(self) -> None:
        none: list[None] = [None] * 2
        forward = _C.fwd(self.q, self.k, self.v, *none, 0.0, self.softmax_scale, self.causal, -1, -1, 0.0, False, None)
        self.out, self.lse = forward[:2]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def __str__(self) -> str:
        return (
            f"q {list(self.q.shape)} k {list(self.k.shape)} {self.q.dtype} layout={self.layout} causal={self.causal} "
            f"softmax_scale={self.softmax_scale} dlse={self.dlse is not None}"
        )


def make_problem(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    causal: bool = False,
    layout: str = "bshd",
    with_lse: bool = True,
    softmax_scale: float | None = None,
) -> Problem:
    def alloc(shape: tuple[int, ...]) -> Tensor:
        return poisoned(shape, dtype, "cpu")

    tensors = [*LAYOUTS[layout](alloc, q_shape, k_shape), LAYOUTS[layout](alloc, q_shape, k_shape)[0]]
    for x in tensors:
        x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    dlse = None
    if with_lse:
        batch, seqlen_q, nheads, _ = q_shape
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dlse = torch.randn(batch, nheads, seqlen_q, generator=generator, dtype=wide)
    scale = q_shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    return Problem(tensors[0], tensors[1], tensors[2], tensors[3], dlse, causal, scale, layout)


def backward(
    problem: Problem, gradients: list[Tensor] | None = None, mask: tuple[bool, bool, bool] = (True, True, True)
) -> list[Tensor]:
    """dq, dk, dv and softmax_d of `_C.bwd`, written into `gradients` where given."""
    given: list[Any] = [None] * 3 if gradients is None else gradients
    p = problem
    return _C.bwd(
        p.dout, *p.inputs, p.out, p.lse, *given, None, 0.0, p.softmax_scale, p.causal, -1, -1, 0.0, False, None, None,
        dsoftmax_lse=p.dlse, output_mask=mask,
    )  # fmt: skip


def equal_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def length(draw: random.Random) -> int:
    """A length near an edge of the kernels' blocks (32, 96, 128 and multiples), or any length."""
    edge = draw.choice((32, 48, 96, 128, 192, 384)) + draw.randint(-1, 1)
    return draw.choice((edge, draw.randint(8, 500)))


@each_dtype
def test_keys_that_no_query_sees_reach_no_gradient(dtype: torch.dtype, draw: torch.Generator) -> None:
    """Query i of 37 sees only key i + 11 of 48. The first keys lie in the same block as keys that are seen."""
    q, k, v, dout = (torch.randn(1, n, 2, 64, generator=draw, dtype=torch.float64).to(dtype) for n in (37, 48, 48, 37))

    def gradients() -> list[Tensor]:
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*tensors, window_size=(0, 0), backend="cpu")
        return [out.detach(), *torch.autograd.grad(out, tensors, dout)]

    expected = gradients()
    k[:, :5], v[:, :5] = torch.nan, torch.inf
    assert equal_bits(gradients(), expected)


@each_dtype
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_random_gradients_into_strided_poisoned_tensors(
    round_: int, dtype: torch.dtype, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    choice = random.Random(seed)
    batch, nheads_k, headdim = (
        choice.randint(1, 2),
        choice.randint(1, 2),
        choice.choice((64, 128, choice.randint(1, 256))),
    )
    nheads, seqlen_q, seqlen_k = nheads_k * choice.randint(1, 3), length(choice), length(choice)
    problem = make_problem(
        (batch, seqlen_q, nheads, headdim),
        (batch, seqlen_k, nheads_k, headdim),
        dtype,
        draw,
        causal=choice.random() < 0.6,
        layout=choice.choice(LAYOUT_NAMES),
        with_lse=choice.random() < 0.5,
        softmax_scale=choice.choice((None, None, 0.05, -0.1)),
    )
    written = LAYOUTS[choice.choice([name for name in LAYOUT_NAMES if name != "packed"])](
        lambda shape: poisoned(shape, dtype, "cpu"), tuple(problem.q.shape), tuple(problem.k.shape)
    )
    guard, intact = Guard(*problem.inputs, problem.dout), [PoisonIntact(x) for x in written]
    results = backward(problem, list(written))
    guard.check()
    for x in intact:
        x.check()
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(results, written, strict=False))
    assert_gradients_accurate(
        *problem.inputs,
        problem.dout,
        written,
        case=f"{problem}\n  {described_seed}",
        dlse=problem.dlse,
        causal=problem.causal,
        softmax_scale=problem.softmax_scale,
    )


# One and many heads, few and many key blocks per thread, rows without keys.
@each_dtype
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "causal"),
    [
        ((1, 700, 1, 64), (1, 1100, 1, 64), False),
        ((1, 1100, 1, 64), (1, 700, 1, 64), True),
        ((1, 300, 6, 200), (1, 500, 2, 200), True),
        ((3, 130, 4, 40), (3, 200, 4, 40), False),
    ],
    ids=["one_head", "one_head_causal", "groups", "many_heads"],
)
@number_of_threads_kept()
def test_gradients_do_not_depend_on_the_threads(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    causal: bool,
    dtype: torch.dtype,
    draw: torch.Generator,
) -> None:
    problem = make_problem(q_shape, k_shape, dtype, draw, causal=causal)
    torch.set_num_threads(THREADS[0])
    expected = backward(problem)
    for count in THREADS * 2:
        torch.set_num_threads(count)
        assert equal_bits(backward(problem), expected), f"{problem} differs with {count} threads"


@each_dtype
@pytest.mark.parametrize(
    "mask", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)], ids=str
)
def test_each_gradient_alone_is_the_same(
    mask: tuple[bool, bool, bool], dtype: torch.dtype, draw: torch.Generator
) -> None:
    problem = make_problem((2, 150, 4, 72), (2, 210, 2, 72), dtype, draw, causal=True)
    *whole, softmax_d = backward(problem)
    *alone, softmax_d_alone = backward(problem, mask=mask)
    assert equal_bits([softmax_d], [softmax_d_alone])
    for wanted, x, y in zip(mask, alone, whole, strict=True):
        assert equal_bits([x], [y]) if wanted else x is None


@each_dtype
def test_softmax_d_is_delta(dtype: torch.dtype, draw: torch.Generator) -> None:
    problem = make_problem((2, 150, 4, 72), (2, 210, 2, 72), dtype, draw)
    softmax_d = backward(problem)[3]
    assert problem.dlse is not None
    expected = (problem.dout.double() * problem.out.double()).sum(dim=-1).transpose(1, 2) - problem.dlse
    assert softmax_d.shape == (2, 4, 256)
    assert softmax_d.dtype == problem.lse.dtype
    assert (softmax_d[..., 150:] == 0).all()
    torch.testing.assert_close(softmax_d[..., :150].double(), expected, rtol=1e-5, atol=1e-5)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        problem = Problem(q.detach(), k.detach(), v.detach(), q.detach(), None, causal, 0.4)
        ctx.problem = problem
        return problem.out, problem.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        problem.dout, problem.dlse = dout.contiguous(), dlse.contiguous()
        return (*backward(problem)[:3], None)


@pytest.mark.parametrize("causal", [False, True])
def test_float64_passes_gradcheck(causal: bool, draw: torch.Generator) -> None:
    shapes = ((1, 7, 4, 5), (1, 11, 2, 5), (1, 11, 2, 5))
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda *x: Attention.apply(*x, causal), inputs)


@each_dtype
def test_a_row_without_keys_contributes_nothing(dtype: torch.dtype, draw: torch.Generator) -> None:
    problem = make_problem((1, 200, 2, 64), (1, 70, 2, 64), dtype, draw, causal=True)
    dq, dk, dv, _ = backward(problem, [poisoned(tuple(x.shape), dtype, "cpu") for x in problem.inputs])
    assert (dq[:, :130] == 0).all()
    seen = make_problem((1, 70, 2, 64), (1, 70, 2, 64), dtype, draw, causal=True)
    for x, y in zip((*seen.inputs, seen.dout), (*problem.inputs, problem.dout), strict=True):
        x.copy_(y[:, -70:])
    assert problem.dlse is not None
    seen = Problem(*seen.inputs, seen.dout, problem.dlse[..., -70:].contiguous(), True, seen.softmax_scale)
    for ours, theirs in zip((dq[:, 130:], dk, dv), backward(seen), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 if dtype.itemsize == 2 else 1e-5)


def test_scores_of_1e9_leave_the_probability_of_the_largest_at_1(draw: torch.Generator) -> None:
    """lse is then the largest score, rounded to a multiple of 64: P must not become exp(rounding error)."""
    problem = make_problem((1, 70, 1, 72), (1, 90, 1, 72), torch.float32, draw, with_lse=False)
    problem.q.mul_(3e4), problem.k.mul_(3e4)
    problem = Problem(*problem.inputs, problem.dout, None, False, problem.softmax_scale)
    assert problem.lse.abs().max() > 1e9
    dv = backward(problem)[2]
    torch.testing.assert_close(dv.sum(dim=1), problem.dout.sum(dim=1), rtol=1e-4, atol=1e-4)


MEMORY_SCRIPT = """
import resource, torch
from tests.kernels.test_cpu_backward import backward, make_problem
torch.set_num_threads(2)
make = lambda n: make_problem((1, n, 1, 64), (1, n, 1, 64), torch.float32, torch.Generator().manual_seed(0))
backward(make(256))
problem = make(6144)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backward(problem)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_is_linear_in_the_length() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    # 3 gradients and the sums of dq, 1.5 MiB each, and a few MiB of tiles. The scores of one head would be 144 MiB.
    assert float(done.stdout) < 32, f"{done.stdout} MiB more at the peak"
