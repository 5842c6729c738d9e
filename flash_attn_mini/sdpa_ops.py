"""aten's attention ops with our kernels: for each op a function of the same arguments, which returns the op's results,
or None for a call that PyTorch's kernel must run. sdpa.py installs them.

The choice between the kernels depends on the arguments of one call, not on what ran before. That is safe because the
results of a forward are the same to every backward: out and the natural-log log-sum-exp in the layout that PyTorch's
fake implementation of the op promises. So each backward may run on our kernel or on PyTorch's, whichever ran the
forward. Dropout is the exception, because its mask depends on the kernel; PyTorch runs both passes of such calls.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .backends import chosen_backend, extension, select_backend
from .options import Options, Sequences

Results = tuple[Any, ...]

GPU_VARIABLE = "FLASH_ATTN_MINI_SDPA_CUDA"
MAX_HEAD_DIM = 256
_16_BIT = frozenset((torch.float16, torch.bfloat16))
_CPU_DTYPES = _16_BIT | {torch.float32, torch.float64}
_NAMES_IN_BUILD = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_EFFICIENT_LSE_MULTIPLE = 32  # the efficient op pads the rows of the log-sum-exp to this multiple, with inf


# ---- which calls are ours -------------------------------------------------------------------------------------------


class _Limits(NamedTuple):
    """What the backend of a device can do."""

    backend: str
    dtypes: frozenset[torch.dtype]  # empty if no backend of ours runs on the device
    headdim: int


_NOTHING = _Limits("", frozenset(), 0)


def is_enabled_on_gpus() -> bool:
    """Whether FLASH_ATTN_MINI_SDPA_CUDA=1 lets calls with CUDA tensors run on our kernels."""
    return os.environ.get(GPU_VARIABLE, "0") not in ("", "0")


@functools.cache  # what a device can run does not change while the process lives
def _limits_of(device: torch.device, chosen: str | None) -> _Limits:
    """The limits on a device, with the backend that ``use_backend`` chose."""
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        return _NOTHING
    if device.type == "cuda" and not is_enabled_on_gpus():
        return _NOTHING
    try:
        backend = select_backend(device, chosen).name
    except RuntimeError:
        return _NOTHING
    if backend == "cpu" and extension.MODULE is None:
        return _NOTHING
    if backend != "cuda":
        return _Limits(backend, _CPU_DTYPES if backend == "cpu" else _16_BIT, MAX_HEAD_DIM)
    built = extension.load().build_info()
    dtypes = frozenset(x for x in _16_BIT if _NAMES_IN_BUILD[x] in built["dtypes"])
    return _Limits(backend, dtypes, max(map(int, built["hdims"]), default=0))


def _are_ours(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, limits: _Limits) -> bool:
    """Whether our kernels can do a call, as far as its shapes and its scale do not matter."""
    dtype = query.dtype
    return (
        dtype in limits.dtypes
        and dropout_p == 0.0
        and key.dtype == dtype
        and value.dtype == dtype
        and not (query.is_nested or key.is_nested)
        and key.shape == value.shape
    )


def _can_scale(headdim: int, headdim_k: int, scale: float | None, limits: _Limits) -> bool:
    return 0 < headdim == headdim_k <= limits.headdim and (scale is None or math.isfinite(scale))


class _Plan(NamedTuple):
    """How our kernels do a call with tensors ``[batch, nheads, seqlen, headdim]``."""

    options: Options
    seqlen_k: int  # the keys that they read: no query sees those after
    has_empty_rows: bool  # whether a row may have no key


class _FlashCall(NamedTuple):
    """A call with flash-attn's layout, as our kernels take it."""

    q: Tensor  # [batch, seqlen_q, nheads, headdim]; varlen [total_q, nheads, headdim]
    k: Tensor  # [batch, seqlen_k, nheads_k, headdim]; varlen [total_k, nheads_k, headdim]
    v: Tensor  # like k
    sequences: Sequences | None
    options: Options
    has_empty_rows: bool


