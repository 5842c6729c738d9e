"""Tensors inside poisoned buffers: a kernel that reads past its input gets NaN, and a write past it is detected.

Builds every layout that `cases.py` names. The buffer of a tensor is its `_base`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

MARGIN = 128  # elements of poison before and after a tensor; keeps a 16-bit tensor on a 256-byte boundary
FAR_ROW_STRIDE = 1 << 24  # elements; 192 rows pass 2^31 elements
FAR_BATCH_STRIDE = (1 << 31) + 64  # elements


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str, poison: float = math.nan) -> Tensor:
    """An unset contiguous tensor with MARGIN elements of poison on either side; it is itself full of poison."""
    numel = math.prod(shape)
    buffer = torch.full((numel + 2 * MARGIN,), poison, dtype=dtype, device=device)
    return buffer[MARGIN : MARGIN + numel].view(shape)


class Guard:
    """Keeps a copy of the whole buffer of each tensor; `check` fails if any byte has changed since."""

    def __init__(self, *tensors: Tensor) -> None:
        self._buffers = {t._base.data_ptr(): t._base for t in tensors if t._base is not None}
        assert len(self._buffers) > 0, "give tensors made by poison.py"
        self._before = {key: buffer.clone() for key, buffer in self._buffers.items()}

    def check(self) -> None:
        for key, buffer in self._buffers.items():
            now, before = buffer.view(torch.uint8), self._before[key].view(torch.uint8)
            changed = (now != before).nonzero()
            assert changed.numel() == 0, f"{len(changed)} bytes written in or around an input, first at {changed[0]}"


class PoisonIntact:
    """For an output tensor: `check` fails if its buffer has changed outside of the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        base = tensor._base
        assert base is not None, "give a tensor made by poison.py"
        self._base, self._before = base, base.clone()
        self._outside = torch.ones(base.shape, dtype=torch.bool, device=base.device)
        self._outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)

    def check(self) -> None:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self._base.element_size()]
        changed = (self._base.view(bits) != self._before.view(bits)) & self._outside
        assert not changed.any(), f"{int(changed.sum())} elements written outside, first at {changed.nonzero()[0]}"


# ---- layouts: (q shape, k shape) -> q, k, v as views of poisoned buffers ------------------------------------------

Shape = tuple[int, int, int, int]  # batch, seqlen, heads, headdim
Alloc = Callable[[tuple[int, ...]], Tensor]


def _each(make: Callable[[Alloc, Shape], Tensor]) -> Callable[[Alloc, Shape, Shape], tuple[Tensor, Tensor, Tensor]]:
    return lambda alloc, q, k: (make(alloc, q), make(alloc, k), make(alloc, k))


def _bhsd(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], s[2], s[1], s[3])).transpose(1, 2)


def _sbhd(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[1], s[0], s[2], s[3])).transpose(0, 1)


def _padded_dim(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((*s[:3], -(-(s[3] + 1) // 16) * 16))[..., : s[3]]


def _misaligned(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((*s[:3], s[3] + 1))[..., 1:]


def _odd_start(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((math.prod(s) + 8,))[1 : 1 + math.prod(s)].view(s)


def _expanded(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((1, *s[1:])).expand(s)


def _expanded_heads(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], s[1], 1, s[3])).expand(s)


def _strided_rows(alloc: Alloc, s: Shape) -> Tensor:
    return alloc((s[0], 3 * s[1], s[2], s[3]))[:, ::3][:, : s[1]]


def _packed(alloc: Alloc, q: Shape, k: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in one tensor when their lengths agree, otherwise k and v in one."""
    heads, heads_k = q[2], k[2]
    if q[:2] == k[:2]:
        qkv = alloc((q[0], q[1], heads + 2 * heads_k, q[3]))
        return qkv[:, :, :heads], qkv[:, :, heads : heads + heads_k], qkv[:, :, heads + heads_k :]
    kv = alloc((k[0], k[1], 2, heads_k, k[3]))
    return alloc(q), kv[:, :, 0], kv[:, :, 1]


def _far(alloc: Alloc, q: Shape, k: Shape, batch_stride: int, row_stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v side by side in rows so far apart that the last element's offset needs more than 31 bits.

    Only the rows and their margins are written: on a CPU the rest of the buffer never becomes memory.
    """
    width_q, width_k = q[2] * q[3], k[2] * k[3]
    width = width_q + 2 * width_k + 2 * MARGIN
    rows = max(q[1], k[1])
    numel = (q[0] - 1) * batch_stride + (rows - 1) * row_stride + width
    assert numel > 1 << 31, "not far enough for a 64-bit offset"
    like = alloc((1,))
    buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
    buffer.as_strided((q[0], rows, width), (batch_stride, row_stride, 1)).fill_(like[0])

    def view(shape: Shape, column: int) -> Tensor:
        return buffer.as_strided(shape, (batch_stride, row_stride, shape[3], 1), MARGIN + column)

    return view(q, 0), view(k, width_q), view(k, width_q + width_k)


LAYOUTS: dict[str, Callable[[Alloc, Shape, Shape], tuple[Tensor, Tensor, Tensor]]] = {
    "bshd": _each(lambda alloc, s: alloc(s)),
    "bhsd": _each(_bhsd),
    "sbhd": _each(_sbhd),
    "packed": _packed,
    "padded_dim": _each(_padded_dim),
    "misaligned": _each(_misaligned),
    "odd_start": _each(_odd_start),
    "strided_rows": _each(_strided_rows),
    "expanded": _each(_expanded),
    "expanded_heads": _each(_expanded_heads),
    "far_rows": lambda alloc, q, k: _far(alloc, q, k, 192 * FAR_ROW_STRIDE, FAR_ROW_STRIDE),
    "far_batches": lambda alloc, q, k: _far(alloc, q, k, FAR_BATCH_STRIDE, 4096),
}


def laid_out(layout: str, alloc: Alloc, q: Shape, k: Shape, headdim_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in a layout. A v with a head dim of its own has a buffer of its own."""
    made = LAYOUTS[layout](alloc, q, k)
    if headdim_v == k[3]:
        return made
    return *made[:2], LAYOUTS[layout](alloc, (*q[:3], headdim_v), (*k[:3], headdim_v))[2]


def memory_shortage(gib: float, device: str) -> str | None:
    """A message if the device has less than `gib` GiB, else None. On a CPU: of physical memory in all."""
    if device == "cuda":
        have = torch.cuda.mem_get_info()[0]
    else:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None if have >= gib * 2**30 else f"needs {gib:.0f} GiB of memory, this machine has {have / 2**30:.0f}"
