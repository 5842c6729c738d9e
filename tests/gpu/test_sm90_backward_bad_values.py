"""NaN and infinity around the values of a call: they reach no gradient of the backward kernels of csrc/sm90.

They are in other sequences of a batch, in memory around the tensors, and in rows without keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ..kernels.test_random import AnyCase
from ..support.cases import Case
from ..support.rows_without_keys import CASES as KEYLESS_CASES
from ..support.rows_without_keys import check_rows_without_keys
from ..support.sm90_backward_calls import (
    HEADDIMS,
    HEADS,
    OPTIONS,
    RUNS_IN,
    asked_passes,  # noqa: F401
    assert_same_bits,
    at,
    default_kernels,  # noqa: F401
    each_call,
    each_dtype,
    each_kernel,
    each_order,
    gradients,
    made,
    on_hopper,
    trace,  # noqa: F401
)
from ..support.varlen_cases import VarlenCase

pytestmark = on_hopper

BAD_VALUES = (math.nan, math.inf, -math.inf)


@each_dtype
@each_kernel
@each_call
def test_bad_values_in_other_sequences(call: str, headdim: int, dtype: torch.dtype, seed: int) -> None:
    """Tiles reach into the sequences before and after: their rows must not change a bit of this one's gradients."""
    lengths_q, lengths_k = (100, 70, 430), (90, 75, 400)
    case = VarlenCase("neighbours", "any", lengths_q, lengths_k, 4, 2, headdim, **OPTIONS[call])
    inputs, dout, lengths = made(case, dtype, seed)
    own_q, own_k = (slice(x[0], x[0] + x[1]) for x in (lengths_q, lengths_k))
    own = (own_q, own_k, own_k)
    tensors = (*inputs, dout)
    for deterministic in (False, True):

        def result(tensors: Sequence[Tensor], deterministic: bool = deterministic) -> list[Tensor]:
            computed = gradients(case, tensors[:3], tensors[3], lengths, deterministic=deterministic)
            return [x[rows] for x, rows in zip(computed, own, strict=True) if x is not None]

        clean = result(tensors)
        for value in BAD_VALUES:
            spoiled = []
            for x, rows in zip(tensors, (*own, own_q), strict=True):
                spoiled.append(torch.full_like(x, value))
                spoiled[-1][rows] = x[rows]
            got = result(spoiled)
            assert got[0].isfinite().all(), f"{value} reaches dq, deterministic={deterministic}"
            assert_same_bits(got, clean, f"{value} deterministic={deterministic}", with_dq=deterministic)


@pytest.mark.usefixtures("trace")
@each_kernel
@each_call
def test_bad_values_between_many_short_sequences(
    call: str, headdim: int, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    """Every second sequence is bad, of queries and keys. The load warp writes zeros over its rows (producer_bwd.h).

    A CTA takes three heads, so most CTAs do so several times, in other stages of Q and dO each time. With a mask, some
    sequences begin with queries that see no key.
    """
    lengths_q = tuple(1 + i * 37 % 300 for i in range(160))
    case = VarlenCase("short", "any", lengths_q, lengths_q[::-1], 12, 4, headdim, **OPTIONS[call])
    inputs, dout, lengths = made(case, torch.bfloat16, seed)
    own_q, own_k = (
        (torch.arange(160) % 2 == 0).repeat_interleave(torch.tensor(x)).cuda() for x in (lengths_q, lengths_q[::-1])
    )
    own = (own_q, own_k, own_k, own_q)
    for deterministic in (False, True):
        results = []
        for value in (None, *BAD_VALUES):
            tensors = [x.clone() for x in (*inputs, dout)]
            if value is not None:
                for x, rows in zip(tensors, own, strict=True):
                    x[~rows] = value
            computed = gradients(case, tensors[:3], tensors[3], lengths, deterministic=deterministic)
            assert HEADS.findall(capfd.readouterr().err) == ["3"]
            results.append([x[rows] for x, rows in zip(computed, own, strict=False) if x is not None])
        for value, got in zip(BAD_VALUES, results[1:], strict=True):
            assert got[0].isfinite().all(), f"{value} reaches dq, deterministic={deterministic}"
            assert_same_bits(got, results[0], f"{value} deterministic={deterministic}", with_dq=deterministic)


@each_dtype
@pytest.mark.parametrize("headdim", sorted([*HEADDIMS, *RUNS_IN]))
@each_call
def test_bad_values_around_the_tensors(call: str, headdim: int, dtype: torch.dtype, seed: int) -> None:
    """Rows, heads and columns that follow those of q, k, v and dout in memory: no bit depends on them."""
    case = Case("padded", "any", 2, 4, 2, 130, 170, headdim, **OPTIONS[call])
    inputs, dout, _ = made(case, dtype, seed)

    def inside(x: Tensor, value: float) -> Tensor:
        b, s, h, d = x.shape
        wide = torch.full((b, s + 150, h + 1, d + 8), value, device="cuda", dtype=dtype)[:, :s, :h, :d]
        return wide.copy_(x)

    results = []
    for value in (0.0, *BAD_VALUES):
        around = [inside(x, value) for x in (*inputs, dout)]
        results.append(gradients(case, around[:3], around[3], deterministic=True))
    for value, got in zip(BAD_VALUES, results[1:], strict=True):
        assert_same_bits(got, results[0], f"{value} around the tensors")


@each_order
@pytest.mark.parametrize("headdim", [96, 192, 256])
@pytest.mark.parametrize("case", KEYLESS_CASES, ids=str)
def test_bad_values_in_rows_without_keys(
    case: AnyCase, headdim: int, deterministic: bool, seed: int, described_seed: str
) -> None:
    """test_rows_without_keys.py has head dims up to 128."""
    (case,) = at(headdim, [case])
    check_rows_without_keys(case, "cuda", "cuda", torch.float16, seed, described_seed, deterministic)
