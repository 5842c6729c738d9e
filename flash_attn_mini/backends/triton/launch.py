"""The launcher of the Triton forward kernel: outputs, TMA descriptors, grid, and the choice of a configuration.

The chain: backends.triton.forward or varlen_forward -> forward (here) -> launch -> flash_fwd_kernel. The first plain
call of a kind (dtype, head dim, causal, lengths rounded up to a power of two) tunes, and the choice is kept in Triton's
cache on disk; calls with windows, softcap, ALiBi, dropout or variable length are never timed and take the first
configuration of the table that fits. launch_bwd uses what is here too.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tracing import enabled as tracing_enabled
from ...tracing import trace
from .configs import FORWARD
from .flash_fwd_kernel import flash_fwd_kernel
from .options import Options
from .tuner import Tuner

MIN_SCALE = 1e-37  # stands for a scale of 0, which would turn the -inf of a masked score into NaN

NO_STRIDES = (0, 0, 0)  # of a tensor behind a descriptor, which has them
TUNER = Tuner(flash_fwd_kernel, FORWARD)
_thread = threading.local()

# Under TRITON_INTERPRET=1 triton.jit returns a Python function that runs anywhere.
INTERPRETED = not isinstance(flash_fwd_kernel, triton.JITFunction)
if INTERPRETED:
    from .interpreter import allow_loop_bounds

    allow_loop_bounds()


@dataclass(eq=False)
class Call:
    """One forward call on tensors that are not empty; sequences of variable length are one batch of all rows."""

    q: torch.Tensor  # [batch, seqlen_q, nheads, headdim]
    k: torch.Tensor  # [batch, seqlen_k, nheads_k, headdim]; pages: [pages, page_size, nheads_k, headdim]
    v: torch.Tensor  # like k
    out: torch.Tensor  # like q
    lse: torch.Tensor  # float32 [batch, nheads, seqlen_q], contiguous
    options: Options
    causal: bool  # the mask is causal and nothing more
    window: tuple[int, int] | None


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """See backends.triton.forward and varlen_forward."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        out, lse = forward(q.float(), k.float(), v.float(), options)
        return out.to(torch.bfloat16), lse
    call = prepare(q, k, v, options)
    if call.k.numel() == 0:
        call.out.zero_()
        call.lse.fill_(-math.inf)
    elif call.q.numel() > 0:
        run(call)
    return (call.out, call.lse) if options.cu_seqlens_q is None else (call.out[0], call.lse[0])


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Call:
    """The arguments as the kernel takes them, with unset memory for what it writes."""
    if options.cu_seqlens_q is not None:  # rows [total, heads, headdim] are a batch of one; pages are one already
        q, k, v = (t if t.ndim == 4 else t.unsqueeze(0) for t in (q, k, v))
    batch, seqlen_q, nheads, _ = q.shape
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    return Call(q, k, v, torch.empty_like(q), lse, options, *options.mask(*options.lengths(q, k)))


def run(call: Call) -> None:
    """Choose a configuration and launch the kernel."""
    q, k, options = call.q, call.k, call.options
    if not INTERPRETED:
        bind_context(q.device)
    reached = options.cu_seqlens_q is None and tma_reaches(q, k, call.v)
    config = choose(TUNER, call, partial(launch, call), reached)
    if tracing_enabled():
        trace_launch("flash_fwd_kernel", call, config, launch_grid(q, options, config))
    launch(call, config)


def choose(tuner: Tuner, call: Any, launch_with: Any, reached: bool, variant: str = "") -> triton.Config:
    """The configuration of a forward or backward call; ``reached`` is whether it may load by TMA."""
    options, block_d = call.options, head_dim_block(call.q.shape[3])
    if call.window is None and options.is_plain:
        return tuner.choose(call.q, call.k, block_d, call.causal, reached, INTERPRETED, launch_with, variant)
    kind = (variant, options.features, call.causal, call.window is not None)
    return tuner.choose_untimed(call.q, block_d, kind, reached, INTERPRETED, launch_with)


