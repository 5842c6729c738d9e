"""Enumerates the blocks of (queries of one rank) x (keys of another), and computes the kernels' windows for them.

Between a run of queries and a run of keys, the mask depends only on the distance D = query position - key position: a
query sees a key where -right <= D <= left. The kernels know their own distance, aligned at the bottom right,
x = i + k_rows - q_rows - j = D - E, with E = (end of the queries) - (end of the keys). So a block takes the window
(left - E, right + E). Both are at least 0 once the rows that see nothing are cut off. docs/context_parallel.md derives
this, and the blocks of ALiBi.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ..options import Sequences
from .shards import Run, Shards, kept

FAR = 1 << 62  # more than any distance: unbounded
Interval = tuple[int, int]  # first row (or head), number of rows


class Mask(NamedTuple):
    """Mask parameters used to enumerate blocks.

    Attributes:
        left: The largest distance D that is visible, FAR for all.
        right: The largest -D that is visible, FAR for all.
        alibi: Whether ALiBi is on.
    """

    left: int
    right: int
    alibi: bool


class Rectangle(NamedTuple):
    """Rows of queries and rows of keys of one document. The kernel's window says which pairs are visible.

    ALiBi adds -slope |D|, the kernel -(sign x slope) |x|. The two differ by -slope x offset, a constant in the block.
    """

    document: int
    q_row: int
    q_rows: int
    k_row: int
    k_rows: int
    left: int  # of the kernel, -1 for unbounded
    right: int
    sign: int = 1
    offset: int = 0

    @property
    def kind(self) -> tuple[int, ...]:
        """Rectangles of one kind can be sequences of one call."""
        return self.left, self.right, self.sign, self.offset

    @property
    def pairs(self) -> int:
        """The visible pairs of a query and a key."""
        n, m = self.q_rows, self.k_rows

        def keys_up_to(last: int) -> int:
            """The sum over queries i of the number of keys up to key i + last."""
            return _sum_of_clamped(last + n, m) - _sum_of_clamped(last, m)

        seen = n * m if self.right < 0 else keys_up_to(m - n + self.right)
        return seen - (0 if self.left < 0 else keys_up_to(m - n - self.left - 1))


def _sum_of_clamped(last: int, most: int) -> int:
    """The sum of min(x, most) over all x from 1 to last."""
    rising = max(min(last, most), 0)
    return rising * (rising + 1) // 2 + max(last - most, 0) * most


@dataclass
class Call:
    """One call of the kernels: rectangles of one kind, whose rows ascend and do not overlap.

    Of tensors with a batch dimension, the rectangles have equal sizes and no rows between them: together with the batch
    they are sequences of equal length.
    """

    rectangles: list[Rectangle]
    _sequences: dict[torch.device, tuple[Sequences, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def q(self) -> Interval:
        """The rows from the first query to the last."""
        first, last = self.rectangles[0], self.rectangles[-1]
        return first.q_row, last.q_row + last.q_rows - first.q_row

    @cached_property
    def k(self) -> Interval:
        """The rows from the first key to the last."""
        first, last = self.rectangles[0], self.rectangles[-1]
        return first.k_row, last.k_row + last.k_rows - first.k_row

    @cached_property
    def pairs(self) -> int:
        """The visible pairs of a query and a key."""
        return sum(rectangle.pairs for rectangle in self.rectangles)

    def accepts(self, other: Rectangle, is_packed: bool) -> bool:
        """Whether a rectangle can be the next sequence of this call."""
        last = self.rectangles[-1]
        q_end, k_end = last.q_row + last.q_rows, last.k_row + last.k_rows
        if other.kind != last.kind or other.q_row < q_end or other.k_row < k_end:
            return False
        sizes = (other.q_row, other.q_rows, other.k_row, other.k_rows)
        return is_packed or sizes == (q_end, last.q_rows, k_end, last.k_rows)

    def sequences(self, device: torch.device) -> tuple[Sequences, torch.Tensor]:
        """The rectangles as sequences of a varlen call on the rows `q` and `k`, and the document of each sequence.

        Rows between two rectangles become a sequence of queries without keys, and one of keys without queries: the
        kernels give them results that change nothing.
        """
        return kept(self._sequences, device, lambda: self._build_sequences(device))

    def _build_sequences(self, device: torch.device) -> tuple[Sequences, torch.Tensor]:
        lengths_q, lengths_k, documents = [], [], []
        q_end, k_end = self.rectangles[0].q_row, self.rectangles[0].k_row
        for rectangle in self.rectangles:
            gaps = ((rectangle.q_row - q_end, 0), (0, rectangle.k_row - k_end))
            for q_rows, k_rows in (*gaps, (rectangle.q_rows, rectangle.k_rows)):
                if q_rows > 0 or k_rows > 0:
                    lengths_q.append(q_rows)
                    lengths_k.append(k_rows)
                    documents.append(rectangle.document)
            q_end, k_end = rectangle.q_row + rectangle.q_rows, rectangle.k_row + rectangle.k_rows
        lengths = torch.tensor([[0, *lengths_q], [0, *lengths_k]], device="cpu")
        cu_seqlens = lengths.cumsum(1).to(torch.int32).to(device)
        sequences = Sequences(cu_seqlens[0], cu_seqlens[1], max(lengths_q), max(lengths_k))
        return sequences, torch.tensor(documents, device="cpu").to(device)


class Block(NamedTuple):
    """The work of one rank's queries on another rank's keys.

    Attributes:
        keys: The rows of the keys' owner that are needed; they travel one after the other.
        calls: The calls, whose key rows count in what has travelled.
    """

    keys: list[Interval]
    calls: list[Call]

    @property
    def rows(self) -> int:
        """The number of keys that travel."""
        return sum(rows for _, rows in self.keys)


class Step(NamedTuple):
    """One step of the ring: the keys of ``source`` arrive and are used, while local keys go to ``target``."""

    number: int
    source: int
    target: int
    arriving: Block
    leaving: Block  # the target's work on this rank's keys


class Plan(NamedTuple):
    """A rank's work.

    Attributes:
        own: The work on the local keys.
        steps: The steps of the ring, the same numbers on every rank.
    """

    own: list[Call]
    steps: list[Step]


def plan(shards: Shards, mask: Mask, is_packed: bool) -> Plan:
    """The ring of this rank. Computed once for shards and mask."""
    key = ("ring", mask, is_packed)
    if key not in shards.plans:
        rank, size = shards.rank, shards.size
        steps = []
        for number in steps_of_all_ranks(shards, mask):
            source, target = (rank - number) % size, (rank + number) % size
            arriving = block(shards, rank, source, mask, is_packed)
            leaving = block(shards, target, rank, mask, is_packed)
            steps.append(Step(number, source, target, arriving, leaving))
        own = block(shards, rank, rank, mask, is_packed).calls
        shards.plans[key] = Plan(own, steps)
    result: Plan = shards.plans[key]
    return result


def steps_of_all_ranks(shards: Shards, mask: Mask) -> list[int]:
    """The steps in which keys travel between any two ranks. Computed once for shards and mask."""
    key = ("steps", mask)
    if key not in shards.plans:
        shards.plans[key] = _steps_of_all_ranks(shards, mask)
    result: list[int] = shards.plans[key]
    return result


def _steps_of_all_ranks(shards: Shards, mask: Mask) -> list[int]:
    """The steps in which keys travel between any two ranks.

    Every rank takes all of them, also those in which it neither sends nor receives: messages of different steps start
    in one order on all ranks, because messages in different orders would deadlock.
    """
    of_document: dict[int, list[tuple[int, int, int]]] = {}
    for owner, runs in enumerate(shards.runs):
        for run in runs:
            of_document.setdefault(run.document, []).append((run.start, run.stop, owner))
    steps: set[int] = set()
    for runs_of_document in of_document.values():
        runs_of_document.sort()
        for i, (_, stop, owner) in enumerate(runs_of_document):
            for start, _, later_owner in runs_of_document[i + 1 :]:
                distance = start - (stop - 1)  # the smallest between the two runs
                if distance > max(mask.left, mask.right) or len(steps) == shards.size - 1:
                    break
                if distance <= mask.left and owner != later_owner:
                    steps.add((later_owner - owner) % shards.size)
                if distance <= mask.right and owner != later_owner:
                    steps.add((owner - later_owner) % shards.size)
    return sorted(steps)


def plan_of_gathered(shards: Shards, mask: Mask, is_packed: bool) -> list[Call]:
    """The calls of this rank's queries on the keys of all ranks in global order."""
    key = ("gathered", mask, is_packed)
    if key not in shards.plans:
        lengths = [stop - start for start, stop in pairwise(shards.starts)]
        documents = [Run(i, 0, length, shards.starts[i]) for i, length in enumerate(lengths)]
        found = _rectangles(shards.runs[shards.rank], documents, mask)
        shards.plans[key] = _calls(_joined(found), is_packed)
    result: list[Call] = shards.plans[key]
    return result


