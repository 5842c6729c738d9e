"""The backward kernels of csrc/sm90: the calls that they take, their accuracy and their repeatability.

On a Hopper GPU test_backward.py, test_features.py, test_varlen.py and test_random.py run on them too. Nearly all cases
there have head dim 64. The kernels of each head dim have tiles of their own, so the cases run here at the others.
test_sm90.py runs the kernels of sm80 on a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func
from flash_attn_mini.backends import available_backends, extension
from flash_attn_mini.ladder.full_kernels import sm80_unavailable_reason

from .bounds import assert_gradients_accurate
from .cases import FORWARD_CASES, Case, make_dout, make_inputs, options_of
from .conftest import GPU_DTYPES, IS_HOPPER
from .feature_cases import FEATURE_CASES
from .feature_checks import check_dense, check_varlen, described
from .flash_bounds import assert_gradients_accurate_beside_flash
from .gpu_calls import differing_runs, run_on_sm80
from .random_loop import CHUNKS, check_random_cases
from .rows_without_keys import CASES as KEYLESS_CASES
from .rows_without_keys import check_rows_without_keys
from .test_random import AnyCase, random_case, simpler
from .test_scale_extremes import EXTREMES, ONE_HOT
from .varlen_cases import VARLEN_CASES, VarlenCase, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU on this machine")]

AnyCaseT = TypeVar("AnyCaseT", Case, VarlenCase)

HEADDIMS = (64, 96, 128, 192, 256)
RUNS_IN = {40: 64, 72: 96, 80: 96, 112: 128, 160: 192, 224: 256}  # head dims between the compiled ones
DENSE = {case.name: case for case in (*FORWARD_CASES, *FEATURE_CASES)}
VARLEN = {case.name: case for case in VARLEN_CASES}
EVERYTHING = (True, True, True)
SUBSETS = [wanted for wanted in itertools.product((False, True), repeat=3) if 0 < sum(wanted) < 3]
BAD_VALUES = (math.nan, math.inf, -math.inf)

each_headdim = pytest.mark.parametrize("headdim", HEADDIMS)
each_dtype = pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_order = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
# Options of a call, at least one for each kind of kernel (csrc/kind.h).
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 25)},
    "softcap": {"softcap": 5.0},
    "alibi_and_dropout": {"alibi": "batch", "dropout_p": 0.2},
}
each_call = pytest.mark.parametrize("call", OPTIONS)


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" not in available_backends("cuda"):
        pytest.skip("the build has no CUDA kernels for this GPU")
    monkeypatch.delenv("FLASH_ATTN_MINI_ARCH", raising=False)


def at(headdim: int, cases: Iterable[AnyCaseT]) -> list[AnyCaseT]:
    """The cases at another head dim."""
    return [dataclasses.replace(case, name=f"{case.name}_{headdim}", headdim=headdim) for case in cases]


def gradients(
    case: AnyCase,
    inputs: Sequence[Tensor],
    dout: Tensor,
    lengths: tuple[Any, ...] = (),
    *,
    deterministic: bool = False,
    wanted: tuple[bool, ...] = EVERYTHING,
) -> list[Tensor | None]:
    """dq, dk and dv, None for one that is not wanted. lengths: of a varlen call, its arguments after q, k and v."""
    leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    options = {**options_of(case, "cuda"), "deterministic": deterministic, "backend": "cuda"}
    torch.manual_seed(5)  # the dropout mask
    attend: Any = flash_attn_varlen_func if lengths else flash_attn_func
    attend(*leaves, *lengths, **options).backward(dout)
    return [x.grad for x in leaves]


def made(case: AnyCase, dtype: torch.dtype, seed: int) -> tuple[tuple[Tensor, ...], Tensor, tuple[Any, ...]]:
    """q, k and v; dout; the lengths of a varlen case."""
    if isinstance(case, VarlenCase):
        batch = make_batch(case, dtype, "cuda", seed)
        return (batch.q, batch.k, batch.v), batch.dout, batch.lengths
    return make_inputs(case, dtype, "cuda", seed), make_dout(case, dtype, "cuda", seed), ()


def made_on_gpu(case: Case, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k and v; dout. In bf16, for cases with many heads or long sequences."""
    generator = torch.Generator("cuda").manual_seed(seed)
    of_q = (case.batch, case.seqlen_q, case.nheads, case.headdim)
    of_k = (case.batch, case.seqlen_k, case.nheads_k, case.headdim)
    q, k, v, dout = (torch.randn(x, device="cuda", generator=generator).bfloat16() for x in (of_q, of_k, of_k, of_q))
    return (q, k, v), dout


