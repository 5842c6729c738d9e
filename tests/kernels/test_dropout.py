"""Dropout: the mask is Philox's, bit for bit, on every backend, and is drawn as users of torch's generators expect."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_mini.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
)
from flash_attn_mini.reference import (
    attention_probabilities,
    attention_scores,
    dropout_mask,
    dropout_masks_varlen,
    visible_keys,
)
from flash_attn_mini.reference.masks import in_key_ranges
from flash_attn_mini.reference.philox import dropout_threshold, philox4x32, random_bits

from ..support.gpu_calls import capture
from ..support.small_attention import qkv

# ---- Philox itself ------------------------------------------------------------------------------------------------

ALL_ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # its digits, as the paper uses them


@pytest.mark.parametrize(
    ("counter_and_key", "expected"),
    [
        ((0,) * 6, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((ALL_ONES,) * 6, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_the_paper(counter_and_key: tuple[int, ...], expected: str) -> None:
    """kat_vectors of Random123, philox4x32-7."""
    *counter, key0, key1 = counter_and_key
    words = philox4x32(tuple(torch.tensor(x) for x in counter), (key0, key1))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_bits_of_a_pair_do_not_depend_on_the_lengths() -> None:
    heads = torch.arange(6).reshape(2, 3)
    whole = random_bits((123456789, 8), heads, 70, 90)
    assert whole.shape == (2, 3, 70, 90)
    assert torch.equal(random_bits((123456789, 8), heads, 33, 47), whole[..., :33, :47])
    assert torch.equal(random_bits((123456789, 8), heads[1], 70, 90), whole[1])
    assert int(whole.min()) >= 0
    assert int(whole.max()) < 1 << 16
    assert len(whole.unique()) > 0.4 * whole.numel() ** 0.9, "bits repeat"


@pytest.mark.parametrize("other", [(1 << 40, 8), (7, 9), (7, 8 + (1 << 40)), (8, 8), (-7, 8)])
def test_every_bit_of_seed_and_offset_counts(other: tuple[int, int]) -> None:
    first, second = (random_bits(state, torch.arange(2), 32, 32) for state in ((7, 8), other))
    assert (first == second).double().mean() < 0.01


def test_threshold_rounds_to_the_next_65536th() -> None:
    assert [dropout_threshold(p) for p in (0.0, 2.0**-18, 2.0**-17, 0.1, 0.5, 1 - 2.0**-18)] == [
        0, 0, 1, 6554, 32768, 65536,
    ]  # fmt: skip


# ---- the kernels' masks -------------------------------------------------------------------------------------------


def revealed(
    attend: Callable[[Tensor], tuple[Tensor, Tensor]], v_shape: tuple[int, ...], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Which probabilities the kernel kept, ``[..., seqlen_q, nheads, seqlen_k]``, and its rng_state.

    Values that are rows of the identity make the output the probabilities: headdim of them at a time.
    """
    *_, seqlen_k, _nheads_k, headdim = v_shape
    parts, states = [], []
    for start in range(0, seqlen_k, headdim):
        v = like.new_zeros(v_shape)
        for j in range(start, min(start + headdim, seqlen_k)):
            v[..., j, :, j - start] = 1.0
        out, rng_state = attend(v)
        parts.append(out[..., : min(headdim, seqlen_k - start)] != 0)
        states.append(rng_state)
    assert all(torch.equal(state, states[0]) for state in states)
    return torch.cat(parts, dim=-1), states[0]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "headdim", "nheads_k", "p"),
    [
        (40, 50, 64, 2, 0.3),
        (129, 200, 128, 1, 0.1),
        (1, 257, 64, 2, 0.5),
        (200, 300, 64, 2, 0.9),
        (33, 70, 256, 4, 0.02),
    ],
)
def test_the_mask_is_philoxs_bit_for_bit(
    seqlen_q: int, seqlen_k: int, headdim: int, nheads_k: int, p: float, backend: str, device: str, dtype: torch.dtype
) -> None:
    batch, nheads = 2, 4
    q = torch.randn(batch, seqlen_q, nheads, headdim, device=device).to(dtype)
    k = torch.randn(batch, seqlen_k, nheads_k, headdim, device=device).to(dtype)

    def attend(v: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        with use_backend(backend):
            out, _, _, rng_state = _flash_attn_forward(q, k, v, p, 0.1, False, -1, -1, 0.0, None, False)
        return out, rng_state

    kept, rng_state = revealed(attend, tuple(k.shape), k)
    assert rng_state.dtype == torch.int64
    assert rng_state.shape == (2,)
    expected = dropout_mask(rng_state, p, batch, nheads, seqlen_q, seqlen_k, device=device)
    assert torch.equal(kept.transpose(1, 2), expected)
    share, count = kept.double().mean().item(), kept.numel()
    assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / count) + 2.0**-17


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_masks_of_varlen_sequences_count_from_their_own_beginning(causal: bool, backend: str, device: str) -> None:
    lengths_q, lengths_k = (33, 0, 70, 5), (64, 9, 40, 64)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device) for x in (lengths_q, lengths_k)
    )
    q = torch.randn(sum(lengths_q), 4, 64, device=device).half()
    k = torch.randn(sum(lengths_k), 2, 64, device=device).half()
    v = torch.zeros_like(k)
    for start, length in zip(cu_k.tolist(), lengths_k, strict=False):
        v[start : start + length] = torch.eye(64, device=device).half()[:length, None]
    with use_backend(backend):
        out, _lse, _, rng_state = _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 70, 64, 0.3, 0.1, causal)
    masks = dropout_masks_varlen(rng_state, 0.3, 4, cu_q, cu_k)
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        own = out[cu_q[b] : cu_q[b + 1], :, :length_k]
        visible = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
        if causal:
            visible = visible.tril(length_k - length_q)
        assert torch.equal(own.transpose(0, 1) != 0, masks[b] & visible)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_s_dmask_is_probabilities_with_the_mask_as_sign(causal: bool, backend: str, device: str) -> None:
    q, k, v = qkv(device, requires_grad=False)
    with use_backend(backend):
        out, _lse, s_dmask, rng_state = _flash_attn_forward(q, k, v, 0.4, 0.25, causal, -1, -1, 0.0, None, True)
    assert s_dmask.shape == (2, 4, 128, 128)
    assert s_dmask.dtype == q.dtype
    kept = dropout_mask(rng_state, 0.4, 2, 4, 9, 13, device=device)
    visible = visible_keys(9, 13, causal=causal, device=device)
    assert torch.equal(torch.signbit(s_dmask[..., :9, :13]) & visible, ~kept & visible)
    probabilities = attention_probabilities(q, k, softmax_scale=0.25, causal=causal)
    relative = probabilities / probabilities.amax(dim=-1, keepdim=True)
    torch.testing.assert_close(s_dmask[..., :9, :13].abs().double(), relative, rtol=2e-3, atol=1e-4)
    assert (s_dmask[..., 9:, :] == 0).all()
    assert (s_dmask[..., 13:] == 0).all()
    v_of_head = v.repeat_interleave(2, dim=2).double()
    expected = torch.einsum("bhij,bjhd->bihd", probabilities * kept / 0.6, v_of_head)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_s_dmask_normalised_block_by_block_is_the_probabilities(backend: str, device: str) -> None:
    """The steps of the official package's tests, for a given block size."""
    q, k, v = qkv(device, requires_grad=False)
    with use_backend(backend):
        _out, lse, s_dmask, _ = _flash_attn_forward(q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, True)
    keys_of_block = _get_block_size_n(q.device, q.shape[-1], True, False)
    largest, blocks = torch.full_like(lse, -math.inf), []
    scores = attention_scores(q, k, softmax_scale=0.25).split(keys_of_block, dim=-1)
    for own, part in zip(reversed(scores), reversed(s_dmask[..., :9, :13].split(keys_of_block, dim=-1)), strict=True):
        largest = torch.maximum(largest, own.amax(dim=-1))
        blocks.insert(0, part.abs().double() * (largest - lse).exp()[..., None])
    probabilities = attention_probabilities(q, k, softmax_scale=0.25)
    torch.testing.assert_close(torch.cat(blocks, dim=-1), probabilities, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=["shared", "each"])
