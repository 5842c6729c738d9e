"""The loop of the tests over random cases: draws a case, checks it, and simplifies one that fails."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from .bounds import InaccurateError

CHUNKS = 20  # tests that share the cases, so that several processes can run them
each_chunk = pytest.mark.parametrize(
    "chunk", [n if n < CHUNKS // 4 else pytest.param(n, marks=pytest.mark.thorough) for n in range(CHUNKS)]
)
# PyTorch's error may be small by chance, above all where it has one in few elements. So an error fails at once only if
# it is so many times the bound, and else if it occurs with so many values, one after the other.
OF_FEW, OF_MANY = (100.0, 8), (4.0, 3)
FEW = 30  # elements
SHRINKING_STEPS = 60  # most runs to make a failing case smaller

Check = Callable[[Any, torch.dtype, int, str], object]  # of a case, a dtype, a seed and how to set it; raises
Simpler = Callable[[Any], Iterator[Any]]  # cases that differ from a case in one simpler or smaller field


def check_random_cases(
    random_case: Callable[[random.Random], Any],
    simpler: Simpler,
    check: Check,
    dtypes: Sequence[torch.dtype],
    count: int,
    seed: int,
    described_seed: str,
) -> None:
    """One chunk of ``count`` cases, or of FLASH_ATTN_MINI_RANDOM_CASES. Fails with the simplest case that fails."""
    count = int(os.environ.get("FLASH_ATTN_MINI_RANDOM_CASES") or count)
    for number in range(-(-count // CHUNKS)):
        own_seed = (seed + number) % 2**31
        draw = random.Random(own_seed)
        dtype = draw.choice(dtypes)

        def failure(case: Any, dtype: torch.dtype = dtype, own_seed: int = own_seed) -> str | None:
            for tried in itertools.count(1):
                values_seed = own_seed + tried - 1
                said, excess, elements = outcome(check, case, dtype, values_seed, f"{described_seed}, {values_seed}")
                by_chance, values = OF_FEW if 0 < elements < FEW else OF_MANY
                if said is None or excess > by_chance or tried >= values:
                    break
            return said

        case = random_case(draw)
        said = failure(case)
        if said is not None:
            small = shrunk(case, failure, simpler)
            pytest.fail(f"{said}\n\nThe same, smaller: {small!r}\n{failure(small)}")


def outcome(
    check: Check, case: Any, dtype: torch.dtype, seed: int, described_seed: str
) -> tuple[str | None, float, int]:
    """The error message (None if the case passes), error / bound, and the elements in which PyTorch has an error."""
    try:
        check(case, dtype, seed, described_seed)
    except InaccurateError as error:
        return str(error), error.excess, error.elements
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}\n  case {case}", math.inf, 0
    return None, 0.0, 0


def shrunk(case: Any, failure: Callable[[Any], str | None], simpler: Simpler, steps: int = SHRINKING_STEPS) -> Any:
    """Simplifies a failing case step by step while it fails."""
    progress = True
    while progress:
        progress = False
        for candidate in simpler(case):
            if candidate == case:
                continue
            if steps == 0:
                return case
            steps -= 1
            if failure(candidate) is not None:
                case, progress = candidate, True
                break
    return case
