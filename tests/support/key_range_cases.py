"""The curated cases of key_ranges, one reason to fail each, and the kinds of ranges that these and random cases draw.

A kind gives the ranges of one head of one sequence. Every value is drawn from the test's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .poison import poisoned
from .varlen_cases import VarlenCase

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
OUT_OF_RANGE = 1 << 30  # surrounds key_ranges in memory

Draw = torch.Generator
Kind = Callable[[Draw, int, int], Tensor]  # draw, seqlen_q, seqlen_k -> [seqlen_q, 2] or [seqlen_q, 2, 2]


# ---- kinds ----------------------------------------------------------------------------------------------------------


def _integer(draw: Draw, low: int, high: int) -> int:
    """One of low to high; low where high is less."""
    return int(torch.randint(low, max(high, low) + 1, (), generator=draw))


def _integers(draw: Draw, low: int, high: int, *size: int) -> Tensor:
    return torch.randint(low, max(high, low) + 1, size, generator=draw)


def _positions(seqlen_q: int, seqlen_k: int) -> Tensor:
    """The key at each query's own position, which may not exist."""
    return torch.arange(seqlen_q) + (seqlen_k - seqlen_q)


def _two(a: Tensor, b: Tensor) -> Tensor:
    """[seqlen_q, 2, 2], with the two ranges of each query in this order."""
    return torch.stack([a, b], dim=-2)


def _constant(begin: int, end: int, seqlen_q: int) -> Tensor:
    return torch.tensor([begin, end]).expand(seqlen_q, 2)


