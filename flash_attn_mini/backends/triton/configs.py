"""Tile sizes, warps and stages of the Triton kernel: what is tried, and what is taken when nothing can be tried.

launch.py asks here. A configuration is a triton.Config over BLOCK_M, BLOCK_N and WARP_SPECIALIZE; the figures behind
the choice are in docs/tuning.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton


def tile(
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    *,
    warp_specialize: bool = False,
    maxnreg: int | None = None,
) -> triton.Config:
    """One configuration; ``maxnreg`` caps the registers of a thread so that two blocks fit on a multiprocessor."""
    kwargs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "WARP_SPECIALIZE": warp_specialize}
    return triton.Config(kwargs, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)


# By head dim, rounded up to a power of two. Hopper and later, operands through TMA.
HOPPER: dict[int, list[triton.Config]] = {
    64: [
        tile(128, 64, 8, 3),
        tile(128, 128, 8, 3),
        tile(64, 64, 4, 3),
        tile(64, 128, 4, 2, maxnreg=128),
        tile(128, 128, 4, 2, warp_specialize=True),
    ],
    128: [
        tile(128, 64, 8, 2, maxnreg=128),
        tile(128, 64, 8, 3),
        tile(128, 128, 8, 2),
        tile(64, 64, 4, 2),
        tile(128, 128, 4, 2, warp_specialize=True),
    ],
    256: [
        tile(128, 64, 8, 2),
        tile(128, 32, 8, 3),
        tile(64, 64, 4, 2),
        tile(128, 64, 4, 2, warp_specialize=True),
    ],
}

# Plain loads: Ampere, Ada, and tensors that TMA cannot address.
PLAIN: dict[int, list[triton.Config]] = {
    64: [tile(128, 64, 4, 3), tile(128, 64, 8, 3), tile(64, 64, 4, 3), tile(128, 32, 4, 4)],
    128: [tile(128, 64, 8, 3), tile(128, 64, 4, 2), tile(128, 32, 4, 3), tile(64, 64, 4, 2)],
    256: [tile(128, 64, 8, 2), tile(64, 64, 4, 2), tile(128, 32, 8, 2), tile(64, 32, 4, 2)],
}

# float32 has no tensor core path that keeps its precision: small tiles, so that the operands fit in registers.
FLOAT32: dict[int, list[triton.Config]] = {
    64: [tile(64, 32, 4, 2)],
    128: [tile(32, 32, 4, 2)],
    256: [tile(32, 16, 4, 1)],
}


def candidates(block_d: int, itemsize: int, use_tma: bool) -> list[triton.Config]:
    """The configurations worth trying, the most likely first."""
    table = FLOAT32 if itemsize == 4 else HOPPER if use_tma else PLAIN
    return table[min(max(block_d, 64), 256)]


def shared_memory(config: triton.Config, block_d: int, itemsize: int) -> int:
    """Bytes that the Q block and the K and V stages take; what the compiler adds is below 2 KiB."""
    rows = config.kwargs["BLOCK_M"] + 2 * config.num_stages * config.kwargs["BLOCK_N"]
    return int(rows * block_d * itemsize)


def feasible(
    configs: Iterable[triton.Config], block_d: int, head_dim: int, itemsize: int, shared_memory_limit: int
) -> list[triton.Config]:
    """Those that fit in shared memory and suit the head dim; the smallest one when none fits."""
    configs = [c for c in configs if head_dim == block_d or not c.kwargs["WARP_SPECIALIZE"]]
    fitting = [c for c in configs if shared_memory(c, block_d, itemsize) + 2048 <= shared_memory_limit]
    return fitting or [min(configs, key=lambda c: shared_memory(c, block_d, itemsize))]
