"""Pack padded batches ``[batch, seqlen, ...]`` to ``[total, ...]`` and back, under the official package's names.

A packed batch holds the tokens of all sequences end to end, without padding: the input of `flash_attn_varlen_func`. The
functions use only PyTorch's operators, so they are differentiable any number of times and run on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_checks import as_length, check_tensor, wrong_type


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows ``input[indices]``.

    Args:
        input: ``[rows, ...]``, any dtype.
        indices: int32 or int64 ``[total]``, each from 0 to rows - 1, on the device of `input`.

    Returns:
        ``[total, ...]``, in the dtype of `input`.

    Raises:
        TypeError: If an argument is no tensor, or indices holds no integers.
        ValueError: For a wrong number of dimensions, or tensors on different devices.
        IndexError: For an index that is out of range, on the CPU.
    """
    _check_rows("input", input, 1)
    _check_indices(indices, "input", input)
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and a view of `input` for a residual connection.

    Arguments and errors are those of `index_first_axis`.

    Returns:
        The rows ``input[indices]``, and a view of all of `input`. The gradient of `input` is the sum of both gradients.
    """
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: zeros ``[first_axis_dim, ...]`` with `values` in the rows `indices`.

    Args:
        values: ``[total, ...]``, any dtype.
        indices: int32 or int64 ``[total]``, each row at most once, on the device of `values`.
        first_axis_dim: The number of rows of the result.

    Returns:
        ``[first_axis_dim, ...]``, in the dtype of `values`.

    Raises:
        TypeError: If an argument is of a wrong type, or indices holds no integers.
        ValueError: For a wrong number of dimensions, tensors on different devices, a negative first_axis_dim, or if
            the numbers of indices and values differ.
        IndexError: For an index that is out of range, on the CPU.
    """
    return _put_rows("values", values, indices, _size("first_axis_dim", first_axis_dim))


