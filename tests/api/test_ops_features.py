"""The operators with dropout and of variable length as PyTorch's tools see them: opcheck, fakes, compile, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, masks
from flash_attn_mini.options import Sequences

from ..support.cases import make_inputs, options_of
from ..support.feature_cases import FEATURE_CASES
from ..support.op_calls import (
    ATTN_BIAS_BWD,
    BWD,
    FWD,
    PACKED_BWD,
    PACKED_FWD,
    Arguments,
    assert_fake_is_like_real,
    attn_bias_bwd_arguments,
    bwd_arguments,
    fwd_arguments,
    options_of_case,
    packed_bwd_arguments,
    packed_fwd_arguments,
)
from ..support.varlen_cases import VARLEN_CASES, Batch, VarlenCase, make_batch
from ..support.versions import TORCH

DENSE = {case.name: case for case in FEATURE_CASES}
VARLEN = {case.name: case for case in VARLEN_CASES}
VARLEN_NAMES = ["mixed", "more_and_less_causal", "all_empty", "no_sequences", "headdim_33", "layout_bhsd", "together"]

# opcheck compares eager and traced calls, which are random with dropout: these two seed before each call.
UNSEEDED = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(op: Any, arguments: Arguments, draws: bool = False) -> None:
    torch.library.opcheck(op, arguments, **({"test_utils": UNSEEDED} if draws else {}))


def wanting(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def varlen_options(case: VarlenCase, batch: Batch, backend: str, device: str) -> dict[str, Any]:
    lengths = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k, batch.block_table)
    return options_of_case(case, device, sequences=Sequences(*lengths), backend=backend)


@pytest.mark.parametrize("name", ["dropout", "together", "together_softcap", "window"])
def test_opcheck_with_features(name: str, backend: str, device: str, seed: int) -> None:
    case = DENSE[name]
    options = options_of_case(case, device, backend=backend)
    inputs = [wanting(x.clone()) for x in make_inputs(case, torch.float16, device, seed)]
    arguments = fwd_arguments(*inputs, **options)
    opcheck(FWD, arguments, case.dropout_p > 0)
    out, lse, rng_state, _ = FWD(*arguments)
    assert (rng_state is not None) == (case.dropout_p > 0)
    if rng_state is not None:  # a call that is given its state is not random
        opcheck(FWD, fwd_arguments(*inputs, rng_state=rng_state, **options))
    results = (x.detach() for x in (*inputs, out, lse))
    options = {**options, "rng_state": rng_state, "output_mask": [True, False, True]}
    opcheck(BWD, bwd_arguments(torch.randn_like(out), *results, **options))


@pytest.mark.parametrize("name", ["dropout", "together"])
def test_opcheck_of_packed_with_features(name: str, backend: str, device: str, seed: int) -> None:
    case = DENSE[name]
    options = options_of_case(case, device, backend=backend)
    q, k, v = make_inputs(case, torch.float16, device, seed)
    inputs = [wanting(q.clone()), wanting(torch.stack([k, v], dim=2))]
    arguments = packed_fwd_arguments(*inputs, **options)
    opcheck(PACKED_FWD, arguments, case.dropout_p > 0)
    out, lse, rng_state, _ = PACKED_FWD(*arguments)
    results = [x.detach() for x in (*inputs, out, lse)]
    options["rng_state"] = rng_state
    for mask in ([True, False], [False, True]):
        opcheck(PACKED_BWD, packed_bwd_arguments(torch.randn_like(out), *results, output_mask=mask, **options))


def drawn_ranges(*shape: int, keys: int, device: str, draw: torch.Generator) -> Tensor:
    return torch.randint(0, keys + 1, shape, generator=draw, dtype=torch.int32).sort(-1).values.to(device)


@pytest.mark.parametrize("shape", [(1, 1, 21, 2), (2, 4, 21, 2, 2)], ids=str)
def test_opcheck_with_key_ranges(shape: tuple[int, ...], backend: str, device: str, draw: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 21, heads, 32, generator=draw).to(device, torch.float16) for heads in (4, 2, 2))
    key_ranges = drawn_ranges(*shape, keys=21, device=device, draw=draw)
    options: dict[str, Any] = {"causal": True, "deterministic": True, "key_ranges": key_ranges, "backend": backend}
    packed = torch.stack([k, v], dim=2)
    opcheck(FWD, fwd_arguments(wanting(q), wanting(k), wanting(v), **options))
    opcheck(PACKED_FWD, packed_fwd_arguments(wanting(q), wanting(packed), **options))
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, **options))
    opcheck(BWD, bwd_arguments(torch.randn_like(out), q, k, v, out, lse, **options))
    opcheck(PACKED_BWD, packed_bwd_arguments(torch.randn_like(out), q, packed, out, lse, **options))


@pytest.mark.parametrize(
    ("of_bias", "shape"),
    [  # each dtype with a shape of its own; the other pairs are thorough
        pytest.param(of_bias, shape, marks=[pytest.mark.thorough] * (i != j))
        for i, of_bias in enumerate((torch.float16, torch.float32, torch.bool))
        for j, shape in enumerate(((1, 1, 1, 21), (2, 4, 21, 21), (1, 4, 21, 21)))
    ],
    ids=str,
)
def test_opcheck_with_attn_bias(
    shape: tuple[int, ...], of_bias: torch.dtype, backend: str, device: str, draw: torch.Generator
) -> None:
    q, k, v = (torch.randn(2, 21, heads, 32, generator=draw).to(device, torch.float16) for heads in (4, 2, 2))
    bias = torch.randn(shape, generator=draw).to(device)
    bias = bias > 0 if of_bias == torch.bool else bias.to(of_bias)
    options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": backend}
    own = bias if of_bias == torch.bool else wanting(bias)
    packed = torch.stack([k, v], dim=2)
    opcheck(FWD, fwd_arguments(wanting(q), wanting(k), wanting(v), **options, attn_bias=own))
    opcheck(PACKED_FWD, packed_fwd_arguments(wanting(q), wanting(packed), **options, attn_bias=own))
    options["attn_bias"] = bias
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, **options))
    dout = torch.randn_like(out)
    opcheck(BWD, bwd_arguments(dout, q, k, v, out, lse, **options))
    opcheck(PACKED_BWD, packed_bwd_arguments(dout, q, packed, out, lse, **options))
    if of_bias != torch.bool:
        *_, softmax_d = BWD(*bwd_arguments(dout, q, k, v, out, lse, **options))
        opcheck(ATTN_BIAS_BWD, attn_bias_bwd_arguments(dout, q, k, v, lse, softmax_d, **options))


class Biased(nn.Module):
    """Attention with a learned table of relative positions, as in T5, and a mask of padding."""

    def __init__(self, backend: str, heads: int = 4) -> None:
        super().__init__()
        self.backend = backend
        self.table = nn.Parameter(torch.randn(heads, 32, generator=torch.Generator().manual_seed(1)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        row, key = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
        bias = self.table[:, (key - row[:, None]).clamp(-16, 15) + 16][None]
        hidden = torch.zeros(segments.shape, device=q.device).masked_fill(segments == 0, -torch.inf)
        options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": self.backend}
        return flash_attn_func(q, k, v, attn_bias=bias + hidden[:, None, None], **options)


def test_attn_bias_compiles_without_graph_breaks(backend: str, device: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    layer = Biased(backend).to(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for seqlen in (20, 37, 51):
        inputs, segments = of_documents(seqlen, backend, device, draw)
        leaves = [*(wanting(x) for x in inputs), layer.table]
        results = [
            torch.autograd.grad(step(*leaves[:3], segments).square().sum(), leaves) for step in (compiled, layer)
        ]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3, "compiled again for another length"


def test_compiled_autograd_of_attn_bias(backend: str, device: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    layer = Biased(backend).to(device)
    inputs, segments = of_documents(20, backend, device, draw)
    leaves = [*(wanting(x) for x in inputs), layer.table]
    layer(*leaves[:3], segments).square().sum().backward()
    expected = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        layer(*leaves[:3], segments).square().sum().backward()
    for x, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient)


def test_attn_bias_is_exported(backend: str, device: str, draw: torch.Generator) -> None:
    layer = Biased(backend).to(device)
    inputs, segments = of_documents(20, backend, device, draw)
    dynamic = [{1: torch.export.Dim("seqlen", min=2, max=4096)}] * 4
    program = torch.export.export(layer, (*inputs, segments), dynamic_shapes=tuple(dynamic))
    inputs, segments = of_documents(37, backend, device, draw)
    torch.testing.assert_close(program.module()(*inputs, segments), layer(*inputs, segments))


@pytest.mark.parametrize("shape", [(1, 21, 2), (4, 21, 2, 2)], ids=str)
def test_opcheck_of_varlen_with_key_ranges(
    shape: tuple[int, ...], backend: str, device: str, draw: torch.Generator
) -> None:
    q, k, v = (torch.randn(21, heads, 32, generator=draw).to(device, torch.float16) for heads in (4, 2, 2))
    lengths = torch.tensor([0, 5, 5, 21], dtype=torch.int32, device=device)
    key_ranges = drawn_ranges(*shape, keys=5, device=device, draw=draw)
    options: dict[str, Any] = {"sequences": Sequences(lengths, lengths, 16, 16), "key_ranges": key_ranges}
    options.update(deterministic=True, backend=backend)
    opcheck(FWD, fwd_arguments(wanting(q), wanting(k), wanting(v), **options))
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, **options))
    opcheck(BWD, bwd_arguments(torch.randn_like(out), q, k, v, out, lse, **options))


class OfDocuments(nn.Module):
    """Attention within documents, whose ranges are built in the program."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        key_ranges = masks.documents(segment_ids=segments)
        return flash_attn_func(q, k, v, causal=True, deterministic=True, key_ranges=key_ranges, backend=self.backend)


