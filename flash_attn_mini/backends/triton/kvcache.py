"""The launcher of the Triton kernels for a KV cache: append, attention, combine.

The chain: backends.triton.forward_kvcache -> forward_kvcache (here) -> kvcache_append_kernel, then
flash_fwd_splitkv_kernel and flash_fwd_splitkv_combine_kernel; with num_splits=1 flash_fwd_kernel instead, for the bits
of the variable-length forward. Grids and scratch follow from shapes; lengths are read on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from triton.language.extra import cuda

from ...allocation import contiguous_float, empty_contiguous_last, empty_out
from ...options import KvCache, Options
from ...score_mod import fill_lse_without_keys
from ...tracing import enabled as tracing_enabled
from ...tracing import trace
from . import recording
from .configs import combine_splits, most_programs_per_sm, most_splitkv_rows, splitkv_configs, splitkv_step
from .flash_fwd_splitkv_combine_kernel import flash_fwd_splitkv_combine_kernel
from .flash_fwd_splitkv_kernel import flash_fwd_splitkv_kernel
from .interpreter import INTERPRETED
from .kvcache_append_kernel import kvcache_append_kernel
from .launch import MIN_SCALE, ForwardCall, compiler_options, run
from .operands import head_dim_block, pointer_and_strides, with_rows_apart
from .recording import Recorder, Recordings
from .score_mod import row_mod_of, score_features, score_mod_of
from .splits import MIN_PIECE_UNITS
from .tuner import INTERPRETER_SHARED_MEMORY, first_that_launches, shared_memory_limit

INTERPRETER_SMS = 2
APPEND_ELEMENTS = 2048  # of a program of the append kernel
MOST_PROGRAMS = 4  # of a multiprocessor at once
MOST_COLUMNS = 512  # of a tile
ONE_LOOP_ROWS = 32  # tiles with more are bound by arithmetic, and only some of their keys need a mask
INTERPRETER_PROGRAMS = 2

_chosen: dict[tuple[Any, ...], Chosen] = {}
RECORDINGS = Recordings()  # by the arguments of the op


@dataclass(eq=False)
class CacheCall(ForwardCall):
    """A forward call with a KV cache. k and v are the caches."""

    cache: KvCache
    scratch: Sequence[torch.Tensor] = ()  # of the split kernel and the combine kernel

    @property
    def capacity(self) -> int:
        """Keys of a cache row, or of all pages of a sequence."""
        table = self.cache.block_table
        return self.k.shape[1] if table is None else table.shape[1] * self.k.shape[1]

    @property
    def key_rows(self) -> int:
        """The capacity; the kernels read the lengths."""
        return self.capacity

    @property
    def is_varlen(self) -> bool:
        """True: the host does not know the lengths."""
        return True

    def longest(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
        """Queries, and the most keys that a sequence may have."""
        return q.shape[1], self.capacity

    def head_dim_arguments(self) -> dict[str, int]:
        """As of `Call`. The columns of keys past the largest tile have a tile of their own."""
        arguments, rest = super().head_dim_arguments(), self.q.shape[3] - MOST_COLUMNS
        if rest > 0:
            arguments.update(BLOCK_D=MOST_COLUMNS, BLOCK_REST=head_dim_block(rest))
        return arguments

    @property
    def has_fixed_splits(self) -> bool:
        """True if the call names the splits of a sequence."""
        return self.cache.num_splits > 0 or self.cache.split_keys > 0

    @property
    def features(self) -> str:
        """As of `Call`."""
        used = {
            "kvcache": True,
            "paged": self.cache.block_table is not None,
            **score_features(self.options),
        }
        return "+".join(name for name, is_used in used.items() if is_used)

    @property
    def seqlen_new(self) -> int:
        """Keys to append to each sequence."""
        return 0 if self.cache.k is None else self.cache.k.shape[1]

    def length_arguments(self) -> dict[str, Any]:
        """cache_seqlens and cache_seqlen of every kernel. Without both, the cache is full."""
        seqlens, seqlen = self.cache.cache_seqlens, self.cache.cache_seqlen
        return {
            "cache_seqlens": None if seqlens is None else seqlens.contiguous(),
            "cache_seqlen": self.capacity if seqlen < 0 else min(seqlen, self.capacity),
        }

    def row_arguments(self) -> dict[str, Any]:
        """cache_batch_idx and batch_cache of every kernel."""
        index = self.cache.cache_batch_idx
        return {
            "cache_batch_idx": None if index is None else index.contiguous(),
            "batch_cache": self.k.shape[0],
        }

    def cache_arguments(self) -> dict[str, Any]:
        """The arguments of the attention kernels for the keys of a cache, pages excepted."""
        leftpad = self.cache.cache_leftpad
        return {
            **self.length_arguments(),
            **self.row_arguments(),
            "seqlen_new": self.seqlen_new,
            "cache_leftpad": None if leftpad is None else leftpad.contiguous(),
        }

    def feature_arguments(self) -> dict[str, Any]:
        """As of `Call`, with the cache."""
        return {**super().feature_arguments(), **self.cache_arguments(), "HAS_CACHE": True}

    def page_arguments(self) -> dict[str, Any]:
        """As of `Call`."""
        table = self.cache.block_table
        if table is None:
            return {}
        return {
            "block_table": table.contiguous(),
            "max_pages": table.shape[1],
            "num_pages": self.k.shape[0],
            "page_size": self.k.shape[1],
        }


@dataclass(frozen=True)
class Units:
    """How the split kernel cuts the keys of the batch; see splits.py."""

    count: int  # programs per tile of rows
    slots: int  # partial results; 0: no head has two splits
    per_sequence: int = 0  # 0: the kernel cuts pieces by the lengths of the whole batch
    split_keys: int = 0
    unit_keys: int = 0


@dataclass(frozen=True)
class Chosen:
    """The configuration of a kind of calls."""

    config: triton.Config
    programs_per_sm: int  # that run at once


def forward_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of checked arguments; writes the new keys and values into the caches."""
    replayed, recorder = RECORDINGS.replay((q, k_cache, v_cache, *cache, *options), q.device)
    if replayed is not None:
        return replayed[0], replayed[1]
    if recorder is not None:
        q, k_cache, v_cache, cache, options = recorder.distinct(q, k_cache, v_cache, cache, options)
    batch, seqlen_q, nheads, _ = q.shape
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    call = CacheCall(q, k_cache, v_cache, None, options, None, empty_out(q, v_cache), lse, None, cache)
    call.recorder = recorder
    with torch.cuda.device_of(q):
        if cache.k is not None:
            call.q = append(call)
        if k_cache.numel() == 0 or call.capacity == 0:
            call.out.zero_()
            fill_lse_without_keys(call.lse, options)
            recorder = None  # not launches of kernels of ours
        elif q.numel() > 0:
            attend(call, recorder)
    if recorder is not None:
        given = [x for x in (q, k_cache, v_cache, *cache, *options) if isinstance(x, torch.Tensor)]
        allocated = [call.out, call.lse, *([] if call.q is q else [call.q]), *call.scratch]
        RECORDINGS.keep(recorder, recorder.recording(given, [(x, x) for x in allocated]))
    return call.out, call.lse


