"""Strategy ``ring``: K and V of one rank after another arrive and are worked on; gradients of K and V go back.

In step t, rank r works on keys of rank r - t while those of rank r - t - 1 arrive. It works on its own keys before the
first step; in the backward on a part of them after the last one, while the last gradients return. Keys come straight
from their owner, so only those travel that some query of the receiver sees. Their gradients go straight back to the
owner, who adds them in float32. A gradient that comes from a single kernel travels in that kernel's dtype, because
float32 would hold the same values; a sum of several travels in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import blocks, kernels, transport
from .blocks import Interval, Step
from .kernels import Attention, BackwardInputs
from .merge import Total

NAME = "ring"
ThreeTensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def forward(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and log-sum-exp of the local queries."""
    plan = blocks.plan(attention.shards, attention.mask, attention.is_packed)
    keys = _Keys(attention, plan.steps, k, v, "forward")
    partial = kernels.partial_of(q)
    kernels.forward(attention, plan.own, q, k, v, partial)
    for step in plan.steps:
        k_arrived, v_arrived = keys.next()
        kernels.forward(attention, step.arriving.calls, q, k_arrived, v_arrived, partial)
    return partial.result_with_lse(q.dtype)


def backward(attention: Attention, inputs: BackwardInputs) -> ThreeTensors:
    """dq, dk and dv of the local tensors, None for those not wanted."""
    plan = blocks.plan(attention.shards, attention.mask, attention.is_packed)
    _, q, k, v, *_, wanted = inputs
    keys = _Keys(attention, plan.steps, k, v, "backward")
    wide = kernels.sums_dtype(q)
    dq, dk, dv = Total(q, wide), Total(k, wide), Total(v, wide)

    def run(calls: list[blocks.Call], k: torch.Tensor, v: torch.Tensor, dk: Total, dv: Total) -> None:
        kernels.backward(attention, calls, inputs._replace(k=k, v=v), (dq, dk, dv))

    run(plan.own_before, k, v, dk, dv)
    returning: tuple[Step, transport.Message] | None = None
    for step in plan.steps:
        k_arrived, v_arrived = keys.next()
        dk_step, dv_step = Total(k_arrived, wide), Total(v_arrived, wide)
        run(step.arriving.calls, k_arrived, v_arrived, dk_step, dv_step)
        message = _return_gradients(attention, step, k, (dk_step, dv_step), wanted)
        _add_returned(returning, (dk, dv), wanted)
        returning = step, message
    run(plan.own_after, k, v, dk, dv)
    _add_returned(returning, (dk, dv), wanted)
    results = [
        total.result(q.dtype) if is_wanted else None for total, is_wanted in zip((dq, dk, dv), wanted, strict=True)
    ]
    return results[0], results[1], results[2]


class _Keys:
    """K and V on their way: while those of one step are worked on, those of the next arrive."""

    def __init__(
        self, attention: Attention, steps: list[Step], k: torch.Tensor, v: torch.Tensor, direction: str
    ) -> None:
        self._attention, self._steps, self._k, self._v, self._direction = attention, list(steps), k, v, direction
        transport.connect(attention.shards.group, k.device)
        self._message = self._start()

    def _start(self) -> transport.Message | None:
        if not self._steps:
            return None
        step = self._steps.pop(0)
        group = self._attention.shards.group
        sent = [rows_of(x, step.leaving.keys) for x in (self._k, self._v)] if step.leaving.keys else []
        received = [_new_rows(x, step.arriving.rows, x.dtype) for x in (self._k, self._v)]
        what = f"step {step.number}, K and V to rank {step.sink} and from rank {step.source}"
        where = self._attention.where(NAME, self._direction, what)
        return transport.exchange(step.sink, sent, step.source, received, group, where)

    def next(self) -> list[torch.Tensor]:
        """K and V of the next step; those of the step after it start to arrive."""
        assert self._message is not None
        arrived = self._message.wait()
        self._message = self._start()
        return arrived


def rows_of(x: torch.Tensor, intervals: list[Interval]) -> torch.Tensor:
    """Rows of a tensor as one contiguous tensor."""
    rows_dim = x.ndim - 3
    parts = [x.narrow(rows_dim, *interval) for interval in intervals]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, rows_dim)


def _new_rows(x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    shape = list(x.shape)
    shape[x.ndim - 3] = rows
    return x.new_empty(shape, dtype=dtype)


def _dtype_of_gradients(block: blocks.Block, k: torch.Tensor) -> torch.dtype:
    return k.dtype if len(block.calls) == 1 else kernels.sums_dtype(k)


def _return_gradients(
    attention: Attention, step: Step, k: torch.Tensor, gradients: tuple[Total, Total], wanted: Sequence[bool]
) -> transport.Message:
    """Send the gradients of the keys that arrived to their owner, and receive those of the keys that left."""
    sent, received = [], []
    for total, is_wanted in zip(gradients, wanted[1:], strict=True):
        if is_wanted:
            if step.arriving.keys:
                sent.append(total.result(_dtype_of_gradients(step.arriving, k)))
            received.append(_new_rows(k, step.leaving.rows, _dtype_of_gradients(step.leaving, k)))
    what = f"step {step.number}, dK and dV to rank {step.source} and from rank {step.sink}"
    where = attention.where(NAME, "backward", what)
    return transport.exchange(step.source, sent, step.sink, received, attention.shards.group, where)


def _add_returned(
    returning: tuple[Step, transport.Message] | None, totals: tuple[Total, Total], wanted: Sequence[bool]
) -> None:
    if returning is None:
        return
    step, message = returning
    received = message.wait()
    for total, is_wanted in zip(totals, wanted[1:], strict=True):
        if is_wanted:
            x, first = received.pop(0), 0
            for row, rows in step.leaving.keys:
                total.add(row, x.narrow(x.ndim - 3, first, rows))
                first += rows
