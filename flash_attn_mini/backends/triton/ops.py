"""The Triton backend's ops ``flash_attn_mini::triton_fwd``, ``triton_bwd``, ``triton_attn_bias_bwd`` and
``triton_fwd_kvcache``.

With the compiled extension its ops call them, and have checked the arguments. Without it autograd.py calls them, and
they check the arguments themselves (checks.py). The chain continues in launch.py, launch_bwd.py, launch_bwd_bias.py and
kvcache.py. CPU calls without the extension continue in backends/reference.py instead, unless they ask for Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import schemas, tracing
from ...allocation import empty_contiguous_last, empty_max_logits, empty_out, lse_dtype, without_neg
from ...namespace import CUSTOM_OPS, NAMESPACE, qualified
from ...options import ROWS_MULTIPLE, KvCache, Options, Sequences
from .. import extension
from .. import reference as reference_backend
from . import checks, checks_kvcache, unavailable_reason

library = torch.library.Library(NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
library.define(f"triton_bwd{schemas.BACKWARD}{schemas.GRADIENTS}", tags=_tags)
library.define(f"triton_attn_bias_bwd{schemas.ATTN_BIAS_BACKWARD}", tags=_tags)
library.define(f"triton_fwd_kvcache{schemas.KVCACHE_FORWARD}{schemas.OUT_AND_LSE}", tags=_tags)

BACKWARD = CUSTOM_OPS.triton_bwd.default
ATTN_BIAS_BACKWARD = CUSTOM_OPS.triton_attn_bias_bwd.default
KVCACHE_FORWARD = CUSTOM_OPS.triton_fwd_kvcache.default

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
ForwardResults = tuple[Tensor, Tensor, Tensor | None]  # out, softmax_lse, max_logits
GradientsAndSums = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]

_usable_devices: set[torch.device] = set()


# ---- the kernels ----------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> ForwardResults:
    if _may_replay(q):
        replayed, _ = _launchers().forward.RECORDINGS.replay((q, k, v, *arguments), q.device)
        if replayed is not None:
            out, softmax_lse = replayed
            return out, softmax_lse, None
    sequences, options, (rng_state,) = schemas.sequences_and_options(arguments)
    return forward(q, k, v, sequences, options, rng_state)


def _backward(dout: Tensor, q: Tensor, *arguments: Any) -> GradientsAndSums:
    *call, output_mask = arguments
    if _may_replay(q):
        replayed: GradientsAndSums | None = _launchers().backward.replay((dout, q, *call), output_mask)[0]
        if replayed is not None:
            return replayed
    k, v, out, softmax_lse, dsoftmax_lse, *fields = call
    sequences, options, (rng_state,) = schemas.sequences_and_options(fields)
    tensors = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    return backward(*tensors, sequences, options, rng_state, output_mask)


def _attn_bias_backward(*arguments: Any) -> Tensor:
    dout, q, k, v, softmax_lse, softmax_d, *options, rng_state = arguments
    if _may_replay(q):
        replayed: Tensor | None = _launchers().bias.replay(arguments)[0]
        if replayed is not None:
            return replayed
    return attn_bias_backward(dout, q, k, v, softmax_lse, softmax_d, Options(*options), rng_state)


def _kvcache_forward(q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if _may_replay(q):
        replayed, _ = _launchers().kvcache.RECORDINGS.replay((q, k_cache, v_cache, *arguments), q.device)
        if replayed is not None:
            return replayed[0], replayed[1]
    return forward_kvcache(q, k_cache, v_cache, *schemas.cache_and_options(arguments))


def _may_replay(q: Tensor) -> bool:
    """Whether the arguments were checked, by the extension, and Triton runs on the device."""
    return q.device in _usable_devices and extension.missing_reason() is None


class _Launchers(NamedTuple):
    forward: Any
    backward: Any
    bias: Any
    kvcache: Any


@functools.cache
def _launchers() -> _Launchers:
    """The modules that launch the kernels, imported at the first call. They import Triton."""
    from . import kvcache, launch, launch_bwd, launch_bwd_bias

    return _Launchers(launch, launch_bwd, launch_bwd_bias, kvcache)


_REFERENCE = _Launchers(*[reference_backend] * 4)


def _implement(name: str, function: Callable[..., Any]) -> None:
    """Register the kernel of an op. It receives negated views, because copies by PyTorch may have any last stride."""
    for dispatch_key in ("CPU", "CUDA"):
        library.impl(name, function, dispatch_key)
    library.impl(name, torch.library.fallthrough_kernel, "Negative")


_implement("triton_bwd", _backward)
_implement("triton_attn_bias_bwd", _attn_bias_backward)
_implement("triton_fwd_kvcache", _kvcache_forward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, rng_state: Tensor | None
) -> ForwardResults:
    """(out, softmax_lse, max_logits or None); out has the strides of ``empty_out``.

    Nothing waits for the GPU.
    """
    backend, launchers = _chosen_launchers(options, "fwd", q=q, k=k, v=v)
    if extension.missing_reason() is not None:
        checks.check_forward(q, k, v, sequences, options, backend)
        checks.check_rng_state(rng_state, options.dropout_p, q)
    q, k, v = without_neg(q), without_neg(k), without_neg(v)
    results: ForwardResults = launchers.forward.forward(q, k, v, sequences, _readable(options), rng_state)
    return results


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dsoftmax_lse: Tensor | None,
    sequences: Sequences | None,
    options: Options,
    rng_state: Tensor | None,
    output_mask: Sequence[bool],
    into: Gradients = (None, None, None),
) -> GradientsAndSums:
    """(dq, dk, dv, softmax_d). Equal inputs give equal bits. A gradient that output_mask leaves out is None.

    P = exp(score - lse), delta = rowsum(dout * out) - dlse, dS = P * (dout v^T - delta); then dv = P^T dout,
    dq = scale * dS k and dk = scale * dS^T q (Dao 2023, arXiv:2307.08691, section 3.1.2; delta includes the gradient
    of the lse). Dropout sets P in dv and dout v^T to 0 or multiplies them by 1 / (1 - dropout_p); a cap multiplies dS
    by 1 - tanh^2.

    softmax_d is delta, float32 ``[batch, nheads, seqlen_q rounded up to a multiple of 128]`` and 0 past seqlen_q. With
    sequences it is ``[nheads, (total_q // 128 + batch) * 128]``: sequence b begins at
    ``(cu_seqlens_q[b] // 128 + b) * 128``, and zeros follow it.

    ``into``: the tensors that receive dq, dk and dv, None for new ones.
    """
    tensors = (dout, q, k, v, out, softmax_lse, dsoftmax_lse)
    backend, launchers = _chosen_launchers(options, "bwd", q=q, dout=dout, k=k, v=v)
    if extension.missing_reason() is not None:
        if sequences is not None and sequences.block_table is not None:
            raise NotImplementedError(
                "flash_attn_mini: no backend implements gradients of paged keys and values (the backward of a call "
                "with block_table); backends that have it: none. Available: torch.no_grad(), or k and v without pages"
            )
        checks.check_backward(*tensors, sequences, options, rng_state, into, backend)
    readable: list[Any] = [None if x is None else without_neg(x) for x in tensors]
    direct = [None if x is None or x.stride(-1) != 1 or x.is_neg() else x for x in into]
    readable += [sequences, _readable(options), rng_state, output_mask, direct]
    *gradients, softmax_d = launchers.backward.backward(*readable)
    dq, dk, dv = (
        gradient if gradient is None or given is None or written is given else given.copy_(gradient)
        for gradient, given, written in zip(gradients, into, direct, strict=True)
    )
    return dq, dk, dv, softmax_d


def backward_into(*arguments: Any) -> GradientsAndSums:
    """`backward`; autograd notices that the tensors in its last argument, ``into``, are written."""
    results = backward(*arguments)
    for x in arguments[-1]:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return results


def attn_bias_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    options: Options,
    rng_state: Tensor | None,
) -> Tensor:
    """The gradient of attn_bias, contiguous, in its shape and dtype: the sums of dS of `backward` in float32.

    Equal inputs give equal bits. softmax_lse and softmax_d: as `forward` and `backward` returned them.
    """
    backend, launchers = _chosen_launchers(options, "attn_bias_bwd", dout=dout, q=q, k=k)
    tensors = (dout, q, k, v, softmax_lse, softmax_d)
    if extension.missing_reason() is not None:
        checks.check_attn_bias_backward(*tensors, options, rng_state, backend)
    gradient: Tensor = launchers.bias.bias_backward(*map(without_neg, tensors), _readable(options), rng_state)
    return gradient


def forward_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: KvCache, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse); appends the new keys and values to the caches in place. Nothing waits for the GPU.

    out has the strides of ``empty_out``. The scratch for partial results grows with the capacity of the cache only with
    split_keys.
    """
    backend, launchers = _chosen_launchers(options, "fwd_kvcache", q=q, k_cache=k_cache, v_cache=v_cache)
    checks_here = extension.missing_reason() is not None
    if checks_here:
        checks_kvcache.check_kvcache(q, k_cache, v_cache, cache, options, backend)
    readable: list[Any] = [without_neg(x) if isinstance(x, Tensor) else x for x in cache]
    results: tuple[Tensor, Tensor] = launchers.kvcache.forward_kvcache(
        without_neg(q), k_cache, v_cache, KvCache(*readable), _readable(options)
    )
    if checks_here and cache.k is not None:
        for x in (k_cache, v_cache):
            if not x.is_inference():  # tensors made in inference mode have no version
                torch.autograd.graph.increment_version(x)
    return results


def _readable(options: Options) -> Options:
    """The options with tensors that a kernel can read: without the lazy negation of torch."""
    if not any(isinstance(x, Tensor) and x.is_neg() for x in options):
        return options
    readable: list[Any] = [without_neg(x) if isinstance(x, Tensor) else x for x in options]
    return Options(*readable)


def _chosen_launchers(options: Options, link: str, *, q: Tensor, **others: Tensor) -> tuple[str, _Launchers]:
    """The backend of a call, which has to be chosen without the extension, and its implementation.

    Raises:
        RuntimeError: If the call names a backend that needs the extension, or Triton does not run on the device.
        ValueError: If the call names an unknown backend.
    """
    name = "triton"
    if extension.missing_reason() is not None:
        from .. import select_backend

        name = select_backend(q.device, options.backend).name
        if tracing.enabled():
            tracing.trace(f"{name}_{link}", q=q, **others)
    if name == "reference":
        return name, _REFERENCE
    _check_device(q.device)
    return name, _launchers()


def _check_device(device: torch.device) -> None:
    """Raise RuntimeError with the reason if Triton's kernels do not run on the device."""
    if device in _usable_devices:  # what a device can run does not change while the process lives
        return
    reason = unavailable_reason(device)
    if reason is not None:
        raise RuntimeError(f"flash_attn_mini: the triton backend cannot run on {device}: {reason}")
    _usable_devices.add(device)


# ---- shapes for tracing ---------------------------------------------------------------------------------------------


def _kvcache_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *batch, rows, nheads, _ = q.shape
    return empty_out(q, v), q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> ForwardResults:
    _, options, _ = schemas.sequences_and_options(arguments)
    return *_kvcache_fake(q, k, v), empty_max_logits(q, options)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> GradientsAndSums:
    sequences, _, (_, output_mask) = schemas.sequences_and_options(arguments[3:])
    dq, dk, dv = (
        empty_contiguous_last(x) if wanted else None for x, wanted in zip((q, k, v), output_mask, strict=True)
    )
    *batch, rows, nheads, _ = q.shape
    if sequences is None:
        rows = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    else:  # each sequence begins at a multiple of ROWS_MULTIPLE; this many rows hold any lengths
        rows = (rows // ROWS_MULTIPLE + sequences.cu_seqlens_q.shape[0] - 1) * ROWS_MULTIPLE
    return dq, dk, dv, q.new_empty((*batch, nheads, rows), dtype=lse_dtype(q))


_ATTN_BIAS = 6 + Options._fields.index("attn_bias")  # among the arguments of triton_attn_bias_bwd


def _attn_bias_backward_fake(*arguments: Any) -> Tensor:
    attn_bias: Tensor = arguments[_ATTN_BIAS]
    return attn_bias.new_empty(attn_bias.shape)


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "flash_attn_mini: torch.vmap does not map flash_attn_with_kvcache, which writes to its caches. Available: one "
        "call for the whole batch, with cache_batch_idx for the rows of the cache"
    )


_register_fake: Callable[..., Any] = torch.library.register_fake
_register_fake(qualified("triton_bwd"), _backward_fake, lib=library)
_register_fake(qualified("triton_attn_bias_bwd"), _attn_bias_backward_fake, lib=library)
_register_fake(qualified("triton_fwd_kvcache"), _kvcache_fake, lib=library)
torch.library.register_vmap(qualified("triton_fwd_kvcache"), _refuse_vmap, lib=library)


def define_forward(name: str) -> None:
    """Define an op that is the forward."""
    library.define(f"{name}{schemas.FORWARD}{schemas.FORWARD_RESULTS}", tags=_tags)
    _implement(name, _forward)
    _register_fake(qualified(name), _forward_fake, lib=library)


define_forward("triton_fwd")
FORWARD = CUSTOM_OPS.triton_fwd.default
