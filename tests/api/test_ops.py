"""The custom op as PyTorch's tools see it: opcheck, the fake implementation, torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from flash_attn_mini import flash_attn_func, use_backend
from flash_attn_mini.options import ROWS_MULTIPLE, Options, Sequences

from ..support.cases import FORWARD_CASES, Case, make_inputs
from ..support.op_calls import (
    BWD,
    FWD,
    PACKED_BWD,
    PACKED_FWD,
    argument_names,
    assert_fake_is_like_real,
    bwd_arguments,
    fwd_arguments,
    packed_fwd_arguments,
    result_names,
)

BY_NAME = {case.name: case for case in FORWARD_CASES}
CASES = [
    BY_NAME[n]
    for n in (
        "gqa_3_causal", "masked_rows", "no_keys", "no_queries", "no_batch", "decode", "headdim_33", "layout_bhsd",
        "layout_sbhd", "layout_packed_qkv", "layout_padded_dim", "layout_misaligned", "layout_expanded",
        "layout_expanded_heads", "layout_strided_rows",
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_opcheck(case: Case, backend: str, device: str, seed: int) -> None:
    q, k, v = (x.clone() for x in make_inputs(case, torch.float16, device, seed))
    torch.library.opcheck(FWD, fwd_arguments(q, k, v, causal=case.causal, backend=backend))
    kv = torch.stack([k, v], dim=2)
    torch.library.opcheck(PACKED_FWD, packed_fwd_arguments(q, kv, causal=case.causal, backend=backend))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_results_look_like_real_ones(case: Case, backend: str, device: str, dtype: torch.dtype, seed: int) -> None:
    inputs = make_inputs(case, dtype, device, seed)
    assert_fake_is_like_real(FWD, fwd_arguments(*inputs, causal=case.causal, backend=backend))


@pytest.mark.parametrize("rows", [1, ROWS_MULTIPLE, ROWS_MULTIPLE + 1])
def test_rows_are_rounded_as_the_extension_rounds_them(rows: int, backend: str, device: str) -> None:
    """ROWS_MULTIPLE of Python is kRowsRounded of csrc/flash.h."""
    x, lse = torch.zeros(1, rows, 1, 8, device=device).half(), torch.zeros(1, 1, rows, device=device)
    *_, softmax_d = BWD(*bwd_arguments(x, x, x, x, x, lse, backend=backend))
    assert softmax_d.shape == (1, 1, -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE)


# ---- schemas: exported programs carry them, a change of them breaks the programs ------------------------------------

LENGTHS_AND_OPTIONS = [*Sequences._fields, *Options._fields]


def test_the_fields_in_the_schemas_are_stable() -> None:
    """The lists of csrc/api/options.h and of flash_attn_mini/options.py."""
    assert argument_names(FWD)[3:-1] == LENGTHS_AND_OPTIONS
    assert LENGTHS_AND_OPTIONS == [
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table", "dropout_p", "softmax_scale",
        "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic", "backend",
        "learnable_sink", "key_ranges", "attn_bias", "return_max_logits",
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs"), [(FWD, ["q", "k", "v"]), (PACKED_FWD, ["q", "packed"])], ids=str)
def test_forward_signature_is_stable(op: Any, inputs: list[str]) -> None:
    assert argument_names(op) == [*inputs, *LENGTHS_AND_OPTIONS, "rng_state"]
    assert result_names(op) == ["out", "softmax_lse", "rng_state", "max_logits"]
    assert not op._schema.is_mutable


@pytest.mark.parametrize(
    ("op", "inputs", "gradients"),
    [(BWD, ["q", "k", "v"], ["dq", "dk", "dv"]), (PACKED_BWD, ["q", "packed"], ["dq", "dpacked"])],
    ids=str,
)
def test_backward_signature_is_stable(op: Any, inputs: list[str], gradients: list[str]) -> None:
    results = ["out", "softmax_lse", "dsoftmax_lse"]
    assert argument_names(op) == ["dout", *inputs, *results, *LENGTHS_AND_OPTIONS, "rng_state", "output_mask"]
    assert result_names(op) == [*gradients, "softmax_d"]
    assert not op._schema.is_mutable


@pytest.mark.parametrize("op", [FWD, BWD, PACKED_FWD, PACKED_BWD], ids=str)
def test_no_argument_has_a_default(op: Any) -> None:
    """A call spells out the whole value: an argument that a caller forgets is an error."""
    assert not any(argument.has_default_value() for argument in op._schema.arguments)


# ---- compilers and transforms ---------------------------------------------------------------------------------------


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
    """A call that was compiled for one backend is compiled again for another."""
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
    assert "flash_attn_mini.fwd.default" in targets
    for sizes in SIZES:
        args = inputs(*sizes, device)
        for a, b in zip(program.module()(*args), layer(*args), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["one_for_all", "of_each_sample"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (1, 4)], ids=str)
def test_vmap_of_key_ranges(
    sizes: tuple[int, int], is_mapped: bool, backend: str, device: str, draw: torch.Generator
) -> None:
    q = torch.randn(3, 2, 9, 4, 16, generator=draw).half().to(device)
    ranges = torch.randint(0, 10, (3, *sizes, 9, 2), generator=draw).int().to(device)
    dims = (0, 0) if is_mapped else (0, None)

    def run(q: Tensor, ranges: Tensor) -> Tensor:
        return flash_attn_func(q, q, q, key_ranges=ranges, backend=backend)

    expected = torch.stack([run(x, ranges[i if is_mapped else 0]) for i, x in enumerate(q)])
    assert torch.equal(torch.vmap(run, dims)(q, ranges if is_mapped else ranges[0]), expected)


def test_vmap_keeps_samples_apart(backend: str, device: str) -> None:
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


def test_forward_mode_differentiation_raises() -> None:
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: flash_attn_func(t, t, t), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_attn_func(dual, x, x)


@pytest.mark.parametrize("stand_ins", [("dout",), ("dout", "dsoftmax_lse")], ids="-".join)
def test_the_fake_backward_takes_the_stand_ins_of_compiled_autograd(stand_ins: tuple[str, ...]) -> None:
    """Compiled autograd traces with empty tensors on the CPU in place of the gradients that arrive."""
    q = torch.empty(1, 4, 2, 16, device="meta")
    given = {"dout": q, "dsoftmax_lse": torch.empty(1, 2, 4, device="meta")}
    given.update((name, torch.zeros(0, 123456789)) for name in stand_ins)
    lse = torch.empty(1, 2, 4, device="meta")
    arguments = bwd_arguments(given["dout"], q, q, q, q, lse, dsoftmax_lse=given["dsoftmax_lse"])
    assert [x.shape for x in BWD(*arguments)[:3]] == [q.shape] * 3
    wrong = bwd_arguments(torch.zeros(1, 4, 2, 16), q, q, q, q, lse)
    with pytest.raises(ValueError, match="dout is on cpu; allowed: the device of q, meta"):
        BWD(*wrong)
