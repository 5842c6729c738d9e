"""The Triton backward: small cases, every configuration, subsets of the gradients, and writes outside of them.

The first test runs the others in Triton's interpreter where there is no GPU. test_backward.py runs the full list of
cases on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.options import ROWS_MULTIPLE

from ..support.bounds import FLOOR, assert_gradients_accurate
from ..support.cases import Case, make_dlse, make_dout, make_inputs
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.gpu_calls import assert_captures_first_call
from ..support.interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from ..support.poison import Guard, PoisonIntact, poisoned
from ..support.triton_calls import DEVICE, HAS_GPU, backward, forward, gpu, make_options, runs_triton, softmax_scale
from .test_triton import TILE_CASE, cases_and_dtypes, that_differ, tile_case

WITH_DLSE = (
    *("square_65", "more_keys", "masked_rows", "no_keys", "mqa", "scale_negative", "headdim_192_causal"),
    "few_queries",
)
MASKED_CASE = Case("masked", "grouped heads, rows without keys, a diagonal", 2, 4, 2, 90, 77, 64, causal=True)
SUBSETS = [mask for mask in itertools.product((False, True), repeat=3) if not all(mask)]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def launcher() -> Any:
    from flash_attn_mini.backends.triton import launch_bwd

    return launch_bwd


def products_round_equally() -> bool:
    """True if the interpreter's q k^T has the same bits in the tiles of all kernels. With OpenBLAS the CPU decides."""
    q, k = (torch.randn(128, 64).numpy() for _ in range(2))
    scores = q @ k.T
    for rows, keys in itertools.product((32, 64, 128), repeat=2):
        for m, n in itertools.product(range(0, 128, rows), range(0, 128, keys)):
            tile, of_q, of_k = scores[m : m + rows, n : n + keys], q[m : m + rows], k[n : n + keys]
            if (tile != of_q @ of_k.T).any() or (tile != (of_k @ of_q.T).T).any():
                return False
    return True


@dataclasses.dataclass
class Problem:
    """The tensors of a case, and the results of the forward kernel."""

    case: Case
    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor

    @classmethod
    def make(cls, case: Case, dtype: torch.dtype, seed: int, *, with_dlse: bool = False) -> Problem:
        inputs = make_inputs(case, dtype, DEVICE, seed)
        out, lse = forward(*inputs, softmax_scale=softmax_scale(case), causal=case.causal)
        dlse = make_dlse(case, dtype, DEVICE, seed) if with_dlse else None
        return cls(case, inputs, make_dout(case, dtype, DEVICE, seed), dlse, out, lse)

    def backward(self, **options: Any) -> Any:
        scale, causal = softmax_scale(self.case), self.case.causal
        return backward(
            self.dout, *self.inputs, self.out, self.lse, self.dlse, softmax_scale=scale, causal=causal, **options
        )

    def assert_accurate(self, gradients: Any, described: str) -> None:
        judge = assert_gradients_accurate_beside_flash if self.case.headdim == 1 else assert_gradients_accurate
        judge(
            *self.inputs,
            self.dout,
            gradients,
            case=f"{self.case.name} ({self.case.why})\n  {self.case.shape} dtype={self.dout.dtype}\n  {described}",
            dlse=self.dlse,
            causal=self.case.causal,
            softmax_scale=self.case.softmax_scale,
        )

    def delta(self) -> Tensor:
        """softmax_d in float64: 0 for a row that sees no key."""
        products = (self.dout.double() * self.out.double()).sum(-1).transpose(1, 2)
        delta = products if self.dlse is None else products - self.dlse.double()
        return delta.masked_fill(self.lse == -math.inf, 0.0)


