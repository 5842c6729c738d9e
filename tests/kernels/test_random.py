"""Random shapes, layouts, scales and features from the session's seed, with the bounds of the curated cases.

Gradients may use the bound of flash_bounds.py instead. A failing case is shrunk while it still fails, and the smallest
is reported, to be added to the list. FLASH_ATTN_MINI_RANDOM_CASES sets the number of cases per backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ..conftest import DTYPES
from ..support.attn_bias_cases import KINDS as BIAS_KINDS
from ..support.attn_bias_cases import LAYOUTS as BIAS_LAYOUTS
from ..support.attn_bias_cases import AttnBiasCase
from ..support.attn_bias_checks import check_attn_bias
from ..support.bounds import InaccurateError
from ..support.cases import Case
from ..support.feature_checks import check_dense, check_varlen
from ..support.key_range_cases import KINDS, KeyRangeCase
from ..support.key_range_checks import check_key_ranges
from ..support.poison import LAYOUTS
from ..support.random_loop import CHUNKS, check_random_cases, each_chunk, shrunk
from ..support.varlen_cases import VarlenCase

MOST_HEADDIM = {"cpu": 512, "cuda": 256, "triton": 512}
COUNT = {"cpu": 500, "cuda": 2000, "triton": 80}  # triton compiles for each combination of features
LAYOUT_NAMES = [name for name in LAYOUTS if not name.startswith("far")]
VARLEN_LAYOUTS = [name for name in LAYOUT_NAMES if name != "expanded"]

AnyCase = Case | VarlenCase | KeyRangeCase | AttnBiasCase


# ---- cases --------------------------------------------------------------------------------------------------------


def length(draw: random.Random, never: int = -1) -> int:
    """A short length, one near a tile's edge, or any length."""
    edge = draw.choice((16, 32, 64, 128, 192)) + draw.randint(-1, 1)
    drawn = draw.choice((draw.randint(0, 8), edge, draw.randint(1, 260)))
    return drawn if drawn != never else length(draw, never)


def options(draw: random.Random) -> dict[str, Any]:
    """The fields that dense and varlen cases share; each feature is on in about a third of them."""

    def side() -> int:
        return draw.choice((-1, 0, draw.randint(1, 20), draw.randint(20, 300)))

    nheads_k = draw.randint(1, 2)
    feature = draw.choice((None, "softcap", "dropout"))  # a call has one of the two
    return {
        "nheads": nheads_k * draw.randint(1, 3),
        "nheads_k": nheads_k,
        "headdim": draw.choice((8 * draw.randint(1, 32), draw.randint(1, 256), 64, 128)),
        "causal": draw.random() < 0.5,
        "softmax_scale": draw.choice((None, None, draw.uniform(0.01, 0.5), -draw.uniform(0.01, 0.3))),
        "window_size": (side(), side()) if draw.random() < 0.4 else (-1, -1),
        "alibi": draw.choice((None, None, "heads", "batch")),
        "softcap": draw.choice((0.5, 5.0, 30.0, draw.uniform(1.0, 50.0))) if feature == "softcap" else 0.0,
        "dropout_p": draw.choice((0.1, draw.uniform(0.0, 0.95))) if feature == "dropout" else 0.0,
    }


def random_dense(draw: random.Random) -> Case:
    return Case(
        name="random",
        why="drawn at random",
        batch=draw.randint(1, 2),
        seqlen_q=length(draw),
        seqlen_k=length(draw, never=1),  # one key is in cases.py: PyTorch's dq and dk are then exactly 0
        layout=draw.choice(LAYOUT_NAMES),
        **options(draw),
    )


