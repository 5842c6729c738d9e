"""The registry of backends, and the choice of the backend of a call. csrc/api/backend_choice.cpp chooses in the op.

Order: ``backend=`` on the call, else ``use_backend(...)``, else FLASH_ATTN_MINI_BACKEND, else by device. A backend
requested by name runs or raises. Only the choice by device may take another one: ``triton`` when no CUDA kernel was
compiled for this GPU, and the reference for CPU tensors when the extension is not built.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import cpu, cuda, extension, triton

ENVIRONMENT_VARIABLE = "FLASH_ATTN_MINI_BACKEND"


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: What a caller writes in ``backend=``.
        unavailable_reason: ``unavailable_reason(device)`` is None when the backend can run there, else one sentence
            that says why not.
    """

    name: str
    unavailable_reason: Callable[[torch.device], str | None]


BACKENDS: dict[str, Backend] = {
    name: Backend(name, module.unavailable_reason)
    for name, module in (("cuda", cuda), ("triton", triton), ("cpu", cpu))
}

# It needs nothing but PyTorch. It has no entry in BACKENDS, because no call asks for it.
REFERENCE = Backend("reference", lambda device: None)

_chosen = threading.local()  # .name, where use_backend has chosen. torch.compile guards on it, not on a subclass's


def chosen_backend() -> str | None:
    """The name that ``use_backend`` chose in this thread, or None."""
    return getattr(_chosen, "name", None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside the ``with`` block on the backend ``name`` (per thread, nestable).

    Their gradients come from the same backend, wherever ``backward()`` is called. A function compiled by torch.compile
    is compiled once more in a block with another name.

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
    before, _chosen.name = chosen_backend(), _known(name, "use_backend()").name
    try:
        yield
    finally:
        _chosen.name = before


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


def select_backend(device: torch.device, requested: str | None = None, headdim: int = 0) -> Backend:
    """The backend that a call with tensors on ``device`` takes.

    Args:
        device: Where q, k and v live.
        requested: The call's ``backend=`` argument.
        headdim: The larger of the head dims of q and v. By device, no call takes a backend that lacks it.

    Raises:
        ValueError: If a requested name is not that of a backend.
        RuntimeError: If the requested backend, or every backend, cannot run on ``device``.
    """
    name, source = requested, "the backend argument"
    if name is None:
        name, source = chosen_backend(), "use_backend()"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE
    return _resolve(device, name, source, headdim > cuda.MAX_HEADDIM)


def backend_argument(device: torch.device, requested: str | None) -> str | None:
    """The backend argument of an op: a name that can run on ``device``, or None if neither the call nor ``use_backend``
    names one. The op then reads FLASH_ATTN_MINI_BACKEND, else it chooses by device.

    While a program is traced, the name is checked when the program runs.
    """
    if torch.compiler.is_compiling():
        return chosen_backend() if requested is None else requested
    if requested is None and chosen_backend() is None:
        return None
    return select_backend(device, requested).name


@functools.cache  # what a device can run does not change while the process lives
def _resolve(device: torch.device, name: str | None, source: str, is_wide: bool) -> Backend:
    if name is not None:
        backend = _known(name, source)
        reason = backend.unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(
                f"flash_attn_mini: backend '{name}', asked for by {source}, cannot run on {device}: {reason}"
            )
        return backend

    # A CPU tensor takes the cpu backend even where Triton's interpreter could run.
    candidates = ("cpu",) if device.type == "cpu" else ("triton",) if is_wide else ("cuda", "triton")
    reasons = []
    for candidate in candidates:
        reason = BACKENDS[candidate].unavailable_reason(device)
        if reason is None:
            return BACKENDS[candidate]
        reasons.append(f"{candidate}: {reason}")
    if device.type == "cpu" and not extension.IS_BUILT:
        return REFERENCE
    raise RuntimeError(f"flash_attn_mini: no backend can run on {device}; " + "; ".join(reasons))


def check_backend(name: str, source: str = "the backend argument") -> None:
    """Raise ValueError unless ``name``, which ``source`` gives, is that of a backend."""
    _known(name, source)


def _known(name: str, source: str) -> Backend:
    backend = BACKENDS.get(name)
    if backend is None:
        raise ValueError(
            f"flash_attn_mini: backend {name!r}, given by {source}, is unknown; known: {', '.join(BACKENDS)}"
        )
    return backend
