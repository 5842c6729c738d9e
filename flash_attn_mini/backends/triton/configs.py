"""Configurations of the Triton kernels: tile sizes, warps, stages, and loads by TMA or not.

tuner.py reads the tables. A configuration is a triton.Config over BLOCK_M, BLOCK_N and USE_TMA. The measurements are in
docs/tuning/triton.md. Kinds of calls that are not timed, such as those with dropout, have their own lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

# By head dim, rounded up to a power of two. The first of a list is used where nothing is timed.
ByHeadDim = dict[int, list[triton.Config]]


def tile(
    block_m: int, block_n: int, num_warps: int, num_stages: int, *, tma: bool = True, maxnreg: int | None = None
) -> triton.Config:
    """One configuration; ``maxnreg`` caps the registers of a thread so that more blocks fit on a multiprocessor."""
    kwargs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "USE_TMA": tma}
    return triton.Config(kwargs, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)


@dataclass(frozen=True)
class Tables:
    """The configurations of one kernel."""

    hopper: ByHeadDim
    plain: ByHeadDim  # Ampere, Ada, and tensors that TMA cannot address
    float32: ByHeadDim
    untimed_hopper: ByHeadDim  # for windows, score modifiers and dropout, which need registers
    untimed_plain: ByHeadDim  # the same without TMA, and sequences of variable length
    resident: str  # the rows that a program keeps: BLOCK_M or BLOCK_N; it loops over the others
    resident_tiles: int  # number of tensors that it keeps; it loops over two

    def every_config(self) -> list[triton.Config]:
        """The configurations that are timed."""
        return [c for table in (self.hopper, self.plain, self.float32) for configs in table.values() for c in configs]

    def candidates(
        self, block_d: int, itemsize: int, tma_reaches: bool, shared_memory_limit: int, *, timed: bool = True
    ) -> list[triton.Config]:
        """The configurations to try, the most likely first: those that fit in shared memory, or the smallest.

        Without timing, the others serve GPUs on which the first runs out of resources.
        """
        hopper, plain = (self.hopper, self.plain) if timed else (self.untimed_hopper, self.untimed_plain)
        tables = [self.float32] if itemsize == 4 else [hopper, plain] if tma_reaches else [plain]
        for table in tables:  # a GPU with TMA may have less shared memory than Hopper
            configs = table[min(max(block_d, 64), 256)]
            fitting = [c for c in configs if self.shared_memory(c, block_d, itemsize) <= shared_memory_limit]
            if fitting:
                return fitting
        return [min(configs, key=lambda c: self.shared_memory(c, block_d, itemsize))]

    def shared_memory(self, config: triton.Config, block_d: int, itemsize: int) -> int:
        """Bytes of the resident tiles and of all stages of the others, and 2 KiB for the compiler."""
        streamed = "BLOCK_N" if self.resident == "BLOCK_M" else "BLOCK_M"
        rows = self.resident_tiles * config.kwargs[self.resident] + 2 * config.num_stages * config.kwargs[streamed]
        return int(rows * block_d * itemsize) + 2048


# Split-KV, by head dim: keys of a step. K and V of a step are 32 KB. The stages leave two CTAs to an SM.
SPLITKV_STEP = {64: 128, 128: 64, 256: 32}
SPLITKV_STAGES = {16: 4, 32: 4, 64: 3, 128: 3}  # by rows of a tile


def splitkv_configs(
    block_m: int, block_d: int, itemsize: int, shared_memory_limit: int, *, paged: bool, aligned: bool
) -> list[triton.Config]:
    """The configurations of the split-KV kernel for a tile of ``block_m`` rows, the most likely first.

    Loads of page numbers take a pipeline stage of their own. Keys that are not aligned to 16 bytes have no asynchronous
    loads, and large steps would spill.
    """
    block_n = SPLITKV_STEP[min(max(block_d, 64), 256)] if aligned else 32
    num_warps = 8 if block_m == 128 else 4
    # Of n stages n - 1 have a buffer. A row block of S takes less than one of Q.
    extra = 2 * block_m * block_d * itemsize + 4096
    most = 1 + (shared_memory_limit - extra) // (2 * block_n * block_d * itemsize)
    stages = max(1, min(SPLITKV_STAGES[block_m], most))
    return [
        tile(block_m, keys, num_warps, n + paged, tma=False)
        for keys, n in dict.fromkeys(((block_n, stages), (block_n, 2), (16, 1)))
    ]


def splitkv_programs_per_sm(block_m: int) -> int:
    """Programs for each SM that the splits of a call aim at: four waves of two CTAs, fewer with larger tiles."""
    return max(2, min(8, 256 // block_m))


FORWARD = Tables(
    hopper={
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
    },
    plain={
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
    },
    # No tensor core keeps float32's precision: small tiles, as the operands of the products sit in registers.
    float32={
        64: [tile(64, 32, 4, 2, tma=False)],
        128: [tile(32, 32, 4, 2, tma=False)],
        256: [tile(32, 16, 4, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(128, 64, 8, 3, tma=False), tile(64, 64, 4, 2)],
        128: [tile(64, 64, 4, 3), tile(64, 64, 4, 2), tile(64, 32, 4, 2)],
        256: [tile(128, 32, 8, 3), tile(64, 32, 4, 2)],
    },
    untimed_plain={
        64: [tile(128, 64, 8, 3, tma=False), tile(64, 64, 4, 2, tma=False)],
        128: [tile(128, 64, 8, 3, tma=False), tile(128, 32, 8, 3, tma=False), tile(64, 32, 4, 2, tma=False)],
        256: [tile(128, 64, 8, 2, tma=False), tile(128, 32, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
    },
    resident="BLOCK_M",
    resident_tiles=1,  # Q
)

# BLOCK_M divides options.ROWS_MULTIPLE in both backward tables.
BACKWARD_DQ = Tables(
    hopper={
        64: [
            tile(128, 64, 4, 3),
            tile(64, 64, 4, 3),
            tile(64, 64, 4, 2),
        ],
        128: [
            tile(128, 64, 8, 3),
            tile(64, 64, 4, 2),
        ],
        256: [tile(64, 32, 4, 3)],
    },
    plain={
        64: [
            tile(128, 64, 8, 2, tma=False),
            tile(64, 64, 4, 2, tma=False),
            tile(64, 32, 4, 2, tma=False),
        ],
        128: [
            tile(64, 64, 4, 2, tma=False),
            tile(128, 64, 8, 2, tma=False),
            tile(64, 32, 4, 2, tma=False),
        ],
        256: [
            tile(64, 32, 8, 2, tma=False),
            tile(128, 32, 8, 2, tma=False),
            tile(32, 32, 4, 1, tma=False),
        ],
    },
    float32={
        64: [tile(32, 32, 4, 2, tma=False)],
        128: [tile(32, 32, 8, 1, tma=False)],
        256: [tile(16, 16, 4, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(64, 64, 4, 3), tile(64, 64, 4, 2)],
        128: [tile(128, 64, 8, 3), tile(64, 64, 4, 2)],
        256: [tile(64, 32, 4, 3), tile(64, 32, 4, 2)],
    },
    untimed_plain={
        64: [tile(128, 64, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
        128: [tile(128, 64, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
        256: [tile(64, 32, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
    },
    resident="BLOCK_M",
    resident_tiles=2,  # Q and dO
)

BACKWARD_DKV = Tables(
    hopper={
        64: [
            tile(64, 64, 4, 3),
            tile(64, 64, 4, 3, maxnreg=168),
            tile(64, 64, 4, 2, maxnreg=168),
        ],
        128: [tile(64, 64, 4, 2)],
        256: [
            tile(64, 64, 4, 2),
            tile(32, 64, 4, 3),
            tile(32, 128, 8, 2),
        ],
    },
    plain={
        64: [
            tile(32, 64, 4, 2, tma=False),
            tile(64, 128, 8, 2, tma=False),
            tile(64, 64, 4, 2, tma=False),
        ],
        128: [
            tile(64, 64, 8, 2, tma=False),
            tile(32, 128, 8, 2, tma=False),
            tile(32, 64, 4, 2, tma=False),
        ],
        256: [
            tile(32, 64, 8, 2, tma=False),
            tile(32, 128, 8, 2, tma=False),
            tile(32, 32, 4, 1, tma=False),
        ],
    },
    float32={
        64: [tile(32, 32, 8, 2, tma=False)],
        128: [tile(32, 32, 4, 1, tma=False)],
        256: [tile(16, 16, 4, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(32, 128, 8, 3), tile(32, 64, 4, 2)],
        128: [tile(32, 128, 8, 2), tile(32, 64, 4, 2)],
        256: [tile(32, 128, 8, 2), tile(32, 64, 4, 2)],
    },
    untimed_plain={
        64: [tile(32, 128, 8, 2, tma=False), tile(32, 64, 4, 2, tma=False)],
        128: [tile(32, 64, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
        256: [tile(32, 64, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
    },
    resident="BLOCK_N",
    resident_tiles=2,  # K and V
)
