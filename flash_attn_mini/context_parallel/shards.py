"""Shards: which rank owns which tokens of a global tensor. The host computes this from lengths.

Every rank computes the runs of all ranks, so no rank has to ask another what it owns.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ..argument_checks import as_integer, wrong_type
from ..transforms import may_keep_tensors
from . import checks, transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | None

MOST_WORK = 1.01  # of the rank with the most work, relative to the mean; above it one more document is cut
MOST_TOKENS = 1.02  # of the rank with the most tokens, relative to the mean
MERGE = "Shards.merge"  # its name in messages
T = TypeVar("T")


def kept(cache: dict[Any, Any], key: Any, build: Callable[[], T]) -> T:
    """``cache[key]``, from the first call of ``build``: tensors that depend only on lengths.

    Every later call can use them, because they are not inference tensors. Those of a dispatch mode (FakeTensorMode) or
    of a transform of torch.func are neither kept nor mixed with kept ones. A compiled function reads kept ones and
    keeps none: its results may lie in the memory of a CUDA graph, which the next replay writes.
    """
    if torch.compiler.is_dynamo_compiling():
        return cache[key] if key in cache else build()
    if not may_keep_tensors():
        return build()
    if key not in cache:
        with torch.inference_mode(False):
            cache[key] = build()
    result: T = cache[key]
    return result


class Run(NamedTuple):
    """Consecutive tokens of one document on one rank: positions start to stop - 1, in local rows from ``row`` on."""

    document: int
    start: int
    stop: int
    row: int


class Shards:
    """Which rank of a group owns which tokens. Made by `zigzag_shards` and `packed_shards`, once per step or more.

    Attributes:
        group: The ProcessGroup.
        rank: This process's rank in the group.
        size: The number of ranks in the group.
        starts: The first global row of each document, and the end of the last.
        runs: The runs of every rank, in ascending local rows.
        tokens: The number of local rows of every rank.
        plans: What `blocks.plan` has computed for these shards.
    """

    def __init__(self, group: Group, starts: list[int], pieces: list[list[tuple[int, int, int]]]) -> None:
        """``pieces``: of every rank, (document, start, stop) in ascending order."""
        self.group = transport.as_process_group(group)
        self.rank = transport.rank_in(self.group)
        self.size = len(pieces)
        self.starts = starts
        self.runs = [_as_runs(owned) for owned in pieces]
        self.tokens = [sum(run.stop - run.start for run in runs) for runs in self.runs]
        self.plans: dict[Any, Any] = {}
        self._index: dict[Any, torch.Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"Shards(documents={len(self.starts) - 1}, tokens={self.starts[-1]}, rank={self.rank}, size={self.size}, "
            f"tokens_local={self.tokens[self.rank]})"
        )

    @property
    def description(self) -> str:
        """A description that must be equal on every rank."""
        return str((self.starts, self.runs))

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[tokens_local]`` on the CPU: the row of each local token in the global tensor."""
        return self._rows(self.rank)

    @property
    def positions_in_document(self) -> torch.Tensor:
        """int64 ``[tokens_local]`` on the CPU: each local token's position in its document, for position embeddings."""
        return _ranges([(run.start, run.stop) for run in self.runs[self.rank]])

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The local rows of a global tensor: a differentiable copy.

        Args:
            x: A tensor that has every token in dimension ``dim``, the same on every rank.
            dim: The dimension of the tokens.

        Raises:
            ValueError: If ``x`` has another number of tokens.
        """
        dim = self._checked_dim(x, dim, self.starts[-1], "the tokens of all ranks")
        return x.index_select(dim, self._on("local", x.device))

    def merge(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The global tensor, on every rank, from the local rows of all ranks. A collective call.

        Differentiable: the gradient of the local rows is the sum of the gradients that the ranks give to those rows, as
        of any all-gather. Ranks that all compute the same loss from a merged tensor thus get ``size`` times its
        gradient. The gradient is exact for complex tensors too. There is no second derivative.

        Args:
            x: The local rows, in dimension ``dim``; the same dtype and the same other dimensions on every rank.
            dim: The dimension of the tokens.

        Raises:
            ValueError: If ``x`` has another number of tokens; with FLASH_ATTN_MINI_CHECK=1 on every rank if the ranks'
                dtypes, shapes or shards differ.
            NotImplementedError: Under torch.func (grad, vmap, jvp and others), and for a second derivative.
        """
        run = torch.compiler.disable(self._merge) if torch.compiler.is_compiling() else self._merge
        merged: torch.Tensor = run(x, dim)
        return merged

    def _merge(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        with checks.shared_errors(MERGE, self.group):
            checks.refuse_transforms(MERGE, x)
            dim = self._checked_dim(x, dim, self.tokens[self.rank], "the tokens of this rank")
            transport.check_backend(self.group, x.device)
        if checks.compares_ranks():
            shape = [*x.shape[:dim], "tokens", *x.shape[dim + 1 :]]
            description = {
                "shape of x": str(shape),
                "dtype": str(x.dtype),
                "device": x.device.type,
                "gradient of x": "needed" if torch.is_grad_enabled() and x.requires_grad else "not needed",
                "shards": self.description,
            }
            checks.compare_ranks(MERGE, self.group, description)
        merged: torch.Tensor = _Merge.apply(self, x.movedim(dim, 0))
        return merged.movedim(0, dim)

    def to_global(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the ranks, ``[tokens of all ranks, ...]``, in global order."""
        return x.index_select(0, self._on("to_global", x.device))

    def to_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in global order in the order of the ranks."""
        return x.index_select(0, self._on("to_ranks", x.device))

    def _checked_dim(self, x: Any, dim: int, rows: int, whose: str) -> int:
        if not isinstance(x, torch.Tensor):
            raise wrong_type("x", x, "a torch.Tensor")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"flash_attn_mini: dim is {dim}; allowed: a dimension of x, which has {x.ndim}")
        if x.shape[dim] != rows:
            raise ValueError(
                f"flash_attn_mini: x has {x.shape[dim]} rows in dimension {dim}; allowed: {rows}, {whose} ({self!r})"
            )
        return dim % x.ndim

    def _rows(self, rank: int) -> torch.Tensor:
        runs = self.runs[rank]
        return _ranges([(self.starts[run.document] + run.start, self.starts[run.document] + run.stop) for run in runs])

    def _on(self, name: str, device: torch.device) -> torch.Tensor:
        """An index on a device. The copy to the device happens once."""
        return kept(self._index, (name, device), lambda: self._index_of(name).to(device))

    def _index_of(self, name: str) -> torch.Tensor:
        if name == "local":
            return self.positions
        index = torch.cat([self._rows(rank) for rank in range(self.size)])
        if name == "to_global":
            index = torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device="cpu"))
        return index


