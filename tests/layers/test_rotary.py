"""apply_rotary_emb against the reference: layouts, offsets, pairings, derivatives, torch.compile, and wrong calls.

On a GPU the Triton kernel runs. On a CPU PyTorch's operators run, and the first test below runs this file again in a
process with Triton's interpreter, which must be switched on before Triton is imported.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_mini.layers import rotary_op
from flash_attn_mini.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn_mini.reference import apply_rotary_reference

from ..conftest import SEED_VARIABLE
from ..support.interpreter import INTERPRETED, run_in_the_interpreter, starts_the_interpreter
from ..support.one_thread import one_thread  # noqa: F401

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
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2, device=DEVICE).double() / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(rows, device=DEVICE).double(), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def expected(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | list[int] = 0,
    lengths: list[int] | None = None,
) -> Tensor:
    """The reference, sequence by sequence."""
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
    """The same values for the same arguments in one session; another session draws others."""
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(int(os.environ[SEED_VARIABLE]) + seed))
        .to(dtype)
        .to(DEVICE)
    )


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


def test_offsets_and_lengths_of_any_stride() -> None:
    x = draw(sum(LENGTHS), 2, 16)
    cos, sin = table(40, 12)
    offsets = torch.tensor([3, 99, 0, 99, 7, 99, 1, 99, 2, 99], device=DEVICE)[::2]
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=DEVICE).repeat_interleave(2)[::2]
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens)
    assert_close(out, expected(x, cos, sin, False, [3, 0, 7, 1, 2], LENGTHS))


def test_numbers_may_be_numpy_integers_or_tensors() -> None:
    numpy = pytest.importorskip("numpy")
    x, (cos, sin) = draw(2, 5, 2, 8), table(16, 8)
    wanted = apply_rotary_emb(x, cos, sin, seqlen_offsets=3)
    for offset in (numpy.int64(3), numpy.int32(3), torch.tensor(3, device=DEVICE)):
        assert torch.equal(apply_rotary_emb(x, cos, sin, numpy.bool_(False), seqlen_offsets=offset), wanted)
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32, device=DEVICE)
    packed = apply_rotary_emb(x.flatten(0, 1), cos, sin, False, 0, numpy.int64(3), cu_seqlens, numpy.int64(5))
    assert torch.equal(packed, wanted.flatten(0, 1))
    qkv = draw(2, 5, 8, 16)
    results = [
        RotaryEmbedding(n(16), base=n(100), device=DEVICE)(qkv.clone(), None, n(3), n(9), n(4))
        for n in (int, numpy.int64)
    ]
    assert torch.equal(*results)
    at_the_end = RotaryEmbedding(16, base=100, device=DEVICE)(qkv.clone(), seqlen_offset=numpy.int64(3), num_heads_q=4)
    assert torch.equal(at_the_end, results[0])


@pytest.mark.parametrize("lengths", [[9], [0, 0, 9], [9, 0], [1] * 40], ids=str)
def test_unusual_batches_of_different_lengths(lengths: list[int]) -> None:
    x = draw(sum(lengths), 2, 8)
    cos, sin = table(9, 8)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    assert_close(apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens), expected(x, cos, sin, False, 0, lengths))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
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
    """The official package's tests do this: the values of the leaf change, and it gets its usual gradient."""
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


def rotations_of(layout: str, interleaved: bool = False) -> tuple[Any, Any, Tensor]:
    """The rotation and its transpose as functions of x, and an x, all float64."""
    cos, sin = table(8, 4, torch.float64)
    options: dict[str, Any] = {}
    x = draw(2, 3, 2, 6, dtype=torch.float64)
    if layout == "offsets":
        options["seqlen_offsets"] = torch.tensor([1, 5], device=DEVICE)
    elif layout == "varlen":
        x = x.flatten(0, 1)
        options["cu_seqlens"] = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    return (
        lambda x: apply_rotary_emb(x, cos, sin, interleaved, **options),
        lambda x: apply_rotary_emb(x, cos, -sin, interleaved, **options),
        x,
    )


each_layout = pytest.mark.parametrize("layout", ["batch", "offsets", "varlen"])


