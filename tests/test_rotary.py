"""apply_rotary_emb against the reference: every layout, offset and pairing; gradients; compiled; and wrong calls.

On a GPU the Triton kernel runs. Elsewhere PyTorch's operators do, and the kernel in Triton's interpreter, which has to
be switched on before Triton is imported: in a process of its own, started by the first test below.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini.layers import rotary_op
from flash_attn_mini.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn_mini.reference import apply_rotary_reference

from .interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LENGTHS = [7, 0, 20, 1, 33]
CU_SEQLENS = [0, *itertools.accumulate(LENGTHS)]

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
each_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@pytest.fixture(autouse=True)
def _in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        from flash_attn_mini.layers import rotary_triton

        monkeypatch.setattr(rotary_op, "rotate_by_torch", rotary_triton.rotate)


@pytest.mark.slow
@starts_the_interpreter
def test_all_of_this_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def table(rows: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2, device=DEVICE) / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(rows, device=DEVICE).float(), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def expected(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | list[int] = 0,
    lengths: list[int] | None = None,
) -> Tensor:
    """The reference, one sequence after the other."""
    sequences = list(x) if lengths is None else list(x.split(lengths))
    if isinstance(offsets, int):
        offsets = [offsets] * len(sequences)
    rotated = [
        apply_rotary_reference(
            one, cos, sin, torch.arange(one.shape[0], device=x.device) + offset, interleaved=interleaved
        )
        for one, offset in zip(sequences, offsets, strict=True)
    ]
    return torch.stack(rotated) if lengths is None else torch.cat(rotated)


def assert_close(actual: Tensor, reference: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), reference.double(), rtol=tolerance, atol=tolerance)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@each_pairing
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        ((2, 20, 3, 16), 16),  # whole heads
        ((2, 20, 3, 16), 8),  # partial
        ((1, 5, 1, 22), 14),  # no powers of two
        ((2, 1, 9, 64), 64),  # one token, as when decoding
        ((1, 3, 2, 8), 2),  # a single pair
        ((2, 3, 2, 8), 0),  # nothing
    ],
    ids=str,
)
def test_matches_the_reference(shape: tuple[int, ...], rotary_dim: int, dtype: torch.dtype, interleaved: bool) -> None:
    x = draw(*shape, dtype=dtype)
    before = x.clone()
    cos, sin = table(24, rotary_dim, dtype)
    out = apply_rotary_emb(x, cos, sin, interleaved)
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert torch.equal(x, before)
    assert_close(out, expected(x, cos, sin, interleaved))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@each_pairing
@pytest.mark.parametrize("offsets", [5, [0, 7, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets(offsets: int | list[int], dtype: torch.dtype, interleaved: bool) -> None:
    x = draw(3, 10, 2, 16)
    cos, sin = table(17, 12)
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets, dtype=dtype, device=DEVICE)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    assert_close(out, expected(x, cos, sin, interleaved, offsets))


@each_pairing
@pytest.mark.parametrize("offsets", [0, 4, [3, 0, 7, 1, 2]], ids=str)
def test_sequences_of_different_lengths(offsets: int | list[int], interleaved: bool) -> None:
    x = draw(sum(LENGTHS), 2, 16)
    cos, sin = table(40, 12)
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets, device=DEVICE)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=DEVICE)
    out = apply_rotary_emb(x, cos, sin, interleaved, False, given, cu_seqlens, max(LENGTHS))
    assert_close(out, expected(x, cos, sin, interleaved, offsets, LENGTHS))


@pytest.mark.parametrize("lengths", [[9], [0, 0, 9], [9, 0], [1] * 40], ids=str)
def test_unusual_batches_of_different_lengths(lengths: list[int]) -> None:
    x = draw(sum(lengths), 2, 8)
    cos, sin = table(9, 8)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    assert_close(apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens), expected(x, cos, sin, False, 0, lengths))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    assert apply_rotary_emb(draw(*shape), *table(5, 8)).shape == shape
    x, cu_seqlens = draw(0, 2, 8), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert apply_rotary_emb(x, *table(0, 8), cu_seqlens=cu_seqlens).shape == x.shape


@each_pairing
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_any_strides(rotary_dim: int, interleaved: bool) -> None:
    cos, sin = (t.mT.contiguous().mT for t in table(12, rotary_dim))
    x = draw(16, 12, 3, 2).permute(3, 1, 2, 0)
    assert_close(apply_rotary_emb(x, cos, sin, interleaved), expected(x, cos, sin, interleaved))
    within = draw(2, 12, 3, 40)
    rest = within[..., 16:].clone()
    wanted = expected(within[..., :16], cos, sin, interleaved)
    assert_close(apply_rotary_emb(within[..., :16], cos, sin, interleaved, inplace=True), wanted)
    assert torch.equal(within[..., 16:], rest)


@each_pairing
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_in_place(wants_gradient: bool, interleaved: bool) -> None:
    leaf = draw(2, 6, 2, 8).requires_grad_(wants_gradient)
    x = leaf * 1
    wanted = expected(x.detach(), *table(6, 6), interleaved)
    out = apply_rotary_emb(x, *table(6, 6), interleaved, inplace=True)
    assert out.data_ptr() == x.data_ptr()
    assert_close(x.detach(), wanted)
    if wants_gradient:
        dout = draw(2, 6, 2, 8, seed=1)
        x.backward(dout)
        cos, sin = table(6, 6)
        assert_close(leaf.grad, expected(dout, cos, -sin, interleaved))


def test_in_place_of_a_leaf_that_requires_a_gradient() -> None:
    """As the official package's tests do: its values change, and its gradient is that of before."""
    cos, sin = table(6, 6)
    for shape, rotate in (
        ((2, 6, 2, 8), lambda x: apply_rotary_emb(x, cos, sin, inplace=True)),
        ((2, 6, 3, 2, 8), lambda x: apply_rotary_emb_qkv_(x, cos, sin)),
        ((2, 6, 2, 2, 8), lambda x: apply_rotary_emb_kv_(x, cos, sin)),
    ):
        leaf, dout = draw(*shape).requires_grad_(), draw(*shape, seed=1)
        on_the_way = leaf.detach().clone().requires_grad_()
        out, other = rotate(leaf), rotate(on_the_way * 1)
        assert torch.equal(out, other)
        assert torch.equal(out, leaf)
        out.backward(dout)
        other.backward(dout)
        assert torch.equal(leaf.grad, on_the_way.grad)


