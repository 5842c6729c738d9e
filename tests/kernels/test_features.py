"""Windows, softcap, ALiBi and dropout, one at a time and together: forward and gradients over the curated list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, use_backend
from flash_attn_mini.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_mini.reference import attention_reference, attention_reference_backward

from ..support.bounds import differentiate
from ..support.cases import Case, make_dlse, make_dout, make_inputs, options_of
from ..support.feature_cases import FEATURE_CASES, SMALL_FEATURE_CASES
from ..support.feature_checks import check_dense, expected_options, official_options

BY_NAME = {case.name: case for case in FEATURE_CASES}


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_are_as_accurate_as_pytorch(
    case: Case, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_dense(case, backend, device, dtype, seed, described_seed)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", SMALL_FEATURE_CASES, ids=str)
def test_small_feature_case_runs_under_compute_sanitizer(case: Case, seed: int, described_seed: str) -> None:
    check_dense(case, "cuda", "cuda", torch.float16, seed, described_seed)


@pytest.mark.parametrize(
    "name", ["window_more_queries", "softcap_5", "alibi_masked_rows", "dropout_causal", "together", "together_softcap"]
)
def test_gradients_through_the_lse_with_features(name: str, backend: str, device: str, seed: int) -> None:
    """Compared with the explicit backward formula, in the widest dtype of the backend."""
    case, dtype = BY_NAME[name], torch.float64 if backend == "cpu" else torch.float16
    inputs = [x.requires_grad_() for x in make_inputs(case, dtype, device, seed)]
    dout, dlse = make_dout(case, dtype, device, seed), make_dlse(case, dtype, device, seed)
    with use_backend(backend):
        out, lse, _, rng_state = _flash_attn_forward(*inputs, **official_options(case, device), return_softmax=False)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    doubles = [x.detach().double() for x in inputs]
    options = expected_options(case, rng_state, device)
    expected_out, expected_lse = attention_reference(*doubles, **options)
    expected = attention_reference_backward(dout, *doubles, expected_out, expected_lse, dlse, **options)
    close = {"rtol": 1e-9, "atol": 1e-10} if backend == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, **close)


@pytest.mark.parametrize(
    "name", ["window_causal", "softcap_30_causal", "alibi_batch_gqa", "dropout_window", "together"]
)
def test_features_repeat_bitwise(name: str, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)

    def once() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = flash_attn_func(*leaves, **options_of(case, device), deterministic=True, backend=backend)
        return (out, *torch.autograd.grad(out, leaves, dout))

    first = once()
    for _ in range(3):
        for a, b in zip(first, once(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["window_causal", "softcap_5", "alibi_batch_gqa", "dropout_masked_rows", "together"])
def test_official_backward_takes_every_feature(name: str, backend: str, device: str, seed: int) -> None:
    case = BY_NAME[name]
    inputs = make_inputs(case, torch.float16, device, seed)
    dout = make_dout(case, torch.float16, device, seed)
    options = official_options(case, device)
    with use_backend(backend):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, _, rng_state = _flash_attn_forward(*leaves, **options, return_softmax=False)
        expected = torch.autograd.grad(out, leaves, dout)
        given = [torch.full_like(x, float("nan")) for x in inputs]
        _flash_attn_backward(
            dout, *inputs, out.detach(), lse.detach(), *given, **options, deterministic=True, rng_state=rng_state
        )
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_a_window_that_reaches_every_key_changes_nothing(backend: str, device: str, seed: int) -> None:
    case = BY_NAME["window_wide"]
    q, k, v = make_inputs(case, torch.float16, device, seed)
    expected = flash_attn_func(q, k, v, backend=backend)
    for window in ((1000, 1000), (2**62, 2**62), (199, 199)):
        got = flash_attn_func(q, k, v, window_size=window, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_slopes_of_zero_and_a_far_cap_change_nothing(backend: str, device: str, seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["window"], torch.float16, device, seed)
    expected = flash_attn_func(q, k, v, backend=backend)
    slopes = torch.zeros(2, device=device)
    for feature in ({"alibi_slopes": slopes}, {"softcap": 1e4}):  # other kernels, which round at other places
        out = flash_attn_func(q, k, v, backend=backend, **feature)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_slopes_may_be_strided(backend: str, device: str, seed: int) -> None:
    case = BY_NAME["alibi_batch_gqa"]
    q, k, v = make_inputs(case, torch.float16, device, seed)
    slopes = options_of(case, device)["alibi_slopes"]
    wide = torch.full((case.batch, 2 * case.nheads), float("nan"), device=device)
    wide[:, : case.nheads] = slopes
    expected = flash_attn_func(q, k, v, alibi_slopes=slopes, backend=backend)
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=wide[:, : case.nheads], backend=backend), expected)


# ---- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["window_more_queries", "softcap_5", "alibi_masked_rows", "dropout_causal", "together"]
)
def test_written_out_reference_is_the_derivative_of_the_reference(name: str, seed: int) -> None:
    case = BY_NAME[name]
    inputs, dout = make_inputs(case, torch.float64, "cpu", seed), make_dout(case, torch.float64, "cpu", seed)
    dlse = make_dlse(case, torch.float64, "cpu", seed)
    options = expected_options(case, torch.tensor([seed, 4]), "cpu")
    out, lse = attention_reference(*inputs, **options)
    written = attention_reference_backward(dout, *inputs, out, lse, dlse, **options)
    for a, b in zip(written, differentiate(attention_reference, inputs, dout, dlse, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
