"""The custom op as PyTorch's tools see it: opcheck, the fake implementation, torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_mini import flash_attn_func, use_backend
from flash_attn_mini.options import ROWS_MULTIPLE

from .cases import FORWARD_CASES, Case, make_inputs

BY_NAME = {case.name: case for case in FORWARD_CASES}
CASES = [
    BY_NAME[n]
    for n in (
        "gqa_3_causal", "masked_rows", "no_keys", "no_queries", "no_batch", "decode", "headdim_33", "layout_bhsd",
        "layout_sbhd", "layout_packed_qkv", "layout_padded_dim", "layout_misaligned", "layout_expanded",
        "layout_expanded_heads", "layout_strided_rows",
    )
]  # fmt: skip


def arguments(case: Case, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> tuple[Any, ...]:
    right = 0 if case.causal else -1
    return (q, k, v, None, 0.0, 0.125, case.causal, -1, right, 0.0, False, False, backend)


@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_opcheck(case: Case, backend: str, device: str, seed: int) -> None:
    q, k, v = (x.clone() for x in make_inputs(case, torch.float16, device, seed))
    operator = torch.ops.flash_attn_mini._flash_attn_forward.default
    torch.library.opcheck(operator, arguments(case, q, k, v, backend))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_results_look_like_real_ones(case: Case, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    q, k, v = make_inputs(case, dtype, device, seed)
    operator = torch.ops.flash_attn_mini._flash_attn_forward.default
    real = operator(*arguments(case, q, k, v, backend))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = operator(*arguments(case, *fakes, backend))
    for name, r, f in zip(("out", "softmax_lse", "S_dmask", "rng_state"), real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device), name


@pytest.mark.parametrize("rows", [1, ROWS_MULTIPLE, ROWS_MULTIPLE + 1])
def test_rows_are_rounded_as_the_extension_rounds_them(rows: int, backend: str, device: str) -> None:
    """ROWS_MULTIPLE of Python is kRowsRounded of csrc/flash.h."""
    x, lse = torch.zeros(1, rows, 1, 8, device=device).half(), torch.zeros(1, 1, rows, device=device)
    operator = torch.ops.flash_attn_mini._flash_attn_backward.default
    arguments = (x, x, x, x, x, lse, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None, [True] * 3, backend)
    assert operator(*arguments)[3].shape == (1, 1, -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def test_operator_signature_is_stable() -> None:
    """Exported programs carry this schema: a change of it breaks them."""
    schema = torch.ops.flash_attn_mini._flash_attn_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == [
        "q", "k", "v", "alibi_slopes", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right",
        "softcap", "return_softmax", "deterministic", "backend",
    ]  # fmt: skip
    assert [result.name for result in schema.returns] == ["out", "softmax_lse", "S_dmask", "rng_state"]
    assert not schema.is_mutable


class Layer(torch.nn.Module):
    """Code that a user compiles: operators before and after the attention, and a use of the lse."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True, backend=self.backend)
        return out + 1, lse.exp()


def inputs(batch: int, seqlen_q: int, seqlen_k: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, seqlen_q, 4, 40, device=device).half()
    k, v = torch.randn(2, batch, seqlen_k, 2, 40, device=device).half()
    return q, k, v


SIZES = [(2, 33, 33), (2, 17, 50), (3, 50, 17), (4, 65, 66)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_graph_breaks(dynamic: bool, backend: str, device: str) -> None:
    torch._dynamo.reset()
    layer = Layer(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for sizes in SIZES if dynamic else SIZES[:2]:
        args = inputs(*sizes, device)
        for a, b in zip(compiled(*args), layer(*args), strict=True):
            assert torch.equal(a, b)


def test_dynamic_shapes_do_not_recompile(backend: str, device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Layer(backend), fullgraph=True, dynamic=True, backend=counter)
    compiled(*inputs(5, 33, 50, device))  # all sizes differ: PyTorch gives equal sizes the same symbol
    compiled_once = counter.frame_count
    for sizes in ((5, 17, 51), (6, 53, 19), (7, 65, 66)):
        compiled(*inputs(*sizes, device))
    assert counter.frame_count == compiled_once


@pytest.mark.gpu
@pytest.mark.slow
def test_inductor_compiles_it(backend: str, device: str) -> None:
    torch._dynamo.reset()
    layer = Layer(backend)
    compiled = torch.compile(layer, fullgraph=True)
    args = inputs(2, 129, 129, device)
    for a, b in zip(compiled(*args), layer(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_compiled_call_obeys_use_backend(device: str, backend: str) -> None:
    """The backend is chosen when the op runs, not when it was traced."""
    torch._dynamo.reset()

    def call(q: Tensor) -> Tensor:
        return flash_attn_func(q, q, q)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 9, 2, 16, device=device).half()
    with use_backend(backend):
        expected = flash_attn_func(q, q, q)
        assert torch.equal(compiled(q), expected)
    if device == "cpu":
        with use_backend("cuda"), pytest.raises(RuntimeError, match="'cuda'"):
            compiled(q)


def test_export_with_dynamic_shapes(backend: str, device: str) -> None:
    layer = Layer(backend)
    batch, seqlen_q, seqlen_k = (torch.export.Dim(n, min=1, max=4096) for n in ("batch", "seqlen_q", "seqlen_k"))
    of_k = {0: batch, 1: seqlen_k}
    program = torch.export.export(
        layer, inputs(2, 33, 50, device), dynamic_shapes=({0: batch, 1: seqlen_q}, of_k, of_k)
    )
    targets = {str(node.target) for node in program.graph.nodes}
    assert "flash_attn_mini._flash_attn_forward.default" in targets
    for sizes in SIZES:
        args = inputs(*sizes, device)
        for a, b in zip(program.module()(*args), layer(*args), strict=True):
            assert torch.equal(a, b)


def test_vmap_keeps_samples_apart(backend: str, device: str) -> None:
    """There is no batching rule: PyTorch loops over the samples."""
    q = torch.randn(3, 2, 9, 2, 16, device=device).half()
    expected = torch.stack([flash_attn_func(x, x, x, backend=backend) for x in q])
    assert torch.equal(torch.vmap(lambda x: flash_attn_func(x, x, x, backend=backend))(q), expected)


def test_a_traced_module_holds_the_operator() -> None:
    q = torch.randn(1, 5, 2, 8)
    traced = torch.jit.trace(lambda x: flash_attn_func(x, x, x), (q,), check_trace=False)
    other = torch.randn(1, 5, 2, 8)
    torch.testing.assert_close(traced(other), flash_attn_func(other, other, other))


def test_a_negated_view_is_read_as_such() -> None:
    x = torch.randn(1, 6, 2, 16)
    negated = torch._neg_view(x)
    expected = flash_attn_func(-x, x, -x)
    torch.testing.assert_close(flash_attn_func(negated, x, negated), expected)
    from flash_attn_mini import _C

    raw = _C.fwd(negated, x, negated, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    torch.testing.assert_close(raw[0], expected)


def test_forward_mode_differentiation_says_that_it_is_not_there() -> None:
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: flash_attn_func(t, t, t), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_attn_func(dual, x, x)
