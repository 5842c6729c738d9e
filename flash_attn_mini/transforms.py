"""Detects what surrounds a call: torch.func transforms, dispatch modes, batches of gradients, tangents, autocast.

PyTorch has no public Python function for the first three. The extension reads them through public C++ headers. Without
the extension the functions return the safe answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from .backends import extension


def is_transformed() -> bool:
    """Whether torch.func.grad, vmap or another transform is active."""
    return extension.MODULE is not None and bool(extension.MODULE.is_transformed())


def may_keep_tensors() -> bool:
    """Whether a new tensor is an ordinary one: no transform and no dispatch mode such as FakeTensorMode is active."""
    return extension.MODULE is not None and not extension.MODULE.has_modes() and not is_transformed()


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether an operator on the tensors may bypass PyTorch's dispatcher: no transform, no mode, no tangent."""
    return may_keep_tensors() and all(forward_ad.unpack_dual(x).tangent is None for x in tensors)


def computes_values(x: torch.Tensor) -> bool:
    """Whether an operator on x computes values: x is not fake or meta, and no FakeTensorMode is active."""
    try:
        return x.detach().new_empty(0).untyped_storage().device.type != "meta"
    except NotImplementedError:  # a tensor of torch.func has no storage
        return extension.MODULE is None or not extension.MODULE.has_modes()


def is_batch_of_gradients(x: Any) -> bool:
    """Whether x comes from is_grads_batched or vectorize, whose vmap is not a transform of torch.func."""
    return isinstance(x, torch.Tensor) and extension.MODULE is not None and bool(extension.MODULE.is_batched(x))


def refuse_forward_mode(tensors: tuple[Any, ...]) -> None:
    """Raise NotImplementedError if an argument is a tensor with a tangent. torch.compile raises its own error."""
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_attn_mini: forward-mode automatic differentiation is not supported; backends that have it: none"
        )


def autocast(x: torch.Tensor) -> torch.Tensor:
    """x, cast in an autocast region as PyTorch casts the inputs of scaled_dot_product_attention."""
    device_type = x.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type)) if x.is_floating_point() and x.dtype != torch.float64 else x
