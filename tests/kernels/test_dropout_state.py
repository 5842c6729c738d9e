"""Dropout's random numbers and its mask as S_dmask shows it: the state that a forward draws, and s_dmask.

s_dmask computes in operators of torch. Python draws the state for traced programs and where the extension is missing;
the extension's forward draws the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C
from flash_attn_mini.options import Options, Sequences
from flash_attn_mini.reference import (
    attention_scores,
    dropout_mask,
    dropout_masks_varlen,
    read_pages,
)
from flash_attn_mini.rng_state import draw_rng_state
from flash_attn_mini.s_dmask import s_dmask as s_dmask_of_arguments

SEEDS = [(0, 0), (42, 0), (-1, 7), (2**63 - 1, 2**40 + 3), (-(2**62), -5)]
ROUNDED = 128
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (9, 4)},
    {"causal": True, "window_size": (5, -1)},
    {"softmax_scale": -0.3},
    {"alibi": "heads"},
    {"alibi": "batch", "causal": True},
]
P = 0.3


def drawn(device: str, generator: torch.Generator | None = None) -> Tensor:
    """The state that the extension's forward draws."""
    x = torch.zeros(1, 1, 1, 8, device=device, dtype=torch.float16)
    state: Tensor = _C.fwd(x, x, x, None, None, P, 0.25, False, -1, -1, 0.0, False, generator)[3]
    return state


