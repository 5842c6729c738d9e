"""`merge.merge_into` as one Triton kernel: a pass over out, where PyTorch's operators make several."""

# Kernels are written in Triton's language, not Python's: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 32


@triton.jit
def merge_kernel(
    out_ptr,  # [batch, rows, nheads, headdim], headdim contiguous
    lse_ptr,  # [batch, nheads, rows]
    part_ptr,  # like out
    part_lse_ptr,  # like lse
    rows,
    nheads,
    headdim,
    out_batch_stride,
    out_row_stride,
    out_head_stride,
    lse_batch_stride,
    lse_head_stride,
    lse_row_stride,
    part_batch_stride,
    part_row_stride,
    part_head_stride,
    part_lse_batch_stride,
    part_lse_head_stride,
    part_lse_row_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge BLOCK_ROWS rows of one head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    batch = (tl.program_id(1) // nheads).to(tl.int64)
    head = (tl.program_id(1) % nheads).to(tl.int64)
    column = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    is_row = row < rows
    is_element = is_row[:, None] & (column < headdim)[None, :]

    lse_place = lse_ptr + batch * lse_batch_stride + head * lse_head_stride + row * lse_row_stride
    part_lse_place = (
        part_lse_ptr + batch * part_lse_batch_stride + head * part_lse_head_stride + row * part_lse_row_stride
    )
    lse = tl.load(lse_place, mask=is_row, other=float("-inf"))
    part_lse = tl.load(part_lse_place, mask=is_row, other=float("-inf"))
    largest = tl.maximum(lse, part_lse)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # rows without keys: both weights become 0
    kept = tl.exp(lse - base)
    added = tl.exp(part_lse - base)
    total = kept + added
    scale = tl.where(total == 0.0, 0.0, 1.0 / total)

    out_place = out_ptr + batch * out_batch_stride + head * out_head_stride
    out_place += row[:, None] * out_row_stride + column[None, :]
    part_place = part_ptr + batch * part_batch_stride + head * part_head_stride
    part_place += row[:, None] * part_row_stride + column[None, :]
    out = tl.load(out_place, mask=is_element, other=0.0)
    part = tl.load(part_place, mask=is_element, other=0.0).to(out.dtype)
    tl.store(out_place, out * (kept * scale)[:, None] + part * (added * scale)[:, None], mask=is_element)
    tl.store(lse_place, base + tl.log(total), mask=is_row)


def merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Arguments as `merge.merge_into` takes them."""
    batch, rows, nheads, headdim = out.shape
    if out.numel() == 0:
        return
    grid = (triton.cdiv(rows, BLOCK_ROWS), batch * nheads)
    with torch.cuda.device_of(out):
        merge_kernel[grid](
            out,
            lse,
            part,
            part_lse,
            rows,
            nheads,
            headdim,
            *out.stride()[:3],
            *lse.stride(),
            *part.stride()[:3],
            *part_lse.stride(),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_D=triton.next_power_of_2(headdim),
        )
