"""key_ranges on every backend: forward, gradients, equality with calls that say the same without them.

key_range_cases.py has the cases, test_random.py draws others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func

from ..support.bounds import assert_forward_accurate
from ..support.cases import Case
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.key_range_cases import KEY_RANGE_CASES, KINDS, KeyRangeCase
from ..support.key_range_checks import assert_same_bits, check_key_ranges, make_ranged_call
from ..support.threads import number_of_threads_kept

THREADS = (1, 2, 3, 8)
CASES = {str(case): case for case in KEY_RANGE_CASES}
LARGE = [
    case for case in KEY_RANGE_CASES if str(case) in ("documents_long", "shared_prefix", "far_apart", "varlen_features")
]


def named(*names: str) -> Any:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=str)


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in KEY_RANGE_CASES} == set(KINDS)
    assert len(CASES) == len(KEY_RANGE_CASES)


@pytest.mark.parametrize("case", KEY_RANGE_CASES, ids=str)
def test_results_and_gradients(
    case: KeyRangeCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_key_ranges(case, backend, device, dtype, seed, described_seed)


# ---- calls that say the same ----------------------------------------------------------------------------------------


@pytest.mark.backends("cpu")
@named("all", "decode", "headdim_33", "varlen_causal", "varlen_features")
def test_ranges_of_all_keys_change_no_bit(
    case: KeyRangeCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    call = make_ranged_call(dataclasses.replace(case, kind="all"), dtype, device, seed)
    torch.manual_seed(seed)
    expected = call.run(backend, key_ranges=None)
    torch.manual_seed(seed)
    assert_same_bits(call.run(backend), expected, f"{case.shape} {described_seed}")


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (113, 300), (300, 113), (3, 130)])
def test_a_causal_mask_as_ranges(
    seqlen_q: int, seqlen_k: int, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    case = KeyRangeCase(Case("causal", "as ranges", 2, 4, 2, seqlen_q, seqlen_k, 64), "all")
    call = make_ranged_call(case, dtype, device, seed)
    ends = torch.arange(seqlen_q, device=device) + (seqlen_k - seqlen_q + 1)
    ranges = torch.stack([torch.zeros_like(ends), ends], dim=-1).int()[None, None]
    results = call.run(backend, key_ranges=ranges)
    inputs, where = (call.q, call.k, call.v), f"{case.shape} {dtype} {backend} {described_seed}"
    assert_forward_accurate(*inputs, results["out"], results["lse"], case=where, causal=True)
    gradients = (results["dq"], results["dk"], results["dv"])
    assert_gradients_accurate_beside_flash(*inputs, call.dout, gradients, case=where, causal=True)


@named("shared_prefix", "varlen_padding")
def test_forms_of_one_option(
    case: KeyRangeCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Ranges of each head, in memory of another order, and a second range that is empty: the same bits."""
    call = make_ranged_call(case, dtype, device, seed)
    ranges = call.key_ranges
    heads_dim = 0 if call.sequences is not None else 1
    of_heads = ranges.repeat_interleave(call.q.shape[-2], dim=heads_dim)
    torch.manual_seed(seed)
    expected = call.run(backend)
    forms = {
        "heads": of_heads,
        "expanded": ranges.expand(of_heads.shape),
        "transposed": of_heads.transpose(heads_dim, heads_dim + 1).contiguous().transpose(heads_dim, heads_dim + 1),
        "reversed in memory": ranges.flip(-1).contiguous().flip(-1),
        "every second": ranges.repeat_interleave(2, dim=-1)[..., ::2],
    }
    if ranges.dim() == heads_dim + 3:
        forms["two ranges"] = torch.stack([torch.zeros_like(ranges), ranges], dim=-2)
    for name, form in forms.items():
        torch.manual_seed(seed)
        assert_same_bits(call.run(backend, key_ranges=form), expected, f"{name}, {case.shape} {described_seed}")


# ---- keys that no query sees ----------------------------------------------------------------------------------------


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_no_query_sees_reach_nothing(
    bad: float, backend: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """The padding of a batch, and keys between the two ranges of every query."""
    q, k, v, dout = (torch.randn(2, 150, 2, 64, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4))
    padded = torch.tensor([[[0, 110], [0, 110]], [[3, 9], [12, 150]]]).int()
    hidden = torch.ones(2, 150, dtype=torch.bool)
    for b, ranges in enumerate(padded.tolist()):
        for begin, end in ranges:
            hidden[b, begin:end] = False
    ranges = padded[:, None, None].expand(2, 1, 150, 2, 2)

    def results(k: Tensor, v: Tensor) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, key_ranges=ranges, backend=backend)
        names = ("out", "dq", "dk", "dv")
        return dict(zip(names, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))

    expected = results(k, v)
    assert not expected["dk"][hidden].any()
    got = results(*(x.masked_fill(hidden[..., None, None], bad) for x in (k, v)))
    # The forward leaves such values out one by one, in an order of its own.
    for name, x in expected.items():
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[name], x, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


# ---- threads, instruction sets --------------------------------------------------------------------------------------


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("case", LARGE, ids=str)
@number_of_threads_kept()
def test_results_do_not_depend_on_the_threads(
    case: KeyRangeCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    call = make_ranged_call(case, dtype, device, seed)
    expected = None
    for count in THREADS * 2:
        torch.set_num_threads(count)
        torch.manual_seed(seed)
        results = call.run(backend)
        expected = expected or results
        assert_same_bits(results, expected, f"{count} threads, {case.shape} {described_seed}")


SCRIPT = """
from tests.support.key_range_cases import SMALL_KEY_RANGE_CASES
from tests.support.key_range_checks import check_key_ranges

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in SMALL_KEY_RANGE_CASES:
        check_key_ranges(case, "cpu", "cpu", dtype, seed, f"{level} {seed}")
print("checked", len(SMALL_KEY_RANGE_CASES))
"""


@each_lesser_level
def test_cases_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, SCRIPT)