def assert_same_bits(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: str, *, with_dq: bool = True
) -> None:
    """Of dq, dk and dv, or of dk and dv; None is not compared."""
    for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
        if a is not None and b is not None and (with_dq or name != "dq"):
            assert torch.equal(a, b), f"{name} differs, by up to {(a - b).abs().max().item():.3g}\n  {where}"


# ---- calls ---------------------------------------------------------------------------------------------------------

TRACED = re.compile(r"run_mha_bwd +device=cuda arch=(\w+) kHeadDim=(\d+) kKind=(\w+)(?: because: (.*))?")
HEADS = re.compile(r"set_params_dgrad .*heads_per_dkv=(\d+)")
NO_KERNEL = "this build has no sm90 kernel for this call"
NO_TMA = "TMA cannot describe these strides"
ARCH_IS_80 = "FLASH_ATTN_MINI_ARCH is 80"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")


def kernel_of(capfd: pytest.CaptureFixture[str]) -> tuple[str, int, str, str]:
    """arch, kHeadDim, kKind and the reason against sm90, from the trace of one backward."""
    ((arch, headdim, kind, reason),) = TRACED.findall(capfd.readouterr().err)
    return arch, int(headdim), kind, reason


@pytest.mark.usefixtures("trace")
@each_dtype
@each_headdim
@each_order
@each_call
def test_kernel_runs(
    call: str, deterministic: bool, headdim: int, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case("call", "any", 2, 4, 2, 100, 130, headdim, **OPTIONS[call])
    gradients(case, *made(case, dtype, 0), deterministic=deterministic)
    kind = {"full": "full", "causal": "local", "window": "local"}.get(call, "general")
    assert kernel_of(capfd) == ("sm90", headdim, kind, "")


@pytest.mark.usefixtures("trace")
@each_dtype
@each_headdim
@pytest.mark.parametrize(("name", "kind"), [("mixed", "varlen"), ("softcap", "general")])
def test_kernel_runs_on_sequences_of_different_lengths(
    name: str, kind: str, headdim: int, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    (case,) = at(headdim, [VARLEN[name]])
    gradients(case, *made(case, dtype, 0))
    assert kernel_of(capfd) == ("sm90", headdim, kind, "")


@pytest.mark.usefixtures("trace")
@each_headdim
@pytest.mark.parametrize(("right", "kind"), [(30, "local"), (29, "varlen")])
def test_a_row_without_keys_decides_the_kernel(
    right: int, kind: str, headdim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 130 queries and 100 keys, the first query sees one key or none. Kind local writes no zeros over such rows."""
    case = Case("call", "any", 2, 4, 2, 130, 100, headdim, window_size=(-1, right))
    gradients(case, *made(case, torch.bfloat16, 0))
    assert kernel_of(capfd) == ("sm90", headdim, kind, "")


@pytest.mark.usefixtures("trace")
def test_sm80_takes_rows_without_keys_on_kind_local(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_sm80(monkeypatch)
    case = Case("call", "any", 2, 4, 2, 130, 100, 64, causal=True)
    gradients(case, *made(case, torch.bfloat16, 0))
    assert kernel_of(capfd) == ("sm80", 64, "local", ARCH_IS_80)


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize(("headdim", "compiled"), RUNS_IN.items())
def test_other_head_dims_run_in_the_next_larger(headdim: int, compiled: int, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case("call", "any", 2, 4, 2, 100, 130, headdim)
    gradients(case, *made(case, torch.float16, 0))
    assert kernel_of(capfd) == ("sm90", compiled, "full", "")


@pytest.mark.usefixtures("trace")
@each_dtype
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("headdim_32_causal", NO_KERNEL),
        ("headdim_16", NO_KERNEL),
        ("headdim_64", ARCH_IS_80),
        ("headdim_256_causal", ARCH_IS_80),
    ],
)
def test_other_calls_run_on_sm80_and_the_trace_says_why(
    name: str,
    why: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seed: int,
    described_seed: str,
) -> None:
    case = DENSE[name]
    if case.headdim < 64 and 32 not in extension.load().build_info()["hdims"]:
        pytest.skip("this build has no kernel for headdim 32: FLASH_ATTN_MINI_HDIMS")
    if why == ARCH_IS_80:
        run_on_sm80(monkeypatch)
    inputs, dout, _ = made(case, dtype, seed)
    computed = gradients(case, inputs, dout)
    assert kernel_of(capfd) == ("sm80", max(case.headdim, 32), "local" if case.causal else "full", why)
    where = described(case, dtype, "sm80", described_seed)
    assert_gradients_accurate(*inputs, dout, computed, case=where, causal=case.causal)


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize("name", ["layout_expanded", "layout_expanded_heads"])
def test_tensors_that_tma_cannot_describe(
    name: str, capfd: pytest.CaptureFixture[str], seed: int, described_seed: str
) -> None:
    """They are copied where the build has no sm80 kernel for Hopper."""
    case = DENSE[name]
    inputs, dout, _ = made(case, torch.bfloat16, seed)
    computed = gradients(case, inputs, dout)
    (line,) = TRACED.findall(err := capfd.readouterr().err)
    if sm80_unavailable_reason() is None:
        assert (line[0], line[3]) == ("sm80", NO_TMA)
    else:
        assert (line[0], line[3]) == ("sm90", "")
        assert f"copied k because {NO_TMA}" in err
    where = described(case, dout.dtype, "cuda", described_seed)
    assert_gradients_accurate(*inputs, dout, computed, case=where, causal=case.causal)


@pytest.mark.usefixtures("trace")
@each_order
@pytest.mark.parametrize("name", ["headdim_64", "headdim_128_causal"])
def test_a_dout_of_equal_rows(
    name: str, deterministic: bool, capfd: pytest.CaptureFixture[str], seed: int, described_seed: str
) -> None:
    """Only dout has a stride of 0: it alone is copied, or the backward alone runs on sm80."""
    case = DENSE[name]
    inputs, dout, _ = made(case, torch.bfloat16, seed)
    dout = dout[:, :1].expand(dout.shape)
    computed = gradients(case, inputs, dout, deterministic=deterministic)
    (line,) = TRACED.findall(err := capfd.readouterr().err)
    if sm80_unavailable_reason() is None:
        assert (line[0], line[3]) == ("sm80", NO_TMA)
    else:
        assert (line[0], line[3]) == ("sm90", "")
        assert re.findall(r"copied (\w+) because", err) == ["dout"]
        expected = gradients(case, inputs, dout.contiguous(), deterministic=deterministic)
        assert_same_bits(computed, expected, name, with_dq=deterministic)
    where = described(case, dout.dtype, "cuda", described_seed)
    assert_gradients_accurate(*inputs, dout, computed, case=where, causal=case.causal)


# ---- accuracy ------------------------------------------------------------------------------------------------------

EDGES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257)  # around tiles of 64 and 128 rows, one or several
EDGE_CASES = [
    Case(f"edges_{m}_{n}_headdim_{d}{'_causal' * causal}", "lengths around tiles", 1, 4, 2, m, n, d, causal)
    for d in HEADDIMS
    for causal in (False, True)
    for shift in (1, 4)  # pairs of different lengths
    for m, n in zip(EDGES, EDGES[shift:] + EDGES[:shift], strict=True)
]


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    list(zip(GPU_DTYPES, (False, True), strict=True)),
    ids=["float16-fast", "bfloat16-deterministic"],
)
@pytest.mark.parametrize("case", EDGE_CASES, ids=str)
def test_lengths_around_tile_edges(
    case: Case, deterministic: bool, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    inputs, dout, _ = made(case, dtype, seed)
    computed = gradients(case, inputs, dout, deterministic=deterministic)
    where = f"deterministic={deterministic} {described(case, dtype, 'sm90', described_seed)}"
    assert_gradients_accurate_beside_flash(*inputs, dout, computed, case=where, causal=case.causal)


# One case for each way through the kernels that does not depend on the head dim.
PATHS = [
    DENSE[name]
    for name in (
        *("masked_rows", "masked_tile", "one_key", "no_keys", "decode_causal", "gqa_3_causal", "mqa", "long_causal"),
        *("layout_bhsd_causal", "layout_sbhd", "layout_packed_gqa", "layout_misaligned", "padding_inf_causal"),
        *("values_rising", "values_negative", "values_scores_1e4", "scale_negative", "scale_zero"),
        *("scale_negative_causal", "window_scale_negative"),
        *("window_more_queries", "window_0_0", "window_left_more_keys", "window_causal_more_keys", "window_tile_edges"),
        *("softcap_5", "softcap_30_causal", "softcap_scores_40", "alibi_causal", "alibi_more_queries"),
        *("alibi_batch_gqa", "dropout_causal", "dropout_most", "together", "together_softcap"),
    )
]
SOME_PATHS = [
    DENSE[name] for name in ("more_keys_causal", "gqa_4", "layout_packed_gqa", "together", "together_softcap")
]
DENSE_CASES = [
    *(case for d in HEADDIMS[1:] for case in at(d, PATHS)),
    *at(256, [DENSE["values_all_1e4"]]),  # the scale is a power of 2, so that the scores are exact
    *(case for d in RUNS_IN for case in at(d, SOME_PATHS)),
]
VARLEN_PATHS = [
    VARLEN[name]
    for name in (
        *("mixed", "more_and_less", "more_and_less_causal", "tile_edges", "empty_around", "long_and_short_causal"),
        *("slack", "gqa", "mqa", "layout_packed", "window", "softcap", "alibi_batch", "dropout", "together"),
    )
]
VARLEN_CASES_AT = [
    *(case for d in HEADDIMS[1:] for case in at(d, VARLEN_PATHS)),
    *(case for d in RUNS_IN for case in at(d, [VARLEN["more_and_less_causal"], VARLEN["together"]])),
]


@each_dtype
@pytest.mark.parametrize("case", DENSE_CASES, ids=str)
def test_every_head_dim_is_as_accurate_as_pytorch(
    case: Case, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_dense(case, "cuda", "cuda", dtype, seed, described_seed)


@each_dtype
@pytest.mark.parametrize("case", VARLEN_CASES_AT, ids=str)
def test_varlen_of_every_head_dim_is_as_accurate_as_pytorch(
    case: VarlenCase, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_varlen(case, "cuda", "cuda", dtype, seed, described_seed)


@each_dtype
@each_headdim
@pytest.mark.parametrize(("scale", "softcap"), [pair for pair in EXTREMES if pair not in ONE_HOT])
def test_extreme_scales(
    scale: float, softcap: float, headdim: int, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    case = Case("extreme", "any", 1, 4, 2, 37, 70, headdim, softmax_scale=scale, softcap=softcap)
    inputs, dout, _ = made(case, dtype, seed)
    where = described(case, dtype, "sm90", described_seed)
    options = {"softmax_scale": scale, "softcap": softcap}
    assert_gradients_accurate_beside_flash(*inputs, dout, gradients(case, inputs, dout), case=where, **options)


# (kind of the kernel, a call of it)
CASES_OF_KINDS: list[tuple[str, AnyCase]] = [
    ("full", Case("full", "any", 12, 24, 8, 300, 300, 64)),
    ("local", Case("causal", "any", 2, 6, 2, 300, 400, 64, causal=True)),
    ("varlen", Case("rows without keys", "any", 2, 6, 2, 300, 200, 64, causal=True)),
    ("varlen", VarlenCase("packed", "any", (300, 0, 517, 130), (200, 90, 600, 1), 6, 2, 64, causal=True)),
    ("general", Case("alibi", "any", 12, 24, 8, 300, 300, 64, alibi="batch")),
]


@pytest.mark.usefixtures("trace")
@each_dtype
@each_headdim
@pytest.mark.parametrize(("kind", "case"), CASES_OF_KINDS, ids=lambda x: getattr(x, "name", ""))
def test_large_log_sum_exps_beside_small_ones(
    kind: str,
    case: AnyCase,
    headdim: int,
    dtype: torch.dtype,
    capfd: pytest.CaptureFixture[str],
    seed: int,
    described_seed: str,
) -> None:
    """One row of a hundred has scores around 4,608 or -4,608. Beyond 4,096 kernels handle a log-sum-exp differently.

    In "full" and "alibi" a work tile of preprocess has rows of several heads, and ends inside of one.
    """
    case = dataclasses.replace(case, headdim=headdim, softmax_scale=0.125)
    (q, k, v), dout, lengths = made(case, torch.bfloat16, seed)
    draw = torch.rand(q.shape[:-1], device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    q[..., 0] = torch.where(draw < 0.01, torch.where(draw < 0.005, 36864.0, -36864.0), 0.0)
    k[..., 0] = 1.0
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    computed = gradients(case, (q, k, v), dout, lengths)
    assert kernel_of(capfd) == ("sm90", headdim, kind, "")
    options = {**options_of(case, "cuda"), "cu_seqlens": lengths[:2] or None}
    where = described(case, dtype, "sm90", described_seed)
    assert_gradients_accurate_beside_flash(q, k, v, dout, computed, case=where, **options)


# ---- query heads of a group ----------------------------------------------------------------------------------------

# A CTA takes several query heads of a group if there are CTAs enough (heads_per_cta in csrc/kernel_memory.cpp). The
# curated cases are too small for that. (options, batch, nheads, nheads_k, heads of a CTA)
GROUPS: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "whole": ({}, 12, 24, 8, 3),
    "halves": ({}, 6, 32, 8, 2),
    "causal": ({"causal": True}, 24, 30, 15, 2),
    "causal, 960 CTAs": ({"causal": True}, 20, 32, 16, 2),
    "window": ({"window_size": (90, 20)}, 12, 24, 8, 3),
    "softcap": ({"softcap": 5.0}, 12, 24, 8, 3),
}


@pytest.mark.usefixtures("trace")
@each_headdim
@each_order
@pytest.mark.parametrize("group", GROUPS)
def test_a_cta_takes_several_heads_of_a_group(
    group: str,
    deterministic: bool,
    headdim: int,
    capfd: pytest.CaptureFixture[str],
    seed: int,
    described_seed: str,
) -> None:
    options, batch, nheads, nheads_k, heads = GROUPS[group]
    case = Case(group, "heads of a group in one CTA", batch, nheads, nheads_k, 200, 300, headdim, **options)
    inputs, dout = made_on_gpu(case, seed)
    computed = gradients(case, inputs, dout, deterministic=deterministic)
    assert HEADS.findall(capfd.readouterr().err) == [str(heads)]
    where = f"deterministic={deterministic} {described(case, dout.dtype, 'sm90', described_seed)}"
    assert_gradients_accurate_beside_flash(*inputs, dout, computed, case=where, **options)


@each_headdim
def test_a_cta_takes_several_heads_of_short_sequences(headdim: int, seed: int, described_seed: str) -> None:
    lengths = tuple(i * 37 % 300 * (i % 5 > 0) for i in range(40))
    case = VarlenCase("groups", "heads of a group in one CTA", lengths, lengths[::-1], 12, 4, headdim)
    check_varlen(case, "cuda", "cuda", torch.bfloat16, seed, described_seed)


# ---- some of the gradients -----------------------------------------------------------------------------------------


@each_dtype
@each_headdim
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


# ---- repeatability -------------------------------------------------------------------------------------------------

RUNS = 200  # test_deterministic.py makes more under stress


@each_headdim
@each_order
@pytest.mark.parametrize("call", [*OPTIONS, "varlen"])
def test_two_hundred_backwards_repeat_bitwise(call: str, deterministic: bool, headdim: int, seed: int) -> None:
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
    first = 0 if deterministic else 1

    def run(_i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)[first:]

    differs = differing_runs(run, [run(0)], RUNS)
    assert not any(differs), f"runs in which {('dq', 'dk', 'dv')[first:]} differ: {differs}"


def differentiable_case(draw: random.Random) -> AnyCase:
    """Pages have no backward."""
    case = random_case(draw)
    return dataclasses.replace(case, page_size=0) if isinstance(case, VarlenCase) else case


def check_order(case: AnyCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    """deterministic=True gives the same bits again, and the gradients of the other order up to rounding."""
    inputs, dout, lengths = made(case, dtype, seed)
    ordered = gradients(case, inputs, dout, lengths, deterministic=True)
    where = described(case, dtype, "cuda", described_seed)
    assert_same_bits(gradients(case, inputs, dout, lengths, deterministic=True), ordered, where)
    eps = torch.finfo(dtype).eps
    for name, got, other in zip("qkv", ordered, gradients(case, inputs, dout, lengths), strict=True):
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


# ---- bad values ----------------------------------------------------------------------------------------------------


@each_dtype
@each_headdim
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
@each_headdim
@each_call
def test_bad_values_between_many_short_sequences(
    call: str, headdim: int, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    """Every second sequence is bad, of queries and keys. The load warp writes zeros over its rows (load_bwd.h).

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
