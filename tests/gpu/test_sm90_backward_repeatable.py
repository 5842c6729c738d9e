"""Repeatability of the backward kernels of csrc/sm90: the same call gives the same bits.

dk and dv repeat always, dq with deterministic=True. The bits do not depend on which of the gradients are wanted.
test_deterministic.py repeats calls of every backend, more often and next to other processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from ..conftest import GPU_DTYPES
from ..kernels.test_random import AnyCase, random_case, simpler
from ..support.attn_bias_cases import AttnBiasCase
from ..support.attn_bias_checks import make_biased_call
from ..support.cases import Case, options_of
from ..support.feature_checks import described
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.gpu_calls import differing_runs, run_on_sm80, stress_runs
from ..support.key_range_cases import KeyRangeCase
from ..support.key_range_checks import make_ranged_call
from ..support.random_loop import CHUNKS, check_random_cases
from ..support.sm90_backward_calls import (
    OPTIONS,
    PASSES,
    asked_passes,  # noqa: F401
    assert_same_bits,
    default_kernels,  # noqa: F401
    each_call,
    each_dtype,
    each_headdim,
    each_kernel,
    each_order,
    gradients,
    made,
    made_on_gpu,
    on_hopper,
)
from ..support.varlen_cases import VarlenCase

pytestmark = on_hopper

RandomCase = AnyCase | KeyRangeCase | AttnBiasCase
RUNS = stress_runs(200)  # of each call, head dim and order
SUBSETS = [wanted for wanted in itertools.product((False, True), repeat=3) if 0 < sum(wanted) < 3]


@each_dtype
@each_kernel
@each_call
def test_one_gradient_does_not_depend_on_the_others(call: str, headdim: int, dtype: torch.dtype, seed: int) -> None:
    case = Case("subset", "any", 2, 4, 2, 200, 300, headdim, **OPTIONS[call])
    inputs, dout, _ = made(case, dtype, seed)
    for deterministic in (False, True):
        complete = gradients(case, inputs, dout, deterministic=deterministic)
        for wanted in SUBSETS:
            got = gradients(case, inputs, dout, deterministic=deterministic, wanted=wanted)
            assert [x is not None for x in got] == list(wanted)
            where = f"deterministic={deterministic} wanted={wanted}"
            assert_same_bits(got, complete, where, with_dq=deterministic)


@each_headdim
@each_order
@pytest.mark.parametrize("call", [*OPTIONS, "varlen"])
def test_backwards_repeat_bitwise_under_stress(call: str, deterministic: bool, headdim: int, seed: int) -> None:
    check_repeats_under_stress(call, deterministic, headdim, seed, with_dq=deterministic)


def check_repeats_under_stress(call: str, deterministic: bool, headdim: int, seed: int, with_dq: bool) -> None:
    """dk and dv always, dq with deterministic=True. Many key blocks add to each row of dq; more CTAs than SMs."""
    if call == "varlen":
        lengths_q, lengths_k = (300, 0, 500, 100), (1500, 200, 900, 0)
        case: AnyCase = VarlenCase("repeated", "any", lengths_q, lengths_k, 16, 4, headdim, causal=True)
        inputs, dout, lengths = made(case, torch.bfloat16, seed)
    else:
        case = Case("repeated", "any", 3, 16, 4, 300, 1500, headdim, **OPTIONS[call])
        inputs, dout, lengths = *made_on_gpu(case, seed), ()
    leaves = [x.detach().requires_grad_() for x in inputs]
    attend: Any = flash_attn_varlen_func if lengths else flash_attn_func
    options = {**options_of(case, "cuda"), "deterministic": deterministic, "backend": "cuda"}
    out = attend(*leaves, *lengths, **options)
    first = 0 if with_dq else 1

    def run(_i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)[first:]

    differs = differing_runs(run, [run(0)], RUNS)
    assert not any(differs), f"runs in which {('dq', 'dk', 'dv')[first:]} differ: {differs}"


@pytest.mark.parametrize("passes", ["1", "2"])
@pytest.mark.parametrize("headdim", [192, 256])
@pytest.mark.parametrize("call", ["full", "causal", "varlen"])
def test_both_numbers_of_passes_repeat_bitwise_under_stress(
    call: str, headdim: int, passes: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dq in order in one pass with deterministic=True; in two passes always."""
    monkeypatch.setenv(PASSES, passes)
    check_repeats_under_stress(call, passes == "1", headdim, seed, with_dq=True)


@pytest.mark.parametrize("headdim", [192, 256])
@pytest.mark.parametrize("call", ["full", "causal", "window", "varlen"])
def test_one_pass_repeats_dk_and_dv_bitwise_under_stress(
    call: str, headdim: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSES, "1")
    check_repeats_under_stress(call, False, headdim, seed, with_dq=False)