@each_pairing
@each_layout
def test_gradients(layout: str, interleaved: bool) -> None:
    rotate, _, x = rotations_of(layout, interleaved)
    x.requires_grad_()
    assert torch.autograd.gradcheck(rotate, (x,), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(rotate, (x,), fast_mode=True)


@each_layout
def test_forward_mode_gives_the_rotated_tangent(layout: str) -> None:
    rotate, _, x = rotations_of(layout)
    tangent = draw(*x.shape, dtype=x.dtype, seed=1)
    assert_close(torch.func.jvp(rotate, (x,), (tangent,))[1], rotate(tangent))
    assert_close(torch.func.jacfwd(rotate)(x), torch.func.jacrev(rotate)(x))
    with forward_ad.dual_level():
        primal, out_tangent = forward_ad.unpack_dual(rotate(forward_ad.make_dual(x, tangent)))
        assert_close(primal, rotate(x))
        assert_close(out_tangent, rotate(tangent))


def test_forward_mode_in_place() -> None:
    x, tangent, (cos, sin) = draw(2, 6, 2, 8), draw(2, 6, 2, 8, seed=1), table(6, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), tangent.clone())
        apply_rotary_emb(dual, cos, sin, inplace=True)
        for part, of in zip(forward_ad.unpack_dual(dual), (x, tangent), strict=True):
            assert_close(part, apply_rotary_emb(of, cos, sin))


@each_layout
def test_torch_func_transforms(layout: str) -> None:
    rotate, back, x = rotations_of(layout)

    def loss(x: Tensor) -> Tensor:
        return rotate(x).pow(3).sum()

    assert_close(torch.func.grad(loss)(x), back(3 * rotate(x).square()))
    many = torch.stack([x, -2 * x, x + 1])
    assert_close(torch.vmap(rotate)(many), torch.stack([rotate(one) for one in many]))
    assert_close(torch.vmap(rotate, 2, 1)(many.movedim(0, 2)), torch.stack([rotate(one) for one in many], 1))
    gradients = torch.stack([torch.func.grad(loss)(one) for one in many])
    assert_close(torch.vmap(torch.func.grad(loss))(many), gradients)
    tangent = draw(*x.shape, dtype=x.dtype, seed=1)
    product = back(6 * rotate(x) * rotate(tangent))  # of the Hessian and the tangent
    assert_close(torch.func.jvp(torch.func.grad(loss), (x,), (tangent,))[1], product)
    assert_close(torch.func.grad(lambda x: (torch.func.grad(loss)(x) * tangent).sum())(x), product)


def test_vmap_over_tables_and_offsets() -> None:
    x, (cos, sin) = draw(3, 2, 4, 2, 8), table(9, 8)
    tables, offsets = torch.stack([cos, 2 * cos, -cos]), torch.tensor([[0, 5], [1, 1], [2, 0]], device=DEVICE)

    def rotate(x: Tensor, cos: Tensor, offsets: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)

    wanted = torch.stack([rotate(*arguments) for arguments in zip(x, tables, offsets, strict=True)])
    assert_close(torch.vmap(rotate)(x, tables, offsets), wanted)
    assert_close(
        torch.vmap(rotate, (1, None, None))(x.movedim(0, 1), cos, offsets[0])[1], rotate(x[1], cos, offsets[0])
    )


def test_tables_that_require_a_gradient_are_an_error_of_the_derivative_alone() -> None:
    x, (cos, sin) = draw(2, 6, 2, 8).requires_grad_(), table(6, 8)
    wanted = apply_rotary_emb(x, cos, sin)
    for learnt, inplace in itertools.product(
        ((cos.clone().requires_grad_(), sin), (cos, sin.clone().requires_grad_())), (0, 1)
    ):
        out = apply_rotary_emb(x * 1, *learnt, inplace=bool(inplace))
        assert torch.equal(out, wanted)
        with pytest.raises(NotImplementedError, match="cos and sin no derivative; detach"):
            out.sum().backward()
    with pytest.raises(NotImplementedError, match="cos and sin no derivative"):
        torch.func.grad(lambda cos: apply_rotary_emb(x.detach(), cos, sin).sum())(cos)
    with pytest.raises(NotImplementedError, match="cos and sin no derivative"):
        torch.func.jvp(lambda sin: apply_rotary_emb(x.detach(), cos, sin), (sin,), (cos,))


