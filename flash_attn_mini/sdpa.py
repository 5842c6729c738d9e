"""Our kernels under ``torch.nn.functional.scaled_dot_product_attention``.

    from flash_attn_mini import sdpa

    sdpa.activate()

From then on PyTorch's attention ops run our kernels wherever these can do the call, forward and backward, in eager
code, under autograd, autocast, ``torch.compile`` and vmap. PyTorch still selects the op, so ``sdpa_kernel`` and the
other switches keep their meaning. The ops are

- on CUDA: ``_scaled_dot_product_flash_attention``, ``_scaled_dot_product_cudnn_attention``,
  ``_scaled_dot_product_efficient_attention`` and ``_flash_attention_forward``, which ``varlen_attn`` calls;
- on the CPU: ``_scaled_dot_product_flash_attention_for_cpu``.

Calls with CUDA tensors run our kernels only if ``FLASH_ATTN_MINI_SDPA_CUDA=1`` is set before the first one: these ops
are tested with CPU tensors, and not yet on a GPU.

PyTorch's kernels run all other calls: masks and biases, dropout (its random numbers depend on the kernel), other
dtypes, head dims above 256 or different for v, nested tensors, empty tensors. Calls that PyTorch sends to its math
implementation, for example with dropout on the CPU, do not reach the ops.

An op has our kernel for the dispatch key BackendSelect, which stands above the keys of the devices and below autograd.
PyTorch's kernels stay registered, and our kernel passes on a call by redispatching it. All versions of PyTorch from 2.6
on have this mechanism; ``torch.library.get_kernel`` is newer. Tested with 2.6, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.attention

from .namespace import NAMESPACE
from .sdpa_ops import OPS

NAME = NAMESPACE  # in PyTorch's registry of implementations

_KEY = "BackendSelect"


class Counts(NamedTuple):
    """Calls of an op since the process started.

    Attributes:
        ours: Calls that our kernels ran.
        pytorch: Calls that were passed on to PyTorch's kernel while ours were active.
    """

    ours: int
    pytorch: int


_ours = dict.fromkeys(OPS, 0)
_pytorch = dict.fromkeys(OPS, 0)


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
    return {name: Counts(_ours[name], _pytorch[name]) for name in OPS if _ours[name] or _pytorch[name]}


# ---- registration ---------------------------------------------------------------------------------------------------


def _keys_below() -> Any:
    """The dispatch keys below ours, for which torch.library has no public name."""
    try:
        return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    except AttributeError as error:
        raise RuntimeError(
            f"flash_attn_mini: sdpa cannot register its kernels in torch {torch.__version__}: {error}; "
            "versions that were tested: 2.6, 2.13 and 2.14"
        ) from error


def _kernel_of(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    redispatch = getattr(torch.ops.aten, name).default.redispatch
    keys_below = _keys_below()

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        if results is not None:
            _ours[name] += 1
            return results
        if not any(isinstance(x, torch.Tensor) and x.is_meta for x in args):  # torch.compile asks for shapes
            _pytorch[name] += 1
        return redispatch(keys & keys_below, *args, **kwargs)

    return kernel


class _Handle:
    """Our registration. PyTorch's registry calls `remove`."""

    def __init__(self) -> None:
        # The registration lasts as long as this object.
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, run in OPS.items():
            self.library.impl(name, _kernel_of(name, run), _KEY, with_keyset=True)

    def remove(self) -> None:
        self.library = None


_handle: _Handle | None = None
_registry: Any = torch.nn.attention if hasattr(torch.nn.attention, "register_flash_attention_impl") else None


def _register() -> _Handle:
    global _handle
    _handle = _Handle()
    return _handle


if _registry is not None:
    _registry.register_flash_attention_impl(NAME, register_fn=_register)


def is_active() -> bool:
    """Whether PyTorch's attention ops run our kernels."""
    return _handle is not None and _handle.library is not None


def activate() -> None:
    """Run our kernels in PyTorch's attention ops, in this process. A second call does nothing.

    In versions of PyTorch with a registry of implementations this is
    ``torch.nn.attention.activate_flash_attention_impl("flash_attn_mini")``, which removes an active FA3 or FA4.

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
    if _registry is None:
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
    elif _handle is not None:
        _handle.remove()


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
