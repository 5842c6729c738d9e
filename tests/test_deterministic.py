"""deterministic=True: the same backward gives the same bits, however often and beside whatever else it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import multiprocessing

from flash_attn_mini import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.gpu

HEADDIMS = (32, 64, 96, 128, 192, 256)
# Many key blocks for few row blocks: key blocks wait for one another at each step. (batch, nheads, seqlen_q, seqlen_k)
SHAPES = ((4, 9, 512, 2048), (8, 8, 127, 1024))
PROCESSES = 8


def count_differences(headdim: int, causal: bool, shape: tuple[int, ...], repeats: int, seed: int) -> list[int]:
    """How many of `repeats` backwards of one forward give another dq, dk or dv than the first."""
    batch, nheads, seqlen_q, seqlen_k = shape
    draw = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": draw}
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    leaves = [torch.randn(batch, seqlen, nheads, headdim, **options).requires_grad_() for seqlen in lengths]
    out = flash_attn_func(*leaves, causal=causal, deterministic=True, backend="cuda")
    dout = torch.randn(out.shape, **options)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    different = torch.zeros(3, device="cuda", dtype=torch.int64)
    for _ in range(repeats):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        different += torch.stack([(a != b).any() for a, b in zip(again, first, strict=True)])
    return different.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_backward_is_repeatable(headdim: int, causal: bool, seed: int) -> None:
    """108,000 backwards over all parameters. With relaxed order 12 % differed at d256, full, 512 x 2048."""
    for shape in SHAPES:
        assert count_differences(headdim, causal, shape, 4500, seed) == [0, 0, 0], f"dq, dk, dv differ: {shape}"


def repeat_in_process(rank: int, seed: int) -> None:
    for headdim in HEADDIMS:
        for causal in (False, True):
            for shape in SHAPES:
                found = count_differences(headdim, causal, shape, 50, seed + rank)
                assert found == [0, 0, 0], f"dq, dk, dv differ: d{headdim}, causal={causal}, {shape}: {found}"


@pytest.mark.slow
def test_a_backward_is_repeatable_beside_other_processes(seed: int) -> None:
    multiprocessing.spawn(repeat_in_process, args=(seed,), nprocs=PROCESSES)


@pytest.mark.parametrize("cu_seqlens", [[0, 1000, 0, 1000], [0, 700, 300, 1000], [1000, 0, 500, 200]])
def test_falling_cu_seqlens_do_not_hang(cu_seqlens: list[int], seed: int) -> None:
    """Their sequences overlap, and some key blocks belong to none: no key block may wait for those."""
    draw = torch.Generator("cuda").manual_seed(seed)
    leaves = [
        torch.randn(1000, 2, 64, device="cuda", dtype=torch.float16, generator=draw).requires_grad_() for _ in range(3)
    ]
    lengths = torch.tensor(cu_seqlens, device="cuda", dtype=torch.int32)
    out = flash_attn_varlen_func(*leaves, lengths, lengths, 1000, 1000, deterministic=True, backend="cuda")
    torch.autograd.grad(out.sum(), leaves)
    torch.cuda.synchronize()
