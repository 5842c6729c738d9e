"""Builders of `key_ranges`, the option that gives each query one or two ranges of keys (`flash_attn_func`).

The result is int32 ``[1 or batch, 1 or nheads, seqlen_q, 2]``: query i sees the keys from ``[..., i, 0]`` up to, not
including, ``[..., i, 1]``; or ``[..., seqlen_q, 2, 2]``, the union of two such ranges. An empty range is
``[0, 0]``. Every bound lies between 0 and the number of keys. causal and window_size of a call hide further keys.

The functions run on the device of their tensors and under torch.compile. Those that read values on the host say so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_checks import as_flag, as_integer, check_tensor, wrong_type

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ONE_RANGE = "[1 or batch, 1 or nheads, seqlen_q, 2]"
_TWO_RANGES = "[1 or batch, 1 or nheads, seqlen_q, 2, 2]"


def documents(
    cu_seqlens: Tensor | None = None, *, segment_ids: Tensor | None = None, seqlen: int | None = None
) -> Tensor:
    """Documents packed into rows: each token sees the tokens of its own document.

    With ``causal=True`` in the call, a token sees its document up to itself. The documents are given by their
    boundaries or by a number for each token.

    Args:
        cu_seqlens: Integers ``[documents + 1]``, or ``[batch, documents + 1]`` for several rows: document d of a row is
            the tokens from ``cu_seqlens[d]`` up to, not including, ``cu_seqlens[d + 1]``. The boundaries of a row do
            not fall. A row of fewer documents repeats its last boundary. Tokens outside of all documents see nothing.
        segment_ids: Integers ``[batch, seqlen]``, in place of cu_seqlens: neighbouring tokens of equal numbers belong
            to one document.
        seqlen: The number of tokens of a row, for cu_seqlens; default the last boundary, which is read on the host and
            so synchronises with a GPU.

    Returns:
        int32 ``[1 or batch, 1, seqlen, 2]``, on the device of the argument.

    Raises:
        TypeError: For an argument that is no tensor of integers.
        ValueError: For a wrong shape, for both or neither of cu_seqlens and segment_ids, and on the CPU, where the
            values are checked outside of torch.compile, for boundaries that fall, below 0 or above seqlen.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_func, masks
        >>> documents = masks.documents(torch.tensor([0, 2, 5]))
        >>> documents[0, 0].tolist()
        [[0, 2], [0, 2], [2, 5], [2, 5], [2, 5]]
        >>> q, k, v = torch.randn(3, 1, 5, 2, 16)
        >>> out = flash_attn_func(q, k, v, causal=True, key_ranges=documents)
    """
    if (cu_seqlens is None) == (segment_ids is None):
        given = "neither cu_seqlens nor segment_ids" if cu_seqlens is None else "both cu_seqlens and segment_ids"
        raise ValueError(f"flash_attn_mini: documents has {given}; allowed: one of the two")
    if segment_ids is not None:
        if seqlen is not None:
            raise ValueError("flash_attn_mini: seqlen is given together with segment_ids; allowed: None")
        _check_integers("segment_ids", segment_ids, "[batch, seqlen]", (2,))
        return _of_segments(segment_ids)
    assert cu_seqlens is not None
    _check_integers("cu_seqlens", cu_seqlens, "[documents + 1] or [batch, documents + 1]", (1, 2))
    if cu_seqlens.shape[-1] == 0:
        raise ValueError(
            f"flash_attn_mini: cu_seqlens has shape {list(cu_seqlens.shape)}; allowed: [documents + 1] or "
            "[batch, documents + 1], at least one boundary"
        )
    if seqlen is None:
        seqlen = int(cu_seqlens[..., -1].max()) if cu_seqlens.numel() else 0
    seqlen = _size("seqlen", seqlen)
    bounds = cu_seqlens.reshape(-1, cu_seqlens.shape[-1])
    if bounds.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_boundaries(bounds, seqlen)
    bounds = _clamped(bounds, seqlen)
    place = _positions(seqlen, bounds.device).expand(bounds.shape[0], seqlen)
    after = torch.searchsorted(bounds.contiguous(), place.contiguous(), right=True)  # boundaries up to the token
    last = bounds.shape[1] - 1
    inside = (after > 0) & (after <= last)
    begin = bounds.gather(1, (after - 1).clamp(min=0))
    end = bounds.gather(1, after.clamp(max=last))
    return _ranges(begin, end, inside)[:, None]


def prefix_lm(prefix_lengths: Tensor, seqlen: int) -> Tensor:
    """A prefix that all tokens see, followed by tokens that see what precedes them.

    Token i sees the prefix of its row and the tokens up to itself. The call must not be causal, because the tokens of a
    prefix see later ones.

    Args:
        prefix_lengths: Integers ``[batch]``, the length of the prefix of each row. Values are clamped to 0 and seqlen.
        seqlen: The number of tokens of a row.

    Returns:
        int32 ``[batch, 1, seqlen, 2]``, on the device of prefix_lengths.

    Raises:
        TypeError: If prefix_lengths is no tensor of integers, or seqlen no integer.
        ValueError: For a wrong shape, or a negative seqlen.

    Example:
        >>> import torch
        >>> from flash_attn_mini import masks
        >>> masks.prefix_lm(torch.tensor([3]), seqlen=5)[0, 0].tolist()
        [[0, 3], [0, 3], [0, 3], [0, 4], [0, 5]]
    """
    _check_integers("prefix_lengths", prefix_lengths, "[batch]", (1,))
    seqlen = _size("seqlen", seqlen)
    end = torch.maximum(_clamped(prefix_lengths, seqlen)[:, None], _positions(seqlen, prefix_lengths.device) + 1)
    return torch.stack((torch.zeros_like(end), end), dim=-1)[:, None]


def chunked(
    seqlen: int,
    chunk_size: int,
    *,
    seqlen_q: int | None = None,
    left_padding: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Chunks of equal size: each token sees the tokens of its own chunk (Llama 4).

    With ``causal=True`` in the call, a token sees its chunk up to itself.

    Args:
        seqlen: The number of keys.
        chunk_size: The number of tokens of a chunk. The last chunk may be shorter.
        seqlen_q: The number of queries, which are the last tokens; default seqlen. Queries before the first key see
            nothing.
        left_padding: Integers ``[batch]``: the first chunk of row b begins at key ``left_padding[b]``. The tokens
            before it are padding, which no token sees, and see nothing.
        device: The device of the result without left_padding; default PyTorch's default device.

    Returns:
        int32 ``[1 or batch, 1, seqlen_q, 2]``.

    Raises:
        TypeError: For sizes that are no integers, or a left_padding that is no tensor of integers.
        ValueError: For a negative length, a chunk_size below 1, or a wrong shape.

    Example:
        >>> from flash_attn_mini import masks
        >>> masks.chunked(5, 2)[0, 0].tolist()
        [[0, 2], [0, 2], [2, 4], [2, 4], [4, 5]]
    """
    seqlen, chunk_size = _size("seqlen", seqlen), _size("chunk_size", chunk_size, 1)
    seqlen_q = seqlen if seqlen_q is None else _size("seqlen_q", seqlen_q)
    if left_padding is not None:
        _check_integers("left_padding", left_padding, "[batch]", (1,))
        if device is not None:
            raise ValueError("flash_attn_mini: device is given together with left_padding; allowed: None")
        device = left_padding.device
    place = _positions(seqlen_q, device)[None] + (seqlen - seqlen_q)
    first = 0 if left_padding is None else _clamped(left_padding, seqlen)[:, None]
    chunk_size = min(chunk_size, max(seqlen, 1))  # so that no sum exceeds int32
    begin = place - (place - first) % chunk_size
    return _ranges(begin, (begin + chunk_size).clamp(max=seqlen), (place >= first) & (place >= 0))[:, None]


