"""Translates a transformers mask for the kernels: the tokens that take part, and the keys that each query sees.

transformers describes a mask by a function of (batch, head, query, key) and a padding mask. `seen_of` recognises the
functions that stand for an interval of keys around each query. `layout_of` finds the tokens. Both run once per forward,
for all layers, and form no seqlen_q x seqlen_k tensor.

In generation a layer gets all keys of transformers' cache, old and new. A static cache also has an unused end. Its
length is a tensor: one query for each row takes it to the kernel without waiting for the GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Functions of transformers that make the parts of a mask for packed rows.
PACKED = "packed_sequence_mask_function"
POSITIONS_IN_SEGMENT = "remap_positions_for_packed_sequence"


@dataclass(frozen=True)
class Seen:
    """A query at position p sees the keys p - left .. p + right of its own segment; -1 for unbounded."""

    left: int = -1
    right: int = -1
    segments: Tensor | None = None  # [batch, seqlen], a rising number for each sequence of a row; None for one sequence

    def __and__(self, other: Seen) -> Seen:
        segments = self.segments if other.segments is None else other.segments
        return Seen(tighter(self.left, other.left), tighter(self.right, other.right), segments)


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


@dataclass(frozen=True)
class Layout:
    """A mask as arguments of one of the functions of this package, chosen by `lengths` and `is_decoding`.

    transformers passes it to each layer in place of a mask tensor.
    """

    q_length: int
    kv_length: int
    kv_end: int  # no query sees the keys from here on: the unused end of a static cache
    left: int
    right: int
    lengths: tuple[Tensor, Tensor, int, int] | None = None  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    indices_q: Tensor | None = None  # the queries that take part, among [batch * q_length]; None for all
    indices_k: Tensor | None = None  # the keys that take part, among [batch * kv_end]; None for all
    is_decoding: bool = False  # causal queries behind cached keys: flash_attn_with_kvcache
    cache_seqlens: Tensor | None = None  # int32 [batch], keys of each row; None: kv_end
    cache_leftpad: Tensor | None = None  # int32 [batch], padding before the first key of each row; None: none

    ndim = 4  # as the mask tensor [batch, 1, seqlen_q, seqlen_k]: transformers reads it

    def contiguous(self) -> Layout:
        """Returns itself; generate() calls this on masks for a static cache."""
        return self

    def to(self, device: torch.device | str, **options: Any) -> Layout:
        """A copy on another device, for models that span several devices."""
        names = ("indices_q", "indices_k", "cache_seqlens", "cache_leftpad")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: tensor.to(device, **options) for name, tensor in tensors.items() if tensor is not None}
        lengths = self.lengths and (self.lengths[0].to(device), self.lengths[1].to(device), *self.lengths[2:])
        return replace(self, lengths=lengths, **moved)

    @property
    def device(self) -> torch.device | None:
        """The device of its tensors; None without any."""
        tensors = (self.lengths and self.lengths[0], self.cache_seqlens, self.cache_leftpad)
        return next((tensor.device for tensor in tensors if tensor is not None), None)

    def packed(self, batch: int) -> Layout:
        """The same mask for `flash_attn_varlen_func`, which has dropout and gradients. Waits for the device."""
        kv_end = self.kv_end if self.cache_seqlens is None else int(self.cache_seqlens[0])
        padding = None
        if self.cache_leftpad is not None:
            padding = torch.arange(kv_end, device=self.cache_leftpad.device) >= self.cache_leftpad[:, None]
        mask = Mask(Seen(self.left, 0), batch, self.q_length, kv_end, kv_end - self.q_length, 0, padding)
        layout = layout_of(mask)
        assert layout is not None  # its keys are in a row
        return replace(layout, kv_length=self.kv_length)


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
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return None
    made_by = mask_function.__qualname__.partition(".")[0]
    made_of = inspect.getclosurevars(mask_function).nonlocals
    if made_by == "sliding_window_overlay":
        return Seen(left=made_of["sliding_window"] - 1)
    if made_by == "sliding_window_bidirectional_overlay":
        return Seen(left=made_of["sliding_window"], right=made_of["sliding_window"])
    if made_by == "and_masks":
        return _intersection(made_of["mask_functions"])
    return None


def _intersection(mask_functions: tuple[Callable[..., Any], ...]) -> Seen | None:
    """The intersection.

    For packed rows it holds "same segment" and a mask function of positions in the row or in the segment; their order
    differs between versions of transformers. Within a segment both kinds of position have the same distances.
    """
    makers = [getattr(function, "__qualname__", "").partition(".")[0] for function in mask_functions]
    together = Seen()
    for maker, function in zip(makers, mask_functions, strict=True):
        part: Seen | None
        if maker == PACKED:
            part = Seen(segments=inspect.getclosurevars(function).nonlocals["packed_sequence_mask"])
        elif maker == POSITIONS_IN_SEGMENT and PACKED in makers:
            part = seen_of(inspect.getclosurevars(function).nonlocals["mask_function"])
        else:
            part = seen_of(function)
        if part is None:
            return None
        together = together & part
    return together


def decoding_layout_of(mask: Mask) -> Layout | None:
    """The layout of causal queries behind cached keys; None where there are none, and for padding between the keys.

    For one query, the values of a tensor q_offset and of the padding stay on a GPU; padding between the keys then ends
    in a device-side assertion.
    """
    seen, batch, q_length, kv_length, q_offset, kv_offset, padding = mask
    waits = q_length > 1 or not isinstance(q_offset, Tensor)
    if seen.right != 0 or seen.segments is not None:
        return None
    kv_end = (int(q_offset) if waits else q_offset) + q_length - kv_offset
    if waits and not q_length < kv_end <= kv_length:
        return None
    leftpad = None
    if padding is not None:
        padding = F.pad(padding, (0, max(kv_offset + kv_length - padding.shape[1], 0)))
        place = torch.arange(kv_length, device=padding.device)
        kept = padding[:, kv_offset : kv_offset + kv_length].bool() & (place < kv_end)
        before = ((kept.cumsum(dim=1) == 0) & (place < kv_end)).sum(dim=1)
        in_a_row = (before + kept.sum(dim=1) == kv_end).all()
        if waits or padding.device.type == "cpu":
            if not bool(in_a_row):
                return None
        else:
            torch._assert_async(in_a_row, "a static cache on a GPU allows padding on the left only")
        leftpad = before.to(torch.int32)
    layout = Layout(q_length, kv_length, kv_length, seen.left, 0, is_decoding=True, cache_leftpad=leftpad)
    if isinstance(kv_end, Tensor):
        return replace(layout, cache_seqlens=kv_end.to(torch.int32).expand(batch).contiguous())
    return replace(layout, kv_end=kv_end, left=-1 if seen.left >= kv_end - 1 else seen.left)


def layout_of(mask: Mask) -> Layout | None:
    """The tokens that take part in attention; None if the kernels cannot express the mask.

    Under a causal mask or a window, queries and keys are the same tokens. Padding is dropped from both, and its rows of
    the output become 0. Otherwise the padding mask describes the keys alone, and all queries are computed: those of a
    cross-attention are other tokens.
    """
    seen, batch, q_length, kv_length, q_offset, kv_offset, padding = mask
    kv_end, q_end = kv_length, int(q_offset) + q_length
    if seen.right == 0:
        kv_end = min(kv_end, q_end - kv_offset)
    aligned = q_end == kv_offset + kv_end  # the kernels place the last query at the last key
    by_position = seen.left >= 0 or seen.right >= 0
    if seen.segments is not None:
        if padding is not None or seen.segments.shape != (batch, q_length) or kv_length != q_length:
            return None
        return _packed(seen, seen.segments)
    if padding is not None:
        padding = F.pad(padding, (0, max(kv_offset + kv_end - padding.shape[1], 0)))
        if bool(padding[:, kv_offset : kv_offset + kv_end].all()):
            padding = None
    if by_position and not aligned:
        return None
    left = -1 if seen.left >= q_end - kv_offset - 1 else seen.left  # the window hides no key
    right = -1 if seen.right >= kv_end - 1 and seen.right > 0 else seen.right
    if padding is None:
        return Layout(q_length, kv_length, kv_end, left, right)

    keys = padding[:, kv_offset : kv_offset + kv_end].bool()
    queries = torch.ones(batch, q_length, dtype=torch.bool, device=keys.device)
    if by_position:
        queries = keys[:, kv_end - q_length :]
        begins = keys & ~F.pad(keys, (1, 0))[:, :-1]
        if (left >= 0 or right > 0) and bool((begins.sum(dim=1) > 1).any()):
            return None  # dropping the tokens of a hole would shorten distances across it
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
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=batch * seqlen).to(torch.int32)
    longest = int(cu_seqlens.diff().max()) if starts.numel() else 0
    return Layout(seqlen, seqlen, seqlen, seen.left, seen.right, (cu_seqlens, cu_seqlens, longest, longest))