def _documents(draw: Draw, seqlen_q: int, seqlen_k: int, begin: int = 0) -> Tensor:
    """Documents from key `begin` on; a query sees its document, those before the first one see that one."""
    count = _integer(draw, 1, max(seqlen_k // 20, 1))
    starts = torch.cat([torch.tensor([begin]), _integers(draw, begin, seqlen_k, count)]).sort().values
    ends = torch.cat([starts[1:], torch.tensor([seqlen_k])])
    own = torch.searchsorted(starts, _positions(seqlen_q, seqlen_k), right=True).sub(1).clamp(min=0)
    return torch.stack([starts[own], ends[own]], dim=-1)


def _prefix(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Prefix-LM: the prefix, and then all keys up to the query's own."""
    ends = (_positions(seqlen_q, seqlen_k) + 1).clamp(min=_integer(draw, 0, seqlen_k))
    return torch.stack([torch.zeros_like(ends), ends], dim=-1)


def _chunks(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    size = _integer(draw, 1, max(seqlen_k // 2, 1))
    begins = _positions(seqlen_q, seqlen_k).div(size, rounding_mode="floor") * size
    return torch.stack([begins, begins + size], dim=-1).clamp(0, seqlen_k)


def _left_padding(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Queries in the padding see nothing."""
    padding = _integer(draw, 1, seqlen_k - 1)
    ends = (_positions(seqlen_q, seqlen_k) >= padding) * seqlen_k
    return torch.stack([torch.full_like(ends, padding), ends], dim=-1)


def _right_padding(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    end = _integer(draw, 1, seqlen_k - 1)
    ends = (_positions(seqlen_q, seqlen_k) < end) * end
    return torch.stack([torch.zeros_like(ends), ends], dim=-1)


def _global_and_window(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    own, width = _positions(seqlen_q, seqlen_k), _integer(draw, 0, seqlen_k // 4)
    first = _constant(0, _integer(draw, 1, seqlen_k // 4), seqlen_q)
    return _two(first, torch.stack([own - width, own + 1], dim=-1).clamp(0, seqlen_k))


def _shared_prefix(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A prefix that all see, and the query's document."""
    prefix = _integer(draw, 1, seqlen_k // 3)
    return _two(_constant(0, prefix, seqlen_q), _documents(draw, seqlen_q, seqlen_k, prefix))


def _shuffled(draw: Draw, ranges: Tensor) -> Tensor:
    """The two ranges of about half of the queries change places."""
    swaps = torch.rand(ranges.shape[0], generator=draw) < 0.5
    return torch.where(swaps[:, None, None], ranges.flip(-2), ranges)


def _disjoint(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    bounds = _integers(draw, 0, seqlen_k, seqlen_q, 4).sort(dim=-1).values
    return _shuffled(draw, bounds.view(seqlen_q, 2, 2))


def _far_apart(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A few of the first keys and a few of the last, which differ from query to query."""
    first, last = (
        _integers(draw, 0, seqlen_k // 8, seqlen_q, 2),
        _integers(draw, seqlen_k * 7 // 8, seqlen_k, seqlen_q, 2),
    )
    return _shuffled(draw, _two(first.sort(dim=-1).values, last.sort(dim=-1).values))


def _overlapping(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Ranges that overlap, touch, or of which one holds the other."""
    a, b, c, d = _integers(draw, 0, seqlen_k, seqlen_q, 4).sort(dim=-1).values.unbind(-1)
    pairs = torch.stack([torch.stack(x, dim=-1) for x in ((a, c, b, d), (a, b, b, d), (a, d, b, c))])
    chosen = pairs[_integers(draw, 0, 2, seqlen_q), torch.arange(seqlen_q)]
    return _shuffled(draw, chosen.view(seqlen_q, 2, 2))


def _empty(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """One range of many queries is empty, both of others."""
    ranges = _disjoint(draw, seqlen_q, seqlen_k)
    is_empty = torch.rand(seqlen_q, 2, generator=draw) < 0.5
    return torch.where(is_empty[..., None], ranges[..., :1], ranges)


def _nothing(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    at = _integers(draw, 0, seqlen_k, seqlen_q)
    return torch.stack([at, at], dim=-1)


def _single(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Any range; begin > end in some, which is empty."""
    return _integers(draw, 0, seqlen_k, seqlen_q, 2)


def _hostile(draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Values far outside, just outside, and begin > end."""
    values = torch.tensor([INT_MIN, INT_MIN + 1, -seqlen_k, -1, 0, 1, seqlen_k, seqlen_k + 1, INT_MAX - 1, INT_MAX])
    wild = values[_integers(draw, 0, len(values) - 1, seqlen_q, 2, 2)]
    return torch.where(
        torch.rand(seqlen_q, 2, 2, generator=draw) < 0.5, wild, _integers(draw, 0, seqlen_k, seqlen_q, 2, 2)
    )


def _all(_draw: Draw, seqlen_q: int, seqlen_k: int) -> Tensor:
    return _constant(0, seqlen_k, seqlen_q)


KINDS: dict[str, Kind] = {
    "documents": _documents,
    "prefix": _prefix,
    "chunks": _chunks,
    "left_padding": _left_padding,
    "right_padding": _right_padding,
    "global_and_window": _global_and_window,
    "shared_prefix": _shared_prefix,
    "disjoint": _disjoint,
    "far_apart": _far_apart,
    "overlapping": _overlapping,
    "empty": _empty,
    "nothing": _nothing,
    "single": _single,
    "hostile": _hostile,
    "all": _all,
}


# ---- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRangeCase:
    """A call with key_ranges of a kind. Each sequence and each head has the same ranges, or others."""

    of: Case | VarlenCase
    kind: str  # a key of KINDS
    per_batch: bool = True  # equal lengths; a varlen call has others in each sequence
    per_head: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        return self.of.name

    @property
    def shape(self) -> str:
        return (
            f"{self.of.shape} key_ranges={self.kind} per_batch={self.per_batch} per_head={self.per_head} "
            f"sinks={self.sinks}"
        )


def make_key_ranges(case: KeyRangeCase, device: str, seed: int) -> Tensor:
    """The ranges of a case inside a buffer of large numbers."""
    draw = torch.Generator().manual_seed(seed + 4)
    of, kind = case.of, KINDS[case.kind]
    heads = of.nheads if case.per_head else 1

    def of_sequence(seqlen_q: int, seqlen_k: int) -> Tensor:
        return torch.stack([kind(draw, seqlen_q, seqlen_k) for _ in range(heads)])

    if isinstance(of, VarlenCase):
        parts = [of_sequence(*lengths) for lengths in zip(of.lengths_q, of.lengths_k, strict=True)]
        ranges = torch.cat(parts, dim=1)
    else:
        sequences = of.batch if case.per_batch else 1
        ranges = torch.stack([of_sequence(of.seqlen_q, of.seqlen_k) for _ in range(sequences)])
    made = poisoned(tuple(ranges.shape), torch.int32, device, OUT_OF_RANGE)
    made.copy_(ranges)
    return made


_LENGTHS = ((70, 5, 0, 33, 129, 40), (90, 3, 7, 0, 129, 200))

KEY_RANGE_CASES: list[KeyRangeCase] = [
    KeyRangeCase(Case("documents", "several in a tile, and tiles without a mask", 2, 2, 2, 300, 300, 64), "documents"),
    KeyRangeCase(
        Case("documents_causal", "the diagonal inside of documents", 2, 4, 2, 300, 300, 64, True), "documents"
    ),
    KeyRangeCase(Case("documents_long", "most tiles of keys are skipped", 1, 1, 1, 1025, 1025, 64, True), "documents"),
    KeyRangeCase(Case("prefix", "the longest row is not the last one", 2, 2, 2, 200, 200, 64), "prefix"),
    KeyRangeCase(Case("prefix_alibi", "distances to both sides", 1, 4, 4, 203, 203, 64, alibi="heads"), "prefix"),
    KeyRangeCase(Case("chunks", "ranges that step with the row", 1, 2, 1, 257, 257, 128, dropout_p=0.2), "chunks"),
    KeyRangeCase(
        Case("chunks_more_keys", "positions count from the end", 1, 2, 1, 113, 300, 64, softcap=5.0), "chunks"
    ),
    KeyRangeCase(Case("left_padding", "rows that see nothing come first", 3, 4, 2, 150, 150, 64, True), "left_padding"),
    KeyRangeCase(Case("right_padding", "rows that see nothing come last", 3, 4, 2, 150, 150, 64), "right_padding"),
    KeyRangeCase(
        Case("padding_sinks", "the sink is all that rows in the padding see", 2, 4, 2, 130, 130, 64, True),
        "right_padding",
        sinks=True,
    ),
    KeyRangeCase(
        Case("global_and_window", "two ranges: they touch in the first rows", 1, 4, 2, 300, 300, 64, True),
        "global_and_window",
    ),
    KeyRangeCase(
        Case("global_and_window_long", "tiles between the two are skipped", 1, 1, 1, 513, 1025, 64), "global_and_window"
    ),
    KeyRangeCase(
        Case("shared_prefix", "a prefix for all documents", 2, 4, 1, 400, 400, 64, True, dropout_p=0.1), "shared_prefix"
    ),
    KeyRangeCase(
        Case("disjoint", "two ranges, either first", 2, 2, 2, 130, 257, 64, alibi="heads"), "disjoint", per_head=True
    ),
    KeyRangeCase(Case("far_apart", "a wide gap in every row", 1, 2, 2, 150, 1100, 64), "far_apart"),
    KeyRangeCase(
        Case("far_apart_dropout", "random numbers count keys of the gap", 1, 4, 2, 77, 700, 64, dropout_p=0.2),
        "far_apart",
    ),
    KeyRangeCase(
        Case("overlapping", "a key in both ranges counts once", 2, 4, 2, 113, 203, 72), "overlapping", sinks=True
    ),
    KeyRangeCase(Case("empty", "rows with two, one and no range", 2, 2, 2, 203, 113, 64), "empty", per_head=True),
    KeyRangeCase(
        Case("empty_window", "a window leaves nothing of some ranges", 1, 2, 2, 200, 300, 64, window_size=(40, 25)),
        "empty",
    ),
    KeyRangeCase(Case("nothing", "no row sees a key", 2, 2, 2, 77, 90, 64), "nothing"),
    KeyRangeCase(
        Case("nothing_sinks", "no row sees a key: lse is the sink", 2, 2, 2, 77, 90, 64), "nothing", sinks=True
    ),
    KeyRangeCase(
        Case("single_per_head", "one range, another in each head", 1, 6, 2, 97, 130, 64), "single", False, True
    ),
    KeyRangeCase(
        Case("per_batch", "the same in all heads, others in each sequence", 3, 4, 4, 65, 97, 64, True), "disjoint"
    ),
    KeyRangeCase(Case("per_head", "the same in all sequences", 3, 6, 2, 65, 97, 64), "disjoint", False, True),
    KeyRangeCase(Case("shared", "the same everywhere", 3, 6, 2, 65, 97, 64, softcap=3.0), "disjoint", False, False),
    KeyRangeCase(
        Case("window", "ranges within a band", 2, 2, 2, 200, 200, 64, window_size=(50, 20), alibi="batch"), "single"
    ),
    KeyRangeCase(Case("hostile", "INT_MIN, INT_MAX, begin > end", 2, 4, 2, 150, 170, 64), "hostile", per_head=True),
    KeyRangeCase(
        Case("hostile_window", "the same, with a window", 2, 2, 2, 170, 150, 64, window_size=(60, 9), softcap=8.0),
        "hostile",
    ),
    KeyRangeCase(Case("all", "the ranges hide nothing", 1, 2, 2, 130, 140, 64, True), "all"),
    KeyRangeCase(Case("decode", "one query in each head", 3, 8, 2, 1, 513, 128, True), "disjoint", per_head=True),
    KeyRangeCase(Case("decode_far_apart", "one query, a wide gap", 2, 4, 1, 1, 1100, 64), "far_apart", sinks=True),
    KeyRangeCase(Case("few_queries", "less than one tile", 2, 4, 4, 5, 300, 64), "empty", per_head=True),
    KeyRangeCase(Case("few_keys", "seqlen_q > seqlen_k", 2, 2, 2, 150, 5, 64), "single"),
    KeyRangeCase(Case("no_keys", "seqlen_k = 0", 2, 2, 2, 33, 0, 64), "hostile"),
    KeyRangeCase(Case("headdim_33", "a padded head dim", 1, 4, 2, 90, 110, 33, True), "shared_prefix", sinks=True),
    KeyRangeCase(Case("headdim_256", "the largest head dim", 1, 2, 1, 130, 200, 256), "disjoint"),
    KeyRangeCase(Case("layout", "strided inputs", 2, 4, 2, 77, 77, 64, layout="packed"), "global_and_window"),
    KeyRangeCase(VarlenCase("varlen", "ranges count within each sequence", *_LENGTHS, nheads=4), "disjoint"),
    KeyRangeCase(
        VarlenCase("varlen_causal", "documents in each sequence", *_LENGTHS, nheads=4, causal=True, dropout_p=0.15),
        "documents",
        per_head=True,
    ),
    KeyRangeCase(
        VarlenCase(
            "varlen_features",
            "window, softcap, ALiBi, a sink",
            *_LENGTHS,
            nheads=4,
            window_size=(60, 9),
            softcap=4.0,
            alibi="batch",
        ),
        "shared_prefix",
        sinks=True,
    ),
    KeyRangeCase(
        VarlenCase("varlen_hostile", "far outside of each sequence", *_LENGTHS, nheads=4), "hostile", per_head=True
    ),
    KeyRangeCase(
        VarlenCase("varlen_decode", "one query per sequence", (1,) * 5, (3, 257, 64, 0, 130), nheads=4), "empty"
    ),
    KeyRangeCase(VarlenCase("varlen_padding", "rows that see nothing", (70, 0, 129), (70, 5, 129)), "left_padding"),
    KeyRangeCase(VarlenCase("varlen_all_empty", "no tokens at all", (0, 0, 0), (0, 0, 0)), "single"),
]


def _scores(case: KeyRangeCase) -> int:
    """Pairs of a query and a key, in all heads."""
    of = case.of
    if isinstance(of, VarlenCase):
        return of.nheads * sum(a * b for a, b in zip(of.lengths_q, of.lengths_k, strict=True))
    return of.batch * of.nheads * of.seqlen_q * of.seqlen_k


# Small enough for slow instruction sets and for Triton's interpreter.
SMALL_KEY_RANGE_CASES = [case for case in KEY_RANGE_CASES if _scores(case) <= 100_000 and case.of.headdim < 100]
