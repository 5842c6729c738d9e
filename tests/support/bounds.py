"""Bounds on the error of a result: 2 times PyTorch's own error in the same dtype, 3 times for gradients, plus a floor.

Errors are differences from `flash_attn_mini.reference` in float64 on the same inputs. There is no fixed tolerance but
the floor: where PyTorch is precise, the backend must be precise too.

PyTorch's error is taken as at least half a unit in the last place of the largest element that PyTorch does not compute
exactly. Rounding may cost that much. PyTorch's rounding may be smaller by chance where few elements are so large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini.reference import alibi_bias, attention_probabilities, attention_reference, visible_keys
from flash_attn_mini.reference.masks import in_key_ranges

TIMES_PYTORCH = 2.0
TIMES_PYTORCH_GRADIENT = 3.0
SMALLER = 2.0**-4  # times dout and dlse, where PyTorch's gradients in float16 are not finite
FLOOR = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-12}


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    window_size: tuple[int, int],
    key_ranges: Tensor | None,
    device: torch.device,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """bool ``[seqlen_q, seqlen_k]``; with key_ranges or attn_bias ``[1 or batch, 1 or nheads, seqlen_q, seqlen_k]``."""
    visible = visible_keys(seqlen_q, seqlen_k, causal=causal, window_size=window_size, device=device)
    if attn_bias is not None:
        visible = visible & (attn_bias if attn_bias.dtype == torch.bool else attn_bias != -math.inf)
    return visible if key_ranges is None else visible & in_key_ranges(key_ranges, seqlen_k)


def pytorch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch attention with every intermediate result in the dtype of q, and the lse in float32.

    Returns out ``[batch, seqlen_q, nheads, headdim_v]`` and lse ``[batch, nheads, seqlen_q]``.
    """
    seqlen_q, nheads, headdim = q.shape[1:]
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else softmax_scale
    q, k, v = (x.contiguous().transpose(1, 2) for x in (q, k, v))  # [batch, nheads, seqlen, headdim]
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))
    scores = (q * scale) @ k.transpose(-1, -2)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes, seqlen_q, seqlen_k).to(scores.dtype)
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        lowest = torch.finfo(scores.dtype).min  # a wider bias that is finite stays finite
        narrow = attn_bias.clamp(lowest, -lowest).to(scores.dtype).masked_fill(attn_bias == -math.inf, -math.inf)
        scores = (scores + narrow).clamp_min(lowest).masked_fill(attn_bias == -math.inf, -math.inf)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size, key_ranges, q.device, attn_bias)
    no_key = ~visible.any(dim=-1)
    # Rows without keys get finite scores, and their results are set to 0 afterwards, so that autograd meets no NaN.
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(no_key[..., None], 0.0)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., :seqlen_k].masked_fill(no_key[..., None], 0.0)
    if dropout_p > 0.0:
        assert dropout_mask is not None
        probabilities = probabilities * (dropout_mask / (1.0 - dropout_p)).to(probabilities.dtype)
    out = (probabilities @ v).transpose(1, 2)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if seqlen_k == 0 and sinks is None:
        return out, wide.new_full(wide.shape[:-1], -math.inf)
    lse = torch.logsumexp(wide, dim=-1)
    return out, lse.masked_fill(no_key, -math.inf) if sinks is None else torch.where(no_key, wide[..., -1], lse)


Attention = Callable[..., tuple[Tensor, ...]]
Cumulative = tuple[Tensor, Tensor]  # cu_seqlens_q, cu_seqlens_k


def by_sequence(attention: Attention, cu_seqlens: Cumulative | None) -> Attention:
    """A function that runs ``attention(q, k, v, *others, **options)`` on each sequence and concatenates the results.

    Others have the layout of q. The dropout_mask is a list with one mask per sequence; key_ranges ``[1 or nheads,
    total_q, ...]``. Without cu_seqlens: `attention`.
    """
    if cu_seqlens is None:
        return attention
    lengths = list(zip(*(x.diff().tolist() for x in cu_seqlens), strict=True))
    by_lengths: dict[tuple[int, int], list[int]] = {}  # sequences of equal lengths are one batch
    for b, pair in enumerate(lengths):
        by_lengths.setdefault(pair, []).append(b)
    starts_q, starts_k = (x.tolist() for x in cu_seqlens)

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, ...]:
        slopes, masks = options.pop("alibi_slopes", None), options.pop("dropout_mask", None)
        ranges = options.pop("key_ranges", None)
        results: list[list[Tensor]] = [[] for _ in lengths]
        for (length_q, length_k), members in by_lengths.items():

            def rows(x: Tensor, starts: list[int], length: int, members: list[int] = members) -> Tensor:
                return torch.stack([x[starts[b] : starts[b] + length] for b in members])

            given = {}
            if ranges is not None:
                given["key_ranges"] = rows(ranges.transpose(0, 1), starts_q, length_q).transpose(1, 2)
            batch = attention(
                rows(q, starts_q, length_q),
                rows(k, starts_k, length_k),
                rows(v, starts_k, length_k),
                *(rows(x, starts_q, length_q) for x in others),
                alibi_slopes=slopes[members] if slopes is not None and slopes.dim() == 2 else slopes,
                dropout_mask=None if masks is None else torch.stack([masks[b] for b in members]),
                **given,
                **options,
            )
            for i, b in enumerate(members):
                results[b] = [x[i] for x in batch]
        # The rows of an lse [nheads, seqlen_q] are its last dimension.
        return tuple(torch.cat(parts, dim=-1 if parts[0].dim() == 2 else 0) for parts in zip(*results, strict=True))

    return run