def test_s_dmask_is_0_outside_of_key_ranges(
    shape: tuple[int, int], backend: str, device: str, draw: torch.Generator
) -> None:
    q, k, v = qkv(device, requires_grad=False)
    ranges = torch.randint(-2, 16, (*shape, 9, 2, 2), generator=draw).int().to(device)
    options = {"return_attn_probs": True, "backend": backend}
    *_, s_dmask = flash_attn_func(q, k, v, 0.4, causal=True, key_ranges=ranges, **options)
    visible = in_key_ranges(ranges, 13) & visible_keys(9, 13, causal=True, device=device)
    assert torch.equal(s_dmask[..., :9, :13] != 0, visible.expand(2, 4, 9, 13))
    assert not s_dmask[..., 9:, :].any()
    assert not s_dmask[..., 13:].any()

    cu_q, cu_k = (torch.tensor([0, n, n, 2 * n], dtype=torch.int32, device=device) for n in (9, 13))
    of_rows = ranges.transpose(0, 1).expand(-1, 2, -1, -1, -1).flatten(1, 2)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    *_, s_dmask = flash_attn_varlen_func(*rows, cu_q, cu_k, 9, 13, 0.4, causal=True, key_ranges=of_rows, **options)
    assert torch.equal(s_dmask[::2, :, :9, :13] != 0, visible.expand(2, 4, 9, 13))
    assert not s_dmask[1].any()


