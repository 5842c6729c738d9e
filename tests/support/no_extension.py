"""A plugin of pytest (``-p tests.support.no_extension``): in this process the compiled extension cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

NAME = "flash_attn_mini._C"


class _Refuses(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == NAME:
            raise ModuleNotFoundError(f"No module named '{NAME}'", name=NAME)


def pytest_configure() -> None:
    assert NAME not in sys.modules
    sys.meta_path.insert(0, _Refuses())
