# mypy: disable-error-code="no-untyped-def"
"""Dropout: the mask of a tile, bit for bit that of csrc/common/philox.h.

attend_blocks, accumulate_dq and accumulate_dkv compute it for each tile. No mask is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, key0, key1):
    """128 random bits for each counter. All arguments are uint32, and the shapes of the counters broadcast.

    tl.umulhi, not the upper half of a 64-bit product: the compiler gives a tile of uint64 another layout, and moves the
    result through shared memory.
    """
    for _ in tl.static_range(7):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def dropout_stream(
    rng_state,  # [2] int64: seed and offset
    sequence_head,  # sequence * nheads + head
):
    """The key and the fixed part of the counter of philox4x32, for one head of one sequence."""
    seed = tl.load(rng_state).to(tl.uint64)
    offset = tl.load(rng_state + 1).to(tl.uint64)
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32) ^ (offset >> 32).to(tl.uint32)
    return key0, key1, sequence_head.to(tl.uint32), offset.to(tl.uint32)


@triton.jit
def keep_tile(
    stream,  # from dropout_stream
    threshold,  # a pair is dropped when its 16 random bits are below
    start_m,  # first query and first key of the tile: multiples of 16
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N) booleans: which probabilities are kept.

    One counter serves 8 pairs: queries r and r + 8, keys 2c, 2c + 1, 2c + 8 and 2c + 9 of 16 x 16. A tensor-core
    product has the same 8 in one thread, so the compiler finds a layout without data movement.
    """
    key0, key1, sequence_head, offset = stream
    m = start_m // 16 + tl.arange(0, BLOCK_M // 16)[:, None, None, None]
    n = start_n // 16 + tl.arange(0, BLOCK_N // 16)[None, :, None, None]
    r = tl.arange(0, 8)[None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, :]
    x0, x1, x2, x3 = philox4x32(
        (m * 32 + (r * 4 + c)).to(tl.uint32), n.to(tl.uint32), sequence_head, offset, key0, key1
    )
    # Bit 0 of the key chooses x0 and x1 or x2 and x3, bit 3 one of the two; bit 3 of the query chooses the half.
    bits = tl.join(tl.join(x0, x2), tl.join(x1, x3))  # (m, n, r, c, bit 0 of the key, bit 3 of the key)
    kept = tl.join((bits & 0xFFFF) >= threshold, (bits >> 16) >= threshold)  # (..., bit 3 of the query)
    return kept.permute(0, 6, 2, 1, 5, 3, 4).reshape(BLOCK_M, BLOCK_N)
