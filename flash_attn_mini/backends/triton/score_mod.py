# mypy: disable-error-code="no-untyped-def"
"""From products q.k to the logits of the softmax: scale, softcap, ALiBi.

Plain attention needs none of it: it folds its scale into exp2. attend_blocks, accumulate_dq and accumulate_dkv come
here when there is a softcap or ALiBi. Logits are in units of log 2, so that exp2 takes them as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh_gap(products, scale):
    """u = (1 - tanh(x)) / 2 = 1 / (exp(2 x) + 1), with exp(2 x) = exp2(products * scale).

    Right for every x: exp2 becomes 0 or infinity at the ends. The reciprocal is the square of a reciprocal root, which
    is one instruction; a division takes eight more.
    """
    root = tl.math.rsqrt(tl.math.exp2(products * scale) + 1.0)
    return root * root


@triton.jit
def capped(gap, softcap):
    """softcap * tanh(x)"""
    return softcap - 2.0 * softcap * gap


@triton.jit
def capped_derivative(gap):
    """1 - tanh(x)^2"""
    return 4.0 * gap * (1.0 - gap)


@triton.jit
def alibi_bias(
    slope,
    distance,  # (BLOCK_ROWS,) int32: how far each row lies behind the first column; its sign is of no concern
    BLOCK_COLS: tl.constexpr,
):
    """(BLOCK_ROWS, BLOCK_COLS): what each pair's distance adds. A difference of small floats is exact, and costs less
    than making each of them from an integer."""
    columns = tl.arange(0, BLOCK_COLS).to(tl.float32)
    return -slope * tl.abs(distance.to(tl.float32)[:, None] - columns[None, :])
