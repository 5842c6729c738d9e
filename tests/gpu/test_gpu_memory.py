"""Memory on a GPU: no use that grows with seqlen squared, offsets of more than 31 bits, wrong lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

from ..conftest import IS_HOPPER
from ..support.bounds import assert_forward_accurate, assert_gradients_accurate
from ..support.gpu_calls import each_gpu_backend, gradients, inputs
from ..support.poison import memory_shortage, poisoned

pytestmark = pytest.mark.gpu


def extra_bytes(backend: str, seqlen: int, causal: bool) -> int:
    """Peak memory of a call beyond its inputs, out and softmax_lse."""
    q, k, v = inputs(1, seqlen, 4, 128)
    flash_attn_func(q, k, v, causal=causal, backend=backend)  # compiles and tunes
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
    """The score matrix would take 8 GiB. Allowed: the allocator's rounding and a small workspace."""
    assert extra_bytes(gpu_backend, 32768, causal) <= 1 << 20


def inputs_beyond_31_bits(count: int, gib: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """`count` tensors like q of more than 2^31 elements each, then k and v. Skips the test if memory is short."""
    shortage = memory_shortage(gib, "cuda")
    if shortage:
        pytest.skip(shortage)
    batch, headdim = 33, 128
    like_q = [torch.empty(batch, 1024, 512, headdim, device="cuda", dtype=torch.float16) for _ in range(count)]
    for x in like_q:
        assert x.numel() > 1 << 31
        for sequence in x:
            sequence.normal_()
    k, v = torch.randn(2, batch, 96, 8, headdim, device="cuda", dtype=torch.float16)
    return like_q, k, v


@each_gpu_backend
def test_outputs_beyond_31_bits(gpu_backend: str, described_seed: str) -> None:
    """The last rows of the last sequence are right, which needs 64-bit offsets for q and out."""
    (q,), k, v = inputs_beyond_31_bits(1, gib=14.0)
    batch, seqlen_q = q.shape[:2]
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, backend=gpu_backend)
    for b, at in ((0, slice(0, 8)), (batch - 1, slice(seqlen_q - 8, seqlen_q))):
        rows = (q[b : b + 1, at], k[b : b + 1], v[b : b + 1], out[b : b + 1, at], lse[b : b + 1, :, at])
        assert_forward_accurate(*rows, case=f"batch {b}, rows {at}\n  {described_seed}")


def extra_bytes_of_backward(backend: str, seqlen: int, causal: bool, deterministic: bool, headdim: int = 128) -> int:
    """Peak memory of a backward, minus the memory before it and the gradients."""
    qkv = inputs(1, seqlen, 4, headdim)
    dout = torch.randn_like(qkv[0])
    gradients(qkv, dout, backend, causal, deterministic)  # compiles and tunes
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
    """Beyond the gradients: a float32 dq and delta, deterministic or not. The score matrix would take 8 GiB."""
    seqlen, nheads, headdim = 32768, 4, 128
    float32_dq, per_row = 4 * seqlen * nheads * headdim, 4 * seqlen * nheads
    assert extra_bytes_of_backward(gpu_backend, seqlen, True, deterministic) <= float32_dq + 4 * per_row + (1 << 20)


@pytest.mark.skipif(not IS_HOPPER, reason="the kernels of two passes need a Hopper GPU")
@pytest.mark.parametrize("headdim", [192, 256])
def test_memory_of_a_backward_in_two_passes(headdim: int) -> None:
    """Beyond the gradients: row statistics. A float32 dq would take 1 KB a row."""
    seqlen, nheads = 8192, 4
    extra = extra_bytes_of_backward("cuda", seqlen, causal=True, deterministic=True, headdim=headdim)
    assert extra <= 16 * seqlen * nheads + (1 << 20)


