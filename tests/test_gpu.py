"""What only a GPU can show: streams, devices, CUDA graphs, memory, 64-bit outputs, races."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func
from flash_attn_mini.backends import BACKENDS

from .bounds import assert_forward_accurate, assert_gradients_accurate
from .cases import FORWARD_CASES, make_dout, make_inputs, options_of
from .conftest import HAS_GPU
from .poison import memory_shortage
from .varlen_cases import VARLEN_CASES, make_batch

pytestmark = pytest.mark.gpu

BY_NAME = {case.name: case for case in FORWARD_CASES}
VARLEN = {case.name: case for case in VARLEN_CASES}
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


@each_gpu_backend
@pytest.mark.parametrize("name", ["more_and_less_causal", "together", "headdim_33", "pages_16"])
def test_cuda_graph_of_varlen_replays_with_other_lengths(
    name: str, gpu_backend: str, seed: int, described_seed: str
) -> None:
    """cu_seqlens is data that the kernels read: a graph serves every batch within its totals."""
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

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for change in range(2):
        batch.q.normal_()
        if change and not case.page_size:  # the same tokens, cut elsewhere
            batch.cu_seqlens_q[1] -= 3
        graph.replay()
        rows = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
        described = f"{name}, replay {change}, {gpu_backend}\n  {described_seed}"
        assert_forward_accurate(*rows, out, lse, case=described, cu_seqlens=batch.cu_seqlens, **options)


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


# ---- the backward -------------------------------------------------------------------------------------------------


def gradients(
    inputs: list[Tensor], dout: Tensor, backend: str, causal: bool = False, deterministic: bool = False
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=backend)
    return torch.autograd.grad(out, leaves, dout)


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
    gradients(qkv, dout, gpu_backend, deterministic=deterministic)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # about 0.5 s
    busy.record()
    gradients(qkv, dout, gpu_backend, deterministic=deterministic)
    assert not busy.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


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

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
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
def test_graphed_callable_trains_as_eager_does(gpu_backend: str) -> None:
    """torch.cuda.make_graphed_callables captures forward and backward of a layer, as training loops use it."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.project = torch.nn.Linear(64, 3 * 64, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 4, 16)).unbind(2)
            return flash_attn_func(q, k, v, causal=True, deterministic=True, backend=gpu_backend).flatten(2)

    x = torch.randn(2, 130, 64, device="cuda", dtype=torch.bfloat16)
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


def extra_bytes_of_backward(backend: str, seqlen: int, causal: bool, deterministic: bool) -> int:
    """Peak memory of a backward beyond what was there before it and the gradients."""
    qkv = inputs(1, seqlen, 4, 128)
    dout = torch.randn_like(qkv[0])
    gradients(qkv, dout, backend, causal, deterministic)  # compiles and tunes where there is something to
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    computed = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in computed)


@each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_memory_of_backward_at_32k_is_linear(deterministic: bool, gpu_backend: str) -> None:
    """A float32 dq and delta beyond the gradients, with or without deterministic; the score matrix would take 8 GiB."""
    seqlen, nheads, headdim = 32768, 4, 128
    float32_dq, per_row = 4 * seqlen * nheads * headdim, 4 * seqlen * nheads
    assert extra_bytes_of_backward(gpu_backend, seqlen, True, deterministic) <= float32_dq + 4 * per_row + (1 << 20)


@each_gpu_backend
def test_gradients_beyond_31_bits(gpu_backend: str, described_seed: str) -> None:
    """q and dq of 2^31 + elements: the last batch and heads are right, and so are dk and dv, which sum over heads."""
    shortage = memory_shortage(42.0, "cuda")
    if shortage:
        pytest.skip(shortage)
    batch, seqlen_q, nheads, headdim = 33, 1024, 512, 128
    q, dout = (torch.empty(batch, seqlen_q, nheads, headdim, device="cuda", dtype=torch.float16) for _ in range(2))
    assert q.numel() > 1 << 31
    for b in range(batch):
        q[b].normal_()
        dout[b].normal_()
    k, v = torch.randn(2, batch, 96, 8, headdim, device="cuda", dtype=torch.float16)
    dq, dk, dv = gradients([q, k, v], dout, gpu_backend)
    for b in (0, batch - 1):
        own, heads = slice(b, b + 1), slice(448, 512)  # the queries of the last key head
        part = [x[own, :, heads] for x in (q, dout, dq)]
        last = [x[own, :, 7:] for x in (k, v, dk, dv)]
        assert_gradients_accurate(
            part[0], last[0], last[1], part[1], (part[2], last[2], last[3]), case=f"batch {b}\n  {described_seed}"
        )


