"""Features and variable length on the cpu backend: instruction sets, threads, pages, the bits of its dropout mask.

test_features.py and test_varlen.py test the accuracy of the features on every backend.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import _C, flash_attn_func
from flash_attn_mini.reference import dropout_mask

from ..conftest import CPU_DTYPES
from ..support.instruction_sets import each_lesser_level, run_on
from ..support.threads import number_of_threads_kept

ROUNDS = 8
THREADS = (1, 2, 3, 8)
each_dtype = pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dataclass
class Options:
    """The options of the functions of `_C`, from alibi_slopes to softcap."""

    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    softmax_scale: float = 0.2
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0

    @property
    def tail(self) -> tuple[Any, ...]:
        return self.softmax_scale, self.causal, *self.window_size, self.softcap


def draw_options(choice: random.Random, draw: torch.Generator, batch: int, nheads: int) -> Options:
    """A random combination of features that a call accepts."""
    softcap = choice.choice((0.0, 0.0, 2.0))
    slopes = choice.choice((None, torch.rand(nheads, generator=draw), torch.rand(batch, nheads, generator=draw)))
    window = (choice.choice((-1, 0, choice.randint(1, 150))), choice.choice((-1, 0, choice.randint(1, 150))))
    return Options(
        slopes,
        0.0 if softcap else choice.choice((0.0, 0.3)),
        choice.uniform(0.05, 0.3),
        choice.random() < 0.5,
        choice.choice(((-1, -1), window)),
        softcap,
    )


@dataclass
class Batch:
    """Sequences of different lengths, and the gradients of their results."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    lengths: list[tuple[int, int]]  # (queries, keys) of each sequence
    options: Options
    seed: int

    @property
    def cu_seqlens(self) -> list[Tensor]:
        return [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*self.lengths, strict=True)]

    @property
    def longest(self) -> list[int]:
        return [max(x) for x in zip(*self.lengths, strict=True)]

    def forward(
        self, kv: tuple[Tensor, Tensor] | None = None, block_table: Tensor | None = None
    ) -> list[Tensor | None]:
        """out, lse and rng_state, the random numbers always the same; k and v may be given in pages."""
        o = self.options
        generator = torch.Generator().manual_seed(self.seed)
        out, lse, _, rng_state = _C.varlen_fwd(
            self.q, *(kv or (self.k, self.v)), None, *self.cu_seqlens, None, None, block_table, o.alibi_slopes,
            *self.longest, o.dropout_p, o.softmax_scale, False, *o.tail[1:], False, generator,
        )  # fmt: skip
        return [out, lse, rng_state]

    def run(self) -> list[Tensor | None]:
        """out, lse, dq, dk, dv and softmax_d."""
        o = self.options
        out, lse, rng_state = self.forward()
        gradients = _C.varlen_bwd(
            self.dout, self.q, self.k, self.v, out, lse, None, None, None, *self.cu_seqlens, o.alibi_slopes,
            *self.longest, o.dropout_p, o.softmax_scale, False, *o.tail[1:], False, None, rng_state,
            dsoftmax_lse=self.dlse,
        )  # fmt: skip
        return [out, lse, *gradients]


def make_batch(
    lengths: list[tuple[int, int]], heads: tuple[int, int], headdim: int, dtype: torch.dtype, draw: torch.Generator,
    options: Options,
) -> Batch:  # fmt: skip
    nheads, nheads_k = heads
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    shapes = [(total_q, nheads, headdim), *2 * [(total_k, nheads_k, headdim)], (total_q, nheads, headdim)]
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn((nheads, total_q), generator=draw, dtype=wide)
    return Batch(q, k, v, dout, dlse, lengths, options, draw.initial_seed())


def random_batch(dtype: torch.dtype, seed: int, draw: torch.Generator) -> Batch:
    """At most one long sequence; the others are short or empty."""
    choice = random.Random(seed)

    def length() -> int:
        return choice.choice((0, 1, choice.randint(2, 60), choice.randint(61, 200)))

    lengths = [(length(), length()) for _ in range(choice.randint(1, 6))]
    lengths[choice.randrange(len(lengths))] = (choice.randint(1, 500), choice.randint(1, 500))
    nheads_k = choice.randint(1, 2)
    heads = (nheads_k * choice.choice((1, 1, 3, 4)), nheads_k)
    options = draw_options(choice, draw, len(lengths), heads[0])
    return make_batch(lengths, heads, choice.choice((64, 128, choice.randint(1, 256))), dtype, draw, options)


def assert_equal_bits(got: list[Tensor | None], expected: list[Tensor | None], where: str) -> None:
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x is None or y is None:
            assert x is y is None, f"result {i} of {where}"
            continue
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), f"result {i} of {where}"


