"""The curated cases of attn_bias, one reason to fail each, and the kinds and memory layouts that these and random cases
draw. Every value is drawn from the test's seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .poison import poisoned

Draw = torch.Generator
Shape = tuple[int, int, int, int]  # 1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k
Kind = Callable[[Draw, Shape, torch.dtype], Tensor]


# ---- kinds: values in float64, or bool ------------------------------------------------------------------------------


def _normal(draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def _large(draw: Draw, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Few keys have all of a row's weight."""
    return 30 * _normal(draw, shape, dtype)


def _offset(draw: Draw, shape: Shape, dtype: torch.dtype) -> Tensor:
    """All logits near -1000."""
    return _normal(draw, shape, dtype) - 1000


def _some(draw: Draw, shape: Shape) -> Tensor:
    """True for about half of the pairs; a few rows have none, and a few only one."""
    visible = torch.rand(shape, generator=draw) < 0.5
    row = torch.rand((*shape[:3], 1), generator=draw)
    key = torch.randint(max(shape[3], 1), (*shape[:3], 1), generator=draw)
    one = torch.arange(shape[3]) == key
    return torch.where(row < 0.1, False, torch.where(row < 0.2, one, visible))


def _mask(draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    return _some(draw, shape)


def _padding(draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    """Keys from some number on are hidden, whole tiles of them."""
    ends = torch.randint(shape[3] + 1, (*shape[:3], 1), generator=draw)
    return torch.arange(shape[3]) < ends


def _padding_float(draw: Draw, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The same as values: 0 and -inf."""
    hidden = ~_padding(draw, shape, dtype)
    return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def _blocks(draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    """Blocks of 32 queries and 32 keys, half of them hidden."""
    *leading, rows, keys = shape
    blocks = torch.rand((*leading, -(-rows // 32), -(-keys // 32)), generator=draw) < 0.5
    return blocks.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :rows, :keys]


def _minus_inf(draw: Draw, shape: Shape, dtype: torch.dtype) -> Tensor:
    return _normal(draw, shape, dtype).masked_fill(~_some(draw, shape), -math.inf)


def _lowest(draw: Draw, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The lowest finite number in many places. A row has it everywhere only if a mask hides its first key."""
    hidden = torch.rand(shape, generator=draw) < 0.5
    hidden[..., :1] = False
    return _normal(draw, shape, dtype).masked_fill(hidden, torch.finfo(dtype).min)


def _nothing(_draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _nothing_float(_draw: Draw, shape: Shape, _dtype: torch.dtype) -> Tensor:
    return torch.full(shape, -math.inf, dtype=torch.float64)


KINDS: dict[str, Kind] = {
    "normal": _normal,
    "large": _large,
    "offset": _offset,
    "mask": _mask,
    "padding": _padding,
    "padding_float": _padding_float,
    "blocks": _blocks,
    "minus_inf": _minus_inf,
    "lowest": _lowest,
    "nothing": _nothing,
    "nothing_float": _nothing_float,
}


# ---- memory ---------------------------------------------------------------------------------------------------------

Alloc = Callable[[tuple[int, ...]], Tensor]


def _transposed(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], s[1], s[3], s[2])).transpose(2, 3)


def _strided(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], s[1], s[2], 2 * s[3]))[..., ::2]


def _odd(alloc: Alloc, s: Shape) -> Tensor:
    """Rows that begin at any element."""
    return alloc((s[0], s[1], s[2], s[3] + 1))[..., 1:]


def _heads_last(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], s[2], s[3], s[1])).permute(0, 3, 1, 2)


LAYOUTS: dict[str, Callable[[Alloc, Shape], Tensor]] = {
    "contiguous": lambda alloc, s: alloc(s),
    "transposed": _transposed,
    "strided": _strided,
    "odd": _odd,
    "heads_last": _heads_last,
}


# ---- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttnBiasCase:
    """A call with attn_bias of a kind. A dimension that is not its own has size 1, or `expands` to the full size."""

    of: Case
    kind: str  # a key of KINDS
    per_batch: bool = False
    per_head: bool = True
    per_row: bool = True
    is_wide: bool = False  # float32 with 16-bit q, k and v
    layout: str = "contiguous"  # a key of LAYOUTS
    expands: bool = False
    sinks: bool = False
    key_ranges: str | None = None  # a key of key_range_cases.KINDS

    def __str__(self) -> str:
        return self.of.name

    @property
    def shape(self) -> str:
        own = [name for name in ("per_batch", "per_head", "per_row", "is_wide", "expands", "sinks") if vars(self)[name]]
        return f"{self.of.shape} attn_bias={self.kind} {' '.join(own)} layout={self.layout} ranges={self.key_ranges}"


