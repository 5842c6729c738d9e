"""The Tuner of a kernel chooses the configuration of a call: remembered, timed by triton.autotune, or from the table.

The key has lengths rounded up to a power of two and capped, so that a new length does not tune again. The timings go to
Triton's cache on disk, so that a new process does not tune again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

from .configs import Tables
from .operands import head_dim_block, value_block

# With fewer operations (20 microseconds of an H200) the table is as good, and the call does not wait for the compiler.
MIN_TUNED_FLOPS = 1 << 33
MAX_LENGTH_BUCKET = 16384
INTERPRETER_SHARED_MEMORY = 1 << 30  # every configuration fits

ENVIRONMENT_VARIABLE = "FLASH_ATTN_MINI_TRITON_AUTOTUNE"

HEAD_DIMS = ["head_dim", "head_dim_v", "block_d", "block_dv"]
KEY = ["device_name", "dtype", *HEAD_DIMS, "causal", "variant", "tma_reaches", "length_q", "length_k"]

_tuning = threading.Lock()


class TimedLaunch:
    """The function that triton.autotune times: a launch with the given tile sizes, warps and stages."""

    arg_names = (*KEY, "shared_memory_limit", "launch_with")

    def __init__(self, kernel: Any) -> None:
        self.fn = kernel  # its source is part of the key on disk

    def run(self, *arguments: Any, grid: Any, warmup: bool, num_ctas: int = 1, **config: Any) -> None:
        options = {name: config.pop(name, None) for name in ("num_warps", "num_stages", "maxnreg")}
        arguments[-1](triton.Config(config, **options))


class Tuner:
    """Chooses among the configurations of one kernel."""

    def __init__(self, kernel: Any, tables: Tables) -> None:
        self.tables = tables
        self.chosen: dict[tuple[Any, ...], triton.Config] = {}
        self.timed_launch = triton.autotune(
            configs=tables.every_config(),
            key=KEY,
            prune_configs_by={"early_config_prune": self._prune},
            cache_results=True,
        )(TimedLaunch(kernel))

    def _prune(self, configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
        """The candidates of this dtype, head dim and kind of loads that fit in shared memory."""
        itemsize = 4 if arguments["dtype"] == "torch.float32" else 2
        limit = arguments["shared_memory_limit"]
        blocks = arguments["block_d"], arguments["block_dv"]
        return self.tables.candidates(*blocks, itemsize, arguments["tma_reaches"], limit)

    def choose(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        tma_reaches: bool,
        interpreted: bool,
        launch_with: Callable[[triton.Config], None],
        variant: str = "",
    ) -> triton.Config:
        """The configuration for attention of ``q`` to ``k`` and ``v``.

        Args:
            q: ``[batch, seqlen_q, nheads, headdim]``.
            k: ``[batch, seqlen_k, nheads_k, headdim]``.
            v: Like k, with its own head dim.
            causal: Whether the mask is causal.
            tma_reaches: Whether TMA can address all tensors, on this GPU.
            interpreted: Whether the kernel runs in the interpreter, where nothing can be timed.
            launch_with: ``launch_with(config)`` runs the call, for timing.
            variant: Names other differences of the compiled kernel.
        """
        batch, seqlen_q, nheads, head_dim = q.shape
        seqlen_k, head_dim_v = k.shape[1], v.shape[3]
        flops = 2 * batch * nheads * seqlen_q * seqlen_k * (head_dim + head_dim_v)
        tunes = flops >= MIN_TUNED_FLOPS and os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0"
        lengths = length_bucket(seqlen_q), length_bucket(seqlen_k)
        # `tunes` is part of the key, so that a small call keeps its configuration when a larger one has tuned.
        key = (q.device, q.dtype, head_dim, head_dim_v, causal, variant, tma_reaches, *lengths, tunes)
        config = self.chosen.get(key)
        if config is not None:
            return config
        limit = INTERPRETER_SHARED_MEMORY if interpreted else shared_memory_limit(q.device)
        blocks = head_dim_block(head_dim), value_block(head_dim, head_dim_v)
        candidates = self.tables.candidates(*blocks, q.element_size(), tma_reaches, limit)
        # Above 256 columns the estimate of the shared memory is low for some pairs of head dims.
        is_estimated = interpreted or max(blocks) <= 256
        if interpreted or not tunes or len(candidates) == 1:
            self.chosen[key] = candidates[0] if is_estimated else first_that_launches(candidates, launch_with)
            return self.chosen[key]
        if torch.cuda.is_current_stream_capturing():
            return candidates[0] if is_estimated else first_that_launches(candidates, launch_with)

        with _tuning:  # triton.autotune keeps the state of a call on itself
            if key not in self.chosen:
                self.timed_launch.run(
                    torch.cuda.get_device_name(q.device),
                    str(q.dtype),
                    head_dim,
                    head_dim_v,
                    *blocks,
                    causal,
                    variant,
                    tma_reaches,
                    *lengths,
                    limit,
                    launch_with,
                    grid=None,
                    warmup=False,
                )
                self.chosen[key] = self.timed_launch.best_config
        return self.chosen[key]

    def choose_untimed(
        self,
        q: torch.Tensor,
        v: torch.Tensor,
        kind: tuple[Any, ...],
        tma_reaches: bool,
        interpreted: bool,
        launch_with: Callable[[triton.Config], None],
        pair_bytes: int,
        blocks: tuple[int, int],
    ) -> triton.Config:
        """The first configuration of the table that the GPU has the resources for, without timing.

        This is for kinds of calls that are too many to time, such as those with dropout. Arguments as in `choose`.

        Args:
            kind: Names the features of the compiled kernel.
            pair_bytes: Bytes that the kernel loads for each pair of a row and a key.
            blocks: The columns of a tile of keys and of one of values.
        """
        key = (q.device, q.dtype, q.shape[3], v.shape[3], kind, tma_reaches, pair_bytes)
        config = self.chosen.get(key)
        if config is None:
            limit = INTERPRETER_SHARED_MEMORY if interpreted else shared_memory_limit(q.device)
            candidates = self.tables.candidates(
                *blocks, q.element_size(), tma_reaches, limit, timed=False, pair_bytes=pair_bytes
            )
            config = candidates[0] if interpreted else first_that_launches(candidates, launch_with)
            self.chosen[key] = config
        return config


def first_that_launches(candidates: list[triton.Config], launch_with: Callable[[triton.Config], None]) -> triton.Config:
    """The first configuration that does not run out of registers or shared memory, else the last."""
    for config in candidates[:-1]:
        try:
            launch_with(config)
        except triton.runtime.errors.OutOfResources:
            continue
        return config
    return candidates[-1]


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block of a kernel may take."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def length_bucket(length: int) -> int:
    """The length rounded up to a power of two, between 128 and 16384."""
    return min(max(128, 1 << (length - 1).bit_length()), MAX_LENGTH_BUCKET)
