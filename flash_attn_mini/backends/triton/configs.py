"""Tile sizes, warps, stages and kind of loads of the Triton kernel: what is tried, and what is taken untried.

tuner.py asks here. A configuration is a triton.Config over BLOCK_M, BLOCK_N and USE_TMA; the figures behind the lists
are in docs/tuning.md.
"""

from __future__ import annotations

import triton


def tile(
    block_m: int, block_n: int, num_warps: int, num_stages: int, *, tma: bool = True, maxnreg: int | None = None
) -> triton.Config:
    """One configuration; ``maxnreg`` caps the registers of a thread so that more blocks fit on a multiprocessor."""
    kwargs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "USE_TMA": tma}
    return triton.Config(kwargs, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)


# By head dim, rounded up to a power of two; the first of a list is the one taken untried.
HOPPER: dict[int, list[triton.Config]] = {
    64: [
        tile(128, 64, 4, 3),
        tile(64, 128, 4, 2),
        tile(128, 64, 8, 3, tma=False),
        tile(128, 64, 4, 3, tma=False),
    ],
    128: [
        tile(64, 64, 4, 3),
        tile(128, 64, 4, 2),
        tile(128, 64, 8, 3),
    ],
    256: [
        tile(128, 64, 8, 2),
        tile(128, 32, 8, 3),
        tile(128, 64, 8, 2, tma=False),
        tile(64, 32, 4, 2),
    ],
}

# Ampere, Ada, and tensors that TMA cannot address.
PLAIN: dict[int, list[triton.Config]] = {
    64: [
        tile(128, 64, 8, 3, tma=False),
        tile(128, 64, 4, 3, tma=False),
        tile(64, 64, 4, 3, tma=False),
        tile(128, 32, 4, 4, tma=False),
    ],
    128: [
        tile(128, 64, 8, 3, tma=False),
        tile(64, 64, 4, 2, tma=False),
        tile(128, 32, 4, 3, tma=False),
        tile(128, 32, 8, 3, tma=False),
    ],
    256: [
        tile(128, 64, 8, 2, tma=False),
        tile(64, 64, 4, 2, tma=False),
        tile(128, 32, 8, 2, tma=False),
        tile(64, 32, 4, 2, tma=False),
    ],
}

# No tensor core keeps float32's precision: small tiles, as the operands of the products sit in registers.
FLOAT32: dict[int, list[triton.Config]] = {
    64: [tile(64, 32, 4, 2, tma=False)],
    128: [tile(32, 32, 4, 2, tma=False)],
    256: [tile(32, 16, 4, 1, tma=False)],
}


def candidates(block_d: int, itemsize: int, tma_reaches: bool, shared_memory_limit: int) -> list[triton.Config]:
    """The configurations worth trying, the most likely first: those that fit in shared memory, or else the smallest."""
    table = FLOAT32 if itemsize == 4 else HOPPER if tma_reaches else PLAIN
    configs = table[min(max(block_d, 64), 256)]
    fitting = [c for c in configs if shared_memory(c, block_d, itemsize) <= shared_memory_limit]
    return fitting or [min(configs, key=lambda c: shared_memory(c, block_d, itemsize))]


def shared_memory(config: triton.Config, block_d: int, itemsize: int) -> int:
    """Bytes of the Q block and the K and V stages, and 2 KiB for what the compiler adds."""
    rows = config.kwargs["BLOCK_M"] + 2 * config.num_stages * config.kwargs["BLOCK_N"]
    return int(rows * block_d * itemsize) + 2048