def append(call: CacheCall) -> torch.Tensor:
    """Write the new keys and values into the caches. Returns q, rotated if the call has rotary tables."""
    q, cache = call.q, call.cache
    assert cache.k is not None
    assert cache.v is not None
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k = cache.k.shape[2]
    cos, sin = cache.rotary_cos, cache.rotary_sin
    rotated = q if cos is None else empty_contiguous_last(q)
    head_dim_v = cache.v.shape[3]
    block_rows = max(1, APPEND_ELEMENTS // head_dim_block(max(head_dim, head_dim_v)))
    blocks = 2 * triton.cdiv(call.seqlen_new * nheads_k, block_rows)
    if cos is not None:
        blocks += triton.cdiv(seqlen_q * nheads, block_rows)
    grid = (batch * blocks,)
    if grid == (0,):
        return rotated
    if tracing_enabled():
        trace("triton.kvcache_append_kernel", dtype=q.dtype, headdim=head_dim, rotary=cos is not None, grid=grid)
    is_local = call.options.causal or max(call.options.window_size_left, call.options.window_size_right) >= 0
    pages = {"block_table": None, "max_pages": 0, "num_pages": 0, "page_size": 0, **call.page_arguments()}
    recording.launch(
        call.recorder,
        kvcache_append_kernel,
        grid,
        *(pointer_and_strides(x) for x in (q, rotated, cache.k, cache.v, call.k, call.v)),
        None if cos is None else cos.contiguous(),
        None if sin is None else sin.contiguous(),
        0 if cos is None else cos.shape[0],
        int(is_local),
        batch,
        seqlen_q,
        call.seqlen_new,
        call.capacity,
        nheads,
        nheads_k,
        **call.length_arguments(),
        **call.row_arguments(),
        **pages,
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim_block(head_dim),
        HEAD_DIM_V=head_dim_v,
        BLOCK_DV=head_dim_block(head_dim_v),
        ROTARY_DIM=0 if cos is None else 2 * cos.shape[1],
        INTERLEAVED=cache.rotary_interleaved,
        BLOCK_ROWS=block_rows,
    )
    return rotated


def attend(call: CacheCall, recorder: Recorder | None = None) -> None:
    """Attend to the cache, new keys included."""
    q, k, v = (with_rows_apart(x) for x in (call.q, call.k, call.v))
    if q is not call.q or k is not call.k or v is not call.v:
        call = replace(call, q=q, k=k, v=v)
    if INTERPRETED and call.q.dtype == torch.bfloat16:  # the interpreter's dot product misreads bfloat16
        wide = [contiguous_float(x) for x in (call.q, call.k, call.v, call.out)]
        q, k, v, out = wide
        attend(replace(call, q=q, k=k, v=v, out=out))
        call.out.copy_(out)
    elif call.cache.num_splits == 1 and call.cache.split_keys == 0:
        call.recorder = None  # the choice of a configuration may launch, too
        run(call, recorder)
    else:
        run_splitkv(call, recorder)


def run_splitkv(call: CacheCall, recorder: Recorder | None = None) -> None:
    """Launch the split kernel, then the combine kernel if there may be several splits."""
    call.recorder = None
    chosen = chosen_for(call)
    call.recorder = recorder
    launch_splitkv(call, chosen)


def chosen_for(call: CacheCall) -> Chosen:
    """The configuration of the split kernel: remembered for calls of this kind, or chosen now."""
    q = call.q
    block_m, aligned = tile_rows(call), is_aligned(call.k, call.v)
    step = splitkv_step(block_m, *call.head_dim_blocks(), aligned=aligned)
    page_per_key = call.cache.block_table is not None and not has_tiles_in_pages(call, step)
    kind = (block_m, aligned, page_per_key, call.has_fixed_splits)
    key = (q.device, q.dtype, q.shape[3], call.v.shape[3], kind, call.features, call.causal, call.window is not None)
    chosen = _chosen.get(key)
    if chosen is None:
        chosen = _chosen[key] = choose_splitkv(call, block_m, page_per_key=page_per_key, aligned=aligned)
    return chosen


def choose_splitkv(call: CacheCall, block_m: int, *, page_per_key: bool, aligned: bool) -> Chosen:
    """The first configuration that the GPU has the resources for, and how many of its programs run at once."""
    q = call.q
    limit = INTERPRETER_SHARED_MEMORY if INTERPRETED else shared_memory_limit(q.device)
    candidates = splitkv_configs(
        block_m, *call.head_dim_blocks(), q.element_size(), limit, page_per_key=page_per_key, aligned=aligned
    )
    if INTERPRETED:
        return Chosen(candidates[0], INTERPRETER_PROGRAMS)
    kernels: list[Any] = []
    config = first_that_launches(candidates, lambda config: kernels.append(launch_splitkv(call, Chosen(config, 1))))
    if not kernels:
        kernels.append(launch_splitkv(call, Chosen(config, 1)))
    return Chosen(config, programs_per_sm(kernels[-1], config, q.device))


def programs_per_sm(kernel: Any, config: triton.Config, device: torch.device) -> int:
    """How many programs of a compiled kernel run on a multiprocessor at once, by registers and shared memory."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's annotations lack the registers
    of_thread = config.maxnreg or kernel.n_regs  # the limit, so that the number does not depend on small differences
    of_warp = -(-of_thread // 8) * 256
    by_registers = properties.regs_per_multiprocessor // 4 // of_warp * 4 // config.num_warps  # an SM has four parts
    by_memory = properties.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024)
    return int(max(1, min(by_registers, by_memory, MOST_PROGRAMS)))


def tile_rows(call: CacheCall) -> int:
    """Rows of a tile: queries times the heads of a group, rounded up to a power of two from 16 to 128 or 32."""
    rows = call.q.shape[1] * (call.q.shape[2] // call.k.shape[2])
    return min(max(16, 1 << (rows - 1).bit_length()), most_splitkv_rows(*call.head_dim_blocks()))


def is_aligned(*caches: torch.Tensor) -> bool:
    """True if every row begins at a multiple of 16 bytes, for 16-bit elements."""
    return all(x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in pointer_and_strides(x)[1:]) for x in caches)


def launch_splitkv(call: CacheCall, chosen: Chosen) -> Any:
    """Run both kernels with one configuration of the first. Returns the compiled kernel."""
    q, k, config = call.q, call.k, chosen.config
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k, head_dim_v = k.shape[2], call.v.shape[3]
    heads_per_kv = nheads // nheads_k
    rows = seqlen_q * heads_per_kv
    block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
    units = plan_units(call, chosen)
    is_fixed = units.per_sequence > 0
    partial_out = statistics = plan = None
    if units.slots > 0:
        partial_out = q.new_empty((units.slots, rows, head_dim_v), dtype=torch.float32)
        statistics = q.new_empty((units.slots, rows, 2), dtype=torch.float32)
        plan = q.new_empty((batch * nheads_k, 2), dtype=torch.int32)
        call.scratch = [partial_out, statistics, plan]
    grid = (units.count * triton.cdiv(rows, block_m),)
    mods = call.modifies_scores
    qk_scale = call.qk_scale if mods else max(abs(call.qk_scale), MIN_SCALE)
    row_mod = row_mod_of(call.options)
    left, right = call.window or (None, None)
    pages = {"block_table": None, "max_pages": 0, "num_pages": 0, "page_size": 0, **call.page_arguments()}
    at_once = lengths_at_once(batch)
    is_programmatic = starts_early(q.device)
    pdl = {"launch_pdl": True} if is_programmatic else {}
    if tracing_enabled():
        trace(
            "triton.flash_fwd_splitkv_kernel",
            dtype=q.dtype,
            headdim=head_dim,
            **({} if head_dim_v == head_dim else {"headdim_v": head_dim_v}),
            features=call.features,
            **config.all_kwargs(),
            grid=grid,
            slots=units.slots,
            interpreted=INTERPRETED,
        )
    kernel = recording.launch(
        call.recorder,
        flash_fwd_splitkv_kernel,
        grid,
        *(pointer_and_strides(x) for x in (q, k, call.v, call.out)),
        call.lse,
        partial_out,
        statistics,
        plan,
        qk_scale,
        batch,
        seqlen_q,
        call.capacity,
        nheads,
        nheads_k,
        heads_per_kv,
        **call.cache_arguments(),
        **pages,
        window_left=left,
        window_right=right,
        score_mod=score_mod_of(call.options) if mods else None,
        row_mod=row_mod,
        units_per_sequence=units.per_sequence,
        split_keys=units.split_keys,
        most_pieces=units.count,
        **call.head_dim_arguments(),
        CAUSAL=call.causal and seqlen_q > 1,  # the last query sees every key
        NEGATIVE_SCALE=call.options.softmax_scale < 0 and not mods,
        SCORE_MOD=mods,
        FIXED_UNITS=is_fixed,
        UNIT_KEYS=units.unit_keys,
        LENGTHS_AT_ONCE=at_once,
        READ_ONCE=batch <= at_once,
        STRIDES_OF_8=is_aligned(k, call.v),
        TILES_IN_PAGES=has_tiles_in_pages(call, block_n),
        ONE_LOOP=block_m <= ONE_LOOP_ROWS,
        PROGRAMMATIC=is_programmatic,
        **config.kwargs,
        **compiler_options(config),
        **pdl,
    )
    if units.slots > 0:
        block_dv = head_dim_block(head_dim_v)
        grid = (batch * nheads * seqlen_q,)
        if tracing_enabled():
            trace("triton.flash_fwd_splitkv_combine_kernel", grid=grid, interpreted=INTERPRETED)
        recording.launch(
            call.recorder,
            flash_fwd_splitkv_combine_kernel,
            grid,
            partial_out,
            statistics,
            plan,
            pointer_and_strides(call.out),
            call.lse,
            row_mod,
            1.0 if mods else qk_scale,
            seqlen_q,
            nheads,
            nheads_k,
            heads_per_kv,
            nheads_k,
            HEAD_DIM_V=head_dim_v,
            BLOCK_DV=block_dv,
            BLOCK_SPLITS=combine_splits(block_m, block_dv),
            FIXED_UNITS=is_fixed,
            PROGRAMMATIC=is_programmatic,
            **pdl,
        )
    return kernel


def has_tiles_in_pages(call: CacheCall, block_n: int) -> bool:
    """True if no tile of keys has keys of two pages: tiles begin at multiples of block_n of the cache."""
    if call.cache.block_table is None or call.cache.cache_leftpad is not None:
        return False
    return call.k.shape[1] % block_n == 0 and min(call.cache.split_keys, call.capacity) % block_n == 0


def lengths_at_once(batch: int) -> int:
    """Lengths that a program reads at once. Those of a warp need no exchange between warps."""
    return 32 if batch <= 32 else min(max(128, triton.next_power_of_2(batch)), 1024)


def plan_units(call: CacheCall, chosen: Chosen) -> Units:
    """The units of a call, from shapes and options."""
    batch, seqlen_q, nheads, _ = call.q.shape
    nheads_k, capacity = call.k.shape[2], call.capacity
    block_m, block_n = chosen.config.kwargs["BLOCK_M"], chosen.config.kwargs["BLOCK_N"]
    tiles, heads = triton.cdiv(seqlen_q * (nheads // nheads_k), block_m), batch * nheads_k
    if call.cache.split_keys > 0:
        split_keys = min(call.cache.split_keys, capacity)
        per_sequence = triton.cdiv(capacity, split_keys)
        return fixed_units(heads, per_sequence, split_keys)
    if call.cache.num_splits > 0:
        target = most_programs_per_sm(block_m) * num_sms(call.q.device) // (nheads_k * tiles)
        per_sequence = min(call.cache.num_splits, triton.cdiv(capacity, block_n), max(target, 1))
        return fixed_units(heads, per_sequence, 0)
    programs = chosen.programs_per_sm * num_sms(call.q.device)
    if tiles > 1 and heads * tiles >= 4 * programs:
        return fixed_units(heads, 1, 0)
    unit_keys = block_n
    while heads * triton.cdiv(capacity, unit_keys) >= 1 << 30:  # the kernel counts them in int32
        unit_keys *= 2
    units = triton.cdiv(capacity, unit_keys)
    pieces = max(1, min(even_pieces(max(1, programs // tiles), heads), heads * units // MIN_PIECE_UNITS.value))
    return Units(pieces, 2 * pieces * (units > 1), unit_keys=unit_keys)


def fixed_units(heads: int, per_sequence: int, split_keys: int) -> Units:
    """The units of a call whose sequences have a given number of splits."""
    return Units(heads * per_sequence, heads * per_sequence * (per_sequence > 1), per_sequence, split_keys)


def even_pieces(most: int, heads: int) -> int:
    """At most the given number of pieces, so that equal heads have whole pieces or pieces have whole heads.

    A number is rejected if it would leave more than a sixteenth of the pieces unused.
    """
    even = most // heads * heads if most >= heads else heads // -(-heads // most)
    return even if 16 * even >= 15 * most and (most >= heads or heads % even == 0) else most


@cache
def starts_early(device: torch.device) -> bool:
    """True if kernels may be launched programmatically, on Hopper and later: see flash_fwd_splitkv_kernel."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the GPU; an arbitrary number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETER_SMS
