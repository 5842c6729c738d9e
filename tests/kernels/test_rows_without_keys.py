"""Rows without keys on every backend that the machine has. rows_without_keys.py has the checks.

test_cpu_isa.py runs the same checks on other instruction sets, test_triton_values.py in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from flash_attn_mini import flash_attn_func

from ..support.cases import Case, make_inputs
from ..support.rows_without_keys import CASES, check_rows_without_keys
from ..support.varlen_cases import VarlenCase

WITH_SINKS = ("causal", "headdim_128", "groups", "window", "softcap", "dropout", "varlen", "varlen_no_keys")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_values_in_rows_without_keys_and_in_keys(
    case: Case | VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_rows_without_keys(case, backend, device, dtype, seed, described_seed)


@pytest.mark.gpu
@pytest.mark.backends("cuda")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_values_without_deterministic(
    case: Case | VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """dq is summed by other code."""
    check_rows_without_keys(case, backend, device, dtype, seed, described_seed, deterministic=False)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in WITH_SINKS], ids=str)
def test_bad_values_with_sinks(
    case: Case | VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """softmax_lse of a row without keys is then a finite number."""
    check_rows_without_keys(case, backend, device, dtype, seed, described_seed, has_sinks=True)


def test_a_normalised_output_trains(backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    """0 / 0 in the rows without keys makes their dout NaN; the gradients are those of the other rows."""
    case = CASES[0]
    assert isinstance(case, Case)
    first = case.seqlen_q - case.seqlen_k  # the first row with a key
    results = []
    for normalises_all in (True, False):
        leaves = [x.requires_grad_() for x in make_inputs(case, dtype, device, seed)]
        out = flash_attn_func(*leaves, causal=True, deterministic=True, backend=backend)
        out = out if normalises_all else out[:, first:]
        unit = (out / out.norm(dim=-1, keepdim=True)).nan_to_num()
        results.append(torch.autograd.grad((unit[:, first:] if normalises_all else unit).sum(), leaves))
    bound = 8 * torch.finfo(dtype).eps
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