def _put_rows(name: str, values: Tensor, indices: Tensor, count: int) -> Tensor:
    """`index_put_first_axis`, with the name of the argument that holds the values."""
    _check_rows(name, values, 1)
    _check_indices(indices, name, values)
    if indices.shape[0] != values.shape[0]:
        raise ValueError(
            f"flash_attn_mini: indices has {indices.shape[0]} elements; allowed: one for each of the "
            f"{values.shape[0]} rows of {name}"
        )
    rows: Tensor = values.new_zeros(count, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of a batch.

    The shapes of the results depend on the values of the masks, so a call synchronises with the GPU.

    Args:
        hidden_states: ``[batch, seqlen, ...]``, any dtype.
        attention_mask: bool, integer or floating ``[batch, seqlen]``, on the device of `hidden_states`: the tokens that
            count, anywhere in a row. Integers and floats may only be 0 and 1.
        unused_mask: The same shape and dtypes as `attention_mask`: tokens to keep although they do not count.

    Returns:
        Five values. The tokens of either mask, ``[total, ...]``. Their indices among all ``batch * seqlen`` tokens,
        int64 ``[total]``. ``cu_seqlens``, int32 ``[batch + 1]``: the first row of each sequence, and the end of the
        last. The length of the longest sequence, an int. ``seqused``, int32 ``[batch]``: the number of tokens of each
        sequence that count.

    Raises:
        TypeError: If hidden_states is no tensor, or a mask is no tensor of bool, integers or floats.
        ValueError: For a mask of another shape or device than the batch, or with values other than 0 and 1.

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


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop the padding of a batch whose rows hold several sequences, one after the other from the start of the row.

    The shapes of the results depend on the lengths, so a call synchronises with the GPU.

    Args:
        hidden_states: ``[batch, seqlen, ...]``, any dtype.
        attention_mask_in_length: ``[batch, seqlen]``, on the device of `hidden_states`: the lengths of the sequences of
            each row, in tokens and in order. An element of 0 is no sequence. A row has at most seqlen tokens.

    Returns:
        Four values. The tokens of all sequences, ``[total, ...]``. Their indices among all ``batch * seqlen`` tokens,
        int64 ``[total]``. ``cu_seqlens``, int32 ``[sequences + 1]``: the first row of each sequence, and the end of the
        last. The length of the longest sequence, an int.

    Raises:
        TypeError: If hidden_states is no tensor, or attention_mask_in_length is no tensor of real numbers.
        ValueError: For lengths of another shape or device than the batch, lengths that are negative or no integers, or
            a row of more than seqlen tokens.

    Example:
        >>> import torch
        >>> from flash_attn_mini.bert_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
        >>> packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(
        ...     torch.randn(2, 6, 8), lengths)
        >>> packed.shape, indices.tolist(), cu_seqlens.tolist(), max_seqlen
        (torch.Size([11, 8]), [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [0, 2, 5, 11], 6)
    """
    name, lengths = "attention_mask_in_length", attention_mask_in_length
    _check_rows("hidden_states", hidden_states, 2)
    _check_mask(name, lengths, hidden_states)
    whole = lengths.long()
    if not bool(((whole == lengths) & (whole >= 0)).all()):
        raise ValueError(f"flash_attn_mini: {name} holds numbers that are no lengths; allowed: integers, 0 or more")
    seqlen, used = hidden_states.shape[1], whole.sum(dim=-1)
    if bool((used > seqlen).any()):
        raise ValueError(
            f"flash_attn_mini: {name} has a row of {int(used.max())} tokens; allowed: at most {seqlen}, the sequence "
            "length of hidden_states"
        )
    seqlens = whole[whole > 0]
    cu_seqlens = F.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    kept = torch.arange(seqlen, device=used.device) < used[:, None]
    indices = kept.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put the tokens of `unpad_input` back to their places, with zeros in the padding.

    Args:
        hidden_states: ``[total, ...]``, any dtype.
        indices: int32 or int64 ``[total]``, from `unpad_input`.
        batch: The number of sequences.
        seqlen: Their padded length, in tokens.

    Returns:
        ``[batch, seqlen, ...]``, in the dtype of `hidden_states`.

    Raises:
        TypeError, ValueError, IndexError: As `index_put_first_axis`.

    Example:
        >>> import torch
        >>> from flash_attn_mini.bert_padding import pad_input
        >>> pad_input(torch.tensor([[7.0], [8.0], [9.0]]), torch.tensor([0, 2, 3]), batch=2, seqlen=2).tolist()
        [[[7.0], [0.0]], [[8.0], [9.0]]]
    """
    batch, seqlen = _size("batch", batch), _size("seqlen", seqlen)
    rows = _put_rows("hidden_states", hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


def _check_rows(name: str, value: Tensor, least: int) -> None:
    check_tensor(name, value)
    if value.dim() < least:
        shape = "[batch, seqlen, ...]" if least == 2 else "[rows, ...]"
        raise ValueError(f"flash_attn_mini: {name} has shape {list(value.shape)}; allowed: {shape}")


def _check_indices(indices: Tensor, name: str, rows: Tensor) -> None:
    check_tensor("indices", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise wrong_type("indices", indices.dtype, "torch.int64 or torch.int32")
    if indices.dim() != 1:
        raise ValueError(f"flash_attn_mini: indices has shape {list(indices.shape)}; allowed: [total]")
    _check_device("indices", indices, name, rows)


def _check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"flash_attn_mini: {name} is on {value.device}; allowed: the device of {other_name}, {other.device}"
        )


def _size(name: str, value: Any) -> Any:
    size = as_length(name, value)
    if size < 0:
        raise ValueError(f"flash_attn_mini: {name} is {size}; allowed: 0 or more")
    return size


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensor(name, mask)
    if mask.is_complex():
        raise wrong_type(name, mask.dtype, "a tensor of bool or integers")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"flash_attn_mini: {name} has shape {list(mask.shape)}; allowed: {list(hidden_states.shape[:2])}, "
            "the batch and sequence length of hidden_states"
        )
    _check_device(name, mask, "hidden_states", hidden_states)


def _as_bool(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    _check_mask(name, mask, hidden_states)
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"flash_attn_mini: {name} holds numbers other than 0 and 1, like a mask that is added to scores, or like "
            "lengths; allowed: bool, or 1 for the tokens that count and 0 for the others"
        )
    return mask == 1