def padding(key_mask: Tensor, seqlen_q: int) -> Tensor:
    """Padding: every query of a row sees the keys where the mask of the row is true.

    These may be one or two runs of neighbouring keys, as with padding on the left, on the right, on both sides, or
    between a prompt and what follows it. The mask is read on the host, which synchronises with a GPU and is a graph
    break under torch.compile.

    Args:
        key_mask: bool ``[batch, seqlen_k]``, True for the keys that count.
        seqlen_q: The number of queries.

    Returns:
        int32 ``[batch, 1, seqlen_q, 2]``, or ``[batch, 1, seqlen_q, 2, 2]`` if a row has two runs: a view in which all
        queries of a row share memory.

    Raises:
        TypeError: If key_mask is no bool tensor, or seqlen_q no integer.
        ValueError: For a wrong shape, a negative seqlen_q, or a row of more than two runs.

    Example:
        >>> import torch
        >>> from flash_attn_mini import masks
        >>> masks.padding(torch.tensor([[False, True, True], [True, True, False]]), seqlen_q=2)[:, 0].tolist()
        [[[1, 3], [1, 3]], [[0, 2], [0, 2]]]
    """
    _check_mask("key_mask", key_mask, "[batch, seqlen_k]", 2)
    seqlen_q = _size("seqlen_q", seqlen_q)
    ranges = _of_mask("key_mask", key_mask)[:, None, None]
    return ranges.expand(-1, -1, seqlen_q, *ranges.shape[3:])


