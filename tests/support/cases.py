"""The curated list of cases: one shape, layout or set of values per reason to fail, forward or backward.

The tests of every backend and the benchmarks use it. Each case states its reason; a new case needs a new reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .poison import LAYOUTS, laid_out, poisoned


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    batch: int
    nheads: int
    nheads_k: int
    seqlen_q: int
    seqlen_k: int
    headdim: int
    causal: bool = False
    layout: str = "bshd"  # a key of poison.LAYOUTS
    values: str = "normal"  # a kind of values that `_draw` knows
    softmax_scale: float | None = None
    poison: float = math.nan  # the value around the tensors
    memory_gib: float = 0.0  # of the inputs in a 16-bit dtype, if a laptop may not have it
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # "heads": slopes [nheads]; "batch": [batch, nheads]
    dropout_p: float = 0.0
    own_headdim_v: int | None = None  # of v and out; None: headdim

    def __str__(self) -> str:
        return self.name

    @property
    def headdim_v(self) -> int:
        return self.headdim if self.own_headdim_v is None else self.own_headdim_v

    @property
    def shape(self) -> str:
        return (
            f"batch={self.batch} nheads={self.nheads} nheads_k={self.nheads_k} seqlen_q={self.seqlen_q} "
            f"seqlen_k={self.seqlen_k} headdim={self.headdim} own_headdim_v={self.own_headdim_v} causal={self.causal} "
            f"layout={self.layout} values={self.values} softmax_scale={self.softmax_scale} "
            f"window_size={self.window_size} softcap={self.softcap} alibi={self.alibi} dropout_p={self.dropout_p}"
        )


# ---- lengths ------------------------------------------------------------------------------------------------------

TILE_EDGES = (1, 63, 64, 65, 127, 128, 129, 513)  # around the 64 and 128 rows of a tile; 513 is several tiles
_LENGTHS = [
    Case(f"square_{n}{'_causal' * causal}", f"length {n} against tiles of 64 and 128", 1, 2, 2, n, n, 64, causal)
    for n in TILE_EDGES
    for causal in (False, True)
] + [
    Case("decode", "one query, many keys", 3, 4, 4, 1, 513, 64),
    Case("decode_causal", "one query is the last one: sees all keys", 2, 4, 4, 1, 130, 128, causal=True),
    Case("few_queries", "less than one row tile against several key tiles", 2, 2, 2, 3, 300, 64),
    Case("few_queries_causal", "the diagonal ends in the last key tile", 2, 2, 2, 5, 300, 64, causal=True),
    Case("one_key", "softmax over one key is 1", 2, 2, 2, 129, 1, 64),
    Case("more_keys", "seqlen_q < seqlen_k, neither a multiple of 16", 2, 2, 2, 113, 203, 64),
    Case("more_keys_causal", "diagonal shifted right by 90", 2, 2, 2, 113, 203, 64, causal=True),
    Case("more_queries", "seqlen_q > seqlen_k", 2, 2, 2, 203, 113, 64),
    Case("long_keys", "many online-softmax steps", 1, 1, 1, 65, 2049, 64),
    Case("long_causal", "row tiles with few and with many key tiles", 1, 1, 1, 1025, 1025, 64, causal=True),
]

# ---- rows without keys, and empty inputs --------------------------------------------------------------------------

_EMPTY = [
    Case("masked_rows", "causal, seqlen_q > seqlen_k: the first rows see no key", 2, 2, 2, 108, 61, 64, causal=True),
    Case("masked_tile", "a whole row tile sees no key", 1, 2, 2, 256, 64, 64, causal=True),
    Case("masked_all_but_one", "only the last row sees the only key", 1, 2, 2, 150, 1, 32, causal=True),
    Case("no_keys", "seqlen_k = 0: out 0, lse -inf", 2, 3, 3, 70, 0, 64),
    Case("no_keys_causal", "seqlen_k = 0 under the causal mask", 2, 3, 1, 5, 0, 128, causal=True),
    Case("no_queries", "seqlen_q = 0: an empty result of the right shape", 2, 3, 3, 0, 70, 64),
    Case("no_tokens", "seqlen_q = seqlen_k = 0", 2, 2, 2, 0, 0, 64, causal=True),
    Case("no_batch", "batch 0: a launch with an empty grid is an error in CUDA", 0, 2, 2, 17, 33, 64),
]

# ---- heads and head dims ------------------------------------------------------------------------------------------

HEADDIMS = (8, 16, 32, 40, 64, 72, 96, 128, 160, 192, 256)  # every compiled size, and multiples of 8 between them
ODD_HEADDIMS = (1, 33, 100)
_HEADS = (
    [
        Case(f"headdim_{d}{'_causal' * causal}", f"head dim {d}, ragged both ways", 1, 2, 1, 129, 161, d, causal)
        for d in HEADDIMS
        for causal in (False, True)
    ]
    + [Case(f"headdim_{d}", f"head dim {d} is no multiple of 8", 2, 2, 2, 70, 90, d, d == 33) for d in ODD_HEADDIMS]
    + [
        Case("gqa_4", "four query heads per key head", 2, 8, 2, 65, 97, 64),
        Case("gqa_3_causal", "three query heads per key head: no power of two", 2, 9, 3, 65, 97, 64, causal=True),
        Case("mqa", "all query heads share one", 2, 6, 1, 65, 97, 64),
        Case("mqa_decode", "one query, one key head", 4, 8, 1, 1, 257, 128, causal=True),
        Case("many_heads", "batch * nheads > 65535, the limit of a grid's y and z", 1640, 40, 40, 2, 3, 8),
        Case("many_batches", "batch > 65535", 65540, 1, 1, 2, 3, 8, causal=True),
    ]
)

# ---- layouts ------------------------------------------------------------------------------------------------------

_ODD = (2, 2, 2, 77, 90, 64)  # batch, nheads, nheads_k, seqlen_q, seqlen_k, headdim: no power of two, unequal
_LAYOUTS = [
    Case("layout_bhsd", "transposed view: the head stride is the largest but one", 2, 3, 3, 77, 77, 64, layout="bhsd"),
    Case("layout_bhsd_causal", "the same, grouped heads", 2, 4, 2, 77, 130, 64, causal=True, layout="bhsd"),
    Case("layout_sbhd", "sequence first: batch stride < row stride", 3, 2, 2, 77, 90, 64, layout="sbhd"),
    Case("layout_packed_qkv", "slices of one [b, s, 3, h, d]", 2, 4, 4, 77, 77, 64, layout="packed"),
    Case("layout_packed_gqa", "slices of one tensor, fewer key heads", 2, 4, 2, 77, 77, 128, True, layout="packed"),
    Case("layout_packed_kv", "k and v in one tensor, q apart", 2, 4, 2, 70, 90, 64, layout="packed"),
    Case("layout_padded_dim", "slice of a wider last dimension", 2, 2, 2, 77, 90, 40, layout="padded_dim"),
    Case("layout_misaligned", "rows start at odd elements: no 16-byte load fits", *_ODD, layout="misaligned"),
    Case("layout_odd_start", "contiguous from an odd element on", 2, 2, 2, 77, 90, 128, True, layout="odd_start"),
    Case("layout_odd_start_33", "misaligned and head dim 33 at once", 2, 2, 2, 77, 90, 33, layout="odd_start"),
    Case("layout_strided_rows", "every third row", *_ODD, layout="strided_rows"),
    Case("layout_expanded", "batch stride 0", 3, 2, 2, 77, 90, 64, layout="expanded"),
    Case("layout_expanded_heads", "head stride 0", 2, 4, 4, 77, 90, 64, True, layout="expanded_heads"),
    Case("padding_inf", "a max() may hide a NaN, but no inf", 2, 2, 2, 77, 90, 72, poison=math.inf),
    Case("padding_inf_causal", "-inf around, rows without keys", 2, 2, 2, 90, 77, 100, True, poison=-math.inf),
]

# ---- values and scales --------------------------------------------------------------------------------------------

_ODD_WIDE = (2, 2, 2, 77, 150, 64)
_ODD_LONG = (1, 2, 2, 77, 700, 64)
_VALUES = [
    Case("values_zeros", "all scores equal: the mean of v", 2, 2, 2, 77, 300, 64, values="zeros"),
    Case("values_rising", "every key tile raises the running maximum", *_ODD_LONG, values="rising"),
    Case("values_falling", "the first key tile holds the maximum", *_ODD_LONG, True, values="falling"),
    Case(
        "values_negative",
        "scores near -1000: a maximum that starts at 0 gives 0/0",
        1,
        2,
        2,
        77,
        150,
        64,
        values="negative",
    ),
    Case("values_v_1e4", "v of 1e4: sums past 16 bits, long enough to drift", 1, 2, 2, 77, 2048, 64, values="v_1e4"),
    Case("values_scores_1e4", "scores of 1e4: one key has probability 1", *_ODD_WIDE, True, values="scores_1e4"),
    Case("values_all_1e4", "products pass float16, scores reach 8e8", *_ODD_WIDE, values="all_1e4"),
    Case("scale_large", "explicit softmax_scale, peaked softmax", *_ODD_WIDE, softmax_scale=1.0),
    Case("scale_zero", "softmax_scale 0: uniform, also over the causal row", *_ODD_WIDE, True, softmax_scale=0.0),
    Case("scale_negative", "the largest score comes from the smallest product", *_ODD_WIDE, softmax_scale=-1.0),
    Case(
        "scale_negative_causal", "the sign of the scale does not reach the mask", *_ODD_WIDE, True, softmax_scale=-0.5
    ),
]

FORWARD_CASES: list[Case] = [*_LENGTHS, *_EMPTY, *_HEADS, *_LAYOUTS, *_VALUES]

# Small enough for the Triton interpreter and for compute-sanitizer.
SMALL_FORWARD_CASES: list[Case] = [
    c for c in FORWARD_CASES if c.batch * c.nheads <= 12 and c.seqlen_q <= 160 and c.seqlen_k <= 170
]

# Offsets of more than 31 bits. They need a big GPU; on a CPU only address space.
LARGE_FORWARD_CASES: list[Case] = [
    Case("far_rows", "row * row_stride passes 2^31", 1, 2, 1, 192, 192, 64, True, layout="far_rows", memory_gib=7.0),
    Case("far_batches", "batch * batch_stride passes 2^31", 2, 2, 2, 70, 90, 64, layout="far_batches", memory_gib=5.0),
]

# ---- values -------------------------------------------------------------------------------------------------------


def _signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(dtype)


def _draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v on the CPU in float32 (float64 for that dtype)."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    shape_q = (case.batch, case.seqlen_q, case.nheads, case.headdim)
    shape_k = (case.batch, case.seqlen_k, case.nheads_k, case.headdim)
    q = torch.randn(shape_q, generator=generator, dtype=dtype)
    k, v = torch.randn((2, *shape_k), generator=generator, dtype=dtype).unbind()
    if case.own_headdim_v is not None:
        v = torch.randn((*shape_k[:3], case.headdim_v), generator=generator, dtype=dtype)
    if case.values == "zeros":
        q = torch.zeros_like(q)
    elif case.values in ("rising", "falling"):
        # A shared direction in q, and a share of it in k that grows or shrinks from key to key: scores from 0 to 40.
        share = torch.linspace(0, 40, case.seqlen_k, dtype=dtype) / math.sqrt(case.headdim)
        share = share if case.values == "rising" else share.flip(0)
        q, k = 1.0 + 0.1 * q, 0.1 * k + share[None, :, None, None]
    elif case.values == "negative":
        magnitude = math.sqrt(1000.0 / math.sqrt(case.headdim))
        q, k = magnitude + 0.01 * q, -magnitude + 0.01 * k
    elif case.values == "v_1e4":
        v = (torch.rand(v.shape, generator=generator, dtype=dtype) * 2 - 1) * 1e4
    elif case.values in ("scores_1e4", "all_1e4"):
        q, k = _planted(case, generator, dtype)
        magnitude = 1e4 if case.values == "all_1e4" else math.sqrt(1e4 / math.sqrt(case.headdim))
        q, k = q * magnitude, k * magnitude
        # Multiples of 1/64, and signs: with a dout of signs (make_dout), their sums are exact in any order.
        v = (v * 64).round() / 64 if case.values == "scores_1e4" else _signs(tuple(v.shape), generator, dtype) * 1e4
    else:
        assert case.values == "normal", case.values
    return q, k, v


def _planted(case: Case, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors of +-1: each query equals one key that it sees, so that its softmax is one-hot at large scores."""
    shape_k = (case.batch, case.seqlen_k, case.nheads_k, case.headdim)
    k = _signs(shape_k, generator, dtype)
    last = (
        torch.arange(case.seqlen_q) + (case.seqlen_k - case.seqlen_q)
        if case.causal
        else torch.tensor(case.seqlen_k - 1)
    )
    share = torch.rand((case.batch, case.nheads, case.seqlen_q), generator=generator)
    chosen = (share * (last + 1)).long().clamp(0, case.seqlen_k - 1)  # [batch, nheads, seqlen_q]
    per_head = k.transpose(1, 2).repeat_interleave(case.nheads // case.nheads_k, dim=1)
    q = per_head.gather(2, chosen[..., None].expand(*chosen.shape, case.headdim))
    return q.transpose(1, 2), k


def make_slopes(alibi: str | None, batch: int, nheads: int, device: str) -> Tensor | None:
    """The ALiBi slopes of a case: the paper's geometric series over the heads; "batch" scales it in each sequence."""
    if alibi is None:
        return None
    heads = 2.0 ** (-8.0 * torch.arange(1, nheads + 1, device=device) / nheads)
    sequences = 1.0 + torch.arange(batch, device=device) / 4.0
    return (heads if alibi == "heads" else sequences[:, None] * heads).float()


def options_of(case: Any, device: str) -> dict[str, Any]:
    """The options of a case (also a VarlenCase), as the public functions and the reference take them."""
    return {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": case.window_size,
        "softcap": case.softcap,
        "alibi_slopes": make_slopes(case.alibi, case.batch, case.nheads, device),
        "dropout_p": case.dropout_p,
    }


def make_inputs(case: Case, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a case, inside buffers poisoned with `case.poison`. The same seed gives the same values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    values = _draw(case, generator, dtype)
    tensors = laid_out(
        case.layout,
        lambda shape: poisoned(shape, dtype, device, case.poison),
        (case.batch, case.seqlen_q, case.nheads, case.headdim),
        (case.batch, case.seqlen_k, case.nheads_k, case.headdim),
        case.headdim_v,
    )
    for tensor, value in zip(tensors, values, strict=True):
        store(tensor, value)
    return tensors


def store(tensor: Tensor, value: Tensor) -> None:
    """Copy the value; an expanded batch or head is written once."""
    for dim in (0, 2):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def make_dout(case: Case, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """The gradient of out, with the layout of the inputs, in a separate poisoned buffer.

    Where one key has probability 1, dP - delta is a difference of two equal sums, computed in different orders. There
    dout is +-1, so that both sums are exact and the difference is 0. PyTorch subtracts one such sum from itself.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    shape_q = (case.batch, case.seqlen_q, case.nheads, case.headdim_v)
    shape_k = (case.batch, case.seqlen_k, case.nheads_k, case.headdim_v)
    dout = LAYOUTS[case.layout](lambda shape: poisoned(shape, dtype, device, case.poison), shape_q, shape_k)[0]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if case.values in ("scores_1e4", "all_1e4"):
        store(dout, _signs(shape_q, generator, wide))
    else:
        store(dout, torch.randn(shape_q, generator=generator, dtype=wide))
    return dout


def make_dlse(case: Case, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """The gradient of softmax_lse, [batch, nheads, seqlen_q], in a poisoned buffer."""
    generator = torch.Generator().manual_seed(seed + 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = poisoned((case.batch, case.nheads, case.seqlen_q), wide, device, case.poison)
    dlse.copy_(torch.randn(dlse.shape, generator=generator, dtype=wide))
    return dlse
