"""What only a GPU can show: streams, devices, CUDA graphs, memory, 64-bit outputs, races."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func
from flash_attn_mini.backends import BACKENDS

from .bounds import assert_forward_accurate
from .cases import FORWARD_CASES, make_inputs
from .conftest import HAS_GPU
from .poison import memory_shortage

pytestmark = pytest.mark.gpu

BY_NAME = {case.name: case for case in FORWARD_CASES}
GPU_BACKENDS = [name for name in BACKENDS if name != "cpu"]
each_gpu_backend = pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)


def inputs(batch: int, seqlen: int, nheads: int, headdim: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(batch, seqlen, nheads, headdim, device="cuda", dtype=dtype) for _ in range(3)]


def test_the_default_on_a_gpu_is_cuda(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*inputs(1, 16, 1, 64))
    assert "backend=cuda" in capfd.readouterr().err


@each_gpu_backend
def test_runs_on_the_current_stream(gpu_backend: str) -> None:
    """The inputs arrive late on a side stream; a kernel on any other stream would read what was there before."""
    source = inputs(2, 512, 4, 64)
    q, k, v = (torch.zeros_like(x) for x in source)
    expected = flash_attn_func(*source, backend=gpu_backend)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for to, x in zip((q, k, v), source, strict=True):
            to.copy_(x)
        out = flash_attn_func(q, k, v, backend=gpu_backend)
        for x in (q, k, v):
            x.zero_()
    side.synchronize()
    assert torch.equal(out, expected)


@each_gpu_backend
def test_does_not_synchronize(gpu_backend: str) -> None:
    """A call returns while the GPU is still busy with the work before it."""
    q, k, v = inputs(2, 512, 4, 64)
    flash_attn_func(q, k, v, backend=gpu_backend)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # about 0.5 s
    busy.record()
    flash_attn_func(q, k, v, backend=gpu_backend)
    assert not busy.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


@each_gpu_backend
@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_q(gpu_backend: str) -> None:
    source = inputs(2, 130, 4, 64)
    expected = flash_attn_func(*source, backend=gpu_backend)
    with torch.cuda.device(0):
        out = flash_attn_func(*(x.to("cuda:1") for x in source), backend=gpu_backend)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to(expected.device), expected)


@each_gpu_backend
@pytest.mark.parametrize(
    "name", ["gqa_3_causal", "masked_rows", "decode", "layout_misaligned", "headdim_100", "no_keys"]
)
def test_cuda_graph_replays_with_new_inputs(name: str, gpu_backend: str, seed: int) -> None:
    case = BY_NAME[name]
    q, k, v = make_inputs(case, torch.bfloat16, "cuda", seed)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(*tensors, causal=case.causal, return_attn_probs=True, backend=gpu_backend)[:2]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, k, v)
    for change in range(3):
        for to, x in zip((q, k, v), make_inputs(case, torch.bfloat16, "cuda", seed + change + 1), strict=True):
            to.copy_(x)
        graph.replay()
        expected_out, expected_lse = call(q, k, v)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)


def extra_bytes(backend: str, seqlen: int, causal: bool) -> int:
    """Peak memory of a call beyond its inputs, out and softmax_lse."""
    q, k, v = inputs(1, seqlen, 4, 128)
    flash_attn_func(q, k, v, causal=causal, backend=backend)  # compiles and tunes where there is something to
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, backend=backend)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes


@each_gpu_backend
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_memory_at_32k_is_out_and_lse(causal: bool, gpu_backend: str) -> None:
    """The score matrix would take 8 GiB; what is allowed is the allocator's rounding and a small workspace."""
    assert extra_bytes(gpu_backend, 32768, causal) <= 1 << 20


@each_gpu_backend
def test_outputs_beyond_31_bits(gpu_backend: str, described_seed: str) -> None:
    """q and out of 2^31 + elements: the last batch and head are right, which needs 64-bit offsets on both sides."""
    shortage = memory_shortage(14.0, "cuda")
    if shortage:
        pytest.skip(shortage)
    batch, seqlen_q, nheads, headdim = 33, 1024, 512, 128
    q = torch.empty(batch, seqlen_q, nheads, headdim, device="cuda", dtype=torch.float16)
    assert q.numel() > 1 << 31
    for b in range(batch):
        q[b].normal_()
    k, v = torch.randn(2, batch, 96, 8, headdim, device="cuda", dtype=torch.float16)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, backend=gpu_backend)
    for b, at in ((0, slice(0, 8)), (batch - 1, slice(seqlen_q - 8, seqlen_q))):
        rows = (q[b : b + 1, at], k[b : b + 1], v[b : b + 1], out[b : b + 1, at], lse[b : b + 1, :, at])
        assert_forward_accurate(*rows, case=f"batch {b}, rows {at}\n  {described_seed}")


@each_gpu_backend
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_race_shows_in_many_repeats(causal: bool, headdim: int, gpu_backend: str) -> None:
    """Every repeat gives the same bits, with another kernel on the GPU at the same time."""
    q, k, v = inputs(4, 1000, 8, headdim, torch.bfloat16)
    expected_out, expected_lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, backend=gpu_backend)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    differs = torch.zeros((), device="cuda", dtype=torch.int64)
    for repeat in range(100):
        if repeat % 2:
            with torch.cuda.stream(side):
                noise = torch.tanh(noise @ noise)
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, backend=gpu_backend)
        differs += (out != expected_out).sum() + (lse != expected_lse).sum()
    torch.cuda.synchronize()
    assert int(differs) == 0


def test_cuda_and_triton_agree_with_each_other(seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["long_causal"], torch.bfloat16, "cuda", seed)
    a, b = (flash_attn_func(q, k, v, causal=True, backend=name).float() for name in ("cuda", "triton"))
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
