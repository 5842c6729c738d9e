"""The backward kernels of csrc/sm90: the calls that they take, and their accuracy.

test_sm90_backward_repeatable.py has their repeatability. test_sm90_backward_bad_values.py has NaN and infinity around
the values of a call. test_sm90.py runs the kernels of sm80 on a Hopper GPU.

On a Hopper GPU test_backward.py, test_features.py, test_varlen.py and test_random.py run on these kernels too. Nearly
all cases there have head dim 64. The kernels of each head dim have tiles of their own, so the cases run here at the
others.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
import torch

from flash_attn_mini.backends import extension
from flash_attn_mini.backends.cuda import sm80_unavailable_reason

from ..conftest import GPU_DTYPES, IS_HOPPER
from ..kernels.test_random import AnyCase
from ..kernels.test_scale_extremes import EXTREMES, ONE_HOT
from ..support.bounds import assert_gradients_accurate
from ..support.cases import FORWARD_CASES, Case, options_of
from ..support.feature_cases import FEATURE_CASES
from ..support.feature_checks import check_dense, check_varlen, described
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.gpu_calls import run_on_sm80
from ..support.sm90_backward_calls import (
    HEADDIMS,
    HEADS,
    KEY_BLOCKS,
    OPTIONS,
    PASSES,
    RUNS_IN,
    TRACED,
    asked_passes,  # noqa: F401
    assert_same_bits,
    at,
    default_kernels,  # noqa: F401
    each_call,
    each_dtype,
    each_headdim,
    each_kernel,
    each_order,
    gradients,
    kernel_of,
    made,
    made_on_gpu,
    may_have_two_passes,
    on_hopper,
    trace,  # noqa: F401
)
from ..support.varlen_cases import VARLEN_CASES, VarlenCase

pytestmark = on_hopper
SMS = torch.cuda.get_device_properties("cuda").multi_processor_count if IS_HOPPER else 132

KEYS = re.compile(r"flash_bwd_kernel .*?kBlockN=(\d+)")
DENSE = {case.name: case for case in (*FORWARD_CASES, *FEATURE_CASES)}
VARLEN = {case.name: case for case in VARLEN_CASES}


# ---- calls ---------------------------------------------------------------------------------------------------------

NO_KERNEL = "this build has no sm90 kernel for this call"
NO_TMA = "TMA cannot describe these strides"
ARCH_IS_80 = "FLASH_ATTN_MINI_ARCH is 80"


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
@each_headdim
@each_call
@pytest.mark.parametrize(
    ("passes", "seqlen_k", "deterministic", "has_two"),
    [
        *(("", longest + more, False, None) for longest in (512, 1024, 2048) for more in (0, 1)),
        ("", 2049, True, True),
        ("1", 130, True, False),
        ("2", 900, False, True),
    ],
)
def test_passes(
    call: str,
    headdim: int,
    passes: str,
    seqlen_k: int,
    deterministic: bool,
    has_two: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PASSES, passes)
    if has_two is None:  # two passes where they take less time
        has_mask = call in ("causal", "window")
        longest = {256: 1024 if has_mask else 384, 192: seqlen_k if has_mask else 2048}.get(headdim, 0)
        has_two = seqlen_k <= longest
    case = Case("call", "any", 1, 2, 1, 100, seqlen_k, headdim, **OPTIONS[call])
    inputs, dout, _ = made(case, torch.bfloat16, 0)
    for wanted in ((True, True, True), (True, False, False), (False, True, True)):
        gradients(case, inputs, dout, deterministic=deterministic, wanted=wanted)
        expected = has_two and may_have_two_passes(call, headdim) and wanted[0]
        err = capfd.readouterr().err
        assert ("flash_bwd_dq_kernel" in err) == expected
        if may_have_two_passes(call, headdim) and headdim == 256:  # one pass runs in pairs of thread blocks
            is_pair = wanted[0] and not expected and not deterministic
            assert KEYS.findall(err) == ["128" if is_pair else "64"]


def test_another_number_of_passes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSES, "3")
    case = Case("call", "any", 1, 1, 1, 5, 5, 256)
    with pytest.raises(ValueError, match="FLASH_ATTN_MINI_BACKWARD_PASSES is '3'; allowed: 1, 2"):
        gradients(case, *made(case, torch.bfloat16, 0))


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
    """Only dout has a stride of 0: only it is copied, or only the backward runs on sm80."""
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


@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", [case for case in EDGE_CASES if case.headdim > 128], ids=str)
def test_lengths_around_tile_edges_in_one_pass(
    case: Case, dtype: torch.dtype, seed: int, described_seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At head dim 256 two thread blocks share 128 keys: the second one may have none."""
    monkeypatch.setenv(PASSES, "1")
    inputs, dout, _ = made(case, dtype, seed)
    computed = gradients(case, inputs, dout)
    where = described(case, dtype, "sm90", described_seed)
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
@pytest.mark.parametrize("case", [case for case in DENSE_CASES if case.headdim > 128], ids=str)
def test_one_pass_is_as_accurate_as_pytorch(
    case: Case, dtype: torch.dtype, seed: int, described_seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These cases are short, and two passes are their default."""
    monkeypatch.setenv(PASSES, "1")
    check_dense(case, "cuda", "cuda", dtype, seed, described_seed)


@each_dtype
@pytest.mark.parametrize("case", [case for case in VARLEN_CASES_AT if case.headdim > 128], ids=str)
def test_varlen_in_one_pass_is_as_accurate_as_pytorch(
    case: VarlenCase, dtype: torch.dtype, seed: int, described_seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSES, "1")
    check_varlen(case, "cuda", "cuda", dtype, seed, described_seed)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("count", [31, 32, 33, 128, 129, 1023, 1024, 1025])
def test_many_sequences(count: int, causal: bool, seed: int, described_seed: str) -> None:
    """A warp waits for one load with up to 32 sequences, for two with up to 1,024. Causal key blocks of up to 128
    sequences are sorted."""
    draw = random.Random(seed)
    lengths_q, lengths_k = (tuple(draw.choice((0, 1, 5, 63, 130)) for _ in range(count)) for _ in range(2))
    case = VarlenCase(f"{count} sequences", "any", lengths_q, lengths_k, 1, 1, 64, causal=causal)
    check_varlen(case, "cuda", "cuda", torch.bfloat16, seed, described_seed)


@pytest.mark.parametrize("headdim", [64, 128])
def test_the_last_heads_take_key_blocks_by_length(headdim: int, seed: int, described_seed: str) -> None:
    """60 heads have 660 CTAs: the first heads take key blocks in the order of the sequences, the last ones sorted."""
    case = VarlenCase("many heads", "any", (300, 0, 517, 130), (260, 70, 517, 100), 60, 60, headdim, causal=True)
    check_varlen(case, "cuda", "cuda", torch.bfloat16, seed, described_seed)


@each_dtype
@each_kernel
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
@each_kernel
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


# ---- key blocks of a CTA -------------------------------------------------------------------------------------------

# At head dim 64 a CTA takes two key blocks if they have few steps and there are CTAs enough (key_blocks_of_cta in
# csrc/sm90/backward/flash_bwd_launch_template.h). The curated cases are too small for that.
# (options, batch, nheads, nheads_k, seqlen_q, seqlen_k)
KEY_BLOCK_CASES: dict[str, tuple[dict[str, Any], int, int, int, int, int]] = {
    "causal": ({"causal": True}, 24, 20, 20, 300, 300),
    "causal, one block": ({"causal": True}, 36, 32, 32, 70, 100),
    "causal, grouped heads": ({"causal": True}, 40, 30, 10, 300, 390),
    "causal, many keys": ({"causal": True}, 16, 16, 16, 140, 700),
    "window": ({"window_size": (90, 20)}, 24, 20, 20, 390, 390),
    "window, key blocks without queries": ({"window_size": (90, 0)}, 16, 16, 16, 200, 900),
    "window, groups without queries": ({"window_size": (0, 0)}, 12, 12, 12, 100, 1000),
    "long window": ({"window_size": (1023, 0)}, 4, 16, 16, 2300, 2300),
}


@pytest.mark.usefixtures("trace")
@each_order
@pytest.mark.parametrize("name", KEY_BLOCK_CASES)
def test_a_cta_takes_two_key_blocks(
    name: str, deterministic: bool, capfd: pytest.CaptureFixture[str], seed: int, described_seed: str
) -> None:
    options, *shape = KEY_BLOCK_CASES[name]
    case = Case(name, "two key blocks of a CTA", *shape, 64, **options)
    inputs, dout = made_on_gpu(case, seed)
    computed = gradients(case, inputs, dout, deterministic=deterministic)
    enough = case.batch * case.nheads_k * -(-case.seqlen_k // 128) >= 8 * SMS
    assert KEY_BLOCKS.findall(capfd.readouterr().err) == ["2" if enough and not deterministic else "1"]
    where = f"deterministic={deterministic} {described(case, dout.dtype, 'sm90', described_seed)}"
    assert_gradients_accurate_beside_flash(*inputs, dout, computed, case=where, **options)


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize(
    ("seqlen", "left", "count"), [(8192, -1, 2), (8193, -1, 1), (8193, 8063, 2), (8193, 8065, 1), (16384, 1023, 2)]
)
def test_key_blocks_with_few_steps_share_a_cta(
    seqlen: int, left: int, count: int, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    case = Case("steps", "two key blocks of a CTA", 1, SMS // 4, SMS // 4, seqlen, seqlen, 64, window_size=(left, 0))
    inputs, dout = made_on_gpu(case, seed)
    gradients(case, inputs, dout)
    assert KEY_BLOCKS.findall(capfd.readouterr().err) == [str(count)]


@pytest.mark.parametrize("wanted", [(False, True, True), (True, False, True), (True, True, False)], ids=str)
def test_unwanted_gradients_of_two_key_blocks(wanted: tuple[bool, ...], seed: int, described_seed: str) -> None:
    options, *shape = KEY_BLOCK_CASES["causal"]
    case = Case("causal", "two key blocks of a CTA", *shape, 64, **options)
    inputs, dout = made_on_gpu(case, seed)
    expected, got = gradients(case, inputs, dout), gradients(case, inputs, dout, wanted=wanted)
    assert [x is not None for x in got] == list(wanted)
    assert_same_bits(got, expected, described_seed, with_dq=False)
    if wanted[0]:
        torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0.02)


# ---- query heads of a group ----------------------------------------------------------------------------------------

# A CTA takes several query heads of a group if there are CTAs enough (heads_per_cta in csrc/api/allocation.cpp). The
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
@each_kernel
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


@each_kernel
def test_a_cta_takes_several_heads_of_short_sequences(headdim: int, seed: int, described_seed: str) -> None:
    lengths = tuple(i * 37 % 300 * (i % 5 > 0) for i in range(40))
    case = VarlenCase("groups", "heads of a group in one CTA", lengths, lengths[::-1], 12, 4, headdim)
    check_varlen(case, "cuda", "cuda", torch.bfloat16, seed, described_seed)
