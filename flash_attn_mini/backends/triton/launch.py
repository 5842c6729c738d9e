"""The launcher of the Triton kernel: outputs, TMA descriptors, grid, and the choice of a configuration.

The chain: backends.triton.forward -> forward (here) -> launch -> flash_fwd_kernel. The first call of a kind (dtype,
head dim, causal, lengths rounded up to a power of two) tunes; the choice is kept in Triton's cache on disk.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tracing import enabled as tracing_enabled
from ...tracing import trace
from .flash_fwd_kernel import flash_fwd_kernel
from .tuner import choose_config

LOG2_E = math.log2(math.e)
MIN_SCALE = 1e-37  # stands for a scale of 0, which would turn the -inf of a masked score into NaN

# Under TRITON_INTERPRET=1 triton.jit returns a Python function that runs anywhere.
INTERPRETED = not isinstance(flash_fwd_kernel, triton.JITFunction)
if INTERPRETED:
    from .interpreter import allow_loop_bounds

    allow_loop_bounds()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See backends.triton.forward."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        out, lse = forward(q.float(), k.float(), v.float(), softmax_scale=softmax_scale, causal=causal)
        return out.to(torch.bfloat16), lse
    batch, seqlen_q, nheads, head_dim = q.shape
    out = torch.empty((batch, seqlen_q, nheads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if out.numel() == 0:
        return out, lse
    use_tma = not INTERPRETED and tma_reaches(q) and tma_reaches(k) and tma_reaches(v)
    launch_with = partial(launch, q, k, v, out, lse, softmax_scale, causal, use_tma)
    config = choose_config(
        q,
        k,
        block_d=head_dim_block(head_dim),
        causal=causal,
        use_tma=use_tma,
        interpreted=INTERPRETED,
        launch_with=launch_with,
    )
    launch_with(config)
    return out, lse


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    use_tma: bool,
    config: triton.Config,
    **overrides: Any,
) -> None:
    """Run the kernel with one configuration on tensors that are not empty; ``overrides`` are kernel arguments."""
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
    warp_specialize = config.kwargs["WARP_SPECIALIZE"]
    block_d = head_dim_block(head_dim)
    grid = (-(-seqlen_q // block_m) * batch * nheads,)
    q_strides = (q.stride(0), q.stride(2), q.stride(1))
    k_strides = (k.stride(0), k.stride(2), k.stride(1))
    v_strides = (v.stride(0), v.stride(2), v.stride(1))
    q_arg, k_arg, v_arg = q, k, v
    if use_tma:
        k_arg, k_strides = descriptor(k, block_n, block_d), (0, 0, 0)
        v_arg, v_strides = descriptor(v, block_n, block_d), (0, 0, 0)
        if warp_specialize:
            triton.set_allocator(allocate_scratch)
        else:
            q_arg, q_strides = descriptor(q, block_m, block_d), (0, 0, 0)
    if tracing_enabled():
        trace(
            "triton.flash_fwd_kernel",
            dtype=q.dtype,
            headdim=head_dim,
            causal=causal,
            block_m=block_m,
            block_n=block_n,
            warps=config.num_warps,
            stages=config.num_stages,
            maxnreg=config.maxnreg,
            warp_specialize=warp_specialize,
            tma=use_tma,
            grid=grid,
            interpreted=INTERPRETED,
        )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    with torch.cuda.device_of(q):
        flash_fwd_kernel[grid](
            q_arg,
            k_arg,
            v_arg,
            out,
            lse,
            *q_strides,
            *k_strides,
            *v_strides,
            out.stride(0),
            out.stride(2),
            out.stride(1),
            max(abs(softmax_scale) * LOG2_E, MIN_SCALE),
            seqlen_q,
            seqlen_k,
            batch * nheads,
            nheads,
            nheads // nheads_k,
            heads_per_group(k, nheads // nheads_k) if causal else 1,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            CAUSAL=causal,
            EVEN_N=seqlen_k % block_n == 0,
            NEGATIVE_SCALE=softmax_scale < 0,
            USE_TMA=use_tma,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            WARP_SPECIALIZE=warp_specialize,
            **options,
            **overrides,
        )


def head_dim_block(head_dim: int) -> int:
    """The head dim rounded up to a power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heads_per_group(k: torch.Tensor, heads_per_kv: int) -> int:
    """Query heads whose K and V fill half of the L2 cache. A multiple of ``heads_per_kv``."""
    bytes_per_head = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return max(1, l2_cache_size(k.device) // 2 // bytes_per_head) * heads_per_kv


@lru_cache(maxsize=None)
def l2_cache_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 25


@lru_cache(maxsize=None)
def has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tma_reaches(tensor: torch.Tensor) -> bool:
    """Whether TMA can address ``tensor``: base and strides on 16 bytes, no dimension expanded by a stride of 0."""
    if not has_tma(tensor.device) or tensor.data_ptr() % 16:
        return False
    itemsize = tensor.element_size()
    return all(
        size == 1 or (stride > 0 and stride * itemsize % 16 == 0)
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def descriptor(tensor: torch.Tensor, block_rows: int, block_d: int) -> TensorDescriptor:
    """``[batch, seqlen, heads, headdim]`` seen as [batch, heads, seqlen, headdim], read in blocks of one head's rows.

    What lies beyond seqlen or headdim reads as zero.
    """
    batch, seqlen, heads, head_dim = tensor.shape
    # The stride of a dimension of one element is free, and torch leaves odd values there.
    any_stride = 16
    strides = [
        tensor.stride(0) if batch > 1 else any_stride,
        tensor.stride(2) if heads > 1 else any_stride,
        tensor.stride(1) if seqlen > 1 else any_stride,
        1,
    ]
    return TensorDescriptor(tensor, [batch, heads, seqlen, head_dim], strides, [1, 1, block_rows, block_d])


def allocate_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that a warp-specialised kernel makes on the device."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
