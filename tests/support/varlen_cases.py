"""The curated cases of variable length: batches of sequences, features and pages, one reason to fail each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_mini.reference import dropout_masks_varlen, read_pages

from .cases import options_of, store
from .poison import LAYOUTS, laid_out, poisoned


@dataclass(frozen=True)
class VarlenCase:
    name: str
    why: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    nheads: int = 2
    nheads_k: int = 2
    headdim: int = 64
    causal: bool = False
    layout: str = "bshd"  # a key of poison.LAYOUTS, of one batch
    softmax_scale: float | None = None
    memory_gib: float = 0.0  # of the inputs in a 16-bit dtype, if a laptop may not have it
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "batch"
    dropout_p: float = 0.0
    page_size: int = 0  # rows of a page of keys and values; 0: no pages
    slack: int = 0  # max_seqlen minus the length of the longest sequence
    own_headdim_v: int | None = None  # of v and out; None: headdim

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def headdim_v(self) -> int:
        return self.headdim if self.own_headdim_v is None else self.own_headdim_v

    @property
    def shape(self) -> str:
        return (
            f"lengths_q={self.lengths_q} lengths_k={self.lengths_k} nheads={self.nheads} nheads_k={self.nheads_k} "
            f"headdim={self.headdim} causal={self.causal} layout={self.layout} softmax_scale={self.softmax_scale} "
            f"window_size={self.window_size} softcap={self.softcap} alibi={self.alibi} dropout_p={self.dropout_p} "
            f"page_size={self.page_size} slack={self.slack} own_headdim_v={self.own_headdim_v}"
        )


def _same(name: str, why: str, lengths: tuple[int, ...], **options: Any) -> VarlenCase:
    return VarlenCase(name, why, lengths, lengths, **options)


_MIXED = (5, 0, 64, 1, 130)
_MORE_AND_LESS = ((70, 5, 33, 0, 129), (40, 90, 33, 7, 0))  # more queries than keys, fewer, equal, no queries, no keys
_LONG_AND_SHORT = (513, *(3,) * 20)
_MANY = tuple(i * 7 % 13 for i in range(300))

_LENGTHS = [
    _same("mixed", "empty, one-token and longer sequences", _MIXED),
    _same("mixed_causal", "the same under the causal mask", _MIXED, causal=True),
    VarlenCase("more_and_less", "seqlen_q >, <, = seqlen_k, no queries, no keys", *_MORE_AND_LESS),
    VarlenCase("more_and_less_causal", "each sequence has its own diagonal", *_MORE_AND_LESS, causal=True),
    _same("one_token_each", "blocks of one row", (1,) * 7),
    VarlenCase("decode", "one query per sequence", (1,) * 5, (3, 257, 64, 0, 130), nheads=4, causal=True),
    _same("long_and_short", "one long sequence, many short", _LONG_AND_SHORT, nheads_k=1),
    _same("long_and_short_causal", "the same, causal", _LONG_AND_SHORT, nheads_k=1, causal=True),
    _same("short_then_long", "the long sequence comes last", _LONG_AND_SHORT[::-1], causal=True),
    _same("tile_edges", "ends on tile edges, one row before and after", (63, 64, 65, 127, 128, 129), causal=True),
    _same("one_sequence", "a batch of one", (129,)),
    _same("empty_around", "empty sequences first, last and between", (0, 0, 33, 0, 47, 0), causal=True),
    _same("all_empty", "no tokens at all", (0, 0, 0)),
    VarlenCase("no_queries", "keys without queries", (0, 0), (5, 9)),
    VarlenCase("no_keys", "queries without keys", (5, 9), (0, 0)),
    _same("no_sequences", "a batch of none", ()),
    _same("many", "300 sequences: the search for one takes nine steps", _MANY, nheads=1, nheads_k=1, headdim=32),
    _same("slack", "max_seqlen more than any sequence: blocks past the end", (33, 70, 2), slack=300, causal=True),
]

_HEADS = [
    _same("gqa", "three query heads per key head", (65, 3, 130), nheads=6, causal=True),
    _same("mqa", "all query heads share one", (65, 3, 130), nheads=4, nheads_k=1),
] + [
    _same(f"headdim_{d}", f"head dim {d}", (70, 0, 33), headdim=d, causal=d % 64 == 0) for d in (33, 40, 128, 192, 256)
]

_LAYOUTS = [
    _same("layout_bhsd", "the head stride is the largest", _MIXED, layout="bhsd", causal=True),
    _same("layout_packed", "slices of one [total, 3, h, d]", _MIXED, layout="packed"),
    _same("layout_misaligned", "rows start at odd elements", _MIXED, layout="misaligned", causal=True),
    _same("layout_padded_dim", "slice of a wider last dimension", _MIXED, layout="padded_dim", headdim=40),
]

_FEATURES = [
    VarlenCase("window", "bands aligned to each sequence's end", *_MORE_AND_LESS, window_size=(20, 5)),
    VarlenCase("window_causal", "sliding windows", *_MORE_AND_LESS, causal=True, window_size=(17, -1)),
    VarlenCase("window_0_0", "one key, or none", *_MORE_AND_LESS, window_size=(0, 0)),
    VarlenCase("softcap", "capped scores", *_MORE_AND_LESS, causal=True, softcap=3.0),
    VarlenCase("alibi", "distances within each sequence", *_MORE_AND_LESS, nheads=4, alibi="heads"),
    VarlenCase("alibi_batch", "slopes of each sequence", *_MORE_AND_LESS, nheads=4, causal=True, alibi="batch"),
    VarlenCase("dropout", "masks count within each sequence", *_MORE_AND_LESS, nheads=4, dropout_p=0.2),
    _same("dropout_causal", "the same, one long", _LONG_AND_SHORT, causal=True, dropout_p=0.1),
    VarlenCase(
        "together",
        "window, ALiBi, dropout, grouped heads",
        *_MORE_AND_LESS,
        nheads=4,
        causal=True,
        window_size=(31, 0),
        alibi="batch",
        dropout_p=0.15,
    ),
    VarlenCase(
        "together_softcap",
        "window, softcap, ALiBi, padded head dim",
        *_MORE_AND_LESS,
        nheads=4,
        headdim=33,
        window_size=(31, 9),
        softcap=4.0,
        alibi="batch",
    ),
]

_DECODE_LENGTHS = ((1, 1, 1, 1), (300, 1, 0, 97))
_PAGES = [
    VarlenCase("pages_16", "the smallest page", (70, 5, 0, 33), (70, 90, 7, 0), page_size=16, causal=True),
    VarlenCase("pages_48", "no tile is a multiple of the page", (70, 5, 3, 33), (100, 130, 7, 0), page_size=48),
    VarlenCase("pages_256", "a page larger than a tile", (33, 5), (600, 20), page_size=256, causal=True),
    VarlenCase("pages_decode", "one query per sequence", *_DECODE_LENGTHS, nheads=8, page_size=16, causal=True),
    VarlenCase("pages_window", "whole pages before the window", *_DECODE_LENGTHS, page_size=32, window_size=(40, 0)),
    VarlenCase("pages_alibi", "ALiBi and softcap", (9, 40), (130, 40), page_size=16, alibi="batch", softcap=5.0),
    VarlenCase("pages_dropout", "the mask counts keys, not pages", (9, 40), (130, 40), page_size=16, dropout_p=0.3),
    VarlenCase("pages_headdim_128", "head dim 128, grouped", (64, 9), (200, 77), 4, 2, 128, True, page_size=64),
    VarlenCase("pages_headdim_40", "a head dim between the compiled ones", (64, 9), (200, 77), 4, 2, 40, page_size=16),
]

VARLEN_CASES: list[VarlenCase] = [*_LENGTHS, *_HEADS, *_LAYOUTS, *_FEATURES, *_PAGES]
SMALL_VARLEN_CASES = [c for c in VARLEN_CASES if sum(c.lengths_q) <= 400 and sum(c.lengths_k) <= 400 and c.batch <= 8]

# Offsets of more than 31 bits: rows so far apart that a sequence in the middle of the batch begins past 2^31.
LARGE_VARLEN_CASES: list[VarlenCase] = [
    _same(
        "far_rows", "total * row_stride passes 2^31", (60, 0, 100, 32), layout="far_rows", causal=True, memory_gib=7.0
    )
]


@dataclass
class Batch:
    """The tensors of a case, in buffers full of poison."""

    q: Tensor  # [total_q, nheads, headdim]
    k: Tensor  # [total_k, nheads_k, headdim], or [pages, page_size, nheads_k, headdim]
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None

    @property
    def lengths(self) -> tuple[Any, ...]:
        """The arguments of the varlen functions after q, k and v."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        return self.cu_seqlens_q, self.cu_seqlens_k

    def rows(self, x: Tensor) -> Tensor:
        """k or v without pages."""
        if self.block_table is None:
            return x
        lengths = enumerate(self.cu_seqlens_k.diff().tolist())
        parts = [read_pages(x, self.block_table, b, 0, length) for b, length in lengths]
        return torch.cat([x.new_empty(0, *x.shape[2:]), *parts])