@functools.lru_cache(maxsize=4096)
def _plan_of(
    shape_q: torch.Size, shape_k: torch.Size, is_causal: bool, scale: float | None, top_left: bool, limits: _Limits
) -> _Plan | None:
    """The plan of a call with these shapes, None for shapes that our kernels cannot do."""
    if len(shape_q) != 4 or len(shape_k) != 4 or 0 in shape_q or 0 in shape_k:
        return None
    batch, nheads, seqlen_q, headdim = shape_q
    batch_k, nheads_k, seqlen_k, headdim_k = shape_k
    if batch != batch_k or nheads % nheads_k != 0 or not _can_scale(headdim, headdim_k, scale, limits):
        return None
    if not is_causal:
        return _Plan(_options(headdim, scale, False, -1, -1, limits), seqlen_k, False)
    if top_left and seqlen_q > seqlen_k:  # PyTorch's diagonal is this much higher than ours
        return _Plan(_options(headdim, scale, False, -1, seqlen_q - seqlen_k, limits), seqlen_k, False)
    options = _options(headdim, scale, True, -1, 0, limits)
    return _Plan(options, min(seqlen_q, seqlen_k) if top_left else seqlen_k, seqlen_q > seqlen_k)


def _planned(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None, top_left: bool
) -> _Plan | None:
    """The plan of a call with tensors ``[batch, nheads, seqlen, headdim]``, None for what our kernels cannot do."""
    limits = _limits_of(query.device, chosen_backend())
    if not _are_ours(query, key, value, dropout_p, limits):
        return None
    return _plan_of(query.shape, key.shape, is_causal, scale, top_left, limits)


def _flash_call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
) -> _FlashCall | None:
    """A call with the layout and the masks of flash-attn, dense or varlen; None for what our kernels cannot do."""
    limits = _limits_of(query.device, chosen_backend())
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    rank = 4 if cum_seq_q is None else 3
    if (
        not _are_ours(query, key, value, dropout_p, limits)
        or not query.dim() == key.dim() == rank
        or query.numel() == 0
        or key.numel() == 0
        or query.size(-2) % key.size(-2) != 0
        or not _can_scale(query.size(-1), key.size(-1), scale, limits)
        or left < -1
        or right < -1
    ):
        return None
    options = _options(query.size(-1), scale, is_causal, left, right, limits)
    tensors = (_contiguous_last(query), _contiguous_last(key), _contiguous_last(value))
    if cum_seq_q is None and cum_seq_k is None and query.size(0) == key.size(0):
        return _FlashCall(*tensors, None, options, right >= 0 and query.size(1) > key.size(1))
    if cum_seq_q is None or cum_seq_k is None or not _varlen_lse_is_packed():
        return None
    if any(x.dtype != torch.int32 or x.device != query.device for x in (cum_seq_q, cum_seq_k)):
        return None
    return _FlashCall(*tensors, Sequences(cum_seq_q.contiguous(), cum_seq_k.contiguous(), max_q, max_k), options, True)


def _options(headdim: int, scale: float | None, causal: bool, left: int, right: int, limits: _Limits) -> Options:
    dropout_p = softcap = 0.0
    alibi_slopes = None
    scale = 1.0 / math.sqrt(headdim) if scale is None else scale
    return Options(dropout_p, scale, causal, left, right, softcap, alibi_slopes, backend=limits.backend)


def _contiguous_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


# ---- what PyTorch's fake implementations promise, where it depends on the version ------------------------------------


@functools.cache
def _cudnn_promise() -> tuple[int, bool]:
    """The dimensions of the cuDNN op's log-sum-exp, and whether out has the layout of the query."""
    query = torch.empty(2, 4, 3, 8, device="meta", dtype=torch.float16).transpose(1, 2)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, True)
    return lse.dim(), out.stride() == query.stride()


@functools.cache
def _flash_promise_is_rows_first() -> bool:
    """Whether the flash op's out has the strides of ``torch.empty_like(query.transpose(1, 2))``, in older versions.

    They differ from those of ``torch.empty_like(query)`` if the query is expanded.
    """
    query = torch.empty(2, 1, 4, 8, device="meta", dtype=torch.float16).expand(2, 3, 4, 8)
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)[0]
    return bool(out.stride() != torch.empty_like(query).stride())


@functools.cache
def _varlen_lse_is_packed() -> bool:
    """Whether the log-sum-exp of a varlen call is ``[nheads, total_q]``, as ours; older versions pad it."""
    query = torch.empty(4, 3, 8, device="meta", dtype=torch.float16)
    ends = torch.empty(3, device="meta", dtype=torch.int32)
    lse = torch.ops.aten._flash_attention_forward(query, query, query, ends, ends, 2, 2, 0.0, False, False)[1]
    return bool(lse.dim() == 2)


@functools.cache
def _has_rng_state() -> bool:
    """Whether the flash ops return one rng_state instead of philox_seed and philox_offset."""
    return any(x.name == "rng_state" for x in torch.ops.aten._flash_attention_forward.default._schema.returns)