def test_scores_depend_on_distance_alone() -> None:
    """The product of a query and a key depends on the distance of their positions only.

    In float64: the product may be near 0, where float32 has no digits left.
    """
    q, k = (draw(1, 1, 1, 32, dtype=torch.float64, seed=seed) for seed in (1, 2))
    cos, sin = table(99, 32, torch.float64)
    scores = [
        (apply_rotary_emb(q, cos, sin, seqlen_offsets=at + 7) * apply_rotary_emb(k, cos, sin, seqlen_offsets=at))
        .sum()
        .item()
        for at in (0, 13, 80)
    ]
    assert scores == pytest.approx([scores[0]] * 3, rel=0, abs=1e-11)


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
    """XPos: scores depend on the distance only, and fall with it."""
    module = RotaryEmbedding(16, scale_base=16.0, device=DEVICE)
    same = draw(1, 1, 1, 1, 16).expand(1, 24, 3, 1, 16).contiguous()
    q, k, _ = module(same)[0, :, :, 0].unbind(1)
    scores = q @ k.T
    assert_close(scores[10, 6], scores[20, 16])
    assert not torch.allclose(scores[10, 6], scores[6, 10])


@pytest.mark.parametrize("prompt", [1, 7], ids=["token-by-token", "after-a-prompt"])
def test_decoding_with_scales_gives_the_scores_of_a_prefill(prompt: int) -> None:
    def scores(qkv: Tensor) -> Tensor:
        q, k, _ = qkv[0, :, :, 0].unbind(1)
        return q @ k.T

    given = draw(1, 24, 3, 1, 16)
    whole = RotaryEmbedding(16, scale_base=16.0, device=DEVICE)(given.clone())
    module = RotaryEmbedding(16, scale_base=16.0, device=DEVICE)
    steps = [(0, prompt), *((at, at + 1) for at in range(prompt, 24))]
    pieces = [module(given[:, start:stop].clone(), seqlen_offset=start) for start, stop in steps]
    torch.testing.assert_close(scores(torch.cat(pieces, dim=1)), scores(whole), rtol=1e-4, atol=1e-4)


def test_scales_that_float32_cannot_hold_are_refused() -> None:
    module = RotaryEmbedding(16, scale_base=1.0, device=DEVICE)
    module(draw(1, 60, 3, 1, 16))
    with pytest.raises(ValueError, match="the XPos factors of 120 positions around the centre 30 do not fit float32"):
        module(draw(1, 1, 3, 1, 16), seqlen_offset=119)
    module.reset_parameters()
    assert module(draw(1, 120, 3, 1, 16)).isfinite().all()


@pytest.mark.parametrize("how", ["to_empty", "assign", "reset"])
def test_module_made_on_the_meta_device(how: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), RotaryEmbedding(16, base=100.0)).to(DEVICE)
    with torch.device("meta"):
        copy = torch.nn.Sequential(torch.nn.Linear(4, 4), RotaryEmbedding(16, base=100.0))
    if how != "assign":
        copy.to_empty(device=DEVICE)
    if how == "reset":
        copy[1].inv_freq.fill_(float("nan"))
        copy[1].reset_parameters()
    copy.load_state_dict(model.state_dict(), assign=how == "assign")
    qkv = draw(1, 9, 3, 2, 16)
    assert torch.equal(copy[1](qkv.clone()), model[1](qkv.clone()))
    if how != "assign":
        assert torch.equal(copy[1].inv_freq, model[1].inv_freq)


def test_module_keeps_exact_angles_when_the_model_is_cast() -> None:
    module = RotaryEmbedding(16, device=DEVICE).to(torch.bfloat16)
    qkv = draw(1, 999, 3, 1, 16, dtype=torch.float32)
    before = qkv.clone()
    angles = torch.outer(torch.arange(999.0), 10000.0 ** -(torch.arange(0, 16, 2) / 16)).to(DEVICE)
    q = module(qkv)[:, :, 0]
    assert_close(q, expected(before[:, :, 0], angles.cos(), angles.sin(), False))


def test_positions_past_the_table_are_an_error_where_the_host_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    x, (cos, sin) = draw(2, 5, 2, 8), table(8, 8)
    for offsets in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="the tokens have positions"):
            apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor(offsets, device=DEVICE))
    cu_seqlens = torch.tensor([0, 1, 10], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="positions 0 to 8; allowed: 0 to 7"):
        apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="rising from 0 to the number of tokens, 10"):
        apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=cu_seqlens[:2])


