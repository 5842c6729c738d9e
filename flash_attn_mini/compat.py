"""Makes `import flash_attn` return this package, for code that imports the official one and cannot be changed.

    import flash_attn_mini.compat

    flash_attn_mini.compat.install()

From then on these imports of the running process return the modules of this package: ``flash_attn``,
``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding``, ``flash_attn.layers``, ``flash_attn.layers.rotary``,
and ``flash_attn_2_cuda`` if the extension was built. Any other module of the official package raises
ModuleNotFoundError, even if the official package is installed: the two packages are never mixed.

Version checks see `VERSION`, the official release with this API: in ``flash_attn.__version__``, and as the metadata of
a distribution ``flash-attn``, which transformers' ``is_flash_attn_2_available`` reads. transformers caches the result,
so call `install` first. The result is False on machines without a GPU; use `flash_attn_mini.integrations.transformers`
there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .backends import extension
from .namespace import PACKAGE

VERSION = "2.8.3"

_this = sys.modules[PACKAGE]

_EXTENSION = "flash_attn_2_cuda"
_MODULES = ("flash_attn_interface", "bert_padding", "layers", "layers.rotary")


class _Distribution(importlib.metadata.Distribution):
    """The distribution ``flash-attn`` that importlib.metadata finds."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": f"flash_attn\n{_EXTENSION}\n",
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        raise NotImplementedError("flash_attn_mini.compat: this distribution has no files")


class _Finder(MetaPathFinder):
    """Finds one distribution. It finds no modules, because sys.modules already has them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = None if context is None else context.name
        return [_Distribution()] if name is None or name.lower().replace("-", "_") == "flash_attn" else []


class _Installed:
    """The modules that `install` added, and those that it removed."""

    def __init__(self, modules: dict[str, ModuleType], put_aside: dict[str, ModuleType]) -> None:
        self.modules = modules
        self.put_aside = put_aside
        self.finder = _Finder()


_installed: _Installed | None = None


def install(force: bool = False) -> None:
    """Make ``import flash_attn`` and its modules return this package, in this process. Prints a line to stderr.

    Modules that imported the official package earlier keep it. A second call does nothing.

    Args:
        force: Also replace an installed official package.

    Raises:
        RuntimeError: When the official package is installed, or imported, and `force` is False.

    Example:
        >>> import flash_attn_mini.compat
        >>> flash_attn_mini.compat.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'flash_attn_mini.flash_attn_interface'
        >>> flash_attn_mini.compat.uninstall()
    """
    global _installed
    if _installed is not None:
        return
    official = _official()
    if official is not None and not force:
        raise RuntimeError(
            f"flash_attn_mini.compat: the official package is installed ({official}): 'import flash_attn' gives it. "
            "install(force=True) replaces it in this process; pip uninstall flash-attn removes it"
        )
    modules = _modules()
    put_aside = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours_to_name(name)}
    sys.modules.update(modules)
    _installed = _Installed(modules, put_aside)
    sys.meta_path.insert(0, _installed.finder)
    names = "flash_attn" if _EXTENSION not in modules else f"flash_attn and {_EXTENSION}"
    instead = "" if official is None else f" instead of {official}"
    print(
        f"[flash_attn_mini] compat: import {names} ({VERSION}) now gives flash_attn_mini {_this.__version__}"
        f"{instead}, in this process",
        file=sys.stderr,
    )


def uninstall() -> None:
    """Undo `install`: the next ``import flash_attn`` returns the official package, or fails."""
    global _installed
    if _installed is None:
        return
    sys.meta_path.remove(_installed.finder)
    for name in [name for name in sys.modules if _is_ours_to_name(name)]:
        del sys.modules[name]
    sys.modules.update(_installed.put_aside)
    _installed = None


def _official() -> str | None:
    """The file of the official package; None if it is not installed."""
    for name in ("flash_attn", _EXTENSION):
        if name in sys.modules:
            return getattr(sys.modules[name], "__file__", None) or f"{name} in sys.modules"
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:  # a folder without code has no origin
            return spec.origin
    return None


def _is_ours_to_name(module: str) -> bool:
    return module.partition(".")[0] in ("flash_attn", _EXTENSION)


def _modules() -> dict[str, ModuleType]:
    """The modules for sys.modules. ``flash_attn`` is a new module with the official version; the others are ours."""
    package = ModuleType("flash_attn", _this.__doc__)
    package.__spec__ = ModuleSpec("flash_attn", None, origin=_this.__file__, is_package=True)
    package.__file__ = _this.__file__
    package.__path__ = []
    package.__version__ = VERSION  # type: ignore[attr-defined]
    functions = [name for name in _this.__all__ if name.startswith("flash_attn_")]
    package.__all__ = functions  # type: ignore[attr-defined]
    for name in functions:
        setattr(package, name, getattr(_this, name))

    modules = {"flash_attn": package}
    for name in _MODULES:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        modules[f"flash_attn.{name}"] = module
        if "." not in name:
            setattr(package, name, module)
    if extension.missing_reason() is None:
        modules[_EXTENSION] = extension.load()
    return modules