def test_autograd_notices_that_a_leaf_has_changed() -> None:
    leaf = draw(1, 6, 2, 8).requires_grad_()
    square = leaf.square()
    apply_rotary_emb(leaf, *table(6, 6), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@each_pairing
@pytest.mark.parametrize("layout", ["batch", "offsets", "varlen"])
def test_gradients(layout: str, interleaved: bool) -> None:
    cos, sin = table(8, 4, torch.float64)
    options: dict[str, Any] = {}
    x = draw(2, 3, 2, 6, dtype=torch.float64)
    if layout == "offsets":
        options["seqlen_offsets"] = torch.tensor([1, 5], device=DEVICE)
    elif layout == "varlen":
        x = x.flatten(0, 1)
        options["cu_seqlens"] = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    x.requires_grad_()

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, interleaved, **options)

    assert torch.autograd.gradcheck(rotate, (x,))
    assert torch.autograd.gradgradcheck(rotate, (x,))


def test_scores_depend_on_distance_alone() -> None:
    """What rotation is for: the product of a query and a key is the same wherever the pair stands."""
    q, k = draw(1, 1, 1, 32, seed=1), draw(1, 1, 1, 32, seed=2)
    scores = [
        (
            apply_rotary_emb(q, *table(99, 32), seqlen_offsets=at + 7)
            * apply_rotary_emb(k, *table(99, 32), seqlen_offsets=at)
        )
        .sum()
        .item()
        for at in (0, 13, 80)
    ]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("grouped", [False, True], ids=["qkv", "grouped"])
def test_packed_qkv(grouped: bool) -> None:
    cos, sin = table(9, 8)
    cos_k, sin_k = table(9, 8)
    cos_k, sin_k = cos_k * 0.5, sin_k * 0.5
    leaf = draw(2, 5, 8, 8) if grouped else draw(2, 5, 3, 4, 8)
    leaf.requires_grad_()
    qkv = leaf * 1
    heads = (4, 2, 2) if grouped else (1, 1, 1)
    q, k, v = leaf.detach().split(heads, dim=2)
    out = apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, seqlen_offsets=2, num_heads_q=4 if grouped else None)
    assert out is qkv
    flat = [t if grouped else t.squeeze(2) for t in (q, k)]
    wanted = [expected(flat[0], cos, sin, False, 2), expected(flat[1], cos_k, sin_k, False, 2)]
    for part, reference in zip(qkv.detach().split(heads, dim=2), wanted, strict=False):
        assert_close(part if grouped else part.squeeze(2), reference)
    assert torch.equal(qkv.detach().split(heads, dim=2)[2], v)
    qkv.backward(torch.ones_like(qkv))
    assert torch.equal(leaf.grad.split(heads, dim=2)[2], torch.ones_like(v))
    dq = leaf.grad.split(heads, dim=2)[0]
    assert_close(dq if grouped else dq.squeeze(2), expected(torch.ones_like(flat[0]), cos, -sin, False, 2))


