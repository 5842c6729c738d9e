"""``python -m flash_attn_mini`` prints the built kernels, the devices, and the backend that a call would take.

``python -m flash_attn_mini --sdpa script.py args…`` runs a script with our kernels under PyTorch's
scaled_dot_product_attention (sdpa.py), and prints on stderr how many calls ran on which kernels.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys

import torch

from . import __version__, sdpa
from .backends import BACKENDS, ENVIRONMENT_VARIABLE, extension, select_backend


def _capability(arch: str) -> str:
    """An architecture of FLASH_ATTN_MINI_ARCHS as compute capability: 9.0a for 90a."""
    number = arch.rstrip("af")
    return f"{number[:-1]}.{arch[len(number) - 1 :]}"


def _built() -> list[str]:
    reason = extension.missing_reason()
    if reason is not None:
        others = "NVIDIA GPUs take the triton backend" + ("" if extension.IS_BUILT else ", CPU tensors the reference")
        return [f"built        nothing: {reason}", f"             Without it {others}."]
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


def report() -> None:
    """Print the built kernels, the devices, and the backend that a call would take."""
    print(f"flash_attn_mini {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print("\n".join(_built()))
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    if forced:
        print(f"{ENVIRONMENT_VARIABLE}={forced}")
    for device in _devices():
        print("\n".join(_describe(device)))


def run_with_sdpa(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script arguments`` does, with our kernels under PyTorch's attention."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    sdpa.activate()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        print("\n".join(_counted()), file=sys.stderr)


def _counted() -> list[str]:
    counts = sdpa.counts()
    if not counts:
        return ["[flash_attn_mini] sdpa: no call of PyTorch's fused attention"]
    return [
        f"[flash_attn_mini] sdpa: {name}: {count.ours} calls on flash_attn_mini, {count.pytorch} on PyTorch"
        for name, count in counts.items()
    ]


def main() -> None:
    """Print the report, or run a script."""
    parser = argparse.ArgumentParser(prog="python -m flash_attn_mini", description="Print what was built and can run.")
    parser.add_argument(
        "--sdpa",
        nargs=argparse.REMAINDER,
        metavar=("script.py", "args"),
        help="run a script with our kernels under torch.nn.functional.scaled_dot_product_attention",
    )
    given = parser.parse_args()
    if given.sdpa is None:
        report()
    elif not given.sdpa:
        parser.error("--sdpa needs a script; allowed: --sdpa script.py args...")
    else:
        run_with_sdpa(given.sdpa[0], given.sdpa[1:])


if __name__ == "__main__":
    main()