def rows_without_keys(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Cumulative | None,
    causal: bool,
    window_size: tuple[int, int],
    key_ranges: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """bool ``[seqlen_q]``, varlen ``[total_q]``; with key_ranges or attn_bias those of each head, ``[1 or batch, 1 or
    nheads, seqlen_q]``, varlen ``[1 or nheads, total_q]``."""

    def blind(seqlen_q: int, seqlen_k: int, ranges: Tensor | None) -> Tensor:
        return ~visible_pairs(seqlen_q, seqlen_k, causal, window_size, ranges, q.device, attn_bias).any(dim=-1)

    if cu_seqlens is None:
        return blind(q.shape[1], k.shape[1], key_ranges)
    lengths_q, lengths_k = (x.diff().tolist() for x in cu_seqlens)
    if key_ranges is None:
        parts = [blind(*pair, None) for pair in zip(lengths_q, lengths_k, strict=True)]
    else:
        of_sequence = key_ranges[None].split(lengths_q, dim=2)
        parts = [blind(*x)[0] for x in zip(lengths_q, lengths_k, of_sequence, strict=True)]
    return torch.cat(parts, dim=-1) if parts else q.new_zeros(0, dtype=torch.bool)


@dataclass(frozen=True)
class Accuracy:
    """The largest error of a tensor, its index, and the largest error allowed."""

    what: str
    error: float
    bound: float
    pytorch_error: float
    index: tuple[int, ...]
    got: float
    expected: float
    times: float
    elements: int  # with an error of PyTorch: few say little about its usual error
    rounding: float = 0.0  # the largest half unit in the last place of an element with an error of PyTorch

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.what}: error {self.error:.3e}, bound {self.bound:.3e} ({self.times:g} x the larger of "
            f"{self.pytorch_error:.3e} of PyTorch in the same dtype and {self.rounding:.3e} of rounding, + floor), "
            f"worst at {self.index}: "
            f"got {self.got:.9g}, expected {self.expected:.9g}"
        )


class InaccurateError(AssertionError):
    """A result whose error is above its bound; ``excess`` is error / bound, ``elements`` that of its Accuracy."""

    def __init__(self, message: str, excess: float, elements: int) -> None:
        super().__init__(message)
        self.excess = excess
        self.elements = elements


def refuse(failed: list[Accuracy], shown: str) -> None:
    """Raise unless the list is empty."""
    if failed:
        worst = max(failed, key=lambda x: x.error / x.bound)
        raise InaccurateError("\n  ".join(str(x) for x in failed) + shown, worst.error / worst.bound, worst.elements)


def half_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each element in `dtype`, the most that rounding changes it by; 0 for 0."""
    half = torch.exp2(torch.frexp(x).exponent.to(x.dtype)) * (torch.finfo(dtype).eps / 4.0)
    return half.masked_fill(x == 0.0, 0.0)


def accuracy(
    what: str, got: Tensor, expected: Tensor, pytorch: Tensor, floor: float, times: float = TIMES_PYTORCH
) -> Accuracy:
    """The errors of `got` and `pytorch` from `expected` (float64), all of one shape. Equal infinities are no error."""
    if expected.numel() == 0:
        return Accuracy(what, 0.0, floor, 0.0, (), math.nan, math.nan, times, 0)

    def errors(x: Tensor) -> Tensor:
        x = x.to(expected.dtype)
        return torch.where(x == expected, 0.0, (x - expected).abs())

    pytorch_errors = errors(pytorch)
    pytorch_error = pytorch_errors.max().item()
    rounding = half_unit(expected, pytorch.dtype).masked_fill(pytorch_errors == 0.0, 0.0).max().item()
    error = errors(got).nan_to_num(nan=math.inf, posinf=math.inf)
    worst = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
    return Accuracy(
        what,
        error.flatten()[worst].item(),
        times * max(pytorch_error, rounding) + floor,
        pytorch_error,
        index,
        got[index].item(),
        expected[index].item(),
        times,
        int(pytorch_errors.count_nonzero()),
        rounding,
    )


def forward_accuracy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> list[Accuracy]:
    """The accuracy of a forward's out and lse; options as `attention_reference` takes them."""
    if cu_seqlens is not None and cu_seqlens[0].numel() == 1:  # a batch of none
        return []
    reference, theirs = (by_sequence(f, cu_seqlens) for f in (attention_reference, pytorch_attention))
    expected_out, expected_lse = reference(q, k, v, **options)
    pytorch_out, pytorch_lse = theirs(q, k, v, **options)
    if q.dtype == torch.float16 and (pytorch_lse.isnan() | pytorch_lse.isposinf()).any():
        # Scores beyond float16: compare with PyTorch's float32, rounded at the end.
        pytorch_out, pytorch_lse = theirs(q.float(), k.float(), v.float(), **options)
        pytorch_out = pytorch_out.to(q.dtype)
    largest_v = v.abs().max().item() if v.numel() else 0.0
    return results_accuracy(q.dtype, largest_v, (out, lse), (expected_out, expected_lse), (pytorch_out, pytorch_lse))


