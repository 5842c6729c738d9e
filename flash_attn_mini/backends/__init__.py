"""The registry of backends and the one place where a call's backend is chosen.

Order: ``backend=`` on the call, else ``use_backend(...)``, else FLASH_ATTN_MINI_BACKEND, else by device. A backend
asked for by name runs or raises; only the choice by device may pick a second best (``triton`` when no CUDA kernel
was compiled for the GPU at hand).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import cpu, cuda, triton_adapter
from .extension import Gradients as Gradients

ENVIRONMENT_VARIABLE = "FLASH_ATTN_MINI_BACKEND"

FourTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: What a caller writes in ``backend=``.
        forward: The arguments of the custom op ``_flash_attn_forward`` up to return_softmax, to (out, softmax_lse,
            S_dmask, rng_state); checks them through csrc/checks.h.
        backward: The arguments of ``_flash_attn_backward``, less ``backend``, to (dq, dk, dv, softmax_d); checks them
            likewise. A gradient that output_mask leaves out is an empty tensor. ``into=(dq, dk, dv)`` names tensors to
            write the gradients to, None for a new one.
        varlen_forward: The same for ``_flash_attn_varlen_forward``.
        varlen_backward: The same for ``_flash_attn_varlen_backward``.
        unavailable_reason: ``(device) -> None`` when the backend can run there, else one sentence saying why not.
    """

    name: str
    forward: Callable[..., FourTensors]
    backward: Callable[..., FourTensors]
    varlen_forward: Callable[..., FourTensors]
    varlen_backward: Callable[..., FourTensors]
    unavailable_reason: Callable[[torch.device], str | None]


BACKENDS: dict[str, Backend] = {
    name: Backend(
        name,
        module.forward,
        module.backward,
        module.varlen_forward,
        module.varlen_backward,
        module.unavailable_reason,
    )
    for name, module in (("cuda", cuda), ("triton", triton_adapter), ("cpu", cpu))
}

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("flash_attn_mini_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside the ``with`` block on the backend ``name`` (per thread, nestable).

    Their gradients come from the same backend, wherever ``backward()`` is called. A training step compiled by
    torch.compile keeps the backend under which it was traced, and raises RuntimeError where another is asked for.

    Args:
        name: ``"cuda"``, ``"triton"`` or ``"cpu"``.

    Raises:
        ValueError: If there is no backend of that name.

    Example:
        >>> import torch, flash_attn_mini
        >>> q = torch.randn(1, 8, 2, 16)
        >>> with flash_attn_mini.use_backend("cpu"):
        ...     flash_attn_mini.flash_attn_func(q, q, q).shape
        torch.Size([1, 8, 2, 16])
    """
    token = _chosen.set(_known(name, "use_backend()").name)
    try:
        yield
    finally:
        _chosen.reset(token)


def available_backends(device: torch.device | str) -> list[str]:
    """Names of the backends that can run on a device.

    Args:
        device: Where the tensors of a call would live.

    Returns:
        The best first.

    Example:
        >>> import flash_attn_mini
        >>> "cpu" in flash_attn_mini.available_backends("cpu")
        True
    """
    return [name for name, backend in BACKENDS.items() if backend.unavailable_reason(torch.device(device)) is None]


def select_backend(device: torch.device, requested: str | None = None) -> Backend:
    """The backend that a call with tensors on ``device`` takes.

    Args:
        device: Where q, k and v live.
        requested: The call's ``backend=`` argument.

    Raises:
        ValueError: If a name asked for is not that of a backend.
        RuntimeError: If the backend asked for, or every backend, cannot run on ``device``.
    """
    name, source = requested, "the backend argument"
    if name is not None and name.endswith(_SETTLED):
        name = name.removesuffix(_SETTLED)
        if _chosen.get() not in (None, name):
            raise RuntimeError(
                f"flash_attn_mini: use_backend({_chosen.get()!r}) is active, but this call was compiled for training "
                f"on backend '{name}'; allowed: a function compiled anew inside the block (torch.compiler.reset())"
            )
    if name is None:
        name, source = _chosen.get(), "use_backend()"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE
    return _resolve(device, name, source)


_SETTLED = " (when traced)"


def settle_backend(device: torch.device, requested: str | None) -> str | None:
    """The backend argument of a forward op whose backward has to take the same one, possibly traced now and run later.

    A choice by ``use_backend`` or by device is put down as a name that `select_backend` recognises: the traced program
    keeps to it, and refuses to run where ``use_backend`` then asks for another. None where no backend can run, as when
    a program for another machine is traced.
    """
    if requested is not None:
        return requested
    try:
        return select_backend(device).name + _SETTLED
    except RuntimeError:
        return None


def settled_name(name: str | None) -> str | None:
    """What `settle_backend` returned, as a name and nothing more: right for the backward, wherever it runs."""
    return None if name is None else name.removesuffix(_SETTLED)


@functools.cache  # what a device can run does not change while the process lives
def _resolve(device: torch.device, name: str | None, source: str) -> Backend:
    if name is not None:
        backend = _known(name, source)
        reason = backend.unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(
                f"flash_attn_mini: backend '{name}', asked for by {source}, cannot run on {device}: {reason}"
            )
        return backend

    # A CPU tensor goes to the cpu backend even where Triton's interpreter could take it.
    candidates = ("cpu",) if device.type == "cpu" else ("cuda", "triton")
    reasons = []
    for candidate in candidates:
        reason = BACKENDS[candidate].unavailable_reason(device)
        if reason is None:
            return BACKENDS[candidate]
        reasons.append(f"{candidate}: {reason}")
    raise RuntimeError(f"flash_attn_mini: no backend can run on {device}; " + "; ".join(reasons))


def _known(name: str, source: str) -> Backend:
    backend = BACKENDS.get(name)
    if backend is None:
        raise ValueError(
            f"flash_attn_mini: backend {name!r}, given by {source}, is unknown; known: {', '.join(BACKENDS)}"
        )
    return backend
