"""Memory on a GPU: nothing that grows with seqlen squared, and offsets of more than 31 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from .bounds import assert_forward_accurate, assert_gradients_accurate
from .gpu_calls import each_gpu_backend, gradients, inputs
from .poison import memory_shortage

pytestmark = pytest.mark.gpu


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