def _unused_random_state(query: Tensor, as_rng_state: bool) -> tuple[Tensor, Tensor]:
    """The random state of a call without dropout, which no kernel reads."""
    if as_rng_state:
        return query.new_empty((2,), dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)


# ---- our kernels ----------------------------------------------------------------------------------------------------


def _with_pytorchs_empty_rows(lse: Tensor) -> Tensor:
    """Our log-sum-exp of a row without a key is -inf, that of PyTorch's flash kernels inf."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _with_our_empty_rows(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == math.inf, -math.inf)


def _forward(
    plan: _Plan, query: Tensor, key: Tensor, value: Tensor, out_rows_first: bool = False, lse_rows_first: bool = False
) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp.

    ``rows_first``: with the strides of a contiguous ``[batch, seqlen, nheads, ...]``; else out has the strides of
    ``torch.empty_like(query)``, and the log-sum-exp is contiguous.
    """
    options, seqlen_k, has_empty_rows = plan
    run = _heads_first_forward if extension.MODULE is None else extension.heads_first_forward
    out, lse = run(query, key, value, seqlen_k, out_rows_first, lse_rows_first, options)
    return out, _with_pytorchs_empty_rows(lse) if has_empty_rows else lse


def _backward(
    plan: _Plan | None,
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rows_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of query, key and value, with strides as in `_forward`."""
    if plan is None or grad_out is None or not _fits(grad_out, query, out):
        return None
    options, seqlen_k, has_empty_rows = plan
    lse = _with_our_empty_rows(lse) if has_empty_rows else lse
    run = _heads_first_backward if extension.MODULE is None else extension.heads_first_backward
    return run(grad_out, query, key, value, out, lse, seqlen_k, rows_first, options)


def _fits(grad_out: Tensor, query: Tensor, out: Tensor) -> bool:
    return grad_out.shape == out.shape == query.shape and grad_out.dtype == query.dtype


# ---- the layouts without the extension, as csrc/api/bindings.cpp has them -------------------------------------------


def _heads_first_forward(
    q: Tensor, k: Tensor, v: Tensor, seqlen_k: int, out_rows_first: bool, lse_rows_first: bool, options: Options
) -> tuple[Tensor, Tensor]:
    kernel_q, kernel_k, kernel_v = (_rows_first(x) for x in (q, k[:, :, :seqlen_k], v[:, :, :seqlen_k]))
    out, lse = ops.forward_without_graph(kernel_q, kernel_k, kernel_v, None, options, None)
    out = out.contiguous().transpose(1, 2) if out_rows_first else _like(q, out.transpose(1, 2))
    return out, lse.mT.contiguous().mT if lse_rows_first else lse


def _heads_first_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seqlen_k: int,
    rows_first: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    kernel_q, kernel_k, kernel_v = (_rows_first(x) for x in (q, k[:, :, :seqlen_k], v[:, :, :seqlen_k]))
    gradients = ops.backward(dout, kernel_q, kernel_k, kernel_v, out, lse, None, None, options)[:3]

    def finished(x: Tensor, gradient: Tensor) -> Tensor:
        whole = x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) if rows_first else torch.zeros_like(x)
        whole[:, :, : gradient.size(1)] = gradient.transpose(1, 2)
        return whole

    dq, dk, dv = map(finished, (q, k, v), gradients)
    return dq, dk, dv


def _rows_first(x: Tensor) -> Tensor:
    return _contiguous_last(x).transpose(1, 2)


def _rows_first_like(x: Tensor, result: Tensor) -> Tensor:
    return _like(x.transpose(1, 2), result.transpose(1, 2)).transpose(1, 2)


def _like(x: Tensor, result: Tensor) -> Tensor:
    """result with the strides of ``torch.empty_like(x)``. It has others if x is expanded or its rows were copied."""
    if result.stride() == x.stride():
        return result
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


# ---- the ops --------------------------------------------------------------------------------------------------------


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results | None:
    """The flash op. Its causal mask is aligned to the bottom right; SDPA calls it with equal lengths only."""
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=False)
    if plan is None or return_debug_mask:
        return None
    out, lse = _forward(plan, query, key, value)
    if _flash_promise_is_rows_first():
        out = _rows_first_like(query, out)
    seed, offset = _unused_random_state(query, _has_rng_state())
    return out, lse, None, None, query.size(2), key.size(2), seed, offset, query.new_empty(0)


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Results | None:
    """The backward of the flash op."""
    if cum_seq_q is not None:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=False)
    gradients = _backward(plan, grad_out, query, key, value, out, logsumexp)
    if gradients is not None and _flash_promise_is_rows_first():
        return tuple(map(_rows_first_like, (query, key, value), gradients))
    return gradients


def scaled_dot_product_cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results | None:
    """The cuDNN op. Its causal mask is aligned to the top left."""
    if attn_bias is not None or return_debug_mask:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    if plan is None:
        return None
    lse_dim, is_like_query = _cudnn_promise()
    out, lse = _forward(plan, query, key, value)
    seed, offset = _unused_random_state(query, as_rng_state=False)
    out = out if is_like_query else out.contiguous()
    lse = lse if lse_dim == 3 else lse[..., None]
    return out, lse, None, None, query.size(2), key.size(2), seed, offset, None


def scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Results | None:
    """The backward of the cuDNN op."""
    if attn_bias is not None or cum_seq_q is not None:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    lse = logsumexp if logsumexp.dim() == 3 else logsumexp[..., 0]
    return _backward(plan, grad_out, query, key, value, out, lse)


def scaled_dot_product_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Results | None:
    """The memory-efficient op. Its causal mask is aligned to the top left."""
    if attn_bias is not None:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    if plan is None:
        return None
    out, lse = _forward(plan, query, key, value, out_rows_first=True)
    padding = -query.size(2) % _EFFICIENT_LSE_MULTIPLE
    if not compute_log_sumexp:
        lse = lse.new_empty((*query.shape[:2], 0))
    elif padding:
        lse = torch.constant_pad_nd(lse, (0, padding), math.inf)
    return out, lse, *_unused_random_state(query, as_rng_state=False)


def scaled_dot_product_efficient_attention_backward(
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Results | None:
    """The backward of the memory-efficient op."""
    seqlen_q = query.size(2)
    if attn_bias is not None or logsumexp.size(-1) < seqlen_q:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    gradients = _backward(plan, grad_out_, query, key, value, out, logsumexp[..., :seqlen_q], rows_first=True)
    return None if gradients is None else (*gradients, None)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> Results | None:
    """The flash op with flash-attn's layout: windows, varlen. Its masks are aligned to the bottom right.

    ``others`` are seqused_k, alibi_slopes and, in newer versions, block_table and num_splits.
    """
    if return_debug_mask or any(x is not None for x in others.values()):
        return None
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    call = _flash_call_of(query, key, value, *lengths, dropout_p, is_causal, scale, *window)
    if call is None:
        return None
    arguments = (call.q, call.k, call.v, call.sequences, call.options)
    if extension.MODULE is None:
        out, lse = ops.forward_without_graph(*arguments, None)
    else:
        out, lse, _ = extension.forward(*arguments)
    lse = _with_pytorchs_empty_rows(lse) if call.has_empty_rows else lse
    return _like(query, out), lse, *_unused_random_state(query, _has_rng_state()), query.new_empty(0)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Results | None:
    """The backward of the flash op with flash-attn's layout."""
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    call = _flash_call_of(query, key, value, *lengths, dropout_p, is_causal, scale, *window)
    if call is None or not _fits(grad_out, query, out):
        return None
    lse = _with_our_empty_rows(logsumexp) if call.has_empty_rows else logsumexp
    tensors = (grad_out, call.q, call.k, call.v, out, lse)
    run: Callable[..., Any] = ops.backward if extension.MODULE is None else extension.backward
    dq, dk, dv, _ = run(*tensors, None, call.sequences, call.options, None, (True, True, True), (None, None, None))
    return _like(query, dq), _like(key, dk), _like(value, dv)


def scaled_dot_product_flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Results | None:
    """The flash op for the CPU. Its causal mask is aligned to the top left."""
    if attn_mask is not None:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    return None if plan is None else _forward(plan, query, key, value, lse_rows_first=True)


def scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Results | None:
    """The backward of the flash op for the CPU."""
    if attn_mask is not None:
        return None
    plan = _planned(query, key, value, dropout_p, is_causal, scale, top_left=True)
    return _backward(plan, grad_out, query, key, value, out, logsumexp, rows_first=True)


OPS: dict[str, Callable[..., Results | None]] = {
    f"_{function.__name__}": function
    for function in (
        scaled_dot_product_flash_attention,
        scaled_dot_product_flash_attention_backward,
        scaled_dot_product_cudnn_attention,
        scaled_dot_product_cudnn_attention_backward,
        scaled_dot_product_efficient_attention,
        scaled_dot_product_efficient_attention_backward,
        flash_attention_forward,
        flash_attention_backward,
        scaled_dot_product_flash_attention_for_cpu,
        scaled_dot_product_flash_attention_for_cpu_backward,
    )
}