def tile_configs() -> list[Any]:
    """(kernel, table, head dim, configuration) of every entry of the tables."""
    pytest.importorskip("triton")
    from flash_attn_mini.backends.triton import configs

    return [
        pytest.param(kernel, name, head_dim, config, id=f"{kernel}-{name}-d{head_dim}-{n}")
        for kernel, tables in (("dq", configs.BACKWARD_DQ), ("dkv", configs.BACKWARD_DKV), ("dv", configs.BACKWARD_DV))
        for name in ("hopper", "plain", "float32")
        for head_dim, listed in getattr(tables, name).items()
        for n, config in enumerate(that_differ(listed))
    ]


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), cases_and_dtypes())
def test_gradients_of_a_small_case_are_as_accurate_as_pytorch(
    case: Case, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    if INTERPRETED and "1e4" in case.values and not products_round_equally():
        pytest.skip("NumPy rounds q k^T and k q^T differently, so P = exp(score - lse) has no correct digit")
    problem = Problem.make(case, dtype, seed, with_dlse=case.name in WITH_DLSE)
    guard = Guard(*problem.inputs, problem.dout)
    *gradients, softmax_d = problem.backward()
    guard.check()
    problem.assert_accurate(tuple(gradients), described_seed)
    for gradient, like in zip(gradients, problem.inputs, strict=True):
        assert gradient.stride() == torch.empty_like(like).stride(), f"strides {gradient.stride()}, {list(like.shape)}"
    assert softmax_d.shape == (case.batch, case.nheads, -(-case.seqlen_q // 128) * 128)
    assert not softmax_d[..., case.seqlen_q :].any()
    assert softmax_d.dtype == torch.float32
    if softmax_d.numel():
        size = (problem.dout.double() * problem.out.double()).abs().sum(-1).max().item()
        error = (softmax_d[..., : case.seqlen_q] - problem.delta()).abs().max().item()
        assert error <= FLOOR[torch.float32] * max(1.0, size), f"softmax_d is off by {error}"


@runs_triton
@pytest.mark.parametrize(
    "causal", [pytest.param(False, id="full", marks=pytest.mark.thorough), pytest.param(True, id="causal")]
)
@pytest.mark.parametrize(("kernel", "table", "head_dim", "config"), tile_configs())
def test_every_configuration_is_right(
    kernel: str, table: str, head_dim: int, config: Any, causal: bool, seed: int, described_seed: str
) -> None:
    launch_bwd = launcher()
    dtype = torch.float32 if table == "float32" else torch.float16
    case = tile_case(config, head_dim, causal)
    problem = Problem.make(case, dtype, seed)
    tuner = {"dq": launch_bwd.DQ_TUNER, "dkv": launch_bwd.DKV_TUNER, "dv": launch_bwd.DV_TUNER}[kernel]
    if HAS_GPU:
        from flash_attn_mini.backends.triton.tuner import shared_memory_limit

        if config.kwargs["USE_TMA"] and not launch_bwd.tma_reaches(*problem.inputs, problem.dout):
            pytest.skip("no TMA on this GPU")
        if tuner.tables.shared_memory(config, head_dim, head_dim, dtype.itemsize) > shared_memory_limit(
            problem.dout.device
        ):
            pytest.skip("this GPU has too little shared memory")
    options = make_options(softmax_scale(case), causal)
    arguments = (problem.dout, *problem.inputs, problem.out, problem.lse, None, options)
    call = launch_bwd.prepare(*arguments)
    for tensor in (call.dq, call.dk, call.dv, call.row_stats):
        tensor.fill_(math.nan)
    if kernel == "dq":
        launch_bwd.launch_dq(call, config)
        gradients = (call.dq, None, None)
    else:
        launch_bwd.launch_dq(call, launch_bwd.DQ_TUNER.tables.plain[head_dim][0] if dtype.itemsize == 2 else config)
        for want_dk, want_dv in launch_bwd.dkv_launches(call):
            if kernel == "dkv" or not want_dk:
                launch_bwd.launch_dkv(call, config, want_dk=want_dk, want_dv=want_dv)
        gradients = (None, call.dk if kernel == "dkv" else None, call.dv)
    assert not call.row_stats.isnan().any()
    problem.assert_accurate(gradients, f"{config}\n  {described_seed}")


@runs_triton
@pytest.mark.parametrize("headdim", [64, 160])
def test_unwanted_gradients_are_not_computed(headdim: int, seed: int) -> None:
    case = dataclasses.replace(MASKED_CASE, batch=1, headdim=headdim)
    problem = Problem.make(case, torch.float16, seed, with_dlse=True)
    *everything, delta = problem.backward()
    for mask in SUBSETS:
        *some, softmax_d = problem.backward(output_mask=mask)
        assert torch.equal(softmax_d, delta), mask
        for gradient, whole, wanted in zip(some, everything, mask, strict=True):
            assert (gradient is not None) == wanted, mask
            assert gradient is None or torch.equal(gradient, whole), mask


@runs_triton
def test_unwanted_gradients_cost_no_kernel(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    problem = Problem.make(TILE_CASE, torch.float16, 0)
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    capfd.readouterr()

    def launched(mask: tuple[bool, bool, bool]) -> list[str]:
        problem.backward(output_mask=mask)
        return [line for line in capfd.readouterr().err.splitlines() if "triton.flash_bwd" in line]

    assert len(launched((True, False, False))) == 1
    delta_only, dkv = launched((False, True, False))
    assert "flash_bwd_dq_kernel" in delta_only
    assert "dq=False" in delta_only
    assert "flash_bwd_dkv_kernel" in dkv
    for field in ("dk=True", "dv=False", "BLOCK_M=", "BLOCK_N=", "num_warps=", "num_stages=", "grid=", "USE_TMA="):
        assert field in dkv


@runs_triton
def test_nothing_is_written_outside_the_gradients(seed: int) -> None:
    launch_bwd = launcher()
    problem = Problem.make(MASKED_CASE, torch.float16, seed, with_dlse=True)
    options = make_options(softmax_scale(MASKED_CASE), MASKED_CASE.causal)
    arguments = (problem.dout, *problem.inputs, problem.out, problem.lse, problem.dlse, options)
    call = launch_bwd.prepare(*arguments)
    written = {name: getattr(call, name) for name in ("dq", "dk", "dv", "row_stats")}
    inside = {name: poisoned(tuple(t.shape), t.dtype, DEVICE) for name, t in written.items()}
    intact = [PoisonIntact(t) for t in inside.values()]
    launch_bwd.run(dataclasses.replace(call, **inside))
    for check in intact:
        check.check()
    assert not any(t.isnan().any() for t in inside.values()), "some elements are not written"


@runs_triton
def test_gradients_are_written_into_the_tensors_of_the_caller(seed: int) -> None:
    problem = Problem.make(dataclasses.replace(MASKED_CASE, seqlen_k=90, nheads_k=4), torch.float16, seed)
    expected = problem.backward()[:3]
    packed = torch.full((2, 90, 3, 4, 64), math.nan, dtype=torch.float16, device=DEVICE)
    given = tuple(packed.unbind(2))
    returned = problem.backward(into=given)[:3]
    for got, to, like in zip(returned, given, expected, strict=True):
        assert got.data_ptr() == to.data_ptr()
        assert torch.equal(to, like)


@runs_triton
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_the_gradient_of_the_lse_of_a_row_without_keys_changes_nothing(value: float, seed: int) -> None:
    problem = Problem.make(MASKED_CASE, torch.float16, seed, with_dlse=True)
    assert problem.dlse is not None
    expected = problem.backward()
    unseen = MASKED_CASE.seqlen_q - MASKED_CASE.seqlen_k
    problem.dlse[:, :, :unseen] = value
    for got, before in zip(problem.backward(), expected, strict=True):
        assert torch.equal(got, before)


@runs_triton
def test_a_gradient_of_stride_zero_is_taken(seed: int) -> None:
    problem = Problem.make(MASKED_CASE, torch.float16, seed)
    problem.dout = torch.ones((), dtype=torch.float16, device=DEVICE).expand(problem.out.shape)  # out.sum().backward()
    problem.dlse = torch.ones((), device=DEVICE).expand(problem.lse.shape)
    problem.assert_accurate(problem.backward()[:3], "expanded ones")


@runs_triton
def test_every_block_divides_the_padding_of_row_stats() -> None:
    launch_bwd = launcher()
    for tuner in (launch_bwd.DQ_TUNER, launch_bwd.DKV_TUNER, launch_bwd.DV_TUNER):
        untimed = (tuner.tables.untimed_hopper, tuner.tables.untimed_plain)
        listed = (config for table in untimed for configs in table.values() for config in configs)
        for config in (*tuner.tables.every_config(), *listed):
            assert ROWS_MULTIPLE % config.kwargs["BLOCK_M"] == 0


@gpu
def test_another_length_neither_tunes_nor_compiles_again() -> None:
    launch_bwd = launcher()

    def run(seqlen: int) -> None:
        q = torch.randn(4, seqlen, 8, 64, dtype=torch.float16, device="cuda")
        out, lse = forward(q, q, q, softmax_scale=0.125, causal=True)
        backward(q, q, q, q, out, lse, None, softmax_scale=0.125, causal=True)

    def count() -> tuple[int, ...]:
        kernels = (launch_bwd.flash_bwd_dq_kernel, launch_bwd.flash_bwd_dkv_kernel)
        compiled = (sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels)
        return (*compiled, len(launch_bwd.DQ_TUNER.chosen), len(launch_bwd.DKV_TUNER.chosen))

    run(2048)
    before = count()
    for seqlen in (1500, 1999, 1920, 1025):
        run(seqlen)
    assert count() == before


@gpu
def test_capture_in_a_cuda_graph_does_not_tune() -> None:
    q = torch.randn(1, 64, 2, 64, dtype=torch.float16, device="cuda")
    out, lse = forward(q, q, q, softmax_scale=0.125, causal=True)

    def gradients() -> list[Tensor]:
        return list(backward(q, q, q, q, out, lse, None, softmax_scale=0.125, causal=True))

    assert_captures_first_call(gradients)
