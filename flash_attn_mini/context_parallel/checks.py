"""Checks that the attention functions and `Shards.merge` share: no transform of torch.func is active and, with
FLASH_ATTN_MINI_CHECK=1, all ranks call with equal arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..transforms import is_batch_of_gradients, is_transformed, refuse_forward_mode
from . import transport


def compares_ranks() -> bool:
    """Whether FLASH_ATTN_MINI_CHECK=1 enables the comparison of the ranks."""
    return os.environ.get("FLASH_ATTN_MINI_CHECK", "0") not in ("", "0")


@contextmanager
def shared_errors(name: str, group: Any) -> Iterator[None]:
    """Checks of this rank's arguments. With FLASH_ATTN_MINI_CHECK=1 an error of one rank is an error on every rank."""
    try:
        yield
    except Exception as error:
        if compares_ranks():
            _gather(name, group, f"{type(error).__name__}: {error}", None)
        raise


def compare_ranks(name: str, group: Any, description: dict[str, str]) -> None:
    """Raise on every rank if one rank has an error or another description, which begins with the function's name."""
    of_ranks = _gather(name, group, None, {"function": name} | description)
    for rank, (error, _) in enumerate(of_ranks):
        if error is not None:
            raise ValueError(f"flash_attn_mini: {name} was called with wrong arguments on rank {rank}: {error}")
    first = of_ranks[0][1]
    for rank, (_, other) in enumerate(of_ranks):
        for what, value in first.items():
            if other[what] != value:
                raise ValueError(
                    f"flash_attn_mini: {what} of {name} differs between ranks: {_short(value)} on rank 0, "
                    f"{_short(other[what])} on rank {rank}; allowed: the same on every rank"
                )


def _gather(name: str, group: Any, error: str | None, description: dict[str, str] | None) -> list[Any]:
    gather = partial(transport.gather_objects, (error, description), group, f"{name}, comparison of the ranks")
    if not is_transformed():
        return gather()
    # Inside torch.func.grad, new tensors have no memory to send from. Another thread is outside of the transform.
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def gather_outside() -> list[Any]:
        if device is not None:
            torch.cuda.set_device(device)
        return gather()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(gather_outside).result()


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


def refuse_transforms(name: str, *tensors: Any) -> None:
    """Raise NotImplementedError under a transform of torch.func, for a tangent, and for a batch of gradients."""
    if is_transformed() or any(is_batch_of_gradients(x) for x in tensors):
        raise NotImplementedError(
            f"flash_attn_mini: {name} does not run under torch.func (grad, vmap, jvp and others) or with a batch of "
            "gradients (is_grads_batched); allowed: torch.autograd with one gradient"
        )
    refuse_forward_mode(tensors)


def refuse_second_derivative(name: str) -> None:
    """Raise NotImplementedError in a backward that records gradients."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"flash_attn_mini: {name} has no second derivative, so its backward does not run with create_graph=True; "
            "allowed: create_graph=False"
        )
