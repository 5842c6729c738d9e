"""Behaviour that only a GPU has: streams, devices, CUDA graphs. test_deterministic.py tests repeatability."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from ..conftest import HAS_GPU
from ..support.bounds import assert_forward_accurate, assert_gradients_accurate
from ..support.cases import FORWARD_CASES, make_dout, make_inputs, options_of
from ..support.gpu_calls import capture, each_gpu_backend, gradients, inputs
from ..support.varlen_cases import VARLEN_CASES, make_batch

pytestmark = pytest.mark.gpu

BY_NAME = {case.name: case for case in FORWARD_CASES}
VARLEN = {case.name: case for case in VARLEN_CASES}


def test_the_default_on_a_gpu_is_cuda(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_TRACE", "1")
    flash_attn_func(*inputs(1, 16, 1, 64))
    assert "backend=cuda" in capfd.readouterr().err


@each_gpu_backend
def test_runs_on_the_current_stream(gpu_backend: str) -> None:
    """The inputs arrive late on a side stream; a kernel on another stream would read the old values."""
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


def assert_does_not_wait(call: Callable[[], object]) -> None:
    """The call returns before the kernel that was launched before it ends."""
    call()  # compiles and tunes
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # about 0.5 s
    busy.record()
    call()
    assert not busy.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


@each_gpu_backend
def test_does_not_synchronize(gpu_backend: str) -> None:
    q, k, v = inputs(2, 512, 4, 64)
    assert_does_not_wait(lambda: flash_attn_func(q, k, v, backend=gpu_backend))


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

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_func(q, k, v, causal=case.causal, return_attn_probs=True, backend=gpu_backend)[:2]

    graph, (out, lse) = capture(call)
    for change in range(3):
        for to, x in zip((q, k, v), make_inputs(case, torch.bfloat16, "cuda", seed + change + 1), strict=True):
            to.copy_(x)
        graph.replay()
        expected_out, expected_lse = call()
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)


@each_gpu_backend
@pytest.mark.parametrize("name", ["more_and_less_causal", "together", "headdim_33", "pages_16"])
def test_cuda_graph_of_varlen_replays_with_other_lengths(
    name: str, gpu_backend: str, seed: int, described_seed: str
) -> None:
    """cu_seqlens is data that the kernels read: one graph works for every batch with the same totals."""
    case = dataclasses.replace(VARLEN[name], dropout_p=0.0)
    batch = make_batch(case, torch.bfloat16, "cuda", seed)
    options = options_of(case, "cuda")

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            *(batch.q, batch.k, batch.v),
            *batch.lengths,
            **options,
            return_attn_probs=True,
            block_table=batch.block_table,
            backend=gpu_backend,
        )[:2]

    graph, (out, lse) = capture(call)
    for change in range(2):
        batch.q.normal_()
        if change and not case.page_size:  # the same tokens, other lengths
            batch.cu_seqlens_q[1] -= 3
        graph.replay()
        rows = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
        described = f"{name}, replay {change}, {gpu_backend}\n  {described_seed}"
        assert_forward_accurate(*rows, out, lse, case=described, cu_seqlens=batch.cu_seqlens, **options)


def test_cuda_and_triton_agree_with_each_other(seed: int) -> None:
    q, k, v = make_inputs(BY_NAME["long_causal"], torch.bfloat16, "cuda", seed)
    a, b = (flash_attn_func(q, k, v, causal=True, backend=name).float() for name in ("cuda", "triton"))
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# ---- the backward -------------------------------------------------------------------------------------------------


@each_gpu_backend
def test_backward_runs_on_the_stream_of_its_forward(gpu_backend: str) -> None:
    """Autograd runs a backward on the stream of the forward; the gradient arrives late on it."""
    source = inputs(2, 512, 4, 64)
    dout = torch.randn_like(source[0])
    expected = gradients(source, dout, gpu_backend, deterministic=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(dout)
        leaves = [x.detach().requires_grad_() for x in source]
        out = flash_attn_func(*leaves, deterministic=True, backend=gpu_backend)
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        late.copy_(dout)
        got = torch.autograd.grad(out, leaves, late)
        late.zero_()
    side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_backward_does_not_synchronize(deterministic: bool, gpu_backend: str) -> None:
    qkv = inputs(2, 512, 4, 64)
    dout = torch.randn_like(qkv[0])
    assert_does_not_wait(lambda: gradients(qkv, dout, gpu_backend, deterministic=deterministic))


@each_gpu_backend
@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_backward_runs_on_the_device_of_q(gpu_backend: str) -> None:
    source = inputs(2, 130, 4, 64)
    dout = torch.randn_like(source[0])
    expected = gradients(source, dout, gpu_backend, deterministic=True)
    with torch.cuda.device(0):
        got = gradients([x.to("cuda:1") for x in source], dout.to("cuda:1"), gpu_backend, deterministic=True)
    for a, b in zip(got, expected, strict=True):
        assert a.device == torch.device("cuda:1")
        assert torch.equal(a.to(b.device), b)


@each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    "name", ["gqa_3_causal", "masked_rows", "decode", "layout_misaligned", "headdim_100", "no_keys"]
)
def test_cuda_graph_of_forward_and_backward_replays_with_new_inputs(
    name: str, deterministic: bool, gpu_backend: str, seed: int, described_seed: str
) -> None:
    case, dtype = BY_NAME[name], torch.bfloat16
    qkv = [x.detach().requires_grad_() for x in make_inputs(case, dtype, "cuda", seed)]
    dout = make_dout(case, dtype, "cuda", seed)

    def call() -> tuple[Tensor, ...]:
        out = flash_attn_func(*qkv, causal=case.causal, deterministic=deterministic, backend=gpu_backend)
        return torch.autograd.grad(out, qkv, dout)

    graph, captured = capture(call)
    for change in range(1, 4):
        with torch.no_grad():
            for to, x in zip(qkv, make_inputs(case, dtype, "cuda", seed + change), strict=True):
                to.copy_(x)
            dout.copy_(make_dout(case, dtype, "cuda", seed + change))
        graph.replay()
        described = f"{name}, replay {change}, {gpu_backend}\n  {described_seed}"
        tensors = [x.detach() for x in qkv]
        assert_gradients_accurate(*tensors, dout, captured, case=described, causal=case.causal)
        if deterministic:
            for a, b in zip(captured, call(), strict=True):
                assert torch.equal(a, b)


@each_gpu_backend
@pytest.mark.parametrize("headdim", [16, 64])  # Hopper's own kernels begin at 64
def test_graphed_callable_trains_as_eager_does(headdim: int, gpu_backend: str) -> None:
    """torch.cuda.make_graphed_callables captures forward and backward of a layer."""
    width = 4 * headdim

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.project = torch.nn.Linear(width, 3 * width, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 4, headdim)).unbind(2)
            return flash_attn_func(q, k, v, causal=True, deterministic=True, backend=gpu_backend).flatten(2)

    x = torch.randn(2, 130, width, device="cuda", dtype=torch.bfloat16)
    eager = Layer()
    graphed = torch.cuda.make_graphed_callables(Layer(), (x.clone(),))
    for _ in range(3):
        x = torch.randn_like(x)
        losses = []
        for layer in (eager, graphed):
            layer.project.zero_grad()
            loss = layer(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        assert torch.equal(eager.project.weight.grad, graphed.project.weight.grad)


def test_cuda_and_triton_agree_on_gradients(seed: int) -> None:
    case = BY_NAME["long_causal"]
    qkv = list(make_inputs(case, torch.bfloat16, "cuda", seed))
    dout = make_dout(case, torch.bfloat16, "cuda", seed)
    for a, b in zip(*(gradients(qkv, dout, name, causal=True) for name in ("cuda", "triton")), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)
