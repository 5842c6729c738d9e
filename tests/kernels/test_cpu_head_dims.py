"""The cpu backend with a head dim of its own for v, and with head dims up to 512: which bits depend on what.

test_head_dims.py compares values with the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_mini import flash_attn_func, flash_attn_with_kvcache

from ..conftest import CPU_DTYPES
from ..support.kvcache_calls import filled_call, forward, random_tensor
from ..support.threads import number_of_threads_kept

NAMES = ("out", "lse", "dq", "dk", "dv")
THREADS = (1, 2, 5)
PAIRS = [(192, 128), (40, 72), (1, 300), (512, 7), (300, 512)]
each_dtype = pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_pair = pytest.mark.parametrize(("headdim", "headdim_v"), PAIRS, ids=lambda x: str(x))
# On AMX, groups of up to 8 rows run on another kernel than groups of more.
each_length = pytest.mark.parametrize("seqlen_q", [1, 4, 90])


OPTIONS: dict[str, Any] = {"softmax_scale": 0.1, "causal": True, "backend": "cpu"}


def results_and_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    leaves = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
    out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **OPTIONS)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    for name, x in got.items():
        assert torch.equal(x, expected[name]), f"{name} {where}"


def draw_inputs(
    headdim: int, headdim_v: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout in poisoned memory: two query heads share a key/value head."""
    shapes = ((seqlen_q, 4, headdim), (seqlen_k, 2, headdim), (seqlen_k, 2, headdim_v), (seqlen_q, 4, headdim_v))
    q, k, v, dout = (random_tensor((2, *shape), dtype, draw) for shape in shapes)
    return q, k, v, dout


@each_length
@each_pair
@each_dtype
def test_a_column_of_v_has_its_bits_whatever_the_other_columns(
    dtype: torch.dtype, headdim: int, headdim_v: int, seqlen_q: int, draw: torch.Generator
) -> None:
    q, k, v, dout = draw_inputs(headdim, headdim_v, seqlen_q, 203, dtype, draw)
    whole = results_and_gradients(q, k, v, dout)
    for columns in (slice(0, 1), slice(headdim_v // 3, None), slice(5, headdim_v - 1)):
        part = results_and_gradients(q, k, v[..., columns], dout[..., columns])
        expected = {"out": whole["out"][..., columns], "lse": whole["lse"], "dv": whole["dv"][..., columns]}
        assert_equal({name: part[name] for name in expected}, expected, columns)


@each_length
@each_pair
@each_dtype
def test_columns_of_zeros_in_q_and_k_change_nothing(
    dtype: torch.dtype, headdim: int, headdim_v: int, seqlen_q: int, draw: torch.Generator
) -> None:
    q, k, v, dout = draw_inputs(headdim, headdim_v, seqlen_q, 203, dtype, draw)
    expected = results_and_gradients(q, k, v, dout)
    for more in (1, 212):
        wide_q, wide_k = (torch.nn.functional.pad(x, (0, min(more, 512 - headdim))) for x in (q, k))
        got = results_and_gradients(wide_q, wide_k, v, dout)
        for name in ("dq", "dk"):
            assert not got[name][..., headdim:].any(), (name, more)
            got[name] = got[name][..., :headdim]
        assert_equal(got, expected, more)


@pytest.mark.parametrize(("nheads", "fewer"), [(64, 16), (8, 1), (7, 1)])
@each_pair
@each_dtype
def test_a_row_has_its_bits_whatever_the_number_of_rows(
    dtype: torch.dtype, headdim: int, headdim_v: int, nheads: int, fewer: int, draw: torch.Generator
) -> None:
    """Blocks of many rows and of few run on different loops."""
    size = 1 if dtype != torch.bfloat16 else fewer
    call = filled_call([333], (1, nheads, headdim), 1, 333, dtype, draw)
    call["v_cache"] = random_tensor((1, 333, 1, headdim_v), dtype, draw)
    out, lse = forward(call)
    for head in range(0, nheads, size):
        heads = slice(head, head + size)
        out_part, lse_part = forward({**call, "q": call["q"][:, :, heads]})
        assert torch.equal(out_part, out[:, :, heads]), heads
        assert torch.equal(lse_part, lse[:, heads]), heads


@each_length
@each_pair
@each_dtype
def test_pages_in_one_split_give_the_bits_of_the_forward(
    dtype: torch.dtype, headdim: int, headdim_v: int, seqlen_q: int, draw: torch.Generator
) -> None:
    q, k, v, _ = draw_inputs(headdim, headdim_v, seqlen_q, 208, dtype, draw)
    expected_out, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **OPTIONS)
    block_table = torch.randperm(26, generator=draw).view(2, 13).int()

    def in_pages(x: Tensor) -> Tensor:
        pages = random_tensor((26, 16, *x.shape[2:]), dtype, draw)
        pages[block_table.flatten().long()] = x.unflatten(1, (13, 16)).flatten(0, 1)
        return pages

    out, lse = flash_attn_with_kvcache(
        q,
        in_pages(k),
        in_pages(v),
        cache_seqlens=208,
        block_table=block_table,
        num_splits=1,
        return_softmax_lse=True,
        **OPTIONS,
    )
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)


# The number of keys in a block of the backward depends on both head dims and on the number of threads.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 700), (5, 700)])
@each_pair
@each_dtype
@number_of_threads_kept()
def test_results_do_not_depend_on_the_threads(
    dtype: torch.dtype, headdim: int, headdim_v: int, seqlen_q: int, seqlen_k: int, draw: torch.Generator
) -> None:
    inputs = draw_inputs(headdim, headdim_v, seqlen_q, seqlen_k, dtype, draw)
    torch.set_num_threads(THREADS[0])
    expected = results_and_gradients(*inputs)
    for count in THREADS[1:]:
        torch.set_num_threads(count)
        assert_equal(results_and_gradients(*inputs), expected, count)
