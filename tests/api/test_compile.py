"""Training as PyTorch's compilers see it: opcheck of both operators, torch.compile of a block, export, fake results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from flash_attn_mini import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)

from ..support.cases import SMALL_FORWARD_CASES, Case, make_dlse, make_dout, make_inputs
from ..support.op_calls import BWD, FWD, assert_fake_is_like_real, bwd_arguments, fwd_arguments
from ..support.small_attention import qkv

CASES = [c for c in SMALL_FORWARD_CASES if c.values == "normal"]  # shapes and layouts; a compiler does not see values
BY_NAME = {c.name: c for c in CASES}


def kind_of_trace(case: Case) -> tuple[Any, ...]:
    """What a trace with symbolic sizes depends on: sizes of 0 and 1 are constants, and equal sizes are one symbol."""
    sizes = (case.batch, case.nheads, case.nheads_k, case.seqlen_q, case.seqlen_k, case.headdim)
    return case.layout, case.causal, tuple(size if size < 2 else f"size {sizes.index(size)}" for size in sizes)


TRACED = {kind_of_trace(case): case for case in reversed(CASES)}.values()  # the first case of each kind

FIRST = {(c.layout, c.causal, 0 in (c.seqlen_q, c.seqlen_k)): c for c in reversed(CASES)}.values()
each_case = pytest.mark.parametrize(
    "case", [case if case in FIRST else pytest.param(case, marks=pytest.mark.thorough) for case in CASES], ids=str
)


def opcheck(operator: Any, arguments: tuple[Any, ...], case: Case) -> None:
    """torch.library.opcheck. Its trace with symbolic sizes takes half a second, so one case of each kind has it."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(operator, arguments, test_utils=tests + ["test_aot_dispatch_dynamic"] * (case in TRACED))


def backward_arguments(
    case: Case, dtype: torch.dtype, device: str, seed: int, backend: str, with_lse: bool, mask: list[bool]
) -> tuple[Any, ...]:
    q, k, v = make_inputs(case, dtype, device, seed)
    options: dict[str, Any] = {"causal": case.causal, "deterministic": True, "backend": backend}
    out, lse, *_ = FWD(*fwd_arguments(q, k, v, **options))
    dlse = make_dlse(case, dtype, device, seed) if with_lse else None
    dout = make_dout(case, dtype, device, seed)
    return bwd_arguments(dout, q, k, v, out, lse, dsoftmax_lse=dlse, output_mask=mask, **options)


@each_case
def test_opcheck_of_a_forward_that_needs_gradients(case: Case, backend: str, device: str, seed: int) -> None:
    inputs = [x.detach().requires_grad_() for x in make_inputs(case, torch.float16, device, seed)]
    opcheck(FWD, fwd_arguments(*inputs, causal=case.causal, deterministic=True, backend=backend), case)


@each_case
def test_opcheck_of_the_backward(case: Case, backend: str, device: str, seed: int) -> None:
    mask = [case.seqlen_q % 2 == 0, True, case.seqlen_k % 2 == 0]
    arguments = backward_arguments(case, torch.float16, device, seed, backend, case.causal, mask)
    opcheck(BWD, arguments, case)


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]], ids=str)
@pytest.mark.parametrize("name", ["mqa", "no_keys", "no_queries", "headdim_33", "layout_bhsd", "layout_sbhd"])
def test_fake_gradients_look_like_real_ones(
    name: str, mask: list[bool], backend: str, device: str, dtype: torch.dtype, seed: int
) -> None:
    arguments = backward_arguments(BY_NAME[name], dtype, device, seed, backend, False, mask)
    assert_fake_is_like_real(BWD, arguments)


# ---- a transformer block ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention (grouped heads) and MLP."""

    def __init__(self, backend: str | None, width: int = 48, heads: int = 4, heads_k: int = 2) -> None:
        super().__init__()
        self.backend, self.heads, self.heads_k, self.headdim = backend, heads, heads_k, width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_q = nn.Linear(width, width)
        self.project_kv = nn.Linear(width, 2 * heads_k * self.headdim)
        self.project_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q = self.project_q(y).unflatten(-1, (self.heads, self.headdim))
        k, v = self.project_kv(y).unflatten(-1, (2, self.heads_k, self.headdim)).unbind(2)
        attended = flash_attn_func(q, k, v, causal=True, deterministic=True, backend=self.backend)
        x = x + self.project_out(attended.flatten(2))
        return x + self.mlp(self.norm_2(x))


def block_dtype(backend: str) -> torch.dtype:
    return torch.float32 if backend == "cpu" else torch.bfloat16


