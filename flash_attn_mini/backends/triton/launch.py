"""The launcher of the Triton forward kernel: outputs, TMA descriptors, grid, and the choice of a configuration.

The chain: backends.triton.forward -> forward (here) -> launch -> flash_fwd_kernel. The first call of a kind (dtype,
head dim, causal, lengths rounded up to a power of two) tunes; the choice is kept in Triton's cache on disk. launch_bwd
uses what is here too.
"""

from __future__ import annotations

import math
import threading
from functools import cache, partial

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tracing import enabled as tracing_enabled
from ...tracing import trace
from .configs import FORWARD
from .flash_fwd_kernel import flash_fwd_kernel
from .tuner import Tuner

LOG2_E = math.log2(math.e)
MIN_SCALE = 1e-37  # stands for a scale of 0, which would turn the -inf of a masked score into NaN

NO_STRIDES = (0, 0, 0)  # of a tensor behind a descriptor, which has them
TUNER = Tuner(flash_fwd_kernel, FORWARD)
_thread = threading.local()

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
    out = torch.empty_like(q)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if out.numel() == 0:
        return out, lse
    if not INTERPRETED:
        bind_context(q.device)
    launch_with = partial(launch, q, k, v, out, lse, softmax_scale, causal)
    reached = not INTERPRETED and tma_reaches(q) and tma_reaches(k) and tma_reaches(v)
    config = TUNER.choose(q, k, head_dim_block(head_dim), causal, reached, INTERPRETED, launch_with)
    if tracing_enabled():
        trace(
            "triton.flash_fwd_kernel",
            dtype=q.dtype,
            headdim=head_dim,
            causal=causal,
            **config.all_kwargs(),
            grid=launch_grid(q, config),
            interpreted=INTERPRETED,
        )
    launch_with(config)
    return out, lse


def bind_context(device: torch.device) -> None:
    """Make the device's context current in this thread: making a TMA descriptor needs one, and does not ask for it."""
    bound = _thread.__dict__.setdefault("devices", set())
    if device not in bound:
        torch.cuda.mem_get_info(device)
        bound.add(device)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    config: triton.Config,
) -> None:
    """Run the kernel with one configuration on tensors that are not empty."""
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    block_m, block_n, use_tma = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "USE_TMA"))
    block_d = head_dim_block(head_dim)
    if use_tma:
        operands = (descriptor(q, block_m, block_d), descriptor(k, block_n, block_d), descriptor(v, block_n, block_d))
        strides = NO_STRIDES * 3
    else:
        operands = (q, k, v)
        strides = (*strides_bhs(q), *strides_bhs(k), *strides_bhs(v))
    with torch.cuda.device_of(q):
        flash_fwd_kernel[launch_grid(q, config)](
            *operands,
            out,
            lse,
            *strides,
            *strides_bhs(out),
            max(abs(softmax_scale) * LOG2_E, MIN_SCALE),
            seqlen_q,
            seqlen_k,
            batch * nheads,
            nheads,
            nheads // nheads_k,
            min(batch * nheads, heads_per_group(k) * (nheads // nheads_k)) if causal else 1,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            CAUSAL=causal,
            EVEN_N=causal or seqlen_k % block_n == 0,
            NEGATIVE_SCALE=softmax_scale < 0,
            USE_TMA=use_tma,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            **launch_options(config),
        )


def launch_options(config: triton.Config) -> dict[str, int]:
    """What the compiler is told beside the kernel's own arguments."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def launch_grid(q: torch.Tensor, config: triton.Config) -> tuple[int]:
    """One program for each block of rows of each head. One dimension, as the others hold no more than 65535."""
    batch, seqlen_q, nheads, _ = q.shape
    return (-(-seqlen_q // config.kwargs["BLOCK_M"]) * batch * nheads,)


def head_dim_block(head_dim: int) -> int:
    """The head dim rounded up to a power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heads_per_group(tensor: torch.Tensor) -> int:
    """Heads of ``tensor`` and of another one like it that fill half of the L2 cache together; at least one."""
    bytes_per_head = 2 * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return max(1, l2_cache_size(tensor.device) // 2 // bytes_per_head)


@cache
def l2_cache_size(device: torch.device) -> int:
    """Bytes of the GPU's L2 cache; some value for the interpreter."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 25


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the GPU has a tensor memory accelerator: Hopper and later."""
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


def strides_bhs(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row. That of a dimension of one element is free: torch may have any value there."""
    batch, seqlen, heads, _ = tensor.shape
    stride_b, stride_s, stride_h, _ = tensor.stride()
    return (stride_b if batch > 1 else 16, stride_h if heads > 1 else 16, stride_s if seqlen > 1 else 16)


def descriptor(tensor: torch.Tensor, block_rows: int, block_d: int) -> TensorDescriptor:
    """``[batch, seqlen, heads, headdim]`` seen as [batch, heads, seqlen, headdim], read in blocks of one head's rows.

    What lies beyond seqlen or headdim reads as zero.
    """
    batch, seqlen, heads, head_dim = tensor.shape
    strides = [*strides_bhs(tensor), 1]
    return unchecked_descriptor(tensor, [batch, heads, seqlen, head_dim], strides, [1, 1, block_rows, block_d])


def unchecked_descriptor(
    base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int]
) -> TensorDescriptor:
    """A TensorDescriptor without its constructor's checks, most of its cost: what tma_reaches is known to be right."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = base, shape, strides, block_shape
    return made
