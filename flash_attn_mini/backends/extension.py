"""The compiled extension ``flash_attn_mini._C``, shared by the backends that it serves."""

from __future__ import annotations

import importlib
from types import ModuleType

_module: ModuleType | None = None
_error: str | None = None

try:
    _module = importlib.import_module("flash_attn_mini._C")
except ImportError as error:
    _error = f"the extension flash_attn_mini._C does not load ({error}); build it with: pip install ."


def missing_reason() -> str | None:
    """None when the extension is loaded, else why not and what to do."""
    return _error


def load() -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: If it is not built or does not load.
    """
    if _module is None:
        raise RuntimeError(f"flash_attn_mini: {_error}")
    return _module