def differentiable_case(draw: random.Random) -> RandomCase:
    """Pages have no backward."""
    case = random_case(draw)
    if isinstance(case, VarlenCase):
        return dataclasses.replace(case, page_size=0)
    if isinstance(case, KeyRangeCase) and isinstance(case.of, VarlenCase):
        return dataclasses.replace(case, of=dataclasses.replace(case.of, page_size=0))
    return case


def backward_of(case: RandomCase, dtype: torch.dtype, seed: int) -> Callable[[bool], list[Tensor | None]]:
    """A function of `deterministic` that returns dq, dk and dv."""
    if isinstance(case, (KeyRangeCase, AttnBiasCase)):
        make: Any = make_ranged_call if isinstance(case, KeyRangeCase) else make_biased_call
        call = make(case, dtype, "cuda", seed)

        def run(deterministic: bool) -> list[Tensor | None]:
            torch.manual_seed(5)  # the dropout mask
            results = call.run("cuda", deterministic=deterministic)
            return [results["dq"], results["dk"], results["dv"]]

        return run
    inputs, dout, lengths = made(case, dtype, seed)
    return lambda deterministic: gradients(case, inputs, dout, lengths, deterministic=deterministic)


def check_order(case: RandomCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    """deterministic=True gives the same bits again, and the gradients of the other order up to rounding."""
    backward = backward_of(case, dtype, seed)
    ordered = backward(True)
    of = case.of if isinstance(case, (KeyRangeCase, AttnBiasCase)) else case
    where = described(of, dtype, "cuda", described_seed)
    assert_same_bits(backward(True), ordered, where)
    eps = torch.finfo(dtype).eps
    for name, got, other in zip("qkv", ordered, backward(False), strict=True):
        assert got is not None
        assert other is not None
        largest = other.abs().max().item() if other.numel() else 0.0
        said = f"d{name} depends on deterministic\n  {where}"
        torch.testing.assert_close(got, other, rtol=2 * eps, atol=eps * largest, msg=lambda m, s=said: f"{s}\n{m}")


@pytest.mark.parametrize("arch", ["90", "80"], ids="sm{}".format)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls_in_a_fixed_order(
    chunk: int, arch: str, monkeypatch: pytest.MonkeyPatch, seed: int, described_seed: str
) -> None:
    """Every mask: CTAs wait for each other in the order of the key blocks that see a row block, and end."""
    if arch == "80":
        run_on_sm80(monkeypatch)
    check_random_cases(differentiable_case, simpler, check_order, GPU_DTYPES, 400, seed, described_seed)


def test_two_thousand_backwards_on_two_streams_end() -> None:
    """CTAs that wait for the order of dq share the SMs with those of another kernel."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = []
    for i, (seqlen, headdim) in enumerate(((64, 64), (1000, 128), (300, 256), (1500, 64), (129, 96), (700, 192))):
        q, k, v, dout = (torch.randn(2, seqlen, 4, headdim, device="cuda").bfloat16() for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i % 2]):  # autograd runs the backward on it too
            out = flash_attn_func(*leaves, causal=i % 3 == 0, deterministic=i != 4, backend="cuda")
        calls.append((out, leaves, dout))
    torch.cuda.synchronize()
    expected = [torch.autograd.grad(*call, retain_graph=True) for call in calls]
    torch.cuda.synchronize()
    for i in range(2_000):
        got = torch.autograd.grad(*calls[i % len(calls)], retain_graph=True)
        if i >= 2_000 - len(calls):
            torch.cuda.synchronize()
            n = i % len(calls)
            assert_same_bits(got, expected[n], f"call {n}", with_dq=n != 4)


@each_headdim
@each_order
def test_key_blocks_that_no_query_sees(deterministic: bool, headdim: int, seed: int, described_seed: str) -> None:
    """Their CTAs load keys and make no step. The CTAs that follow on the same SMs work on other memory."""
    window = Case("unseen", "a window at the end of many keys", 2, 8, 8, 100, 8000, headdim, window_size=(150, 0))
    unused = VarlenCase("unused", "keys without queries", (0, 100, 0, 70), (3000, 130, 1500, 60), 8, 8, headdim)
    calls = [(window, *made_on_gpu(window, seed), ()), (unused, *made(unused, torch.bfloat16, seed))]
    for case, inputs, dout, lengths in calls:
        expected = gradients(case, inputs, dout, lengths, deterministic=deterministic)
        where = f"deterministic={deterministic} {described(case, dout.dtype, 'sm90', described_seed)}"
        options = {"cu_seqlens": lengths[:2]} if lengths else {"window_size": window.window_size}
        assert_gradients_accurate_beside_flash(*inputs, dout, expected, case=where, **options)
        for _ in range(20):
            got = gradients(case, inputs, dout, lengths, deterministic=deterministic)
            assert_same_bits(got, expected, where, with_dq=deterministic)
