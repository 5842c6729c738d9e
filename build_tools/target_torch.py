"""Finds torch, and the wheel of kernels, in the environment that the extension is installed into.

An isolated build hides it: pip puts a folder on PYTHONPATH whose sitecustomize removes site-packages. The interpreter
is still the environment's own, so a child process without PYTHON* variables finds the environment's packages.
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
_QUERY = (
    "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.submodule_search_locations[0] if s else '')"
)


def target_python() -> str:
    chosen = os.environ.get("FLASH_ATTN_MINI_PYTHON") or sys.executable
    return os.path.abspath(chosen) if os.sep in chosen else chosen  # a bare name is looked up on PATH


def find_package(name: str) -> Path | None:
    """Folder of a package of the target environment, such as torch; None when there is none.

    Raises:
        SystemExit: If FLASH_ATTN_MINI_PYTHON cannot be run.
    """
    chosen = os.environ.get("FLASH_ATTN_MINI_PYTHON")
    spec = None if chosen else importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as empty:  # a folder ./torch would be found as the package
        command = [target_python(), "-c", _QUERY, name]
        try:
            answer = subprocess.run(command, env=env, cwd=empty, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            variable = "FLASH_ATTN_MINI_PYTHON" if os.environ.get("FLASH_ATTN_MINI_PYTHON") else "the interpreter"
            what = f"{variable} is {command[0]!r}; allowed: a Python interpreter"
            raise SystemExit(f"{what}. It cannot be run: {getattr(error, 'strerror', error)}") from None
    return Path(answer.stdout.strip()) if answer.stdout.strip() else None


def require_torch() -> Path:
    """Folder of the torch package; ends the process with one line where there is none."""
    folder = find_package("torch")
    if folder is None:
        raise SystemExit(INSTALL_HINT.format(python=target_python()))
    return folder


def import_path() -> None:
    """Makes `import torch` work in this process."""
    folder = require_torch()
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))  # last: the build's own setuptools and ninja come first
