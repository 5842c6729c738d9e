"""Finds the torch that the extension will be loaded beside: that of the environment installed into.

An isolated build hides it (pip puts a folder of its own on PYTHONPATH, whose sitecustomize takes site-packages away),
but the interpreter is the environment's own, so a child that ignores PYTHON* variables sees what users will see.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

INSTALL_HINT = (
    "No torch for {python}: flash_attn_mini is built against the torch of the environment it goes into. Run "
    "`pip install torch`, then `pip install --no-build-isolation .` (or name that environment's interpreter in "
    "FLASH_ATTN_MINI_PYTHON)."
)
_QUERY = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"


def target_python() -> str:
    return os.environ.get("FLASH_ATTN_MINI_PYTHON") or sys.executable


def find_torch() -> Path | None:
    """Folder of the torch package to build against; None when the target environment has none."""
    chosen = os.environ.get("FLASH_ATTN_MINI_PYTHON")
    spec = None if chosen else importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as empty:  # so that no ./torch is taken for the package
        answer = subprocess.run([target_python(), "-c", _QUERY], env=env, cwd=empty, capture_output=True, text=True)
    return Path(answer.stdout.strip()) if answer.returncode == 0 and answer.stdout.strip() else None


def import_path() -> None:
    """Makes `import torch` work in this process; ends it with a one-line message where there is no torch."""
    folder = find_torch()
    if folder is None:
        raise SystemExit(INSTALL_HINT.format(python=target_python()))
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))  # last: the build's own setuptools and ninja come first