def random_varlen(draw: random.Random) -> VarlenCase:
    def one_length() -> int:
        return draw.choice((0, 1, draw.randint(2, 40), draw.randint(2, 200)))

    batch = draw.choice((1, 2, 3, 5, 12))
    lengths_q = tuple(one_length() for _ in range(batch))
    same = draw.random() < 0.5
    return VarlenCase(
        name="random",
        why="drawn at random",
        lengths_q=lengths_q,
        lengths_k=lengths_q if same else tuple(one_length() for _ in range(batch)),
        layout=draw.choice(VARLEN_LAYOUTS),
        page_size=draw.choice((16, 48, 256)) if draw.random() < 0.2 else 0,
        slack=draw.choice((0, 0, draw.randint(1, 300))),
        **options(draw),
    )


def with_head_dims(draw: random.Random, case: Any, most: int) -> Any:
    """v has a head dim of its own in a quarter of the cases. Where `most` allows it, some q have more than 256."""
    own = draw.choice((8 * draw.randint(1, 32), draw.randint(1, most))) if draw.random() < 0.25 else None
    is_wide = most > 256 and draw.random() < 0.1
    return dataclasses.replace(case, own_headdim_v=own, headdim=draw.randint(257, most) if is_wide else case.headdim)


def with_key_ranges(draw: random.Random, of: Case | VarlenCase) -> KeyRangeCase:
    return KeyRangeCase(
        dataclasses.replace(of, page_size=0) if isinstance(of, VarlenCase) else of,
        kind=draw.choice(list(KINDS)),
        per_batch=draw.random() < 0.5,
        per_head=draw.random() < 0.5,
        sinks=draw.random() < 0.3,
    )


def with_attn_bias(draw: random.Random, of: Case) -> AttnBiasCase:
    return AttnBiasCase(
        of,
        kind=draw.choice(list(BIAS_KINDS)),
        per_batch=draw.random() < 0.5,
        per_head=draw.random() < 0.5,
        per_row=draw.random() < 0.7,
        is_wide=draw.random() < 0.3,
        layout=draw.choice(list(BIAS_LAYOUTS)),
        expands=draw.random() < 0.2,
        sinks=draw.random() < 0.3,
        key_ranges=draw.choice(list(KINDS)) if draw.random() < 0.2 else None,
    )


# ---- shrinking ----------------------------------------------------------------------------------------------------