@pytest.mark.parametrize("offsets", [4, [0, 4]], ids=["number", "tensor"])
def test_tokens_have_positions_even_without_heads(offsets: int | list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_MINI_CHECK", "1")
    cos, sin = table(8, 8)

    def rotated(*shape: int, given: Any = offsets) -> Tensor:
        given = torch.tensor(given, dtype=torch.int32, device=DEVICE) if isinstance(given, list) else given
        return apply_rotary_emb(draw(*shape), cos, sin, seqlen_offsets=given)

    with pytest.raises(ValueError, match=r"cos has 8 rows|allowed: 0 to 7"):
        rotated(2, 5, 0, 8)
    assert rotated(2, 4, 0, 8).shape == (2, 4, 0, 8)
    assert rotated(2, 0, 3, 8, given=9 if isinstance(offsets, int) else [0, 9]).shape == (2, 0, 3, 8)
    assert rotated(0, 5, 3, 8, given=4 if isinstance(offsets, int) else []).shape == (0, 5, 3, 8)


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
def test_custom_op_passes_opcheck() -> None:
    cos, sin = table(16, 6)
    x = draw(2, 6, 2, 8).requires_grad_()
    offsets = torch.tensor([1, 9], device=DEVICE)
    cu_seqlens = torch.tensor([0, 2, 12], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(torch.ops.flash_attn_mini._apply_rotary.default, (x, cos, sin, 0, offsets, None, True, False))
    flat = x.detach().flatten(0, 1).requires_grad_()
    torch.library.opcheck(
        torch.ops.flash_attn_mini._apply_rotary.default, (flat, cos, sin, 3, None, cu_seqlens, False, True)
    )


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
        (lambda: apply_rotary_emb(FLAT, COS, COS, cu_seqlens=CU, max_seqlen=-3), ValueError, "max_seqlen is -3"),
        (lambda: apply_rotary_emb(X, COS, COS, interleaved="no"), TypeError, "interleaved is 'no'"),
        (lambda: apply_rotary_emb(X, COS, COS, interleaved=COS[0, :2]), TypeError, "interleaved is tensor"),
        (lambda: apply_rotary_emb(X, COS.to("meta"), COS), ValueError, "cos is on meta"),
        (lambda: apply_rotary_emb([1], COS, COS), TypeError, r"x is \[1\] \(list\)"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=True), TypeError, "seqlen_offsets is True"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS), ValueError, "qkv has shape"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS, num_heads_q=2), ValueError, "qkv has shape"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS, num_heads_q=-1), ValueError, "num_heads_q is -1; allowed: 1 or"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS, num_heads_q=1.0), TypeError, r"num_heads_q is 1.0 \(float\)"),
        (lambda: apply_rotary_emb_qkv_([1], COS, COS), TypeError, "qkv is"),
        (lambda: apply_rotary_emb_kv_(X, COS, COS), ValueError, "kv has shape"),
        (lambda: apply_rotary_emb_kv_(None, COS, COS), TypeError, "kv is None"),
        (lambda: RotaryEmbedding(7), ValueError, "dim is 7; allowed: an even number of features"),
        (lambda: RotaryEmbedding(-2), ValueError, "dim is -2"),
        (lambda: RotaryEmbedding(8.0), TypeError, r"dim is 8.0 \(float\)"),
        (lambda: RotaryEmbedding(8, base=0), ValueError, "base is 0; allowed: a number above 0"),
        (lambda: RotaryEmbedding(8, base="10000"), TypeError, "base is '10000'"),
        (lambda: RotaryEmbedding(8, scale_base=-1), ValueError, "scale_base is -1"),
        (lambda: RotaryEmbedding(8, interleaved="no"), TypeError, "interleaved is 'no'"),
        (lambda: RotaryEmbedding(8)(X[:, :, None], seqlen_offset=-5), ValueError, "seqlen_offset is -5; allowed: 0 or"),
        (lambda: RotaryEmbedding(8)(X[:, :, None], max_seqlen=-5), ValueError, "max_seqlen is -5; allowed: 0 or"),
        (lambda: RotaryEmbedding(8)(X[0]), ValueError, r"qkv has shape \[5, 3, 8\]"),
        (lambda: RotaryEmbedding(8)(X[:, :, None], seqlen_offset=0.5), TypeError, "seqlen_offset is 0.5"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@each_pairing
@pytest.mark.parametrize("search", [False, True], ids=["batch", "varlen"])
def test_kernel_compiles_for_hopper_without_a_gpu(search: bool, interleaved: bool) -> None:
    pytest.importorskip("triton", minversion="3.4")
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