def global_and_window(
    seqlen_q: int,
    seqlen_k: int,
    num_global: int,
    window: int,
    *,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """The first keys, which all queries see, and a window before each query (Longformer, StreamingLLM).

    The query at key position p = i + seqlen_k - seqlen_q sees the first num_global keys, and the keys from p - window
    to p: as many as with ``window_size=(window, 0)``. A window_size in the call would hide the first keys.

    Args:
        seqlen_q: The number of queries, which are the last tokens.
        seqlen_k: The number of keys.
        num_global: The number of keys that all queries see; seqlen_k if larger.
        window: The number of keys before its own that a query sees.
        causal: A query sees no key after its own position, also none of the first num_global.
        device: The device of the result; default PyTorch's default device.

    Returns:
        int32 ``[1, 1, seqlen_q, 2, 2]``: the first keys, then the window.

    Raises:
        TypeError: For sizes that are no integers.
        ValueError: For negative sizes.

    Example:
        >>> from flash_attn_mini import masks
        >>> masks.global_and_window(4, 4, num_global=1, window=1)[0, 0].tolist()
        [[[0, 1], [0, 1]], [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[0, 1], [2, 4]]]
    """
    seqlen_q, seqlen_k = _size("seqlen_q", seqlen_q), _size("seqlen_k", seqlen_k)
    num_global, window = _size("num_global", num_global), min(_size("window", window), seqlen_k)
    place = _positions(seqlen_q, device) + (seqlen_k - seqlen_q)
    end = (place + 1).clamp(min=0)
    first = torch.full_like(end, min(num_global, seqlen_k))
    if as_flag("causal", causal):
        first = torch.minimum(first, end)
    begins = torch.stack((torch.zeros_like(end), (place - window).clamp(min=0)), dim=-1)
    return torch.stack((begins, torch.stack((first, end), dim=-1)), dim=-1)[None, None]


def from_dense(mask: Tensor) -> Tensor:
    """Any mask in which each query sees at most two runs of neighbouring keys. The conversion is exact.

    It needs a few times the memory of the mask. The mask is read on the host, which synchronises with a GPU and is a
    graph break under torch.compile.

    Args:
        mask: bool ``[1 or batch, 1 or nheads, seqlen_q, seqlen_k]``, True where a query sees a key.

    Returns:
        int32 ``[1 or batch, 1 or nheads, seqlen_q, 2]``, or ``[..., 2, 2]`` if a query sees two runs, on the device of
        the mask.

    Raises:
        TypeError: If mask is no bool tensor.
        ValueError: For a wrong shape, or for a query that sees more than two runs; the message names the first one.

    Example:
        >>> import torch
        >>> from flash_attn_mini import masks
        >>> mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
        >>> masks.from_dense(mask[None, None])[0, 0].tolist()
        [[[0, 2], [0, 0]], [[0, 0], [0, 0]], [[0, 1], [2, 4]]]
    """
    _check_mask("mask", mask, "[1 or batch, 1 or nheads, seqlen_q, seqlen_k]", 4)
    return _of_mask("mask", mask)


def intersection(first: Tensor, second: Tensor) -> Tensor:
    """What two key_ranges have in common, such as documents and padding.

    Args:
        first: int32 ``[1 or batch, 1 or nheads, seqlen_q, 2]``, or ``[..., 2, 2]``.
        second: The same; at most one of the two has two ranges for each query.

    Returns:
        int32 with one range for each query, or two if one of the arguments has two, of the shape to which both
        broadcast.

    Raises:
        TypeError: For arguments that are no int32 tensors.
        ValueError: For shapes that do not broadcast, and if both have two ranges: the result may have three.

    Example:
        >>> import torch
        >>> from flash_attn_mini import masks
        >>> documents = masks.documents(torch.tensor([0, 2, 5]))
        >>> kept = masks.padding(torch.tensor([[False, True, True, True, True]]), seqlen_q=5)
        >>> masks.intersection(documents, kept)[0, 0].tolist()
        [[1, 2], [1, 2], [2, 5], [2, 5], [2, 5]]
    """
    for name, ranges in (("first", first), ("second", second)):
        check_tensor(name, ranges)
        if ranges.dtype != torch.int32:
            raise wrong_type(name, ranges.dtype, "torch.int32")
        if ranges.ndim not in (4, 5) or ranges.shape[-1] != 2 or (ranges.ndim == 5 and ranges.shape[3] != 2):
            raise ValueError(
                f"flash_attn_mini: {name} has shape {list(ranges.shape)}; allowed: {_ONE_RANGE} or {_TWO_RANGES}"
            )
    if first.ndim == second.ndim == 5:
        raise ValueError("flash_attn_mini: first and second have two ranges for each query; allowed: one of the two")
    if any(a != b and 1 not in (a, b) for a, b in zip(first.shape[:2], second.shape[:2], strict=True)) or (
        first.shape[2] != second.shape[2]
    ):
        raise ValueError(
            f"flash_attn_mini: second has shape {list(second.shape)}; allowed: the batch (or 1), the nheads (or 1) and "
            f"the seqlen_q of first, which has shape {list(first.shape)}"
        )
    if first.ndim != second.ndim:
        first, second = (x if x.ndim == 5 else x[..., None, :] for x in (first, second))
    begin = torch.maximum(first[..., 0], second[..., 0])
    end = torch.minimum(first[..., 1], second[..., 1])
    return _ranges(begin, end, begin < end)


# ---- ranges of a mask and of segments --------------------------------------------------------------------------------


def _of_segments(segment_ids: Tensor) -> Tensor:
    seqlen = segment_ids.shape[1]
    place = _positions(seqlen, segment_ids.device)
    begins = (segment_ids != segment_ids.roll(1, 1)) | (place == 0)
    begin = torch.where(begins, place, 0).cummax(1).values
    end = torch.where(begins.roll(-1, 1), place + 1, seqlen).flip(1).cummin(1).values.flip(1)
    return torch.stack((begin, end), dim=-1)[:, None].to(torch.int32)


def _of_mask(name: str, mask: Tensor) -> Tensor:
    """The ranges of the last dimension, ``[..., 2]`` or ``[..., 2, 2]``. Reads the mask on the host."""
    first, second, has_more = runs_of(mask)
    if bool(has_more.any()):
        place = has_more.nonzero()[0].tolist()
        runs = int((mask[tuple(place)].to(torch.int8).diff(prepend=mask.new_zeros(1, dtype=torch.int8)) == 1).sum())
        row = ", ".join(f"{what} {i}" for what, i in zip(("batch", "head", "query"), place, strict=False))
        raise ValueError(f"flash_attn_mini: {name} has {runs} runs of True in the row of {row}; allowed: at most 2")
    return torch.stack((first, second), dim=-2) if bool((second[..., 1] > 0).any()) else first


def runs_of(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last run of True in the last dimension, and whether there are more.

    Args:
        mask: bool ``[..., n]``.

    Returns:
        The first run, int32 ``[..., 2]``; the last one if it is another, else ``[0, 0]``; bool ``[...]``, True where
        these two leave out a True.
    """
    length = mask.shape[-1]
    padded = F.pad(mask, (1, 1))  # element j is at j + 1: every run has a False before and after it
    place = _positions(length + 2, mask.device) - 1
    begin = _first(padded)
    end = length - _first(padded.flip(-1))
    first_end = _first(~padded & (place >= begin[..., None]))
    last_begin = length - _first((~padded & (place < end[..., None])).flip(-1))
    count = mask.sum(-1, dtype=torch.int32)
    is_one = first_end == end
    first = _ranges(begin, first_end, count > 0)
    second = _ranges(last_begin, end, (count > 0) & ~is_one)
    return first, second, count != (first.diff(dim=-1) + second.diff(dim=-1))[..., 0]


def _first(padded: Tensor) -> Tensor:
    """The place of the first True of a padded mask: the index before the padding; -1 without one."""
    return padded.view(torch.uint8).argmax(-1).to(torch.int32) - 1


def _ranges(begin: Tensor, end: Tensor, exists: Tensor) -> Tensor:
    """int32 ``[..., 2]`` from bounds; ``[0, 0]`` where no range exists."""
    return torch.stack((begin, end), dim=-1).to(torch.int32) * exists[..., None]


def _clamped(values: Tensor, largest: int) -> Tensor:
    return values.long().clamp(0, largest).to(torch.int32)


def _positions(length: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _size(name: str, value: Any, least: int = 0) -> Any:
    allowed = f"an integer, {least} or more"
    size = as_integer(name, value, allowed)
    if size < least:
        raise ValueError(f"flash_attn_mini: {name} is {size}; allowed: {allowed}")
    return size


def _check_integers(name: str, value: Any, shape: str, ranks: tuple[int, ...]) -> None:
    check_tensor(name, value)
    if value.dtype not in _INTEGERS:
        raise wrong_type(name, value.dtype, "a tensor of integers")
    if value.ndim not in ranks:
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")


def _check_mask(name: str, value: Any, shape: str, rank: int) -> None:
    check_tensor(name, value)
    if value.dtype != torch.bool:
        raise wrong_type(name, value.dtype, "torch.bool")
    if value.ndim != rank:
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")


def _check_boundaries(bounds: Tensor, seqlen: int) -> None:
    falls = bounds[:, 1:] < bounds[:, :-1]
    if bool(falls.any()):
        row, place = falls.nonzero()[0].tolist()
        before, after = bounds[row, place : place + 2].tolist()
        raise ValueError(f"flash_attn_mini: cu_seqlens falls from {before} to {after}; allowed: rising or equal values")
    if bounds.numel() and (int(bounds.min()) < 0 or int(bounds.max()) > seqlen):
        wrong = int(bounds.min()) if int(bounds.min()) < 0 else int(bounds.max())
        raise ValueError(f"flash_attn_mini: cu_seqlens has {wrong}; allowed: 0 to the number of tokens, {seqlen}")