def _ranges(bounds: list[tuple[int, int]]) -> torch.Tensor:
    """int64 on the CPU, for any default device: start to stop - 1 of each pair, one after the other."""
    ranges = [torch.arange(start, stop, device="cpu") for start, stop in bounds]
    return torch.cat(ranges) if ranges else torch.arange(0, device="cpu")


class _Merge(torch.autograd.Function):
    """`Shards.merge` with the tokens in dimension 0."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, x: torch.Tensor) -> torch.Tensor:
        ctx.shards = shards
        x = x.resolve_conj().resolve_neg().contiguous()
        gathered = transport.all_gather_rows(x, shards.tokens, shards.group, f"{MERGE}, forward")
        return shards.to_global(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        checks.refuse_second_derivative(MERGE)
        checks.refuse_transforms(f"the backward of {MERGE}", gradient)
        shards: Shards = ctx.shards
        by_rank = shards.to_ranks(gradient.resolve_conj().resolve_neg())
        summed = transport.sum_of_rows(by_rank, shards.tokens, shards.group, f"{MERGE}, backward")
        return None, summed.to(gradient.dtype)


def zigzag_shards(seqlen: int, group: Group) -> Shards:
    """One sequence cut into 2 W chunks for the W ranks of a group: rank r owns chunks r and 2 W - 1 - r.

    Under a causal mask, or a window of any kind, every rank then has the same work. Chunks differ by one token at most
    where 2 W does not divide ``seqlen``; nothing is padded.

    Args:
        seqlen: Tokens of the sequence, at least 0.
        group: A torch.distributed ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.

    Raises:
        TypeError: For an argument of a wrong type.
        ValueError: For a negative seqlen, a mesh of more dimensions, or a group that this process does not belong to.
        RuntimeError: If torch.distributed is not initialised.

    Example:
        >>> import torch.distributed as dist
        >>> from flash_attn_mini import zigzag_shards
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> zigzag_shards(6, dist.group.WORLD).positions
        tensor([0, 1, 2, 3, 4, 5])
        >>> dist.destroy_process_group()
    """
    seqlen = as_integer("seqlen", seqlen, "an integer of at least 0")
    if seqlen < 0:
        raise ValueError(f"flash_attn_mini: seqlen is {seqlen}; allowed: at least 0")
    process_group = transport.as_process_group(group)
    size = transport.size_of(process_group)
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    _deal_zigzag(0, seqlen, 0, pieces)
    return Shards(process_group, [0, seqlen], pieces)


def packed_shards(cu_seqlens: torch.Tensor | Iterable[int], group: Group) -> Shards:
    """Packed documents for the ranks of a group, so that tokens and causal work are even.

    The longest documents are cut as `zigzag_shards` cuts its sequence; the others stay whole, so that their keys need
    not travel. As few documents as possible are cut: as many as bring the work to within 1 % and the tokens to within
    2 % of the mean.

    Args:
        cu_seqlens: ``[documents + 1]``, the first row of each document in the packed tensor, from 0, and the end of the
            last: integers, or an integer tensor (reading one from a GPU waits for it).
        group: As in `zigzag_shards`.

    Raises:
        TypeError: For an argument of a wrong type.
        ValueError: For cu_seqlens that do not begin at 0 or that fall.
        RuntimeError: If torch.distributed is not initialised.
    """
    starts = _as_starts(cu_seqlens)
    process_group = transport.as_process_group(group)
    size = transport.size_of(process_group)
    lengths = [stop - start for start, stop in pairwise(starts)]
    longest_first = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    whole: dict[int, int] = {}
    for cut in _numbers_to_try(len(lengths) if size > 1 else 0):
        whole = _place_whole(lengths, longest_first, cut, size)
        if _is_even(lengths, whole, size):
            break
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    cut_so_far = 0
    for document, length in enumerate(lengths):
        if document in whole:
            if length > 0:
                pieces[whole[document]].append((document, 0, length))
        else:
            _deal_zigzag(document, length, cut_so_far, pieces)
            cut_so_far += 1
    return Shards(process_group, starts, pieces)


def _as_starts(cu_seqlens: Any) -> list[int]:
    allowed = "a one-dimensional integer tensor, or integers"
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
            shown = f"a tensor of {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)}"
            raise TypeError(f"flash_attn_mini: cu_seqlens is {shown}; allowed: {allowed}")
        values: list[Any] = cu_seqlens.tolist()
    else:
        try:
            values = list(cu_seqlens)
        except TypeError:
            raise wrong_type("cu_seqlens", cu_seqlens, allowed) from None
    starts = [int(as_integer(f"cu_seqlens[{i}]", value, "an integer")) for i, value in enumerate(values)]
    if not starts or starts[0] != 0:
        raise ValueError(f"flash_attn_mini: cu_seqlens starts with {starts[:1]}; allowed: 0")
    for i, (start, stop) in enumerate(pairwise(starts)):
        if stop < start:
            raise ValueError(
                f"flash_attn_mini: cu_seqlens falls from {start} to {stop} at index {i + 1}; allowed: values that "
                "never fall"
            )
    return starts


def _deal_zigzag(document: int, length: int, turn: int, pieces: list[list[tuple[int, int, int]]]) -> None:
    """Give chunks r and 2 W - 1 - r of a document to rank (r + turn) mod W; ``turn`` spreads the odd tokens."""
    size = len(pieces)
    bounds = [i * length // (2 * size) for i in range(2 * size + 1)]
    for chunk, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            pieces[(min(chunk, 2 * size - 1 - chunk) + turn) % size].append((document, start, stop))


def _numbers_to_try(documents: int) -> Iterable[int]:
    """How many documents to cut: every number up to 32, then in larger steps, then all."""
    number = 0
    while number < documents:
        yield number
        number += 1 + number // 32
    yield documents


def _place_whole(lengths: list[int], longest_first: list[int], cut: int, size: int) -> dict[int, int]:
    """The rank of every document but the ``cut`` longest: each, the longest first, to the rank with the least load."""
    total_tokens = max(sum(lengths), 1)
    total_work = max(sum(_causal_pairs(length) for length in lengths), 1)
    loads = [(0.0, rank) for rank in range(size)]
    whole = {}
    for document in longest_first[cut:]:
        load, rank = loads[0]
        whole[document] = rank
        added = lengths[document] / total_tokens + _causal_pairs(lengths[document]) / total_work
        heapq.heapreplace(loads, (load + added, rank))
    return whole


def _is_even(lengths: list[int], whole: dict[int, int], size: int) -> bool:
    """True if work and tokens are even with these whole documents. The cut documents are even by construction."""

    def is_even(weights: list[int], most: float) -> bool:
        loads = [0] * size
        for document, rank in whole.items():
            loads[rank] += weights[document]
        mean = sum(weights) / size
        return max(loads) - sum(loads) / size <= (most - 1.0) * mean

    return is_even([_causal_pairs(length) for length in lengths], MOST_WORK) and is_even(lengths, MOST_TOKENS)


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def _as_runs(pieces: list[tuple[int, int, int]]) -> list[Run]:
    """The runs of one rank, with neighbouring pieces of a document joined."""
    runs: list[Run] = []
    row = 0
    for document, start, stop in pieces:
        if runs and runs[-1].document == document and runs[-1].stop == start:
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(Run(document, start, stop, row))
        row += stop - start
    return runs