def results_accuracy(
    dtype: torch.dtype,
    largest_v: float,
    got: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    pytorch: tuple[Tensor, Tensor],
) -> list[Accuracy]:
    """The accuracy of (out, lse), given the reference's and PyTorch's. ``dtype``: of q; ``largest_v``: of all |v|."""
    floor_out = floor_lse = FLOOR[dtype]
    lse = expected[1][expected[1].isfinite()]
    scores = max(1.0, lse.abs().max().item()) if lse.numel() else 1.0
    if dtype == torch.float64:
        # The reference has float64's rounding too; it grows with the size of the scores and of v.
        floor_lse *= scores
        floor_out *= scores * max(1.0, largest_v)
    else:  # a few units in the last place of the largest: an lse is the sum of a maximum and a logarithm
        floor_lse = max(floor_lse, 2 * torch.finfo(torch.float32).eps * scores)
    return [
        accuracy("out", got[0], expected[0], pytorch[0], floor_out),
        accuracy("softmax_lse", got[1], expected[1], pytorch[1], floor_lse),
    ]


def assert_forward_accurate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    case: str,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> None:
    """Fail with the case, the error, the bound and the worst index unless out and lse are accurate and well-formed.

    `case` names the case, its shape and the seed, so that it can be run again. Options as `attention_reference` takes
    them; with cu_seqlens, q, k and v are a varlen batch and the dropout_mask is a list.
    """
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    shown = f"\n  case {case}"
    out_shape = (*q.shape[:-1], v.shape[-1])
    assert out.shape == out_shape, f"out has shape {list(out.shape)}, not {list(out_shape)}{shown}"
    assert out.dtype == q.dtype, f"out has dtype {out.dtype}, q {q.dtype}{shown}"
    assert out.device == q.device, f"out is on {out.device}, q on {q.device}{shown}"
    assert lse.shape == lse_shape, f"softmax_lse has shape {list(lse.shape)}{shown}"
    assert lse.dtype == lse_dtype, f"softmax_lse has dtype {lse.dtype}, not {lse_dtype}{shown}"
    results = forward_accuracy(q, k, v, out, lse, cu_seqlens=cu_seqlens, **options)
    refuse([r for r in results if not r.passed], shown)
    no_key = (lse == -math.inf).transpose(-1, -2)[..., None]
    assert not (out.masked_fill(~no_key, 0.0) != 0.0).any(), f"a row without keys has an out other than 0{shown}"


# ---- gradients ----------------------------------------------------------------------------------------------------

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def differentiate(
    attention: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of ``attention(q, k, v, **options) -> (out, lse)`` by autograd; None for an unused out or lse."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        results = attention(*leaves, **options)
    used = [  # without keys the lse is a constant
        (x, dx.to(x.dtype)) for x, dx in zip(results, (dout, dlse), strict=True) if dx is not None and x.requires_grad
    ]
    outputs, arriving = zip(*used, strict=True)
    return torch.autograd.grad(outputs, leaves, arriving, allow_unused=True, materialize_grads=True)


def gradients_accuracy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    gradients: Gradients,
    *,
    dlse: Tensor | None = None,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> list[Accuracy]:
    """The accuracy of a backward's dq, dk and dv; None for one that was not asked for. Options as the forward's."""
    if cu_seqlens is not None and cu_seqlens[0].numel() == 1:  # a batch of none
        return []
    inputs = (q, k, v)
    reference, theirs = (by_sequence(f, cu_seqlens) for f in (attention_reference, pytorch_attention))
    expected = differentiate(reference, tuple(x.double() for x in inputs), dout, dlse, **options)
    pytorch = differentiate(theirs, inputs, dout, dlse, **options)
    if q.dtype == torch.float16 and not all(x.isfinite().all() for x in pytorch):
        # Intermediate results beyond float16. Gradients are linear in dout and dlse: smaller ones may keep all finite.
        smaller = (None if x is None else x * SMALLER for x in (dout, dlse))
        scaled = differentiate(theirs, inputs, *smaller, **options)
        pytorch = tuple((x.float() / SMALLER).to(q.dtype) for x in scaled)
    if q.dtype == torch.float16 and not all(x.isfinite().all() for x in pytorch):
        # Scores beyond float16: compare with PyTorch's float32, rounded at the end.
        wide = differentiate(theirs, tuple(x.float() for x in inputs), dout, dlse, **options)
        pytorch = (wide[0].to(q.dtype), wide[1].to(q.dtype), wide[2].to(q.dtype))
    floor = FLOOR[q.dtype]
    if q.dtype == torch.float64:
        # The reference has float64's rounding too: that of dP - delta, times the factors that follow.
        floor *= math.prod(max(1.0, x.abs().max().item()) if x.numel() else 1.0 for x in inputs)

    def with_floors(*floors: float) -> list[Accuracy]:
        return [
            accuracy(f"d{name}", got, truth, theirs, least, TIMES_PYTORCH_GRADIENT)
            for name, got, truth, theirs, least in zip("qkv", gradients, expected, pytorch, floors, strict=True)
            if got is not None
        ]

    results = with_floors(floor, floor, floor)
    if dout is None or all(x.passed for x in results):
        return results
    rounding = by_sequence(cancellation_rounding, cu_seqlens)(q, k, v, dout, **options)
    return with_floors(*(max(floor, x.max().item()) for x in rounding), floor)


def cancellation_rounding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """What the rounding of dP - delta in float32 may add to dq and dk, of their shapes.

    dP and delta cancel, exactly so in a row with one key; PyTorch's error may then be 0. Both are sums of products
    dO * V. Their rounding has a standard deviation of about a quarter of eps times the sum of the absolute products. It
    is independent in each element of dS, so that variances add up in dq and dk. Allowed are four standard deviations.
    """
    eps = torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
    nheads_k, nheads, headdim = k.shape[2], *q.shape[2:]
    scale = headdim**-0.5 if softmax_scale is None else abs(softmax_scale)
    p = attention_probabilities(q, k, softmax_scale=softmax_scale, **options)
    q, k, v, dout = (x.double().abs().transpose(1, 2) for x in (q, k, v, dout))  # [batch, nheads, seqlen, headdim]
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))
    dp = dout @ v.mT
    if dropout_mask is not None:
        dp = dp * dropout_mask / (1.0 - dropout_p)
    delta = (p * dp).sum(dim=-1, keepdim=True)
    variance = (eps * scale * p * (dp + delta)).square()
    dq, dk = variance @ k.square(), (variance.mT @ q.square()).unflatten(1, (nheads_k, -1)).sum(dim=2)
    return dq.sqrt().transpose(1, 2), dk.sqrt().transpose(1, 2)


def assert_gradients_accurate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    gradients: Gradients,
    *,
    case: str,
    dlse: Tensor | None = None,
    cu_seqlens: Cumulative | None = None,
    **options: Any,
) -> None:
    """Fail with the case, the error, the bound and the worst index unless dq, dk and dv are accurate.

    `case` and options as in `assert_forward_accurate`.
    """
    assert_like_inputs(q, k, v, gradients, case)
    results = gradients_accuracy(q, k, v, dout, gradients, dlse=dlse, cu_seqlens=cu_seqlens, **options)
    refuse([r for r in results if not r.passed], f"\n  case {case}")
    if gradients[0] is not None:
        assert_no_gradient_without_keys(q, k, gradients[0], case, cu_seqlens, **options)


def assert_like_inputs(q: Tensor, k: Tensor, v: Tensor, gradients: Gradients, case: str) -> None:
    shown = f"\n  case {case}"
    for name, got, like in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        if got is not None:
            assert got.shape == like.shape, f"{name} has shape {list(got.shape)}, not {list(like.shape)}{shown}"
            assert got.dtype == like.dtype, f"{name} has dtype {got.dtype}, not {like.dtype}{shown}"
            assert got.device == like.device, f"{name} is on {got.device}, not {like.device}{shown}"


def assert_no_gradient_without_keys(
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    case: str,
    cu_seqlens: Cumulative | None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    attn_bias: Tensor | None = None,
    **_options: Any,
) -> None:
    no_key = rows_without_keys(q, k, cu_seqlens, causal, window_size, key_ranges, attn_bias)
    assert not ((dq.transpose(-2, -3) != 0) & no_key[..., None]).any(), (
        f"a row without keys has a dq other than 0\n  case {case}"
    )
