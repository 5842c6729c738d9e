# mypy: disable-error-code="no-untyped-def"
"""Score modification: from products q.k to logits, with softcap and ALiBi, and the derivative for the backward.

The kernels pass ``score_mod`` on whole: (softcap * log2(e) or None, slopes or None, 1 if the slopes are [batch, nheads]
or None). SCORE_MOD is False for plain attention, which folds its scale into exp2. It is a separate flag because Triton
3.6 cannot compare a tuple that holds None with None. Logits are in units of log 2, for exp2; with attn_bias, which
attn_bias.py adds, they are natural: the factors log2(e) are then 1.

``row_mod`` is what joins the softmax of a row in the epilogue of the forward kernels: (sinks, their stride from
sequence to sequence), or None.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...options import Options

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


# ---- on the host ----------------------------------------------------------------------------------------------------


def score_features(options: Options) -> dict[str, bool]:
    """Whether a call uses each score modifier."""
    return {
        "softcap": options.softcap > 0,
        "alibi": options.alibi_slopes is not None,
        "attn_bias": options.attn_bias is not None,
    }


def modifies_scores(options: Options) -> bool:
    """True if the logits are more than scaled products of q and k."""
    return options.softcap > 0 or options.alibi_slopes is not None or options.attn_bias is not None


def logit_unit(options: Options) -> float:
    """The kernels' factor on natural logits."""
    return math.log2(math.e) if options.attn_bias is None else 1.0


def qk_scale(options: Options) -> float:
    """The kernels' factor on products of q and k: logits, with softcap the exponent of tanh for exp2."""
    if options.softcap > 0:
        return 2 * (options.softmax_scale * math.log2(math.e)) / options.softcap
    return options.softmax_scale * logit_unit(options)


def score_mod_of(options: Options) -> tuple[float | None, torch.Tensor | None, int | None]:
    """``score_mod`` of a call, as the kernels take it."""
    softcap = options.softcap * logit_unit(options) if options.softcap > 0 else None
    slopes = options.alibi_slopes
    if slopes is None:
        return softcap, None, None
    return softcap, slopes.contiguous(), 1 if slopes.ndim == 2 else None


def row_mod_of(options: Options) -> tuple[torch.Tensor, int] | None:
    """``row_mod`` of a call, as the forward kernels take it: the sinks, and their stride from sequence to sequence."""
    sink = options.learnable_sink
    return None if sink is None else (sink.float().contiguous(), sink.shape[-1] if sink.ndim == 2 else 0)


# ---- in kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def head_slope(SCORE_MOD: tl.constexpr, score_mod, sequence, nheads, head):
    """The ALiBi slope of a head, times log2(e); 0 without ALiBi."""
    slope = 0.0
    if SCORE_MOD:
        slopes = score_mod[1]
        if slopes is not None:
            if score_mod[2] is not None:
                slopes += sequence.to(tl.int64) * nheads
            slope = tl.load(slopes + head) * LOG2_E
    return slope


@triton.jit
def row_sink(row_mod, sequence, head):
    """The sink of rows; head: of all rows, or of each."""
    return tl.load(row_mod[0] + sequence.to(tl.int64) * row_mod[1] + head)


@triton.jit
def join_row_mod(row_mod, sequence, head, lse):
    """(lse, factor): the log-sum-exp of rows after the sink has joined them, and the factor on their output.

    head: of all rows, or of each. lse: -inf for rows without keys.
    """
    logit = row_sink(row_mod, sequence, head)
    largest = tl.maximum(lse, logit)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    of_keys = tl.exp(lse - shift)
    total = of_keys + tl.exp(logit - shift)
    return shift + tl.log(total), of_keys / tl.where(total == 0.0, 1.0, total)


@triton.jit
def modified_logits(
    products,  # (ROWS, COLS): q.k
    scale,  # of `qk_scale`
    score_mod,
    slope,
    distance,  # (ROWS,) int32: distance of each row from the first column; its sign does not matter
    COLS: tl.constexpr,
):
    """(logits, derivative of the logits by the scaled products)."""
    logits = products * scale
    derivative = 1.0
    if score_mod[0] is not None:
        logits, derivative = capped(logits, score_mod[0])
    if score_mod[1] is not None:
        logits += alibi_bias(slope, distance, COLS)
    return logits, derivative


@triton.jit
def capped(exponents, softcap):
    """softcap * tanh(x) and 1 - tanh(x)^2, where exp(2 x) = exp2(exponents).

    The gap (1 - tanh(x)) / 2 = 1 / (exp(2 x) + 1) is right for every x: exp2 becomes 0 or infinity at the ends. The
    reciprocal is the square of a reciprocal root, one instruction, where a division takes nine. Near 0 the gap loses
    the digits of x, and two terms of the series take its place, with a relative error below 1e-6.
    """
    root = tl.math.rsqrt(tl.math.exp2(exponents) + 1.0)
    gap = root * root
    x = exponents * 0.34657359027997264  # log(2) / 2
    tanh = tl.where(tl.abs(x) < 0.05, x - x * x * x * 0.3333333333333333, 1.0 - 2.0 * gap)
    return softcap * tanh, 4.0 * gap * (1.0 - gap)


@triton.jit
def alibi_bias(slope, distance, COLS: tl.constexpr):
    """(ROWS, COLS): -slope * |distance of each pair|. The difference of small floats is exact, and costs less than a
    conversion of each distance from an integer."""
    columns = tl.arange(0, COLS).to(tl.float32)
    return -slope * tl.abs(distance.to(tl.float32)[:, None] - columns[None, :])
