"""Runs the calls of a plan on the kernels of the selected backend: views of rows in, partial results out.

A call of one rectangle runs as sequences of equal length, one of several as a varlen call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..ops import lse_dtype, run_backward, run_forward
from ..options import Options
from .blocks import FAR, Call, Mask
from .merge import Total
from .shards import Shards


class Attention(NamedTuple):
    """What a call of a public function asks for.

    Attributes:
        name: The public function, for error messages.
        shards: Who owns which tokens.
        options: With the name of the backend that both directions take.
        is_packed: True for ``[tokens_local, heads, headdim]``, False for ``[batch, tokens_local, heads, headdim]``.
    """

    name: str
    shards: Shards
    options: Options
    is_packed: bool

    @property
    def mask(self) -> Mask:
        """Which distances are visible."""
        options = self.options
        left, right = (FAR if x < 0 else x for x in (options.window_size_left, options.window_size_right))
        return Mask(left, 0 if options.causal else right, options.alibi_slopes is not None)

    def where(self, strategy: str, direction: str, what: str) -> str:
        """A message's name in errors."""
        return f"{self.name}, strategy {strategy}, {direction}: {what}"


class BackwardInputs(NamedTuple):
    """The inputs of a backward.

    Attributes:
        dout: Gradient of out.
        q, k, v: The inputs of the forward; out and lse: its results.
        dlse: Gradient of lse, or None.
        wanted: Whether dq, dk and dv are wanted.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    wanted: Sequence[bool]


def sums_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of sums over calls: float32, float64 for float64 inputs."""
    return lse_dtype(q)


def partial_of(q: torch.Tensor) -> Total:
    """An empty result for the queries q."""
    *batch, rows, nheads, _ = q.shape
    return Total(q, sums_dtype(q), (*batch, nheads, rows))


def forward(
    attention: Attention, calls: list[Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, to: Total
) -> None:
    """Run calls and add their results. k and v: the tensors in which the calls count their keys."""
    rows_dim = q.ndim - 3
    for call in calls:
        row, rows = call.q
        q_part = q.narrow(rows_dim, row, rows)
        k_part, v_part = (x.narrow(rows_dim, *call.k) for x in (k, v))
        if _needs_float64(attention, call, q):
            q_part, k_part, v_part = q_part.double(), k_part.double(), v_part.double()
        options = _options_of(attention, call, q)
        if len(call.rectangles) > 1:
            sequences, _ = call.sequences(q.device)
            out, lse, _, _ = run_forward(q_part, k_part, v_part, sequences, options)
        elif attention.is_packed:
            results = run_forward(q_part[None], k_part[None], v_part[None], None, options)
            out, lse = results[0][0], results[1][0]
        else:
            out, lse, _, _ = run_forward(q_part, k_part, v_part, None, options)
        offset = _offset_of(attention, call, q)
        to.add(row, out, lse if offset is None else (lse - offset).to(sums_dtype(q)))


def backward(attention: Attention, calls: list[Call], inputs: BackwardInputs, to: tuple[Total, Total, Total]) -> None:
    """Run the backward of calls and add their gradients to dq, dk and dv.

    k and v of the inputs are the tensors in which the calls count their keys. out and lse are the merged results of all
    calls.
    """
    dout, q, k, v, out, lse, dlse, wanted = inputs
    rows_dim = q.ndim - 3
    for call in calls:
        row, rows = call.q
        sequences = call.sequences(q.device)[0] if len(call.rectangles) > 1 else None
        adds_batch = attention.is_packed and sequences is None
        is_wide = _needs_float64(attention, call, q)
        offset = _offset_of(attention, call, q)

        def part(
            x: torch.Tensor, dim: int, first: int, count: int, adds_batch: bool = adds_batch, is_wide: bool = is_wide
        ) -> torch.Tensor:
            x = x.narrow(dim, first, count)
            x = x.double() if is_wide else x
            return x[None] if adds_batch else x

        dout_part, q_part, out_part = (part(x, rows_dim, row, rows) for x in (dout, q, out))
        k_part, v_part = (part(x, rows_dim, *call.k) for x in (k, v))
        lse_part = part(lse, -1, row, rows)
        gradients = run_backward(
            dout_part,
            q_part,
            k_part,
            v_part,
            out_part,
            lse_part if offset is None else lse_part + offset,
            None if dlse is None else part(dlse, -1, row, rows),
            sequences,
            _options_of(attention, call, q),
            None,
            wanted,
        )[:3]
        places = (row, call.k[0], call.k[0])
        for gradient, total, first, is_wanted in zip(gradients, to, places, wanted, strict=True):
            if is_wanted:
                total.add(first, gradient[0] if adds_batch else gradient)


def _needs_float64(attention: Attention, call: Call, q: torch.Tensor) -> bool:
    """Whether a call of float32 tensors runs in float64: in the blocks of ALiBi that have an offset.

    Their scores and log-sum-exp have terms of the size slope x offset, whose float32 rounding would be larger than the
    error of a float32 result. Only the backend ``cpu`` has kernels of float64.
    """
    has_offset = call.rectangles[0].offset != 0 and attention.options.alibi_slopes is not None
    return has_offset and q.dtype == torch.float32 and attention.options.backend == "cpu"


def _options_of(attention: Attention, call: Call, q: torch.Tensor) -> Options:
    first = call.rectangles[0]
    slopes = _slopes_of(attention, call, q)
    return attention.options._replace(
        causal=first.left == -1 and first.right == 0,
        window_size_left=first.left,
        window_size_right=first.right,
        alibi_slopes=slopes if slopes is None or first.sign > 0 else -slopes,
    )


def _slopes_of(attention: Attention, call: Call, q: torch.Tensor) -> torch.Tensor | None:
    """The slopes of a call: with a row for each document, the rows of its sequences."""
    slopes = attention.options.alibi_slopes
    if slopes is None or slopes.ndim == 1 or not attention.is_packed:
        return slopes
    if len(call.rectangles) == 1:
        return slopes[call.rectangles[0].document]
    return slopes[call.sequences(q.device)[1]]


def _offset_of(attention: Attention, call: Call, q: torch.Tensor) -> torch.Tensor | None:
    """What the log-sum-exp of a call's kernels lacks to that of ALiBi: slope x offset, by head, or None for nothing.

    float64 for a call that runs in it.
    """
    offset = call.rectangles[0].offset
    slopes = attention.options.alibi_slopes
    if slopes is None or offset == 0:
        return None
    slopes = slopes.to(torch.float64 if _needs_float64(attention, call, q) else sums_dtype(q))
    if slopes.ndim == 1:
        return slopes[:, None] * offset
    if not attention.is_packed:
        return slopes[:, :, None] * offset
    if len(call.rectangles) == 1:
        return slopes[call.rectangles[0].document][:, None] * offset
    sequences, documents = call.sequences(q.device)
    lengths = sequences.cu_seqlens_q.diff()
    return slopes[documents].repeat_interleave(lengths, 0, output_size=call.q[1]).T * offset
