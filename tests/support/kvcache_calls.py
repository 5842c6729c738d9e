"""Calls of `_C.fwd_kvcache` by keyword, with random caches in poisoned memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_mini import _C

from . import op_calls
from .poison import poisoned

Call = dict[str, Any]
ARGUMENTS = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "rotary_sin", "cache_batch_idx"),
    *("cache_leftpad", "block_table", "alibi_slopes", "out", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "is_rotary_interleaved", "num_splits", "split_keys", "cache_seqlen"),
)
DEFAULTS: Call = {
    **dict.fromkeys(ARGUMENTS),
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "split_keys": 0,
    "cache_seqlen": -1,
}


def values(call: Call) -> list[Any]:
    """The arguments in the order of the extension."""
    assert set(call) <= set(ARGUMENTS), set(call) - set(ARGUMENTS)
    complete = {**DEFAULTS, "softmax_scale": call["q"].shape[-1] ** -0.5, **call}
    return [complete[name] for name in ARGUMENTS]


def forward(call: Call, **changes: Any) -> tuple[Tensor, Tensor]:
    out, lse = _C.fwd_kvcache(*values({**call, **changes}))
    return out, lse


def check(call: Call, backend: str) -> None:
    """The checks of the op, which has no ``out``."""
    renamed = {"is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}
    named = {renamed.get(name, name): value for name, value in zip(ARGUMENTS, values(call), strict=True)}
    assert named.pop("out") is None
    window_size = (named.pop("window_size_left"), named.pop("window_size_right"))
    op_calls.check_call(
        op_calls.FWD_KVCACHE, op_calls.kvcache_arguments(window_size=window_size, **named, backend=backend)
    )


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    x = poisoned(shape, dtype, "cpu")
    x.copy_(torch.randn(shape, generator=draw, dtype=torch.float64))
    return x


def filled_call(
    lengths: list[int],
    q_shape: tuple[int, int, int],
    nheads_k: int,
    capacity: int,
    dtype: torch.dtype,
    draw: torch.Generator,
) -> Call:
    """A call without new keys; q_shape is [seqlen_q, nheads, headdim]. Cache rows are NaN from their length on."""
    headdim = q_shape[-1]
    caches = [random_tensor((len(lengths), capacity, nheads_k, headdim), dtype, draw) for _ in range(2)]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, length:] = torch.nan
    return {
        "q": random_tensor((len(lengths), *q_shape), dtype, draw),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }
