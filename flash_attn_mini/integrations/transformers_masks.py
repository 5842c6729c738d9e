"""Translates a transformers mask for the kernels: the tokens that take part, and the keys that each query sees.

transformers describes a mask by a function of (batch, head, query, key) and a padding mask. `seen_of` recognises the
functions that stand for an interval of keys around each query, or for chunks. `layout_of` finds the tokens. Both run
once per forward, for all layers, and form no seqlen_q x seqlen_k tensor. `ranged_layout_of` and `layout_of_drawn` make
the option key_ranges for other masks, or attn_bias if a query sees more than two runs of keys.

While torch.compile traces, no value is known. Tensors then have sizes for every value (`_sorted_layout`, `_packed`),
and PyTorch before 2.14 cannot look into a mask function: `traced_mask` guesses, and the program checks the guess.

In generation a layer gets all keys of transformers' cache, old and new. A static cache also has an unused end. Its
length is a tensor: one query for each row takes it to the kernel without waiting for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import documents, intersection, runs_of
from ..reference import in_key_ranges
from .transformers_op import checked, sequences_of

# Functions of transformers that make the parts of a mask for packed rows.
PACKED = "packed_sequence_mask_function"
POSITIONS_IN_SEGMENT = "remap_positions_for_packed_sequence"

CLOSURES_ARE_TRACED = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 14)


def unsupported(feature: str) -> str:
    """The message of an error for a feature that the kernels lack."""
    return f"flash_attn_mini in transformers does not support {feature}. attn_implementation='sdpa' does."


UNKNOWN_PATTERN = (
    "neither causal nor full, nor one whose pattern is known (padding, packed sequences, a sliding window)"
)
UNKNOWN_MASK = unsupported(f"this model's mask: {UNKNOWN_PATTERN}")
HOLES_UNDER_A_WINDOW = unsupported("a padding mask with holes in a layer with a sliding window")
MORE_RUNS = "a query sees more than two runs of neighbouring keys"
AVERAGE = unsupported("a query whose keys are all hidden by finite numbers; its output is an average")


@dataclass(frozen=True)
class Seen:
    """A query at position p sees the keys p - left .. p + right of its own segment and chunk; -1 for unbounded."""

    left: int = -1
    right: int = -1
    segments: Tensor | None = None  # [batch, seqlen], a rising number for each sequence of a row; None for one sequence
    chunk: int = 0  # the number of tokens of a chunk; 0 for no chunks
    chunks_begin: Tensor | None = None  # [batch], the position at which a chunk of each row begins; None without chunks

    def __and__(self, other: Seen) -> Seen:
        """At most one of the two has chunks."""
        segments = self.segments if other.segments is None else other.segments
        chunks = (other.chunk, other.chunks_begin) if other.chunk else (self.chunk, self.chunks_begin)
        return Seen(tighter(self.left, other.left), tighter(self.right, other.right), segments, *chunks)


class Mask(NamedTuple):
    """A mask of transformers.

    Attributes:
        seen: The keys that a query sees, by position.
        batch: The number of rows.
        q_length: The number of queries, at positions q_offset, ...
        kv_length: The number of keys, at positions kv_offset, ...
        q_offset: The position of the first query. A tensor is the length of a static cache.
        kv_offset: The position of the first key.
        padding: ``[batch, n]`` by position, False for padding. Positions from n on are padding. None for no padding.
    """

    seen: Seen
    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    padding: Tensor | None

    def to(self, device: torch.device | str) -> Mask:
        """A copy on another device."""
        seen = self.seen
        segments, begin = (x if x is None else x.to(device) for x in (seen.segments, seen.chunks_begin))
        padding = self.padding if self.padding is None else self.padding.to(device)
        return self._replace(seen=replace(seen, segments=segments, chunks_begin=begin), padding=padding)


@dataclass(frozen=True)
class Layout:
    """A mask as arguments of one of the functions of this package, chosen by `lengths` and `is_decoding`.

    With `key_ranges` it is `flash_attn_func`, or `flash_attn_with_kvcache` if `cache_leftpad` and `cache_seqlens` give
    the same range. With `attn_bias` it is `flash_attn_func`.

    transformers passes it to each layer in place of a mask tensor. A layer that uses it as a tensor computes attention
    itself, and never calls this package.
    """

    q_length: int
    kv_length: int
    kv_end: int  # no query sees the keys from here on: the unused end of a static cache
    left: int
    right: int
    lengths: tuple[Tensor, Tensor, int, int] | None = None  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    indices_q: Tensor | None = None  # the queries that take part, among [batch * q_length]; None for all
    indices_k: Tensor | None = None  # the keys that take part, among [batch * kv_end]; None for all
    packed_rows: tuple[Tensor, Tensor] | None = None  # in place of lengths, in a traced program: `sequences_of`
    is_decoding: bool = False  # causal queries behind cached keys: flash_attn_with_kvcache
    cache_seqlens: Tensor | None = None  # int32 [batch], keys of each row; None: kv_end
    cache_leftpad: Tensor | None = None  # int32 [batch], keys of each row before the first that is seen; None: none
    key_ranges: Tensor | None = None  # int32 [1 or batch, 1 or nheads, q_length, 2], or [..., 2, 2]; None: all keys
    attn_bias: Tensor | None = None  # bool or floating [1 or batch, 1 or nheads, 1 or q_length, kv_length]; None: none
    source: Mask | None = None  # what `lengths`, `packed_rows` and `is_decoding` were made from
    made: dict[str, Layout] = field(init=False, repr=False, compare=False, default_factory=dict)  # by `unpacked`

    ndim = 4  # as the mask tensor [batch, 1, seqlen_q, seqlen_k]: transformers reads it

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called by every function of PyTorch that takes it for a tensor."""
        raise NotImplementedError(
            "flash_attn_mini in transformers: this model computes attention in code of its own and takes no attention "
            "implementation; allowed: attn_implementation='eager', or another that its documentation names"
        )

    def __getitem__(self, index: Any) -> NoReturn:
        """Called by a layer that takes a part of the mask."""
        self.__torch_function__(None, ())

    def contiguous(self) -> Layout:
        """Returns itself; generate() calls this on masks for a static cache."""
        return self

    def to(self, device: torch.device | str, **options: Any) -> Layout:
        """A copy on another device, for models that span several devices."""
        names = ("indices_q", "indices_k", "cache_seqlens", "cache_leftpad", "key_ranges", "attn_bias")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: tensor.to(device, **options) for name, tensor in tensors.items() if tensor is not None}
        lengths = self.lengths and (self.lengths[0].to(device), self.lengths[1].to(device), *self.lengths[2:])
        packed_rows = self.packed_rows and (self.packed_rows[0].to(device), self.packed_rows[1])
        source = self.source and self.source.to(device)
        return replace(self, lengths=lengths, packed_rows=packed_rows, source=source, **moved)

    @property
    def device(self) -> torch.device | None:
        """The device of its tensors; None without any."""
        for tensor in (self.cache_seqlens, self.cache_leftpad, self.key_ranges, self.attn_bias):
            if tensor is not None:
                return tensor.device
        lengths = self.lengths or self.packed_rows
        return None if lengths is None else lengths[0].device

    def packed(self, batch: int) -> Layout:
        """The same mask for a function that has dropout and gradients: with `lengths` or key_ranges. May wait."""
        if self.key_ranges is not None:
            return replace(self, is_decoding=False, cache_seqlens=None, cache_leftpad=None)
        kv_end = self.kv_end if self.cache_seqlens is None else int(self.cache_seqlens[0])
        padding = None
        if self.cache_leftpad is not None:
            padding = torch.arange(kv_end, device=self.cache_leftpad.device) >= self.cache_leftpad[:, None]
        mask = Mask(Seen(self.left, 0), batch, self.q_length, kv_end, kv_end - self.q_length, 0, padding)
        layout = layout_of(mask)
        assert layout is not None  # its keys are in a row
        return replace(layout, kv_length=self.kv_length)

    def unpacked(self, device: torch.device) -> Layout:
        """The same mask for `flash_attn_func`: with key_ranges or attn_bias, if it is more than causal or a window.

        Waits for the device once for all layers, if there is padding. Padding of queries is computed.
        """
        has_tensors = any(
            x is not None for x in (self.lengths, self.packed_rows, self.cache_seqlens, self.cache_leftpad)
        )
        if not has_tensors:
            return replace(self, is_decoding=False) if self.is_decoding else self
        if self.key_ranges is not None:
            return replace(self, is_decoding=False, cache_seqlens=None, cache_leftpad=None)
        if "unpacked" in self.made:
            return self.made["unpacked"]
        assert self.source is not None
        layout = ranged_layout_of(self.source, device)
        layout = replace(layout, is_decoding=False, cache_seqlens=None, cache_leftpad=None)
        if not torch.compiler.is_compiling():
            self.made["unpacked"] = layout
        return layout


