"""Our kernels under ``torch.nn.functional.scaled_dot_product_attention``.

    from flash_attn_mini import sdpa

    sdpa.activate()

From then on PyTorch's attention ops run our compiled kernels wherever these can do the call, forward and backward, in
eager code, under autograd, autocast, ``torch.compile`` and vmap. PyTorch still selects the op, so ``sdpa_kernel`` and
the other switches keep their meaning. The ops are

- on CUDA: ``_scaled_dot_product_flash_attention``, ``_scaled_dot_product_cudnn_attention``,
  ``_scaled_dot_product_efficient_attention`` and ``_flash_attention_forward``, which ``varlen_attn`` calls;
- on the CPU: ``_scaled_dot_product_flash_attention_for_cpu``.

``attn_mask`` is the option attn_bias of our kernels. A query from which it hides all keys has an output of 0, as in the
ops of PyTorch.

PyTorch's kernels run all other calls: dropout (its random numbers depend on the kernel), other dtypes, head dims above
256 (CPU: 512) or different for v, nested tensors, and GPUs for which no kernel was compiled. They also run the calls of
a device whose backend is not the one that FLASH_ATTN_MINI_BACKEND names; ``use_backend`` has no effect here. Calls that
PyTorch sends to its math implementation, for example with dropout or a mask that requires a gradient on the CPU, do not
reach the ops.

csrc/api/sdpa.cpp has the kernels and registers them. Tested with PyTorch 2.6, 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.attention

from .backends import ENVIRONMENT_VARIABLE, check_backend, extension
from .namespace import NAMESPACE

NAME = NAMESPACE  # in PyTorch's registry of implementations


class Counts(NamedTuple):
    """Calls of an op since the process started.

    Attributes:
        ours: Calls that our kernels ran.
        pytorch: Calls that were passed on to PyTorch's kernel while ours were active.
    """

    ours: int
    pytorch: int


def counts() -> dict[str, Counts]:
    """How many calls ran on which kernels, for each op of aten that was called while our kernels were active.

    Example:
        >>> import torch
        >>> from flash_attn_mini import sdpa
        >>> with sdpa.sdpa():
        ...     out = torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 16, 8))
        >>> sdpa.counts()["_scaled_dot_product_flash_attention_for_cpu"].ours > 0
        True
    """
    if extension.MODULE is None:
        return {}
    return {name: Counts(ours, pytorch) for name, ours, pytorch in extension.MODULE.sdpa_counts() if ours or pytorch}


# ---- registration ---------------------------------------------------------------------------------------------------


@functools.cache
def _promises() -> tuple[int, bool, bool, bool, bool]:
    """What PyTorch's fake implementations promise, where it differs among versions: Promises in csrc/api/sdpa.h."""
    aten = torch.ops.aten
    query = torch.empty(2, 4, 3, 8, device="meta", dtype=torch.float16).transpose(1, 2)
    cudnn_out, cudnn_lse, *_ = aten._scaled_dot_product_cudnn_attention(query, query, query, None, True)
    expanded = torch.empty(2, 1, 4, 8, device="meta", dtype=torch.float16).expand(2, 3, 4, 8)
    flash_out = aten._scaled_dot_product_flash_attention(expanded, expanded, expanded)[0]
    packed = torch.empty(4, 3, 8, device="meta", dtype=torch.float16)
    ends = torch.empty(3, device="meta", dtype=torch.int32)
    varlen_lse = aten._flash_attention_forward(packed, packed, packed, ends, ends, 2, 2, 0.0, False, False)[1]
    returned = {x.name for x in aten._flash_attention_forward.default._schema.returns}
    return (
        cudnn_lse.dim(),
        cudnn_out.stride() == query.stride(),
        flash_out.stride() != torch.empty_like(expanded).stride(),
        varlen_lse.dim() == 2,
        "rng_state" in returned,
    )


class _Handle:
    """What PyTorch's registry removes."""

    def remove(self) -> None:
        extension.load().sdpa_restore()


_registry: Any = torch.nn.attention if hasattr(torch.nn.attention, "register_flash_attention_impl") else None


def _register() -> _Handle:
    extension.load().sdpa_activate(*_promises())
    return _Handle()


if _registry is not None and extension.MODULE is not None:
    _registry.register_flash_attention_impl(NAME, register_fn=_register)


def is_active() -> bool:
    """Whether PyTorch's attention ops run our kernels."""
    return extension.MODULE is not None and bool(extension.MODULE.sdpa_is_active())


def activate() -> None:
    """Run our kernels in PyTorch's attention ops, in this process. A second call does nothing.

    Other threads may call the ops at the same time, here and in `restore`.

    In versions of PyTorch with a registry of implementations this is
    ``torch.nn.attention.activate_flash_attention_impl("flash_attn_mini")``, which removes an active FA3 or FA4.

    Raises:
        RuntimeError: If the extension is not built, or if PyTorch's ops have other arguments than are known.
        ValueError: If FLASH_ATTN_MINI_BACKEND is not the name of a backend.

    Example:
        >>> import torch
        >>> from flash_attn_mini import sdpa
        >>> q = torch.randn(1, 4, 100, 64)  # [batch, nheads, seqlen, headdim]
        >>> sdpa.activate()
        >>> torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 4, 100, 64])
        >>> sdpa.restore()
    """
    if is_active():
        return
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        check_backend(named, ENVIRONMENT_VARIABLE)
    if _registry is None or extension.MODULE is None:
        _register()
    else:
        _registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Run PyTorch's kernels again. Does nothing if ours are not active.

    A backward that runs after this is right, whichever kernel ran its forward: the forwards return the same.
    """
    if not is_active():
        return
    if _registry is not None and _registry.current_flash_attention_impl() == NAME:
        _registry.restore_flash_attention_impl()
    else:
        extension.load().sdpa_restore()


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """`activate` for a ``with`` block, in all threads. The implementation that was active before is active afterwards.

    Example:
        >>> import torch
        >>> from flash_attn_mini import sdpa
        >>> q = torch.randn(1, 4, 100, 64)
        >>> with sdpa.sdpa():
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
        torch.Size([1, 4, 100, 64])
    """
    was_active = is_active()
    before = None if _registry is None else _registry.current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        if not was_active:
            restore()
            if before is not None:
                _registry.activate_flash_attention_impl(before)