def train(
    block: nn.Module,
    step: Callable[[Tensor], Tensor],
    device: str,
    dtype: torch.dtype,
    steps: int = 5,
    width: int = 48,
) -> list[float]:
    """The losses of a few steps towards a fixed target."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 3, 37, width, generator=generator).to(device, dtype).unbind()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(step(x).float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_block(backend: str | None, device: str, dtype: torch.dtype, width: int = 48) -> Block:
    torch.manual_seed(0)
    return Block(backend, width).to(device, dtype)


@pytest.mark.parametrize("width", [48, pytest.param(256, marks=pytest.mark.gpu)])  # 256: head dim 64, Hopper's kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_block_trains_without_graph_breaks_as_eager_does(
    dynamic: bool, width: int, backend: str, device: str
) -> None:
    torch._dynamo.reset()
    dtype = block_dtype(backend)
    eager, compiled = (new_block(backend, device, dtype, width) for _ in range(2))
    run = torch.compile(compiled, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    losses = train(compiled, run, device, dtype, width=width)
    assert losses == train(eager, eager, device, dtype, width=width)
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.backends("cuda", "triton")
def test_inductor_trains_the_block_as_eager_does(backend: str, device: str) -> None:
    torch._dynamo.reset()
    dtype = block_dtype(backend)
    eager, compiled = (new_block(backend, device, dtype) for _ in range(2))
    losses = train(compiled, torch.compile(compiled, fullgraph=True), device, dtype)
    assert losses == pytest.approx(train(eager, eager, device, dtype), rel=3e-2)
    assert losses[-1] < losses[0]


def test_compiled_block_trains_under_autocast(backend: str, device: str) -> None:
    torch._dynamo.reset()

    def under_autocast(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return block(x)

        return step

    eager, compiled = (new_block(backend, device, torch.float32) for _ in range(2))
    run = torch.compile(under_autocast(compiled), fullgraph=True, backend="aot_eager")
    losses = train(compiled, run, device, torch.float32)
    # The compiler keeps some casts in float32 that eager rounds.
    assert losses == pytest.approx(train(eager, under_autocast(eager), device, torch.float32), rel=2e-2)


def test_other_lengths_neither_recompile_nor_differ(backend: str, device: str) -> None:
    torch._dynamo.reset()
    dtype = block_dtype(backend)
    block = new_block(backend, device, dtype)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for i, (batch, length) in enumerate([(3, 37), (5, 20), (2, 131)]):
        x = torch.randn(batch, length, 48, device=device, dtype=dtype)
        gradients = []
        for step in (run, block):
            block.zero_grad()
            step(x).square().mean().backward()
            gradients.append([p.grad.clone() for p in block.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
        if i == 0:
            compiled_once = counter.frame_count
    assert counter.frame_count == compiled_once


class WithLse(nn.Module):
    """A loss on out and one on the lse, as in z-loss regularisation."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, deterministic=True, backend=self.backend)
        return out.float().square().mean() + 0.1 * lse.square().mean()


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)], ids=["qkv", "k"])
def test_compiled_gradients_through_the_lse(wanted: tuple[bool, ...], backend: str, device: str, seed: int) -> None:
    torch._dynamo.reset()
    module = WithLse(backend)
    inputs = make_inputs(BY_NAME["mqa"], torch.float16, device, seed)
    leaves = [x.contiguous().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    asked = [x for x in leaves if x.requires_grad]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves), asked), torch.autograd.grad(module(*leaves), asked), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Error detected in FlashAttnBackward")