@each_dtype
@pytest.mark.parametrize("round_", range(ROUNDS))
@number_of_threads_kept()
def test_random_batches_do_not_depend_on_the_threads(
    round_: int, dtype: torch.dtype, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    batch = random_batch(dtype, seed, draw)
    torch.set_num_threads(THREADS[0])
    expected = batch.run()
    assert all(not x.isnan().any() for x in expected)
    for count in THREADS:
        torch.set_num_threads(count)
        assert_equal_bits(batch.run(), expected, f"{batch.lengths} {batch.options}, {count} threads, {described_seed}")


@each_dtype
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_a_sequence_gives_the_bits_of_the_dense_call(
    round_: int, dtype: torch.dtype, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    """With dropout only the first sequence is compared: a mask depends on the index of the sequence."""
    batch = random_batch(dtype, seed, draw)
    o = batch.options
    out, lse, dq, dk, dv, _ = batch.run()
    *_, rng_state = batch.forward()
    first_q = first_k = 0
    for b, (queries, keys) in enumerate(batch.lengths):
        rows, columns = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
        first_q, first_k = first_q + queries, first_k + keys
        if queries == 0 or keys == 0 or (b > 0 and o.dropout_p > 0):
            continue
        slopes = o.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        q, k, v, dout = (
            x[part][None] for x, part in ((batch.q, rows), (batch.k, columns), (batch.v, columns), (batch.dout, rows))
        )
        generator = torch.Generator().manual_seed(batch.seed)
        own_out, own_lse, _, own_state = _C.fwd(q, k, v, None, slopes, o.dropout_p, *o.tail, False, generator)
        assert_equal_bits([own_state], [rng_state], f"rng_state of {o}, {described_seed}")
        own = _C.bwd(
            dout, q, k, v, own_out, own_lse, None, None, None, slopes, o.dropout_p, *o.tail, False, None, own_state,
            dsoftmax_lse=batch.dlse[:, rows][None].contiguous(),
        )  # fmt: skip
        got = [out[rows], lse[:, rows], dq[rows], dk[columns], dv[columns]]
        expected = [x[0] for x in (own_out, own_lse, *own[:3])]
        assert_equal_bits(got, expected, f"sequence {b} of {batch.lengths} {o}, {described_seed}")


@each_dtype
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
def test_pages_give_the_bits_of_contiguous_keys(
    page_size: int, dtype: torch.dtype, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    """Pages in random order; keys that no sequence uses are NaN."""
    batch = random_batch(dtype, seed, draw)
    pages_of = [-(-keys // page_size) for _, keys in batch.lengths]
    numbers = torch.randperm(sum(pages_of) + 2, generator=draw).tolist()
    table = torch.full((len(batch.lengths), max(pages_of) + 1), numbers.pop(), dtype=torch.int32)
    paged = [
        torch.full((len(numbers) + 1, page_size, *x.shape[1:]), torch.nan, dtype=dtype) for x in (batch.k, batch.v)
    ]
    first = 0
    for b, (_, keys) in enumerate(batch.lengths):
        for page in range(pages_of[b]):
            table[b, page] = numbers.pop()
            begin, end = page * page_size, min((page + 1) * page_size, keys)
            for to, x in zip(paged, (batch.k, batch.v), strict=True):
                to[table[b, page], : end - begin] = x[first + begin : first + end]
        first += keys
    where = f"{batch.lengths} {batch.options}, {described_seed}"
    assert_equal_bits(batch.forward((paged[0], paged[1]), table), batch.forward(), where)


@each_dtype
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (5, 1), (64, 1)], ids=str)
def test_dropout_keeps_what_philox_says(
    heads: tuple[int, int], dtype: torch.dtype, seed: int, draw: torch.Generator, described_seed: str
) -> None:
    """With v the identity, out is the probabilities themselves; with dout the identity, dv is their transpose."""
    choice = random.Random(seed)
    queries, keys, p = choice.randint(1, 300), choice.randint(1, 256), choice.uniform(0.05, 0.95)
    nheads, nheads_k = heads
    q = torch.zeros(2, queries, nheads, keys, dtype=dtype)
    k, v = torch.zeros(2, keys, nheads_k, keys, dtype=dtype), torch.eye(keys, dtype=dtype)
    v = v[None, :, None].expand(2, keys, nheads_k, keys)
    options = (p, 1.0, False, -1, -1, 0.0)
    out, lse, _, rng_state = _C.fwd(q, k, v, None, None, *options, False, draw)
    kept = dropout_mask(rng_state, p, 2, nheads, queries, keys)
    where = f"{queries} queries, {keys} keys, {heads} heads, p={p}, {described_seed}"
    assert torch.equal(out.transpose(1, 2) != 0, kept), where

    seen = min(queries, keys)  # dout[i] is the unit vector i
    dout = torch.eye(queries, keys, dtype=dtype)[None, :, None].expand(2, queries, nheads, keys)
    dv = _C.bwd(dout, q, k, v, out, lse, None, None, None, None, *options, False, None, rng_state)[2]
    kept_by_group = kept.unflatten(1, (nheads_k, -1)).any(dim=2)[:, :, :seen]  # [2, nheads_k, seen, keys]
    assert torch.equal(dv.permute(0, 2, 3, 1)[:, :, :seen] != 0, kept_by_group), where


def test_alibi_of_large_scores_leaves_the_probability_of_the_largest_at_1(draw: torch.Generator) -> None:
    """lse is then the largest logit, rounded to a multiple of 64: P must not become exp(rounding error)."""
    q, k, v, dout = (3e4 * torch.randn(1, 70, 1, 72, generator=draw) for _ in range(4))
    dout /= 3e4
    slopes = torch.tensor([0.37])
    options = (slopes, 0.0, 0.3, False, -1, -1, 0.0)
    out, lse, _, _ = _C.fwd(q, k, v, None, *options, False, None)
    assert lse.abs().max() > 1e9
    dv = _C.bwd(dout, q, k, v, out, lse, None, None, None, *options, False, None, None)[2]
    torch.testing.assert_close(dv.sum(dim=1), dout.sum(dim=1), rtol=1e-4, atol=1e-4)


@each_dtype
@pytest.mark.parametrize("nheads", [1, 32])
def test_an_infinite_value_behind_the_mask_reaches_no_row(
    nheads: int, dtype: torch.dtype, draw: torch.Generator
) -> None:
    """With 32 heads of one key head, all rows of a block are one query and see the same keys: no step is masked."""
    q = torch.randn(1, 70, nheads, 40, generator=draw).to(dtype)
    k, v = (torch.randn(1, 70, 1, 40, generator=draw).to(dtype) for _ in range(2))
    clean = flash_attn_func(q, k, v, causal=True, backend="cpu")
    v[:, 33] = torch.inf
    out = flash_attn_func(q, k, v, causal=True, backend="cpu")
    torch.testing.assert_close(out[:, :33], clean[:, :33])
    assert not out[:, 33:].isfinite().any()


def attention_and_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: float) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, backend="cpu", **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@each_dtype
@pytest.mark.parametrize(("softcap", "scale"), [(1e20, 1.0), (1e18, 0.125)])
def test_a_huge_softcap_changes_nothing(
    softcap: float, scale: float, dtype: torch.dtype, draw: torch.Generator
) -> None:
    inputs = [torch.randn(2, 70, 3, 40, generator=draw).to(dtype) for _ in range(4)]
    capped = attention_and_gradients(*inputs, softmax_scale=scale, softcap=softcap)
    for got, expected in zip(capped, attention_and_gradients(*inputs, softmax_scale=scale), strict=True):
        allowed = (2 if dtype.itemsize == 2 else 256) * torch.finfo(dtype).eps * expected.abs().max()
        assert (got - expected).abs().max() <= allowed


@each_dtype
@pytest.mark.parametrize(("softcap", "scale"), [(1e-20, 1.0), (1e-9, 1e11)])
def test_a_tiny_softcap_gives_all_keys_the_same_weight(
    softcap: float, scale: float, dtype: torch.dtype, draw: torch.Generator
) -> None:
    q, k, v, dout = (torch.randn(2, 70, 3, 40, generator=draw).to(dtype) for _ in range(4))
    q[:, 0] = 0.0  # tanh(0), where the slope is not 0
    out, dq, dk, dv = attention_and_gradients(q, k, v, dout, softmax_scale=scale, softcap=softcap)
    for got, summed in ((out, v), (dv, dout)):
        expected = summed.double().mean(dim=1, keepdim=True).expand(got.shape)
        torch.testing.assert_close(got, expected.to(dtype))
    assert dq[:, 1:].abs().max() < 1e-6
    assert dk.abs().max() < 1e-6


SCRIPT = """
from tests.support.feature_cases import SMALL_FEATURE_CASES
from tests.support.feature_checks import check_dense, check_varlen
from tests.support.varlen_cases import SMALL_VARLEN_CASES

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for case in SMALL_FEATURE_CASES[::3]:
        check_dense(case, "cpu", "cpu", dtype, seed, f"{level} {seed}")
    for case in SMALL_VARLEN_CASES[::5]:
        check_varlen(case, "cpu", "cpu", dtype, seed, f"{level} {seed}")
print("checked")
"""


@each_lesser_level
def test_features_on_a_lesser_instruction_set(level: str) -> None:
    run_on(level, SCRIPT)
