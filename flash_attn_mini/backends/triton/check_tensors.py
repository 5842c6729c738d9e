"""Checks of one tensor or two, which checks.py and checks_kvcache.py share. csrc/api/check_tensors.cpp has the same."""

from __future__ import annotations

import os

import torch
from torch import Tensor

DTYPES = {
    "triton": (torch.float16, torch.bfloat16, torch.float32),
    "reference": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
MAX_INT = 2**31 - 1
MAX_ROWS = MAX_INT // 4  # rows of a tensor: no distance of two positions overflows in a kernel


def _interval(x: Tensor) -> tuple[int, int]:
    """The bytes from the first to the last element."""
    begin = x.data_ptr()
    if x.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """True if the intervals of memory of two tensors overlap."""
    (x_begin, x_end), (y_begin, y_end) = _interval(x), _interval(y)
    return x_begin < y_end and y_begin < x_end


def shape_of(x: Tensor) -> list[int]:
    """The shape as a list, as messages show it."""
    return list(x.shape)


def dtype_of(x: Tensor) -> str:
    """The name of the dtype that C++ has: Half, Float, Long."""
    return torch.empty(0, dtype=x.dtype).type().removeprefix("torch.").removesuffix("Tensor")


def check_rank(name: str, x: Tensor, rank: int, shape: str) -> None:
    """Raise ValueError unless x has this many dimensions."""
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {shape_of(x)} ({x.ndim} dimensions); allowed: {rank} dimensions {shape}")


def check_dtype(name: str, x: Tensor, backend: str) -> None:
    """Raise TypeError unless the backend computes in the dtype of x."""
    if x.dtype not in DTYPES[backend]:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[backend])
        raise TypeError(f"{name} has dtype {dtype_of(x)}; allowed on the {backend} backend: {allowed}")


def check_same_device(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError unless x is on the device of q."""
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; allowed: the device of q, {q.device}")


def check_same_kind(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless x has the dtype and the device of q."""
    if x.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {dtype_of(x)}; allowed: that of q, {dtype_of(q)}")
    check_same_device(name, x, q)


def check_same_size(name: str, x: Tensor, like_name: str, like: Tensor, dim: int, dim_name: str) -> None:
    """Raise ValueError unless one dimension of both tensors has the same size."""
    if x.shape[dim] != like.shape[dim]:
        raise ValueError(
            f"{name} has {dim_name} {x.shape[dim]} (shape {shape_of(x)}); allowed: the {dim_name} of {like_name}, "
            f"{like.shape[dim]}"
        )


def check_same_shape(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless both tensors have the same shape."""
    if x.shape != like.shape:
        raise ValueError(f"{name} has shape {shape_of(x)}; allowed: the shape of {like_name}, {shape_of(like)}")


def check_shape_of_out(name: str, x: Tensor, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless x, which is out or its gradient, has the shape of q with the head dim of v."""
    shape = [*q.shape[:-1], v.shape[-1]]
    if shape_of(x) != shape:
        raise ValueError(f"{name} has shape {shape_of(x)}; allowed: the shape of q with the headdim of v, {shape}")


def check_at_most(name: str, x: Tensor, dim: int, most: int, dim_name: str) -> None:
    """Raise ValueError if a dimension of x is larger than `most`."""
    if x.shape[dim] > most:
        raise ValueError(f"{name} has shape {shape_of(x)}; allowed: {dim_name} up to {most}")


def check_last_dim_contiguous(name: str, x: Tensor) -> None:
    """Raise ValueError unless neighbours in the last dimension are neighbours in memory."""
    if x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel() > 0:
        raise ValueError(
            f"{name} has strides {list(x.stride())}; allowed: a contiguous last dimension (stride 1), for example "
            f"{name}.contiguous()"
        )


def check_contiguous(name: str, x: Tensor) -> None:
    """Raise ValueError unless x is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {list(x.stride())}; allowed: contiguous")


def check_index(name: str, x: Tensor, q: Tensor) -> None:
    """A tensor of lengths or indices."""
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {dtype_of(x)}; allowed: int32")
    if x.is_neg():
        raise ValueError(f"{name} is a lazily negated view; allowed: numbers in memory as they are")
    check_same_device(name, x, q)


def check_block_table(table: Tensor, pages_name: str, pages: Tensor, q: Tensor, batch: int) -> None:
    """Raise unless the table is int32 ``[batch, max_pages]`` and its pages have rows that kernels can count."""
    check_index("block_table", table, q)
    page_size = pages.shape[1]
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table has shape {shape_of(table)}; allowed: [batch, max_blocks] with batch {batch}")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(
            f"block_table has strides {list(table.stride())}; allowed: a contiguous last dimension (stride 1), for "
            "example block_table.contiguous()"
        )
    if page_size < 1:
        raise ValueError(f"{pages_name} has pages of 0 keys (shape {shape_of(pages)}); allowed: at least 1")
    if table.shape[1] > MAX_ROWS // page_size:
        raise ValueError(
            f"block_table has shape {shape_of(table)}; allowed: up to {MAX_ROWS // page_size} pages of {page_size} "
            "keys for each sequence"
        )


def check_page(page: int, bidb: int, column: int, num_pages: int) -> None:
    """Raise ValueError unless the page exists."""
    if not 0 <= page < num_pages:
        pages = "none, because the cache has no pages" if num_pages == 0 else f"0 to {num_pages - 1}"
        raise ValueError(f"block_table has page {page} at [{bidb}, {column}]; allowed: {pages}")


def check_written(name: str, x: Tensor, q: Tensor) -> None:
    """A tensor that a kernel writes, of a checked shape."""
    check_same_kind(name, x, q)
    check_last_dim_contiguous(name, x)
    if x.numel() > 0 and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{name} has strides {list(x.stride())} (shape {shape_of(x)}); allowed: every element in memory of its own"
        )


def _is_dense(x: Tensor) -> bool:
    """True if the elements fill an interval of memory and none shares its memory with another."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """True for one tensor, and for dense ones whose memory overlaps; other tensors are not compared."""
    return x is y or (x.numel() > 0 and y.numel() > 0 and _is_dense(x) and _is_dense(y) and overlap(x, y))


def may_read(x: Tensor) -> bool:
    """True if values of x may be read on the host."""
    return x.is_cpu or checks_values()


def checks_values() -> bool:
    """True if FLASH_ATTN_MINI_CHECK asks for checks that wait for the GPU."""
    return os.environ.get("FLASH_ATTN_MINI_CHECK", "0") not in ("", "0")