def simpler(case: AnyCase) -> Iterator[AnyCase]:
    """Cases that differ from this one in one simpler or smaller field."""
    if isinstance(case, KeyRangeCase):
        yield case.of
        for name in ("sinks", "per_head", "per_batch"):
            yield dataclasses.replace(case, **{name: False})
        yield from (dataclasses.replace(case, of=of) for of in simpler(case.of))
        return
    if isinstance(case, AttnBiasCase):
        yield case.of
        plain = {"sinks": False, "key_ranges": None, "expands": False, "layout": "contiguous", "is_wide": False}
        own = {"per_batch": False, "per_head": False, "per_row": True}
        for name, value in {**plain, **own}.items():
            if getattr(case, name) != value:
                yield dataclasses.replace(case, **{name: value})
        yield from (dataclasses.replace(case, of=of) for of in simpler(case.of))
        return
    plain = {
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi": None,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "layout": "bshd",
        "causal": False,
        "slack": 0,
        "page_size": 0,
        "own_headdim_v": None,
    }
    for name, value in plain.items():
        if getattr(case, name, value) != value:
            yield dataclasses.replace(case, **{name: value})
    if case.nheads > 1:
        yield dataclasses.replace(case, nheads=1, nheads_k=1)
        yield dataclasses.replace(case, nheads=case.nheads_k)
    for headdim in (8, 64, case.headdim // 2):
        if 0 < headdim < case.headdim:
            yield dataclasses.replace(case, headdim=headdim)
    if isinstance(case, VarlenCase):
        for b in range(case.batch if case.batch > 1 else 0):
            lengths = {name: getattr(case, name) for name in ("lengths_q", "lengths_k")}
            yield dataclasses.replace(case, **{name: x[:b] + x[b + 1 :] for name, x in lengths.items()})
        for name in ("lengths_q", "lengths_k"):
            yield dataclasses.replace(case, **{name: tuple(x // 2 for x in getattr(case, name))})
            yield dataclasses.replace(case, **{name: tuple(max(x - 1, 0) for x in getattr(case, name))})
        return
    if case.batch > 1:
        yield dataclasses.replace(case, batch=1)
    for name in ("seqlen_q", "seqlen_k"):
        size = getattr(case, name)
        for less in (size // 2, size - 8, size - 1):
            if 0 <= less < size and (name, less) != ("seqlen_k", 1):
                yield dataclasses.replace(case, **{name: less})


def test_shrinking_finds_the_smallest_failing_case() -> None:
    """The failure needs a softcap, two heads and five queries."""
    draw = random.Random(1)
    case = dataclasses.replace(random_dense(draw), softcap=3.0, nheads=4, nheads_k=2, seqlen_q=100, dropout_p=0.0)

    def failure(x: AnyCase) -> str | None:
        return "fails" if x.softcap and x.nheads > 1 and x.seqlen_q >= 5 else None

    small = shrunk(case, failure, simpler, steps=1000)
    assert (small.nheads, small.nheads_k, small.seqlen_q, small.headdim) == (2, 2, 5, 1)
    assert (small.layout, small.causal, small.alibi, small.window_size) == ("bshd", False, None, (-1, -1))
    varlen = dataclasses.replace(random_varlen(draw), lengths_q=(3, 70, 0, 9), lengths_k=(3, 70, 0, 9), softcap=3.0)
    small = shrunk(varlen, lambda x: "fails" if max(x.lengths_q, default=0) >= 7 else None, simpler, steps=1000)
    assert (small.lengths_q, small.softcap) == ((7,), 0.0)


# ---- the tests ----------------------------------------------------------------------------------------------------


def random_case(draw: random.Random, most_headdim: int = 256) -> AnyCase:
    if draw.random() < 0.2:
        return with_attn_bias(draw, with_head_dims(draw, random_dense(draw), most_headdim))
    case = with_head_dims(draw, random_varlen(draw) if draw.random() < 0.5 else random_dense(draw), most_headdim)
    return with_key_ranges(draw, case) if draw.random() < 0.3 else case


@each_chunk
def test_random_cases_are_as_accurate_as_pytorch(
    chunk: int, backend: str, device: str, seed: int, described_seed: str
) -> None:
    def check(case: AnyCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
        checks: dict[type, Any] = {
            AttnBiasCase: check_attn_bias,
            KeyRangeCase: check_key_ranges,
            VarlenCase: check_varlen,
            Case: check_dense,
        }
        check_case = checks[type(case)]
        torch.manual_seed(seed)
        check_case(case, backend, device, dtype, seed, described_seed)

    drawn = partial(random_case, most_headdim=MOST_HEADDIM[backend])
    check_random_cases(drawn, simpler, check, DTYPES[backend], COUNT[backend], seed, described_seed)


@pytest.mark.parametrize(
    ("times", "excess", "elements", "fails"),
    [
        (2, 3.0, 500, False), (3, 3.0, 500, True), (1, 5.0, 500, True), (1, 5.0, 0, True),
        (7, 9.0, 2, False), (8, 9.0, 2, True), (1, 2000.0, 2, True),
    ],
)  # fmt: skip
def test_a_small_error_fails_only_if_it_occurs_again(times: int, excess: float, elements: int, fails: bool) -> None:
    """The first case fails ``times`` times; all others pass."""
    seeds = []

    def check(case: AnyCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
        seeds.append(seed)
        if len(seeds) <= times:
            raise InaccurateError("inaccurate", excess, elements)

    with pytest.raises(pytest.fail.Exception, match="inaccurate") if fails else contextlib.nullcontext():
        check_random_cases(random_case, lambda case: iter(()), check, [torch.float32], CHUNKS, 7, "seed")
    assert seeds[:times] == list(range(7, 7 + times))
