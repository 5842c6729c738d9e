"""The registry of backends and the one place where a call's backend is chosen.

Order: ``backend=`` on the call, else ``use_backend(...)``, else FLASH_ATTN_MINI_BACKEND, else by device. A backend
asked for by name runs or raises. Only the choice by device may take the second best: ``triton`` when no CUDA kernel was
compiled for this GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import cpu, cuda, triton
from .extension import FourTensors as FourTensors
from .extension import Gradients as Gradients
from .extension import TwoTensors as TwoTensors

ENVIRONMENT_VARIABLE = "FLASH_ATTN_MINI_BACKEND"


@dataclass(frozen=True)
class Backend:
    """One implementation of attention. Its functions check their arguments through csrc/checks.h.

    Attributes:
        name: What a caller writes in ``backend=``.
        forward: ``forward(q, k, v, sequences, options)`` returns (out, softmax_lse, S_dmask, rng_state). ``sequences``
            is None for sequences of equal length; see `flash_attn_mini.options`.
        backward: ``backward(dout, q, k, v, out, softmax_lse, dsoftmax_lse, sequences, options, rng_state, output_mask,
            into=(None, None, None))`` returns (dq, dk, dv, softmax_d). A gradient that output_mask leaves out is an
            empty tensor. ``into`` has the tensors that receive dq, dk and dv, None for a new one.
        forward_kvcache: ``forward_kvcache(q, k_cache, v_cache, cache, options)`` appends the new keys and values of
            ``cache``, a `KvCache`, to the caches and returns (out, softmax_lse).
        unavailable_reason: ``unavailable_reason(device)`` is None when the backend can run there, else one sentence
            that says why not.
    """

    name: str
    forward: Callable[..., FourTensors]
    backward: Callable[..., FourTensors]
    forward_kvcache: Callable[..., TwoTensors]
    unavailable_reason: Callable[[torch.device], str | None]


BACKENDS: dict[str, Backend] = {
    name: Backend(
        name,
        module.forward,
        module.backward,
        module.forward_kvcache,
        module.unavailable_reason,
    )
    for name, module in (("cuda", cuda), ("triton", triton), ("cpu", cpu))
}

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("flash_attn_mini_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside the ``with`` block on the backend ``name`` (per thread, nestable).

    Their gradients come from the same backend, wherever ``backward()`` is called. A training step compiled by
    torch.compile keeps the backend that it was traced with, and raises RuntimeError inside a block with another name.

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
        ValueError: If a requested name is not that of a backend.
        RuntimeError: If the backend asked for, or every backend, cannot run on ``device``.
    """
    name, source = requested, "the backend argument"
    if name is None:
        name, source = _chosen.get(), "use_backend()"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE
    return _resolve(device, name, source)


# Traced programs alone have backend arguments with this prefix: the public functions refuse it (`check_backend`).
_TRACED = "traced:"


def traced_backend(device: torch.device, requested: str | None) -> str | None:
    """The backend argument of a traced forward op whose backward has to take the same backend.

    A choice by ``use_backend``, environment or device becomes the backend's name with a prefix, which
    `backend_of_op` reads. None where no backend can run, as when a program for another machine is traced.
    """
    if requested is not None:
        return requested
    try:
        return _TRACED + select_backend(device).name
    except RuntimeError:
        return None


def backend_of_op(name: str | None) -> str | None:
    """The backend argument of an op, without the prefix of `traced_backend`.

    Raises:
        RuntimeError: If the program was traced on one backend and ``use_backend`` asks for another.
    """
    if name is None or not name.startswith(_TRACED):
        return name
    name = name.removeprefix(_TRACED)
    if _chosen.get() not in (None, name):
        raise RuntimeError(
            f"flash_attn_mini: use_backend({_chosen.get()!r}) is active, but this call was compiled for training "
            f"on backend '{name}'; allowed: a function compiled anew inside the block (torch.compiler.reset())"
        )
    return name


def name_of_traced(name: str | None) -> str | None:
    """The result of `traced_backend` as a plain name, for the backward, which ``use_backend`` does not change."""
    return None if name is None else name.removeprefix(_TRACED)


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

    # A CPU tensor takes the cpu backend even where Triton's interpreter could run.
    candidates = ("cpu",) if device.type == "cpu" else ("cuda", "triton")
    reasons = []
    for candidate in candidates:
        reason = BACKENDS[candidate].unavailable_reason(device)
        if reason is None:
            return BACKENDS[candidate]
        reasons.append(f"{candidate}: {reason}")
    raise RuntimeError(f"flash_attn_mini: no backend can run on {device}; " + "; ".join(reasons))


def check_backend(name: str) -> None:
    """Raise ValueError unless ``name``, a call's ``backend=`` argument, is that of a backend."""
    _known(name, "the backend argument")


def _known(name: str, source: str) -> Backend:
    backend = BACKENDS.get(name)
    if backend is None:
        raise ValueError(
            f"flash_attn_mini: backend {name!r}, given by {source}, is unknown; known: {', '.join(BACKENDS)}"
        )
    return backend