def test_packed_kv() -> None:
    kv = draw(2, 5, 2, 3, 8)
    k, v = kv.clone().unbind(2)
    out = apply_rotary_emb_kv_(kv, *table(5, 8), interleaved=True)
    assert out is kv
    assert_close(kv[:, :, 0], expected(k, *table(5, 8), True))
    assert torch.equal(kv[:, :, 1], v)


@each_pairing
def test_plain_operators_agree(interleaved: bool) -> None:
    x, (cos, sin) = draw(2, 6, 3, 16, dtype=torch.float64), table(6, 12, torch.float64)
    wanted = expected(x, cos, sin, interleaved)
    assert_close(apply_rotary_emb_torch(x, cos, sin, interleaved), wanted)
    assert_close(apply_rotary_emb_torch(x, cos.expand(2, 6, 6), sin.expand(2, 6, 6), interleaved), wanted)


@each_pairing
def test_module_rotates_packed_tensors(interleaved: bool) -> None:
    module = RotaryEmbedding(12, base=100.0, interleaved=interleaved, device=DEVICE)
    angles = torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(0, 12, 2) / 12)).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()
    for offset in (0, 8):  # the tables grow
        qkv = draw(2, 7, 3, 2, 16)
        q, k, v = qkv.clone().unbind(2)
        assert module(qkv, seqlen_offset=offset) is qkv
        assert_close(qkv[:, :, 0], expected(q, cos, sin, interleaved, offset))
        assert_close(qkv[:, :, 1], expected(k, cos, sin, interleaved, offset))
        assert torch.equal(qkv[:, :, 2], v)
        q_, kv = q.clone(), torch.stack([k, v], dim=2)
        q_, kv = module(q_, kv, seqlen_offset=torch.tensor([offset, 3], device=DEVICE), max_seqlen=20)
        assert_close(q_, expected(q, cos, sin, interleaved, [offset, 3]))
        assert_close(kv[:, :, 0], expected(k, cos, sin, interleaved, [offset, 3]))


def test_module_with_scales() -> None:
    """XPos: scores depend on distance alone, and fade with it."""
    module = RotaryEmbedding(16, scale_base=16.0, device=DEVICE)
    same = draw(1, 1, 1, 1, 16).expand(1, 24, 3, 1, 16).contiguous()
    q, k, _ = module(same)[0, :, :, 0].unbind(1)
    scores = q @ k.T
    assert_close(scores[10, 6], scores[20, 16])
    assert not torch.allclose(scores[10, 6], scores[6, 10])


def test_module_keeps_exact_angles_when_the_model_is_cast() -> None:
    module = RotaryEmbedding(16, device=DEVICE).to(torch.bfloat16)
    qkv = draw(1, 999, 3, 1, 16, dtype=torch.float32)
    before = qkv.clone()
    angles = torch.outer(torch.arange(999.0), 10000.0 ** -(torch.arange(0, 16, 2) / 16)).to(DEVICE)
    q = module(qkv)[:, :, 0]
    assert_close(q, expected(before[:, :, 0], angles.cos(), angles.sin(), False))


def test_positions_past_the_table_are_an_error_where_they_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    x, (cos, sin) = draw(2, 5, 2, 8), table(8, 8)
    for offsets in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="tokens stand at positions"):
            apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor(offsets, device=DEVICE))
    cu_seqlens = torch.tensor([0, 1, 10], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="positions 0 to 8; allowed: 0 to 7"):
        apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="rising from 0 to the number of tokens, 10"):
        apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=cu_seqlens[:2])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
