"""Attention sinks on every backend: forward, gradients, variable length, KV cache, compile, vmap, errors.

The first test runs the Triton backend in its interpreter where there is no GPU.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    ops,
)
from flash_attn_mini.argument_checks import checked_options
from flash_attn_mini.reference import attention_kvcache_reference, attention_reference, dropout_mask
from flash_attn_mini.score_mod import sink_gradient

from ..support.bounds import assert_forward_accurate
from ..support.cases import Case, make_dlse, make_dout, make_inputs, options_of
from ..support.interpreter import run_in_the_interpreter, starts_the_interpreter
from ..support.kvcache_cases import KvCacheCase, make_call
from ..support.on_backends import gpu, here, on_backends
from ..support.poison import Guard
from ..support.sink_checks import check_forward_and_gradients, check_sink_gradient, draw_sinks
from ..support.triton_calls import HAS_GPU, runs_triton
from ..support.varlen_cases import VarlenCase, make_batch

CASES = [
    Case("sinks", "grouped heads, lengths that end inside tiles", 2, 4, 2, 113, 203, 64),
    Case("sinks_causal", "several tiles of rows and keys", 1, 4, 4, 300, 300, 64, True),
    Case("sinks_decode", "one query", 3, 8, 2, 1, 257, 128, True),
    Case("sinks_rows_without_keys", "the sink is all that they see", 1, 4, 2, 203, 113, 64, True),
    Case("sinks_no_keys", "no row has a key", 2, 3, 3, 9, 0, 64),
    Case("sinks_one_key", "P is the sink's complement", 2, 2, 2, 129, 1, 64),
    Case("sinks_window", "a band of keys", 1, 2, 1, 150, 170, 64, window_size=(40, 12)),
    Case("sinks_softcap_alibi", "not capped, not biased", 1, 4, 2, 90, 120, 64, softcap=5.0, alibi="heads"),
    Case("sinks_scale_negative", "nor scaled", 1, 2, 2, 77, 90, 64, softmax_scale=-0.3),
    Case("sinks_scale_zero", "all keys weigh the same", 1, 2, 2, 77, 90, 64, softmax_scale=0.0),
    Case("sinks_negative", "logits of -1000: the sink takes all", 1, 2, 2, 77, 90, 64, values="negative"),
    Case("sinks_rising", "logits far above the sink", 1, 2, 2, 77, 90, 64, values="rising"),
    Case("sinks_small", "rows without keys, softcap, ALiBi", 2, 4, 2, 19, 11, 16, True, softcap=5.0, alibi="heads"),
    Case("sinks_packed_layout", "strided inputs", 2, 4, 4, 77, 77, 64, True, layout="packed"),
    *(Case(f"sinks_{d}", f"head dim {d}", 1, 4, 2, 130, 140, d, True) for d in (1, 32, 33, 72, 96, 128, 192, 256)),
]  # fmt: skip
DROPOUT = Case("sinks_dropout", "a sink is not dropped", 2, 4, 2, 97, 65, 64, dropout_p=0.25)
VARLEN = [
    VarlenCase(
        "sinks_varlen", "empty and ragged sequences", (70, 0, 1, 130, 5), (90, 3, 0, 130, 300), causal=True, nheads=4
    ),
    VarlenCase(
        "sinks_varlen_small", "empty sequences, and rows without keys", (9, 0, 3), (4, 2, 0), causal=True, nheads=4
    ),
    VarlenCase("sinks_varlen_full", "without a mask", (129, 64), (33, 257), nheads=4, nheads_k=1),
    VarlenCase("sinks_varlen_paged", "keys in pages", (5, 70), (300, 90), causal=True, page_size=48, nheads=4),
    VarlenCase("sinks_varlen_no_keys", "no sequence has a key", (5, 7), (0, 0), nheads=4),
]
CACHES = [
    KvCacheCase("sinks_cache", "one query, splits as the kernels choose", (300, 17, 1), 513, nheads=8),
    KvCacheCase("sinks_cache_small", "three splits and one", (90, 5), 96, split_keys=32, nheads=8),
    KvCacheCase("sinks_cache_long", "one sequence: a cluster, or many splits", (4096,), 4096, nheads=8),
    KvCacheCase("sinks_cache_splits", "a sink counts once, not once a split", (700, 65), 1024, num_splits=5, nheads=8),
    KvCacheCase("sinks_cache_split_keys", "splits of a fixed length", (700, 65), 1024, split_keys=128, nheads=8),
    KvCacheCase("sinks_cache_one_split", "no split", (700, 65), 1024, num_splits=1, nheads=8),
    KvCacheCase("sinks_cache_rows", "65 queries with causal rows", (700, 20), 1024, seqlen_q=65, causal=True, nheads=8),
    KvCacheCase("sinks_cache_rows_128", "a tile for each group", (900,), 1024, seqlen_q=129, causal=True, headdim=128),
    KvCacheCase("sinks_cache_empty", "sequences without keys", (0, 40), 64, nheads=8),
    KvCacheCase("sinks_cache_new", "appended keys, left padding, rotary", (30, 60), 128, seqlen_q=3, seqlen_new=3,
                leftpad=(4, 0), rotary_dim=32, causal=True, lengths_as="tensor"),
    KvCacheCase("sinks_cache_paged", "pages, window, softcap", (300, 77), 320, page_size=16, window_size=(60, 0),
                softcap=9.0),
    KvCacheCase("sinks_cache_256", "head dim 256", (300, 77), 320, headdim=256),
]  # fmt: skip
SMALL = ("sinks_no_keys", "sinks_33", "sinks_decode", "sinks_small", "sinks_varlen_small", "sinks_varlen_no_keys",
         "sinks_cache_small", "sinks_cache_empty", "sinks_cache_new")  # fmt: skip

WITHOUT_KEYS = [case for case in CASES if case.name in ("sinks_rows_without_keys", "sinks_small")]
OF_OTHERS = [case for case in CASES if case.name == "sinks_small"]
CAUSAL = [case for case in CASES if case.name in ("sinks_causal", "sinks_33")]


@pytest.fixture
def device(kernels: str) -> str:
    return "cuda" if kernels == "cuda" or (kernels == "triton" and HAS_GPU) else "cpu"


@pytest.mark.slow
@starts_the_interpreter
def test_triton_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def where_of(case: Any, dtype: torch.dtype, kernels: str, described_seed: str) -> str:
    return f"{case.name} ({case.why})\n  {case} dtype={dtype} backend={kernels}\n  {described_seed}"


# ---- equal lengths --------------------------------------------------------------------------------------------------


@on_backends([*CASES, DROPOUT], SMALL)
def test_equal_lengths(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    # PyTorch's own log-sum-exp is float32: its gradient is compared in wide dtypes.
    dlse = make_dlse(case, dtype, device, seed) if dtype in (torch.float32, torch.float64) else None
    sinks = draw_sinks((case.nheads,), dtype if seed % 2 else torch.promote_types(dtype, torch.float32), device, seed)
    if dtype == torch.float64:
        sinks = sinks.to(dtype)
    options, masks = options_of(case, device), {}
    guard = Guard(*inputs, dout)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        chosen = checked_options(q, k, v, **options, deterministic=False, backend=kernels, learnable_sink=sinks)
        out, lse, rng_state, _ = ops.forward(q, k, v, None, chosen)
        if case.dropout_p > 0:
            sizes = (case.batch, case.nheads, case.seqlen_q, case.seqlen_k)
            masks["dropout_mask"] = dropout_mask(rng_state, case.dropout_p, *sizes, device=device)
        return out, lse

    if case.dropout_p > 0:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            attend(*inputs, sinks)  # the mask of the call that is checked
            torch.manual_seed(seed)
            check_forward_and_gradients(
                attend, inputs, sinks, dout, dlse, where_of(case, dtype, kernels, described_seed), **options, **masks
            )
    else:
        where = where_of(case, dtype, kernels, described_seed)
        check_forward_and_gradients(attend, inputs, sinks, dout, dlse, where, **options)
    guard.check()


@on_backends(OF_OTHERS, SMALL)
def test_sinks_of_each_sequence(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    sinks = draw_sinks((case.batch, case.nheads), dtype, device, seed).t().contiguous().t()  # strided

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(q, k, v, learnable_sink=sinks, return_attn_probs=True, backend=kernels)[:2]

    check_forward_and_gradients(attend, inputs, sinks, dout, None, where_of(case, dtype, kernels, described_seed))


@on_backends(CAUSAL, SMALL)
def test_only_the_gradient_of_the_sinks(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    sinks = draw_sinks((case.nheads,), dtype, device, seed).requires_grad_()
    out = flash_attn_func(*inputs, causal=True, learnable_sink=sinks, backend=kernels)
    (got,) = torch.autograd.grad(out, sinks, dout)
    where = where_of(case, dtype, kernels, described_seed)
    check_sink_gradient(got, inputs, sinks, dout, None, where, causal=True)


@on_backends(OF_OTHERS, SMALL)
@pytest.mark.parametrize("logit", [-math.inf, -200.0, 200.0])
def test_extreme_sinks(case: Case, kernels: str, device: str, dtype: torch.dtype, logit: float, seed: int) -> None:
    """-inf is no sink; a sink far below all logits changes nothing that a dtype holds; one far above takes all."""
    inputs = make_inputs(case, dtype, device, seed)
    call = partial(flash_attn_func, *inputs, return_attn_probs=True, backend=kernels)

    def with_sink(logit: float) -> tuple[Tensor, Tensor]:
        return call(learnable_sink=torch.full((case.nheads,), logit, device=device))[:2]

    out, lse = with_sink(logit)
    if logit > 0:
        assert not out.any() or out.abs().max() < 1e-30
        torch.testing.assert_close(lse, torch.full_like(lse, logit))
        return
    for got, expected in zip((out, lse), with_sink(-math.inf), strict=True):
        assert torch.equal(got, expected)
    plain, plain_lse, _ = call()
    if kernels == "cpu":
        assert torch.equal(out, plain)
        assert torch.equal(lse, plain_lse)
    else:  # Another kernel runs without sinks: CUDA's for short sequences, or the one that Triton compiles then.
        torch.testing.assert_close(out, plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-6, atol=1e-6)


@on_backends(WITHOUT_KEYS, SMALL)
def test_gradient_of_a_sink_of_minus_infinity(
    case: Case, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    """It has no part in rows with keys, and is the log-sum-exp of rows without."""
    inputs, dout = make_inputs(case, dtype, device, seed), make_dout(case, dtype, device, seed)
    dlse = make_dlse(case, dtype, device, seed)
    sinks = torch.full((case.nheads,), -math.inf, device=device).requires_grad_()
    out, lse, _ = flash_attn_func(
        *inputs, causal=case.causal, learnable_sink=sinks, return_attn_probs=True, backend=kernels
    )
    (of_out,) = torch.autograd.grad(out, sinks, dout, retain_graph=True)
    (of_both,) = torch.autograd.grad((out, lse), sinks, (dout, dlse))
    where = where_of(case, dtype, kernels, described_seed)
    assert torch.equal(of_out, torch.zeros_like(of_out)), where
    expected = dlse.double().masked_fill(lse.detach() != -math.inf, 0.0).sum((0, 2))
    torch.testing.assert_close(of_both.double(), expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}\n{text}")


@here
def test_gradcheck(draw: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 5, heads, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=draw)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sinks, return_attn_probs=True, backend="cpu")[:2]

    assert torch.autograd.gradcheck(attend, inputs)


# ---- variable length, packed ----------------------------------------------------------------------------------------


@on_backends(VARLEN, SMALL)
def test_variable_length(
    case: VarlenCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    batch = make_batch(case, dtype, device, seed)
    sinks = draw_sinks((case.nheads,), dtype, device, seed)
    where = where_of(case, dtype, kernels, described_seed)
    rows = (batch.q, batch.rows(batch.k), batch.rows(batch.v))
    options = {"causal": case.causal}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            q, k, v, *batch.lengths, **options, block_table=batch.block_table, learnable_sink=sinks,
            return_attn_probs=True, backend=kernels,
        )[:2]  # fmt: skip

    cumulative = (batch.cu_seqlens_q, batch.cu_seqlens_k)
    if case.page_size:
        out, lse = attend(batch.q, batch.k, batch.v, sinks)
        assert_forward_accurate(*rows, out, lse, case=where, cu_seqlens=cumulative, sinks=sinks, **options)
    else:
        check_forward_and_gradients(attend, rows, sinks, batch.dout, None, where, cumulative, **options)


@here
def test_rows_of_no_sequence_give_no_gradient(draw: torch.Generator) -> None:
    """cu_seqlens may end before the rows of a tensor on a GPU, where it is not read; on the CPU the gradient is
    computed from such tensors."""
    lse, softmax_d = torch.randn(2, 12, generator=draw), torch.randn(2, 3 * 128, generator=draw)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    lse[:, 9:] = math.nan
    sink = torch.randn(2, generator=draw)
    delta = torch.cat([softmax_d[:, :4], softmax_d[:, 128 : 128 + 5]], dim=1)
    expected = -((sink[:, None] - lse[:, :9]).exp() * delta).sum(1)
    torch.testing.assert_close(sink_gradient(sink, lse, softmax_d, None, cu_seqlens), expected)


@on_backends(OF_OTHERS, SMALL)
@pytest.mark.parametrize("form", ["qkv", "kv", "varlen_qkv", "varlen_kv"])
def test_packed(form: str, case: Case, kernels: str, device: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    """Equal to the functions of separate tensors, and the same gradient."""
    packed = torch.randn(2, 33, 3, 4, 16, generator=draw).to(device, dtype)
    sinks = torch.randn(4, generator=draw).to(device)
    cu_seqlens = torch.tensor([0, 20, 66], dtype=torch.int32, device=device)
    is_varlen = form.startswith("varlen")
    lengths = (cu_seqlens, 46) if is_varlen else ()
    pairs = (cu_seqlens, cu_seqlens, 46, 46) if is_varlen else ()
    x = packed.flatten(0, 1) if is_varlen else packed
    options = {"causal": True, "backend": kernels}

    def as_packed(x: Tensor, sinks: Tensor) -> Tensor:
        if form.endswith("qkv"):
            function: Any = flash_attn_varlen_qkvpacked_func if is_varlen else flash_attn_qkvpacked_func
            return function(x, *lengths, **options, learnable_sink=sinks)  # type: ignore[no-any-return]
        function = flash_attn_varlen_kvpacked_func if is_varlen else flash_attn_kvpacked_func
        q, kv = x.select(-3, 0), x[..., 1:, :, :]
        return function(q, kv, *pairs, **options, learnable_sink=sinks)  # type: ignore[no-any-return]

    def separate(x: Tensor, sinks: Tensor) -> Tensor:
        function: Any = flash_attn_varlen_func if is_varlen else flash_attn_func
        return function(*x.unbind(-3), *pairs, **options, learnable_sink=sinks)  # type: ignore[no-any-return]

    dout = torch.randn(x.select(-3, 0).shape, generator=draw).to(device, dtype)
    results = []
    for function in (as_packed, separate):
        leaves = [x.detach().requires_grad_(), sinks.detach().requires_grad_()]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 4e-3, atol=2e-2)


# ---- the gradient from row statistics: one kernel on CUDA, ATen's operators elsewhere -------------------------------

DEVICES = [pytest.param("cpu", marks=here), pytest.param("cuda", marks=gpu)]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The arguments of `sink_gradient`, drawn; some rows have only the sink. lengths: of sequences, empty for equal
    ones; unused: rows after the last sequence, whose log-sum-exp is NaN."""

    name: str
    batch: int
    nheads: int
    rows: int
    lengths: tuple[int, ...] = ()
    unused: int = 0
    is_of_sequence: bool = False
    has_dlse: bool = False

    def __str__(self) -> str:
        return self.name

    def draw(self, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(seed)
        rows = sum(self.lengths) + self.unused if self.lengths else self.rows
        shape = (self.nheads, rows) if self.lengths else (self.batch, self.nheads, rows)
        padded = (rows // 128 + len(self.lengths)) * 128 if self.lengths else -(-rows // 128) * 128
        sinks = torch.randn((self.batch, self.nheads) if self.is_of_sequence else (self.nheads,), generator=draw)
        sinks = sinks.to(dtype)
        lse = sinks.float()[..., None] + torch.randn(shape, generator=draw).abs()
        lse = torch.where(torch.rand(shape, generator=draw) < 0.1, sinks.float()[..., None], lse)
        softmax_d = torch.randn((*shape[:-1], padded), generator=draw)
        dlse = torch.randn(shape, generator=draw) if self.has_dlse else None
        cu_seqlens = None
        if self.lengths:
            cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
            lse[:, rows - self.unused :] = math.nan
        return tuple(None if x is None else x.to(device) for x in (sinks, lse, softmax_d, dlse, cu_seqlens))


STATISTICS = [
    Statistics("one_row", 1, 1, 1),
    Statistics("part_of_a_block", 2, 3, 127, has_dlse=True),
    Statistics("a_block_and_a_row", 3, 5, 129),
    Statistics("of_each_sequence", 3, 5, 300, is_of_sequence=True, has_dlse=True),
    Statistics("more_blocks_than_warps", 2, 2, 128 * 33 + 5),
    Statistics("many_heads", 1, 300, 40, has_dlse=True),
    Statistics("varlen", 5, 3, 0, (70, 0, 1, 128, 300), has_dlse=True),
    Statistics("varlen_unused_rows", 3, 2, 0, (0, 130, 5), unused=77),
    Statistics("varlen_many_sequences", 400, 2, 0, tuple(range(400))),
    Statistics("varlen_one_sequence", 1, 4, 0, (513,)),
]


def gradient_of_option(sinks: Tensor, *statistics: Tensor | None) -> Tensor:
    return torch.ops.flash_attn_mini.option_gradient("learnable_sink", sinks, *statistics)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", STATISTICS, ids=str)
def test_gradient_from_row_statistics(
    case: Statistics, dtype: torch.dtype, device: str, seed: int, described_seed: str
) -> None:
    """As accurate as float32, in the dtype of the sinks, and bitwise the same again."""
    sinks, lse, *others = case.draw(dtype, device, seed)
    got = gradient_of_option(sinks, lse, *others)
    assert (got.dtype, got.shape) == (dtype, sinks.shape)
    assert torch.equal(got, gradient_of_option(sinks, lse, *others))
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in (sinks, lse, *others)]
    expected = sink_gradient(*wide)  # type: ignore[arg-type]
    size = float(sink_gradient(*wide[:2], wide[2].abs(), *wide[3:]).abs().max())  # type: ignore[union-attr, arg-type]
    error, allowed = (got - expected).abs().max(), torch.finfo(dtype).eps * (1.0 + expected.abs().max()) + 1e-6 * size
    assert error <= allowed, f"{case}: error {error}, allowed {allowed}\n  {described_seed}"


@gpu
@here
@pytest.mark.parametrize("case", [STATISTICS[3], STATISTICS[6]], ids=str)
def test_gradient_reads_strided_statistics(case: Statistics, seed: int) -> None:
    """The sinks and the gradient of the log-sum-exp may be views, and cu_seqlens too."""
    arguments = case.draw(torch.float32, "cuda", seed)
    strided = [None if x is None else torch.stack([x, torch.zeros_like(x)], -1)[..., 0] for x in arguments]
    assert not any(x is not None and x.is_contiguous() for x in strided)
    assert torch.equal(gradient_of_option(*strided), gradient_of_option(*arguments))  # type: ignore[arg-type]
    sinks, lse, softmax_d, _, cu_seqlens = arguments
    of_sum = torch.ones((), device="cuda").expand_as(lse)  # as lse.sum() passes it on
    got = gradient_of_option(sinks, lse, softmax_d, of_sum, cu_seqlens)
    assert torch.equal(got, gradient_of_option(sinks, lse, softmax_d, of_sum.contiguous(), cu_seqlens))


def count_of_kernels(function: Any) -> int:
    """The kernels that a call launches; the second call, which allocates and chooses nothing new."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@gpu
@here
@pytest.mark.parametrize("of_sinks", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_launch_one_kernel_in_the_backward_and_none_in_the_forward(of_sinks: torch.dtype, seed: int) -> None:
    draw = torch.Generator("cuda").manual_seed(seed)
    q, k, v, dout = (torch.randn(2, 300, 4, 64, dtype=torch.bfloat16, device="cuda", generator=draw) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.randn(4, device="cuda", generator=draw).to(of_sinks).requires_grad_()
    counts = {}
    for name, options in (("plain", {}), ("sinks", {"learnable_sink": sinks})):
        attend = partial(flash_attn_func, *leaves, causal=True, backend="cuda", **options)
        inputs = [*leaves, *options.values()]
        forward = count_of_kernels(attend)
        both = count_of_kernels(lambda attend=attend, inputs=inputs: torch.autograd.grad(attend(), inputs, dout))
        counts[name] = (forward, both - forward)
    assert counts["plain"][0] > 0
    assert counts["sinks"] == (counts["plain"][0], counts["plain"][1] + 1)


@gpu
@here
def test_gradient_in_a_cuda_graph(seed: int) -> None:
    case = STATISTICS[4]
    arguments = case.draw(torch.float32, "cuda", seed)
    gradient_of_option(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient_of_option(*arguments)
    arguments[2].neg_()
    graph.replay()
    assert torch.equal(captured, gradient_of_option(*arguments))


# ---- KV cache -------------------------------------------------------------------------------------------------------


@on_backends(CACHES, SMALL)
def test_kvcache(
    case: KvCacheCase, kernels: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    if kernels == "cuda" and dtype == torch.float16 and case.name == "sinks_cache_long":
        case = dataclasses.replace(case, nheads=8, nheads_k=8)  # another choice of splits
    call = make_call(case, dtype, device, seed)
    sinks = draw_sinks((case.nheads,), dtype, device, seed)
    before = [x.clone() for x in (call.k_cache, call.v_cache)]
    out, lse = flash_attn_with_kvcache(
        *call.tensors, **call.arguments, learnable_sink=sinks, return_softmax_lse=True, backend=kernels
    )
    expected = attention_kvcache_reference(call.q, *before, *call.new, **call.definition, sinks=sinks)
    plain_before = [x.clone() for x in before]
    plain = flash_attn_with_kvcache(
        call.q, *before, *call.new, **call.arguments, return_softmax_lse=True, backend=kernels
    )
    truth = attention_kvcache_reference(call.q, *plain_before, *call.new, **call.definition)
    # The sink may not add more error than the call without one has, and a rounding.
    for got, want, plain_got, plain_want in zip((out, lse), expected, plain, truth, strict=True):
        error, allowed = (
            (a.double() - b).nan_to_num(0.0).abs().max() for a, b in ((got, want), (plain_got, plain_want))
        )
        size = want[want.isfinite()].abs().max() if want.isfinite().any() else 0.0
        eps = torch.finfo(got.dtype).eps
        assert error <= 2 * allowed + 2 * eps * max(float(size), 1.0), where_of(case, dtype, kernels, described_seed)


@here
def test_kvcache_gives_the_sinks_no_gradient(draw: torch.Generator) -> None:
    q, cache = torch.randn(2, 1, 4, 16, generator=draw), torch.randn(2, 9, 2, 16, generator=draw)
    sinks = torch.randn(4, generator=draw).requires_grad_()
    out = flash_attn_with_kvcache(q, cache, cache, learnable_sink=sinks)
    with pytest.raises(NotImplementedError, match="no backend implements the backward of flash_attn_with_kvcache"):
        out.sum().backward()


# ---- PyTorch around it ----------------------------------------------------------------------------------------------


def small(draw: torch.Generator, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    shapes = ((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))
    return [torch.randn(shape, generator=draw).to(device) for shape in shapes], torch.randn(4, generator=draw).to(
        device
    )


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(is_varlen: bool, dynamic: bool, draw: torch.Generator) -> None:
    inputs, sinks = small(draw)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, 4, 9 * 2]), torch.tensor([0, 20, 26]))
    lengths = (cu_seqlens_q.int(), cu_seqlens_k.int(), 14, 20)
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        if is_varlen:
            return flash_attn_varlen_func(q, k, v, *lengths, causal=True, learnable_sink=sinks)  # type: ignore[return-value]
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)  # type: ignore[return-value]

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        leaves = [x.detach().requires_grad_() for x in (*inputs, sinks)]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@here
@pytest.mark.parametrize("is_varlen", [False, True], ids=["equal", "varlen"])
def test_opcheck(is_varlen: bool, draw: torch.Generator) -> None:
    inputs, sinks = small(draw)
    sequences: Any = None
    if is_varlen:
        inputs = [x.flatten(0, 1) for x in inputs]
        sequences = ops.Sequences(torch.tensor([0, 4, 18]).int(), torch.tensor([0, 20, 26]).int(), 14, 20)
    inputs = [x.requires_grad_() for x in inputs]
    options = checked_options(
        *inputs, 0.0, None, True, (-1, -1), 0.0, None, False, "cpu", learnable_sink=sinks.requires_grad_()
    )
    arguments = (*inputs, *(sequences or ops.EQUAL_LENGTHS), *options, None)
    torch.library.opcheck(torch.ops.flash_attn_mini.fwd.default, arguments)


@here
@pytest.mark.parametrize("mapped", ["all", "sinks", "inputs"])
def test_vmap(mapped: str, draw: torch.Generator) -> None:
    """Over a batch of sinks, of inputs, or of both; also of gradients."""
    size = 3
    samples = [small(draw) for _ in range(size)]
    inputs = [torch.stack([one[0][i] for one in samples]) for i in range(3)]
    sinks = torch.stack([one[1] for one in samples])
    of_inputs, of_sinks = (None if mapped == "sinks" else 0), (None if mapped == "inputs" else 0)
    arguments = [x[0] if of_inputs is None else x for x in inputs] + [sinks[0] if of_sinks is None else sinks]
    in_dims = (of_inputs, of_inputs, of_inputs, of_sinks)

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sinks).square().sum()  # type: ignore[union-attr]

    def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention_reference(q, k, v, causal=True, sinks=sinks, dtype=torch.float32)[0].square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims)(*arguments)
    expected = torch.vmap(torch.func.grad(reference, argnums=(0, 1, 2, 3)), in_dims)(*arguments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@here
def test_autocast(draw: torch.Generator) -> None:
    inputs, sinks = small(draw)
    leaf = sinks.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_func(*inputs, learnable_sink=leaf)
    assert out.dtype == torch.bfloat16  # type: ignore[union-attr]
    out.float().sum().backward()  # type: ignore[union-attr]
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"has shape \[3\]; allowed: \[nheads\] = \[4\] or \[batch, nheads\]"),
        (torch.zeros(4, 2), ValueError, r"learnable_sink has shape \[4, 2\]"),
        (torch.zeros(4, dtype=torch.float16), TypeError, "learnable_sink has dtype Half; allowed: float32 or"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "learnable_sink has dtype Long; allowed: float32 or that of q"),
        (torch.zeros(4, device="meta"), ValueError, "learnable_sink is on meta; allowed: the device of q, cpu"),
        ([0.0] * 4, TypeError, "learnable_sink"),
        (0.5, TypeError, "learnable_sink"),
    ],
    ids=lambda value: str(tuple(value.shape)) + str(value.dtype) if isinstance(value, Tensor) else None,
)  # fmt: skip
def test_wrong_sinks(sinks: Any, error: type[Exception], message: str, kernels: str, draw: torch.Generator) -> None:
    if HAS_GPU and kernels == "triton":
        pytest.skip("CPU tensors")
    inputs, _ = small(draw)
    with pytest.raises(error, match=message):
        flash_attn_func(*inputs, learnable_sink=sinks, backend=kernels)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(*inputs, learnable_sink=sinks, backend=kernels)


@here
def test_variable_length_has_one_sink_for_a_head(draw: torch.Generator) -> None:
    q, cu_seqlens = torch.randn(9, 4, 16, generator=draw), torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"learnable_sink has shape \[2, 4\]; allowed: \[nheads\] = \[4\]$"):
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 5, 5, learnable_sink=torch.zeros(2, 4))