def tighter(first: int, second: int) -> int:
    """The smaller of two bounds; -1 stands for no bound."""
    return second if first < 0 else first if second < 0 else min(first, second)


def seen_of(mask_function: Callable[..., Any]) -> Seen | None:
    """The interval of keys that a mask function of transformers stands for; None for an unknown function."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return Seen(right=0)
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Seen()
    if torch.compiler.is_compiling() and not CLOSURES_ARE_TRACED:
        return None
    made_by = _maker(mask_function)
    if made_by is None:
        return None
    made_of = _closure(mask_function)
    if made_by == "sliding_window_overlay":
        return Seen(left=made_of["sliding_window"] - 1)
    if made_by == "sliding_window_bidirectional_overlay":
        return Seen(left=made_of["sliding_window"], right=made_of["sliding_window"])
    if made_by == "chunked_overlay" and "left_padding" in made_of:  # not in the first versions
        return Seen(chunk=made_of["chunk_size"], chunks_begin=made_of["left_padding"])
    if made_by == "and_masks":
        return _intersection(made_of["mask_functions"])
    return None


def _maker(function: Callable[..., Any]) -> str | None:
    """The name of the function of transformers that made `function`; None for one that none made."""
    from transformers import masking_utils

    # PyTorch cannot trace the name of a function of a module.
    if function in (masking_utils.causal_mask_function, getattr(masking_utils, "bidirectional_mask_function", None)):
        return None
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    return function.__qualname__.partition(".")[0]


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables of the functions around `function` that it uses, by name."""
    cells: Any = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, [cell.cell_contents for cell in cells], strict=True))