@each_gpu_backend
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_every_tensor_beyond_31_bits(kind: str, gpu_backend: str, described_seed: str) -> None:
    """q, k, v, out, dout, dq, dk and dv of 2^31 + elements each: the last sequence and heads are right."""
    shortage = memory_shortage(70.0, "cuda")
    if shortage:
        pytest.skip(shortage)
    batch, seqlen, nheads, headdim = 258, 512, 128, 128
    shape = (batch, seqlen, nheads, headdim) if kind == "dense" else (batch * seqlen, nheads, headdim)
    q, k, v, dout = (torch.empty(shape, device="cuda", dtype=torch.float16) for _ in range(4))
    assert q.numel() > 1 << 31
    rows = 4096 if kind == "varlen" else 8
    for x in (q, k, v, dout):
        for part in x.split(rows):
            part.normal_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if kind == "dense":
        out, lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True, backend=gpu_backend)
    else:
        cu_seqlens = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
        lengths = (cu_seqlens, cu_seqlens, seqlen, seqlen)
        out, lse, _ = flash_attn_varlen_func(
            *leaves, *lengths, causal=True, return_attn_probs=True, backend=gpu_backend
        )
    computed = torch.autograd.grad(out, leaves, dout)

    def part(x: Tensor, b: int) -> Tensor:
        """The last heads of a sequence, as a batch of one."""
        own = x[b : b + 1] if kind == "dense" else x[b * seqlen : (b + 1) * seqlen][None]
        return own[:, :, nheads - 2 :].detach()

    for b in (0, batch // 2, batch - 1):
        own_lse = lse[b : b + 1, -2:] if kind == "dense" else lse[None, -2:, b * seqlen : (b + 1) * seqlen]
        case = f"{kind}, sequence {b}\n  {described_seed}"
        inputs = [part(x, b) for x in (q, k, v)]
        assert_forward_accurate(*inputs, part(out, b), own_lse.detach(), case=case, causal=True)
        gradients_of_part = [part(x, b) for x in computed]
        assert_gradients_accurate(*inputs, part(dout, b), tuple(gradients_of_part), case=case, causal=True)


RACE_SHAPES = [  # batch, seqlen, nheads, nheads_k, headdim, causal
    (2, 300, 4, 4, 64, True),
    (1, 513, 6, 2, 128, False),
    (3, 129, 2, 1, 256, True),
    (2, 200, 4, 2, 96, True),
    (4, 64, 8, 8, 32, False),
]


@each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_no_race_shows_in_a_thousand_backwards(deterministic: bool, gpu_backend: str) -> None:
    """Mixed shapes beside other work on the GPU: dk and dv have the same bits each time, dq where it promises so."""
    calls, expected = [], []
    for batch, seqlen, nheads, nheads_k, headdim, causal in RACE_SHAPES:
        q, dout = torch.randn(2, batch, seqlen, nheads, headdim, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, batch, seqlen, nheads_k, headdim, device="cuda", dtype=torch.bfloat16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic, backend=gpu_backend)
        calls.append((out, leaves, dout))
        expected.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))
    first = 0 if deterministic or gpu_backend == "triton" else 1  # dq of the fast CUDA backward sums in any order
    noise = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    differs = torch.zeros((), device="cuda", dtype=torch.int64)
    for repeat in range(1000):
        if repeat % 3 == 0:
            with torch.cuda.stream(side):
                noise = torch.tanh(noise @ noise)
        (out, leaves, dout), before = calls[repeat % len(calls)], expected[repeat % len(calls)]
        got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for a, b in zip(got[first:], before[first:], strict=True):
            differs += (a != b).sum()
    torch.cuda.synchronize()
    assert int(differs) == 0


def test_cuda_and_triton_agree_on_gradients(seed: int) -> None:
    case = BY_NAME["long_causal"]
    qkv = list(make_inputs(case, torch.bfloat16, "cuda", seed))
    dout = make_dout(case, torch.bfloat16, "cuda", seed)
    for a, b in zip(*(gradients(qkv, dout, name, causal=True) for name in ("cuda", "triton")), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)
