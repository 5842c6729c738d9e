"""Between padded batches ``[batch, seqlen, ...]`` and packed ones ``[total, ...]``, as the official package has it.

A packed batch holds the tokens of all sequences end to end, without padding: what `flash_attn_varlen_func` takes.
Plain PyTorch operators, so every function is differentiable (twice, too) and runs wherever PyTorch does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_checks import wrong_type


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows ``input[indices]``.

    Args:
        input: ``[rows, ...]``.
        indices: int32 or int64 ``[total]``, on the device of `input`.

    Returns:
        ``[total, ...]``.

    Raises:
        TypeError: For indices that are no integers.
        ValueError: For a wrong number of dimensions.
    """
    _check_rows("input", input, 1)
    _check_indices(indices)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: zeros ``[first_axis_dim, ...]`` with `values` in the rows `indices`.

    Args:
        values: ``[total, ...]``.
        indices: int32 or int64 ``[total]``, each row at most once, on the device of `values`.
        first_axis_dim: The number of rows of the result.

    Raises:
        TypeError: For indices that are no integers.
        ValueError: For a wrong number of dimensions, or as many indices as there are no values for.
    """
    _check_rows("values", values, 1)
    _check_indices(indices)
    if indices.shape[0] != values.shape[0]:
        raise ValueError(
            f"flash_attn_mini: indices has {indices.shape[0]} elements; allowed: one for each of the "
            f"{values.shape[0]} rows of values"
        )
    rows: Tensor = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of a batch.

    Args:
        hidden_states: ``[batch, seqlen, ...]``.
        attention_mask: bool or integer ``[batch, seqlen]``: which tokens count, wherever in the row they stand. Numbers
            other than 0 count; a floating mask must hold nothing but 0 and 1.
        unused_mask: Likewise: which tokens are kept although they do not count, as room for later ones.

    Returns:
        The tokens of either mask, ``[total, ...]``; their indices among all ``batch * seqlen``, int64 ``[total]``;
        ``cu_seqlens``, int32 ``[batch + 1]``, where each sequence begins and the last one ends; the length of the
        longest sequence; and how many tokens of each sequence count (``seqused``), int32 ``[batch]``.

    Raises:
        TypeError: For a mask that is no tensor of bool, integers or floats.
        ValueError: For a mask of another shape than the batch, or a floating one of other values than 0 and 1.

    Two of the results depend on the masks' values, so a call waits for the GPU.

    Example:
        >>> import torch
        >>> from flash_attn_mini.bert_padding import unpad_input
        >>> hidden = torch.randn(2, 3, 8)
        >>> packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> packed.shape, indices.tolist(), cu_seqlens.tolist(), max_seqlen
        (torch.Size([5, 8]), [0, 1, 3, 4, 5], [0, 2, 5], 3)
    """
    _check_rows("hidden_states", hidden_states, 2)
    used = _as_bool("attention_mask", attention_mask, hidden_states)
    kept = used if unused_mask is None else used | _as_bool("unused_mask", unused_mask, hidden_states)
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, max_seqlen, used.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put the tokens of `unpad_input` back where they were, with zeros elsewhere.

    Args:
        hidden_states: ``[total, ...]``.
        indices: ``[total]``, from `unpad_input`.
        batch: The number of sequences.
        seqlen: Their padded length.

    Returns:
        ``[batch, seqlen, ...]``.

    Raises:
        TypeError, ValueError: As `index_put_first_axis`.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _check_rows(name: str, value: Tensor, least: int) -> None:
    if value.dim() < least:
        shape = "[batch, seqlen, ...]" if least == 2 else "[rows, ...]"
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")


def _check_indices(indices: Tensor) -> None:
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"flash_attn_mini: indices is {indices.dtype}; allowed: torch.int64 or torch.int32")
    if indices.dim() != 1:
        raise ValueError(f"flash_attn_mini: indices has shape {list(indices.shape)}; allowed: [total]")


def _as_bool(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.is_complex():
        raise wrong_type(name, getattr(mask, "dtype", mask), "a tensor of bool or integers")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"flash_attn_mini: {name} has shape {list(mask.shape)}; allowed: {list(hidden_states.shape[:2])}, "
            "the batch and sequence length of hidden_states"
        )
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"flash_attn_mini: {name} holds other numbers than 0 and 1, as masks that are added to scores do; allowed: "
            "bool or integers, true for the tokens that count"
        )
    return mask if mask.dtype == torch.bool else mask != 0