def test_compiled(inplace: bool) -> None:
    cos, sin = table(16, 6)
    offsets = torch.tensor([1, 9], device=DEVICE)

    def step(x: Tensor) -> Tensor:
        return apply_rotary_emb(x.sin(), cos, sin, inplace=inplace, seqlen_offsets=offsets).square()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, again = (draw(2, 6, 2, 8).requires_grad_() for _ in range(2))
    out, out_again = step(x), compiled(again)
    torch.testing.assert_close(out_again, out)
    out.sum().backward()
    out_again.sum().backward()
    torch.testing.assert_close(again.grad, x.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(again), out)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
def test_custom_op_follows_the_rules() -> None:
    cos, sin = table(16, 6)
    x = draw(2, 6, 2, 8).requires_grad_()
    offsets = torch.tensor([1, 9], device=DEVICE)
    cu_seqlens = torch.tensor([0, 2, 12], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(rotary_op.apply_rotary, (x, cos, sin, 0, offsets, None, True, False))
    flat = x.detach().flatten(0, 1).requires_grad_()
    torch.library.opcheck(rotary_op.apply_rotary, (flat, cos, sin, 3, None, cu_seqlens, False, True))


X, COS = torch.zeros(2, 5, 3, 8), torch.zeros(5, 4)
FLAT, CU = torch.zeros(10, 3, 8), torch.tensor([0, 5, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apply_rotary_emb(X[0], COS, COS), ValueError, r"x has shape \[5, 3, 8\]"),
        (lambda: apply_rotary_emb(X, COS, COS, cu_seqlens=CU), ValueError, r"allowed: \[total, nheads, headdim\]"),
        (lambda: apply_rotary_emb(X.int(), COS, COS), TypeError, "x is torch.int32"),
        (lambda: apply_rotary_emb(X, COS, COS[:, 1:]), ValueError, "cos and sin have shapes"),
        (lambda: apply_rotary_emb(X, COS[0], COS[0]), ValueError, "cos and sin have shapes"),
        (lambda: apply_rotary_emb(X[..., :6], COS, COS), ValueError, "at most headdim, 6"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=1), ValueError, "cos has 5 rows; allowed: at least 6"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=-1), ValueError, "seqlen_offsets is -1"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=0.5), TypeError, "seqlen_offsets is 0.5"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=torch.zeros(2)), TypeError, "torch.int32 or torch.int64"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=CU), ValueError, r"seqlen_offsets has shape \[3\]"),
        (lambda: apply_rotary_emb(FLAT, COS, COS, cu_seqlens=CU.long()), TypeError, "cu_seqlens is torch.int64"),
        (lambda: apply_rotary_emb(FLAT, COS, COS, cu_seqlens=CU[:0]), ValueError, "cu_seqlens has shape"),
        (lambda: apply_rotary_emb(FLAT, COS, COS, cu_seqlens=CU, max_seqlen=6), ValueError, "at least 6"),
        (lambda: apply_rotary_emb(FLAT, COS, COS, cu_seqlens=CU, max_seqlen=6.0), TypeError, "max_seqlen is 6.0"),
        (lambda: apply_rotary_emb(X, COS.to("meta"), COS), ValueError, "cos is on meta"),
        (lambda: apply_rotary_emb(X, COS, COS, interleaved=1), TypeError, "interleaved is 1"),
        (lambda: apply_rotary_emb(X, COS.clone().requires_grad_(), COS), NotImplementedError, "detach"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS), ValueError, "qkv has shape"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS, num_heads_q=2), ValueError, "qkv has shape"),
        (lambda: apply_rotary_emb_kv_(X, COS, COS), ValueError, "kv has shape"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@each_pairing
@pytest.mark.parametrize("search", [False, True], ids=["batch", "varlen"])
def test_kernel_compiles_for_hopper_without_a_gpu(search: bool, interleaved: bool) -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from flash_attn_mini.layers import rotary_triton

    constants = {
        "SEARCH_STEPS": 3,
        "INTERLEAVED": interleaved,
        "CONJUGATE": True,
        "COMPUTE": rotary_triton.tl.float32,
        **rotary_triton.block_sizes(32, 8),
    }
    if not search:
        constants["cu_seqlens_ptr"] = None
    kinds = {"x_ptr": "*bf16", "out_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    kinds |= {"offsets_ptr": "*i64", "cu_seqlens_ptr": "*i32"}
    names = rotary_triton.rotary_kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(rotary_triton.rotary_kernel, signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in compiled.asm["ptx"]
