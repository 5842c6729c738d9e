"""Triton's interpreter (TRITON_INTERPRET=1), in which the kernels are Python functions that run on any device.

The interpreter of Triton 3.6 keeps a scalar as an array of one element and makes loop bounds with int(array), which
NumPy 2.4 refuses. It also truncates float32 to bfloat16, where a GPU rounds to nearest. It replaces the functions of tl
again at each call of a device function, which takes a third of its time. This module corrects all three.

It also removes work that took 40 % of the time that is left: whether a sum or product of integers overflows, where the
answer is dropped; a list of all dtypes, to look up one; the type and the shape of each tensor, made anew.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)

if INTERPRETED:
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    _original_patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor

    _original_patch_lang = interpreter._patch_lang

    def _patch_lang(fn: Any) -> Any:
        """Replaces the functions of tl at the launch of a kernel, and not again in its device functions."""
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return _original_patch_lang(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = _patch_lang

    _original_convert_float = interpreter._convert_float

    def _convert_float(values: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if from_dtype == tl.float32 and to_dtype == tl.bfloat16:
            rounded = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return _original_convert_float(values, from_dtype, to_dtype, rounding_mode)

    interpreter._convert_float = _convert_float

    _builder = interpreter.interpreter_builder
    # Without `debug` the overflow checks raise nothing.
    _builder.options = dataclasses.replace(_builder.options, sanitize_overflow=_builder.options.debug)

    _original_np_dtype = interpreter._get_np_dtype
    _np_dtype_of_scalar = functools.cache(_original_np_dtype)

    def _get_np_dtype(dtype: Any) -> Any:
        return _original_np_dtype(dtype) if dtype.scalar.is_ptr() else _np_dtype_of_scalar(dtype.scalar)

    interpreter._get_np_dtype = _get_np_dtype

    _original_init_block_type = tl.core.block_type.__init__
    _block_types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(operator.index, shape))
        if key not in _block_types:
            _original_init_block_type(self, element_ty, shape)
            _block_types[key] = dict(vars(self))
        vars(self).update(_block_types[key])

    tl.core.block_type.__init__ = _init_block_type

    @functools.cache
    def _shape_and_numel(*sizes: int) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def _init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _shape_and_numel(*(type.shape if type.is_block() else ()))

    tl.core.tensor.__init__ = _init_tensor