def trace_launch(name: str, call: Any, config: triton.Config, grid: tuple[int], **wanted: bool) -> None:
    """One line of the trace, of a forward or backward call."""
    features = call.options.features
    trace(
        f"triton.{name}",
        dtype=call.q.dtype,
        headdim=call.q.shape[3],
        causal=call.causal,
        **({} if call.window is None else {"window": call.options.window_size}),
        **({"features": features} if features else {}),
        **wanted,
        **config.all_kwargs(),
        grid=grid,
        interpreted=INTERPRETED,
    )


def bind_context(device: torch.device) -> None:
    """Make the device's context current in this thread: making a TMA descriptor needs one, and does not ask for it."""
    bound = _thread.__dict__.setdefault("devices", set())
    if device not in bound:
        torch.cuda.mem_get_info(device)
        bound.add(device)


def launch(call: Call, config: triton.Config) -> None:
    """Run the kernel with one configuration."""
    q, k, v, options = call.q, call.k, call.v, call.options
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k = k.shape[2]
    block_m, block_n, use_tma = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.kwargs["USE_TMA"]
    block_d = head_dim_block(head_dim)
    if use_tma:
        operands = (descriptor(q, block_m, block_d), descriptor(k, block_n, block_d), descriptor(v, block_n, block_d))
        strides = NO_STRIDES * 3
    else:
        operands = (q, k, v)
        strides = (*strides_bhs(q), *strides_bhs(k), *strides_bhs(v))
    mods = options.modifies_scores
    with torch.cuda.device_of(q):
        flash_fwd_kernel[launch_grid(q, options, config)](
            *operands,
            call.out,
            call.lse,
            *strides,
            *strides_bhs(call.out),
            options.qk_scale if mods else max(abs(options.qk_scale), MIN_SCALE),
            seqlen_q,
            k.shape[1],
            batch * nheads,
            nheads,
            nheads // nheads_k,
            min(batch * nheads, heads_per_group(k, options) * (nheads // nheads_k)) if call.causal else 1,
            **options.kernel_arguments(call.window),
            **options.page_arguments(k),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            CAUSAL=call.causal,
            EVEN_N=call.causal or is_even(options, call.window, k.shape[1], block_n),
            NEGATIVE_SCALE=options.softmax_scale < 0 and not mods,
            **config.kwargs,
            **launch_options(config),
        )


def is_even(options: Options, window: tuple[int, int] | None, seqlen: int, block: int) -> bool:
    """Whether a kernel without a mask needs to mind no end of a sequence in the middle of a block."""
    return window is None and options.cu_seqlens_q is None and seqlen % block == 0


def launch_options(config: triton.Config) -> dict[str, int]:
    """What the compiler is told beside the kernel's own arguments."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def launch_grid(q: torch.Tensor, options: Options, config: triton.Config) -> tuple[int]:
    """One program for each block of rows of each head. One dimension, as the others hold no more than 65535."""
    return (num_blocks(q, options.cu_seqlens_q, config.kwargs["BLOCK_M"]) * q.shape[0] * q.shape[2],)


def num_blocks(tensor: torch.Tensor, cu_seqlens: torch.Tensor | None, block: int) -> int:
    """Blocks of rows of one head of ``tensor``; with variable lengths those that sequences.find_block counts."""
    rows = tensor.shape[1]
    return -(-rows // block) if cu_seqlens is None else rows // block + cu_seqlens.numel() - 1


def head_dim_block(head_dim: int) -> int:
    """The head dim rounded up to a power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heads_per_group(tensor: torch.Tensor, options: Options) -> int:
    """Heads of one sequence of ``tensor`` and of another like it that fill half of the L2 cache; at least one."""
    rows = max(1, *options.lengths(tensor, tensor))
    bytes_per_head = 2 * rows * tensor.shape[3] * tensor.element_size()
    return max(1, l2_cache_size(tensor.device) // 2 // bytes_per_head)


@cache
def l2_cache_size(device: torch.device) -> int:
    """Bytes of the GPU's L2 cache; some value for the interpreter."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 25


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the GPU has a tensor memory accelerator: Hopper and later. Interpreted kernels make no use of it."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tma_reaches(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address tensors of one GPU: base and strides on 16 bytes, no dimension expanded by a stride of 0.

    Written out, as generators would double its time.
    """
    if not has_tma(tensors[0].device):
        return False
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            return False
        itemsize = tensor.element_size()
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
            if size != 1 and (stride <= 0 or stride * itemsize % 16):
                return False
    return True


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
