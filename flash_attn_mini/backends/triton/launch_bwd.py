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
from ...tracing import trace
from .configs import BACKWARD_DKV, BACKWARD_DQ
from .flash_bwd_dkv_kernel import flash_bwd_dkv_kernel
from .flash_bwd_dq_kernel import flash_bwd_dq_kernel
from .launch import (
    INTERPRETED,
    LOG2_E,
    NO_STRIDES,
    bind_context,
    descriptor,
    head_dim_block,
    heads_per_group,
    launch_options,
    strides_bhs,
    tma_reaches,
    unchecked_descriptor,
)
from .tuner import Tuner

ROW_STATS_MULTIPLE = 128  # a multiple of every BLOCK_M, so that dK and dV read whole blocks of row_stats
MAX_SHARED_BLOCK_D = 128  # beyond it the sums of dK and dV do not fit into the registers together: one launch for each

DQ_TUNER = Tuner(flash_bwd_dq_kernel, BACKWARD_DQ)
DKV_TUNER = Tuner(flash_bwd_dkv_kernel, BACKWARD_DKV)


@dataclass(frozen=True)
class Call:
    """One backward call on tensors that are not empty; layouts as in backends.triton.backward."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor  # contiguous
    dsoftmax_lse: torch.Tensor | None  # contiguous
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    row_stats: torch.Tensor  # float32 [2, batch, nheads, seqlen_q rounded up to ROW_STATS_MULTIPLE]: delta comes first
    softmax_scale: float
    causal: bool


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *,
    softmax_scale: float,
    causal: bool,
    output_mask: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """See backends.triton.backward."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        dq, dk, dv, softmax_d = backward(
            dout.float(), q.float(), k.float(), v.float(), out.float(), softmax_lse, dsoftmax_lse,
            softmax_scale=softmax_scale, causal=causal, output_mask=output_mask,
        )  # fmt: skip
        dq, dk, dv = (None if g is None else g.to(torch.bfloat16) for g in (dq, dk, dv))
        return dq, dk, dv, softmax_d
    call = prepare(dout, q, k, v, out, softmax_lse, dsoftmax_lse, softmax_scale, causal, output_mask)
    if q.numel() == 0 or k.numel() == 0:
        without_kernel(call)
    else:
        run(call)
    return call.dq, call.dk, call.dv, call.row_stats[0]


def prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    output_mask: tuple[bool, bool, bool],
) -> Call:
    """The arguments as the kernels take them, with unset memory for what the kernels write."""
    batch, seqlen_q, nheads, _ = q.shape
    padded_q = -(-seqlen_q // ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    row_stats = torch.empty((2, batch, nheads, padded_q), dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.empty_like(t) if wanted else None for t, wanted in zip((q, k, v), output_mask, strict=True))
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
        softmax_scale,
        causal,
    )


def without_kernel(call: Call) -> None:
    """Fill in the gradients of attention without queries or without keys: there is no product to compute."""
    for gradient in (call.dq, call.dk, call.dv):
        if gradient is not None:
            gradient.zero_()
    delta = call.row_stats[0].zero_()  # out is 0
    if call.dsoftmax_lse is not None:
        delta[..., : call.q.shape[1]].sub_(call.dsoftmax_lse)


def run(call: Call) -> None:
    """Launch the kernels that the wanted gradients need."""
    q, k = call.q, call.k
    if not INTERPRETED:
        bind_context(q.device)
    block_d = head_dim_block(q.shape[3])
    reached = not INTERPRETED and all(tma_reaches(t) for t in (q, k, call.v, call.dout))

    def choose(tuner: Tuner, launch: Any, variant: str) -> triton.Config:
        return tuner.choose(q, k, block_d, call.causal, reached, INTERPRETED, partial(launch, call), variant)

    with torch.cuda.device_of(q):
        config = choose(DQ_TUNER, launch_dq, "delta" if call.dq is None else "dq")
        trace_launch("flash_bwd_dq_kernel", call, config, dq_grid(call, config), dq=call.dq is not None)
        launch_dq(call, config)
        for want_dk, want_dv in dkv_launches(call):
            launch = partial(launch_dkv, want_dk=want_dk, want_dv=want_dv)
            config = choose(DKV_TUNER, launch, "dk" * want_dk + "dv" * want_dv)
            trace_launch("flash_bwd_dkv_kernel", call, config, dkv_grid(call, config), dk=want_dk, dv=want_dv)
            launch(call, config)


def dkv_launches(call: Call) -> list[tuple[bool, bool]]:
    """(dK, dV) of each launch of the second kernel: the gradients that it computes together."""
    wanted = (call.dk is not None, call.dv is not None)
    if all(wanted) and head_dim_block(call.q.shape[3]) > MAX_SHARED_BLOCK_D:
        return [(True, False), (False, True)]
    return [wanted] if any(wanted) else []


def trace_launch(name: str, call: Call, config: triton.Config, grid: tuple[int], **wanted: bool) -> None:
    """One line of the trace."""
    if tracing_enabled():
        trace(
            f"triton.{name}",
            dtype=call.q.dtype,
            headdim=call.q.shape[3],
            causal=call.causal,
            **wanted,
            **config.all_kwargs(),
            grid=grid,
            interpreted=INTERPRETED,
        )


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
        float(call.softmax_scale),
        call.softmax_scale * LOG2_E,
        seqlen_q,
        seqlen_k,
        batch * nheads,
        nheads,
        heads_per_kv,
        min(batch * nheads, heads_per_group(k) * heads_per_kv) if call.causal else 1,
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim_block(head_dim),
        CAUSAL=call.causal,
        EVEN_N=call.causal or seqlen_k % block_n == 0,
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
        float(call.softmax_scale),
        call.softmax_scale * LOG2_E,
        seqlen_q,
        seqlen_k,
        batch * nheads_k,
        nheads_k,
        heads_per_kv,
        min(batch * nheads_k, max(1, heads_per_group(q) // heads_per_kv)) if call.causal else 1,
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim_block(head_dim),
        CAUSAL=call.causal,
        EVEN_M=use_tma or seqlen_q % block_m == 0,
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
    batch, seqlen_k, nheads_k, _ = call.k.shape
    return (-(-seqlen_k // config.kwargs["BLOCK_N"]) * batch * nheads_k,)