def of_documents(seqlen: int, backend: str, device: str, draw: torch.Generator) -> tuple[list[Tensor], Tensor]:
    dtype = torch.float32 if backend == "cpu" else torch.float16
    inputs = [torch.randn(3, seqlen, n, 40, generator=draw).to(device, dtype) for n in (4, 2, 2)]
    return inputs, torch.randint(0, 2, (3, seqlen), generator=draw).to(device)


def test_key_ranges_compile_without_graph_breaks(backend: str, device: str, draw: torch.Generator) -> None:
    torch._dynamo.reset()
    layer = OfDocuments(backend)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for seqlen in (20, 37, 51):
        inputs, segments = of_documents(seqlen, backend, device, draw)
        leaves = [wanting(x) for x in inputs]
        results = [torch.autograd.grad(step(*leaves, segments).square().sum(), leaves) for step in (compiled, layer)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3, "compiled again for another length"


def test_key_ranges_are_exported(backend: str, device: str, draw: torch.Generator) -> None:
    layer = OfDocuments(backend)
    inputs, segments = of_documents(20, backend, device, draw)
    dynamic = [{1: torch.export.Dim("seqlen", min=2, max=4096)}] * 4
    program = torch.export.export(layer, (*inputs, segments), dynamic_shapes=tuple(dynamic))
    inputs, segments = of_documents(37, backend, device, draw)
    torch.testing.assert_close(program.module()(*inputs, segments), layer(*inputs, segments))


@pytest.mark.parametrize("name", [*VARLEN_NAMES, "pages_16"])
def test_opcheck_of_varlen(name: str, backend: str, device: str, seed: int) -> None:
    case = VARLEN[name]
    batch = make_batch(case, torch.float16, device, seed)
    options = varlen_options(case, batch, backend, device)
    inputs = (batch.q, batch.k, batch.v)
    arguments = fwd_arguments(*inputs, **options)
    opcheck(FWD, arguments, case.dropout_p > 0)
    if case.page_size:
        return
    out, lse, rng_state, _ = FWD(*arguments)
    options_of_backward = {**options, "rng_state": rng_state, "output_mask": [True, True, False]}
    opcheck(BWD, bwd_arguments(batch.dout, *inputs, out, lse, **options_of_backward))
    opcheck(FWD, fwd_arguments(*(wanting(x) for x in inputs), **options), case.dropout_p > 0)


@pytest.mark.parametrize("name", ["mixed", "no_sequences", "together"])
def test_opcheck_of_packed_varlen(name: str, backend: str, device: str, seed: int) -> None:
    case = VARLEN[name]
    batch = make_batch(case, torch.float16, device, seed)
    options = varlen_options(case, batch, backend, device)
    inputs = [wanting(batch.q), wanting(torch.stack([batch.k, batch.v], dim=1))]
    arguments = packed_fwd_arguments(*inputs, **options)
    opcheck(PACKED_FWD, arguments, case.dropout_p > 0)
    out, lse, rng_state, _ = PACKED_FWD(*arguments)
    results = [x.detach() for x in (*inputs, out, lse)]
    opcheck(PACKED_BWD, packed_bwd_arguments(batch.dout, *results, rng_state=rng_state, **options))


@pytest.mark.parametrize("name", [*VARLEN_NAMES, "pages_16", "dropout", "headdim_40"])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False]], ids=str)
def test_fake_varlen_results_look_like_real_ones(
    name: str, mask: list[bool], backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    case = VARLEN[name]
    batch = make_batch(case, dtype, device, seed)
    options = varlen_options(case, batch, backend, device)
    inputs = (batch.q, batch.k, batch.v)
    out, lse, rng_state, _ = assert_fake_is_like_real(FWD, fwd_arguments(*inputs, **options))
    if case.page_size:
        return
    options.update(rng_state=rng_state, output_mask=mask)
    assert_fake_is_like_real(BWD, bwd_arguments(batch.dout, *inputs, out, lse, **options))


@pytest.mark.parametrize("name", ["dropout", "dropout_no_keys", "dropout_decode", "together_misaligned"])
def test_fake_results_with_dropout_look_like_real_ones(name: str, backend: str, device: str, seed: int) -> None:
    case = DENSE[name]
    options = options_of_case(case, device, backend=backend)
    inputs = make_inputs(case, torch.float16, device, seed)
    assert_fake_is_like_real(FWD, fwd_arguments(*inputs, **options))


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]], ids=str)
@pytest.mark.parametrize("form", ["qkv", "kv"])
@pytest.mark.parametrize("is_varlen", [False, True], ids=["dense", "varlen"])
def test_fake_packed_results_look_like_real_ones(
    is_varlen: bool, form: str, mask: list[bool], backend: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """Rows of the packed tensor and of q lie apart."""
    lengths = torch.tensor([0, 5, 5, 21], dtype=torch.int32, device=device)
    sequences = Sequences(lengths, lengths, 16, 16) if is_varlen else None
    rows = (21,) if is_varlen else (2, 21)

    def spread(*shape: int) -> Tensor:
        x = torch.randn(*rows, *shape, 40, generator=draw).to(device, dtype)
        return torch.cat([x, x], dim=-1)[..., :33]

    inputs = (None, spread(3, 4)) if form == "qkv" else (spread(4), spread(2, 2))
    options: dict[str, Any] = {"sequences": sequences, "dropout_p": 0.5, "backend": backend}
    out, lse, rng_state, _ = assert_fake_is_like_real(PACKED_FWD, packed_fwd_arguments(*inputs, **options))
    options.update(rng_state=rng_state, output_mask=mask)
    assert_fake_is_like_real(PACKED_BWD, packed_bwd_arguments(torch.ones_like(out), *inputs, out, lse, **options))


class Layer(nn.Module):
    """Attention over packed sequences, and a use of the lse."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        out, lse, _ = flash_attn_varlen_func(
            q * 2,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            causal=True,
            window_size=(20, 0),
            deterministic=True,
            return_attn_probs=True,
            backend=self.backend,
        )
        return out.float().square().mean() + lse.square().mean()


def packed(lengths: tuple[int, ...], backend: str, device: str) -> tuple[list[Tensor], Tensor, int]:
    dtype = torch.float32 if backend == "cpu" else torch.float16
    q = torch.randn(sum(lengths), 4, 40, device=device).to(dtype)
    k, v = torch.randn(2, sum(lengths), 2, 40, device=device).to(dtype)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return [x.requires_grad_() for x in (q, k, v)], cu_seqlens, max(lengths)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_varlen_compiles_without_graph_breaks(dynamic: bool, backend: str, device: str) -> None:
    torch._dynamo.reset()
    layer = Layer(backend)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
    # All sizes differ: PyTorch gives equal sizes the same symbol.
    for i, lengths in enumerate([(5, 33, 17, 1, 9), (64, 3, 2, 51, 1, 1, 7), (9, 130, 4, 4, 8, 20)]):
        inputs, *rest = packed(lengths, backend, device)
        results = [torch.autograd.grad(step(*inputs, *rest), inputs) for step in (compiled, layer)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        if i == 0:
            compiled_once = counter.frame_count
    if dynamic:
        assert counter.frame_count == compiled_once


@pytest.mark.skipif(TORCH < (2, 7), reason="PyTorch 2.6 exports no symbolic integer argument")
def test_varlen_exports_with_dynamic_shapes(backend: str, device: str) -> None:
    layer = Layer(backend)
    inputs, cu_seqlens, longest = packed((5, 33, 17), backend, device)
    inputs = [x.detach() for x in inputs]
    total, batch = torch.export.Dim("total", min=2, max=4096), torch.export.Dim("batch", min=2, max=100)
    dynamic = ({0: total}, {0: total}, {0: total}, {0: batch}, torch.export.Dim.DYNAMIC)
    program = torch.export.export(layer, (*inputs, cu_seqlens, longest), dynamic_shapes=dynamic)
    assert FWD in [node.target for node in program.graph.nodes]
    inputs, cu_seqlens, longest = packed((9, 130, 4, 4, 8), backend, device)
    inputs = [x.detach() for x in inputs]
    expected = layer(*inputs, cu_seqlens, longest)
    torch.testing.assert_close(program.module()(*inputs, cu_seqlens, longest), expected)


def test_modes_and_transforms_see_varlen(backend: str, device: str) -> None:
    inputs, cu_seqlens, longest = packed((5, 33, 17), backend, device)
    layer = Layer(backend)
    expected = torch.autograd.grad(layer(*inputs, cu_seqlens, longest), inputs)
    plain = [x.detach() for x in inputs]
    gradients = torch.func.grad(lambda *x: layer(*x, cu_seqlens, longest), argnums=(0, 1, 2))(*plain)
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def test_varlen_under_autocast(backend: str, device: str) -> None:
    inputs, cu_seqlens, longest = packed((5, 33, 17), backend, device)
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attn_varlen_func(*inputs, *lengths, deterministic=True, backend=backend)
        options = {"softmax_scale": 40**-0.5, "deterministic": True, "backend": backend}
        slow = FWD(*fwd_arguments(*inputs, sequences=Sequences(*lengths), **options))[0]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, slow)
    by_hand = flash_attn_varlen_func(*(x.bfloat16() for x in inputs), *lengths, deterministic=True, backend=backend)
    for a, b in zip(
        torch.autograd.grad(out.float().square().sum(), inputs),
        torch.autograd.grad(by_hand.float().square().sum(), inputs),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_dropout_under_export_and_no_grad(backend: str, device: str) -> None:
    """The exported program draws its masks when it runs."""
    case = DENSE["dropout_half"]
    q, k, v = make_inputs(case, torch.float16, device, 0)

    class Dropping(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            from flash_attn_mini import flash_attn_func

            return flash_attn_func(q, k, v, **options_of(case, device), backend=backend)

    program = torch.export.export(Dropping(), (q, k, v)).module()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(program(q, k, v))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
