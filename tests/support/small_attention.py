"""Small inputs for tests of autograd, compilation and dispatch, and PyTorch's attention on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def qkv(device: str, dtype: torch.dtype = torch.float16, requires_grad: bool = True, headdim: int = 16) -> list[Tensor]:
    """q [2, 9, 4, headdim], k and v [2, 13, 2, headdim]."""
    shapes = [(2, 9, 4, headdim), (2, 13, 2, headdim), (2, 13, 2, headdim)]
    return [torch.randn(s, device=device).to(dtype).requires_grad_(requires_grad) for s in shapes]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's attention on [batch, seqlen, heads, headdim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)
