"""Calls of the backward kernels of csrc/sm90, for the tests of test_sm90_backward*.py.

Fixtures to import: `default_kernels` is for every test of the importing file, `trace` for those that name it,
`asked_passes` for those with `each_kernel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func
from flash_attn_mini.backends import available_backends

from ..conftest import GPU_DTYPES, IS_HOPPER
from ..kernels.test_random import AnyCase
from .cases import Case, make_dout, make_inputs, options_of
from .varlen_cases import VarlenCase, make_batch

AnyCaseT = TypeVar("AnyCaseT", Case, VarlenCase)

HEADDIMS = (64, 96, 128, 192, 256)
RUNS_IN = {40: 64, 72: 96, 80: 96, 112: 128, 160: 192, 224: 256}  # head dims between the compiled ones
EVERYTHING = (True, True, True)
PASSES = "FLASH_ATTN_MINI_BACKWARD_PASSES"

on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU on this machine")]
each_headdim = pytest.mark.parametrize("headdim", HEADDIMS)
each_dtype = pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_order = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
# Options of a call, at least one for each kind of kernel (csrc/dispatch/kind.h).
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 25)},
    "softcap": {"softcap": 5.0},
    "alibi_and_dropout": {"alibi": "batch", "dropout_p": 0.2},
}
each_call = pytest.mark.parametrize("call", OPTIONS)

TRACED = re.compile(r"run_mha_bwd +device=cuda arch=(\w+) kHeadDim=(\d+) kKind=(\w+)(?: because: (.*))?")
KEY_BLOCKS = re.compile(r"flash_bwd_kernel .*key_blocks_of_cta=(\d+)")
HEADS = re.compile(r"set_params_dgrad .*heads_per_dkv=(\d+)")


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" not in available_backends("cuda"):
        pytest.skip("the build has no CUDA kernels for this GPU")
    monkeypatch.setenv("FLASH_ATTN_MINI_ARCH", "90")  # without the kernels of a single tile
    monkeypatch.delenv(PASSES, raising=False)


@pytest.fixture
def asked_passes(request: pytest.FixtureRequest, default_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `each_kernel`."""
    if request.param:
        monkeypatch.setenv(PASSES, request.param)


def each_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Each headdim with the passes that a call takes by default; and one pass where short calls take two."""
    kernels = [*((headdim, "") for headdim in HEADDIMS), (192, "1"), (256, "1")]
    names = [f"{headdim}{'-one_pass' * bool(passes)}" for headdim, passes in kernels]
    parametrized = pytest.mark.parametrize(("headdim", "asked_passes"), kernels, ids=names, indirect=["asked_passes"])
    return pytest.mark.usefixtures("asked_passes")(parametrized(test))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")


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


def may_have_two_passes(call: str, headdim: int) -> bool:
    """True if a call of OPTIONS, or a varlen call without features, has a kernel for dq in a pass of its own."""
    return headdim > 128 and call in ("full", "causal", "window", "varlen")


def kernel_of(capfd: pytest.CaptureFixture[str]) -> tuple[str, int, str, str]:
    """arch, kHeadDim, kKind and the reason against sm90, from the trace of one backward."""
    ((arch, headdim, kind, reason),) = TRACED.findall(capfd.readouterr().err)
    return arch, int(headdim), kind, reason