def make_attn_bias(case: AttnBiasCase, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """The bias of a case inside a poisoned buffer."""
    draw, of = torch.Generator().manual_seed(seed + 5), case.of
    full = (of.batch, of.nheads, of.seqlen_q, of.seqlen_k)
    own = (case.per_batch, case.per_head, case.per_row, True)
    shape = tuple(n if is_own else 1 for n, is_own in zip(full, own, strict=True))
    if case.is_wide and dtype != torch.float64:
        dtype = torch.float32
    values = KINDS[case.kind](draw, shape, dtype)
    is_mask = values.dtype == torch.bool

    def alloc(size: tuple[int, ...]) -> Tensor:
        return poisoned(size, torch.bool if is_mask else dtype, device, True if is_mask else math.nan)

    made = LAYOUTS[case.layout](alloc, shape)
    made.copy_(values)
    return made.expand(full) if case.expands else made


def _of_keys(case: Case, kind: str = "padding", **more: Any) -> AttnBiasCase:
    """A bias with one row for each sequence."""
    return AttnBiasCase(case, kind, per_batch=True, per_head=False, per_row=False, **more)


_SQUARE = (1, 2, 2, 200, 200, 64)  # batch, nheads, nheads_k, seqlen_q, seqlen_k, headdim
_RAGGED = (2, 4, 2, 113, 203, 64)

ATTN_BIAS_CASES: list[AttnBiasCase] = [
    AttnBiasCase(Case("full", "a number for every pair", *_RAGGED), "normal", per_batch=True),
    AttnBiasCase(Case("per_head", "as of relative positions; sums over the batch", 3, 4, 4, 150, 150, 64), "normal"),
    AttnBiasCase(
        Case("per_batch", "sums over the heads of two groups", *_RAGGED), "normal", per_batch=True, per_head=False
    ),
    AttnBiasCase(Case("shared", "sums over batch and heads", 3, 6, 2, 130, 97, 64), "normal", per_head=False),
    AttnBiasCase(
        Case("one_row", "sums over the queries, several tiles of them", 2, 4, 2, 300, 203, 64), "normal", per_row=False
    ),
    AttnBiasCase(
        Case("one_row_shared", "sums over all but the keys", 2, 3, 3, 200, 300, 64),
        "normal",
        per_head=False,
        per_row=False,
    ),
    AttnBiasCase(Case("causal", "tiles above the diagonal get 0", 2, 2, 2, 300, 300, 64, True), "normal"),
    AttnBiasCase(Case("causal_more_queries", "rows without keys get 0", 2, 4, 2, 203, 113, 64, True), "normal"),
    AttnBiasCase(Case("window", "tiles on both sides get 0", *_SQUARE, window_size=(40, 25)), "normal", per_batch=True),
    AttnBiasCase(Case("scale", "added after the scale", *_RAGGED, softmax_scale=0.5), "normal"),
    AttnBiasCase(Case("scale_zero", "the bias is all that weighs keys", *_RAGGED, softmax_scale=0.0), "normal"),
    AttnBiasCase(Case("scale_negative", "the sign does not reach the bias", *_RAGGED, softmax_scale=-0.3), "normal"),
    AttnBiasCase(Case("softcap", "added after the cap; no derivative of it", *_RAGGED, softcap=2.0), "normal"),
    AttnBiasCase(Case("softcap_scale_zero", "tanh(0) everywhere", *_RAGGED, softcap=2.0, softmax_scale=0.0), "normal"),
    AttnBiasCase(Case("alibi", "both are added", *_RAGGED, alibi="batch"), "normal", per_batch=True),
    AttnBiasCase(
        Case("alibi_softcap", "three modifiers", 2, 4, 2, 130, 130, 64, True, alibi="heads", softcap=5.0), "normal"
    ),
    AttnBiasCase(Case("dropout", "dropout acts on dP", *_RAGGED, dropout_p=0.2), "normal"),
    AttnBiasCase(
        Case("dropout_mqa", "the mask is the query head's", 2, 6, 1, 97, 65, 64, dropout_p=0.3), "normal", per_row=False
    ),
    AttnBiasCase(Case("sinks", "P is less than 1", 2, 4, 2, 113, 203, 64), "normal", sinks=True),
    AttnBiasCase(Case("sinks_nothing", "rows that see only the sink", 2, 4, 2, 97, 130, 64), "minus_inf", sinks=True),
    AttnBiasCase(Case("ranges", "both hide keys", 2, 2, 2, 150, 170, 64), "mask", key_ranges="disjoint"),
    AttnBiasCase(
        Case("ranges_float", "pairs outside of the ranges get 0", 2, 4, 2, 150, 170, 64, True),
        "normal",
        key_ranges="far_apart",
    ),
    AttnBiasCase(Case("wide", "float32 and 16-bit q", *_RAGGED), "normal", is_wide=True),
    AttnBiasCase(Case("wide_one_row", "the same, summed", *_RAGGED), "normal", is_wide=True, per_row=False),
    AttnBiasCase(Case("large", "peaked softmax", *_RAGGED), "large"),
    AttnBiasCase(Case("offset", "lse near -1000", 1, 2, 2, 77, 150, 64), "offset", is_wide=True),
    AttnBiasCase(Case("mask", "rows that see nothing, or one key", *_RAGGED), "mask", per_batch=True),
    AttnBiasCase(Case("mask_causal", "with a causal mask", 2, 2, 2, 200, 200, 64, True), "mask", per_head=False),
    AttnBiasCase(
        Case("padding", "one row for each sequence", 4, 4, 2, 150, 300, 64),
        "padding",
        per_batch=True,
        per_head=False,
        per_row=False,
    ),
    # Kernels look for key blocks whose keys are all visible, or whose values are all 0.
    _of_keys(Case("keys_blocks", "hidden keys between visible ones", 4, 4, 2, 150, 500, 64), "blocks"),
    _of_keys(Case("keys_mask", "about half of the keys", 4, 4, 2, 200, 300, 128, True), "mask"),
    _of_keys(Case("keys_odd", "bytes that no vector load fits", 3, 4, 2, 113, 203, 64), "blocks", layout="odd"),
    _of_keys(Case("keys_strided", "every second byte", 3, 4, 2, 113, 204, 64), "blocks", layout="strided"),
    _of_keys(Case("keys_window", "with a window", 3, 2, 2, 300, 300, 64, window_size=(90, 60)), "blocks"),
    _of_keys(Case("keys_softcap", "with a cap", 3, 4, 2, 150, 300, 64, softcap=2.0)),
    _of_keys(Case("keys_alibi", "with ALiBi", 3, 4, 2, 150, 300, 64, True, alibi="heads")),
    _of_keys(Case("keys_dropout", "with dropout", 3, 4, 2, 150, 300, 64, dropout_p=0.2)),
    _of_keys(Case("keys_scale", "wide scores", 3, 4, 2, 150, 300, 128, softmax_scale=2.0)),
    _of_keys(Case("keys_sinks", "rows that may see only the sink", 4, 4, 2, 150, 300, 64), sinks=True),
    _of_keys(Case("keys_nothing", "no key is visible", 2, 2, 2, 150, 300, 64), "nothing", sinks=True),
    _of_keys(Case("keys_ranges", "with key_ranges", 3, 2, 2, 150, 300, 64), key_ranges="disjoint"),
    _of_keys(Case("padding_float", "0 and -inf", 4, 4, 2, 150, 300, 64), "padding_float"),
    _of_keys(Case("padding_float_wide", "in float32", 4, 4, 2, 150, 300, 128), "padding_float", is_wide=True),
    *(
        _of_keys(Case(f"keys_headdim_{d}", f"head dim {d}", 3, 4, 2, 130, 260, d), kind)
        for d, kind in ((96, "padding"), (128, "padding_float"), (192, "padding_float"), (256, "padding"))
    ),
    AttnBiasCase(
        Case("keys_heads", "each head has its own row", 3, 4, 2, 150, 300, 64), "blocks", per_batch=True, per_row=False
    ),
    AttnBiasCase(Case("blocks", "tiles that nobody sees", 1, 2, 2, 300, 300, 64), "blocks"),
    AttnBiasCase(Case("minus_inf", "hidden keys get no gradient", *_RAGGED), "minus_inf", per_batch=True),
    AttnBiasCase(Case("lowest", "the lowest number overflows nowhere", *_RAGGED), "lowest"),
    AttnBiasCase(
        Case("lowest_window", "all keys of some rows have it", 2, 2, 2, 77, 90, 64, window_size=(0, 3)), "lowest"
    ),
    AttnBiasCase(Case("lowest_wide", "that of float32", *_RAGGED), "lowest", is_wide=True, per_row=False),
    AttnBiasCase(Case("nothing", "no row sees a key", 2, 2, 2, 77, 90, 64), "nothing"),
    AttnBiasCase(Case("nothing_float", "all -inf", 2, 2, 2, 77, 90, 64), "nothing_float"),
    AttnBiasCase(Case("nothing_sinks", "lse is the sink", 2, 2, 2, 77, 90, 64), "nothing", sinks=True),
    AttnBiasCase(Case("transposed", "keys are not contiguous", *_RAGGED), "normal", layout="transposed"),
    AttnBiasCase(Case("strided", "every second element", *_RAGGED), "minus_inf", layout="strided", per_row=False),
    AttnBiasCase(Case("odd", "rows that no vector load fits", *_RAGGED), "normal", layout="odd", per_batch=True),
    AttnBiasCase(Case("odd_mask", "the same for bytes", *_RAGGED), "mask", layout="odd"),
    AttnBiasCase(Case("heads_last", "heads are contiguous", *_RAGGED), "normal", layout="heads_last"),
    AttnBiasCase(
        Case("expanded", "strides of 0; a gradient of the full size", *_RAGGED), "normal", per_head=False, expands=True
    ),
    AttnBiasCase(
        Case("expanded_mask", "strides of 0", 4, 4, 2, 150, 150, 64),
        "padding",
        per_batch=True,
        per_head=False,
        per_row=False,
        expands=True,
    ),
    AttnBiasCase(Case("decode", "one query", 3, 8, 2, 1, 257, 128), "normal", per_batch=True),
    AttnBiasCase(Case("decode_mask", "one query of each head", 2, 4, 4, 1, 300, 64, True), "mask"),
    AttnBiasCase(Case("few_queries", "less than a tile", 2, 4, 4, 5, 300, 64), "minus_inf"),
    AttnBiasCase(Case("few_keys", "less than a vector", 2, 2, 2, 150, 5, 64), "normal"),
    AttnBiasCase(Case("one_key", "its gradient is 0", 2, 2, 2, 129, 1, 64), "normal"),
    AttnBiasCase(Case("no_keys", "an empty bias", 2, 2, 2, 33, 0, 64), "normal"),
    AttnBiasCase(Case("no_queries", "an empty bias", 2, 2, 2, 0, 33, 64), "normal"),
    AttnBiasCase(Case("no_queries_one_row", "a gradient of zeros", 2, 2, 2, 0, 33, 64), "normal", per_row=False),
    AttnBiasCase(Case("no_batch", "the same", 0, 2, 2, 17, 33, 64), "normal"),
    *(
        AttnBiasCase(Case(f"headdim_{d}", f"head dim {d}", 1, 4, 2, 130, 140, d, d % 3 == 0), "normal")
        for d in (1, 32, 33, 72, 96, 128, 192, 256)
    ),
    AttnBiasCase(Case("layout", "strided inputs", 2, 4, 2, 77, 77, 64, layout="packed"), "normal"),
    AttnBiasCase(Case("layout_bhsd", "transposed inputs", 2, 4, 2, 77, 130, 64, layout="bhsd"), "mask"),
    AttnBiasCase(Case("long", "many tiles of rows and keys", 1, 1, 1, 513, 1025, 64, True), "normal"),
    AttnBiasCase(Case("many_pairs", "1024 pairs share one tile", 64, 16, 16, 33, 40, 32), "normal", per_head=False),
]


# Small enough for slow instruction sets and for Triton's interpreter.
SMALL_ATTN_BIAS_CASES = [
    case
    for case in ATTN_BIAS_CASES
    if case.of.batch * case.of.nheads * case.of.seqlen_q * case.of.seqlen_k <= 100_000 and case.of.headdim < 100
]
