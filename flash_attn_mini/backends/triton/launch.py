"""The launcher of the Triton forward kernel, and what it shares with launch_bwd.py: configurations, grids, traces.

The chain: backends.triton.forward -> forward (here) -> launch -> flash_fwd_kernel. The first plain call of a kind
(dtype, head dim, causal, lengths rounded up to a power of two) tunes, and Triton's cache on disk keeps the choice.
Calls with windows, key_ranges, score modifiers, dropout or variable lengths are never timed: they take the first
configuration of the table that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton

from ...allocation import contiguous_float, empty_max_logits, empty_out
from ...options import Options, Sequences
from ...schemas import EQUAL_LENGTHS
from ...score_mod import fill_lse_without_keys
from ...tracing import enabled as tracing_enabled
from ...tracing import trace
from . import recording
from .call import Call, as_batch
from .configs import FORWARD
from .flash_fwd_kernel import flash_fwd_kernel
from .interpreter import INTERPRETED
from .operands import bind_context, operand, pointer_and_strides, tma_reaches, value_block, with_rows_apart
from .recording import Recorder, Recordings
from .score_mod import row_mod_of
from .tuner import Tuner

MIN_SCALE = torch.finfo(torch.float32).tiny  # in place of 0: -inf * 0 would make a masked score NaN

TUNER = Tuner(flash_fwd_kernel, FORWARD)
RECORDINGS = Recordings()  # by the arguments of the op


@dataclass(eq=False)
class ForwardCall(Call):
    """A forward call with its outputs."""

    out: torch.Tensor  # [batch, seqlen_q, nheads, headdim of v]
    lse: torch.Tensor  # float32 [batch, nheads, seqlen_q], contiguous
    max_logits: torch.Tensor | None  # float32 [batch, nheads], contiguous, filled with -inf; None: not wanted


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse, max_logits or None) of checked arguments. rng_state: int64 ``[2]``, seed and offset."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        wide_q, wide_k, wide_v = (contiguous_float(x) for x in (q, k, v))
        out, lse, max_logits = forward(wide_q, wide_k, wide_v, sequences, options, rng_state)
        return empty_out(q, v).copy_(out), lse, max_logits
    arguments = (q, k, v, *(sequences or EQUAL_LENGTHS), *options, rng_state)
    replayed, recorder = RECORDINGS.replay(arguments, q.device)
    if replayed is not None:
        out, lse = replayed
        return out, lse, None
    if options.return_max_logits:  # a replay does not fill max_logits
        recorder = None
    if recorder is not None:
        q, k, v, sequences, options, rng_state = recorder.distinct(q, k, v, sequences, options, rng_state)
    call = prepare(q, k, v, options, sequences, rng_state)
    if call.k.numel() == 0 or call.has_no_sequence:
        call.out.zero_()
        fill_lse_without_keys(call.lse, options)
    elif call.q.numel() > 0:
        run(call, recorder)
        if call.max_logits is not None and options.softmax_scale == 0 and not call.modifies_scores:
            call.max_logits.masked_fill_(call.max_logits > -math.inf, 0.0)  # the kernel had MIN_SCALE
    out, lse = (call.out[0], call.lse[0]) if call.is_varlen else (call.out, call.lse)
    if recorder is not None:
        RECORDINGS.keep(recorder, recorder.recording(call.inputs, [(call.out, out), (call.lse, lse)]))
    max_logits = call.max_logits
    return out, lse, max_logits[0] if max_logits is not None and call.is_varlen else max_logits


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    sequences: Sequences | None = None,
    rng_state: torch.Tensor | None = None,
) -> ForwardCall:
    """The arguments as the kernel takes them, with memory for its outputs."""
    q, k, v = as_batch(q), as_batch(k), as_batch(v)
    batch, seqlen_q, nheads, _ = q.shape
    out = empty_out(q, v)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    q, k, v = with_rows_apart(q), with_rows_apart(k), with_rows_apart(v)
    max_logits = empty_max_logits(q, options)
    if max_logits is not None:
        max_logits.fill_(-math.inf)
    return ForwardCall(q, k, v, sequences, options, rng_state, out, lse, max_logits)


def run(call: ForwardCall, recorder: Recorder | None = None) -> None:
    """Choose a configuration and launch the kernel."""
    bind_context(call.q.device)
    reached = not call.is_varlen and tma_reaches(call.q, call.k, call.v)
    config = choose(TUNER, call, partial(launch, call), reached)
    if tracing_enabled():
        trace_launch("flash_fwd_kernel", call, config, launch_grid(call, config))
    call.recorder = recorder
    launch(call, config)


def launch(call: ForwardCall, config: triton.Config) -> None:
    """Run the kernel with one configuration."""
    q, k = call.q, call.k
    batch, seqlen_q, nheads, _ = q.shape
    heads_per_kv = nheads // k.shape[2]
    block_m, block_n, use_tma = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.kwargs["USE_TMA"]
    mods = call.modifies_scores
    with torch.cuda.device_of(q):
        recording.launch(
            call.recorder,
            flash_fwd_kernel,
            launch_grid(call, config),
            operand(q, block_m, use_tma),
            operand(k, block_n, use_tma),
            operand(call.v, block_n, use_tma, block_columns=value_block(q.shape[3], call.v.shape[3])),
            pointer_and_strides(call.out),
            call.lse,
            call.qk_scale if mods else max(abs(call.qk_scale), MIN_SCALE),
            seqlen_q,
            call.key_rows,
            batch * nheads,
            nheads,
            heads_per_kv,
            min(batch * nheads, heads_per_group(call, k, call.v) * heads_per_kv) if call.causal else 1,
            **call.feature_arguments(),
            **call.range_arguments(),
            **call.page_arguments(),
            row_mod=row_mod_of(call.options),
            max_logits=call.max_logits,
            **call.head_dim_arguments(),
            CAUSAL=call.causal,
            EVEN_N=not call.has_bounds and (call.causal or ends_with_block(call, k, block_n)),
            NEGATIVE_SCALE=call.options.softmax_scale < 0 and not mods,
            **config.kwargs,
            **compiler_options(config),
        )


def choose(
    tuner: Tuner, call: Call, launch_with: Callable[[triton.Config], None], reached: bool, variant: str = ""
) -> triton.Config:
    """The configuration of a forward or backward call. reached: it may load by TMA."""
    if call.is_plain:
        return tuner.choose(call.q, call.k, call.v, call.causal, reached, INTERPRETED, launch_with, variant)
    kind = (variant, call.features, call.causal, call.window is not None, call.num_ranges)
    return tuner.choose_untimed(
        call.q, call.v, kind, reached, INTERPRETED, launch_with, call.pair_bytes, call.head_dim_blocks()
    )


def trace_launch(name: str, call: Call, config: triton.Config, grid: tuple[int], **wanted: bool) -> None:
    """One line of the trace, of a forward or backward call."""
    options, features = call.options, call.features
    window = (options.window_size_left, options.window_size_right)
    trace(
        f"triton.{name}",
        dtype=call.q.dtype,
        headdim=call.q.shape[3],
        **({} if call.v.shape[3] == call.q.shape[3] else {"headdim_v": call.v.shape[3]}),
        causal=call.causal,
        **({} if call.window is None else {"window": window}),
        **({"features": features} if features else {}),
        **wanted,
        **config.all_kwargs(),
        grid=grid,
        interpreted=INTERPRETED,
    )


def ends_with_block(call: Call, tensor: torch.Tensor, block: int) -> bool:
    """True if no sequence of ``tensor`` ends in the middle of a block of rows."""
    return not call.is_varlen and tensor.shape[1] % block == 0


def compiler_options(config: triton.Config) -> dict[str, int]:
    """The options of the compiler: warps, stages and the limit of registers."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def launch_grid(call: Call, config: triton.Config) -> tuple[int]:
    """One program for each block of rows of each head. One dimension, because the others end at 65535."""
    q = call.q
    return (num_blocks(call, q, config.kwargs["BLOCK_M"]) * q.shape[0] * q.shape[2],)


def num_blocks(call: Call, tensor: torch.Tensor, block: int) -> int:
    """Blocks of rows of one head of ``tensor``; with variable lengths those of sequences.find_block."""
    rows = tensor.shape[1]
    if call.sequences is None:
        return -(-rows // block)
    return rows // block + call.sequences.cu_seqlens_q.numel() - 1


def heads_per_group(call: Call, tensor: torch.Tensor, other: torch.Tensor) -> int:
    """Heads for which one sequence of two tensors of equal length fills half of the L2 cache; at least one."""
    rows = max(1, *call.longest(tensor, tensor))
    bytes_per_head = rows * (tensor.shape[3] + other.shape[3]) * tensor.element_size()
    return max(1, l2_cache_size(tensor.device) // 2 // bytes_per_head)


@cache
def l2_cache_size(device: torch.device) -> int:
    """Bytes of the GPU's L2 cache; an arbitrary value for the interpreter."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 25