@pytest.mark.parametrize("is_mask", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize("rows", [1, 9])
def test_s_dmask_with_attn_bias(rows: int, is_mask: bool, backend: str, device: str, draw: torch.Generator) -> None:
    """The probabilities before dropout, 0 where the bias hides a key."""
    q, k, v = qkv(device, requires_grad=False)
    bias = torch.randn(2, 1, rows, 13, generator=draw).to(device)
    bias = bias > 0 if is_mask else bias.masked_fill(bias < -0.5, -math.inf)
    options = {"softmax_scale": 0.25, "attn_bias": bias}
    *_, s_dmask = flash_attn_func(q, k, v, 0.4, **options, return_attn_probs=True, backend=backend)
    probabilities = attention_probabilities(q, k, **options)
    found = s_dmask[..., :9, :13].abs().double() * probabilities.amax(-1, keepdim=True)
    torch.testing.assert_close(found, probabilities, rtol=4e-3, atol=1e-4)
    assert not s_dmask[..., 9:, :].any()
    assert not s_dmask[..., 13:].any()


def test_s_dmask_comes_with_return_attn_probs_alone(backend: str, device: str) -> None:
    q, k, v = qkv(device)
    _out, _lse, s_dmask = flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True, backend=backend)
    assert s_dmask.shape == (2, 4, 128, 128)
    assert not s_dmask.requires_grad
    assert flash_attn_func(q, k, v, return_attn_probs=True, backend=backend)[2].numel() == 0


# ---- seeds --------------------------------------------------------------------------------------------------------


def dropped(*inputs: Tensor, backend: str, p: float = 0.4, **options: Any) -> Tensor:
    return flash_attn_func(*inputs, dropout_p=p, deterministic=True, backend=backend, **options)


def test_a_seed_repeats_the_calls_after_it(backend: str, device: str) -> None:
    inputs = qkv(device, requires_grad=False)

    def three() -> list[Tensor]:
        torch.manual_seed(5)
        return [dropped(*inputs, backend=backend) for _ in range(3)]

    first, again = three(), three()
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    torch.manual_seed(6)
    assert not torch.equal(dropped(*inputs, backend=backend), first[0])


def test_dropout_advances_the_generators_stream(backend: str, device: str) -> None:
    """No number that the generator gives before or after a call is drawn twice."""
    inputs = qkv(device, requires_grad=False)
    torch.manual_seed(5)
    first = torch.rand(4, device=device)
    dropped(*inputs, backend=backend)
    after = torch.rand(4, device=device)
    assert not torch.equal(first, after)
    torch.manual_seed(5)
    torch.rand(4, device=device)
    without = torch.rand(4, device=device)
    assert not torch.equal(after, without), "the call drew nothing"
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    flash_attn_func(*inputs, backend=backend)
    unchanged = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, unchanged), "a call without dropout draws nothing"


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointing_draws_the_same_mask_again(use_reentrant: bool, backend: str, device: str) -> None:
    inputs = qkv(device)
    torch.manual_seed(7)
    expected = torch.autograd.grad(dropped(*inputs, backend=backend).square().sum(), inputs)
    torch.manual_seed(7)
    out = checkpoint.checkpoint(lambda *x: dropped(*x, backend=backend), *inputs, use_reentrant=use_reentrant)
    out.square().sum().backward()
    for x, e in zip(inputs, expected, strict=True):
        assert torch.equal(x.grad, e)


