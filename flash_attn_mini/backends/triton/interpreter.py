"""Makes the interpreter of Triton 3.6 (TRITON_INTERPRET=1) work with numpy 2.4 and newer.

The interpreter keeps a scalar as an array of one element and turns loop bounds into Python integers with int(array),
which numpy 2.4 refuses. allow_loop_bounds is called once, before the first interpreted launch.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_original_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def allow_loop_bounds() -> None:
    """Let interpreted kernels loop between run-time bounds, whatever the version of numpy."""
    interpreter._patch_lang_tensor = _patch_lang_tensor