def traced_mask(
    mask_function: Callable[..., Any], mask: Mask, *, causal: bool, window: int | None, device: torch.device | str
) -> Mask | None:
    """`mask` with a guess at `seen_of`, for a program that is traced. The program compares the guess with the mask.

    Without a padding mask, rows may hold several sequences: a query that does not see the key before its own begins
    one. The comparison is one reduction per forward, which a compiler computes without a seqlen_q x seqlen_k tensor.

    Args:
        mask_function: transformers' function of (batch, head, query, key).
        mask: The other parts of the mask.
        causal: Whether a query sees no later key.
        window: The window in the model's configuration, None for none.
        device: The device of the model's inputs.

    Returns:
        None for queries behind cached keys without a padding mask.
    """
    if mask.padding is None and mask.q_length != mask.kv_length:
        return None
    right = 0 if causal else -1 if window is None else window
    left = -1 if window is None else window - 1 if causal else window
    q = torch.arange(mask.q_length, device=device)[:, None] + mask.q_offset
    k = torch.arange(mask.kv_length, device=device) + mask.kv_offset
    batch, head = torch.arange(mask.batch, device=device), torch.arange(1, device=device)
    drawn = mask_function(batch[:, None, None, None], head[None, :, None, None], q[None, None], k[None, None, None])
    drawn = drawn.expand(mask.batch, 1, mask.q_length, mask.kv_length)[:, 0]
    expected = torch.ones_like(drawn)
    if left >= 0:
        expected = expected & (k >= q - left)
    if right >= 0:
        expected = expected & (k <= q + right)
    if mask.padding is not None:
        padding = checked(mask.padding, (drawn == expected).all(), UNKNOWN_MASK)
        return mask._replace(seen=Seen(left, right), padding=padding)
    segments = F.pad((~drawn.diagonal(-1, 1, 2)).cumsum(dim=1), (1, 0))
    expected = expected & (segments[:, :, None] == segments[:, None])
    segments = checked(segments, (drawn == expected).all(), UNKNOWN_MASK)
    return mask._replace(seen=Seen(left, right, segments))


