"""Strategy ``ring``: K and V of one rank after another arrive and are attended to; gradients of K and V go back.

In step t, rank r works on keys of rank r - t while those of rank r - t - 1 arrive. The forward works on the local keys
before the first step. In the backward the steps run on a side stream of higher priority: work on local keys fills the
SMs whenever a step waits for a message. Where the rows of q, dout and dq that both use do not fit in L2
(``runs_beside``), the steps come after the local keys.

Keys come directly from their owner, so only keys that some query of the receiver sees are sent. Their gradients go
directly back to the owner, who adds them in float32. A gradient that comes from a single kernel travels in the dtype of
that kernel, because float32 would hold the same values; a sum of several travels in float32.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch

from ..backends import extension
from . import blocks, kernels, transport
from .blocks import Call, Interval, Step
from .kernels import Attention, BackwardInputs
from .merge import Total, narrowed
from .streams import SideStream

NAME = "ring"
ThreeTensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def forward(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and log-sum-exp of the local queries."""
    plan = blocks.plan(attention.shards, attention.mask, attention.is_packed)
    keys = _Keys(attention, plan.steps, k, v, "forward")
    partial = kernels.partial_of(q)
    with keys.beside_messages(q, plan.own):
        kernels.forward(attention, plan.own, q, k, v, partial)
    for step in plan.steps:
        k_arrived, v_arrived = keys.next()
        with keys.beside_messages(q, step.arriving.calls):
            kernels.forward(attention, step.arriving.calls, q, k_arrived, v_arrived, partial)
    return partial.result_with_lse(q.dtype)


def backward(attention: Attention, inputs: BackwardInputs) -> ThreeTensors:
    """dq, dk and dv of the local tensors, None for those not wanted."""
    plan = blocks.plan(attention.shards, attention.mask, attention.is_packed)
    _, q, k, v, *_, wanted = inputs
    wide = kernels.sums_dtype(q)
    number = sum(wanted[1:])
    dq, dkv = Total(q, wide), Total(k, wide, number=number)
    dq_steps, dkv_returned = Total(q, wide), Total(k, wide, number=number)  # sums of the side stream
    is_beside = bool(plan.steps) and q.is_cuda and runs_beside(plan.own, q, k, _bytes_of_l2(q.device))
    side = SideStream(q.device if is_beside else None)
    try:
        with side:
            keys = _Keys(attention, plan.steps, k, v, "backward")
        kernels.backward(attention, plan.own, inputs, dq, dkv)
        with side:
            returning: tuple[Step, transport.Message] | None = None
            for step in plan.steps:
                k_arrived, v_arrived = keys.next()
                dkv_step = Total(k_arrived, wide, number=number)
                arrived = inputs._replace(k=k_arrived, v=v_arrived)
                kernels.backward(attention, step.arriving.calls, arrived, dq_steps, dkv_step)
                message = _return_gradients(attention, step, k, dkv_step, dkv_returned)
                _add_returned(returning, dkv_returned)
                returning = step, message
            _add_returned(returning, dkv_returned)
    finally:
        side.join()  # after an error, too: its kernels read memory that the current stream may use again
    taken = [*dq.take(dq_steps), *dkv.take(dkv_returned)]
    dk_and_dv = iter(dkv.results(q.dtype))
    dk, dv = (next(dk_and_dv) if is_wanted else None for is_wanted in wanted[1:])
    gradients = dq.result(q.dtype) if wanted[0] else None, dk, dv
    side.leave()
    del taken  # memory of the side stream, which the current stream has read
    return gradients


def runs_beside(own: list[Call], q: torch.Tensor, k: torch.Tensor, bytes_of_l2: int) -> bool:
    """Whether the backward of a step runs concurrently with that of the local keys, instead of after it.

    It does if the rows of both fit in L2. The thread blocks of a key head read the same rows of q and dout, and add to
    the same float32 rows of dq. We suppose that a single kernel keeps its thread blocks near each other in these rows,
    and that two concurrent kernels do not (docs/context_parallel.md).
    """
    rows_of_a_key = sum(call.pairs for call in own) / max(sum(call.k[1] for call in own), 1)
    bytes_of_a_row = q.shape[-1] * (2 * q.element_size() + 4) * q.shape[-2] // k.shape[-2]
    return 2 * rows_of_a_key * bytes_of_a_row <= bytes_of_l2


@functools.cache
def _bytes_of_l2(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


class _Keys:
    """K and V in flight: while one step uses its K and V, those of the next arrive."""

    def __init__(
        self, attention: Attention, steps: list[Step], k: torch.Tensor, v: torch.Tensor, direction: str
    ) -> None:
        self._attention, self._steps, self._k, self._v, self._direction = attention, list(steps), k, v, direction
        transport.connect(attention.shards.group, k.device)
        self._arriving = self._start()

    def _start(self) -> transport.Message | None:
        if not self._steps:
            return None
        step = self._steps.pop(0)
        group = self._attention.shards.group
        sent = [rows_of(x, step.leaving.keys) for x in (self._k, self._v)] if step.leaving.keys else []
        received = [_new_rows(x, step.arriving.rows) for x in (self._k, self._v)]
        what = f"step {step.number}, K and V to rank {step.target} and from rank {step.source}"
        where = self._attention.where(NAME, self._direction, what)
        return transport.exchange(step.target, sent, step.source, received, group, where)

    def beside_messages(self, q: torch.Tensor, calls: list[Call]) -> AbstractContextManager[None]:
        """A context in which the forwards of ``calls`` leave SMs free for messages in flight, if that saves time."""
        sms = 0
        if self._arriving is not None and self._arriving.is_under_way:
            flops = 4.0 * q.shape[-1] * q.shape[-2] * sum(call.pairs for call in calls)
            sms = transport.sms_beside(flops, self._arriving, self._attention.shards.group, q.device)
        return extension.reserved_sms(sms)

    def next(self) -> list[torch.Tensor]:
        """K and V of the next step; those of the step after it start to arrive."""
        assert self._arriving is not None
        arrived = self._arriving.wait()
        self._arriving = self._start()
        return arrived


def rows_of(x: torch.Tensor, intervals: list[Interval]) -> torch.Tensor:
    """Rows of a tensor as one contiguous tensor."""
    rows_dim = x.ndim - 3
    parts = [narrowed(x, rows_dim, interval) for interval in intervals]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, rows_dim)


def _new_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty((*x.shape[:-3], rows, *x.shape[-2:]), dtype=x.dtype, device=x.device)


def _dtype_of_gradients(block: blocks.Block, k: torch.Tensor) -> torch.dtype:
    return k.dtype if len(block.calls) == 1 else kernels.sums_dtype(k)


def _return_gradients(
    attention: Attention, step: Step, k: torch.Tensor, arriving: Total, leaving: Total
) -> transport.Message:
    """Send the gradients of the keys that arrived to their owner, and receive those of the keys that left."""
    sent = [arriving.result(_dtype_of_gradients(step.arriving, k))] if step.arriving.keys else []
    received = [leaving.new(step.leaving.rows, _dtype_of_gradients(step.leaving, k))]
    what = f"step {step.number}, dK and dV to rank {step.source} and from rank {step.target}"
    where = attention.where(NAME, "backward", what)
    return transport.exchange(step.source, sent, step.target, received, attention.shards.group, where)


def _add_returned(returning: tuple[Step, transport.Message] | None, dkv: Total) -> None:
    if returning is None:
        return
    step, message = returning
    (received,) = message.wait()
    first = 0
    for row, rows in step.leaving.keys:
        dkv.add(row, narrowed(received, 1, (first, rows)))
        first += rows