def test_backward_uses_the_mask_of_its_forward(backend: str, device: str) -> None:
    """Other draws between the two change nothing."""
    inputs = qkv(device)
    torch.manual_seed(7)
    expected = torch.autograd.grad(dropped(*inputs, backend=backend).square().sum(), inputs)
    torch.manual_seed(7)
    out = dropped(*inputs, backend=backend)
    dropped(*inputs, backend=backend)
    torch.manual_seed(8)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
def test_a_probability_that_rounds_to_0_drops_nothing(headdim: int, backend: str, device: str) -> None:
    inputs = [torch.randn(2, 100, 2, headdim, device=device).half().requires_grad_() for _ in range(3)]
    results = []
    for p in (0.0, 2.0**-18):
        out = flash_attn_func(*inputs, dropout_p=p, backend=backend)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for expected, given in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("in_k", [False, True], ids=["q", "k"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("headdim", [32, 64, 96, 128, 192, 256])
def test_dropout_hides_no_nan(
    headdim: int, causal: bool, in_k: bool, backend: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """A NaN of q or k reaches dq, dk and dv wherever a probability that it spoils is kept."""
    q, k, v, dout = torch.randn(4, 2, 150, 2, headdim, generator=draw).to(device, dtype)
    batch, head, column = (int(torch.randint(size, (), generator=draw)) for size in (2, 2, headdim))
    row = int(torch.randint(20, 130, (), generator=draw))  # under a causal mask too, many probabilities are spoiled
    (k if in_k else q)[batch, row, head, column] = math.nan
    options = (0.4, headdim**-0.5, causal, -1, 0 if causal else -1, 0.0, None)
    visible = visible_keys(150, 150, causal=causal, device=device)
    spoiled = visible[:, row] if in_k else torch.arange(150, device=device) == row  # queries
    with use_backend(backend):
        out, lse, _, rng_state = _flash_attn_forward(q, k, v, *options, False)
        kept = dropout_mask(rng_state, 0.4, 2, 2, 150, 150, device=device)[batch, head]
        assert torch.equal(lse[batch, head].isnan(), spoiled)
        for deterministic in (False, True):
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *options, deterministic, rng_state)
            assert dq[batch, spoiled, head].isnan().all()
            reached = (kept & visible)[spoiled].any(0)  # keys
            assert reached.any()
            for name, gradient in (("dk", dk), ("dv", dv)):
                hidden = (~gradient[batch, reached, head].isnan()).sum()
                assert not hidden, f"{name} hides NaN in {int(hidden)} elements, deterministic={deterministic}"
            others = [x[1 - batch] for x in (out, dq, dk, dv)]
            assert all(x.isfinite().all() for x in others)


def test_official_backward_needs_the_rng_state(backend: str, device: str) -> None:
    q, k, v = qkv(device, requires_grad=False)
    options = (0.3, 0.25, False, -1, -1, 0.0, None)
    with use_backend(backend):
        out, lse, _, rng_state = _flash_attn_forward(q, k, v, *options, False)
        given = [torch.empty_like(x) for x in (q, k, v)]
        for wrong, error in (
            (None, ValueError),
            (rng_state[:1], ValueError),
            (rng_state.int(), (TypeError, ValueError)),
        ):
            with pytest.raises(error, match="rng_state"):
                _flash_attn_backward(out, q, k, v, out, lse, *given, *options, True, wrong)


def test_dropout_and_softcap_exclude_each_other(backend: str, device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match=r"softcap is 3.*dropout_p.*not both"):
        flash_attn_func(q, k, v, dropout_p=0.1, softcap=3.0, backend=backend)


@pytest.mark.gpu
def test_masks_are_equal_across_backends() -> None:
    q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    results = []
    for backend in ("cuda", "triton"):
        torch.manual_seed(5)
        with use_backend(backend):
            results.append(_flash_attn_forward(q, k, v, 0.3, 0.1, True, -1, -1, 0.0, None, False))
    assert torch.equal(results[0][3], results[1][3])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-2, atol=1e-2)
    on_cpu = dropout_mask(results[0][3].cpu(), 0.3, 2, 4, 200, 200)
    assert torch.equal(dropout_mask(results[0][3], 0.3, 2, 4, 200, 200, device="cuda").cpu(), on_cpu)


# ---- compiled and captured ----------------------------------------------------------------------------------------


def test_compiled_calls_draw_as_eager_ones_do(backend: str, device: str) -> None:
    torch._dynamo.reset()
    inputs = qkv(device)

    def two(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The same call twice, which no compiler may merge."""
        return dropped(*tensors, backend=backend), dropped(*tensors, backend=backend)

    def step(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        torch.manual_seed(9)
        a, b = function(*inputs)
        return (a, b, *torch.autograd.grad((a.float().square() + b.float()).sum(), inputs))

    eager, compiled = step(two), step(torch.compile(two, fullgraph=True, backend="aot_eager"))
    assert not torch.equal(eager[0], eager[1])
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_compiled_without_gradients_draws_a_new_mask_each_time(backend: str, device: str) -> None:
    torch._dynamo.reset()
    inputs = qkv(device, requires_grad=False)
    compiled = torch.compile(lambda *x: dropped(*x, backend=backend), fullgraph=True, backend="aot_eager")
    torch.manual_seed(9)
    first, second = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(9)
    assert torch.equal(compiled(*inputs), first)


def test_checkpointing_under_compile_draws_the_same_mask_again(backend: str, device: str) -> None:
    """out is linear in v, so that out^2 summed over the queries is half of v times its gradient, channel by channel.

    PyTorch promises no more: on CUDA its compiler draws what it recomputes from a generator of its own.
    """
    torch._dynamo.reset()
    inputs = qkv(device)

    def block(*tensors: Tensor) -> Tensor:
        return dropped(*tensors, backend=backend).float().square()

    def recomputed(*tensors: Tensor) -> Tensor:
        return checkpoint.checkpoint(block, *tensors, use_reentrant=False).sum(dim=1)

    compiled = torch.compile(recomputed, fullgraph=True, backend="aot_eager_decomp_partition")
    torch.manual_seed(9)
    squares = compiled(*inputs)
    torch.manual_seed(10)
    v = inputs[2]
    (dv,) = torch.autograd.grad(squares.sum(), v)
    of_groups = squares.detach().unflatten(1, (v.shape[2], -1)).sum(dim=2)  # of the query heads of one value head
    torch.testing.assert_close((dv.float() * v.float()).sum(dim=1) / 2, of_groups, rtol=1e-2, atol=1e-3)


def test_compiled_varlen_with_dropout(backend: str, device: str) -> None:
    torch._dynamo.reset()
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    q = torch.randn(12, 2, 16, device=device).half().requires_grad_()

    def call(x: Tensor) -> Tensor:
        return flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, dropout_p=0.3, deterministic=True, backend=backend)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out = function(q)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), q)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.backends("cuda", "triton")
def test_each_replay_of_a_cuda_graph_draws_a_new_mask(backend: str, device: str) -> None:
    """Forward and backward in one graph: every replay draws a new mask, and its backward uses the same mask."""
    batch, nheads, seqlen, headdim = 2, 4, 64, 64
    q, k = (torch.randn(batch, seqlen, nheads, headdim, device=device).half().requires_grad_() for _ in range(2))
    identity = torch.eye(seqlen, device=device).half()[None, :, None]
    v = identity.expand(batch, seqlen, nheads, headdim).contiguous().requires_grad_()
    dout = torch.randn(batch, seqlen, nheads, headdim, device=device).half()

    def call() -> tuple[Tensor, ...]:
        with use_backend(backend):
            out, _, _, rng_state = _flash_attn_forward(q, k, v, 0.3, 0.125, False, -1, -1, 0.0, None, False)
        return (out, rng_state, *torch.autograd.grad(out, (q, k, v), dout))

    graph, (out, rng_state, _dq, _dk, dv) = capture(call)
    masks = []
    for _ in range(3):
        graph.replay()
        kept = (out != 0).transpose(1, 2)
        assert torch.equal(kept, dropout_mask(rng_state, 0.3, batch, nheads, seqlen, seqlen, device=device))
        # dv = (P Z / (1 - p))^T dout, and out is P Z / (1 - p).
        expected = torch.einsum("bihj,bihd->bjhd", out.double(), dout.double())
        torch.testing.assert_close(dv.double(), expected, rtol=1e-2, atol=1e-2)
        masks.append(kept)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