def _cumulative(lengths: tuple[int, ...], device: str) -> Tensor:
    """cu_seqlens, surrounded by numbers far outside of the tensors."""
    poison = 1 << 30
    sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    buffer = torch.tensor([poison] * 4 + sums + [poison] * 4, dtype=torch.int32, device=device)
    return buffer[4 : 4 + len(sums)]


def _paged(case: VarlenCase, k: Tensor, v: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """k and v in scattered pages among poisoned pages, and the block table. Its unused entries are no valid pages."""
    size = case.page_size
    pages_of = [-(-length // size) for length in case.lengths_k]
    width, used = max([*pages_of, 1]) + 2, sum(pages_of)
    numbers = torch.randperm(used + 3, generator=draw)[:used].tolist()
    table = torch.full((case.batch, width), 1 << 30, dtype=torch.int32)
    table[:, -1] = -7
    pages = [poisoned((used + 3, size, *x.shape[1:]), x.dtype, x.device.type) for x in (k, v)]
    start = 0
    for b, length in enumerate(case.lengths_k):
        for index in range(pages_of[b]):
            number = numbers.pop()
            table[b, index] = number
            rows = slice(start + index * size, start + min((index + 1) * size, length))
            for page, x in zip(pages, (k, v), strict=True):
                page[number, : rows.stop - rows.start] = x[rows]
        start += length
    return pages[0], pages[1], table.to(k.device)


def make_batch(case: VarlenCase, dtype: torch.dtype, device: str, seed: int) -> Batch:
    """The same seed gives the same values everywhere."""
    draw = torch.Generator().manual_seed(seed)
    shape_q = (1, sum(case.lengths_q), case.nheads, case.headdim)
    shape_k = (1, sum(case.lengths_k), case.nheads_k, case.headdim)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def alloc(shape: tuple[int, ...]) -> Tensor:
        return poisoned(shape, dtype, device, math.nan)

    def drawn(tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        for x in tensors:
            store(x, torch.randn(x.shape, generator=draw, dtype=wide))
        return [x[0] for x in tensors]

    q, k, v = drawn(laid_out(case.layout, alloc, shape_q, shape_k, case.headdim_v))
    dout = drawn(LAYOUTS[case.layout](alloc, (*shape_q[:3], case.headdim_v), (*shape_k[:3], case.headdim_v)))[0]
    table = None
    if case.page_size:
        k, v, table = _paged(case, k, v, draw)
    cu_seqlens = [_cumulative(lengths, device) for lengths in (case.lengths_q, case.lengths_k)]
    longest = [max([*lengths, 0]) + case.slack for lengths in (case.lengths_q, case.lengths_k)]
    return Batch(q, k, v, dout, cu_seqlens[0], cu_seqlens[1], longest[0], longest[1], table)


def expectation_options(case: VarlenCase, batch: Batch, rng_state: Tensor) -> dict[str, Any]:
    """Options of bounds.py for the case: the dropout mask follows from the returned rng_state."""
    options = options_of(case, batch.q.device.type)
    if case.dropout_p > 0:
        options["dropout_mask"] = dropout_masks_varlen(rng_state, case.dropout_p, case.nheads, *batch.cu_seqlens)
    return {"cu_seqlens": batch.cu_seqlens, **options}
