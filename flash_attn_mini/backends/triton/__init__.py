"""The Triton backend: whether it runs on a device.

The chains begin with the ops of ops.py: triton_fwd -> launch.forward -> flash_fwd_kernel; triton_bwd ->
launch_bwd.backward -> flash_bwd_dq_kernel, then flash_bwd_dkv_kernel; triton_attn_bias_bwd ->
launch_bwd_bias.bias_backward -> flash_bwd_bias_kernel; triton_fwd_kvcache -> kvcache.py. The launchers and kernels need
only torch and Triton, which is imported at the first call. Without the compiled extension, autograd.py has the
gradients, checks.py and checks_kvcache.py the checks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache

import torch

MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 4)  # TensorDescriptor, and autotuning results kept on disk


def unavailable_reason(device: torch.device) -> str | None:
    """None when this backend runs on ``device``, else one sentence that says why not. It needs no extension."""
    return missing_reason() or _device_reason(device)


def _device_reason(device: torch.device) -> str | None:
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
        return None
    if device.type != "cuda":
        return f"the triton backend needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the triton backend needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
    return None


@cache
def missing_reason() -> str | None:
    """None when a Triton is installed that the kernels can use, else one sentence that says why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name, of unknown version
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"the triton backend needs triton 3.4 or newer; version {version} is installed"
    return None
