"""The Triton forward: small cases, every configuration, the choice of one, and the tensors that TMA can address.

The first test runs the others in Triton's interpreter where there is no GPU. test_forward.py runs the full list of
cases on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from flash_attn_mini.backends import triton as backend
from flash_attn_mini.options import KvCache

from ..support.bounds import assert_forward_accurate
from ..support.cases import SMALL_FORWARD_CASES, Case, make_inputs
from ..support.gpu_calls import assert_captures_first_call
from ..support.interpreter import INTERPRETED, needs_triton, run_in_the_interpreter, starts_the_interpreter
from ..support.triton_calls import DEVICE, HAS_GPU, forward, gpu, make_options, runs_triton, softmax_scale
from ..support.triton_compiler import SHARED_MEMORY, compiled_kernels

# The interpreter computes bfloat16 in float32, and float32 as it does float16: a few cases each are enough there.
OTHER_DTYPES_FOR = ("square_65_causal", "masked_rows", "headdim_100", "layout_expanded", "scale_zero", "gqa_3_causal")

TILE_CASE = Case("tile", "a full tile and a ragged one in both directions", 1, 2, 1, 140, 150, 64)


def tile_case(config: Any, head_dim: int, causal: bool) -> Case:
    """TILE_CASE with at most two full tiles: the interpreter takes long for each tile."""
    rows = min(TILE_CASE.seqlen_q, 2 * max(config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]) + 12)
    return dataclasses.replace(TILE_CASE, seqlen_q=rows, seqlen_k=rows + 10, headdim=head_dim, causal=causal)


def that_differ(configs: list[Any]) -> list[Any]:
    """The configurations that differ. The interpreter knows no warps, registers and pipeline stages."""
    return configs if HAS_GPU else list({tuple(config.kwargs.items()): config for config in configs}.values())


def cases_and_dtypes() -> list[Any]:
    """Head dims without a mask are thorough: each has a causal case, which has masked tiles and others."""
    names = {case.name for case in SMALL_FORWARD_CASES}
    return [
        pytest.param(
            case,
            dtype,
            id=f"{case}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.thorough] * (case.name.startswith("headdim") and f"{case.name}_causal" in names),
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for case in SMALL_FORWARD_CASES
        if HAS_GPU or dtype == torch.float16 or case.name in OTHER_DTYPES_FOR
    ]


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def launcher() -> Any:
    from flash_attn_mini.backends.triton import launch

    return launch


def tile_configs() -> list[Any]:
    """(float32 or 16 bits, head dim, configuration) of every entry of the tables."""
    pytest.importorskip("triton")
    from flash_attn_mini.backends.triton import configs

    return [
        pytest.param(name == "float32", head_dim, config, id=f"{name}-d{head_dim}-{n}")
        for name in ("hopper", "plain", "float32")
        for head_dim, listed in getattr(configs.FORWARD, name).items()
        for n, config in enumerate(that_differ(listed))
    ]


@runs_triton
@pytest.mark.parametrize(("case", "dtype"), cases_and_dtypes())
def test_small_case_is_as_accurate_as_pytorch(case: Case, dtype: torch.dtype, seed: int, described_seed: str) -> None:
    q, k, v = make_inputs(case, dtype, DEVICE, seed)
    out, lse = forward(q, k, v, softmax_scale=softmax_scale(case), causal=case.causal)
    described = f"{case.name} ({case.why})\n  {case.shape} dtype={dtype}\n  {described_seed}"
    assert_forward_accurate(q, k, v, out, lse, case=described, causal=case.causal, softmax_scale=case.softmax_scale)


@runs_triton
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("is_float32", "head_dim", "config"), tile_configs())
def test_every_configuration_is_right(
    is_float32: bool, head_dim: int, config: Any, causal: bool, seed: int, described_seed: str
) -> None:
    launch = launcher()
    dtype = torch.float32 if is_float32 else torch.float16
    case = tile_case(config, head_dim, causal)
    q, k, v = make_inputs(case, dtype, DEVICE, seed)
    if HAS_GPU:
        if config.kwargs["USE_TMA"] and not (launch.tma_reaches(q, k, v)):
            pytest.skip("no TMA on this GPU")
        from flash_attn_mini.backends.triton.configs import FORWARD
        from flash_attn_mini.backends.triton.tuner import shared_memory_limit

        if FORWARD.shared_memory(config, head_dim, head_dim, q.element_size()) > shared_memory_limit(q.device):
            pytest.skip("this GPU has too little shared memory")
    call = launch.prepare(q, k, v, make_options(softmax_scale(case), causal))
    call.out.fill_(math.nan)
    call.lse.fill_(math.nan)
    launch.launch(call, config)
    assert_forward_accurate(
        q, k, v, call.out, call.lse, case=f"{config}, {case.shape}\n  {described_seed}", causal=causal
    )


@runs_triton
def test_trace_names_the_kernel_and_its_tiles(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    q, k, v = make_inputs(TILE_CASE, torch.float16, DEVICE, 0)
    forward(q, k, v, softmax_scale=0.125, causal=True)
    assert "flash_fwd_kernel" not in capfd.readouterr().err
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    forward(q, k, v, softmax_scale=0.125, causal=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "flash_fwd_kernel" in line]
    assert len(lines) == 1
    for field in ("BLOCK_M=", "BLOCK_N=", "num_warps=", "num_stages=", "grid=", "USE_TMA="):
        assert field in lines[0]


@runs_triton
@pytest.mark.parametrize(
    ("shape", "strides", "offset", "reached"),
    [
        pytest.param((2, 8, 4, 64), (2048, 256, 64, 1), 0, True, id="contiguous"),
        pytest.param((2, 8, 4, 64), (2048, 64, 512, 1), 0, True, id="heads_first"),
        pytest.param((1, 8, 4, 64), (3, 256, 64, 1), 0, True, id="odd stride of a batch of one"),
        pytest.param((2, 8, 4, 64), (2048, 256, 64, 1), 1, False, id="misaligned base"),
        pytest.param((2, 8, 4, 64), (2048, 260, 65, 1), 0, False, id="misaligned rows"),
        pytest.param((2, 8, 4, 64), (0, 256, 64, 1), 0, False, id="expanded batch"),
    ],
)
def test_tma_reaches_aligned_tensors_alone(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_mini.backends.triton import operands

    monkeypatch.setattr(operands, "has_tma", lambda device: True)
    tensor = torch.zeros(8192, dtype=torch.float16, device=DEVICE).as_strided(shape, strides, offset)
    assert operands.tma_reaches(tensor) is reached


@runs_triton
def test_lengths_share_a_key_up_to_a_power_of_two() -> None:
    from flash_attn_mini.backends.triton.tuner import length_bucket

    assert [length_bucket(n) for n in (1, 128, 129, 1000, 1024)] == [128, 128, 256, 1024, 1024]
    assert length_bucket(5000) == 8192
    assert length_bucket(16000) == length_bucket(1 << 20) == 16384


@runs_triton
def test_configurations_that_need_too_much_shared_memory_are_left_out() -> None:
    from flash_attn_mini.backends.triton import configs

    for tables in (configs.FORWARD, configs.BACKWARD_DQ, configs.BACKWARD_DKV):
        everything = tables.candidates(128, 128, 2, True, 1 << 30)
        assert everything == tables.hopper[128]
        fitting = tables.candidates(128, 128, 2, True, 120 * 1024)
        assert fitting
        assert all(tables.shared_memory(config, 128, 128, 2) <= 120 * 1024 for config in fitting)
        assert len(tables.candidates(128, 128, 2, True, 1024)) == 1, "at least one candidate must remain"
        assert not any(config.kwargs["USE_TMA"] for config in tables.candidates(128, 128, 2, False, 1 << 30))


@runs_triton
@pytest.mark.parametrize("timed", [True, False], ids=["timed", "untimed"])
@pytest.mark.parametrize("limit", [227, 163, 99], ids=str)  # KiB of Hopper, of Ampere, and of consumer GPUs
def test_every_head_dim_has_a_configuration_that_fits(limit: int, timed: bool) -> None:
    from flash_attn_mini.backends.triton import configs

    dims = [(d, d) for d in (16, 64, 128, 256, 512)] + [(256, 128), (64, 128), (16, 512), (512, 16), (512, 256)]
    for block_d, block_dv in dims:
        both = max(block_d, block_dv)
        of_dkv = [configs.BACKWARD_DKV, *([configs.BACKWARD_DV] if both in configs.BACKWARD_DV.plain else [])]
        for tables in (configs.FORWARD, configs.BACKWARD_DQ, *of_dkv):
            for reached in (True, False):  # consumer Blackwell has TMA and 99 KiB
                fitting = tables.candidates(block_d, block_dv, 2, reached, limit * 1024, timed=timed)
                assert fitting
                for config in fitting:
                    assert tables.shared_memory(config, block_d, block_dv, 2) <= limit * 1024, (block_d, block_dv)


@gpu
def test_another_length_neither_tunes_nor_compiles_again() -> None:
    launch, compiled = launcher(), []

    def run(seqlen: int) -> None:
        q = torch.randn(4, seqlen, 8, 64, dtype=torch.float16, device="cuda")
        forward(q, q, q, softmax_scale=0.125, causal=True)

    run(2048)
    tuned = len(launch.TUNER.chosen)
    caches = launch.flash_fwd_kernel.device_caches
    compiled.append(sum(len(cache[0]) for cache in caches.values()))
    for seqlen in (1500, 1999, 1920, 1025):
        run(seqlen)
    compiled.append(sum(len(cache[0]) for cache in caches.values()))
    assert len(launch.TUNER.chosen) == tuned
    assert compiled[0] == compiled[1]


@gpu
def test_capture_in_a_cuda_graph_does_not_tune() -> None:
    q = torch.randn(1, 64, 2, 64, dtype=torch.float16, device="cuda")
    assert_captures_first_call(lambda: list(forward(q, q, q, softmax_scale=0.125, causal=True)))


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@needs_triton
def test_without_gpu_and_interpreter_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = backend.unavailable_reason(torch.device("cpu"))
    assert reason is not None
    assert "TRITON_INTERPRET=1" in reason


@needs_triton
def test_interpreter_is_available_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unavailable_reason(torch.device("cpu")) is None


# ---- without a GPU and the interpreter: the compiler ----------------------------------------------------------------


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize(("headdim", "headdim_v", "capability"), [(192, 128, 90), (512, 512, 90), (512, 512, 80)])
def test_kernels_compile_without_a_gpu_and_fit(
    headdim: int, headdim_v: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and KV cache, with the configurations that a GPU takes without timing."""
    from flash_attn_mini.backends.triton import kvcache, launch, launch_bwd

    q = torch.zeros(2, 256, 4, headdim, dtype=torch.bfloat16)
    k, v = torch.zeros_like(q[:, :, :2]), torch.zeros(2, 256, 2, headdim_v, dtype=torch.bfloat16)
    options = make_options(headdim**-0.5, causal=True)
    cache = KvCache(q[:, :1, :2], v[:, :1], *[None] * 3, 128, None, None, None, False, 0, 0)
    with compiled_kernels(capability, monkeypatch) as compiled:
        out, lse, _ = launch.forward(q, k, v, None, options)
        launch_bwd.backward(out, q, k, v, out, lse, None, None, options)
        assert out.shape == (2, 256, 4, headdim_v)
        kvcache.forward_kvcache(q[:, :1], k, v, cache, options)
    names = {name for name, _ in compiled}
    assert {"flash_fwd_kernel", "flash_bwd_dq_kernel", "flash_bwd_dkv_kernel", "flash_fwd_splitkv_kernel"} <= names
    assert "kvcache_append_kernel" in names
    for name, kernel in compiled:
        assert f".target sm_{capability}" in kernel.asm["ptx"], name
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], name
