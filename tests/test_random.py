"""Random shapes, layouts and scales from the session's seed, held to the curated cases' bound.

Gradients are held to that or to the one of flash_bounds.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from flash_attn_mini import flash_attn_func

from .bounds import assert_forward_accurate
from .cases import Case, make_dout, make_inputs
from .flash_bounds import assert_gradients_accurate_beside_flash
from .poison import LAYOUTS, Guard

ROUNDS = 12
LAYOUT_NAMES = [name for name in LAYOUTS if not name.startswith("far")]


def length(draw: random.Random, never: int = -1) -> int:
    """Short, near a tile's edge, or anything."""
    edge = draw.choice((16, 32, 64, 128, 192, 256)) + draw.randint(-1, 1)
    drawn = draw.choice((draw.randint(0, 8), edge, draw.randint(1, 400)))
    return drawn if drawn != never else length(draw, never)


def random_case(draw: random.Random) -> Case:
    nheads_k = draw.randint(1, 3)
    return Case(
        name="random",
        why="nobody thought of it",
        batch=draw.randint(1, 3),
        nheads=nheads_k * draw.randint(1, 4),
        nheads_k=nheads_k,
        seqlen_q=length(draw),
        seqlen_k=length(draw, never=1),  # whose dq and dk PyTorch finds to be 0 without rounding; cases.py has it
        headdim=draw.choice((8 * draw.randint(1, 32), draw.randint(1, 256), 64, 128)),
        causal=draw.random() < 0.5,
        layout=draw.choice(LAYOUT_NAMES),
        softmax_scale=draw.choice((None, None, draw.uniform(0.01, 0.5))),
    )


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_random_case_is_as_accurate_as_pytorch(
    round_: int, backend: str, device: str, dtype: torch.dtype, seed: int, described_seed: str
) -> None:
    draw = random.Random(seed)
    for _ in range(4):
        case = random_case(draw)
        q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, device, seed))
        dout = make_dout(case, dtype, device, seed)
        guard = Guard(q, k, v, dout)
        options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, backend=backend, **options)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        guard.check()
        described = f"{case.shape} dtype={dtype} backend={backend}\n  {described_seed}"
        with torch.no_grad():
            assert_forward_accurate(q, k, v, out, lse, case=described, **options)
        # Lengths of 2 to 8 and peaked softmaxes come here, whose gradients cancel in PyTorch's formula.
        assert_gradients_accurate_beside_flash(q, k, v, dout, gradients, case=described, **options)
