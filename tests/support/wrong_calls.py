"""Valid calls, and changes that make them wrong, for the tables of wrong calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = dict[str, Any]
BATCH, SEQLEN_Q, SEQLEN_K, NHEADS, NHEADS_K, HEADDIM = 2, 5, 7, 6, 3, 16


def valid_call(device: str) -> Call:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=torch.float16)

    return {
        "q": tensor(BATCH, SEQLEN_Q, NHEADS, HEADDIM),
        "k": tensor(BATCH, SEQLEN_K, NHEADS_K, HEADDIM),
        "v": tensor(BATCH, SEQLEN_K, NHEADS_K, HEADDIM),
    }


TOTAL_Q, TOTAL_K = 9, 14  # of three sequences


def valid_varlen_call(device: str) -> Call:
    """Three sequences of (4, 0, 5) queries and (7, 2, 5) keys."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=torch.float16)

    return {
        "q": tensor(TOTAL_Q, NHEADS, HEADDIM),
        "k": tensor(TOTAL_K, NHEADS_K, HEADDIM),
        "v": tensor(TOTAL_K, NHEADS_K, HEADDIM),
        "cu_seqlens_q": torch.tensor([0, 4, 4, 9], device=device, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 7, 9, 14], device=device, dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }


PAGE_SIZE, NUM_PAGES = 16, 6


def valid_paged_call(device: str) -> Call:
    """Three sequences of (4, 0, 5) queries and (20, 2, 33) keys in pages of 16."""
    call = valid_varlen_call(device)
    pool = torch.zeros(NUM_PAGES, PAGE_SIZE, NHEADS_K, HEADDIM, device=device, dtype=torch.float16)
    call.update(k=pool, v=pool.clone(), max_seqlen_k=33)
    call["cu_seqlens_k"] = torch.tensor([0, 20, 22, 55], device=device, dtype=torch.int32)
    # Entries past a sequence's last page are not read.
    call["block_table"] = torch.tensor([[3, 0, -1], [5, 99, 99], [1, 2, 4]], device=device, dtype=torch.int32)
    return call


CAPACITY = 20


def valid_kvcache_call(device: str) -> Call:
    """Three sequences of (3, 0, 18) keys in a cache of five rows for 20 keys; two new keys, five queries."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=torch.float16)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    return {
        "q": tensor(3, SEQLEN_Q, NHEADS, HEADDIM),
        "k_cache": tensor(5, CAPACITY, NHEADS_K, HEADDIM),
        "v_cache": tensor(5, CAPACITY, NHEADS_K, HEADDIM),
        "k": tensor(3, 2, NHEADS_K, HEADDIM),
        "v": tensor(3, 2, NHEADS_K, HEADDIM),
        "rotary_cos": tensor(30, HEADDIM // 2),
        "rotary_sin": tensor(30, HEADDIM // 2),
        "cache_seqlens": integers(3, 0, 18),
        "cache_batch_idx": integers(4, 0, 2),
        "cache_leftpad": integers(1, 0, 7),
    }


def valid_paged_kvcache_call(device: str) -> Call:
    """The same in pages of 4: three sequences of up to five pages in a pool of 15."""
    call = valid_kvcache_call(device)
    pool = torch.zeros(15, 4, NHEADS_K, HEADDIM, device=device, dtype=torch.float16)
    call.update(k_cache=pool, v_cache=pool.clone())
    del call["cache_batch_idx"]
    # Entries past a sequence's last page are not read.
    table = [[9, 3, -1, 99, 99], [14, -1, 99, 99, 99], [0, 1, 2, 8, 11]]
    call["block_table"] = torch.tensor(table, device=device, dtype=torch.int32)
    return call


@dataclass(frozen=True)
class WrongCall:
    name: str
    change: Callable[[Call], object]  # changes the arguments of a valid call
    error: type[Exception] | tuple[type[Exception], ...]
    argument: str  # this and the next two: regular expressions that the message must contain
    given: str
    allowed: str

    def __str__(self) -> str:
        return self.name


def shape(argument: str, *size: int) -> Callable[[Call], object]:
    return lambda call: call.update({argument: call[argument].new_zeros(size)})


def shapes(q: tuple[int, ...], kv: tuple[int, ...]) -> Callable[[Call], object]:
    return lambda call: call.update(q=call["q"].new_zeros(q), k=call["k"].new_zeros(kv), v=call["v"].new_zeros(kv))


def cast(dtype: torch.dtype, *arguments: str) -> Callable[[Call], object]:
    return lambda call: call.update({a: call[a].to(dtype) for a in arguments})


def given(**arguments: object) -> Callable[[Call], object]:
    return lambda call: call.update(arguments)


def strided(argument: str) -> Callable[[Call], object]:
    def change(call: Call) -> None:
        call[argument] = call[argument].repeat_interleave(2, dim=-1)[..., ::2]

    return change


def slopes(dtype: torch.dtype, *size: int) -> Callable[[Call], object]:
    return lambda call: call.update(alibi_slopes=torch.zeros(size, dtype=dtype, device=call["q"].device))


def ranges(*size: int, values: tuple[int, ...] = (0,), dtype: torch.dtype = torch.int32) -> Callable[[Call], object]:
    """key_ranges of this size, full of the values in turn."""

    def change(call: Call) -> None:
        numbers = torch.tensor(values, dtype=dtype, device=call["q"].device)
        call["key_ranges"] = numbers[torch.arange(math.prod(size), device=numbers.device) % len(values)].view(size)

    return change


def bias(*size: int, dtype: torch.dtype = torch.float16) -> Callable[[Call], object]:
    """attn_bias of this size."""
    return lambda call: call.update(attn_bias=torch.zeros(size, dtype=dtype, device=call["q"].device))


def numbers(argument: str, values: object) -> Callable[[Call], object]:
    """Replaces the values of a tensor; dtype and device stay."""
    return lambda call: call.update({argument: call[argument].new_tensor(values)})


def meta(argument: str) -> Callable[[Call], object]:
    return lambda call: call.update({argument: call[argument].to("meta")})


V, T = ValueError, TypeError
ALL = ("q", "k", "v")


def assert_says(message: str, *patterns: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, message, re.DOTALL), f"the message does not contain /{pattern}/:\n{message}"
