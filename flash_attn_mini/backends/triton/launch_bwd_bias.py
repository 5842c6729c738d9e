"""The launcher of the Triton kernel for the gradient of attn_bias: operands, the grid, the parts of the sums.

The chain: backends.triton.ops.attn_bias_backward -> bias_backward (here) -> launch -> flash_bwd_bias_kernel. A call
takes the first configuration of the table that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton

from ...allocation import contiguous_float
from ...options import ROWS_MULTIPLE, Options
from ...tracing import enabled as tracing_enabled
from . import recording
from .call import Call
from .configs import BACKWARD_BIAS
from .flash_bwd_bias_kernel import flash_bwd_bias_kernel
from .interpreter import INTERPRETED
from .launch import choose, compiler_options, trace_launch
from .operands import bind_context, pointer_and_strides, with_rows_apart
from .recording import Recorder, Recordings
from .tuner import Tuner

NUM_TENSORS = 6  # dout to softmax_d

PROGRAMS_PER_SM = 2  # parts make this many, where one program for each block of the bias is fewer
INTERPRETED_SMS = 4

TUNER = Tuner(flash_bwd_bias_kernel, BACKWARD_BIAS)
RECORDINGS = Recordings()  # by the arguments of the op


@dataclass(eq=False)
class BiasBackwardCall(Call):
    """A call with the tensors that the forward and the backward returned, and its output."""

    dout: torch.Tensor  # [batch, seqlen_q, nheads, headdim of v]
    softmax_lse: torch.Tensor  # float32 [batch, nheads, seqlen_q], contiguous
    softmax_d: torch.Tensor  # float32 [batch, nheads, seqlen_q rounded up to ROWS_MULTIPLE], contiguous
    sums: torch.Tensor  # [parts, ...] with the shape of the bias, contiguous; float32 if there are parts

    @property
    def inputs(self) -> list[torch.Tensor]:
        """As in `Call`, with the tensors of this one."""
        q, k, v, *rest = super().inputs
        return [self.dout, q, k, v, self.softmax_lse, self.softmax_d, *rest]

    @property
    def pair_bytes(self) -> int:
        """Bytes of a number of the bias."""
        assert self.options.attn_bias is not None
        return self.options.attn_bias.element_size()


def bias_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_d: torch.Tensor,
    options: Options,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of attn_bias of checked arguments, contiguous, in its shape and dtype."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        dout, q, k, v = (contiguous_float(x) for x in (dout, q, k, v))
    tensors: Any = (dout, q, k, v, softmax_lse, softmax_d)
    replayed, recorder = replay((*tensors, *options, rng_state))
    if replayed is not None:
        return replayed
    if recorder is not None:
        tensors, options, rng_state = recorder.distinct(tensors, options, rng_state)
    dout, q, k, v, softmax_lse, softmax_d = tensors
    call = prepare(dout, q, k, v, softmax_lse, softmax_d, options, rng_state)
    if call.q.numel() == 0 or call.k.numel() == 0:
        call.sums.zero_()
    else:
        run(call, recorder)
    if recorder is not None:
        RECORDINGS.keep(recorder, recorder.recording(call.inputs, [(call.sums, call.sums)]))
    return total(call.sums, options)


def replay(arguments: tuple[Any, ...]) -> tuple[torch.Tensor | None, Recorder | None]:
    """`Recordings.replay` of a call, with its result. arguments: those of the op."""
    replayed, recorder = RECORDINGS.replay(arguments, arguments[0].device)
    if replayed is None:
        return None, recorder
    return total(replayed[0], Options(*arguments[NUM_TENSORS:-1])), None


def total(sums: torch.Tensor, options: Options) -> torch.Tensor:
    """The sum of the parts."""
    assert options.attn_bias is not None
    return sums[0] if sums.shape[0] == 1 else sums.sum(0).to(options.attn_bias.dtype)


def prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_d: torch.Tensor,
    options: Options,
    rng_state: torch.Tensor | None = None,
) -> BiasBackwardCall:
    """The arguments as the kernel takes them, with uninitialised memory for its output."""
    bias = options.attn_bias
    assert bias is not None
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # the gradient of out.sum() has strides of 0
    dout, q, k, v = (with_rows_apart(x) for x in (dout, q, k, v))
    call = BiasBackwardCall(
        q, k, v, None, options, rng_state, dout, softmax_lse.contiguous(), softmax_d.contiguous(), q.new_empty(0)
    )
    parts = 1 if q.numel() == 0 or k.numel() == 0 else num_parts(call)
    call.sums = bias.new_empty((parts, *bias.shape), dtype=bias.dtype if parts == 1 else torch.float32)
    return call


def run(call: BiasBackwardCall, recorder: Recorder | None = None) -> None:
    """Choose a configuration and launch the kernel."""
    bind_context(call.q.device)
    config = choose(TUNER, call, partial(launch, call), reached=False)
    if tracing_enabled():
        trace_launch("flash_bwd_bias_kernel", call, config, launch_grid(call, config))
    call.recorder = recorder
    launch(call, config)


def launch(call: BiasBackwardCall, config: triton.Config) -> None:
    """Run the kernel with one configuration."""
    q, sums = call.q, call.sums
    batch, seqlen_q, nheads, _ = q.shape
    _, bias_batch, bias_heads, bias_rows, seqlen_k = sums.shape
    with torch.cuda.device_of(q):
        recording.launch(
            call.recorder,
            flash_bwd_bias_kernel,
            launch_grid(call, config),
            *(pointer_and_strides(x) for x in (q, call.k, call.v, call.dout)),
            sums,
            call.softmax_lse,
            call.softmax_d,
            -(-seqlen_q // ROWS_MULTIPLE) * ROWS_MULTIPLE,
            call.qk_scale,
            seqlen_q,
            seqlen_k,
            batch,
            nheads,
            nheads // call.k.shape[2],
            bias_batch,
            bias_heads,
            sums.shape[0],
            **call.feature_arguments(),
            **call.range_arguments(),
            **call.head_dim_arguments(),
            CAUSAL=call.causal,
            SUM_ROWS=bias_rows == 1 and seqlen_q > 1,
            **config.kwargs,
            **compiler_options(config),
        )


def launch_grid(call: BiasBackwardCall, config: triton.Config) -> tuple[int]:
    """One program for each block of the bias and each part. One dimension, because the others end at 65535."""
    return (call.sums.shape[0] * num_blocks(call, config),)


def num_blocks(call: BiasBackwardCall, config: triton.Config) -> int:
    """Blocks of rows and keys of the bias; a bias that all rows share has one block of rows."""
    bias = call.options.attn_bias
    assert bias is not None
    bias_batch, bias_heads, bias_rows, seqlen_k = bias.shape
    rows_in_blocks = -(-bias_rows // config.kwargs["BLOCK_M"])
    return int(bias_batch * bias_heads * rows_in_blocks * -(-seqlen_k // config.kwargs["BLOCK_N"]))


def num_parts(call: BiasBackwardCall) -> int:
    """Parts that the pairs of a sequence and a head that share a bias are divided into, so that all SMs have work."""
    bias = call.options.attn_bias
    assert bias is not None
    batch, _, nheads, _ = call.q.shape
    pairs = batch // bias.shape[0] * (nheads // bias.shape[1])
    blocks = call.head_dim_blocks()
    itemsize = call.q.element_size()
    largest = BACKWARD_BIAS.candidates(*blocks, itemsize, tma_reaches=False, shared_memory_limit=1 << 30)[0]
    wanted = PROGRAMS_PER_SM * num_sms(call.q.device) // num_blocks(call, largest)
    parts = max(1, min(pairs, wanted))
    return -(-pairs // -(-pairs // parts))  # none of them empty


@cache
def num_sms(device: torch.device) -> int:
    """The GPU's SMs; an arbitrary value for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
