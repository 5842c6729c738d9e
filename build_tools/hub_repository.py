"""Writes this package, without compiled code, as a repository that `kernels.get_kernel` of Hugging Face loads.

    python -m build_tools.hub_repository OUT_DIR

The result has a folder `build/VARIANT` for each variant: the files of the package and `metadata.json`, whose id becomes
the name under which the copy is imported. docs/building.md says how to publish it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flash_attn_mini"
NAME = PACKAGE.replace("_", "-")
VERSION = 1  # the branch v1 of the repository; a change that breaks callers needs a new one
VARIANTS = ("cuda", "cpu")  # torch-cuda for CUDA builds of PyTorch, torch-cpu for builds without a GPU

CARD = f"""---
library_name: kernels
license: bsd-3-clause
tags:
- kernels
---

# {NAME}

Exact attention with FlashAttention-2's functions: Triton kernels for NVIDIA GPUs of compute capability 8.0 and later.
"""


def package_files() -> list[Path]:
    """The files of a variant, relative to the package."""
    folder = ROOT / PACKAGE
    return sorted(path.relative_to(folder) for path in [*folder.rglob("*.py"), folder / "py.typed"])


def digest(files: list[Path]) -> str:
    """12 hexadecimal digits that differ when a file differs, so that two versions have two names in one process."""
    hashed = hashlib.sha256()
    for path in files:
        content = (ROOT / PACKAGE / path).read_bytes()
        hashed.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:12]


def write(out: Path) -> None:
    """Write the repository.

    Raises:
        SystemExit: If `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"OUT_DIR is {str(out)!r}, which exists; allowed: a new or an empty folder")
    files = package_files()
    version = digest(files)
    for variant in VARIANTS:
        folder = out / "build" / f"torch-{variant}"
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / PACKAGE / path, folder / path)
        metadata = {
            "id": f"_{PACKAGE}_{variant}_{version}",
            "name": NAME,
            "version": VERSION,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": variant},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "README.md").write_text(CARD)
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m build_tools.hub_repository", description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="a new or an empty folder")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
