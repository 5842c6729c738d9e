"""The public functions for q, k and v, or k and v, in one tensor.

The kernels read views of that tensor and write to views of its gradient: nothing is copied or concatenated.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops, tracing
from .argument_checks import WindowSize, as_flag, as_length, as_sequences, check_packed, check_tensor, checked_options
from .official import results_of
from .options import Options, Sequences
from .s_dmask import s_dmask_or_empty

Result = torch.Tensor | tuple[torch.Tensor, ...]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor. Its gradient is one tensor of the same shape.

    Args:
        qkv: ``[batch, seqlen, 3, nheads, headdim]``, the last dimension contiguous.

    The other arguments, their defaults, the result and the errors are those of `flash_attn_func`;
    out is ``[batch, seqlen, nheads, headdim]``.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 128, 3, 8, 64), causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    check_packed("qkv", qkv, 3, "[batch, seqlen, 3, nheads, headdim]")
    options = checked_options(
        qkv,
        qkv,
        qkv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        backend,
        learnable_sink,
        key_ranges,
        attn_bias,
        return_max_logits,
    )
    if tracing.enabled():
        tracing.trace("flash_attn_qkvpacked_func", qkv=qkv, causal=causal)
    return _attend(None, qkv, None, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> Result:
    """`flash_attn_func` of q, and of k and v in one tensor. The gradient of kv is one tensor of the same shape.

    Args:
        kv: ``[batch, seqlen_k, 2, nheads_k, headdim]``, the last dimension contiguous.

    The other arguments, their defaults, the result and the errors are those of `flash_attn_func`;
    out is shaped like q.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 128, 8, 64), torch.randn(2, 256, 2, 2, 64), causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    check_packed("kv", kv, 2, "[batch, seqlen_k, 2, nheads_k, headdim]")
    options = checked_options(
        q,
        kv,
        kv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        backend,
        learnable_sink,
        key_ranges,
        attn_bias,
        return_max_logits,
    )
    if tracing.enabled():
        tracing.trace("flash_attn_kvpacked_func", q=q, kv=kv, causal=causal)
    return _attend(q, kv, None, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor. Its gradient is one tensor of the same shape.

    Args:
        qkv: ``[total, 3, nheads, headdim]``, the last dimension contiguous.
        cu_seqlens: int32 ``[batch + 1]`` on the device of qkv: the first row of each sequence, and the end of the last.
        max_seqlen: The length of the longest sequence, or more.

    The other arguments, their defaults, the result and the errors are those of `flash_attn_varlen_func`;
    out is ``[total, nheads, headdim]``.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_varlen_qkvpacked_func
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)  # sequences of 5 and 7 tokens
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(12, 3, 8, 64), cu_seqlens, 7, causal=True).shape
        torch.Size([12, 8, 64])
    """
    check_packed("qkv", qkv, 3, "[total, 3, nheads, headdim]")
    options = checked_options(
        qkv,
        qkv,
        qkv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        backend,
        learnable_sink,
        key_ranges,
        None,  # attn_bias
        return_max_logits,
    )
    check_tensor("cu_seqlens", cu_seqlens)
    max_seqlen = as_length("max_seqlen", max_seqlen)
    sequences = as_sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if tracing.enabled():
        tracing.trace("flash_attn_varlen_qkvpacked_func", qkv=qkv, cu_seqlens=cu_seqlens, causal=causal)
    return _attend(None, qkv, sequences, options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, and of k and v in one tensor. The gradient of kv is one tensor of the same shape.

    Args:
        kv: ``[total_k, 2, nheads_k, headdim]``, the last dimension contiguous.

    The other arguments, their defaults, the result and the errors are those of `flash_attn_varlen_func`;
    out is shaped like q.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_varlen_kvpacked_func
        >>> cu_seqlens_q, cu_seqlens_k = torch.tensor([[0, 2, 3], [0, 5, 12]], dtype=torch.int32)
        >>> q, kv = torch.randn(3, 8, 64), torch.randn(12, 2, 2, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 2, 7, causal=True).shape
        torch.Size([3, 8, 64])
    """
    check_packed("kv", kv, 2, "[total_k, 2, nheads_k, headdim]")
    options = checked_options(
        q,
        kv,
        kv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        backend,
        learnable_sink,
        key_ranges,
        None,  # attn_bias
        return_max_logits,
    )
    sequences = as_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if tracing.enabled():
        tracing.trace("flash_attn_varlen_kvpacked_func", q=q, kv=kv, cu_seqlens_q=cu_seqlens_q, causal=causal)
    return _attend(q, kv, sequences, options, return_attn_probs)


def _attend(
    q: torch.Tensor | None,
    packed: torch.Tensor,
    sequences: Sequences | None,
    options: Options,
    return_attn_probs: Any,
) -> Result:
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    out, softmax_lse, rng_state, max_logits = ops.packed_forward(q, packed, sequences, options)
    if not return_attn_probs:
        return results_of(out, None, max_logits)
    first, second, *_ = packed.unbind(ops.PACKED_DIM)
    q, k = (first, second) if q is None else (q, first)
    return results_of(out, (softmax_lse, s_dmask_or_empty(q, k, rng_state, sequences, options)), max_logits)
