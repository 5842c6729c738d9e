"""The backward of sm80 with the tiles for GPUs with less shared memory per CTA, run on any GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func

from ..conftest import GPU_DTYPES
from ..support.bounds import assert_gradients_accurate
from ..support.cases import FORWARD_CASES, Case, make_dout, make_inputs
from ..support.gpu_calls import run_on_sm80

pytestmark = pytest.mark.gpu

MAX_SMEM = "FLASH_ATTN_MINI_MAX_SMEM"
LEAST_SMEM = 101376  # bytes per CTA on compute capability 8.6, 8.9 and 12.0; no supported GPU has less
TOO_LITTLE = 1  # byte: selects the smallest tile everywhere
EVERYTHING = (True, True, True)
SUBSETS = [wanted for wanted in itertools.product((False, True), repeat=3) if 0 < sum(wanted) < 3]

BY_NAME = {case.name: case for case in FORWARD_CASES}
COMPILED = [BY_NAME[f"headdim_{d}{mask}"] for d in (32, 64, 96, 128, 192, 256) for mask in ("", "_causal")]
CASES = [
    *COMPILED,
    *(BY_NAME[name] for name in ("long_causal", "masked_rows", "gqa_3_causal", "decode", "headdim_100")),
]
LAUNCHED = re.compile(r"flash_bwd_kernel +kBlockM=(\d+) kBlockN=(\d+) .*smem=(\d+)")

each_dtype = pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_order = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
each_subset = pytest.mark.parametrize(
    "wanted", SUBSETS, ids=lambda wanted: "".join(n for n, w in zip("qkv", wanted, strict=True) if w)
)


@pytest.fixture(autouse=True)
def sm80(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_sm80(monkeypatch)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_SMEM, str(TOO_LITTLE))


def gradients(
    case: Case,
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    deterministic: bool,
    wanted: tuple[bool, ...] = EVERYTHING,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv, None for one that is not wanted."""
    leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    out = flash_attn_func(*leaves, causal=case.causal, deterministic=deterministic, backend="cuda")
    out.backward(dout)
    dq, dk, dv = (x.grad for x in leaves)
    return dq, dk, dv


def launched(case: Case, capfd: pytest.CaptureFixture[str], deterministic: bool) -> tuple[int, int, int]:
    """kBlockM, kBlockN and the bytes of shared memory of the kernel that a backward launches."""
    capfd.readouterr()
    gradients(
        case, make_inputs(case, torch.float16, "cuda", 0), make_dout(case, torch.float16, "cuda", 0), deterministic
    )
    ((rows, keys, smem),) = LAUNCHED.findall(capfd.readouterr().err)
    return int(rows), int(keys), int(smem)


@each_order
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_every_gpu_gets_a_tile_that_fits(
    case: Case, deterministic: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    usual = launched(case, capfd, deterministic)
    monkeypatch.setenv(MAX_SMEM, str(LEAST_SMEM))
    assert launched(case, capfd, deterministic)[2] <= LEAST_SMEM
    monkeypatch.setenv(MAX_SMEM, str(TOO_LITTLE))
    small = launched(case, capfd, deterministic)
    assert small[2] <= LEAST_SMEM
    assert small[2] < usual[2] if usual[2] > LEAST_SMEM else small == usual  # the usual tile fits every GPU


@each_order
@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_small_tiles_are_as_accurate_as_pytorch(
    case: Case, dtype: torch.dtype, deterministic: bool, small_tiles: None, seed: int, described_seed: str
) -> None:
    inputs, dout = make_inputs(case, dtype, "cuda", seed), make_dout(case, dtype, "cuda", seed)
    described = f"{case.name}, {dtype}, deterministic={deterministic}\n  {case.shape}\n  {described_seed}"
    computed = gradients(case, inputs, dout, deterministic)
    assert_gradients_accurate(*inputs, dout, computed, case=described, causal=case.causal)


@each_subset
@each_dtype
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_subsets_of_gradients_of_small_tiles_are_as_accurate(
    case: Case, dtype: torch.dtype, wanted: tuple[bool, ...], small_tiles: None, seed: int, described_seed: str
) -> None:
    """A subset of the gradients is as accurate; with deterministic=True it has the bits of all three together."""
    inputs, dout = make_inputs(case, dtype, "cuda", seed), make_dout(case, dtype, "cuda", seed)
    described = f"{case.name}, {dtype}, output_mask={wanted}\n  {case.shape}\n  {described_seed}"
    computed = gradients(case, inputs, dout, False, wanted)
    assert [x is not None for x in computed] == list(wanted)
    assert_gradients_accurate(*inputs, dout, computed, case=described, causal=case.causal)
    complete = gradients(case, inputs, dout, True)
    for got, expected in zip(gradients(case, inputs, dout, True, wanted), complete, strict=True):
        assert got is None or (expected is not None and torch.equal(got, expected))


@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("headdim", [32, 64, 96, 128, 192, 256])
def test_deterministic_small_tiles_repeat_bitwise(
    headdim: int, causal: bool, dtype: torch.dtype, small_tiles: None, seed: int
) -> None:
    """More CTAs than run at a time, so that CTAs wait for the semaphore."""
    case = Case("repeated", "many key blocks", 4, 16, 4, 700, 900, headdim, causal)
    inputs, dout = make_inputs(case, dtype, "cuda", seed), make_dout(case, dtype, "cuda", seed)
    expected = gradients(case, inputs, dout, True)
    for _ in range(5):
        for a, b in zip(gradients(case, inputs, dout, True), expected, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
