"""Triton's interpreter (TRITON_INTERPRET=1), in which the kernels are Python functions that run on any device.

The interpreter of Triton 3.6 keeps a scalar as an array of one element and makes loop bounds with int(array), which
NumPy 2.4 refuses. This module makes it work there.
"""

from __future__ import annotations

from typing import Any

from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)

if INTERPRETED:
    from triton.runtime import interpreter

    _original_patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
