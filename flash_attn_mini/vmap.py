"""The vmap rules of the ops. Samples of equal length become one batch; other calls run once for each sample, and so do
calls whose attn_bias would have to be copied for that.

Dropout follows the argument ``randomness`` of torch.vmap: with "same" each sample is a call with the same rng_state,
with "different" each call draws one. csrc/api/ops.cpp gives a call with dropout an rng_state without elements. With
"different" it has a vmap dimension, so that the rule runs even if all samples have the same q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backends import extension
from .namespace import CUSTOM_OPS, qualified
from .options import Options
from .rng_state import draw_in_program
from .schemas import EQUAL_LENGTHS

Dims = tuple[int | None, ...]
SEQUENCES = len(EQUAL_LENGTHS)
OPTIONS = len(Options._fields)


def _per_sample(operator: Callable[..., Any], size: int, in_dims: Any, arguments: tuple[Any, ...]) -> Any:
    """The op once for each sample: results stacked along a new first dimension."""
    samples = []
    for i in range(size):
        sample = (x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(arguments, in_dims, strict=True))
        samples.append(operator(*sample))
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*samples, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _folded(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """``[size * batch, ...]`` of a tensor ``[batch, ...]`` with or without a vmap dimension."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _folded_per_head(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """An option ``[nheads]`` or ``[batch, nheads]`` as ``[size * batch, nheads]``; as it is where all share it."""
    if dim is None and x.ndim == 1:
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    if x.ndim == 2:
        x = x[:, None].expand(size, batch, x.shape[-1])
    return x.flatten(0, 1)


def _folded_ranges(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """key_ranges ``[1 or batch, ...]`` as ``[size * batch, ...]``; as they are where all share them."""
    if dim is None and x.shape[0] == 1:
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


class _Call:
    """The arguments of an op: tensors with a batch dimension, sequences, options, rng_state, and what follows."""

    def __init__(
        self, tensors: int, in_dims: Any, arguments: tuple[Any, ...], sequences: int = SEQUENCES, *, sums: bool = False
    ) -> None:
        """``sums``: the result is a gradient of attn_bias, which no two samples share."""
        self.arguments = list(arguments)
        self.dims = list(in_dims)
        self.tensors = tensors
        self.options = tensors + sequences
        self.rng_state = self.options + OPTIONS
        self.sums = sums
        self.is_varlen = sequences > 0 and arguments[tensors] is not None
        self.drops = arguments[self.options] > 0
        self.is_foldable = not self.is_varlen and self._can_fold_bias()

    def _sizes_of_sample(self, i: int) -> list[int]:
        sizes, dim = list(self.arguments[i].shape), self.dims[i]
        if dim is not None:
            del sizes[dim]
        return sizes

    def _batch(self) -> int:
        first = next(i for i in range(self.tensors) if self.arguments[i] is not None)
        return self._sizes_of_sample(first)[0]

    def _can_fold_bias(self) -> bool:
        """Whether a view of attn_bias has a batch dimension for all samples."""
        i = self.options + Options._fields.index("attn_bias")
        if self.arguments[i] is None:
            return True
        own, batch = self._sizes_of_sample(i)[0], self._batch()
        if self.dims[i] is None:  # all samples have the same
            return own == 1 and (batch == 1 or not self.sums)
        return own == batch

    def folded(self, size: int) -> list[Any]:
        """The arguments of one call for all samples of equal length."""
        folded = list(self.arguments)
        for i in range(self.tensors):
            folded[i] = _folded(self.arguments[i], self.dims[i], size)
        batch = self._batch()
        for i, name in enumerate(Options._fields, self.options):
            x = folded[i]
            if not isinstance(x, Tensor):
                continue
            if name == "attn_bias" and (self.sums or self.dims[i] is not None):
                folded[i] = _folded(x, self.dims[i], size)
            elif name == "key_ranges":
                folded[i] = _folded_ranges(x, self.dims[i], size, batch)
            elif name != "attn_bias":
                folded[i] = _folded_per_head(x, self.dims[i], size, batch)
        return folded


def _unfolded(results: tuple[Tensor | None, ...], size: int) -> Any:
    results = tuple(None if x is None else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
    return results, tuple(None if x is None else 0 for x in results)


def _forward(operator: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        call = _Call(tensors, in_dims, arguments)
        if call.drops and info.randomness == "same":
            rng_state = arguments[call.rng_state]
            if rng_state is None or rng_state.numel() == 0:
                inputs = [x for x in (*arguments[:tensors], rng_state) if x is not None]
                rng_state = draw_in_program(*inputs)  # an enclosing vmap sees the op
            call.arguments[call.rng_state], call.dims[call.rng_state] = rng_state, None
            results, dims = _per_sample(operator, info.batch_size, call.dims, tuple(call.arguments))
            out, softmax_lse, _, max_logits = results
            return (out, softmax_lse, rng_state.clone(), max_logits), (*dims[:2], None, dims[3])
        if call.drops or not call.is_foldable:
            return _per_sample(operator, info.batch_size, in_dims, arguments)
        return _unfolded(operator(*call.folded(info.batch_size)), info.batch_size)

    return rule


def _backward(operator: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        call = _Call(tensors, in_dims, arguments)
        if call.drops or not call.is_foldable:
            return _per_sample(operator, info.batch_size, in_dims, arguments)
        return _unfolded(operator(*call.folded(info.batch_size)), info.batch_size)

    return rule


def _attn_bias_backward(operator: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        call = _Call(6, in_dims, arguments, sequences=0, sums=True)

        def run(*arguments: Any) -> tuple[Tensor]:
            return (operator(*arguments),)

        if call.drops or not call.is_foldable:
            results, dims = _per_sample(run, info.batch_size, in_dims, arguments)
        else:
            results, dims = _unfolded(run(*call.folded(info.batch_size)), info.batch_size)
        return results[0], dims[0]

    return rule


def _refuse_kvcache(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "flash_attn_mini: torch.vmap does not map flash_attn_with_kvcache, which writes to its caches. Available: one "
        "call for the whole batch, with cache_batch_idx for the rows of the cache"
    )


if extension.MODULE is not None:
    for _name, _rule in {
        "fwd": _forward(CUSTOM_OPS.fwd, 3),
        "bwd": _backward(CUSTOM_OPS.bwd, 7),
        "packed_fwd": _forward(CUSTOM_OPS.packed_fwd, 2),
        "packed_bwd": _backward(CUSTOM_OPS.packed_bwd, 6),
        "attn_bias_bwd": _attn_bias_backward(CUSTOM_OPS.attn_bias_bwd),
        "fwd_kvcache": _refuse_kvcache,
    }.items():
        torch.library.register_vmap(qualified(_name), _rule)
