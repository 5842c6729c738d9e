"""``python -m flash_attn_mini`` prints the built kernels, the devices, and the backend that a call would take."""

from __future__ import annotations

import os
import platform

import torch

from . import __version__
from .backends import BACKENDS, ENVIRONMENT_VARIABLE, extension, select_backend


def _capability(arch: str) -> str:
    """An architecture of FLASH_ATTN_MINI_ARCHS as compute capability: 9.0a for 90a."""
    number = arch.rstrip("af")
    return f"{number[:-1]}.{arch[len(number) - 1 :]}"


def _built() -> list[str]:
    reason = extension.missing_reason()
    if reason is not None:
        return [f"built        nothing: {reason}", "             The triton backend runs without it."]
    info = extension.load().build_info()
    lines = [f"built        cpu backend, for torch {info['torch']}"]
    if info["arch_names"]:
        archs = ", ".join(map(_capability, info["arch_names"]))
        hdims, dtypes = ", ".join(map(str, info["hdims"])), ", ".join(info["dtypes"])
        lines.append(f"             CUDA kernels for compute capability {archs}; head dims {hdims}; {dtypes}")
    else:
        lines.append("             no CUDA kernels")
    return lines


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _describe(device: torch.device) -> list[str]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        title = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    else:
        title = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    lines = [f"{device!s:<13}{title}"]
    for name, backend in BACKENDS.items():
        lines.append(f"  {name:<11}{backend.unavailable_reason(device) or 'available'}")
    try:
        lines.append(f"  a call takes {select_backend(device).name}")
    except (RuntimeError, ValueError) as error:
        lines.append(f"  a call raises {type(error).__name__}: {error}")
    return lines


def main() -> None:
    """Print the report."""
    print(f"flash_attn_mini {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print("\n".join(_built()))
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    if forced:
        print(f"{ENVIRONMENT_VARIABLE}={forced}")
    for device in _devices():
        print("\n".join(_describe(device)))


if __name__ == "__main__":
    main()
