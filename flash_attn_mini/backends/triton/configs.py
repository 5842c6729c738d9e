"""Configurations of the Triton kernels: tile sizes, warps, stages, and loads by TMA or not.

tuner.py reads the tables. A configuration is a triton.Config over BLOCK_M, BLOCK_N and USE_TMA. docs/tuning/triton.md
says how they were chosen. Kinds of calls that are not timed, such as those with dropout, have their own lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

# By the larger of the head dims of q and v, rounded up to a power of two. The first of a list is used where nothing is
# timed.
ByHeadDim = dict[int, list[triton.Config]]


def tile(
    block_m: int, block_n: int, num_warps: int, num_stages: int, *, tma: bool = True, maxnreg: int | None = None
) -> triton.Config:
    """One configuration; ``maxnreg`` caps the registers of a thread so that more blocks fit on a multiprocessor."""
    kwargs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "USE_TMA": tma}
    return triton.Config(kwargs, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)


def table_key(block_d: int, block_dv: int) -> int:
    """The key of the tables."""
    return min(max(block_d, block_dv, 64), 512)


def bytes_of_pairs(config: triton.Config, pair_bytes: int) -> int:
    """Bytes of the pairs of a row and a key in all stages."""
    return int(config.num_stages * config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"] * pair_bytes)


@dataclass(frozen=True)
class Tables:
    """The configurations of one kernel."""

    hopper: ByHeadDim
    plain: ByHeadDim  # Ampere, Ada, and tensors that TMA cannot address
    float32: ByHeadDim
    untimed_hopper: ByHeadDim  # for windows, score modifiers and dropout, which need registers
    untimed_plain: ByHeadDim  # the same without TMA, and sequences of variable length
    resident: str  # the rows that a program keeps: BLOCK_M or BLOCK_N; it loops over the others
    keeps: str  # the tensors that it keeps: "q", "q dout" or "k v"; it loops over two, one of each head dim

    def every_config(self) -> list[triton.Config]:
        """The configurations that are timed."""
        return [c for table in (self.hopper, self.plain, self.float32) for configs in table.values() for c in configs]

    def candidates(
        self,
        block_d: int,
        block_dv: int,
        itemsize: int,
        tma_reaches: bool,
        shared_memory_limit: int,
        *,
        timed: bool = True,
        pair_bytes: int = 0,
    ) -> list[triton.Config]:
        """The configurations to try, the most likely first: those that fit in shared memory, or the smallest.

        Without timing, the others serve GPUs on which the first runs out of resources. pair_bytes: see shared_memory.
        """
        hopper, plain = (self.hopper, self.plain) if timed else (self.untimed_hopper, self.untimed_plain)
        tables = [self.float32] if itemsize == 4 else [hopper, plain] if tma_reaches else [plain]
        for table in tables:  # a GPU with TMA may have less shared memory than Hopper
            configs = table[table_key(block_d, block_dv)]
            fitting = [
                c
                for c in configs
                if self.shared_memory(c, block_d, block_dv, itemsize, pair_bytes) <= shared_memory_limit
            ]
            if fitting:
                return fitting
        return [min(configs, key=lambda c: self.shared_memory(c, block_d, block_dv, itemsize, pair_bytes))]

    def shared_memory(
        self, config: triton.Config, block_d: int, block_dv: int, itemsize: int, pair_bytes: int = 0
    ) -> int:
        """Bytes of the resident tiles and of all stages of the others, and 2 KiB for the compiler.

        pair_bytes: of each pair of a row and a key, which a call with attn_bias loads in the same stages.
        """
        streamed = "BLOCK_N" if self.resident == "BLOCK_M" else "BLOCK_M"
        kept = sum(block_d if name in "qk" else block_dv for name in self.keeps.split())
        elements = kept * config.kwargs[self.resident]
        elements += config.num_stages * config.kwargs[streamed] * (block_d + block_dv)
        return int(elements * itemsize + bytes_of_pairs(config, pair_bytes)) + 2048


@dataclass(frozen=True)
class StreamingTables(Tables):
    """The configurations of a kernel that keeps no tile of an operand: it loops over pairs of a sequence and a head."""

    def shared_memory(
        self, config: triton.Config, block_d: int, block_dv: int, itemsize: int, pair_bytes: int = 0
    ) -> int:
        """Bytes of all stages of Q, dO, K, V and the bias, and 2 KiB for the compiler."""
        rows = config.num_stages * (config.kwargs["BLOCK_M"] + config.kwargs["BLOCK_N"])
        return int(rows * (block_d + block_dv) * itemsize + bytes_of_pairs(config, pair_bytes)) + 2048


# Split-KV, by head dim: keys of a step. K and V of a step are 32 KB, at 512 columns 64 KB.
SPLITKV_STEP = {64: 128, 128: 64, 256: 32, 512: 32}
# By rows of a tile: stages, and the most registers of a thread; three CTAs fit into an SM with up to 16 rows.
SPLITKV_STAGES = {16: (3, 168), 32: (4, None), 64: (3, None), 128: (3, None)}
COMBINE_ELEMENTS = 4096  # float32 elements of partial results that the combine kernel reads at once


def has_small_steps(block_m: int, block_d: int, block_dv: int) -> bool:
    """True for up to 16 rows at head dim 128: 32 keys a step and at most 128 registers. Four CTAs fit into an SM.

    On an H200, 64 x 4k keys take 251 us, and 259 us with three CTAs; in pages of 64 keys 251 and 264 us.
    """
    return block_m == 16 and table_key(block_d, block_dv) == 128


def splitkv_step(block_m: int, block_d: int, block_dv: int, *, aligned: bool) -> int:
    """Keys of a step. Keys that are not aligned to 16 bytes have no asynchronous loads, and large steps would spill."""
    if has_small_steps(block_m, block_d, block_dv) or not aligned:
        return 32
    return SPLITKV_STEP[table_key(block_d, block_dv)]


def splitkv_configs(
    block_m: int,
    block_d: int,
    block_dv: int,
    itemsize: int,
    shared_memory_limit: int,
    *,
    page_per_key: bool,
    aligned: bool,
) -> list[triton.Config]:
    """The configurations of the split-KV kernel for a tile of ``block_m`` rows, the most likely first.

    page_per_key: each key's page is looked up in the step that loads the key. The compiler gives half of the stages to
    the lookups.
    """
    block_n = splitkv_step(block_m, block_d, block_dv, aligned=aligned)
    num_warps = 8 if block_m == 128 or table_key(block_d, block_dv) > 256 else 4
    wanted, maxnreg = SPLITKV_STAGES[block_m]
    if has_small_steps(block_m, block_d, block_dv):
        maxnreg = 128
    elif page_per_key or table_key(block_d, block_dv) > 256:
        maxnreg = None
    # Of n stages n - 1 have a buffer. A row block of S takes less than one of Q.
    extra = 2 * block_m * table_key(block_d, block_dv) * itemsize + 4096
    most = 1 + (shared_memory_limit - extra) // (block_n * (block_d + block_dv) * itemsize)
    stages = max(1, min(wanted, most))
    if itemsize == 4 or not aligned:
        maxnreg = None
    listed = dict.fromkeys(((block_n, stages, maxnreg), (block_n, stages, None), (block_n, 2, None), (16, 1, None)))
    return [
        tile(block_m, keys, num_warps, 2 * n - 1 if page_per_key else n, tma=False, maxnreg=limit)
        for keys, n, limit in listed
    ]


def combine_splits(block_m: int, block_dv: int) -> int:
    """Splits that the combine kernel reads at once.

    On an H200, 8 x 16k keys of one key/value head are 33 splits a sequence: 26.9 us with 64 at once, 28.7 us with 32.
    """
    if block_m == 32 and block_dv == 128:
        return 64
    return min(64, COMBINE_ELEMENTS // block_dv)


def most_splitkv_rows(block_d: int, block_dv: int) -> int:
    """The most rows of a tile. Above head dim 256 the sums of more do not fit into the registers."""
    return 128 if table_key(block_d, block_dv) <= 256 else 32


def most_programs_per_sm(block_m: int) -> int:
    """Programs for each SM that num_splits may request; more would only cost time."""
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
        512: [tile(64, 32, 8, 2), tile(64, 64, 8, 1), tile(32, 32, 8, 3, tma=False)],
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
        512: [
            tile(64, 32, 8, 2, tma=False),
            tile(32, 32, 8, 3, tma=False),
            tile(64, 16, 8, 2, tma=False),
            tile(32, 32, 8, 2, tma=False),
            tile(32, 16, 8, 2, tma=False),
        ],
    },
    # No tensor core keeps float32's precision: small tiles, as the operands of the products sit in registers.
    float32={
        64: [tile(64, 32, 4, 2, tma=False)],
        128: [tile(32, 32, 4, 2, tma=False)],
        256: [tile(32, 16, 4, 1, tma=False)],
        512: [tile(16, 16, 4, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(128, 64, 8, 3, tma=False), tile(64, 64, 4, 2)],
        128: [tile(64, 64, 4, 3), tile(64, 64, 4, 2), tile(64, 32, 4, 2)],
        256: [tile(128, 32, 8, 3), tile(64, 32, 4, 2)],
        512: [tile(64, 32, 8, 2), tile(64, 16, 8, 2)],
    },
    untimed_plain={
        64: [tile(128, 64, 8, 3, tma=False), tile(64, 64, 4, 2, tma=False)],
        128: [tile(128, 64, 8, 3, tma=False), tile(128, 32, 8, 3, tma=False), tile(64, 32, 4, 2, tma=False)],
        256: [tile(128, 64, 8, 2, tma=False), tile(128, 32, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
        512: [tile(64, 32, 8, 2, tma=False), tile(64, 16, 8, 2, tma=False), tile(32, 16, 8, 2, tma=False)],
    },
    resident="BLOCK_M",
    keeps="q",
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
        512: [tile(64, 16, 8, 2), tile(64, 32, 8, 1), tile(32, 32, 8, 2, tma=False)],
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
        512: [
            tile(32, 32, 8, 2, tma=False),
            tile(32, 32, 8, 1, tma=False),
            tile(32, 16, 8, 2, tma=False),
            tile(32, 16, 8, 1, tma=False),
        ],
    },
    float32={
        64: [tile(32, 32, 4, 2, tma=False)],
        128: [tile(32, 32, 8, 1, tma=False)],
        256: [tile(16, 16, 4, 1, tma=False)],
        512: [tile(16, 16, 8, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(64, 64, 4, 3), tile(64, 64, 4, 2)],
        128: [tile(128, 64, 8, 3), tile(128, 64, 8, 2), tile(64, 64, 4, 2)],
        256: [tile(64, 32, 4, 3), tile(64, 32, 4, 2)],
        512: [tile(32, 32, 8, 2, tma=False), tile(32, 16, 8, 2, tma=False)],
    },
    untimed_plain={
        64: [tile(128, 64, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
        128: [tile(128, 64, 8, 2, tma=False), tile(64, 32, 4, 2, tma=False)],
        256: [tile(64, 32, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
        512: [tile(32, 32, 8, 2, tma=False), tile(32, 32, 8, 1, tma=False), tile(32, 16, 8, 1, tma=False)],
    },
    resident="BLOCK_M",
    keeps="q dout",
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
        512: [tile(16, 64, 8, 2), tile(32, 64, 8, 1), tile(32, 32, 8, 2, tma=False)],
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
        512: [
            tile(32, 32, 8, 2, tma=False),
            tile(32, 32, 8, 1, tma=False),
            tile(16, 32, 8, 2, tma=False),
            tile(16, 32, 8, 1, tma=False),
        ],
    },
    float32={
        64: [tile(32, 32, 8, 2, tma=False)],
        128: [tile(32, 32, 4, 1, tma=False)],
        256: [tile(16, 16, 4, 1, tma=False)],
        512: [tile(16, 16, 8, 1, tma=False)],
    },
    untimed_hopper={
        64: [tile(32, 128, 8, 3), tile(32, 64, 4, 2)],
        128: [tile(32, 128, 8, 2), tile(32, 64, 4, 2)],
        256: [tile(32, 128, 8, 2), tile(32, 64, 4, 2)],
        512: [tile(32, 32, 8, 2, tma=False), tile(16, 32, 8, 2, tma=False)],
    },
    untimed_plain={
        64: [tile(32, 128, 8, 2, tma=False), tile(32, 64, 4, 2, tma=False)],
        128: [tile(32, 64, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
        256: [tile(32, 64, 8, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
        512: [tile(32, 32, 8, 2, tma=False), tile(32, 32, 8, 1, tma=False), tile(16, 32, 8, 1, tma=False)],
    },
    resident="BLOCK_N",
    keeps="k v",
)

# dV without dK, above head dim 256: it does not read V.
BACKWARD_DV = Tables(
    hopper={512: [tile(32, 64, 8, 2), tile(16, 64, 8, 2), tile(32, 32, 8, 2, tma=False)]},
    plain={
        512: [tile(32, 32, 8, 2, tma=False), tile(32, 32, 8, 1, tma=False), tile(16, 32, 8, 2, tma=False)],
    },
    float32={512: [tile(16, 16, 8, 1, tma=False)]},
    untimed_hopper={512: [tile(16, 64, 8, 2), tile(32, 32, 8, 2, tma=False)]},
    untimed_plain={512: [tile(32, 32, 8, 2, tma=False), tile(32, 32, 8, 1, tma=False)]},
    resident="BLOCK_N",
    keeps="k",
)

_BIAS: ByHeadDim = {
    64: [tile(128, 64, 8, 3, tma=False), tile(128, 64, 8, 2, tma=False), tile(64, 64, 4, 1, tma=False)],
    128: [tile(128, 64, 8, 2, tma=False), tile(64, 64, 4, 2, tma=False), tile(64, 32, 4, 1, tma=False)],
    256: [tile(64, 32, 4, 2, tma=False), tile(32, 32, 4, 1, tma=False)],
    512: [tile(64, 32, 8, 1, tma=False), tile(32, 16, 4, 1, tma=False), tile(16, 16, 4, 1, tma=False)],
}

# The gradient of attn_bias. Its calls are never timed.
BACKWARD_BIAS = StreamingTables(
    hopper=_BIAS,
    plain=_BIAS,
    float32={
        64: [tile(32, 32, 4, 2, tma=False)],
        128: [tile(32, 32, 4, 1, tma=False)],
        256: [tile(16, 16, 4, 1, tma=False)],
        512: [tile(16, 16, 8, 1, tma=False)],
    },
    untimed_hopper=_BIAS,
    untimed_plain=_BIAS,
    resident="BLOCK_M",
    keeps="",
)
