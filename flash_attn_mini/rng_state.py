"""The random state of dropout: drawn from torch's generator, in eager code and in traced programs.

csrc/api/flash_api.h draws the same numbers for eager calls of the extension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .namespace import CUSTOM_OPS, NAMESPACE, qualified

_calls = itertools.count()


def draw_rng_state(q: Tensor) -> Tensor:
    """Seed and offset of a call's dropout, int64 ``[2]``: 128 bits from torch's generator of the device of q."""
    return torch.empty(2, dtype=torch.int64, device=q.device).random_(-(2**63), None)


def draw_in_program(*inputs: Tensor) -> Tensor:
    """`draw_rng_state` as an op, which traced programs and torch.vmap see. inputs: q, k and v."""
    rng_state: Tensor = _DRAW(inputs[0], list(inputs[1:]), _call_number())
    return rng_state


def _call_number() -> int:
    """A number for each dropout call of a traced program, so that the compiler never merges two of them."""
    return next(_calls)


# What torch.compiler.assume_constant_result does. The decorator imports the compiler, and with it Triton.
_call_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _draw(q: Tensor, others: list[Tensor], call: int) -> Tensor:
    return draw_rng_state(q)


def _draw_fake(q: Tensor, others: list[Tensor], call: int) -> Tensor:
    return q.new_empty((2,), dtype=torch.int64)


def _draw_in_vmap(info: Any, in_dims: Any, q: Tensor, others: list[Tensor], call: int) -> tuple[Tensor, int | None]:
    if info.randomness == "error":
        raise RuntimeError(
            "flash_attn_mini: attention with dropout is called in torch.vmap with randomness='error', its default; "
            "allowed: torch.vmap(..., randomness='different') or 'same', or dropout_p=0"
        )
    if info.randomness == "same":
        return _DRAW(q, others, call), None
    return torch.stack([_DRAW(q, others, _call_number()) for _ in range(info.batch_size)]), 0


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Recomputation has to draw the same state again.
_library.define(
    "draw_rng_state(Tensor q, Tensor[] others, int call) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_library.impl("draw_rng_state", _draw, "CPU")
_library.impl("draw_rng_state", _draw, "CUDA")
_register_fake: Callable[..., Any] = torch.library.register_fake
_register_fake(qualified("draw_rng_state"), _draw_fake, lib=_library)
torch.library.register_vmap(qualified("draw_rng_state"), _draw_in_vmap, lib=_library)
_DRAW = CUSTOM_OPS.draw_rng_state.default
