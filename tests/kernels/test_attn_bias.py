"""attn_bias on every backend: forward, gradients, equality with calls that say the same without it.

attn_bias_cases.py has the cases, test_random.py draws others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

from ..support.attn_bias_cases import ATTN_BIAS_CASES, KINDS, LAYOUTS, AttnBiasCase
from ..support.attn_bias_checks import BiasedCall, check_attn_bias, make_biased_call
from ..support.bounds import assert_forward_accurate
from ..support.cases import Case
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.key_range_checks import assert_same_bits
from ..support.threads import number_of_threads_kept

THREADS = (1, 2, 3, 8)
CASES = {str(case): case for case in ATTN_BIAS_CASES}


def named(*names: str) -> Any:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=str)


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in ATTN_BIAS_CASES} == set(KINDS)
    assert {case.layout for case in ATTN_BIAS_CASES} == set(LAYOUTS)
    assert len(CASES) == len(ATTN_BIAS_CASES)


@pytest.mark.parametrize("case", ATTN_BIAS_CASES, ids=str)
def test_results_and_gradients(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_attn_bias(case, backend, device, dtype, seed, described_seed)


# ---- calls that say the same ----------------------------------------------------------------------------------------


def assert_same_results(got: dict[str, Tensor], expected: dict[str, Tensor], backend: str, where: str) -> None:
    """The same bits. Triton compiles each layout and dtype of a bias apart, and on a GPU adds in another order."""
    if backend != "triton" or expected["out"].device.type == "cpu":
        assert_same_bits(got, expected, where)
        return
    for name, x in expected.items():
        if not x.is_floating_point():  # rng_state
            assert torch.equal(got[name], x), where
            continue
        bound = 8 * torch.finfo(x.dtype).eps if name == "lse" else 40 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(
            got[name], x, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name} {where} {text}"
        )


def results_of(call: BiasedCall, backend: str, seed: int, **changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return call.run(backend, **changes)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (113, 300), (300, 113), (3, 130)])
def test_a_causal_mask_as_bools(
    seqlen_q: int, seqlen_k: int, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    case = AttnBiasCase(Case("causal", "as bools", 2, 4, 2, seqlen_q, seqlen_k, 64), "mask")
    call = make_biased_call(case, dtype, device, seed)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(seqlen_k - seqlen_q)[None, None]
    results = call.run(backend, attn_bias=mask)
    inputs, where = (call.q, call.k, call.v), f"{case.shape} {dtype} {backend} {described_seed}"
    assert_forward_accurate(*inputs, results["out"], results["lse"], case=where, causal=True)
    gradients = (results["dq"], results["dk"], results["dv"])
    assert_gradients_accurate_beside_flash(*inputs, call.dout, gradients, case=where, causal=True)


@named("full", "padding", "dropout_mqa", "softcap", "decode")
def test_bools_and_minus_inf_are_one_mask(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    # A power of two: the kernels that keep scores where a mask has one row round no product that the others do not.
    exact = dataclasses.replace(case.of, softmax_scale=0.125)
    call = make_biased_call(dataclasses.replace(case, of=exact, kind="mask"), dtype, device, seed)
    expected = results_of(call, backend, seed)
    for wide in (dtype, torch.promote_types(dtype, torch.float32)):
        numbers = torch.zeros(call.attn_bias.shape, dtype=wide, device=device).masked_fill(~call.attn_bias, -math.inf)
        results = results_of(call, backend, seed, attn_bias=numbers)
        del results["dbias"]
        assert_same_results(results, expected, backend, f"{wide}, {case.shape} {described_seed}")


@named("full", "one_row_shared", "mask", "softcap", "decode", "headdim_33")
def test_layouts_of_one_bias(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """The same results, and the gradient is contiguous."""
    call = make_biased_call(case, dtype, device, seed)
    expected = results_of(call, backend, seed)
    for layout, make in LAYOUTS.items():
        bias = make(lambda size: call.attn_bias.new_empty(size), tuple(call.attn_bias.shape))
        bias.copy_(call.attn_bias)
        results = results_of(call, backend, seed, attn_bias=bias)
        assert_same_results(results, expected, backend, f"{layout}, {case.shape} {described_seed}")
        assert "dbias" not in results or results["dbias"].is_contiguous()


@named("shared", "one_row", "padding")
def test_a_bias_of_size_1_is_that_of_the_full_size(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """All but the gradient has the same bits; the gradient's sum is equal."""
    call = make_biased_call(case, dtype, device, seed)
    expected = results_of(call, backend, seed)
    full = call.attn_bias.expand(call.q.shape[0], call.q.shape[2], call.q.shape[1], -1)
    results = results_of(call, backend, seed, attn_bias=full)
    if "dbias" in expected:
        small, large = expected.pop("dbias"), results.pop("dbias")
        assert large.shape == full.shape
        bound = 40 * torch.finfo(dtype).eps
        torch.testing.assert_close(large.double().sum_to_size(small.shape), small.double(), rtol=bound, atol=bound)
    assert_same_bits(results, expected, f"{case.shape} {described_seed}")


@pytest.mark.parametrize("keys", ["all", "expanded"])
def test_one_number_for_all_keys_changes_no_probability(
    keys: str, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """Also where the last dimension has stride 0. The lse rises by the number."""
    call = make_biased_call(CASES["full"], dtype, device, seed)
    batch, seqlen_q, nheads, _ = call.q.shape
    bias = torch.randn(batch, nheads, seqlen_q, 1, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    bias = bias.expand(-1, -1, -1, call.k.shape[1])
    results = call.run(backend, attn_bias=bias if keys == "expanded" else bias.contiguous())
    inputs, where = (call.q, call.k, call.v), f"{call.case.shape} {dtype} {backend} {described_seed}"
    assert_forward_accurate(*inputs, results["out"], results["lse"], case=where, attn_bias=bias)
    without = call.run(backend, attn_bias=None)
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(results["out"], without["out"], rtol=bound, atol=bound, msg=f"out, {where}")
    total = results["dbias"].double().sum(-1)  # no number for all keys changes the output
    assert total.abs().max() <= 40 * torch.finfo(dtype).eps * results["dbias"].double().abs().sum(-1).max(), where


# ---- values ---------------------------------------------------------------------------------------------------------


def test_rows_of_the_lowest_number_weigh_all_keys_alike(
    backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    """As in PyTorch, for a bias so low that no score changes it. Rows that the loss leaves out give no gradient."""
    case = dataclasses.replace(CASES["wide"], per_batch=True)
    call = make_biased_call(case, dtype, device, seed)
    lowest = torch.finfo(call.attn_bias.dtype).min
    bias = torch.zeros_like(call.attn_bias)
    bias[:, :, ::3] = lowest
    dout = call.dout.clone()
    dout[:, ::3] = 0
    results = call.run(backend, attn_bias=bias, dout=dout)
    assert all(x.isfinite().all() for x in results.values())
    v = call.v.double().repeat_interleave(2, dim=2).mean(dim=1, keepdim=True)
    bound = 4 * torch.finfo(dtype).eps
    got = results["out"][:, ::3].double()
    torch.testing.assert_close(got, v.expand_as(got), rtol=bound, atol=bound)
    assert not results["dq"][:, ::3].any()
    assert not results["dbias"][:, :, ::3].any()


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_no_query_sees_reach_nothing(
    bad: float, form: str, has_sink: bool, backend: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """The padding of a batch, keys and queries."""
    q, k, v, dout = (torch.randn(2, 150, 2, 64, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4))
    seen = torch.rand(2, 150, generator=draw) < 0.7
    mask = (seen[:, None, :, None] & seen[:, None, None]).to(device)
    bias = mask if form == "bool" else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    sink = torch.randn(2, generator=draw) if has_sink else None

    def results(*tensors: Tensor) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        if form == "float":
            leaves.append(bias.detach().requires_grad_())
        mask = leaves[3] if form == "float" else bias
        out = flash_attn_func(*leaves[:3], attn_bias=mask, learnable_sink=sink, backend=backend)
        names = ("out", "dq", "dk", "dv", "dbias")
        return dict(zip(names, (out.detach(), *torch.autograd.grad(out, leaves, tensors[3])), strict=False))

    expected = results(q, k, v, dout)
    for name in ("dq", "dk", "dv"):
        assert not expected[name][~seen].any()
    got = results(*(x.masked_fill(~seen[..., None, None], bad) for x in (q, k, v, dout)))
    # The forward leaves such values out one by one, in an order of its own.
    for name, x in expected.items():
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[name], x, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


# ---- forms of a call ------------------------------------------------------------------------------------------------


def test_packed_functions(backend: str, device: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    """The bits of the function of three tensors."""
    qkv, dout = (
        torch.randn(2, 90, 3, 4, 64, generator=draw).to(device, dtype),
        torch.randn(2, 90, 4, 64, generator=draw).to(device, dtype),
    )
    bias = torch.randn(1, 4, 90, 90, generator=draw).to(device, dtype)

    def results(attend: Any) -> list[Tensor]:
        packed, own = qkv.clone().requires_grad_(), bias.clone().requires_grad_()
        out = attend(packed, own)
        return [out, *torch.autograd.grad(out, (packed, own), dout)]

    options = {"causal": True, "deterministic": True, "backend": backend}
    expected = results(lambda x, b: flash_attn_func(*x.unbind(2), attn_bias=b, **options))
    of_qkv = results(lambda x, b: flash_attn_qkvpacked_func(x, attn_bias=b, **options))
    of_kv = results(lambda x, b: flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], attn_bias=b, **options))
    for got in (of_qkv, of_kv):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@named("full", "one_row_shared", "dropout", "wide")
def test_the_gradient_of_the_bias_and_of_nothing_else(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """The bits that it has with the others, in every run."""
    call = make_biased_call(case, dtype, device, seed)
    expected = results_of(call, backend, seed)["dbias"]
    options = {name: x for name, x in call.options.items() if name != "dropout_p"}
    for _ in range(2):
        bias = call.attn_bias.detach().requires_grad_()
        torch.manual_seed(seed)
        out = flash_attn_func(
            call.q, call.k, call.v, call.options["dropout_p"], **options, attn_bias=bias, backend=backend
        )
        (got,) = torch.autograd.grad(out, bias, call.dout)
        assert torch.equal(got, expected), f"{case.shape} {described_seed}"


def test_the_gradient_through_the_lse(backend: str, device: str, draw: torch.Generator) -> None:
    """That of the log-sum-exp is the probabilities."""
    q, k, v = (torch.randn(2, 70, 2, 64, generator=draw).to(device).half() for _ in range(3))
    bias = torch.randn(2, 2, 70, 70, generator=draw).to(device).requires_grad_()
    _, lse, _ = flash_attn_func(q, k, v, attn_bias=bias, return_attn_probs=True, backend=backend)
    (got,) = torch.autograd.grad(lse.sum(), bias)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8 + bias.detach().double()
    torch.testing.assert_close(got.double(), scores.softmax(-1), rtol=2e-3, atol=1e-5)


def test_second_derivative_raises(backend: str, device: str, draw: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, generator=draw).to(device).half().requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 9, 9, generator=draw).to(device).requires_grad_()
    out = flash_attn_func(q, k, v, attn_bias=bias, backend=backend)
    (gradient,) = torch.autograd.grad(out.float().sum(), bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


# ---- threads, instruction sets --------------------------------------------------------------------------------------


@pytest.mark.backends("cpu")
@named("full", "shared", "one_row", "one_row_shared", "many_pairs", "long", "sinks_nothing")
@number_of_threads_kept()
def test_results_do_not_depend_on_the_threads(
    case: AttnBiasCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    call = make_biased_call(case, dtype, device, seed)
    expected = None
    for count in THREADS:
        torch.set_num_threads(count)
        results = results_of(call, backend, seed)
        expected = expected or results
        assert_same_bits(results, expected, f"{count} threads, {case.shape} {described_seed}")


SCRIPT = """
from tests.support.attn_bias_cases import SMALL_ATTN_BIAS_CASES
from tests.support.attn_bias_checks import check_attn_bias

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in SMALL_ATTN_BIAS_CASES:
        check_attn_bias(case, "cpu", "cpu", dtype, seed, f"{level} {seed}")
print("checked", len(SMALL_ATTN_BIAS_CASES))
"""


@each_lesser_level
def test_cases_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, SCRIPT)
