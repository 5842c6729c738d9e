"""The operators with dropout and of variable length as PyTorch's tools see them: opcheck, fakes, compile, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_mini import flash_attn_varlen_func

from .cases import make_inputs, make_slopes, options_of
from .feature_cases import FEATURE_CASES
from .varlen_cases import VARLEN_CASES, Batch, VarlenCase, make_batch

FORWARD = torch.ops.flash_attn_mini._flash_attn_forward.default
BACKWARD = torch.ops.flash_attn_mini._flash_attn_backward.default
VARLEN_FORWARD = torch.ops.flash_attn_mini._flash_attn_varlen_forward.default
VARLEN_BACKWARD = torch.ops.flash_attn_mini._flash_attn_varlen_backward.default

DENSE = {case.name: case for case in FEATURE_CASES}
VARLEN = {case.name: case for case in VARLEN_CASES}
VARLEN_NAMES = ["mixed", "more_and_less_causal", "all_empty", "no_sequences", "headdim_33", "layout_bhsd", "together"]

# opcheck compares eager and traced calls, which are random with dropout: these two seed before each call.
UNSEEDED = ("test_schema", "test_autograd_registration", "test_faketensor")


def scalars(case: Any) -> tuple[Any, ...]:
    """The arguments dropout_p to softcap."""
    left, right = case.window_size
    return (case.dropout_p, 0.125, case.causal, left, 0 if case.causal else right, case.softcap)


def varlen_arguments(
    case: VarlenCase, batch: Batch, backend: str, device: str, return_softmax: bool = False
) -> tuple[Any, ...]:
    """Arguments of the forward."""
    slopes = make_slopes(case.alibi, case.batch, case.nheads, device)
    tensors = (batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.block_table, slopes)
    return (*tensors, batch.max_seqlen_q, batch.max_seqlen_k, *scalars(case), return_softmax, False, backend)


def varlen_backward_arguments(arguments: tuple[Any, ...], dout: Tensor, mask: list[bool]) -> tuple[Any, ...]:
    """Arguments of the backward for those of the forward."""
    q, k, v, cu_q, cu_k, _block_table, slopes, *options = arguments
    out, lse, _, rng_state = VARLEN_FORWARD(*arguments)
    *options, _return_softmax, _deterministic, backend = options
    rng_state = rng_state if rng_state.numel() else None
    return (dout, q, k, v, out, lse, None, cu_q, cu_k, slopes, *options, True, rng_state, mask, backend)


@pytest.mark.parametrize("name", ["dropout", "together", "together_softcap", "window"])
def test_opcheck_with_features(name: str, backend: str, device: str, seed: int) -> None:
    case = DENSE[name]
    inputs = [x.detach().clone().requires_grad_() for x in make_inputs(case, torch.float16, device, seed)]
    slopes = make_slopes(case.alibi, case.batch, case.nheads, device)
    arguments = (*inputs, slopes, *scalars(case), case.dropout_p > 0, False, backend)
    tests = {"test_utils": UNSEEDED} if case.dropout_p else {}
    torch.library.opcheck(FORWARD, arguments, **tests)
    out, lse, _, rng_state = (x.detach() for x in FORWARD(*arguments))
    plain = [x.detach() for x in inputs]
    rng_state = rng_state if case.dropout_p else None
    backward = (torch.randn_like(out), *plain, out, lse, None, slopes, *scalars(case), True, rng_state)
    torch.library.opcheck(BACKWARD, (*backward, [True, False, True], backend))


@pytest.mark.parametrize("name", [*VARLEN_NAMES, "pages_16"])
def test_opcheck_of_varlen(name: str, backend: str, device: str, seed: int) -> None:
    case = VARLEN[name]
    batch = make_batch(case, torch.float16, device, seed)
    arguments = varlen_arguments(case, batch, backend, device)
    tests = {"test_utils": UNSEEDED} if case.dropout_p else {}
    torch.library.opcheck(VARLEN_FORWARD, arguments, **tests)
    if case.page_size:
        return
    torch.library.opcheck(VARLEN_BACKWARD, varlen_backward_arguments(arguments, batch.dout, [True, True, False]))
    wanting = [x.detach().requires_grad_() for x in arguments[:3]]
    torch.library.opcheck(VARLEN_FORWARD, (*wanting, *arguments[3:]), **tests)


def assert_alike(real: tuple[Tensor, ...], fake: tuple[Tensor, ...]) -> None:
    for i, (r, f) in enumerate(zip(real, fake, strict=True)):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device), i


def as_fake(mode: FakeTensorMode, arguments: tuple[Any, ...]) -> list[Any]:
    return [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]


@pytest.mark.parametrize("name", [*VARLEN_NAMES, "pages_16", "dropout", "headdim_40"])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False]], ids=str)
def test_fake_varlen_results_look_like_real_ones(
    name: str, mask: list[bool], backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    case = VARLEN[name]
    batch = make_batch(case, dtype, device, seed)
    arguments = varlen_arguments(case, batch, backend, device, return_softmax=True)
    with FakeTensorMode() as mode:
        fake = VARLEN_FORWARD(*as_fake(mode, arguments))
    assert_alike(VARLEN_FORWARD(*arguments), fake)
    if case.page_size:
        return
    arguments = varlen_backward_arguments(arguments, batch.dout, mask)
    with FakeTensorMode() as mode:
        fake = VARLEN_BACKWARD(*as_fake(mode, arguments))
    assert_alike(VARLEN_BACKWARD(*arguments), fake)


@pytest.mark.parametrize("return_softmax", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout_no_keys", "dropout_decode", "together_misaligned"])
def test_fake_results_with_dropout_look_like_real_ones(
    name: str, return_softmax: bool, backend: str, device: str, seed: int
) -> None:
    case = DENSE[name]
    slopes = make_slopes(case.alibi, case.batch, case.nheads, device)
    inputs = make_inputs(case, torch.float16, device, seed)
    arguments = (*inputs, slopes, *scalars(case), return_softmax, False, backend)
    with FakeTensorMode() as mode:
        fake = FORWARD(*as_fake(mode, arguments))
    assert_alike(FORWARD(*arguments), fake)


def test_varlen_signatures_are_stable() -> None:
    """Exported programs carry these schemas: a change of them breaks them."""
    forward, backward = VARLEN_FORWARD._schema, VARLEN_BACKWARD._schema
    options = [
        "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "causal", "window_size_left",
        "window_size_right", "softcap",
    ]  # fmt: skip
    assert [argument.name for argument in forward.arguments] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes", *options, "return_softmax",
        "deterministic", "backend",
    ]  # fmt: skip
    assert [argument.name for argument in backward.arguments] == [
        "dout", "q", "k", "v", "out", "softmax_lse", "dsoftmax_lse", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes",
        *options, "deterministic", "rng_state", "output_mask", "backend", "block_table",
    ]  # fmt: skip
    assert [result.name for result in forward.returns] == ["out", "softmax_lse", "S_dmask", "rng_state"]
    assert [result.name for result in backward.returns] == ["dq", "dk", "dv", "softmax_d"]
    assert not forward.is_mutable
    assert not backward.is_mutable


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


def test_varlen_exports_with_dynamic_shapes(backend: str, device: str) -> None:
    layer = Layer(backend)
    inputs, cu_seqlens, longest = packed((5, 33, 17), backend, device)
    inputs = [x.detach() for x in inputs]
    total, batch = torch.export.Dim("total", min=2, max=4096), torch.export.Dim("batch", min=2, max=100)
    dynamic = ({0: total}, {0: total}, {0: total}, {0: batch}, torch.export.Dim.DYNAMIC)
    program = torch.export.export(layer, (*inputs, cu_seqlens, longest), dynamic_shapes=dynamic)
    assert VARLEN_FORWARD in [node.target for node in program.graph.nodes]
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
        slow = VARLEN_FORWARD(
            *inputs, cu_seqlens, cu_seqlens, None, None, longest, longest, 0.0, 40**-0.5, False, -1, -1, 0.0, False,
            True, backend,
        )[0]  # fmt: skip
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