def round_up(length: int) -> int:
    return -(-length // ROUNDED) * ROUNDED


def is_negative(x: Tensor) -> Tensor:
    """The sign bit: True for -0.0 too."""
    return torch.signbit(x)


def s_dmask(
    q: Tensor,
    k: Tensor,
    rng_state: Tensor | None,
    *,
    p: float = P,
    cu_seqlens: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    max_seqlens: tuple[int, int] = (0, 0),
    softmax_scale: float = 0.25,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    options = Options(p, softmax_scale, causal, *window_size, softcap, alibi_slopes)
    sequences = None
    if cu_seqlens[0] is not None and cu_seqlens[1] is not None:
        sequences = Sequences(cu_seqlens[0], cu_seqlens[1], *max_seqlens, block_table)
    return s_dmask_of_arguments(q, k, rng_state, sequences, options)


def relative_to_largest(scores: Tensor) -> Tensor:
    """exp(score - largest score of the row), 0 where masked."""
    if scores.numel() == 0:
        return scores
    return (scores - scores.amax(dim=-1, keepdim=True)).exp().nan_to_num(nan=0.0)


def assert_is_mask_of(S_dmask: Tensor, scores: Tensor, kept: Tensor, dtype: torch.dtype) -> None:
    """For one or many heads: the last two dimensions are queries and keys; those of S_dmask are padded."""
    queries, keys = scores.shape[-2:]
    visible = scores.isfinite()
    assert S_dmask.dtype == dtype
    inside = S_dmask[..., :queries, :keys]
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(inside.abs().double(), relative_to_largest(scores), rtol=tolerance, atol=1e-6)
    assert torch.equal(is_negative(inside), visible & ~kept)
    outside = torch.ones(S_dmask.shape, dtype=torch.bool, device=S_dmask.device)
    outside[..., :queries, :keys] = ~visible
    assert (S_dmask[outside] == 0).all()
    assert not is_negative(S_dmask[outside]).any()


# ---- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.backends("cpu", "cuda")
def test_a_seed_repeats_the_state_and_draws_differ(backend: str, device: str) -> None:
    torch.manual_seed(5)
    first, second = drawn(device), drawn(device)
    assert (first.dtype, first.shape, first.device.type) == (torch.int64, (2,), device)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(drawn(device), first)
    torch.manual_seed(6)
    assert not torch.equal(drawn(device), first)


@pytest.mark.backends("cpu", "cuda")
def test_python_and_the_extension_draw_the_same_state(backend: str, device: str, seed: int) -> None:
    torch.manual_seed(seed)
    expected = [drawn(device) for _ in range(3)]
    torch.manual_seed(seed)
    for state in expected:
        in_python = draw_rng_state(torch.empty(0, device=device))
        assert in_python.dtype == torch.int64
        assert torch.equal(in_python, state)


@pytest.mark.backends("cpu", "cuda")
def test_only_the_given_generator_advances(backend: str, device: str) -> None:
    generator = torch.Generator(device=device).manual_seed(5)
    torch.manual_seed(7)
    default = drawn(device)
    torch.manual_seed(7)
    first, second = drawn(device, generator), drawn(device, generator)
    assert torch.equal(drawn(device), default), "the default generator advanced"
    assert not torch.equal(first, second)
    assert torch.equal(drawn(device, generator.manual_seed(5)), first)


@pytest.mark.backends("cpu", "cuda")
def test_the_state_of_the_generator_can_be_restored(backend: str, device: str) -> None:
    """Activation checkpointing restores the generator like this before it runs a forward again."""
    generator = torch.Generator(device=device).manual_seed(11)
    drawn(device, generator)
    saved = generator.get_state()
    first = drawn(device, generator)
    generator.set_state(saved)
    assert torch.equal(drawn(device, generator), first)


def test_all_128_bits_are_drawn() -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.stack([drawn("cpu", generator) for _ in range(400)])
    bits = (states[..., None] >> torch.arange(64)) & 1
    share = bits.double().mean(dim=0)
    assert ((share - 0.5).abs() < 6 * 0.5 / 400**0.5).all()


def test_a_generator_of_another_device_is_named() -> None:
    with pytest.raises(ValueError, match="generator is for cpu; allowed: one for the device of q, meta"):
        drawn("meta", torch.Generator())


@pytest.mark.gpu
def test_a_gpu_draw_moves_the_offset_by_four_and_does_not_wait() -> None:
    device = "cuda"
    generator = torch.Generator(device="cuda").manual_seed(5)
    before = generator.get_offset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn(device, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert generator.get_offset() == before + 4


@pytest.mark.gpu
def test_every_replay_of_a_graph_draws_new_numbers() -> None:
    device = "cuda"
    torch.cuda.manual_seed(9)
    expected = [drawn(device) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = drawn(device)
    torch.cuda.manual_seed(9)
    for one in expected:
        graph.replay()
        assert torch.equal(state, one)


# ---- s_dmask ------------------------------------------------------------------------------------------------------


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("seed_and_offset", SEEDS, ids=str)
def test_the_mask_is_that_of_the_reference(
    seed_and_offset: tuple[int, int], backend: str, device: str, draw: torch.Generator
) -> None:
    q, k = (torch.randn(2, n, h, 16, generator=draw).to(device, torch.float16) for n, h in ((37, 4), (150, 2)))
    rng_state = torch.tensor(seed_and_offset, device=device)
    S_dmask = s_dmask(q, k, rng_state)
    assert S_dmask.shape == (2, 4, 128, 256)
    kept = dropout_mask(rng_state, P, 2, 4, 37, 150, device=device)
    assert torch.equal(is_negative(S_dmask[..., :37, :150]), ~kept)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_probabilities_and_signs_of_dense_calls(
    options: dict[str, Any], backend: str, device: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    batch, seqlen_q, seqlen_k, nheads = 2, 33, 21, 4
    q = torch.randn(batch, seqlen_q, nheads, 16, generator=draw).to(device, dtype)
    k = torch.randn(batch, seqlen_k, 2, 16, generator=draw).to(device, dtype)
    options = {"softmax_scale": 0.25, **options}
    if "alibi" in options:
        size = (nheads,) if options.pop("alibi") == "heads" else (batch, nheads)
        options["alibi_slopes"] = torch.rand(size, generator=draw).to(device)
    scores = attention_scores(q, k, **options)
    rng_state = torch.tensor([123, 4], device=device)
    S_dmask = s_dmask(q, k, rng_state, **options)
    kept = dropout_mask(rng_state, P, batch, nheads, seqlen_q, seqlen_k, device=device)
    assert_is_mask_of(S_dmask, scores, kept, dtype)


@pytest.mark.backends("cpu", "cuda")
def test_softcap_without_dropout(backend: str, device: str, draw: torch.Generator) -> None:
    q, k = (torch.randn(1, n, 2, 16, generator=draw).to(device, torch.float16) for n in (20, 30))
    scores = attention_scores(q, k, softmax_scale=2.0, softcap=3.0)
    S_dmask = s_dmask(q, k, None, p=0.0, softmax_scale=2.0, softcap=3.0)
    assert_is_mask_of(S_dmask, scores, torch.ones_like(scores) > 0, torch.float16)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_sequences_of_variable_length(paged: bool, backend: str, device: str, draw: torch.Generator) -> None:
    lengths_q, lengths_k, nheads = [5, 0, 33, 1], [40, 3, 0, 17], 4
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), nheads, 16, generator=draw).to(device, torch.float16)
    block_table = None
    if paged:
        pool = torch.randn(20, 8, 2, 16, generator=draw).to(device, torch.float16)
        block_table = torch.randperm(20, generator=draw).reshape(4, 5).to(device, torch.int32)
        k = pool
        of_sequence = [read_pages(pool, block_table, bidb, 0, n) for bidb, n in enumerate(lengths_k)]
    else:
        k = torch.randn(sum(lengths_k), 2, 16, generator=draw).to(device, torch.float16)
        of_sequence = list(k.split(lengths_k))
    scores = [
        attention_scores(x[None], y[None], softmax_scale=0.25, causal=True)
        for x, y in zip(q.split(lengths_q), of_sequence, strict=True)
    ]
    rng_state = torch.tensor([77, 8], device=device)
    S_dmask = s_dmask(
        q, k, rng_state, cu_seqlens=(cu_q, cu_k), max_seqlens=(33, 40), causal=True, block_table=block_table
    )
    assert S_dmask.shape == (4, nheads, 128, 128)
    kept = dropout_masks_varlen(rng_state, P, nheads, cu_q, cu_k)
    for i, own in enumerate(scores):
        assert_is_mask_of(S_dmask[i], own[0], kept[i], torch.float16)


@pytest.mark.backends("cpu", "cuda")
def test_forward_returns_the_state_that_it_drew(backend: str, device: str, draw: torch.Generator) -> None:
    q, k, v = (torch.randn(1, n, 2, 16, generator=draw).to(device, torch.float16) for n in (20, 30, 30))
    arguments = (None, None, P, 0.25, True, -1, -1, 0.0)
    torch.manual_seed(21)
    expected = draw_rng_state(q)
    torch.manual_seed(21)
    _, _, S_dmask, rng_state = _C.fwd(q, k, v, *arguments, True, None)
    assert torch.equal(rng_state, expected)
    assert torch.equal(S_dmask, s_dmask(q, k, rng_state, causal=True))
    _, _, S_dmask, rng_state = _C.fwd(q, k, v, *arguments, False, torch.Generator(device=device).manual_seed(21))
    assert S_dmask is None
    assert rng_state.shape == (2,)
    _, _, S_dmask, rng_state = _C.fwd(q, k, v, None, None, 0.0, 0.25, True, -1, -1, 0.0, True, None)
    assert S_dmask is rng_state is None


@pytest.mark.gpu
def test_s_dmask_does_not_wait() -> None:
    q = torch.randn(40, 2, 16, device="cuda", dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 13, 40], device="cuda", dtype=torch.int32)
    rng_state = torch.zeros(2, device="cuda", dtype=torch.int64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        s_dmask(q, q, rng_state, cu_seqlens=(cu_seqlens, cu_seqlens), max_seqlens=(27, 27), causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [(0, 5), (5, 0)], ids=["no_queries", "no_keys"])
def test_nothing_to_show(rows: tuple[int, int]) -> None:
    q, k = (torch.zeros(2, n, 2, 8) for n in rows)
    S_dmask = s_dmask(q, k, torch.zeros(2, dtype=torch.int64))
    assert S_dmask.shape == (2, 2, round_up(rows[0]), round_up(rows[1]))
    assert not S_dmask.any()


@pytest.mark.parametrize("without", ["queries", "keys", "pages", "nothing"])
def test_the_size_is_checked_before_any_memory_is_taken(without: str) -> None:
    """2^31 queries and keys would take more memory than any machine has, whatever the tensors hold."""
    q, k = torch.zeros(0 if without == "queries" else 5, 2, 8), torch.zeros(0 if without == "keys" else 5, 2, 8)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
    block_table = None
    if without == "pages":
        k, block_table, cu_seqlens_k = k[None], torch.zeros(1, 0, dtype=torch.int32), torch.zeros_like(cu_seqlens_k)
    with pytest.raises(
        ValueError, match=r"S_dmask has the shape \[1, 2, 2147483648, 2147483648\].*; allowed: at most 2\^34"
    ):
        s_dmask(
            q,
            k,
            torch.zeros(2, dtype=torch.int64),
            cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
            max_seqlens=(2**31 - 1, 2**31 - 1),
            block_table=block_table,
        )


def test_s_dmask_of_inputs_that_require_a_gradient_has_none(draw: torch.Generator) -> None:
    q, k = (torch.randn(1, n, 2, 8, generator=draw).requires_grad_() for n in (5, 7))
    rng_state = torch.tensor([1, 2])
    assert not s_dmask(q, k, rng_state).requires_grad
    assert torch.func.grad(lambda q: s_dmask(q, k, rng_state).sum())(q).count_nonzero() == 0


def test_autocast_does_not_round_the_scores(draw: torch.Generator) -> None:
    q, k = (torch.randn(1, n, 2, 16, generator=draw) for n in (5, 7))
    expected = s_dmask(q, k, torch.tensor([1, 2]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(s_dmask(q, k, torch.tensor([1, 2])), expected)


@pytest.mark.parametrize(
    "varlen", [pytest.param(x, id=name, marks=pytest.mark.thorough) for x, name in ((False, "dense"), (True, "varlen"))]
)
def test_s_dmask_compiles_to_one_graph(varlen: bool, draw: torch.Generator) -> None:
    rng_state = torch.randint(-(2**62), 2**62, (2,), generator=draw)
    compiled = torch.compile(s_dmask, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries, keys in ((20, 30), (140, 200), (65, 129)):
        q, k = (torch.randn(2, n, 2, 16, generator=draw) for n in (queries, keys))
        call: dict[str, Any] = {"causal": True}
        if varlen:
            cu_seqlens_q, cu_seqlens_k = (
                torch.arange(3, dtype=torch.int32) * n for n in (queries, keys)
            )  # fmt: skip
            call.update(cu_seqlens=(cu_seqlens_q, cu_seqlens_k), max_seqlens=(queries, keys))
            q, k = q.flatten(0, 1), k.flatten(0, 1)
        assert torch.equal(compiled(q, k, rng_state, **call), s_dmask(q, k, rng_state, **call))