def _intersection(mask_functions: tuple[Callable[..., Any], ...]) -> Seen | None:
    """The intersection.

    For packed rows it holds "same segment" and a mask function of positions in the row or in the segment; their order
    differs between versions of transformers. Within a segment both kinds of position have the same distances, but not
    the same chunks.
    """
    makers = [_maker(function) for function in mask_functions]
    together = Seen()
    for maker, function in zip(makers, mask_functions, strict=True):
        part: Seen | None
        if maker == PACKED:
            part = Seen(segments=_closure(function)["packed_sequence_mask"])
        elif maker == POSITIONS_IN_SEGMENT and PACKED in makers:
            part = seen_of(_closure(function)["mask_function"])
            if part is not None and part.chunk:
                return None
        else:
            part = seen_of(function)
        if part is None or (part.chunk and together.chunk):
            return None
        together = together & part
    return together


def only_hides(mask: Tensor) -> bool:
    """True unless a floating mask has other numbers than 0 and those that hide (see `kept_by`). Waits for the device.

    False too if such numbers are finite and hide all keys of a query, whose output is then an average.
    """
    if not mask.is_floating_point():
        return True
    is_lowest = mask == torch.finfo(mask.dtype).min
    kept = mask == 0
    averages = (is_lowest.any(dim=-1) & ~kept.any(dim=-1)).any()
    return bool((kept | is_lowest | (mask == -torch.inf)).all() & ~averages)


