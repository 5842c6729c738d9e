"""The build backend that pyproject.toml names: setuptools', which stops at once where the extension would lack torch.

pip asks for a wheel's requirements first, before it downloads dependencies. An sdist needs no torch, nor does a wheel
without the extension.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from . import selection, target_torch


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    if selection.wants_extension():
        target_torch.require_torch()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    if selection.wants_extension():
        target_torch.require_torch()
    return build_meta.get_requires_for_build_editable(config_settings)
