"""The Triton backend: the kernels of forward and backward, the tile sizes they may use, and what picks among them.

The chains: torch.ops.flash_attn_mini._flash_attn_forward -> forward (here) -> launch.forward -> flash_fwd_kernel, and
torch.ops.flash_attn_mini._flash_attn_backward -> backward (here) -> launch_bwd.backward -> flash_bwd_dq_kernel, then
flash_bwd_dkv_kernel; with variable lengths, varlen_forward and varlen_backward stand in their place. Nothing
here needs the compiled extension, and Triton itself is imported at the first call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache

import torch

from .options import Options

__all__ = ["backward", "forward", "unavailable_reason", "varlen_backward", "varlen_forward"]

Wanted = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]

MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 4)  # TensorDescriptor, and autotuning results kept on disk


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend can run on ``device``, else one sentence that says why it cannot."""
    reason = _triton_missing_reason()
    if reason is not None:
        return reason
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
        return None
    if device.type != "cuda":
        return f"the triton backend needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the triton backend needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
    return None


@cache
def _triton_missing_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name: no telling how old it is
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"the triton backend needs triton 3.4 or newer; version {version} is installed"
    return None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of checked arguments.

    Args:
        q: ``[batch, seqlen_q, nheads, headdim]``, float16, bfloat16 or float32; any strides with a last one of 1.
        k: ``[batch, seqlen_k, nheads_k, headdim]``, likewise; nheads is a multiple of nheads_k.
        v: Like k.
        softmax_scale: What the scores are multiplied with.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.
        window_size: ``(left, right)``: query i sees key j only when ``i + seqlen_k - seqlen_q - left <= j <= i +
            seqlen_k - seqlen_q + right``; -1 is unbounded. Keys that no query of a block sees cost nothing.
        softcap: If positive, a scaled score s becomes ``softcap * tanh(s / softcap)``.
        alibi_slopes: float32 ``[nheads]`` or ``[batch, nheads]``: scores get ``-slope * |i + seqlen_k - seqlen_q -
            j|``, after softcap.
        dropout_p: Probabilities are dropped with this probability, others multiplied with ``1 / (1 - dropout_p)``.
        rng_state: int64 ``[2]`` on q's device, with dropout: seed and offset, which decide what is dropped.

    Returns:
        ``out`` like q, contiguous, and ``softmax_lse`` float32 ``[batch, nheads, seqlen_q]``, natural logarithm. A
        query that sees no key has out 0 and lse -inf.
    """
    from . import launch

    return launch.forward(
        q, k, v, Options(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, rng_state)
    )


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention within each sequence of a batch, of checked arguments. Nothing waits for the GPU.

    Args:
        q: ``[total_q, nheads, headdim]``: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k: ``[total_k, nheads_k, headdim]``, likewise; with a block table ``[pages, page_size, nheads_k, headdim]``.
        v: Like k.
        cu_seqlens_q: int32 ``[batch + 1]`` on q's device, rising from 0 to total_q.
        cu_seqlens_k: Likewise; with a block table only its differences count.
        max_seqlen_q: Queries of the longest sequence. A mask too wide to matter by it is left out.
        max_seqlen_k: Keys of the longest sequence, likewise.
        block_table: int32 ``[batch, most pages]``: key j of sequence b is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``.
        Others as in `forward`, counted within each sequence.

    Returns:
        ``out`` like q, contiguous, and ``softmax_lse`` float32 ``[nheads, total_q]``.
    """
    from . import launch

    options = Options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, rng_state,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
    )  # fmt: skip
    return launch.forward(q, k, v, options)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    into: Wanted = (None, None, None),
) -> Gradients:
    """Gradients of exact attention, of checked arguments. The same inputs give the same bits, always.

    P = exp(score - lse), delta = rowsum(dout * out) - dlse, dS = P * (dout v^T - delta); then dv = P^T dout,
    dq = scale * dS k and dk = scale * dS^T q (Dao 2023, arXiv:2307.08691, section 3.1.2; delta takes in the gradient
    of the lse). With dropout, P in dv and dout v^T are 0 where dropped and multiplied with 1 / (1 - dropout_p)
    elsewhere; with softcap, dS is multiplied with 1 - tanh^2.

    Args:
        dout: The gradient of out, ``[batch, seqlen_q, nheads, headdim]``, of q's dtype; any strides.
        q: ``[batch, seqlen_q, nheads, headdim]``, float16, bfloat16 or float32; any strides with a last one of 1.
        k: ``[batch, seqlen_k, nheads_k, headdim]``, likewise; nheads is a multiple of nheads_k.
        v: Like k.
        out: What the forward returned, like q.
        softmax_lse: What the forward returned, float32 ``[batch, nheads, seqlen_q]``.
        dsoftmax_lse: The gradient of softmax_lse, likewise; None for zeros.
        softmax_scale: What the scores were multiplied with; any finite number.
        causal: Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``.
        window_size: From here to rng_state as the forward had them.
        output_mask: Which of dq, dk, dv are wanted; the others are not computed.
        into: Tensors to write dq, dk and dv to, any strides with a last one of 1; None for new ones.

    Returns:
        ``dq`` like q, ``dk`` and ``dv`` like k, strides too, None where not wanted; and delta, float32 ``[batch,
        nheads, seqlen_q rounded up to a multiple of 128]``, 0 past seqlen_q. A query that sees no key has dq 0 and
        delta 0, whatever arrives at its lse, and adds nothing to dk and dv.
    """
    from . import launch_bwd

    options = Options(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, rng_state)
    return launch_bwd.backward(dout, q, k, v, out, softmax_lse, dsoftmax_lse, options, output_mask, into)


def varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    into: Wanted = (None, None, None),
) -> Gradients:
    """Gradients of `varlen_forward` without a block table; layouts as there, all else as in `backward`.

    Returns:
        ``dq``, ``dk``, ``dv``, None where not wanted; and delta, float32 ``[nheads, (total_q // 128 + batch) * 128]``,
        where sequence b begins at ``(cu_seqlens_q[b] // 128 + b) * 128`` and is followed by zeros.
    """
    from . import launch_bwd

    options = Options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, rng_state,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return launch_bwd.backward(dout, q, k, v, out, softmax_lse, dsoftmax_lse, options, output_mask, into)
