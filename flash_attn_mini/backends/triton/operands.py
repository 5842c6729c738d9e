"""Tensors as the Triton kernels take them: a tuple of pointer and strides, or a TMA descriptor."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .interpreter import INTERPRETED

_thread = threading.local()


def pointer_and_strides(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(tensor, strides of batch, head and row) of ``[batch, seqlen, heads, headdim]``.

    torch may have any stride for a dimension of one element. It is 16 here, to avoid the compilation of another kernel.
    """
    batch, seqlen, heads, _ = tensor.shape
    stride_b, stride_s, stride_h, _ = tensor.stride()
    return (
        tensor,
        stride_b if batch > 1 else 16,
        stride_h if heads > 1 else 16,
        stride_s if seqlen > 1 else 16,
    )


def with_rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` ``[batch, seqlen, heads, headdim]``, or a copy if its rows or heads begin one element apart.

    Used for operands of a matrix product. Triton 3.6 loads a tile with such rows across the head dim, and the product
    then reads shared memory out of range. A head dim of 1 and overlapping views have such rows.
    """
    batch, seqlen, heads, head_dim = tensor.shape
    if (seqlen == 1 or tensor.stride(1) != 1) and (heads == 1 or tensor.stride(2) != 1):
        return tensor
    copy = tensor.new_empty((batch, seqlen, heads, head_dim_block(head_dim)))[..., :head_dim]
    return copy.copy_(tensor)


def operand(
    tensor: torch.Tensor, block_rows: int, use_tma: bool, begin_row: int = 0, block_columns: int | None = None
) -> Any:
    """A tensor that a kernel reads with tiles.load_rows in blocks of ``block_rows`` and ``block_columns``.

    The columns are those of `head_dim_block` if not given.

    The descriptor covers the rows from ``begin_row`` on as [batch, heads, rows, headdim]. Elements outside of it are
    read as zero.
    """
    if not use_tma:
        return pointer_and_strides(tensor)
    batch, seqlen, heads, head_dim = tensor.shape
    base, stride_b, stride_h, stride_s = pointer_and_strides(tensor)
    if begin_row > 0:
        base = tensor[:, begin_row:]
    shape = [batch, heads, seqlen - begin_row, head_dim]
    columns = head_dim_block(head_dim) if block_columns is None else block_columns
    return unchecked_descriptor(base, shape, [stride_b, stride_h, stride_s, 1], [1, 1, block_rows, columns])


def unchecked_descriptor(
    base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int]
) -> TensorDescriptor:
    """A TensorDescriptor without the checks of its constructor, which are most of its cost. See `tma_reaches`."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = base, shape, strides, block_shape
    return made


def head_dim_block(head_dim: int) -> int:
    """The head dim rounded up to a power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def value_block(head_dim: int, head_dim_v: int) -> int:
    """The columns of a tile of v, at least those of k up to 64.

    With Triton 3.6 on an H200, tiles of 16 and 32 columns of v and 64 of k, loaded by pointers, gave wrong results.
    """
    return max(head_dim_block(head_dim_v), min(head_dim_block(head_dim), 64))


@cache
def has_tma(device: torch.device) -> bool:
    """True if the GPU has a tensor memory accelerator: Hopper and later. Interpreted kernels do not use it."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tma_reaches(*tensors: torch.Tensor) -> bool:
    """True if TMA can address the tensors, which are on one GPU: base and strides on 16 bytes, no stride of 0.

    Written without generators, which would double its time.
    """
    if not has_tma(tensors[0].device):
        return False
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            return False
        itemsize = tensor.element_size()
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
            if size != 1 and (stride <= 0 or stride * itemsize % 16):
                return False
    return True


def bind_context(device: torch.device) -> None:
    """Make the device's context current in this thread. A TMA descriptor needs one and does not create it."""
    if INTERPRETED:
        return
    bound = _thread.__dict__.setdefault("devices", set())
    if device not in bound:
        torch.cuda.mem_get_info(device)
        bound.add(device)
