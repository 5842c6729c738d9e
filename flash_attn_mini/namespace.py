"""The name of this copy of the package, and the namespace of its custom ops.

A process may have several copies, each imported under a different name: the installed package, and repositories of
Hugging Face's kernels (build_tools/hub_repository.py). Names that PyTorch and transformers keep for the whole process
derive from the name of the copy.
"""

from __future__ import annotations

from typing import Any

import torch

INSTALLED = "flash_attn_mini"  # the name of the installed package, and the namespace of the extension's ops

PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = PACKAGE.replace(".", "_")
MAY_HAVE_EXTENSION = PACKAGE == INSTALLED
CUSTOM_OPS: Any = getattr(torch.ops, NAMESPACE)


def qualified(name: str) -> str:
    """The name of an op as torch.library takes it."""
    return f"{NAMESPACE}::{name}"
