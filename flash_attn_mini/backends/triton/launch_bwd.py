"""The launcher of the Triton backward kernels: gradients, TMA descriptors, grids, and the choice of configurations.

The chain: backends.triton.backward -> backward (here) -> launch_dq -> flash_bwd_dq_kernel, which leaves delta for
launch_dkv -> flash_bwd_dkv_kernel. Each kernel has configurations of its own, chosen as the forward's are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tracing import enabled as tracing_enabled
from . import Wanted
from .configs import BACKWARD_DKV, BACKWARD_DQ
from .flash_bwd_dkv_kernel import flash_bwd_dkv_kernel
from .flash_bwd_dq_kernel import flash_bwd_dq_kernel
from .launch import (
    INTERPRETED,
    NO_STRIDES,
    bind_context,
    choose,
    descriptor,
    head_dim_block,
    heads_per_group,
    is_even,
    launch_options,
    num_blocks,
    strides_bhs,
    tma_reaches,
    trace_launch,
    unchecked_descriptor,
)
from .options import Options
from .tuner import Tuner

ROW_STATS_MULTIPLE = 128  # a multiple of every BLOCK_M, so that dK and dV read whole blocks of row_stats
MAX_SHARED_BLOCK_D = 128  # beyond it the sums of dK and dV do not fit into the registers together: one launch for each

DQ_TUNER = Tuner(flash_bwd_dq_kernel, BACKWARD_DQ)
DKV_TUNER = Tuner(flash_bwd_dkv_kernel, BACKWARD_DKV)


@dataclass(eq=False)
class Call:
    """One backward call on tensors that are not empty; sequences of variable length are one batch of all rows."""

    dout: torch.Tensor  # [batch, seqlen_q, nheads, headdim]
    q: torch.Tensor  # likewise
    k: torch.Tensor  # [batch, seqlen_k, nheads_k, headdim]
    v: torch.Tensor  # likewise
    out: torch.Tensor  # like q
    softmax_lse: torch.Tensor  # float32 [batch, nheads, seqlen_q], contiguous
    dsoftmax_lse: torch.Tensor | None  # likewise
    dq: torch.Tensor | None  # like q
    dk: torch.Tensor | None  # like k
    dv: torch.Tensor | None  # like k
    row_stats: torch.Tensor  # float32 [2, batch, nheads, padded rows]: delta comes first
    options: Options
    causal: bool  # the mask is causal and nothing more
    window: tuple[int, int] | None


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    options: Options,
    output_mask: tuple[bool, bool, bool],
    into: Wanted = (None, None, None),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """See backends.triton.backward and varlen_backward."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        dq, dk, dv, softmax_d = backward(
            dout.float(), q.float(), k.float(), v.float(), out.float(), softmax_lse, dsoftmax_lse, options, output_mask
        )
        dq, dk, dv = (
            None if g is None else g.to(torch.bfloat16) if given is None else given.copy_(g)
            for g, given in zip((dq, dk, dv), into, strict=True)
        )
        return dq, dk, dv, softmax_d
    call = prepare(dout, q, k, v, out, softmax_lse, dsoftmax_lse, options, output_mask, into)
    if q.numel() == 0 or (k.numel() == 0 and options.cu_seqlens_q is None):
        without_kernel(call)
    else:
        run(call)
    results = (call.dq, call.dk, call.dv, call.row_stats[0])
    if options.cu_seqlens_q is None:
        return results
    dq, dk, dv = (None if gradient is None else gradient[0] for gradient in results[:3])
    return dq, dk, dv, results[3][0]


def prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    options: Options,
    output_mask: tuple[bool, bool, bool],
    into: Wanted = (None, None, None),
) -> Call:
    """The arguments as the kernels take them, with unset memory for what the kernels write."""
    if options.cu_seqlens_q is not None:
        dout, q, k, v, out, softmax_lse = (t.unsqueeze(0) for t in (dout, q, k, v, out, softmax_lse))
        dsoftmax_lse = None if dsoftmax_lse is None else dsoftmax_lse.unsqueeze(0)
        into_q, into_k, into_v = (None if t is None else t.unsqueeze(0) for t in into)
        into = (into_q, into_k, into_v)
    batch, _, nheads, _ = q.shape
    padded_q = num_blocks(q, options.cu_seqlens_q, ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    row_stats = torch.empty((2, batch, nheads, padded_q), dtype=torch.float32, device=q.device)
    dq, dk, dv = (
        None if not wanted else torch.empty_like(like) if given is None else given
        for like, wanted, given in zip((q, k, v), output_mask, into, strict=True)
    )
    return Call(
        dout if dout.stride(-1) == 1 else dout.contiguous(),  # that of out.sum() has strides of 0
        q,
        k,
        v,
        out if out.stride(-1) == 1 else out.contiguous(),
        softmax_lse.contiguous(),
        None if dsoftmax_lse is None else dsoftmax_lse.to(torch.float32).contiguous(),
        dq,
        dk,
        dv,
        row_stats,
        options,
        *options.mask(*options.lengths(q, k)),
    )


def without_kernel(call: Call) -> None:
    """Fill in the gradients of attention without queries or without keys: there is no product to compute."""
    for gradient in (call.dq, call.dk, call.dv):
        if gradient is not None:
            gradient.zero_()
    call.row_stats[0].zero_()


def run(call: Call) -> None:
    """Launch the kernels that the wanted gradients need."""
    if not INTERPRETED:
        bind_context(call.q.device)

    reached = call.options.cu_seqlens_q is None and tma_reaches(call.q, call.k, call.v, call.dout)
    is_traced = tracing_enabled()
    with torch.cuda.device_of(call.q):
        config = choose(DQ_TUNER, call, partial(launch_dq, call), reached, "delta" if call.dq is None else "dq")
        if is_traced:
            trace_launch("flash_bwd_dq_kernel", call, config, dq_grid(call, config), dq=call.dq is not None)
        launch_dq(call, config)
        for want_dk, want_dv in dkv_launches(call):
            launch = partial(launch_dkv, call, want_dk=want_dk, want_dv=want_dv)
            config = choose(DKV_TUNER, call, launch, reached, "dk" * want_dk + "dv" * want_dv)
            if is_traced:
                trace_launch("flash_bwd_dkv_kernel", call, config, dkv_grid(call, config), dk=want_dk, dv=want_dv)
            launch(config)


def dkv_launches(call: Call) -> list[tuple[bool, bool]]:
    """(dK, dV) of each launch of the second kernel: the gradients that it computes together."""
    wanted = (call.dk is not None, call.dv is not None)
    if all(wanted) and head_dim_block(call.q.shape[3]) > MAX_SHARED_BLOCK_D:
        return [(True, False), (False, True)]
    return [wanted] if any(wanted) else []


def launch_dq(call: Call, config: triton.Config) -> None:
    """Run the kernel of delta and dQ with one configuration; without dQ if that is not wanted.

    q's device is the current one, here and in launch_dkv.
    """
    q, k, dq = call.q, call.k, call.dq
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, heads_per_kv = k.shape[1], nheads // k.shape[2]
    block_n = config.kwargs["BLOCK_N"]
    operands, strides = kernel_operands(call, config)
    flash_bwd_dq_kernel[dq_grid(call, config)](
        *operands,
        call.out,
        dq,
        call.softmax_lse,
        call.dsoftmax_lse,
        call.row_stats,
        *strides,
        *strides_bhs(call.out),
        *(NO_STRIDES if dq is None else strides_bhs(dq)),
        float(call.options.softmax_scale),
        call.options.qk_scale,
        seqlen_q,
        seqlen_k,
        batch * nheads,
        nheads,
        heads_per_kv,
        min(batch * nheads, heads_per_group(k, call.options) * heads_per_kv) if call.causal else 1,
        **call.options.kernel_arguments(call.window),
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim_block(head_dim),
        CAUSAL=call.causal,
        EVEN_N=call.causal or is_even(call.options, call.window, seqlen_k, block_n),
        DELTA_ONLY=dq is None,
        ROW_STATS_MULTIPLE=ROW_STATS_MULTIPLE,
        **config.kwargs,
        **launch_options(config),
    )


def launch_dkv(call: Call, config: triton.Config, *, want_dk: bool = True, want_dv: bool = True) -> None:
    """Run the kernel of dK and dV, or of one of them, with one configuration; launch_dq has run."""
    q, k = call.q, call.k
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    heads_per_kv = nheads // nheads_k
    block_m, use_tma = config.kwargs["BLOCK_M"], config.kwargs["USE_TMA"]
    dk, dv = call.dk if want_dk else None, call.dv if want_dv else None
    operands, strides = kernel_operands(call, config)
    flash_bwd_dkv_kernel[dkv_grid(call, config)](
        *operands,
        dk,
        dv,
        row_stats_descriptor(call, block_m) if use_tma else call.row_stats,
        *strides,
        *(NO_STRIDES if dk is None else strides_bhs(dk)),
        *(NO_STRIDES if dv is None else strides_bhs(dv)),
        float(call.options.softmax_scale),
        call.options.qk_scale,
        seqlen_q,
        seqlen_k,
        batch * nheads_k,
        nheads_k,
        heads_per_kv,
        min(batch * nheads_k, max(1, heads_per_group(q, call.options) // heads_per_kv)) if call.causal else 1,
        **call.options.kernel_arguments(call.window),
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim_block(head_dim),
        CAUSAL=call.causal,
        EVEN_M=use_tma or is_even(call.options, None, seqlen_q, block_m),
        WANT_DK=want_dk,
        WANT_DV=want_dv,
        ROW_STATS_MULTIPLE=ROW_STATS_MULTIPLE,
        **config.kwargs,
        **launch_options(config),
    )


def kernel_operands(call: Call, config: triton.Config) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """q, k, v and dout as the kernels take them, and their strides of batch, head and row."""
    operands = (call.q, call.k, call.v, call.dout)
    if not config.kwargs["USE_TMA"]:
        return operands, tuple(stride for t in operands for stride in strides_bhs(t))
    block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
    block_d = head_dim_block(call.q.shape[3])
    rows = (block_m, block_n, block_n, block_m)
    return tuple(descriptor(t, r, block_d) for t, r in zip(operands, rows, strict=True)), NO_STRIDES * 4


def row_stats_descriptor(call: Call, block_m: int) -> TensorDescriptor:
    """row_stats seen as [2, batch * nheads, padded_q], read in blocks of one head's rows."""
    stats = call.row_stats.flatten(1, 2)
    return unchecked_descriptor(stats, list(stats.shape), list(stats.stride()), [1, 1, block_m])


def dq_grid(call: Call, config: triton.Config) -> tuple[int]:
    """One program for each block of rows of each head; those beyond the last row fill row_stats."""
    _, batch, nheads, padded_q = call.row_stats.shape
    return (padded_q // config.kwargs["BLOCK_M"] * batch * nheads,)


def dkv_grid(call: Call, config: triton.Config) -> tuple[int]:
    """One program for each block of keys of each key head."""
    batch, _, nheads_k, _ = call.k.shape
    return (num_blocks(call.k, call.options.cu_seqlens_k, config.kwargs["BLOCK_N"]) * batch * nheads_k,)
