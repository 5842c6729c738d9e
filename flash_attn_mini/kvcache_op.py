"""The custom op ``flash_attn_mini::_flash_attn_kvcache_forward``, which writes to the caches, and the way past it.

`flash_attn_with_kvcache` (kvcache.py) enters through `forward_kvcache_eager`. The op selects the backend and calls it;
torch.compile, export and opcheck see the op. It has no gradient: inputs may require one, and the backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import tracing
from .autograd import below_autograd, in_forward, needs_dispatcher, needs_grad, record, refuse_forward_mode
from .backends import TwoTensors, backend_of_op, extension, select_backend
from .backends.triton import autograd as without_extension
from .ops import library, lse_dtype
from .options import KvCache, Options

library.define(
    "_flash_attn_kvcache_forward(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, SymInt cache_seqlen, Tensor? cache_batch_idx,"
    " Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, float softmax_scale, bool causal,"
    " SymInt window_size_left, SymInt window_size_right, float softcap, bool rotary_interleaved, SymInt num_splits,"
    " SymInt split_keys, str? backend=None) -> (Tensor out, Tensor softmax_lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The backward of the op, which a compiled program may contain: it raises when it runs, not when it is traced.
library.define(
    "_flash_attn_kvcache_backward(Tensor dout, SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
FORWARD = torch.ops.flash_attn_mini._flash_attn_kvcache_forward.default
BACKWARD = torch.ops.flash_attn_mini._flash_attn_kvcache_backward.default
_NAMES = tuple(argument.name for argument in FORWARD._schema.arguments)


def forward_kvcache_eager(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> TwoTensors:
    """The op, without the dispatcher where possible: its Python kernels cost host time."""
    if extension.missing_reason() is not None:
        return without_extension.forward_kvcache(q, k_cache, v_cache, cache, options)
    new = [x for x in (cache.k, cache.v) if x is not None]
    if needs_dispatcher(q, k_cache, v_cache, *new):
        return _call_op(q, k_cache, v_cache, cache, options)
    differentiable = (q, cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    run = partial(_run_and_mark, q, k_cache, v_cache, cache, options)
    return _apply(run, *differentiable) if needs_grad(differentiable) else run()


def _call_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> TwoTensors:
    arguments = {**cache._asdict(), **options._asdict(), "q": q, "k_cache": k_cache, "v_cache": v_cache}
    return FORWARD(*(arguments[name] for name in _NAMES))  # type: ignore[no-any-return]


def _run_and_mark(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options
) -> TwoTensors:
    results = _run(q, k_cache, v_cache, cache, options)
    if cache.k is not None:
        _mark_as_written(k_cache, v_cache)
    return results


def _run(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache: KvCache, options: Options) -> TwoTensors:
    """Select the backend and call it."""
    backend = select_backend(q.device, options.backend)
    if tracing.enabled():
        tracing.trace("_flash_attn_kvcache_forward", q=q, k_cache=k_cache, v_cache=v_cache, backend=backend.name)
    return backend.forward_kvcache(q, k_cache, v_cache, cache, options)


def _mark_as_written(*caches: torch.Tensor) -> None:
    """Let autograd notice that the caches have changed; tensors made in inference mode have no version."""
    for cache in caches:
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)


# ---- autograd -------------------------------------------------------------------------------------------------------


class _KvCacheFunc(torch.autograd.Function):
    """The op with inputs that require a gradient. Inputs: the function that runs it, then these inputs or None."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], TwoTensors], *inputs: torch.Tensor | None) -> TwoTensors:
        """Run the op. Only the shapes are kept."""
        ctx.shapes = [None if x is None else x.shape for x in inputs]
        return run()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dsoftmax_lse: torch.Tensor) -> Any:
        """Call the op that raises."""
        needed = zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        return (None, *(BACKWARD(dout, shape) if is_needed else None for shape, is_needed in needed))


# _KvCacheFunc.apply without the layer that torch.func needs, which costs host time.
_apply: Callable[..., TwoTensors] = super(torch.autograd.Function, _KvCacheFunc).apply


def _refuse_gradients_of_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The check of csrc/checks_kvcache.cpp while a program is traced, which runs with detached caches."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.requires_grad:
            raise ValueError(
                f"flash_attn_mini: {name} requires a gradient; allowed: a KV cache that requires none, for example "
                f"{name}.detach()"
            )


def _autograd(*arguments: Any) -> Any:
    refuse_forward_mode(arguments)
    call = dict(zip(_NAMES, arguments, strict=False))  # the dispatcher leaves out trailing default values
    _refuse_gradients_of_caches(call["k_cache"], call["v_cache"])
    differentiable = tuple(call[name] for name in ("q", "k", "v", "rotary_cos", "rotary_sin"))
    if not needs_grad(differentiable):
        return below_autograd(FORWARD, *arguments)
    return record(_KvCacheFunc, partial(in_forward, FORWARD, *arguments), *differentiable)


def _count_writes(keyset: Any, *arguments: Any) -> Any:
    """The ADInplaceOrView kernel: marks the caches as written."""
    _, k_cache, v_cache, k, *_ = arguments
    if k is not None:
        _mark_as_written(k_cache, v_cache)
    return FORWARD.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)


def _backward(dout: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    raise NotImplementedError(
        "flash_attn_mini: no backend implements the backward of flash_attn_with_kvcache; backends that have it: none. "
        "Available: torch.no_grad(), or flash_attn_func for training"
    )


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "flash_attn_mini: torch.vmap does not map flash_attn_with_kvcache, which writes to its caches. Available: one "
        "call for the whole batch, with cache_batch_idx for the rows of the cache"
    )


# ---- the op itself --------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> TwoTensors:
    call = dict(zip(_NAMES, arguments, strict=False))
    call["backend"] = backend_of_op(call.get("backend"))
    cache = KvCache(*(call.pop(name) for name in KvCache._fields))
    q, k_cache, v_cache = (call.pop(name) for name in ("q", "k_cache", "v_cache"))
    return _run(q, k_cache, v_cache, cache, Options(dropout_p=0.0, **call))


def _forward_fake(q: torch.Tensor, *arguments: Any) -> TwoTensors:
    batch, seqlen_q, nheads, _ = q.shape
    return torch.empty_like(q), q.new_empty((batch, nheads, seqlen_q), dtype=lse_dtype(q))


def _backward_fake(dout: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return dout.new_empty(size)


for _dispatch_key in ("CPU", "CUDA"):
    library.impl("_flash_attn_kvcache_forward", _forward, _dispatch_key)
    library.impl("_flash_attn_kvcache_backward", _backward, _dispatch_key)
library.impl("_flash_attn_kvcache_forward", _autograd, "Autograd")
library.impl("_flash_attn_kvcache_forward", _count_writes, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("flash_attn_mini::_flash_attn_kvcache_forward", _forward_fake, lib=library)
torch.library.register_fake("flash_attn_mini::_flash_attn_kvcache_backward", _backward_fake, lib=library)
torch.library.register_vmap("flash_attn_mini::_flash_attn_kvcache_forward", _refuse_vmap, lib=library)