@pytest.mark.parametrize("options", [{}, {"causal": True, "deterministic": True}, {"softcap": 5.0}], ids=str)
def test_short_sequences_share_scratch(options: dict[str, Any], seed: int) -> None:
    """Padded to 128 rows each, their float32 dq would take 23 times the memory of q. Parts of the batch take turns."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = 3000, 15, 16, 72
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    slopes = torch.rand(shape[0], shape[2], device="cuda", generator=generator)

    def backward(part: slice) -> list[Tensor]:
        leaves = [x[part].detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, alibi_slopes=slopes[part], backend="cuda", **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[part])]

    backward(slice(None))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    complete = backward(slice(None))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 8 * q.nbytes
    for begin in (0, 130, 1500, 2997):
        part = slice(begin, begin + 3)
        for name, x, expected in zip(("out", "dq", "dk", "dv"), complete, backward(part), strict=True):
            assert torch.equal(x[part], expected), f"{name} of sequences from {begin} on"


@each_gpu_backend
def test_gradients_beyond_31_bits(gpu_backend: str, described_seed: str) -> None:
    """dq of the last sequence and heads is right, and so are dk and dv, which are sums over heads."""
    (q, dout), k, v = inputs_beyond_31_bits(2, gib=42.0)
    dq, dk, dv = gradients([q, k, v], dout, gpu_backend)
    for b in (0, q.shape[0] - 1):
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


# ---- values in GPU memory that are wrong --------------------------------------------------------------------------

ROWS, NHEADS, FIRST = 200, 2, slice(0, 100)  # the first sequence is right in every case below
GUARD = 0xA5
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
WRONG_LENGTHS: dict[str, tuple[list[int], list[int], str]] = {  # cu_seqlens_q, cu_seqlens_k, which is wrong
    "q_past_the_end": ([0, 100, 5000], [0, 100, 200], "q"),
    "q_largest": ([0, 100, INT_MAX], [0, 100, 200], "q"),
    "q_falls": ([0, 100, 150, 120, 200], [0, 100, 130, 160, 200], "q"),
    "q_ends_below_0": ([0, 100, -5], [0, 100, 200], "q"),
    "q_starts_below_0": ([-7, 100, 200], [0, 100, 200], "q"),
    "k_past_the_end": ([0, 100, 200], [0, 100, 5000], "k"),
    "k_largest": ([0, 100, 200], [0, 100, INT_MAX], "k"),
    "k_falls": ([0, 100, 120, 160, 200], [0, 100, 150, 120, 200], "k"),
    "k_ends_below_0": ([0, 100, 200], [0, 100, -5], "k"),
    "k_starts_below_0": ([0, 100, 200], [INT_MIN, 100, 200], "k"),
    "both": ([0, 100, 5000], [0, 100, INT_MAX], "qk"),
    "both_twice": ([0, 100, INT_MAX, INT_MAX], [0, 100, INT_MAX, INT_MIN], "qk"),
}
WRONG_TABLES: dict[str, tuple[list[int], list[int], str]] = {  # the second sequence's pages, cu_seqlens_k, named
    "page_past_the_pool": ([7, 999, 3, 999, 1, 0, 2], [0, 100, 200], "block_table"),
    "page_below_0": ([7, -7, 3, -7, 1, 0, 2], [0, 100, 200], "block_table"),
    "page_largest": ([INT_MAX, INT_MIN, 3, 4, 1, 0, 2], [0, 100, 200], "block_table"),
    "more_keys_than_pages": ([7, 6, 3, 4, 1, 0, 2], [0, 100, INT_MAX], "block_table|max_seqlen_k"),
    "fewer_keys_than_none": ([7, 6, 3, 4, 1, 0, 2], [0, 100, 50], "cu_seqlens_k"),
}


class Guards:
    """Free blocks of one size between blocks of a known pattern, so that outputs of that size land between guards."""

    def __init__(self, nbytes: int, count: int = 24) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = [torch.full((nbytes,), GUARD, dtype=torch.uint8, device="cuda") for _ in range(2 * count + 1)]
        self._guards = blocks[::2]
        del blocks  # frees every second block

    def check(self) -> None:
        torch.cuda.synchronize()
        for guard in self._guards:
            written = (guard != GUARD).nonzero()
            assert written.numel() == 0, f"{len(written)} bytes are written outside of the outputs, first {written[0]}"


def rows(headdim: int) -> Tensor:
    """[ROWS, NHEADS, headdim], surrounded by NaN, which reaches a result if a kernel reads it."""
    x = poisoned((ROWS, NHEADS, headdim), torch.float16, "cuda")
    return x.copy_(torch.randn(x.shape, device="cuda"))


def on_gpu(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@each_gpu_backend
@pytest.mark.sanitize
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
def test_wrong_lengths_stay_inside_the_tensors(
    wrong: str, headdim: int, deterministic: bool, gpu_backend: str, described_seed: str
) -> None:
    """The kernels end, write only inside their outputs, and the sequence with right lengths has right results."""
    cu_q, cu_k, _ = WRONG_LENGTHS[wrong]
    for causal in (False, True):
        q, k, v, dout = (rows(headdim) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {"causal": causal, "deterministic": deterministic, "backend": gpu_backend}
        lengths = (on_gpu(cu_q), on_gpu(cu_k), 100, 100)
        guards = Guards(ROWS * NHEADS * headdim * 2)
        out, lse, _ = flash_attn_varlen_func(*leaves, *lengths, **options, return_attn_probs=True)
        computed = torch.autograd.grad(out, leaves, dout)
        guards.check()
        inputs = [x[FIRST][None].detach() for x in (q, k, v)]
        case = f"{wrong}, headdim {headdim}, causal={causal}, {gpu_backend}\n  {described_seed}"
        own_lse = lse[None, :, FIRST].detach()
        assert_forward_accurate(*inputs, out[FIRST][None].detach(), own_lse, case=case, causal=causal)
        gradients_of_first = tuple(x[FIRST][None] for x in computed)
        assert_gradients_accurate(*inputs, dout[FIRST][None], gradients_of_first, case=case, causal=causal)


@pytest.mark.sanitize
@pytest.mark.backends("cuda", "triton")
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_ranges_of_sequences_that_share_keys(
    deterministic: bool, backend: str, dtype: torch.dtype, described_seed: str
) -> None:
    """cu_seqlens_k falls: the last sequence has 64 queries, and blocks of keys that the 640 of the first one see."""
    cu_q, cu_k = [0, 640, 640, 704], [0, 255, 0, 255]

    def filled(rows: int) -> Tensor:
        x = poisoned((rows, NHEADS, 64), dtype, "cuda")
        return x.copy_(torch.randn(x.shape, device="cuda"))

    leaves, dout = [filled(count).requires_grad_() for count in (704, 255, 255)], filled(704)
    ranges = on_gpu([0, 255]).expand(1, 704, 2)

    def dq(rows: int, cu_q: list[int], cu_k: list[int]) -> Tensor:
        out = flash_attn_varlen_func(
            leaves[0][:rows],
            *leaves[1:],
            on_gpu(cu_q),
            on_gpu(cu_k),
            640,
            255,
            deterministic=deterministic,
            key_ranges=ranges[:, :rows],
            backend=backend,
        )
        return torch.autograd.grad(out, leaves, dout[:rows])[0]

    expected = dq(640, cu_q[:2], cu_k[:2])[:640]
    guards = Guards(704 * NHEADS * 64 * dout.element_size())
    got = dq(704, cu_q, cu_k)[:640]
    guards.check()
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound, msg=lambda text: f"{text}\n  {described_seed}")


def paged_call(wrong: str) -> tuple[list[Tensor], dict[str, Any]]:
    """q and a pool of 8 pages of 16 keys; the first sequence's pages are right."""
    pages, cu_k, _ = WRONG_TABLES[wrong]
    pool = [poisoned((8, 16, NHEADS, 64), torch.float16, "cuda") for _ in range(2)]
    for x in pool:
        x.copy_(torch.randn(x.shape, device="cuda"))
    table = on_gpu([0, 1, 2, 3, 4, 5, 6, *pages]).view(2, 7)
    arguments = [rows(64), *pool, on_gpu([0, 100, 200]), on_gpu(cu_k)]
    return arguments, {"max_seqlen_q": 100, "max_seqlen_k": 112, "block_table": table}