class TravellingKeys(NamedTuple):
    """Keys that a rank receives in the ring: the mean, taken from the two middle ranks, and the maximum."""

    mean: int
    most: int


def travelling_keys(shards: Shards, mask: Mask) -> TravellingKeys:
    """Computed once for shards and mask. The maximum is over the first, the last and the middle ranks."""
    key = ("travelling", mask)
    if key not in shards.plans:
        size = shards.size

        def received(rank: int) -> int:
            return sum(block(shards, rank, source, mask, True).rows for source in range(size) if source != rank)

        middle = [received(rank) for rank in ((size - 1) // 2, size // 2)]
        shards.plans[key] = TravellingKeys(sum(middle) // 2, max(*middle, received(0), received(size - 1)))
    result: TravellingKeys = shards.plans[key]
    return result


def pairs_of_a_rank(shards: Shards, mask: Mask) -> float:
    """The visible pairs of a query and a key, over the number of ranks."""
    key = ("pairs", mask)
    if key not in shards.plans:
        left, right = (-1 if x == FAR else x for x in (mask.left, mask.right))
        lengths = [stop - start for start, stop in pairwise(shards.starts)]
        whole = [Rectangle(i, 0, length, 0, length, left, right) for i, length in enumerate(lengths)]
        shards.plans[key] = sum(document.pairs for document in whole) / shards.size
    result: float = shards.plans[key]
    return result


def block(shards: Shards, rank: int, source: int, mask: Mask, is_packed: bool) -> Block:
    """The work of the queries of ``rank`` on the keys of ``source``, which stay where they are if it is its own."""
    runs = shards.runs[rank]
    if rank == source and mask.left == FAR and mask.right == 0 and not mask.alibi:
        # Causal, local keys: the runs of a document, one after the other, are one causal sequence.
        return Block([], _calls(list(_whole_documents(runs)), is_packed))
    found = list(_rectangles(runs, shards.runs[source], mask))
    if rank == source:
        return Block([], _calls(_joined(found), is_packed))
    keys = union([(rectangle.k_row, rectangle.k_rows) for rectangle in found])
    return Block(keys, _calls(_joined(_renumbered(found, keys)), is_packed))


def _whole_documents(runs: list[Run]) -> Iterator[Rectangle]:
    rows: dict[int, Interval] = {}
    for run in runs:
        row, count = rows.get(run.document, (run.row, 0))
        rows[run.document] = row, count + run.stop - run.start
    for document, (row, count) in rows.items():
        yield Rectangle(document, row, count, row, count, -1, 0)


def _rectangles(queries: list[Run], keys: list[Run], mask: Mask) -> Iterator[Rectangle]:
    """The rectangles of all pairs of runs that see each other, in ascending rows of queries."""
    of_document: dict[int, list[Run]] = {}
    for run in keys:
        of_document.setdefault(run.document, []).append(run)
    for q in queries:
        for k in of_document.get(q.document, ()):
            yield from _of_pair(q, k, mask)


def _of_pair(q: Run, k: Run, mask: Mask) -> Iterator[Rectangle]:
    low, high = -mask.right, mask.left  # of the distance D
    found = _cut(q, k, low, high)
    if found is None:
        return
    end = found.offset
    if not mask.alibi or end == 0:
        yield found._replace(offset=0)
        return
    # |D| and |x| are linear where neither D nor x = D - E changes its sign: cut the distances at 0 and at E.
    cuts = [low, *sorted((0, end)), high + 1]
    for first, after in pairwise(cuts):
        first, last = max(first, low), min(after - 1, high)
        part = _cut(q, k, first, last) if first <= last else None
        if part is not None:
            is_before = first >= 0  # the keys are before the queries: D >= 0
            end = part.offset
            nearest = max(first, (q.start + part.q_row - q.row) - (k.start + part.k_row - k.row + part.k_rows - 1))
            is_below = nearest >= end  # x >= 0
            yield part._replace(sign=1 if is_before == is_below else -1, offset=end if is_before else -end)


def _cut(q: Run, k: Run, low: int, high: int) -> Rectangle | None:
    """The rows that see each other at distances ``low`` to ``high``. The offset is E, the difference of the ends."""
    q_stop = min(q.stop, k.stop + high)
    k_stop = min(k.stop, q_stop - low)
    q_start = max(q.start, k.start + low)
    k_start = max(k.start, q_start - high)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    end = q_stop - k_stop
    left = high - end if q_stop - 1 - k_start > high else -1
    right = end - low if q_start - (k_stop - 1) < low else -1
    return Rectangle(
        q.document,
        q.row + q_start - q.start,
        q_stop - q_start,
        k.row + k_start - k.start,
        k_stop - k_start,
        left,
        right,
        offset=end,
    )


def union(intervals: list[Interval]) -> list[Interval]:
    """The rows of all intervals, in ascending order, each once."""
    united: list[Interval] = []
    for row, rows in sorted(intervals):
        if united and row <= united[-1][0] + united[-1][1]:
            first, count = united[-1]
            united[-1] = first, max(count, row + rows - first)
        else:
            united.append((row, rows))
    return united


def _renumbered(rectangles: list[Rectangle], keys: list[Interval]) -> Iterator[Rectangle]:
    """The rectangles with the rows of keys counted in what travels."""
    firsts = [row for row, _ in keys]
    places = list(accumulate((rows for _, rows in keys), initial=0))
    for rectangle in rectangles:
        interval = bisect_right(firsts, rectangle.k_row) - 1
        yield rectangle._replace(k_row=places[interval] + rectangle.k_row - firsts[interval])


def _joined(rectangles: Iterator[Rectangle] | list[Rectangle]) -> list[Rectangle]:
    """Joins adjacent unmasked rectangles of one document, along the keys and then along the queries."""
    joined: list[Rectangle] = []
    for part in rectangles:
        last = joined[-1] if joined else part
        if (
            joined
            and _shows_all(last, part)
            and (last.q_row, last.q_rows) == (part.q_row, part.q_rows)
            and last.k_row + last.k_rows == part.k_row
        ):
            joined[-1] = last._replace(k_rows=last.k_rows + part.k_rows)
        else:
            joined.append(part)
    result: list[Rectangle] = []
    latest: dict[tuple[int, ...], int] = {}  # the last rectangle on the same keys
    for part in joined:
        keys = (part.document, part.k_row, part.k_rows)
        above = result[latest[keys]] if keys in latest else None
        if above is not None and _shows_all(above, part) and above.q_row + above.q_rows == part.q_row:
            result[latest[keys]] = above._replace(q_rows=above.q_rows + part.q_rows)
        else:
            latest[keys] = len(result)
            result.append(part)
    return result


def _shows_all(a: Rectangle, b: Rectangle) -> bool:
    return a.document == b.document and a.kind == b.kind == (-1, -1, 1, 0)


def _calls(rectangles: list[Rectangle], is_packed: bool) -> list[Call]:
    """As few calls as a first fit gives."""
    calls: list[Call] = []
    for rectangle in rectangles:
        fitting = next((call for call in calls if call.accepts(rectangle, is_packed)), None)
        if fitting is None:
            calls.append(Call([rectangle]))
        else:
            fitting.rectangles.append(rectangle)
    return calls
