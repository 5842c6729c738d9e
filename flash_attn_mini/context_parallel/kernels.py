"""Runs the calls of a plan on the kernels of the selected backend: views of rows in, partial results out.

A call of packed tensors with several rectangles runs as a varlen call, any other as sequences of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import ops
from ..allocation import lse_dtype
from ..backends.extension import Gradients
from ..options import Options
from .blocks import FAR, Call, Mask
from .merge import Total, narrowed
from .shards import Shards


class Attention(NamedTuple):
    """The arguments of a call of a public function.

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
        q_part, k_part, v_part = (narrowed(x, rows_dim, rows) for x, rows in ((q, call.q), (k, call.k), (v, call.k)))
        if _needs_float64(attention, call, q):
            q_part, k_part, v_part = q_part.double(), k_part.double(), v_part.double()
        options = _options_of(attention, call, q)
        if attention.is_packed and len(call.rectangles) > 1:
            out, lse, *_ = ops.forward(q_part, k_part, v_part, call.sequences(q.device)[0], options)
        else:
            q_part, k_part, v_part = (_stacked(attention, call, x) for x in (q_part, k_part, v_part))
            out, lse, *_ = ops.forward(q_part, k_part, v_part, None, options)
            out, lse = _unstacked(attention, call, out), _unstacked_statistic(attention, call, lse)
        offset = _offset_of(attention, call, q)
        to.add(call.q[0], out, lse if offset is None else (lse - offset).to(sums_dtype(q)))


def backward(
    attention: Attention,
    calls: list[Call],
    inputs: BackwardInputs,
    dq: Total,
    dkv: Total,
) -> None:
    """Run the backward of calls and add their gradients to dq, and to dk and dv, those that are wanted, as one total.

    k and v of the inputs are the tensors in which the calls count their keys. out and lse are the merged results of all
    calls.
    """
    wanted = inputs.wanted
    rows_dim = inputs.q.ndim - 3
    for call in calls:
        dout, q, out = (narrowed(x, rows_dim, call.q) for x in (inputs.dout, inputs.q, inputs.out))
        k, v = (narrowed(x, rows_dim, call.k) for x in (inputs.k, inputs.v))
        lse = narrowed(inputs.lse, -1, call.q)
        dlse = None if inputs.dlse is None else narrowed(inputs.dlse, -1, call.q)
        is_wide = _needs_float64(attention, call, q)
        if is_wide:
            dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
            dlse = None if dlse is None else dlse.double()
        offset = _offset_of(attention, call, inputs.q)
        lse = lse if offset is None else lse + offset
        dkv_part = None if is_wide else dkv.new(call.k[1])
        is_varlen = attention.is_packed and len(call.rectangles) > 1
        if not is_varlen:
            dout, q, k, v, out = (_stacked(attention, call, x) for x in (dout, q, k, v, out))
            lse = _stacked_statistic(attention, call, lse)
            dlse = None if dlse is None else _stacked_statistic(attention, call, dlse)
        dq_part, *dkv_parts, _ = ops.backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            call.sequences(q.device)[0] if is_varlen else None,
            _options_of(attention, call, inputs.q),
            None,
            wanted,
            _as_outputs(attention, call, wanted, () if dkv_part is None else dkv.of_each(dkv_part)),
        )
        if wanted[0]:
            dq.add(call.q[0], dq_part if is_varlen else _unstacked(attention, call, dq_part))
        if dkv_part is None:  # float64
            parts = [x for x, is_wanted in zip(dkv_parts, wanted[1:], strict=True) if is_wanted]
            parts = [x if is_varlen else _unstacked(attention, call, x) for x in parts]
            parts = [x[None] if attention.is_packed else x for x in parts]
            dkv_part = torch.cat(parts) if parts else dkv.new(call.k[1])
        dkv.add(call.k[0], dkv_part)


# ---- layouts: a call of rectangles as sequences of equal length ------------------------------------------------------


def _stacked(attention: Attention, call: Call, x: torch.Tensor) -> torch.Tensor:
    """Rows of a call, ``[(batch,) rows, ...]``, as ``[sequences, rows of each, ...]``."""
    if attention.is_packed:
        return x[None]
    count = len(call.rectangles)
    return x if count == 1 else x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])


def _unstacked(attention: Attention, call: Call, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_stacked`."""
    if attention.is_packed:
        return x[0]
    count = len(call.rectangles)
    return x if count == 1 else x.reshape(x.shape[0] // count, count * x.shape[1], *x.shape[2:])


def _stacked_statistic(attention: Attention, call: Call, x: torch.Tensor) -> torch.Tensor:
    """``[(batch,) nheads, rows]`` as ``[sequences, nheads, rows of each]``."""
    if attention.is_packed:
        return x[None]
    batch, nheads, rows = x.shape
    count = len(call.rectangles)
    if count == 1:
        return x
    return x.reshape(batch, nheads, count, rows // count).transpose(1, 2).reshape(batch * count, nheads, rows // count)


def _unstacked_statistic(attention: Attention, call: Call, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_stacked_statistic`."""
    if attention.is_packed:
        return x[0]
    sequences, nheads, rows = x.shape
    count = len(call.rectangles)
    if count == 1:
        return x
    return (
        x.reshape(sequences // count, count, nheads, rows)
        .transpose(1, 2)
        .reshape(sequences // count, nheads, count * rows)
    )


def _as_outputs(
    attention: Attention, call: Call, wanted: Sequence[bool], dk_and_dv: Sequence[torch.Tensor]
) -> Gradients:
    """What receives dk and dv: views of ``[batch, rows, heads, headdim]`` in the layout of the call's tensors.

    ``dk_and_dv``: those that are wanted, or nothing if the call makes new ones.
    """
    given = iter(dk_and_dv)
    places = tuple(next(given, None) if is_wanted else None for is_wanted in wanted[1:])
    if attention.is_packed and len(call.rectangles) > 1:
        places = tuple(None if x is None else x[0] for x in places)
    elif not attention.is_packed:
        places = tuple(None if x is None else _stacked(attention, call, x) for x in places)
    into_k, into_v = places
    return None, into_k, into_v


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
    """The slopes of a call: with a row for each document or batch entry, the rows of its sequences."""
    slopes = attention.options.alibi_slopes
    if slopes is None or slopes.ndim == 1:
        return slopes
    if not attention.is_packed:
        return slopes.repeat_interleave(len(call.rectangles), 0)
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
