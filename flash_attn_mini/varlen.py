"""The public functions for sequences of different lengths, laid end to end without padding (varlen)."""

from __future__ import annotations

import torch

from . import ops, tracing
from .argument_checks import (
    WindowSize,
    as_flag,
    as_float,
    as_sequences,
    check_backward_tensors,
    checked_options,
)
from .official import backward_into, empty_rng_state, results_of
from .s_dmask import s_dmask_or_empty


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    block_table: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    backend: str | None = None,
    return_max_logits: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`flash_attn_func` within each sequence of a batch whose sequences have different lengths, without padding.

    Sequence b is rows ``cu_seqlens[b] .. cu_seqlens[b + 1] - 1``. Masks and ALiBi are aligned to the end of each
    sequence. Sequences may be empty, and their number has no limit. Nothing waits for the GPU: only the kernels read
    cu_seqlens and block_table. They are checked on the host for CPU tensors, and on a GPU if FLASH_ATTN_MINI_CHECK=1.
    Without that check, wrong values on a GPU give wrong rows, and no access outside of the tensors.

    Args:
        q: Queries, ``[total_q, nheads, headdim]``.
        k: Keys, ``[total_k, nheads_k, headdim]``; with a block_table ``[num_pages, page_size, nheads_k, headdim]``.
        v: Values, shaped like k but for their head dim, which may be another one.
        cu_seqlens_q: int32 ``[batch + 1]`` on the device of q: the first row of each sequence in q, from 0, and
            total_q as the end of the last.
        cu_seqlens_k: int32 ``[batch + 1]``, the same for k and v. With a block_table only its differences count: the
            numbers of keys.
        max_seqlen_q: The length of the longest sequence of q, or more. A tensor of one integer on a GPU makes the call
            wait for it.
        max_seqlen_k: The length of the longest sequence of k, or more.
        alibi_slopes: As in `flash_attn_func`; ``[batch, nheads]`` has slopes for each sequence.
        block_table: int32 ``[batch, max_pages]``: key n of sequence b is row ``n % page_size`` of page
            ``block_table[b, n // page_size]``. The forward runs also with inputs that require a gradient; the
            backward raises NotImplementedError.
        learnable_sink: ``[nheads]``; see `flash_attn_func`.
        key_ranges: int32 ``[1 or nheads, total_q, 2]`` or ``[1 or nheads, total_q, 2, 2]``, in keys of the query's
            sequence, from 0; see `flash_attn_func`. Not together with block_table.

    The other arguments, their defaults and the errors are those of `flash_attn_func`.

    Returns:
        out, ``[total_q, nheads, headdim_v]``; or with ``return_attn_probs`` also softmax_lse ``[nheads, total_q]`` and
        S_dmask ``[batch, nheads, max_seqlen_q, max_seqlen_k]``, both lengths rounded up to a multiple of 128. With
        ``return_max_logits`` the last result is max_logits ``[nheads]``, of all sequences together.

    Example:
        >>> import torch
        >>> from flash_attn_mini import flash_attn_varlen_func
        >>> cu_seqlens = torch.tensor([0, 5, 5, 12], dtype=torch.int32)  # sequences of 5, 0 and 7 tokens
        >>> q, k, v = torch.randn(3, 12, 8, 64)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
        torch.Size([12, 8, 64])
    """
    options = checked_options(
        q,
        k,
        v,
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
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    sequences = as_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    if tracing.enabled():
        tracing.trace("flash_attn_varlen_func", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, causal=causal)
    out, softmax_lse, rng_state, max_logits = ops.forward(q, k, v, sequences, options)
    probs = (softmax_lse, s_dmask_or_empty(q, k, rng_state, sequences, options)) if return_attn_probs else None
    return results_of(out, probs, max_logits)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward with the official signature, for code that defines its own autograd function.

    Arguments, backend and errors are those of `flash_attn_varlen_func`; ``return_softmax`` requests S_dmask. leftpad_k
    and seqused_k are not implemented. zero_tensors changes nothing, because every element of the results is written.

    Returns:
        out, softmax_lse and S_dmask as `flash_attn_varlen_func` returns them, and rng_state, int64 ``[2]``, empty
        without dropout.
    """
    for name, value in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if value is not None:
            raise NotImplementedError(
                f"flash_attn_mini: {name} is not implemented in this version; backends that have it: none. "
                "Available now: cu_seqlens_k of the keys that are used"
            )
    window_size = (window_size_left, window_size_right)
    softmax_scale = as_float("softmax_scale", softmax_scale, "a finite number")
    return_softmax = as_flag("return_softmax", return_softmax)
    sequences = as_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    options = checked_options(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, False, None
    )
    out, softmax_lse, rng_state, _ = ops.forward(q, k, v, sequences, options)
    S_dmask = s_dmask_or_empty(q, k, rng_state if return_softmax else None, sequences, options)
    return out, softmax_lse, S_dmask, empty_rng_state(q) if rng_state is None else rng_state


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """The backward with the official signature: writes dq, dk and dv in place.

    Arguments and errors are those of `_flash_attn_backward` and `flash_attn_varlen_func`; zero_tensors changes nothing.

    Returns:
        softmax_d, the sum over headdim of ``dout * out``, in the dtype of softmax_lse, ``[nheads, (total_q // 128 +
        batch) * 128]``. Sequence b begins at ``(cu_seqlens_q[b] // 128 + b) * 128``. Elements between sequences are
        undefined.
    """
    window_size = (window_size_left, window_size_right)
    softmax_scale = as_float("softmax_scale", softmax_scale, "a finite number")
    sequences = as_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_backward_tensors(dout, out, softmax_lse, dq, dk, dv, rng_state)
    options = checked_options(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None
    )
    return backward_into((dq, dk, dv), dout, q, k, v, out, softmax_lse, sequences, options, rng_state)
