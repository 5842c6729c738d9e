"""flash_attn_varlen_func: forward and gradients over the curated batches, and each sequence as if it were alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_mini.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

from ..conftest import IS_HOPPER
from ..support.bounds import assert_forward_accurate, assert_gradients_accurate
from ..support.cases import options_of
from ..support.feature_checks import check_varlen, described
from ..support.flash_bounds import assert_gradients_accurate_beside_flash
from ..support.poison import memory_shortage
from ..support.varlen_cases import (
    LARGE_VARLEN_CASES,
    SMALL_VARLEN_CASES,
    VARLEN_CASES,
    Batch,
    VarlenCase,
    make_batch,
)

BY_NAME = {case.name: case for case in VARLEN_CASES}
DIFFERENTIABLE = [case for case in VARLEN_CASES if not case.page_size]


@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_varlen_is_as_accurate_as_pytorch(
    case: VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    check_varlen(case, backend, device, dtype, seed, described_seed)


# Hopper's own kernels begin at head dim 64, and each of these has one.
@pytest.mark.parametrize(
    "headdim", [16, *(pytest.param(headdim, marks=pytest.mark.gpu) for headdim in (64, 96, 128, 192, 256))]
)
@pytest.mark.parametrize("name", ["more_and_less_causal", "window", "alibi_batch", "softcap"])
def test_gradients_through_the_log_sum_exp(
    name: str, headdim: int, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    case = dataclasses.replace(BY_NAME[name], headdim=headdim)
    batch = make_batch(case, dtype, device, seed)
    leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    options = options_of(case, device)
    out, lse, _ = flash_attn_varlen_func(*leaves, *batch.lengths, **options, return_attn_probs=True, backend=backend)
    generator = torch.Generator().manual_seed(seed)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(device, lse.dtype)
    gradients = torch.autograd.grad((out, lse), leaves, (batch.dout, dlse))
    options = {"cu_seqlens": batch.cu_seqlens, **options}
    where = described(case, dtype, backend, described_seed)
    assert_gradients_accurate(batch.q, batch.k, batch.v, batch.dout, gradients, case=where, dlse=dlse, **options)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", SMALL_VARLEN_CASES, ids=str)
def test_small_varlen_case_runs_under_compute_sanitizer(case: VarlenCase, seed: int, described_seed: str) -> None:
    check_varlen(case, "cuda", "cuda", torch.float16, seed, described_seed)


@pytest.mark.parametrize("case", LARGE_VARLEN_CASES, ids=str)
def test_varlen_offsets_beyond_31_bits(
    case: VarlenCase, backend: str, device: str, seed: int, described_seed: str
) -> None:
    shortage = memory_shortage(3 * case.memory_gib, device)
    if shortage:
        pytest.skip(shortage)
    batch = make_batch(case, torch.float16, device, seed)
    leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out, lse, _ = flash_attn_varlen_func(*leaves, *batch.lengths, causal=True, return_attn_probs=True, backend=backend)
    gradients = torch.autograd.grad(out, leaves, batch.dout)
    where = described(case, torch.float16, backend, described_seed)
    rows = [x.contiguous() for x in (batch.q, batch.k, batch.v)]
    options = {"cu_seqlens": batch.cu_seqlens, "causal": True}
    assert_forward_accurate(*rows, out.detach(), lse.detach(), case=where, **options)
    dout = batch.dout.contiguous()
    assert_gradients_accurate_beside_flash(*rows, dout, gradients, case=where, **options)


# ---- each sequence as if it were alone ----------------------------------------------------------------------------


def alone(case: VarlenCase, batch: Batch, backend: str, device: str) -> list[tuple[Tensor, ...]]:
    """out, lse, dq, dk, dv of each sequence through flash_attn_func."""
    options = options_of(case, device)
    slopes = options.pop("alibi_slopes")
    spans = [x.tolist() for x in batch.cu_seqlens]
    results = []
    for b in range(case.batch):
        own_q, own_k = (slice(x[b], x[b + 1]) for x in spans)
        parts = (batch.q[own_q], batch.k[own_k], batch.v[own_k])
        leaves = [x[None].detach().requires_grad_() for x in parts]
        own_slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse, _ = flash_attn_func(
            *leaves, **options, alibi_slopes=own_slopes, return_attn_probs=True, deterministic=True, backend=backend
        )
        gradients = torch.autograd.grad(out, leaves, batch.dout[own_q][None])
        results.append((out[0], lse[0], *(x[0] for x in gradients)))
    return results


@pytest.mark.backends("cpu", "cuda")  # triton may be tuned to other tiles for a varlen call
@pytest.mark.parametrize(
    "name",
    [
        "mixed_causal",
        "more_and_less_causal",
        "long_and_short",
        "gqa",
        "headdim_33",
        "headdim_192",
        "window",
        "softcap",
        "alibi_batch",
    ],
)
def test_a_batch_gives_the_bits_of_each_sequence_alone(
    name: str, backend: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cuda":  # one architecture, without the kernels of a single tile, which take equal lengths only
        monkeypatch.setenv("FLASH_ATTN_MINI_ARCH", "90" if IS_HOPPER else "80")
    case = BY_NAME[name]
    batch = make_batch(case, torch.float16, device, seed)
    leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out, lse, _ = flash_attn_varlen_func(
        *leaves,
        *batch.lengths,
        **options_of(case, device),
        deterministic=True,
        return_attn_probs=True,
        backend=backend,
    )
    gradients = torch.autograd.grad(out, leaves, batch.dout)
    parts = zip(*alone(case, batch, backend, device), strict=True)
    results = zip(("out", "softmax_lse", "dq", "dk", "dv"), (out, lse, *gradients), parts, strict=True)
    for what, got, expected in results:
        together = torch.cat(expected, dim=-1 if what == "softmax_lse" else 0)
        if backend == "cpu" or what in ("out", "softmax_lse"):
            assert torch.equal(got, together), what
        else:  # the CUDA backward sums more heads per CTA if there are CTAs enough for the GPU
            torch.testing.assert_close(got, together, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "case", [c for c in DIFFERENTIABLE if c.name in ("together", "long_and_short", "many")], ids=str
)
def test_varlen_repeats_bitwise(case: VarlenCase, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    batch = make_batch(case, dtype, device, seed)

    def once() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
        options = options_of(case, device)
        out = flash_attn_varlen_func(*leaves, *batch.lengths, **options, deterministic=True, backend=backend)
        return (out, *torch.autograd.grad(out, leaves, batch.dout))

    first = once()
    for _ in range(3):
        for a, b in zip(first, once(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_pages_may_lie_anywhere(page_size: int, backend: str, device: str, seed: int, described_seed: str) -> None:
    """Keys and values are views of one cache, as in servers: interleaved pages, next to other heads."""
    lengths_q, lengths_k = (40, 1, 0, 9), (130, 257, 60, 0)
    case = VarlenCase("pages", "views", lengths_q, lengths_k, 4, 2, 64, True, page_size=page_size)
    batch = make_batch(case, torch.float16, device, seed)
    pages = batch.k.shape[0]
    cache = torch.full((pages, 2, page_size, 3, 64), float("nan"), dtype=torch.float16, device=device)
    k, v = (cache[:, i, :, 1:] for i in range(2))
    k.copy_(batch.k)
    v.copy_(batch.v)
    out, lse, _ = flash_attn_varlen_func(
        batch.q,
        k,
        v,
        *batch.lengths,
        causal=True,
        return_attn_probs=True,
        block_table=batch.block_table,
        backend=backend,
    )
    rows = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
    where = described(case, torch.float16, backend, described_seed)
    assert_forward_accurate(*rows, out, lse, case=where, cu_seqlens=batch.cu_seqlens, causal=True)


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_pages_have_a_forward_and_no_gradient(wanted: str, backend: str, device: str) -> None:
    """The forward runs with inputs that require a gradient; the backward raises, and never gives a silent zero."""
    batch = make_batch(BY_NAME["pages_16"], torch.float16, device, 0)
    getattr(batch, wanted).requires_grad_()

    def attend() -> Tensor:
        return flash_attn_varlen_func(
            batch.q, batch.k, batch.v, *batch.lengths, block_table=batch.block_table, backend=backend
        )

    with torch.no_grad():
        expected = attend()
    torch._dynamo.reset()
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call()
        assert out.requires_grad
        assert torch.equal(out, expected)
        with pytest.raises(NotImplementedError, match=r"gradients of paged keys and values.*block_table"):
            out.sum().backward()


# ---- arguments ----------------------------------------------------------------------------------------------------


def test_positional_arguments_are_the_official_ones(backend: str, device: str, seed: int) -> None:
    batch = make_batch(BY_NAME["gqa"], torch.float16, device, seed)
    qkv = (batch.q, batch.k, batch.v)
    by_position = flash_attn_varlen_func(
        *qkv, *batch.lengths, 0.0, 0.3, True, (-1, -1), 0.0, None, False, True, None, backend=backend
    )
    by_name = flash_attn_varlen_func(
        *qkv, *batch.lengths, softmax_scale=0.3, causal=True, return_attn_probs=True, backend=backend
    )
    for a, b in zip(by_position, by_name, strict=True):
        assert torch.equal(a, b)


def test_official_functions_write_gradients_in_place(backend: str, device: str, seed: int) -> None:
    case = BY_NAME["more_and_less_causal"]
    batch = make_batch(case, torch.float16, device, seed)
    qkv = (batch.q, batch.k, batch.v)
    scalars = (0.0, 0.125, True, -1, -1, 0.0, None)
    with use_backend(backend):
        out, lse, s_dmask, rng_state = _flash_attn_varlen_forward(*qkv, *batch.lengths, *scalars)
        assert s_dmask.numel() == rng_state.numel() == 0
        given = [torch.full_like(x, float("nan")) for x in qkv]
        softmax_d = _flash_attn_varlen_backward(
            batch.dout, *qkv, out, lse, *given, *batch.lengths, *scalars, True, rng_state
        )
    leaves = [x.detach().requires_grad_() for x in qkv]
    again = flash_attn_varlen_func(*leaves, *batch.lengths, causal=True, deterministic=True, backend=backend)
    for a, b in zip(given, torch.autograd.grad(again, leaves, batch.dout), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    assert softmax_d.shape == (case.nheads, (batch.q.shape[0] // 128 + case.batch) * 128)
    expected = torch.einsum("thd,thd->ht", batch.dout.double(), out.double())
    starts = batch.cu_seqlens_q.tolist()
    for b, length in enumerate(case.lengths_q):
        at = (starts[b] // 128 + b) * 128
        own = expected[:, starts[b] : starts[b + 1]]
        torch.testing.assert_close(softmax_d[:, at : at + length].double(), own, rtol=1e-3, atol=1e-3)


def test_max_seqlen_may_be_an_integer_tensor(backend: str, device: str, seed: int) -> None:
    """As padding helpers of other packages return them."""
    batch = make_batch(BY_NAME["mixed_causal"], torch.float16, device, seed)
    qkv, (cu_q, cu_k, max_q, max_k) = (batch.q, batch.k, batch.v), batch.lengths
    expected = flash_attn_varlen_func(*qkv, cu_q, cu_k, max_q, max_k, causal=True, backend=backend)
    longest = cu_q.diff().max()
    assert torch.equal(
        flash_attn_varlen_func(*qkv, cu_q, cu_k, longest, longest, causal=True, backend=backend), expected
    )
    for wrong in (130.0, torch.tensor(130.0), True, None, "130"):
        with pytest.raises(TypeError, match=r"max_seqlen_k is .*integer"):
            flash_attn_varlen_func(*qkv, cu_q, cu_k, max_q, wrong, backend=backend)


@pytest.mark.gpu
@pytest.mark.backends("cuda", "triton")
@pytest.mark.parametrize("name", ["more_and_less_causal", "together", "headdim_33", "pages_16", "no_queries"])
def test_varlen_call_does_not_synchronize(name: str, backend: str, device: str) -> None:
    case = BY_NAME[name]
    batch = make_batch(case, torch.float16, device, 0)
    leaves = [x.detach().requires_grad_(not case.page_size) for x in (batch.q, batch.k, batch.v)]
    options = options_of(case, device)

    def call() -> None:
        out = flash_attn_varlen_func(*leaves, *batch.lengths, **options, block_table=batch.block_table, backend=backend)
        if not case.page_size:
            torch.autograd.grad(out, leaves, batch.dout)

    call()  # compiles and tunes
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
