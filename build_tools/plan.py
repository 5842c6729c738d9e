"""What an extension gets: the kernels of an installed wheel, kernels compiled by nvcc, or the CPU backend only."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import kernel_wheel, kernels, selection
from .kernel_wheel import PACKAGE, KernelWheel
from .selection import Selection

VARIABLE = "FLASH_ATTN_MINI_KERNELS"
ONLY_CPU = Selection((), (), ())


@dataclass(frozen=True)
class Plan:
    """The kernels of an extension, where they come from, and a line that says why."""

    selection: Selection
    wheel: KernelWheel | None
    message: str


def plan(torch_version: str, torch_cuda: str | None) -> Plan:
    """The kernels for a torch and the CUDA version that it was built with, None for a torch without CUDA.

    Raises:
        SystemExit: If the environment asks for kernels that cannot be had here, or an installed wheel does not fit.
    """
    source = os.environ.get(VARIABLE, "")
    if source not in ("", "wheel", "nvcc"):
        raise SystemExit(f"{VARIABLE} is {source!r}; allowed: wheel, nvcc, or {VARIABLE} unset")
    asked = selection.asked_archs()
    if asked == ():
        return Plan(ONLY_CPU, None, "FLASH_ATTN_MINI_ARCHS=none, so only the CPU backend is built")
    insists = [name for name in ("FLASH_ATTN_MINI_ARCHS", VARIABLE) if os.environ.get(name)]
    if torch_cuda is None:
        if insists:
            raise SystemExit(
                f"{insists[0]} is {os.environ[insists[0]]!r}, but torch {torch_version} has no CUDA; allowed: a CUDA "
                f"build of torch, or {insists[0]} unset for the CPU backend only"
            )
        return Plan(ONLY_CPU, None, f"torch {torch_version} has no CUDA, so only the CPU backend is built")
    wheel = None if source == "nvcc" else kernel_wheel.installed()
    if wheel is not None:
        check_fits(wheel, torch_version, torch_cuda)
        return Plan(wheel.selection, wheel, f"the CUDA kernels are those of {PACKAGE} {wheel.version}")
    if source == "wheel":
        raise SystemExit(f"{VARIABLE} is 'wheel', but {PACKAGE} is not installed: {_how_to_install(torch_cuda)}")
    if kernels.find_cuda_home() is None and not insists:
        return Plan(
            ONLY_CPU,
            None,
            f"there is neither nvcc nor {PACKAGE}, so only the CPU backend is built, and GPUs take the Triton backend. "
            f"For the CUDA kernels {_how_to_install(torch_cuda)}, or install the CUDA toolkit; then install again",
        )
    kernels.cuda_home()  # raises where there is none
    chosen = Selection(selection.select_archs(), selection.select_hdims(), selection.select_dtypes())
    return Plan(chosen, None, "the CUDA kernels are compiled with nvcc")


def check_fits(wheel: KernelWheel, torch_version: str, torch_cuda: str) -> None:
    """SystemExit unless the wheel has what these host files, this torch and the environment need."""
    name, remedy = f"{PACKAGE} {wheel.version}", f"{_how_to_install(torch_cuda)}, or compile with {VARIABLE}=nvcc"
    if wheel.cuda.split(".")[0] != torch_cuda.split(".")[0]:
        raise SystemExit(f"{name} is for CUDA {wheel.cuda}, but torch {torch_version} for CUDA {torch_cuda}: {remedy}")
    if wheel.interface != kernel_wheel.interface_version(wheel.selection, wheel.cuda):
        raise SystemExit(f"{name} was built from a version of flash_attn_mini that does not fit this one: {remedy}")
    for variable, asked, has in (
        ("FLASH_ATTN_MINI_ARCHS", selection.asked_archs() or (), wheel.selection.archs),
        ("FLASH_ATTN_MINI_HDIMS", selection.select_hdims(), wheel.selection.hdims),
        ("FLASH_ATTN_MINI_DTYPES", selection.select_dtypes(), wheel.selection.dtypes),
    ):
        if os.environ.get(variable) and not set(asked) <= set(has):
            lists = ";".join(map(str, asked)), ", ".join(map(str, has))
            raise SystemExit(f"{variable} is {lists[0]!r}, but {name} has {lists[1]}: {remedy}")


def _how_to_install(torch_cuda: str) -> str:
    return f"install the {PACKAGE} of this version for CUDA {torch_cuda.split('.')[0]} (docs/building.md)"
