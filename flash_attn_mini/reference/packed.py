"""The packed forms: q, k and v, or k and v, in one tensor along a dimension of 3 or 2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .attention import attention_reference
from .varlen import attention_varlen_reference


def attention_qkvpacked_reference(qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention_reference` of qkv ``[batch, seqlen, 3, nheads, headdim]``."""
    q, k, v = qkv.unbind(dim=2)
    return attention_reference(q, k, v, **options)


def attention_kvpacked_reference(q: Tensor, kv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention_reference` of q and of kv ``[batch, seqlen_k, 2, nheads_k, headdim]``."""
    k, v = kv.unbind(dim=2)
    return attention_reference(q, k, v, **options)


def attention_varlen_qkvpacked_reference(qkv: Tensor, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention_varlen_reference` of qkv ``[total, 3, nheads, headdim]``; cu_seqlens is that of queries and keys."""
    q, k, v = qkv.unbind(dim=1)
    return attention_varlen_reference(q, k, v, cu_seqlens, cu_seqlens, **options)


def attention_varlen_kvpacked_reference(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`attention_varlen_reference` of q ``[total_q, nheads, headdim]`` and kv ``[total_k, 2, nheads_k, headdim]``."""
    k, v = kv.unbind(dim=1)
    return attention_varlen_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
