"""The launcher of the Triton backward kernels: gradients, operands, grids, and the choice of configurations.

The chain: backends.triton.backward -> backward (here) -> launch_dq -> flash_bwd_dq_kernel, which writes delta, then
launch_dkv -> flash_bwd_dkv_kernel, which reads it. Each kernel has its own configurations, chosen as the forward's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...allocation import contiguous_float, empty_contiguous_last
from ...options import ROWS_MULTIPLE, Options, Sequences
from ...schemas import EQUAL_LENGTHS
from ...tracing import enabled as tracing_enabled
from . import recording
from .call import Call, as_batch
from .configs import BACKWARD_DKV, BACKWARD_DQ, BACKWARD_DV, table_key
from .flash_bwd_dkv_kernel import flash_bwd_dkv_kernel
from .flash_bwd_dq_kernel import flash_bwd_dq_kernel
from .interpreter import INTERPRETED
from .key_ranges import ROWS_OF_UNIT
from .launch import choose, compiler_options, ends_with_block, heads_per_group, num_blocks, trace_launch
from .operands import (
    bind_context,
    head_dim_block,
    operand,
    pointer_and_strides,
    tma_reaches,
    unchecked_descriptor,
    value_block,
    with_rows_apart,
)
from .recording import Recorder, Recordings
from .score_mod import row_mod_of
from .tuner import Tuner

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]

NUM_TENSORS = 7  # dout to dsoftmax_lse

MAX_SHARED_BLOCK_D = 128  # beyond it the sums of dK and dV do not fit into the registers together: one launch for each

DQ_TUNER = Tuner(flash_bwd_dq_kernel, BACKWARD_DQ)
DKV_TUNER = Tuner(flash_bwd_dkv_kernel, BACKWARD_DKV)
DV_TUNER = Tuner(flash_bwd_dkv_kernel, BACKWARD_DV)
RECORDINGS = Recordings()  # by the arguments of the op, and ``into``


@dataclass(eq=False)
class BackwardCall(Call):
    """A backward call with its outputs."""

    dout: torch.Tensor  # [batch, seqlen_q, nheads, headdim of v]
    out: torch.Tensor  # like dout
    softmax_lse: torch.Tensor  # float32 [batch, nheads, seqlen_q], contiguous
    dsoftmax_lse: torch.Tensor | None  # like softmax_lse
    dq: torch.Tensor | None  # like q
    dk: torch.Tensor | None  # like k
    dv: torch.Tensor | None  # like v
    row_stats: torch.Tensor  # float32 [2, batch, nheads, padded rows]: delta, then lse * log2(e)
    row_ranges: torch.Tensor | None = None  # with key_ranges, as key_ranges.store_ranges writes them
    unit_ranges: torch.Tensor | None = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """As in `Call`, with the tensors of the backward."""
        q, k, v, *rest = super().inputs
        tensors = (self.dout, q, k, v, self.out, self.softmax_lse, self.dsoftmax_lse, *rest)
        return [x for x in tensors if x is not None]

    def stored_ranges(self) -> dict[str, Any]:
        """The arguments of both kernels for what the first one stores about key_ranges."""
        if self.num_ranges == 0:
            return {}
        return {
            "NUM_RANGES": self.num_ranges,
            "row_ranges": self.row_ranges,
            "unit_ranges": self.unit_ranges,
            "ROWS_OF_UNIT": ROWS_OF_UNIT,
        }


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    into: Gradients = (None, None, None),
) -> Results:
    """(dq, dk, dv, softmax_d) of checked arguments. A gradient that output_mask leaves out is None.

    The tensors of ``into`` receive dq, dk and dv; their last stride is 1.
    """
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        floats: list[Any] = [contiguous_float(t) for t in (dout, q, k, v, out)]
        arguments: list[Any] = [*floats, softmax_lse, dsoftmax_lse, sequences, options, rng_state, output_mask]
        *wide, softmax_d = backward(*arguments)
        dq, dk, dv = (
            None if g is None else (empty_contiguous_last(like) if given is None else given).copy_(g)
            for g, like, given in zip(wide, (q, k, v), into, strict=True)
        )
        return dq, dk, dv, softmax_d
    tensors: Any = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    into_q, into_k, into_v = (x if wanted else None for x, wanted in zip(into, output_mask, strict=True))
    into = (into_q, into_k, into_v)
    call_arguments = (*tensors, *(sequences or EQUAL_LENGTHS), *options, rng_state)
    replayed, recorder = replay(call_arguments, output_mask, into)
    if replayed is not None:
        return replayed
    if recorder is not None:
        tensors, sequences, options, rng_state, into = recorder.distinct(tensors, sequences, options, rng_state, into)
        dout, q, k, v, out, softmax_lse, dsoftmax_lse = tensors
    call = prepare(
        dout, q, k, v, out, softmax_lse, dsoftmax_lse, options, sequences, rng_state, output_mask, into
    )  # fmt: skip
    if call.q.numel() == 0 or call.has_no_sequence or (call.k.numel() == 0 and not call.is_varlen):
        fill_with_zeros(call)
    else:
        run(call, recorder)
    gradients = (call.dq, call.dk, call.dv)
    if recorder is not None:
        inputs, made = call.inputs, [(call.row_stats, call.row_stats)]
        for gradient, given in zip(gradients, into, strict=True):
            if gradient is not None and given is None:
                made.append((gradient, gradient[0] if call.is_varlen else gradient))
            elif gradient is not None:
                inputs.append(gradient)
        made += [(x, x) for x in (call.row_ranges, call.unit_ranges) if x is not None]
        RECORDINGS.keep(recorder, recorder.recording(inputs, made))
    if not call.is_varlen:
        return *gradients, call.row_stats[0]
    dq, dk, dv = (None if gradient is None else gradient[0] for gradient in gradients)
    return dq, dk, dv, call.row_stats[0, 0]


def replay(
    arguments: tuple[Any, ...], output_mask: Sequence[bool], into: Gradients = (None, None, None)
) -> tuple[Results | None, Recorder | None]:
    """`Recordings.replay` of a backward, with its results. arguments: those of the op before output_mask."""
    q, is_varlen = arguments[1], arguments[NUM_TENSORS] is not None
    replayed, recorder = RECORDINGS.replay((*arguments, *output_mask, *into), q.device)
    if replayed is None:
        return None, recorder
    row_stats, *allocated = replayed
    new = iter(allocated)
    dq, dk, dv = (
        None if not wanted else next(new) if given is None else given
        for wanted, given in zip(output_mask, into, strict=True)
    )
    return (dq, dk, dv, row_stats[0, 0] if is_varlen else row_stats[0]), None


def prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    options: Options,
    sequences: Sequences | None = None,
    rng_state: torch.Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    into: Gradients = (None, None, None),
) -> BackwardCall:
    """The arguments as the kernels take them, with uninitialised memory for their outputs."""
    dout, q, k, v, out = (as_batch(t) for t in (dout, q, k, v, out))
    if sequences is not None:
        softmax_lse = softmax_lse.unsqueeze(0)
        dsoftmax_lse = None if dsoftmax_lse is None else dsoftmax_lse.unsqueeze(0)
    dq, dk, dv = (
        None if not wanted else empty_contiguous_last(like) if given is None else as_batch(given)
        for like, wanted, given in zip((q, k, v), output_mask, into, strict=True)
    )
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # the gradient of out.sum() has strides of 0
    dout, q, k, v = (with_rows_apart(t) for t in (dout, q, k, v))
    call = BackwardCall(
        q,
        k,
        v,
        sequences,
        options,
        rng_state,
        dout,
        out if out.stride(-1) == 1 else out.contiguous(),
        softmax_lse.contiguous(),
        None if dsoftmax_lse is None else dsoftmax_lse.to(torch.float32).contiguous(),
        dq,
        dk,
        dv,
        row_stats=q.new_empty(0),
    )
    padded_q = num_blocks(call, q, ROWS_MULTIPLE) * ROWS_MULTIPLE
    call.row_stats = q.new_empty((2, q.shape[0], q.shape[2], padded_q), dtype=torch.float32)
    if call.num_ranges > 0:
        call.row_ranges, call.unit_ranges = (
            q.new_empty((numbers * call.num_ranges, q.shape[0], q.shape[2], rows), dtype=torch.int32)
            for numbers, rows in ((2, padded_q), (4, padded_q // ROWS_OF_UNIT))
        )
    return call


def fill_with_zeros(call: BackwardCall) -> None:
    """The gradients of attention without queries or without keys."""
    for gradient in (call.dq, call.dk, call.dv):
        if gradient is not None:
            gradient.zero_()
    call.row_stats[0].zero_()


def run(call: BackwardCall, recorder: Recorder | None = None) -> None:
    """Launch the kernels that the wanted gradients need."""
    bind_context(call.q.device)
    reached = not call.is_varlen and tma_reaches(call.q, call.k, call.v, call.dout)
    is_traced = tracing_enabled()
    with torch.cuda.device_of(call.q):
        config = choose(DQ_TUNER, call, partial(launch_dq, call), reached, "delta" if call.dq is None else "dq")
        if is_traced:
            trace_launch("flash_bwd_dq_kernel", call, config, dq_grid(call, config), dq=call.dq is not None)
        call.recorder = recorder
        launch_dq(call, config)
        for want_dk, want_dv in dkv_launches(call):
            launch = partial(launch_dkv, call, want_dk=want_dk, want_dv=want_dv)
            call.recorder = None  # the choice may launch, too
            config = choose(dkv_tuner(call, want_dk), call, launch, reached, "dk" * want_dk + "dv" * want_dv)
            if is_traced:
                trace_launch("flash_bwd_dkv_kernel", call, config, dkv_grid(call, config), dk=want_dk, dv=want_dv)
            call.recorder = recorder
            launch(config)


def dkv_launches(call: BackwardCall) -> list[tuple[bool, bool]]:
    """(dK, dV) of each launch of the second kernel: the gradients that it computes together."""
    wanted = (call.dk is not None, call.dv is not None)
    if all(wanted) and head_dim_block(max(call.q.shape[3], call.v.shape[3])) > MAX_SHARED_BLOCK_D:
        return [(True, False), (False, True)]
    return [wanted] if any(wanted) else []


def dkv_tuner(call: BackwardCall, want_dk: bool) -> Tuner:
    """The tuner of a launch of the second kernel, which computes dV, dK or both."""
    blocks = call.head_dim_blocks()
    return DKV_TUNER if want_dk or table_key(*blocks) not in BACKWARD_DV.plain else DV_TUNER


def launch_dq(call: BackwardCall, config: triton.Config) -> None:
    """Run the kernel of delta and dQ with one configuration; without dQ if it is not wanted.

    The device of q is the current one, here and in launch_dkv.
    """
    q, k = call.q, call.k
    batch, seqlen_q, nheads, _ = q.shape
    heads_per_kv = nheads // k.shape[2]
    recording.launch(
        call.recorder,
        flash_bwd_dq_kernel,
        dq_grid(call, config),
        *operands(call, config),
        pointer_and_strides(call.out),
        None if call.dq is None else pointer_and_strides(call.dq),
        call.softmax_lse,
        call.dsoftmax_lse,
        call.row_stats,
        float(call.options.softmax_scale),
        call.qk_scale,
        seqlen_q,
        k.shape[1],
        batch * nheads,
        nheads,
        heads_per_kv,
        min(batch * nheads, heads_per_group(call, k, call.v) * heads_per_kv) if call.causal else 1,
        **call.feature_arguments(),
        **call.range_arguments() | call.stored_ranges(),
        **({} if call.options.attn_bias is None else {"row_mod": row_mod_of(call.options)}),
        **call.head_dim_arguments(),
        CAUSAL=call.causal,
        EVEN_N=not call.has_bounds and (call.causal or ends_with_block(call, k, config.kwargs["BLOCK_N"])),
        ROW_STATS_MULTIPLE=ROWS_MULTIPLE,
        **config.kwargs,
        **compiler_options(config),
    )


def launch_dkv(call: BackwardCall, config: triton.Config, *, want_dk: bool = True, want_dv: bool = True) -> None:
    """Run the kernel of dK and dV, or of one of them, with one configuration, after launch_dq."""
    q = call.q
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = call.k.shape[1], call.k.shape[2]
    heads_per_kv = nheads // nheads_k
    block_m, use_tma = config.kwargs["BLOCK_M"], config.kwargs["USE_TMA"]
    dk, dv = call.dk if want_dk else None, call.dv if want_dv else None
    recording.launch(
        call.recorder,
        flash_bwd_dkv_kernel,
        dkv_grid(call, config),
        *operands(call, config, call.begin_row),
        None if dk is None else pointer_and_strides(dk),
        None if dv is None else pointer_and_strides(dv),
        row_stats_descriptor(call, block_m) if use_tma else call.row_stats,
        float(call.options.softmax_scale),
        call.qk_scale,
        seqlen_q,
        seqlen_k,
        batch * nheads_k,
        nheads_k,
        heads_per_kv,
        min(batch * nheads_k, max(1, heads_per_group(call, q, call.dout) // heads_per_kv)) if call.causal else 1,
        **call.feature_arguments(),
        **call.stored_ranges(),
        **call.head_dim_arguments(),
        CAUSAL=call.causal,
        EVEN_M=use_tma or ends_with_block(call, q, block_m),
        KEYLESS_ROWS=call.may_have_keyless_rows,
        ROW_STATS_MULTIPLE=ROWS_MULTIPLE,
        **config.kwargs,
        **compiler_options(config),
    )


def operands(call: BackwardCall, config: triton.Config, begin_row: int = 0) -> tuple[Any, Any, Any, Any]:
    """q, k, v and dout as the kernels take them; the descriptors of q and dout begin at ``begin_row``."""
    block_m, block_n, use_tma = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.kwargs["USE_TMA"]
    columns_of_v = value_block(call.q.shape[3], call.v.shape[3])
    return (
        operand(call.q, block_m, use_tma, begin_row),
        operand(call.k, block_n, use_tma),
        operand(call.v, block_n, use_tma, block_columns=columns_of_v),
        operand(call.dout, block_m, use_tma, begin_row, columns_of_v),
    )


def row_stats_descriptor(call: BackwardCall, block_m: int) -> TensorDescriptor:
    """row_stats as [2, batch * nheads, padded_q], read in blocks of one head's rows."""
    stats = call.row_stats.flatten(1, 2)
    return unchecked_descriptor(call.row_stats, list(stats.shape), list(stats.stride()), [1, 1, block_m])


def dq_grid(call: BackwardCall, config: triton.Config) -> tuple[int]:
    """One program for each block of padded rows of each head. Those beyond the last row fill row_stats."""
    _, batch, nheads, padded_q = call.row_stats.shape
    return (padded_q // config.kwargs["BLOCK_M"] * batch * nheads,)


def dkv_grid(call: BackwardCall, config: triton.Config) -> tuple[int]:
    """One program for each block of keys of each key head."""
    batch, _, nheads_k, _ = call.k.shape
    return (num_blocks(call, call.k, config.kwargs["BLOCK_N"]) * batch * nheads_k,)