def kept_by(mask: Tensor) -> Tensor:
    """A mask tensor as bool: where the score of a key counts.

    Floating masks are added to the scores. A mask that adds 0 or hides has -inf, or as transformers makes them the
    smallest number of its dtype, where it hides.

    Raises:
        NotImplementedError: For other numbers in a floating mask.
        ValueError: For integers that are not a padding mask ``[batch, n]`` of 0 and 1.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        lowest = torch.finfo(mask.dtype).min
        kept = mask == 0
        known = kept | (mask == lowest) | (mask == -torch.inf)
        error: type[Exception] = NotImplementedError
        lacking, allowed = "other numbers", f"0, -inf and {lowest:.6g} in a {mask.dtype} mask, which is added to scores"
    else:
        if mask.ndim != 2 or mask.is_complex():
            raise ValueError(
                f"flash_attn_mini in transformers: attention_mask is {mask.dtype} of shape {list(mask.shape)}; "
                "allowed: bool or a floating dtype, or a padding mask [batch, n] of integers"
            )
        kept = mask == 1
        known = kept | (mask == 0)
        error = ValueError
        lacking, allowed = "other integers", f"0 and 1 in a {mask.dtype} mask, 1 for the tokens that count"
    message = "flash_attn_mini in transformers: attention_mask holds {}; allowed: " + allowed
    if torch.compiler.is_compiling():
        return checked(kept, known.all(), message.format(lacking))
    if not bool(known.all()):
        raise error(message.format(mask[~known][0].item()))
    return kept


def padding_of(mask: Tensor, batch: int) -> Tensor:
    """A padding mask of any dtype as bool ``[batch, n]``. Raises as `kept_by`, and ValueError for another shape."""
    if mask.shape[0] != batch:
        raise ValueError(
            f"flash_attn_mini in transformers: attention_mask has shape {list(mask.shape)}; allowed: [{batch}, n], a "
            f"row for each of the batch, or [{batch}, 1, seqlen_q, seqlen_k]"
        )
    return kept_by(mask)


def _columns(padding: Tensor, first: int, columns: int) -> Tensor:
    """``padding[:, first : first + columns]`` of a padding mask, which ends in padding."""
    end = first + columns
    if padding.shape[1] < end:
        padding = F.pad(padding, (0, end - padding.shape[1]))
    return padding if (first, end) == (0, padding.shape[1]) else padding[:, first:end]


def without_idle_chunks(mask: Mask) -> Mask:
    """`mask` without chunks if all tokens that are no padding are in the first one. Waits for the device.

    The length of a static cache is not read.
    """
    seen = mask.seen
    end = mask.kv_offset + mask.kv_length
    if seen.chunks_begin is None or end > seen.chunk or isinstance(mask.q_offset, Tensor):
        return mask
    if torch.compiler.is_compiling():
        return mask
    place = torch.arange(end, device=seen.chunks_begin.device)
    is_first = (place - seen.chunks_begin[:, None]) // seen.chunk == 0
    if mask.padding is not None:
        is_first = is_first | ~_columns(mask.padding, 0, end)
    return mask._replace(seen=replace(seen, chunk=0, chunks_begin=None)) if bool(is_first.all()) else mask


def decoding_layout_of(mask: Mask) -> Layout | None:
    """The layout of causal queries behind cached keys; None where there are none, and for padding between the keys.

    Chunks hide the first keys of the cache from one query for each row; for more queries there is no such layout.

    For one query, the values of a tensor q_offset and of the padding stay on a GPU; padding between the keys then ends
    in a device-side assertion.
    """
    seen, batch, q_length, kv_length, q_offset, kv_offset, padding = mask
    waits = q_length > 1 or not isinstance(q_offset, Tensor)
    if seen.right != 0 or seen.segments is not None or (seen.chunk and q_length > 1):
        return None
    kv_end = (int(q_offset) if waits else q_offset) + q_length - kv_offset
    if waits and not q_length < kv_end <= kv_length:
        return None
    leftpad = None
    if padding is not None and waits:
        kept = _columns(padding, kv_offset, int(kv_end))
        if not bool(kept.all()):
            if bool((kept[:, :-1] > kept[:, 1:]).any()):  # padding behind a key
                return None
            leftpad = kv_end - kept.sum(dim=1, dtype=torch.int32)
    elif padding is not None:
        place = torch.arange(kv_length, device=padding.device)
        kept = _columns(padding, kv_offset, kv_length) & (place < kv_end)
        before = ((kept.cumsum(dim=1) == 0) & (place < kv_end)).sum(dim=1)
        in_a_row = (before + kept.sum(dim=1) == kv_end).all()
        if padding.device.type == "cpu":
            if not bool(in_a_row):
                return None
        else:
            torch._assert_async(in_a_row, "a static cache on a GPU allows padding on the left only")
        leftpad = before.to(torch.int32)
    if seen.chunks_begin is not None:
        chunk = q_offset - (q_offset - seen.chunks_begin) % seen.chunk - kv_offset
        chunk = chunk.clamp(min=0).to(torch.int32)
        leftpad = chunk if leftpad is None else torch.maximum(leftpad.to(torch.int32), chunk)
    left, lengths = seen.left, None
    if isinstance(kv_end, Tensor):
        lengths = kv_end.to(torch.int32).expand(batch).contiguous()
        kv_end = kv_length
    elif left >= kv_end - 1:  # the window hides no key
        left = -1
    return Layout(q_length, kv_length, kv_end, left, 0, is_decoding=True, cache_seqlens=lengths, cache_leftpad=leftpad)


def layout_of(mask: Mask) -> Layout | None:
    """The tokens that take part in attention; None where this needs key_ranges, as chunks do.

    Under a causal mask or a window, queries and keys are the same tokens. Padding is dropped from both, and its rows of
    the output become 0. Otherwise the padding mask describes only the keys, and all queries are computed: those of a
    cross-attention are other tokens.
    """
    seen, batch, q_length, kv_length, q_offset, kv_offset, padding = mask
    if seen.chunk:
        return None
    kv_end, q_end = kv_length, int(q_offset) + q_length
    if seen.right == 0:
        kv_end = min(kv_end, q_end - kv_offset)
    aligned = q_end == kv_offset + kv_end  # the kernels place the last query at the last key
    by_position = seen.left >= 0 or seen.right >= 0
    if seen.segments is not None:
        if padding is not None or seen.segments.shape != (batch, q_length) or kv_length != q_length:
            return None
        return _packed(seen, seen.segments)
    keys = None if padding is None else _columns(padding, kv_offset, kv_end)
    if keys is not None and not torch.compiler.is_compiling() and bool(keys.all()):
        keys = None
    if by_position and not aligned:
        return None
    left = -1 if seen.left >= q_end - kv_offset - 1 else seen.left  # the window hides no key
    right = -1 if seen.right >= kv_end - 1 and seen.right > 0 else seen.right
    if keys is None:
        return Layout(q_length, kv_length, kv_end, left, right)

    if left >= 0 or right > 0:  # dropping the tokens of a hole would shorten distances across it
        begins = keys & ~F.pad(keys, (1, 0))[:, :-1]
        in_a_row = (begins.sum(dim=1) <= 1).all()
        if torch.compiler.is_compiling():
            keys = checked(keys, in_a_row, HOLES_UNDER_A_WINDOW)
        elif not bool(in_a_row):
            return None
    queries = keys[:, kv_end - q_length :] if by_position else None
    if torch.compiler.is_compiling():
        return _sorted_layout(queries, keys, q_length, kv_length, left, right)
    if queries is None:
        queries = torch.ones(batch, q_length, dtype=torch.bool, device=keys.device)
    indices_q, cu_seqlens_q, max_seqlen_q = _tokens(queries)
    indices_k, cu_seqlens_k, max_seqlen_k = _tokens(keys)
    return Layout(
        q_length,
        kv_length,
        kv_end,
        left,
        right,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        None if indices_q.shape[0] == queries.numel() else indices_q,
        None if indices_k.shape[0] == keys.numel() else indices_k,
    )


def has_ranges(mask: Mask) -> bool:
    """True if `ranged_layout_of` knows the mask: packed rows have no other keys than those of the queries."""
    segments = mask.seen.segments
    return segments is None or (segments.shape == (mask.batch, mask.q_length) and mask.kv_length == mask.q_length)


def ranged_layout_of(mask: Mask, device: torch.device | str) -> Layout:
    """The layout with key_ranges, on `device`; with attn_bias if a query sees more than two runs of keys."""
    seen, batch, q_length, kv_length, q_offset, kv_offset, padding = mask
    place = torch.arange(q_length, device=device)[None] + q_offset
    begin, end = torch.zeros_like(place), torch.full_like(place, kv_offset + kv_length)
    if seen.left >= 0:
        begin = torch.maximum(begin, place - seen.left)
    if seen.right >= 0:
        end = torch.minimum(end, place + seen.right + 1)
    if seen.chunks_begin is not None:
        chunk = place - (place - seen.chunks_begin[:, None]) % seen.chunk
        begin, end = torch.maximum(begin, chunk), torch.minimum(end, chunk + seen.chunk)
    ranges = (torch.stack((begin, end), dim=-1) - kv_offset).clamp(0, kv_length).to(torch.int32)[:, None]
    if seen.segments is not None:
        ranges = intersection(ranges, documents(segment_ids=seen.segments))
    if padding is not None:
        keys = _columns(padding, kv_offset, kv_length)[:, None, None]
        of_padding = None if torch.compiler.is_compiling() else _ranges_of(keys)
        if of_padding is not None:
            rows = [-1, -1, q_length, *of_padding.shape[3:]]
            ranges = intersection(ranges, of_padding.expand(rows))
        else:
            kept = in_key_ranges(ranges, kv_length) & keys
            of_mask = _ranges_of(kept)
            if of_mask is None:
                return Layout(q_length, kv_length, kv_length, -1, -1, attn_bias=kept)
            ranges = of_mask
    return _with_ranges(ranges, batch, q_length, kv_length)


def layout_of_drawn(kept: Tensor, batch: int, q_length: int, kv_length: int) -> Layout:
    """The layout of a mask tensor; with attn_bias if a query sees more than two runs of keys. Waits for the device.

    Args:
        kept: bool ``[1 or batch, 1 or nheads, 1 or q_length, 1 or kv_length]``, True where a query sees a key.
        batch: The number of rows.
        q_length: The number of queries.
        kv_length: The number of keys.
    """
    kept = kept.expand(-1, -1, q_length, kv_length)
    if not torch.compiler.is_compiling():
        if bool(kept.all()):
            return Layout(q_length, kv_length, kv_length, -1, -1)
        causal = torch.ones(q_length, kv_length, dtype=torch.bool, device=kept.device).tril(kv_length - q_length)
        if bool((kept == causal).all()):
            return Layout(q_length, kv_length, kv_length, -1, 0)
    ranges = _ranges_of(kept)
    if ranges is None:
        return Layout(q_length, kv_length, kv_length, -1, -1, attn_bias=kept)
    return _with_ranges(ranges, batch, q_length, kv_length)


def _with_ranges(ranges: Tensor, batch: int, q_length: int, kv_length: int) -> Layout:
    """The layout of key_ranges. One query for each row that sees one run of keys reads them as a cache."""
    layout = Layout(q_length, kv_length, kv_length, -1, -1, key_ranges=ranges)
    if q_length != 1 or ranges.ndim != 4 or ranges.shape[1] != 1:
        return layout
    begin, end = ranges[:, 0, 0].expand(batch, 2).unbind(1)
    return replace(layout, is_decoding=True, cache_seqlens=end.contiguous(), cache_leftpad=begin.contiguous())


def _ranges_of(kept: Tensor) -> Tensor | None:
    """The key_ranges of a bool mask; None if a query sees more than two runs, an error when a traced program runs."""
    first, last, has_more = runs_of(kept)
    if torch.compiler.is_compiling():
        return checked(
            torch.stack((first, last), dim=-2), ~has_more.any(), unsupported(f"this model's mask: {MORE_RUNS}")
        )
    if bool(has_more.any()):
        return None
    return torch.stack((first, last), dim=-2) if bool((last[..., 1] > 0).any()) else first


def _sorted_layout(
    queries: Tensor | None, keys: Tensor, q_length: int, kv_length: int, left: int, right: int
) -> Layout:
    """The layout of a padded batch in a traced program: all tokens take part, so that sizes do not depend on values.

    In each row the tokens that count come first, then the padding. A row becomes up to three sequences: what counts,
    the padding of the queries without a key, and the padding of the keys without a query. Outputs without a key are 0,
    and keys without a query get no gradient.

    Args:
        queries: bool ``[batch, q_length]``, the queries that count; None for all.
        keys: bool ``[batch, kv_end]``, the keys that count.
        q_length: The number of queries.
        kv_length: The number of keys.
        left: The window to the left.
        right: The window to the right.
    """
    kv_end = keys.shape[1]
    indices_k, used_k, unused_k = _sorted_tokens(keys)
    nothing = torch.zeros_like(used_k)
    if queries is None:
        indices_q = None
        parts_q, parts_k = [nothing + q_length, nothing], [used_k, unused_k]
    else:
        indices_q, used_q, unused_q = _sorted_tokens(queries)
        parts_q, parts_k = [used_q, unused_q, nothing], [used_k, nothing, unused_k]
    cu_seqlens = [
        F.pad(torch.stack(parts, dim=1).flatten().cumsum(0), (1, 0)).to(torch.int32) for parts in (parts_q, parts_k)
    ]
    lengths = (cu_seqlens[0], cu_seqlens[1], q_length, kv_end)
    return Layout(q_length, kv_length, kv_end, left, right, lengths, indices_q, indices_k)


def _sorted_tokens(kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of all elements of ``[batch, seqlen]``, the true ones of a row first; the numbers of true and false."""
    batch, seqlen = kept.shape
    order = torch.argsort(~kept, dim=1, stable=True)
    indices = order + seqlen * torch.arange(batch, device=kept.device)[:, None]
    number = kept.sum(dim=1)
    return indices.flatten(), number, seqlen - number


def _tokens(kept: Tensor) -> tuple[Tensor, Tensor, int]:
    """Indices, cu_seqlens and the largest row length of the true elements of ``[batch, seqlen]``."""
    seqlens = kept.sum(dim=1, dtype=torch.int32)
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return kept.flatten().nonzero().flatten(), cu_seqlens, int(seqlens.max()) if seqlens.numel() else 0


def _packed(seen: Seen, segments: Tensor) -> Layout:
    """The layout of packed rows: every token takes part; a sequence ends where its row or segment ends."""
    batch, seqlen = segments.shape
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if torch.compiler.is_compiling():
        return Layout(seqlen, seqlen, seqlen, seen.left, seen.right, packed_rows=sequences_of(begins))
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=batch * seqlen).to(torch.int32)
    longest = int(cu_seqlens.diff().max()) if starts.numel() else 0
    return Layout(seqlen, seqlen, seqlen, seen.left, seen.right, (cu_seqlens, cu_seqlens, longest, longest))
