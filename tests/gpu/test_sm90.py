"""The kernels of csrc/sm90: the calls that they take, and their accuracy. test_sm90_backward*.py have the backward.

Every test that runs on the default kernels of a Hopper GPU runs on them. So the kernels of sm80 run here, too, if the
build has them for Hopper: FLASH_ATTN_MINI_ARCHS="90;90a".
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_mini.backends import available_backends, extension
from flash_attn_mini.backends.cuda import sm80_unavailable_reason
from flash_attn_mini.reference import attention_reference

from ..conftest import IS_HOPPER
from ..kernels.test_random import AnyCase, random_case, simpler
from ..support.bounds import assert_forward_accurate
from ..support.cases import FORWARD_CASES, Case
from ..support.feature_cases import FEATURE_CASES
from ..support.feature_checks import check_dense, check_varlen
from ..support.gpu_calls import run_on_sm80
from ..support.random_loop import CHUNKS, check_random_cases
from ..support.rows_without_keys import CASES as KEYLESS_CASES
from ..support.rows_without_keys import check_rows_without_keys
from ..support.varlen_cases import VARLEN_CASES, VarlenCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU on this machine")]

DTYPES = (torch.float16, torch.bfloat16)
# Up to 299 tokens; a fifth of the sequences are empty. The blocks of the last head are sorted by length for up to 128
# sequences (kMaxSortedSequences).
LENGTHS = tuple(i * 37 % 300 * (i % 5 > 0) for i in range(129))
SORTED = [
    VarlenCase(f"sequences_{count}", "blocks from long to short", LENGTHS[:count], LENGTHS[:count], causal=True)
    for count in (31, 40, 128, 129)
]


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" not in available_backends("cuda"):
        pytest.skip("the build has no CUDA kernels for this GPU")
    monkeypatch.delenv("FLASH_ATTN_MINI_ARCH", raising=False)


def qkv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(3)]


# ---- calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (33, 7)}, {"softcap": 5.0}, {"dropout_p": 0.1}], ids=str
)
def test_kernel_runs(
    options: dict[str, object], headdim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*qkv(2, 200, 4, headdim), **options)
    assert "arch=sm90" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("why", "headdim"),
    [("this build has no sm90 kernel for this call", 32), ("FLASH_ATTN_MINI_ARCH is 80", 64)],
    ids=["headdim_32", "asked_for"],
)
def test_other_calls_run_on_sm80_and_the_trace_says_why(
    why: str, headdim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if headdim not in extension.load().build_info()["hdims"]:
        pytest.skip(f"this build has no kernel of exactly headdim {headdim}: FLASH_ATTN_MINI_HDIMS")
    if "ARCH" in why:
        run_on_sm80(monkeypatch)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*qkv(2, 70, 4, headdim))
    assert f"arch=sm80 kHeadDim={headdim}" in (err := capfd.readouterr().err)
    assert f"because: {why}" in err


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("expanded", ["q", "k", "v", "kv"])
def test_tensors_that_tma_cannot_describe(
    expanded: str, varlen: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are copied where the build has no sm80 kernel for Hopper: the result has the bits of contiguous tensors."""
    shape = (140, 4, 64) if varlen else (2, 70, 4, 64)
    given = {
        name: x[..., :1, :].expand(shape) if name in expanded else x for name, x in zip("qkv", qkv(*shape), strict=True)
    }
    lengths = torch.tensor([0, 60, 140], device="cuda", dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if varlen:
            return flash_attn_varlen_func(q, k, v, lengths, lengths, 80, 80, return_attn_probs=True)
        return flash_attn_func(q, k, v, return_attn_probs=True)

    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    out, lse, *_ = attend(**given)
    err = capfd.readouterr().err
    if sm80_unavailable_reason() is None:
        assert "arch=sm80 kHeadDim=64" in err
        assert "because: TMA cannot describe these strides" in err
    else:
        assert "arch=sm90 kHeadDim=64" in err
        copied = re.findall(r"copied (\w) because TMA cannot describe these strides", err)
        assert copied == list(expanded)
        expected = attend(**{name: x.contiguous() for name, x in given.items()})
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    if not varlen:
        assert_forward_accurate(*given.values(), out, lse, case=f"{expanded} expanded")


def test_an_expanded_cache_is_not_copied(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """num_splits=1 takes the kernels of the forward, unless the only one for this GPU needs TMA."""
    q, k, v = qkv(2, 70, 4, 64)
    cache_k, cache_v = (x[:1].expand_as(x) for x in (k, v))
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    out, lse = flash_attn_with_kvcache(q, cache_k, cache_v, num_splits=1, return_softmax_lse=True)
    err = capfd.readouterr().err
    assert "copied" not in err
    assert ("arch=sm80 kHeadDim=64" if sm80_unavailable_reason() is None else "run_mha_fwd_splitkv_dispatch") in err
    assert_forward_accurate(q, cache_k, cache_v, out, lse, case="expanded cache")


def test_kernels_that_were_not_built_are_refused_with_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    if sm80_unavailable_reason() is None:
        pytest.skip("this build has the kernels of sm80 for Hopper")
    q, k, v = (x.requires_grad_() for x in qkv(2, 70, 4, 64))
    out = flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    caches = [x.detach().clone() for x in (k, v)]
    message = 'FLASH_ATTN_MINI_ARCH is 80, but .* build them all with: FLASH_ATTN_MINI_ARCHS="90;.*90a.*" pip install .'
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCH", "80")
    with pytest.raises(RuntimeError, match=message):
        flash_attn_func(q, k, v)
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(q, *caches, k[:, :1], v[:, :1], cache_seqlens=3, num_splits=1)
    for cache, before in zip(caches, (k, v), strict=True):
        assert torch.equal(cache, before), "nothing is appended"
    with torch.no_grad():
        flash_attn_with_kvcache(q, *caches, num_splits=2)  # the split-KV kernels are those of every GPU


def test_pages_run_on_sm80(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    q, (k, v) = qkv(1, 4, 64)[0], qkv(3, 16, 4, 64)[:2]
    cu_seqlens_q, cu_seqlens_k = torch.tensor([[0, 1], [0, 40]], device="cuda", dtype=torch.int32)
    pages = torch.arange(3, device="cuda", dtype=torch.int32)[None]
    flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 1, 40, block_table=pages)
    assert "arch=sm80 kHeadDim=64 kKind=paged because: this build has no sm90 kernel" in capfd.readouterr().err


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCH", "100")
    with pytest.raises(ValueError, match="FLASH_ATTN_MINI_ARCH is '100'; allowed: 80, 90"):
        flash_attn_func(*qkv(1, 16, 1, 64))


# ---- the kernels of sm80 -------------------------------------------------------------------------------------------

# Smaller head dims run on them by default.
DENSE_ON_SM80 = [case for case in (*FORWARD_CASES, *FEATURE_CASES) if case.headdim > 32]
VARLEN_ON_SM80 = [case for case in VARLEN_CASES if case.headdim > 32 and not case.page_size]


@pytest.fixture
def sm80(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_sm80(monkeypatch)


@pytest.mark.usefixtures("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DENSE_ON_SM80, ids=str)
def test_sm80_is_as_accurate_as_pytorch(case: Case, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_dense(case, "cuda", "cuda", dtype, seed, described_seed)


@pytest.mark.usefixtures("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", VARLEN_ON_SM80, ids=str)
def test_varlen_on_sm80_is_as_accurate_as_pytorch(
    case: VarlenCase, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_varlen(case, "cuda", "cuda", dtype, seed, described_seed)


@pytest.mark.usefixtures("sm80")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls_on_sm80_are_as_accurate_as_pytorch(chunk: int, seed: int, described_seed: str) -> None:
    def check(case: AnyCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
        torch.manual_seed(seed)
        if isinstance(case, VarlenCase):
            check_varlen(case, "cuda", "cuda", dtype, seed, described_seed)
        else:
            check_dense(case, "cuda", "cuda", dtype, seed, described_seed)

    check_random_cases(random_case, simpler, check, DTYPES, 400, seed, described_seed)


@pytest.mark.usefixtures("sm80")
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("case", KEYLESS_CASES, ids=str)
def test_bad_values_in_rows_without_keys_on_sm80(
    case: AnyCase, deterministic: bool, seed: int, described_seed: str
) -> None:
    check_rows_without_keys(case, "cuda", "cuda", torch.float16, seed, described_seed, deterministic)


# ---- accuracy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SORTED, ids=str)
def test_blocks_from_long_to_short(case: VarlenCase, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    check_varlen(case, "cuda", "cuda", dtype, seed, described_seed)


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("per_block", [-100.0, 5.0, 40.0, 100.0, 400.0], ids=lambda step: f"steps_of_{step:g}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_grow_from_block_to_block(
    dtype: torch.dtype, per_block: float, causal: bool, headdim: int, seed: int, described_seed: str
) -> None:
    """Key blocks are visited from the last to the first. The scores of each are `per_block` above those visited before,
    so the reference of the softmax is too small at every step. From 89 on, a probability overflows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, 500, 3, headdim, device="cuda", generator=generator) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(headdim, device="cuda", generator=generator), dim=0)
    growth = per_block / 128 * torch.arange(500, 0, -1, device="cuda").view(1, -1, 1, 1)
    q = (q + direction * math.sqrt(headdim)).to(dtype)
    k, v = (k + direction * growth).to(dtype), v.to(dtype)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    where = f"scores grow by {per_block} a block\n  headdim={headdim} causal={causal} {dtype}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=where, causal=causal)


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("level", [-90.0, -50.0, -10.0, -2.0, 5.0, 9.0, 50.0, 90.0], ids="level_{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_around_any_level(
    dtype: torch.dtype, level: float, headdim: int, seed: int, described_seed: str
) -> None:
    """In bf16, the first step of a work tile takes probabilities relative to 0 if a sample of its scores lies within
    8 powers of 2 of 0 (levels up to 5.5). Otherwise it takes the row maximum, as fp16 always does."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, n, 3, headdim, device="cuda", generator=generator) for n in (200, 384, 384))
    direction = torch.nn.functional.normalize(torch.randn(headdim, device="cuda", generator=generator), dim=0)
    q, k, v = (q + direction * math.sqrt(headdim)).to(dtype), (k + direction * level).to(dtype), v.to(dtype)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    where = f"scores around {level}\n  headdim={headdim} {dtype}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=where)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_with_probability_1(dtype: torch.dtype, headdim: int, seed: int, described_seed: str) -> None:
    """The output is the value of that key: in fp16 bit by bit, in bf16 within the rounding of one number."""
    generator = torch.Generator("cuda").manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(headdim, device="cuda", generator=generator), dim=0)
    q = (direction * math.sqrt(headdim)).expand(1, 200, 2, headdim).to(dtype)
    level = 8.0 + torch.rand(1, 384, 2, 1, device="cuda", generator=generator)
    takes_all = torch.arange(384, device="cuda").view(1, -1, 1, 1) == 383  # in the first step
    k = (direction * torch.where(takes_all, level, -20.0)).to(dtype)
    v = torch.randn(1, 384, 2, headdim, device="cuda", generator=generator).to(dtype)
    out = flash_attn_func(q, k, v)
    expected = v[:, 383:].expand_as(out)
    rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(out, expected, rtol=rounding, atol=0.0, msg=lambda m: f"{described_seed}\n{m}")


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "anywhere"])
@pytest.mark.parametrize("above", [6, 8, 10, 12, 15, 20, 35, 60, 90, 110, 140], ids="above_{}".format)
def test_one_key_far_above_the_rest(
    above: int, is_first: bool, causal: bool, headdim: int, seed: int, described_seed: str
) -> None:
    """In bf16, the sample of the scores seldom contains this key: the reference moves after the step, or the step is
    computed again (140, where a probability overflows). From 20 on the bound is near 0: PyTorch's probability is
    exactly 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, 500, 3, headdim, device="cuda", generator=generator) for _ in range(3))
    key = 0 if is_first else int(torch.randint(500, (), device="cuda", generator=generator))
    direction = torch.nn.functional.normalize(torch.randn(headdim, device="cuda", generator=generator), dim=0)
    # Every query has the component sqrt(headdim) along the direction, so its score with the key is `above`.
    q += direction * (math.sqrt(headdim) - (q @ direction)[..., None])
    k[:, key] = direction * above
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    first = key if causal else 0  # the first row that sees the key
    where = f"key {key} is {above} above the rest\n  headdim={headdim} causal={causal}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=where, causal=causal)
    seeing = f"rows that see it, {where}"
    assert_forward_accurate(q[:, first:], k, v, out[:, first:], lse[..., first:], case=seeing, causal=causal)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("deviation", "above"), [(3, 35), (5, 50), (5, 60), (5, 90), (9, 90), (9, 140), (25, 300)], ids=str
)
def test_one_key_far_above_scores_that_spread(
    deviation: float, above: float, causal: bool, headdim: int, seed: int, described_seed: str
) -> None:
    """As before, but the other scores spread too, so that keys outweigh all before them by chance as well. The others
    count for less than the last bit of this key's value."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, 500, 3, headdim, device="cuda", generator=generator) for _ in range(3))
    key = int(torch.randint(500, (), device="cuda", generator=generator))
    q *= deviation
    q[..., -1], k[..., -1] = math.sqrt(headdim), 0.0
    k[:, key] = 0.0
    k[:, key, :, -1] = above
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    where = f"key {key} is {above} above scores of std {deviation}\n  {headdim=} {causal=}\n  {described_seed}"
    first = key if causal else 0  # the first row that sees the key
    assert_forward_accurate(q[:, first:], k, v, out[:, first:], lse[..., first:], case=where, causal=causal)
    assert torch.equal(out[:, first:], v[:, key : key + 1].expand_as(out[:, first:])), where


def assert_as_accurate_as_rounding_allows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, where: str
) -> None:
    """PyTorch rounds the scores to the dtype of q, which says nothing about kernels that do not. Here each probability
    and each element of the output may be rounded once, and each score may have float32's error of its products."""
    expected_out, expected_lse = attention_reference(q.double(), k.double(), v.double(), causal=causal)
    products = torch.einsum("bqhd,bkhd->bhqk", q.double().abs(), k.double().abs()).max().item()
    of_scores = 2.0**-21 * products / math.sqrt(q.shape[-1])
    bound = (torch.finfo(q.dtype).eps + 2 * of_scores) * v.abs().max().item()
    error, error_lse = (
        (out.double() - expected_out).abs().max().item(),
        (lse.double() - expected_lse).abs().max().item(),
    )
    assert error <= bound, f"out: error {error:.3e}, bound {bound:.3e}, {where}"
    assert error_lse <= 1e-5 + of_scores, f"lse: error {error_lse:.3e}, bound {1e-5 + of_scores:.3e}, {where}"


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deviation", [3, 9, 25, 64, 100, 150, 300], ids="std_{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_spread(
    dtype: torch.dtype, deviation: float, causal: bool, headdim: int, seed: int, described_seed: str
) -> None:
    """In bf16 the reference then lies above the maximum, by up to 2^56, and may rise by more than 2^126 in one step.
    Values of V near 2^-40 come out as well as those near 1: their products with P may be subnormal numbers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, 1333, 3, headdim, device="cuda", generator=generator) for _ in range(3))
    q, k, v = ((q * deviation).to(dtype), k.to(dtype), v.to(dtype))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    where = f"scores of std {deviation}\n  {headdim=} {causal=} {dtype}\n  {described_seed}"
    assert_as_accurate_as_rounding_allows(q, k, v, out, lse, causal, where)
    if dtype == torch.bfloat16:
        out = flash_attn_func(q, k, v * 2.0**-40, causal=causal) * 2.0**40
        assert_as_accurate_as_rounding_allows(q, k, v, out, lse, causal, f"small values of V, {where}")


@pytest.mark.parametrize("deviation", [9, 64, 90], ids="std_{}".format)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_scores_that_spread_over_splits(headdim: int, deviation: float, seed: int, described_seed: str) -> None:
    """The parts of the keys have references of their own, and the one with the largest score counts."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(2, 64, 8, headdim, device="cuda", generator=generator)
    k, v = (torch.randn(2, 8192, 2, headdim, device="cuda", generator=generator).bfloat16() for _ in range(2))
    q = (q * deviation).bfloat16()
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=8192, num_splits=4, return_softmax_lse=True)
    where = f"4 splits of scores of std {deviation}\n  {headdim=}\n  {described_seed}"
    k, v = (x.repeat_interleave(4, dim=2) for x in (k, v))
    assert_as_accurate_as_rounding_allows(q, k, v, out, lse, causal=False, where=where)


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_with_a_bias_of_minus_infinity_are_hidden(
    dtype: torch.dtype, headdim: int, seed: int, described_seed: str
) -> None:
    """A bias of minus infinity, added through one more feature, hides keys, also all keys of the first steps: whole
    warps see no finite score for more than one step."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(2, n, 3, headdim, device="cuda", generator=generator).to(dtype) for n in (130, 500, 500))
    q[..., -1] = 1.0
    k[:, 100:, :, -1] = -math.inf
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    where = f"keys of minus infinity\n  headdim={headdim} {dtype}\n  {described_seed}"
    assert_forward_accurate(q, k[:, :100], v[:, :100], out, lse, case=where)


@pytest.mark.parametrize("slope", [0.01, 0.3, 4.0, -0.3, -4.0], ids="slope_{}".format)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_that_grow_from_block_to_block(
    dtype: torch.dtype, causal: bool, slope: float, seed: int, described_seed: str
) -> None:
    """ALiBi raises the scores of each block above those visited before it, where keys come after their query."""
    generator = torch.Generator("cuda").manual_seed(seed)
    few, many = (torch.randn(1, n, 3, 64, device="cuda", generator=generator).to(dtype) for n in (400, 1500))
    slopes = torch.full((3,), slope, device="cuda")
    for q, k, v in ((few, many, many), (many, few, few)):
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
        where = f"biases\n  slope={slope} causal={causal} {dtype} {tuple(q.shape)}\n  {described_seed}"
        assert_forward_accurate(q, k, v, out, lse, case=where, causal=causal, alibi_slopes=slopes)


@pytest.mark.parametrize("window_size", [(10, 0), (0, 0), (200, 30), (1000, 0)], ids=str)
def test_windows_over_many_tiles(window_size: tuple[int, int], seed: int, described_seed: str) -> None:
    """Three consumers: some skip the first key block of a work tile, some the last, some both."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(1, 1300, 3, 64, device="cuda", generator=generator).bfloat16() for _ in range(3))
    out, lse, _ = flash_attn_func(q, k, v, window_size=window_size, return_attn_probs=True)
    where = f"window {window_size}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=where, window_size=window_size)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (798, 442))
    q, k, v = q[0, :798], k[0, :442], v[0, :442]
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 798, 442, window_size=window_size, return_attn_probs=True
    )
    assert_forward_accurate(
        q[None], k[None], v[None], out[None], lse[None], case=f"varlen, {where}", window_size=window_size
    )


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [600, 1100, 1300], ids="seqlen_{}".format)
def test_pairs_of_tiles_cover_every_row(seqlen: int, headdim: int, seed: int, described_seed: str) -> None:
    """Many causal work tiles: pairs, with even and odd numbers per head, and heads without pairs at the end."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (4, seqlen, 48 * 1024 // seqlen, headdim)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).half() for _ in range(3))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    where = f"pairs\n  {shape} sm90\n  {described_seed}"
    for i in range(shape[0]):
        one = slice(i, i + 1)
        assert_forward_accurate(q[one], k[one], v[one], out[one], lse[one], case=where, causal=True)


@pytest.mark.parametrize("seqlen", [200, 1000], ids="seqlen_{}".format)
def test_few_rows_run_in_short_tiles(
    seqlen: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seed: int, described_seed: str
) -> None:
    """Full attention of head dim 64 in tiles of 192 rows would leave SMs idle here."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (4, seqlen, 8, 64)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).half() for _ in range(3))
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert "kBlockM=128" in capfd.readouterr().err
    assert_forward_accurate(q, k, v, out, lse, case=f"short tiles\n  {shape} sm90\n  {described_seed}")


@pytest.mark.parametrize("kind", ["full", "causal", "varlen"])
def test_a_forward_leaves_sms_to_other_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The grid is smaller by the SMs that are reserved, and the results have the same bits."""
    q, k, v = qkv(3, 1111, 16, 64)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 1111, 2222, 3333], device="cuda", dtype=torch.int32)

    def call() -> tuple[Tensor, int]:
        if kind == "varlen":
            out = flash_attn_varlen_func(*packed, cu_seqlens, cu_seqlens, 1111, 1111, causal=True)
        else:
            out = flash_attn_func(q, k, v, causal=kind == "causal")
        (grid,) = re.findall(r"flash_fwd_kernel .* grid=(\d+)", capfd.readouterr().err)
        return out, int(grid)

    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    expected, grid = call()
    sms = torch.cuda.get_device_properties().multi_processor_count
    assert grid == sms
    with extension.reserved_sms(sms - 10):
        out, grid = call()
    assert grid == 10
    assert torch.equal(out, expected)
    assert call()[1] == sms


@pytest.mark.parametrize(
    ("nheads", "seqlen_q", "seqlen_k", "headdim"),
    [(16, 4096, 1024, 128), (32, 4096, 1024, 64), (64, 2048, 512, 128), (128, 512, 128, 128)],
)
def test_many_blocks_of_rows_without_keys(
    nheads: int, seqlen_q: int, seqlen_k: int, headdim: int, seed: int, described_seed: str
) -> None:
    """Several work tiles without keys between those with keys: the kernel ends, and rows without keys are 0."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(1, seqlen_q, nheads, headdim, device="cuda", generator=generator).bfloat16()
    k, v = (torch.randn(1, seqlen_k, nheads, headdim, device="cuda", generator=generator).bfloat16() for _ in range(2))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    case = f"rows without keys\n  {seqlen_q} x {seqlen_k} nheads={nheads} headdim={headdim}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=case, causal=True)


def test_infinity_in_one_sequence_does_not_reach_another() -> None:
    """A tile of V reaches into the next sequence, where 0 times infinity is not 0."""
    q, k, v = qkv(200, 2, 64)
    cu_seqlens = torch.tensor([0, 100, 200], device="cuda", dtype=torch.int32)
    clean = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 100, 100)
    for value in (math.inf, math.nan):
        v[100:] = value
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 100, 100)
        assert torch.equal(out[:100], clean[:100])


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_does_not_depend_on_its_neighbours(dtype: torch.dtype, causal: bool, headdim: int) -> None:
    """A tile of Q reaches into the next sequence: its rows must not change a bit of this one's."""
    cu_seqlens = torch.tensor([0, 100, 170, 600], device="cuda", dtype=torch.int32)
    q, k, v = qkv(600, 2, headdim, dtype=dtype)
    results = []
    for factor in (1.0, 60.0):
        q[170:] *= factor
        k[170:] *= factor
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, 430, 430, causal=causal, return_attn_probs=True
        )
        results.append((out[:170], lse[:, :170]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# ---- many launches -------------------------------------------------------------------------------------------------


def test_ten_thousand_launches_on_two_streams_end() -> None:
    inputs = [qkv(2, seqlen, 4, headdim) for seqlen, headdim in ((64, 64), (300, 128), (1000, 64), (129, 256))]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for i in range(10_000):
        with torch.cuda.stream(streams[i % 2]):
            out = flash_attn_func(*inputs[i % len(inputs)], causal=i % 3 == 0, softcap=30.0 if i % 5 == 0 else 0.0)
    torch.cuda.synchronize()
    assert out.isfinite().all()