@each_gpu_backend
@pytest.mark.sanitize
@pytest.mark.parametrize("wrong", WRONG_TABLES)
def test_wrong_pages_stay_inside_the_pool(wrong: str, gpu_backend: str, described_seed: str) -> None:
    (q, k, v, *cu_seqlens), options = paged_call(wrong)
    for causal in (False, True):
        guards = Guards(ROWS * NHEADS * 64 * 2)
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, *cu_seqlens, **options, causal=causal, return_attn_probs=True, backend=gpu_backend
        )
        guards.check()
        keys = [x[:7].flatten(0, 1)[FIRST][None] for x in (k, v)]
        case = f"{wrong}, causal={causal}, {gpu_backend}\n  {described_seed}"
        own = (q[FIRST][None], *keys, out[FIRST][None], lse[None, :, FIRST])
        assert_forward_accurate(*own, case=case, causal=causal)
        assert out.isfinite().all(), f"keys outside of the pool are read, {case}"
        assert not lse.isnan().any(), f"keys outside of the pool are read, {case}"
        assert bool((lse[:, 100:] == -math.inf).all()) == (wrong == "fewer_keys_than_none"), case


@each_gpu_backend
@pytest.mark.parametrize("wrong", [*WRONG_LENGTHS, *WRONG_TABLES])
def test_the_check_names_what_is_wrong(wrong: str, gpu_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASH_ATTN_MINI_CHECK=1 reads the values on the host and raises before any kernel starts."""
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    if wrong in WRONG_TABLES:
        named = WRONG_TABLES[wrong][2]
        arguments, options = paged_call(wrong)
    else:
        cu_q, cu_k, side = WRONG_LENGTHS[wrong]
        named = rf"(cu_seqlens|max_seqlen)_[{side}]"
        arguments = [*(rows(64) for _ in range(3)), on_gpu(cu_q), on_gpu(cu_k)]
        options = {"max_seqlen_q": 100, "max_seqlen_k": 100}
    with pytest.raises(ValueError, match=named):
        flash_attn_varlen_func(*arguments, **options, backend=gpu_backend)


@each_gpu_backend
@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
def test_the_check_of_a_backward_names_what_is_wrong(
    wrong: str, gpu_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cu_q, cu_k, side = WRONG_LENGTHS[wrong]
    leaves = [rows(64).requires_grad_() for _ in range(3)]
    out = flash_attn_varlen_func(*leaves, on_gpu(cu_q), on_gpu(cu_k), 100, 100, backend=gpu_backend)
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    with pytest.raises(ValueError, match=rf"(cu_seqlens|max_seqlen)_[{side}]"):
        out.sum().backward()
