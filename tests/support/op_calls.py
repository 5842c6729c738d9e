"""Calls of the custom ops: their positional arguments from keyword options, records of calls, real and fake results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn_mini  # noqa: F401  # defines the ops
from flash_attn_mini.ops import EQUAL_LENGTHS
from flash_attn_mini.options import KvCache, Options, Sequences

from .cases import options_of

FWD = torch.ops.flash_attn_mini.fwd.default
BWD = torch.ops.flash_attn_mini.bwd.default
PACKED_FWD = torch.ops.flash_attn_mini.packed_fwd.default
PACKED_BWD = torch.ops.flash_attn_mini.packed_bwd.default
ATTN_BIAS_BWD = torch.ops.flash_attn_mini.attn_bias_bwd.default
FWD_KVCACHE = torch.ops.flash_attn_mini.fwd_kvcache.default

Arguments = tuple[Any, ...]
SCALE = 0.125


def make_options(window_size: tuple[int, int] = (-1, -1), **given: Any) -> Options:
    """Options of an op. The others have their defaults, softmax_scale is ``SCALE``."""
    left, right = window_size
    causal = given.get("causal", False)
    values: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": False, "softcap": 0.0}
    values.update(alibi_slopes=None, window_size_left=left, window_size_right=0 if causal else right)
    return Options(**{**values, **given})


def options_of_case(case: Any, device: str, **given: Any) -> dict[str, Any]:
    """The options of a case (also a VarlenCase) as keywords of the functions below, with the scale ``SCALE``."""
    return {**options_of(case, device), "softmax_scale": SCALE, **given}


def fwd_arguments(
    q: Tensor, k: Tensor, v: Tensor, *, sequences: Sequences | None = None, rng_state: Any = None, **options: Any
) -> Arguments:
    """Arguments of FWD."""
    return (q, k, v, *(sequences or EQUAL_LENGTHS), *make_options(**options), rng_state)


def bwd_arguments(
    *tensors: Tensor,
    dsoftmax_lse: Tensor | None = None,
    sequences: Sequences | None = None,
    rng_state: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    **options: Any,
) -> Arguments:
    """Arguments of BWD; ``tensors``: dout, q, k, v, out and softmax_lse."""
    lengths = sequences or EQUAL_LENGTHS
    return (*tensors, dsoftmax_lse, *lengths, *make_options(**options), rng_state, list(output_mask))


def attn_bias_bwd_arguments(*tensors: Tensor, rng_state: Tensor | None = None, **options: Any) -> Arguments:
    """Arguments of ATTN_BIAS_BWD; ``tensors``: dout, q, k, v, softmax_lse and softmax_d."""
    return (*tensors, *make_options(**options), rng_state)


def packed_fwd_arguments(
    q: Tensor | None, packed: Tensor, *, sequences: Sequences | None = None, rng_state: Any = None, **options: Any
) -> Arguments:
    """Arguments of PACKED_FWD."""
    return (q, packed, *(sequences or EQUAL_LENGTHS), *make_options(**options), rng_state)


def packed_bwd_arguments(
    *tensors: Tensor | None,
    dsoftmax_lse: Tensor | None = None,
    sequences: Sequences | None = None,
    rng_state: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True),
    **options: Any,
) -> Arguments:
    """Arguments of PACKED_BWD; ``tensors``: dout, q, packed, out and softmax_lse."""
    lengths = sequences or EQUAL_LENGTHS
    return (*tensors, dsoftmax_lse, *lengths, *make_options(**options), rng_state, list(output_mask))


NO_CACHE_OPTIONS = KvCache(
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_seqlen=-1,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    rotary_interleaved=True,
    num_splits=0,
    split_keys=0,
)


def kvcache_arguments(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Arguments:
    """Arguments of FWD_KVCACHE; ``given``: fields of `KvCache` and options."""
    cache = NO_CACHE_OPTIONS._replace(**{name: given.pop(name) for name in KvCache._fields if name in given})
    return (q, k_cache, v_cache, *cache, *make_options(**given))


def check_call(op: Any, arguments: Arguments) -> None:
    """The checks of a call. With ``backend="triton"`` they precede the kernels, which may lack a device to run on."""
    try:
        op(*arguments)
    except RuntimeError as error:
        if type(error) is not RuntimeError or "the triton backend cannot run on" not in str(error):
            raise


# ---- schemas and results ------------------------------------------------------------------------------------------


def argument_names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def result_names(op: Any) -> list[str]:
    return [result.name for result in op._schema.returns]


class Recording(TorchDispatchMode):
    """Records the operators that pass the dispatcher, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def count(self, op: Any) -> int:
        return [func for func, _ in self.calls].count(op)

    def arguments(self, *ops: Any) -> list[dict[str, Any]]:
        """The arguments of the calls of one of the ops, by name."""
        return [dict(zip(argument_names(op), args, strict=True)) for op, args in self.calls if op in ops]


def assert_same_metadata(real: Sequence[Tensor | None], fake: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Shape, strides, dtype and device agree, or both are None."""
    for name, r, f in zip(names, real, fake, strict=True):
        if r is None or f is None:
            assert r is f is None, name
        else:
            assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device), name


def assert_fake_is_like_real(op: Any, arguments: Arguments) -> Any:
    """The fake results of an op look like the real ones, which are returned."""
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    assert_same_metadata(real, fake, result_names(op))
    return real