@pytest.mark.parametrize("is_varlen", [False, True], ids=["dense", "varlen"])
def test_a_gradient_of_the_slopes_is_refused(is_varlen: bool, backend: str, device: str) -> None:
    """alibi_slopes have no gradient: to ask for it raises, eager or compiled. To ask only for that of q does not."""
    torch._dynamo.reset()
    q, k, v = (x[:1] for x in qkv(device, requires_grad=False))
    slopes = torch.rand(4, device=device).requires_grad_()
    lengths = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in (9, 13)]

    def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        if is_varlen:
            rows = (x[0] for x in (q, k, v))
            return flash_attn_varlen_func(*rows, *lengths, 9, 13, alibi_slopes=slopes, deterministic=True)
        return flash_attn_func(q, k, v, alibi_slopes=slopes, deterministic=True)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    refused = "alibi_slopes requires a gradient, which is not supported"
    with use_backend(backend):
        for run in (attention, compiled):
            q.requires_grad_()
            (expected,) = torch.autograd.grad(run(q, k, v, slopes.detach()).sum(), q)
            q.requires_grad_(False)
            with pytest.raises((NotImplementedError, RuntimeError), match=refused):
                run(q, k, v, slopes).sum().backward()
            with torch.no_grad():
                assert torch.equal(run(q, k, v, slopes), run(q, k, v, slopes.detach()))
        out = attention(q.requires_grad_(), k, v, slopes)
        (dq,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        assert torch.equal(dq, expected)
        with pytest.raises(NotImplementedError, match=refused):
            torch.autograd.grad(out.sum(), (q, slopes))


@pytest.mark.parametrize("form", ["item", "0-d tensor"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_lengths_that_a_tensor_holds_are_compiled(form: str, backend: str, device: str) -> None:
    """The program knows max_seqlen, cache_seqlens and the window when it runs, and not when it is traced."""
    torch._dynamo.reset()
    q, k, v = qkv(device, requires_grad=False)
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)

    def number(x: Tensor) -> Any:
        return x.item() if form == "item" else x

    def attend(lengths: Tensor) -> tuple[Tensor, ...]:
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = number(lengths.max())
        rows = [x[0, :8] for x in (q, k, v)]
        varlen = flash_attn_varlen_func(*rows, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        window = flash_attn_func(q, k, v, window_size=(longest, number(lengths.min())))
        decoded = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=longest)
        return varlen, window, decoded

    with use_backend(backend):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for values in (lengths, lengths.flip(0), lengths.new_tensor([1, 7])):
            assert all(torch.equal(a, b) for a, b in zip(compiled(values), attend(values), strict=True))
        if form == "item":
            decode = torch.compile(
                lambda n: flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=n.item()),
                fullgraph=True,
                backend="aot_eager",
            )
            with pytest.raises(RuntimeError):
                decode(torch.tensor(-1, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "varlen", pytest.param("packed", marks=pytest.mark.thorough)])
def test_compiled_autograd_gives_the_gradients_of_eager_autograd(form: str, backend: str, device: str) -> None:
    """The backward is compiled from the nodes of the graph. Calls that differ in an option are not the same program."""
    torch._dynamo.reset()
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    q, k, v = (x[:, :9] for x in qkv(device, requires_grad=False))

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        options = {**options, "deterministic": True, "backend": backend}
        if form == "dense":
            return flash_attn_func(q, k, v, **options)
        if form == "packed":
            return flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options)
        return flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 5, 5, **options)

    def gradients(is_compiled: bool, **options: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(1)
        total = attention(*leaves, **options).float().square().sum()
        compiler = torch.compile(backend="aot_eager")
        with compiled_autograd._enable(compiler) if is_compiled else contextlib.nullcontext():
            total.backward()
        return tuple(x.grad for x in leaves)

    slopes = torch.rand(4, device=device)
    for options in (
        {"causal": True},
        {"causal": True, "softmax_scale": 0.4},
        {"dropout_p": 0.3, "alibi_slopes": slopes},
        {"dropout_p": 0.3, "alibi_slopes": slopes.flip(0)},
    ):
        for got, expected in zip(gradients(True, **options), gradients(False, **options), strict=True):
            assert torch.equal(got, expected), options


# ---- which backend a compiled training step takes -----------------------------------------------------------------


def test_training_step_compiled_under_use_backend_keeps_its_backend(backend: str, device: str) -> None:
    """Forward and backward run on the same backend; in a block with another name the step is compiled for that one."""
    torch._dynamo.reset()
    dtype = block_dtype(backend)
    eager, compiled = (new_block(None, device, dtype) for _ in range(2))
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    with use_backend(backend):
        expected = train(eager, eager, device, dtype)
        assert train(compiled, run, device, dtype) == expected
    x = torch.randn(3, 37, 48, device=device, dtype=dtype)
    run(x).sum().backward()
    other = "cuda" if backend != "cuda" else "triton"
    with use_backend(other):
        if device == "cpu":
            with pytest.raises(RuntimeError, match=rf"backend '{other}'.*cannot run on cpu"):
                run(x)
        else:
            assert torch.equal(run(x), compiled(x))


# ---- export -------------------------------------------------------------------------------------------------------


def test_exported_block_trains(backend: str, device: str) -> None:
    dtype = block_dtype(backend)
    eager, source = (new_block(backend, device, dtype) for _ in range(2))
    x = torch.randn(3, 37, 48, device=device, dtype=dtype)
    batch, length = (torch.export.Dim(n, min=2, max=512) for n in ("batch", "length"))
    program = torch.export.export(source, (x,), dynamic_shapes=({0: batch, 1: length},))
    assert FWD in [node.target for node in program.graph.nodes]
    module = program.module()
    assert train(module, module, device, dtype) == train(eager, eager, device, dtype)
    assert module(x[:2, :9]).shape == (2, 9, 48)
