"""A paged cache: the places of the tokens of a sequence. Used by varlen.py and kvcache.py.

PagedAttention (Kwon et al., arXiv 2309.06180): a table lists the pages of each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_slots(block_table: Tensor, bidb: int, start: int, stop: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The page and the row within it of tokens ``start .. stop-1`` of sequence `bidb`.

    Args:
        block_table: integer ``[batch, max_blocks]``; entry (b, n) is the page of tokens
            ``n * page_size .. (n + 1) * page_size - 1`` of sequence b.

    Returns:
        pages and rows, int64 ``[stop - start]`` each.
    """
    capacity = block_table.shape[1] * page_size
    if stop > capacity:
        raise ValueError(f"sequence {bidb} has {stop} tokens, block_table holds {capacity}")
    token = torch.arange(start, stop, device=block_table.device)
    pages = block_table[bidb].long()[token // page_size]
    return pages, token % page_size


def read_pages(cache: Tensor, block_table: Tensor, bidb: int, start: int, stop: int) -> Tensor:
    """Tokens ``start .. stop-1`` of sequence `bidb`, ``[stop - start, nheads_k, headdim]``.

    Args:
        cache: ``[num_blocks, page_size, nheads_k, headdim]``.
    """
    pages, rows = page_slots(block_table, bidb, start, stop, cache.shape[1])
    return cache[pages, rows]
